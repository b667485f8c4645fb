"""OpenAI's Responses API: requests, answers, and the events of a stream.

Items become chat messages by fixed rules, so that a longer history has the same beginning:

- `instructions` and the first system and developer items become one system message; later ones become user texts.
- Consecutive reasoning, text and function calls become one answer.
- A function `NAME` in a namespace is `NAMESPACE__NAME` for the model.
- Ids of items are ignored, because clients change them.

Every request has the whole history: answers are not stored for `previous_response_id`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.serving.answers import Answer
from megarl.serving.dialects.caller import read_codex_caller
from megarl.serving.dialects.chat import append_message
from megarl.serving.dialects.events import event, split_text
from megarl.serving.dialects.sampling import (
    RequestParameters,
    copy_sampling_fields,
    list_changed_fields,
    list_ignored_fields,
    read_objects,
    unsupported_field_error,
)
from megarl.serving.refusal import RequestError
from megarl.types import Caller

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "background": (False,),
    "truncation": ("disabled",),
    "max_tool_calls": (),
}
"""Refused fields, because they would change the prompt or the samples. The listed values change nothing and are
accepted.
"""
_FIELDS = (*_NEUTRAL, "input", "instructions", "max_output_tokens", "tools", "reasoning", "text", "stream_options")
_JOINT = "__"
"""Separator of namespace and function in the name that the model sees."""
_ANSWER_ITEMS = ("reasoning", "function_call")
_FORM = "a text or a list of objects"


class Responses:
    page = "/responses"

    def convert_to_chat(self, body: Mapping[str, Any]) -> tuple[Mapping[str, Any], Sequence[str]]:
        """Convert a request of OpenAI's Responses API to a chat completion. Returns the fields without effect too."""
        _refuse_unsupported(body)
        items = body.get("input")
        items = (
            [{"role": "user", "content": items}] if isinstance(items, str) else read_objects(items, "input", form=_FORM)
        )
        if not items:
            raise RequestError("input: must have at least one item", param="input")
        instructions = _read_text("" if body.get("instructions") is None else body["instructions"], "instructions")
        chat = copy_sampling_fields(body)
        chat |= {
            "messages": _merge_system_messages(instructions, _convert_items(items)),
            "max_completion_tokens": body.get("max_output_tokens"),
        }
        functions, ignored_names = _convert_tools([] if body.get("tools") is None else body["tools"])
        if functions:
            chat["tools"] = functions
        # These fields are hints: this model thinks and calls tools as it was trained to.
        if body.get("reasoning") is not None and body["reasoning"].get("effort") is not None:
            ignored_names.append("reasoning")
        return chat, sorted({*ignored_names, *list_ignored_fields(body, (*chat, *_FIELDS))})

    def caller(self, headers: Mapping[str, str]) -> Caller:
        return read_codex_caller(headers)

    def reply(self, name: str, model: str, parameters: RequestParameters, body: Mapping[str, Any]) -> _Reply:
        tools = body.get("tools") or ()
        prefixes = [f"{tool.get('name')}{_JOINT}" for tool in tools if tool.get("type") == "namespace"]
        return _Reply(name, model, int(time.time()), prefixes)

    def error(self, error: RequestError) -> dict[str, Any]:
        return error.body()


