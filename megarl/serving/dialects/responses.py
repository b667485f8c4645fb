"""OpenAI's Responses: requests, answers, and the events of a stream.

Items become messages of a chat by fixed rules, so that a longer history begins with the same ones: `instructions` come
first, as a system message; reasoning, text and calls of functions in a row are one answer. Ids of items are ignored,
because clients change them. Every request has the whole history: answers are not stored for `previous_response_id`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.serving.dialects.events import event, pieces
from megarl.serving.dialects.sampling import Asked
from megarl.serving.refusal import RequestError
from megarl.serving.sessions import Answer

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "background": (False,),
    "truncation": ("disabled",),
    "max_tool_calls": (),
    "top_logprobs": (0,),
}
"""Fields that are refused because they would change the prompt or the samples, with the values that change nothing."""
_SAMPLING = ("model", "stream", "temperature", "top_p", "top_k", "tool_choice")
"""Fields that chat completions have by the same name."""
_ANSWER_ITEMS = ("reasoning", "function_call")


class Responses:
    """OpenAI's Responses API."""

    page = "/responses"

    def as_chat(self, body: Mapping[str, Any]) -> tuple[Mapping[str, Any], Sequence[str]]:
        _refuse_unsupported(body)
        messages: list[dict[str, Any]] = []
        if body.get("instructions") is not None:
            messages.append({"role": "system", "content": _text(body["instructions"], "instructions")})
        if isinstance(body.get("input"), str):
            messages.append({"role": "user", "content": body["input"]})
        else:
            messages += _chat_messages(_items(body.get("input"), "input"))
        chat = {name: body[name] for name in _SAMPLING if name in body}
        chat |= {"messages": messages, "max_completion_tokens": body.get("max_output_tokens")}
        tools, dropped = _tools(body.get("tools") or [])
        if tools:
            chat["tools"] = tools
        # Effort is a hint. This model thinks as it was trained to.
        has_effort = body.get("reasoning") is not None and body["reasoning"].get("effort") is not None
        return chat, [*(["reasoning"] if has_effort else []), *dropped]

    def reply(self, name: str, model: str, asked: Asked) -> _Reply:
        return _Reply(name, model, int(time.time()))

    def error(self, error: RequestError) -> dict[str, Any]:
        return error.body()


@dataclass(slots=True)
class _Reply:
    """Writer of an answer. Events of a stream have numbers, so each answer needs a writer of its own."""

    name: str
    model: str
    created: int
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def whole(self, answer: Answer, tokens: Sequence[str] | None) -> dict[str, Any]:
        is_cut = answer.finish_reason == "length"
        return self._object("incomplete" if is_cut else "completed", [item for item, _ in self._output(answer)]) | {
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": _usage(answer),
        }

    def begin(self) -> bytes:
        return self._event("response.created", response=self._object("in_progress", [])) + self.waiting()

    def waiting(self) -> bytes:
        # Clients that limit the time between events do not count comments.
        return self._event("response.in_progress", response=self._object("in_progress", []))

    def events(self, answer: Answer, tokens: Sequence[str] | None) -> Iterator[bytes]:
        for index, (item, deltas) in enumerate(self._output(answer)):
            yield self._event("response.output_item.added", output_index=index, item=_begun(item))
            for kind, fields in deltas:
                yield self._event(kind, output_index=index, item_id=item["id"], **fields)
            yield self._event("response.output_item.done", output_index=index, item=item)
        response = self.whole(answer, tokens)
        yield self._event(f"response.{response['status']}", response=response)

    def failed(self, error: RequestError) -> bytes:
        fault = {"code": error.code or "server_error", "message": str(error)}
        return self._event("response.failed", response=self._object("failed", []) | {"error": fault})

    @property
    def end(self) -> bytes:
        return b""

    def _event(self, kind: str, **fields: Any) -> bytes:
        return event({"type": kind, "sequence_number": next(self._numbers), **fields}, kind)

    def _object(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"resp_{self.name}",
            "object": "response",
            "created_at": self.created,
            "status": status,
            "model": self.model,
            "output": output,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": {},
            "parallel_tool_calls": True,
            "temperature": None,
            "tool_choice": "auto",
            "tools": [],
            "top_p": None,
        }

    def _output(self, answer: Answer) -> Iterator[tuple[dict[str, Any], Iterator[tuple[str, dict[str, Any]]]]]:
        """Yield the items of an answer, each with the events between its beginning and its end."""
        if answer.reasoning:
            part = {"type": "summary_text", "text": answer.reasoning}
            item = {"type": "reasoning", "id": f"rs_{self.name}", "summary": [part]}
            yield item, _part_events("reasoning_summary_part", "reasoning_summary_text", "summary_index", part)
        # An answer without any item would look like a fault of the connection.
        if answer.text or not (answer.reasoning or answer.calls):
            part = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
            item = {"type": "message", "id": f"msg_{self.name}", "role": "assistant", "status": "completed"}
            yield item | {"content": [part]}, _part_events("content_part", "output_text", "content_index", part)
        for number, (call_id, name, arguments) in enumerate(answer.calls):
            item = {"type": "function_call", "id": f"fc_{self.name}_{number}", "status": "completed"}
            item |= {"call_id": call_id, "name": name, "arguments": arguments}
            yield item, _argument_events(name, arguments)


