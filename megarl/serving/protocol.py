"""OpenAI's wire format: the parameters of a request, and its answer as one object or as a stream of chunks."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.serving.conversation import Conversation
from megarl.serving.refusal import RequestError
from megarl.serving.sessions import Answer
from megarl.types import SamplingSettings

if TYPE_CHECKING:
    from numpy.typing import NDArray

_CHUNK_CHARACTERS = 256
"""Characters in one chunk of a streamed answer."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "top_logprobs": (0,),
    "functions": ([],),
    "chat_template_kwargs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "structured_outputs": (),
}
"""Request fields that are refused, because they would change the sampled distribution or the number of answers. The
listed values are accepted, because they change nothing.
"""

_RANGES = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 10**9),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 2.0),
}
"""Accepted ranges of sampling parameters, for requests whose values are not overridden by the recipe."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Sampling parameters and form of the answer that a request asks for.

    `overridden` names the fields replaced by the recipe's values.
    """

    sampling: SamplingSettings
    overridden: tuple[str, ...]
    is_streamed: bool
    has_usage_chunk: bool
    has_logprobs: bool

    @classmethod
    def read(cls, body: Mapping[str, Any], recipe: SamplingSettings, *, is_training: bool) -> Asked:
        """Read the parameters of a request.

        Raises RequestError for invalid values, and for fields that would change the sampled distribution.
        """
        # Refused, not ignored: training assumes that tokens come from the recipe's distribution.
        for name, neutral in NEUTRAL.items():
            if body.get(name) is not None and body[name] not in neutral:
                raise RequestError(
                    f"{name} = {body[name]!r:.80}: is not supported, as it would change the samples; remove it",
                    param=name,
                    code="unsupported_parameter",
                )
        sampling, overridden = _sampling(body, recipe, is_training=is_training)
        options = body.get("stream_options")
        return cls(
            sampling,
            overridden,
            is_streamed=bool(body.get("stream")),
            has_usage_chunk=isinstance(options, Mapping) and bool(options.get("include_usage")),
            has_logprobs=body.get("logprobs") not in (None, False),
        )


def _sampling(
    body: Mapping[str, Any], recipe: SamplingSettings, *, is_training: bool
) -> tuple[SamplingSettings, tuple[str, ...]]:
    """Return a request's sampling parameters, and the names of fields that the recipe overrides.

    In training, clients may set only length limits and stop strings, within the recipe's limits.
    """
    sampling, overridden = recipe, []
    for name, (low, high) in _RANGES.items():
        if (value := body.get(name)) is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise RequestError(f"{name} = {value!r:.40}: give a number from {low:g} to {high:g}", param=name)
        if name == "top_k":
            # OpenAI-compatible servers use -1 for no limit, megarl 0.
            value = max(int(value), 0)
        if value != getattr(recipe, name):
            if is_training:
                overridden.append(name)
            else:
                sampling = replace(sampling, **{name: value})
    if body.get("seed") is not None:
        # Sessions derive seeds from the attempt, so that a run can be repeated.
        overridden.append("seed")
    # max_tokens is OpenAI's deprecated name; many clients still send it.
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    if limit is not None:
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise RequestError(f"max_tokens = {limit!r:.40}: give a number above 0", param="max_tokens")
        sampling = replace(sampling, max_new_tokens=min(limit, recipe.max_new_tokens))
    if stop := body.get("stop"):
        stops = [stop] if isinstance(stop, str) else stop
        if not isinstance(stops, list) or not all(isinstance(text, str) and text for text in stops):
            raise RequestError("stop: must be a text or a list of texts", param="stop")
        sampling = replace(sampling, stop=tuple(dict.fromkeys((*recipe.stop, *stops))))
    return sampling, tuple(overridden)


def read_conversation(body: Mapping[str, Any]) -> Conversation:
    """Read the conversation of a chat request. Raises RequestError if it is invalid, or its last message is the
    assistant's.
    """
    tools = body.get("tools")
    # The model must not see the tools then.
    if body.get("tool_choice") == "none":
        tools = None
    conversation = Conversation.read(body.get("messages"), tools)
    if conversation.messages[-1]["role"] == "assistant":
        raise RequestError("messages: the last message has role assistant; it must have another role", param="messages")
    return conversation