@dataclass(slots=True)
class _Reply:
    """Writer of one answer. It numbers the events of a stream.

    `prefixes` are the namespace prefixes of function names.
    """

    name: str
    model: str
    created: int
    prefixes: Sequence[str]
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def make_body(self, answer: Answer, tokens: Sequence[str] | None) -> dict[str, Any]:
        """Return the answer as a whole Response. It is `incomplete` if it reached the length limit."""
        is_cut = answer.finish_reason == "length"
        return self._make_response(
            "incomplete" if is_cut else "completed", [item for item, _ in self._list_output_items(answer)]
        ) | {
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": _make_usage(answer),
        }

    def begin(self) -> bytes:
        return self._make_event("response.created", response=self._make_response("in_progress", [])) + self.waiting()

    def waiting(self) -> bytes:
        # An event, not a comment: clients that limit the time between events do not count comments.
        return self._make_event("response.in_progress", response=self._make_response("in_progress", []))

    def events(self, answer: Answer, tokens: Sequence[str] | None) -> Iterator[bytes]:
        """Yield the events of each output item, then the whole Response."""
        for index, (item, deltas) in enumerate(self._list_output_items(answer)):
            yield self._make_event("response.output_item.added", output_index=index, item=_make_empty_item(item))
            for kind, fields in deltas:
                yield self._make_event(kind, output_index=index, item_id=item["id"], **fields)
            yield self._make_event("response.output_item.done", output_index=index, item=item)
        response = self.make_body(answer, tokens)
        yield self._make_event(f"response.{response['status']}", response=response)

    def error_event(self, error: RequestError) -> bytes:
        fault = {"code": error.code or "server_error", "message": str(error)}
        return self._make_event("response.failed", response=self._make_response("failed", []) | {"error": fault})

    @property
    def end(self) -> bytes:
        return b""

    def _make_event(self, kind: str, **fields: Any) -> bytes:
        return event({"type": kind, "sequence_number": next(self._numbers), **fields}, kind)

    def _make_response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a Response with the constant fields that clients expect."""
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

    def _split_function_name(self, name: str) -> dict[str, str]:
        prefix = next((prefix for prefix in self.prefixes if name.startswith(prefix)), None)
        if prefix is None:
            return {"name": name}
        return {"name": name.removeprefix(prefix), "namespace": prefix.removesuffix(_JOINT)}

    def _list_output_items(
        self, answer: Answer
    ) -> Iterator[tuple[dict[str, Any], Iterator[tuple[str, dict[str, Any]]]]]:
        """Yield an answer's items, each with the events between its beginning and its end."""
        status = "incomplete" if answer.finish_reason == "length" else "completed"
        if answer.reasoning:
            content_part = {"type": "summary_text", "text": answer.reasoning}
            item = {"type": "reasoning", "id": f"rs_{self.name}", "summary": [content_part]}
            yield (
                item,
                _make_part_events("reasoning_summary_part", "reasoning_summary_text", "summary_index", content_part),
            )
        # Without any item, clients would take an empty answer for a lost connection.
        if answer.text or not (answer.reasoning or answer.calls):
            content_part = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
            item = {"type": "message", "id": f"msg_{self.name}", "role": "assistant", "status": status}
            yield (
                item | {"content": [content_part]},
                _make_part_events("content_part", "output_text", "content_index", content_part),
            )
        for number, (call_id, name, arguments) in enumerate(answer.calls):
            item = {"type": "function_call", "id": f"fc_{self.name}_{number}", "status": status}
            item |= {"call_id": call_id, "arguments": arguments, **self._split_function_name(name)}
            yield item, _make_argument_events(name, arguments)