def _part_events(
    part_kind: str, text_kind: str, index: str, part: dict[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the events of an item's only part of text."""
    logprobs = {"logprobs": []} if text_kind == "output_text" else {}
    yield f"response.{part_kind}.added", {index: 0, "part": part | {"text": ""}}
    for piece in pieces(part["text"]):
        yield f"response.{text_kind}.delta", {index: 0, "delta": piece, **logprobs}
    yield f"response.{text_kind}.done", {index: 0, "text": part["text"], **logprobs}
    yield f"response.{part_kind}.done", {index: 0, "part": part}


def _argument_events(name: str, arguments: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the events of a call's arguments."""
    for piece in pieces(arguments):
        yield "response.function_call_arguments.delta", {"delta": piece}
    yield "response.function_call_arguments.done", {"name": name, "arguments": arguments}


def _begun(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return an item as it begins in a stream."""
    empty = {"summary": [], "content": [], "arguments": "", "status": "in_progress"}
    return {name: empty.get(name, value) for name, value in item.items()}


def _refuse_unsupported(body: Mapping[str, Any]) -> None:
    """Raise RequestError for a field that would change the prompt or the samples, and is not supported."""
    for name in ("reasoning", "text"):
        if body.get(name) is not None and not isinstance(body[name], Mapping):
            raise RequestError(f"{name}: must be an object", param=name)
    text_format = (body.get("text") or {}).get("format")
    unsupported = [
        name for name, neutral in _NEUTRAL.items() if body.get(name) is not None and body[name] not in neutral
    ]
    if text_format not in (None, {"type": "text"}):
        unsupported.append("text")
    for name in unsupported:
        raise RequestError(
            f"{name} = {body[name]!r:.80}: is not supported; remove it, and send the whole history as input",
            param=name,
            code="unsupported_parameter",
        )


def _items(value: Any, where: str) -> list[Mapping[str, Any]]:
    """Return a list of objects. Raises RequestError for anything else."""
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise RequestError(f"{where}: must be a text or a list of objects", param=where)
    return value


def _text(content: Any, where: str) -> str:
    """Return a text, or the texts of a list of parts, joined. Raises RequestError for other parts."""
    if isinstance(content, str):
        return content
    texts = []
    for place, part in enumerate(_items(content, where)):
        if part.get("type") not in ("input_text", "output_text", "text") or not isinstance(part.get("text"), str):
            raise RequestError(
                f"{where}.{place}.type = {part.get('type')!r:.40}: this model reads parts of text only", param=where
            )
        texts.append(part["text"])
    return "".join(texts)


def _chat_messages(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the items of a request as messages of a chat. Raises RequestError for other items."""
    messages: list[dict[str, Any]] = []
    is_answer = False
    for place, item in enumerate(items):
        where, kind = f"input.{place}", item.get("type", "message")
        is_part = kind in _ANSWER_ITEMS or (kind == "message" and item.get("role") == "assistant")
        if is_part and not is_answer:
            messages.append({"role": "assistant", "content": ""})
        is_answer = is_part
        match kind:
            case "reasoning":
                _add_reasoning(messages[-1], item)
            case "function_call":
                messages[-1].setdefault("tool_calls", []).append(_call(item, where))
            case "function_call_output" if isinstance(item.get("call_id"), str):
                output = _text(item.get("output") or "", f"{where}.output")
                messages.append({"role": "tool", "content": output, "tool_call_id": item["call_id"]})
            case "message" if is_part:
                messages[-1]["content"] += _text(item.get("content"), f"{where}.content")
            case "message":
                messages.append({"role": item.get("role"), "content": _text(item.get("content"), f"{where}.content")})
            case _:
                raise RequestError(
                    f"{where}.type = {kind!r:.40}: give items of type message, reasoning, function_call or "
                    "function_call_output",
                    param=where,
                )
    return messages


def _add_reasoning(message: dict[str, Any], item: Mapping[str, Any]) -> None:
    parts = item.get("summary") or item.get("content") or []
    texts = [part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
    message["reasoning_content"] = message.get("reasoning_content", "") + "".join(texts)


def _call(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(item.get("name"), str):
        raise RequestError(f"{where}.name: must be a text", param=where)
    function = {"name": item["name"], "arguments": item.get("arguments", "{}")}
    return {"id": str(item.get("call_id", "")), "type": "function", "function": function}


def _tools(tools: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the functions among a request's tools as chat completions write them, and the names of dropped tools.

    A namespace is replaced by its tools. Tools of other types run on the vendor's servers, or need a grammar.
    """
    functions, dropped = [], []
    for tool in _items(tools, "tools"):
        if tool.get("type") == "namespace":
            inner_functions, inner_dropped = _tools(tool.get("tools") or [])
            functions += inner_functions
            dropped += inner_dropped
        elif tool.get("type") == "function":
            function = {name: tool[name] for name in ("name", "description", "parameters") if name in tool}
            functions.append({"type": "function", "function": function})
        else:
            dropped.append(f"tools.{tool.get('name') or tool.get('type')}")
    return functions, dropped


def _usage(answer: Answer) -> dict[str, Any]:
    """Return the numbers of tokens. Agents shorten their history by them, so they are the true ones."""
    prompt, sampled = len(answer.call.prompt_token_ids), len(answer.call.completion.token_ids)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + sampled,
    }