def read_prompt(body: Mapping[str, Any]) -> str | NDArray[np.int32]:
    """Read the prompt of a completion request: text, or token ids [prompt]. Raises RequestError if it is invalid."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        [prompt] = prompt
    if isinstance(prompt, str) and prompt:
        return prompt
    # `type is int` excludes bool. 2^31 is the limit of int32.
    if isinstance(prompt, list) and prompt and all(type(token) is int and 0 <= token < 1 << 31 for token in prompt):
        return np.array(prompt, np.int32)
    raise RequestError("prompt: must be one text or one list of token ids, not empty", param="prompt")


@dataclass(frozen=True, slots=True)
class Reply:
    """Writer of the answer to one request. `tokens` are the texts of the sampled tokens, if log-probs are requested."""

    name: str
    model: str
    is_chat: bool
    created: int

    @classmethod
    def new(cls, name: str, model: str, *, is_chat: bool) -> Reply:
        """Create a reply whose id is made from the name of its model call."""
        return cls(f"{'chatcmpl' if is_chat else 'cmpl'}-{name}", model, is_chat, int(time.time()))

    def whole(self, answer: Answer, tokens: Sequence[str] | None) -> dict[str, Any]:
        """Return the complete answer as one JSON object."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": answer.finish_reason}
        if self.is_chat:
            choice["message"] = _message(answer)
        else:
            choice["text"] = answer.text
        choice["logprobs"] = None if tokens is None else self._logprobs(answer, tokens)
        kind = "chat.completion" if self.is_chat else "text_completion"
        return self._object(kind, [choice]) | {"usage": _usage(answer)}

    def chunks(self, answer: Answer, tokens: Sequence[str] | None, *, has_usage: bool) -> Iterator[dict[str, Any]]:
        """Yield the answer as JSON objects of a stream. A tool call is sent in two chunks: name, then arguments."""
        logprobs = None if tokens is None else self._logprobs(answer, tokens)
        if self.is_chat:
            yield self._chunk({"role": "assistant", "content": ""}, logprobs=logprobs)
            # The answer is complete before the stream starts: tool calls can be parsed only at its end.
            for text in _pieces(answer.reasoning or ""):
                yield self._chunk({"reasoning_content": text})
            for text in _pieces(answer.text):
                yield self._chunk({"content": text})
            for index, (call_id, name, arguments) in enumerate(answer.calls):
                function = {"name": name, "arguments": ""}
                yield self._chunk(
                    {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
                )
                for text in _pieces(arguments):
                    yield self._chunk({"tool_calls": [{"index": index, "function": {"arguments": text}}]})
            yield self._chunk({}, finish_reason=answer.finish_reason)
        else:
            for text in _pieces(answer.text):
                yield self._chunk(text)
            yield self._chunk("", finish_reason=answer.finish_reason, logprobs=logprobs)
        if has_usage:
            yield self._object(self._chunk_kind, []) | {"usage": _usage(answer)}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.is_chat else "text_completion"

    def _chunk(self, delta: Any, *, finish_reason: str | None = None, logprobs: Any = None) -> dict[str, Any]:
        choice = {"index": 0, "delta" if self.is_chat else "text": delta, "finish_reason": finish_reason}
        return self._object(self._chunk_kind, [choice | {"logprobs": logprobs}])

    def _object(self, kind: str, choices: list[Any]) -> dict[str, Any]:
        return {"id": self.name, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def _logprobs(self, answer: Answer, tokens: Sequence[str]) -> dict[str, Any]:
        """Return the log-probs of the sampled tokens in OpenAI's form."""
        values = answer.call.completion.rollout_logprobs.tolist()
        if not self.is_chat:
            return {"tokens": list(tokens), "token_logprobs": values, "top_logprobs": None, "text_offset": None}
        return {
            "content": [
                {"token": token, "logprob": value, "bytes": list(token.encode()), "top_logprobs": []}
                for token, value in zip(tokens, values, strict=True)
            ]
        }


def finite_reward(value: object) -> float | None:
    """Return a reward sent by a client or printed by a program, as a float; None: it is not a finite number."""
    # JSON's true is a bool, which Python counts as an int.
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # JSON's integers have no bound
        return None
    return number if math.isfinite(number) else None


def models(names: Sequence[str]) -> dict[str, Any]:
    """Return OpenAI's list of the served models."""
    return {"object": "list", "data": [model(name) for name in names]}


def model(name: str) -> dict[str, Any]:
    """Return OpenAI's description of the served model."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "megarl"}


def _message(answer: Answer) -> dict[str, Any]:
    """Return the answer as a chat message in OpenAI's form."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
    if answer.calls:
        # OpenAI's answers have null for an empty text next to tool calls.
        message["content"] = answer.text or None
        message["tool_calls"] = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for call_id, name, arguments in answer.calls
        ]
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    return message


def _usage(answer: Answer) -> dict[str, int]:
    """Return the numbers of prompt and completion tokens of an answer, in OpenAI's form."""
    prompt, sampled = len(answer.call.prompt_token_ids), len(answer.call.completion.token_ids)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _pieces(text: str) -> Iterator[str]:
    """Split a text into pieces of `_CHUNK_CHARACTERS`."""
    for start in range(0, len(text), _CHUNK_CHARACTERS):
        yield text[start : start + _CHUNK_CHARACTERS]