def _merge_system_messages(instructions: str, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with at most one system message, the first. Later system messages become user texts.

    Many templates refuse a system message after other messages.
    """
    system_texts, other_messages = [instructions] if instructions else [], list[dict[str, Any]]()
    for message in messages:
        is_system = message["role"] in ("system", "developer")
        if is_system and not other_messages:
            system_texts.append(message["content"])
        else:
            append_message(other_messages, message | {"role": "user"} if is_system else message)
    return [*([{"role": "system", "content": "\n\n".join(system_texts)}] if system_texts else []), *other_messages]


def _make_part_events(
    part_kind: str, text_kind: str, index_name: str, part: dict[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield kind and fields of each event that streams one part of an item: added, deltas, done."""
    logprobs = {"logprobs": []} if text_kind == "output_text" else {}
    yield f"response.{part_kind}.added", {index_name: 0, "part": part | {"text": ""}}
    for piece in split_text(part["text"]):
        yield f"response.{text_kind}.delta", {index_name: 0, "delta": piece, **logprobs}
    yield f"response.{text_kind}.done", {index_name: 0, "text": part["text"], **logprobs}
    yield f"response.{part_kind}.done", {index_name: 0, "part": part}


def _make_argument_events(name: str, arguments: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for piece in split_text(arguments):
        yield "response.function_call_arguments.delta", {"delta": piece}
    yield "response.function_call_arguments.done", {"name": name, "arguments": arguments}


def _make_empty_item(item: Mapping[str, Any]) -> dict[str, Any]:
    empty = {"summary": [], "content": [], "arguments": "", "status": "in_progress"}
    return {name: empty.get(name, value) for name, value in item.items()}


def _refuse_unsupported(body: Mapping[str, Any]) -> None:
    """Raise RequestError for an unsupported field that would change the prompt or the samples."""
    for name in ("reasoning", "text"):
        if body.get(name) is not None and not isinstance(body[name], Mapping):
            raise RequestError(f"{name}: must be an object", param=name)
    text_format = (body.get("text") or {}).get("format")
    unsupported_fields = list_changed_fields(body, _NEUTRAL)
    if text_format not in (None, {"type": "text"}):
        unsupported_fields.append("text")
    for name in unsupported_fields:
        raise unsupported_field_error(name, body[name], "; remove it, and send the whole history as input")


def _read_text(content: Any, field_path: str) -> str:
    """Return a text, or the joined texts of a list of parts. Raises RequestError for other parts."""
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(read_objects(content, field_path, form=_FORM)):
        if part.get("type") not in ("input_text", "output_text", "text") or not isinstance(part.get("text"), str):
            raise RequestError(
                f"{field_path}.{index}.type = {part.get('type')!r:.40}: this model reads parts of text only",
                param=field_path,
            )
        texts.append(part["text"])
    return "".join(texts)


def _convert_items(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Convert a request's `input` items to chat messages. Raises RequestError for an unsupported type of item."""
    messages: list[dict[str, Any]] = []
    follows_answer_item = False
    for index, item in enumerate(items):
        field_path, kind = f"input.{index}", item.get("type", "message")
        is_answer_item = kind in _ANSWER_ITEMS or (kind == "message" and item.get("role") == "assistant")
        if is_answer_item and not follows_answer_item:
            messages.append({"role": "assistant", "content": ""})
        follows_answer_item = is_answer_item
        match kind:
            case "reasoning":
                _add_reasoning(messages[-1], item)
            case "function_call":
                messages[-1].setdefault("tool_calls", []).append(_convert_call(item, field_path))
            case "function_call_output" if isinstance(item.get("call_id"), str):
                output = _read_text("" if item.get("output") is None else item["output"], f"{field_path}.output")
                messages.append({"role": "tool", "content": output, "tool_call_id": item["call_id"]})
            case "message" if is_answer_item:
                messages[-1]["content"] += _read_text(item.get("content"), f"{field_path}.content")
            case "message":
                messages.append(
                    {"role": item.get("role"), "content": _read_text(item.get("content"), f"{field_path}.content")}
                )
            case _:
                raise RequestError(
                    f"{field_path}.type = {kind!r:.40}: give items of type message, reasoning, function_call or "
                    "function_call_output",
                    param=field_path,
                )
    return messages


def _add_reasoning(message: dict[str, Any], item: Mapping[str, Any]) -> None:
    summary_parts = item.get("summary") or item.get("content") or []
    texts = [
        part["text"]
        for part in read_objects(summary_parts, "input.summary", form=_FORM)
        if isinstance(part.get("text"), str)
    ]
    message["reasoning_content"] = message.get("reasoning_content", "") + "".join(texts)


def _convert_call(item: Mapping[str, Any], field_path: str) -> dict[str, Any]:
    for part in ("name", "arguments", "call_id"):
        if not isinstance(item.get(part), str):
            raise RequestError(f"{field_path}.{part}: must be a text", param=field_path)
    name = f"{item['namespace']}{_JOINT}{item['name']}" if item.get("namespace") else item["name"]
    return {"id": item["call_id"], "type": "function", "function": {"name": name, "arguments": item["arguments"]}}


def _convert_tools(tools: Any, prefix: str = "") -> tuple[list[dict[str, Any]], list[str]]:
    """Return a request's functions as tools of the chat completions API, and the types of its other tools.

    Other tools are dropped: they run on the vendor's servers, or need a grammar. `prefix` precedes the names of
    functions in a namespace.
    """
    functions: list[dict[str, Any]] = []
    dropped_types: list[str] = []
    for tool in read_objects(tools, "tools", form=_FORM):
        if tool.get("type") == "namespace":
            namespace_functions, namespace_dropped_types = _convert_tools(
                tool.get("tools") or [], f"{tool.get('name')}{_JOINT}"
            )
            functions += namespace_functions
            dropped_types += namespace_dropped_types
        elif tool.get("type") == "function":
            function = {name: tool[name] for name in ("name", "description", "parameters") if name in tool}
            functions.append({"type": "function", "function": function | {"name": f"{prefix}{tool.get('name') or ''}"}})
        else:
            dropped_types.append(f"tools.{tool.get('type')!s:.40}")
    return functions, dropped_types


def _make_usage(answer: Answer) -> dict[str, Any]:
    """Return the true numbers of tokens, because agents shorten their history by them."""
    return {
        "input_tokens": answer.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": answer.num_sampled_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.num_prompt_tokens + answer.num_sampled_tokens,
    }
