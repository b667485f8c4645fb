"""OpenAI's chat completions and text completions: prompts, answers and streams."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.serving.answers import Answer
from megarl.serving.conversation import Conversation
from megarl.serving.dialects.caller import read_caller
from megarl.serving.dialects.events import COMMENT, event, split_text
from megarl.serving.dialects.sampling import RequestParameters, list_ignored_fields
from megarl.serving.refusal import RequestError
from megarl.types import Caller

if TYPE_CHECKING:
    from numpy.typing import NDArray


def read_conversation(body: Mapping[str, Any]) -> Conversation:
    """Read the conversation of a chat request. Raises RequestError if it is invalid or ends with an assistant's
    message.
    """
    tools = body.get("tools")
    # With `none` the model must not see the tools.
    if body.get("tool_choice") == "none":
        tools = None
    conversation = Conversation.read(body.get("messages"), tools)
    if conversation.messages[-1]["role"] == "assistant":
        raise RequestError("messages: the last message has role assistant; it must have another role", param="messages")
    return conversation


def append_message(messages: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """Append a message to a chat. Consecutive user messages are joined, and so are consecutive assistant messages.

    Clients of other APIs send messages in parts, and many templates refuse two messages of one role in a row.
    """
    last_message = messages[-1] if messages else None
    if last_message is None or last_message["role"] != message["role"] or message["role"] not in ("user", "assistant"):
        messages.append(message)
    elif message["role"] == "user":
        last_message["content"] += "\n" + message["content"]
    else:
        last_message["content"] += message["content"]
        if reasoning := message.get("reasoning_content"):
            last_message["reasoning_content"] = last_message.get("reasoning_content", "") + reasoning
        if calls := message.get("tool_calls"):
            last_message["tool_calls"] = [*last_message.get("tool_calls", ()), *calls]


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


class Chat:
    """OpenAI's chat completions. Other dialects convert their requests to this form."""

    page = "/chat/completions"

    def convert_to_chat(self, body: Mapping[str, Any]) -> tuple[Mapping[str, Any], Sequence[str]]:
        return body, list_ignored_fields(body)

    def caller(self, headers: Mapping[str, str]) -> Caller:
        return read_caller(headers)

    def reply(self, name: str, model: str, parameters: RequestParameters, body: Mapping[str, Any]) -> _Reply:
        return _Reply(f"chatcmpl-{name}", model, True, parameters.has_usage_chunk, int(time.time()))

    def error(self, error: RequestError) -> dict[str, Any]:
        return error.body()


class Completions(Chat):
    """OpenAI's completions of a text or of token ids (`read_prompt`), without a conversation."""

    page = "/completions"

    def reply(self, name: str, model: str, parameters: RequestParameters, body: Mapping[str, Any]) -> _Reply:
        return _Reply(f"cmpl-{name}", model, False, parameters.has_usage_chunk, int(time.time()))


@dataclass(frozen=True, slots=True)
class _Reply:
    name: str
    model: str
    is_chat: bool
    has_usage_chunk: bool
    created: int

    def make_body(self, answer: Answer, tokens: Sequence[str] | None) -> dict[str, Any]:
        """Return a chat completion or text completion as OpenAI's API defines it."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": answer.finish_reason}
        if self.is_chat:
            choice["message"] = _make_message(answer)
        else:
            choice["text"] = answer.text
        choice["logprobs"] = None if tokens is None else self._make_logprobs(answer, tokens)
        kind = "chat.completion" if self.is_chat else "text_completion"
        return self._make_object(kind, [choice]) | {"usage": _make_usage(answer)}

    def events(self, answer: Answer, tokens: Sequence[str] | None) -> Iterator[bytes]:
        return map(event, self._make_chunks(answer, tokens))

    def begin(self) -> bytes:
        return b""

    def waiting(self) -> bytes:
        return COMMENT

    def error_event(self, error: RequestError) -> bytes:
        return event(error.body())

    @property
    def end(self) -> bytes:
        return b"data: [DONE]\n\n"

    def _make_chunks(self, answer: Answer, tokens: Sequence[str] | None) -> Iterator[dict[str, Any]]:
        """Yield the answer as JSON objects of a stream. For a tool call, these are its name, then pieces of its
        arguments.
        """
        logprobs = None if tokens is None else self._make_logprobs(answer, tokens)
        if self.is_chat:
            yield self._make_chunk({"role": "assistant", "content": ""}, logprobs=logprobs)
            # The answer is complete before its stream starts, because tool calls can be parsed only at the end.
            for text in split_text(answer.reasoning or ""):
                yield self._make_chunk({"reasoning_content": text})
            for text in split_text(answer.text):
                yield self._make_chunk({"content": text})
            for index, (call_id, name, arguments) in enumerate(answer.calls):
                function = {"name": name, "arguments": ""}
                yield self._make_chunk(
                    {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
                )
                for text in split_text(arguments):
                    yield self._make_chunk({"tool_calls": [{"index": index, "function": {"arguments": text}}]})
            yield self._make_chunk({}, finish_reason=answer.finish_reason)
        else:
            for text in split_text(answer.text):
                yield self._make_chunk(text)
            yield self._make_chunk("", finish_reason=answer.finish_reason, logprobs=logprobs)
        if self.has_usage_chunk:
            yield self._make_object(self._chunk_kind, []) | {"usage": _make_usage(answer)}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.is_chat else "text_completion"

    def _make_chunk(self, delta: Any, *, finish_reason: str | None = None, logprobs: Any = None) -> dict[str, Any]:
        choice = {"index": 0, "delta" if self.is_chat else "text": delta, "finish_reason": finish_reason}
        return self._make_object(self._chunk_kind, [choice | {"logprobs": logprobs}])

    def _make_object(self, kind: str, choices: list[Any]) -> dict[str, Any]:
        return {"id": self.name, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def _make_logprobs(self, answer: Answer, tokens: Sequence[str]) -> dict[str, Any]:
        """Return log-probs of the sampled `tokens` in the form of the chat API or the completions API."""
        values = answer.call.completion.rollout_logprobs.tolist()
        if not self.is_chat:
            return {"tokens": list(tokens), "token_logprobs": values, "top_logprobs": None, "text_offset": None}
        return {
            "content": [
                {"token": token, "logprob": value, "bytes": list(token.encode()), "top_logprobs": []}
                for token, value in zip(tokens, values, strict=True)
            ]
        }


def models(names: Sequence[str]) -> dict[str, Any]:
    return {"object": "list", "data": [model(name) for name in names]}


def model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "megarl"}


def _make_message(answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
    if answer.calls:
        # OpenAI sends null for an empty text next to tool calls.
        message["content"] = answer.text or None
        message["tool_calls"] = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for call_id, name, arguments in answer.calls
        ]
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    return message


def _make_usage(answer: Answer) -> dict[str, int]:
    num_prompt_tokens, num_sampled_tokens = answer.num_prompt_tokens, answer.num_sampled_tokens
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_sampled_tokens,
        "total_tokens": num_prompt_tokens + num_sampled_tokens,
    }
