"""Anthropic's Messages API: requests, answers, and the events of a stream.

Blocks of a message become chat messages by fixed rules, so that a longer history has the same beginning:

- Results of tools come first, each as a message of role `tool`. The user's texts follow as one message.
- Texts of one message, and consecutive user messages, are joined by a line break. Consecutive answers are joined.
- A `system` message inside the list becomes a text of the user.
- `cache_control`, which moves from turn to turn, and signatures of thoughts are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.files.strict_json import make_object
from megarl.serving.answers import Answer
from megarl.serving.dialects.caller import read_claude_code_caller
from megarl.serving.dialects.chat import append_message
from megarl.serving.dialects.events import event, split_text
from megarl.serving.dialects.sampling import (
    CHANGES_SAMPLES,
    RequestParameters,
    copy_sampling_fields,
    list_ignored_fields,
    read_objects,
    unsupported_field_error,
)
from megarl.serving.refusal import RequestError
from megarl.types import Caller

_WITHOUT_EFFECT = ("thinking", "output_config")
"""Ignored fields: the model thinks as it was trained to, whatever effort a request asks for."""
_REFUSED = ("mcp_servers", "container", "output_format", "context_management")
"""Fields of `_refuse_unsupported`. Values that pass it ask for nothing."""
_FIELDS = (*_WITHOUT_EFFECT, *_REFUSED, "system", "max_tokens", "stop_sequences", "cache_control")
_INVALID_ARGUMENTS = "invalid_arguments"
"""Key of a tool call's input (an object) whose value is the text of invalid arguments."""
_SIGNATURE = "unsigned"
"""Signature of thoughts. Clients need one to send thoughts back; the endpoint does not check it."""
_ERROR_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}
"""Type of an error by HTTP status. All others below 500 are `invalid_request_error`, from 500 on `api_error`."""


class Messages:
    page = "/messages"

    def convert_to_chat(self, body: Mapping[str, Any]) -> tuple[Mapping[str, Any], Sequence[str]]:
        """Convert a request of Anthropic's Messages API to a chat completion. Returns the fields without effect too."""
        _refuse_unsupported(body)
        items = read_objects(body.get("messages"), "messages")
        if not items:
            raise RequestError("messages: must have at least one message", param="messages")
        messages: list[dict[str, Any]] = []
        if system := _read_text("" if body.get("system") is None else body["system"], "system"):
            messages.append(_make_message("system", system))
        for index, message in enumerate(items):
            for chat_message in _convert_messages(message, f"messages.{index}"):
                append_message(messages, chat_message)
        chat = copy_sampling_fields(body, without=("tool_choice",))
        chat |= {"messages": messages, "max_completion_tokens": body.get("max_tokens")}
        if body.get("stop_sequences") is not None:
            chat["stop"] = body["stop_sequences"]
        if body.get("tools") is not None:
            chat["tools"] = [
                _convert_tool(tool, f"tools.{i}") for i, tool in enumerate(read_objects(body["tools"], "tools"))
            ]
        if (tool_choice := body.get("tool_choice")) is not None:
            # `_refuse_unsupported` lets only auto and none pass.
            chat["tool_choice"] = tool_choice["type"]
        ignored_names = [name for name in _WITHOUT_EFFECT if body.get(name) not in (None, {"type": "disabled"})]
        return chat, [*ignored_names, *list_ignored_fields(body, (*chat, *_FIELDS))]

    def caller(self, headers: Mapping[str, str]) -> Caller:
        return read_claude_code_caller(headers)

    def reply(self, name: str, model: str, parameters: RequestParameters, body: Mapping[str, Any]) -> _Reply:
        return _Reply(f"msg_{name}", model, parameters.stops)

    def error(self, error: RequestError) -> dict[str, Any]:
        kind = _ERROR_KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        # Agents recognise this prefix, and then shorten their history.
        prefix = "prompt is too long: " if error.code == "context_length_exceeded" else ""
        return {"type": "error", "error": {"type": kind, "message": f"{prefix}{error}"}}


@dataclass(frozen=True, slots=True)
class _Reply:
    """Writer of an answer. `stops` are the request's stop sequences."""

    name: str
    model: str
    stops: Sequence[str]

    def make_body(self, answer: Answer, tokens: Sequence[str] | None) -> dict[str, Any]:
        content = [_make_block(kind, block_content) for kind, block_content in _list_blocks(answer)]
        return self._make_head(answer) | {
            "content": content,
            **self._make_stop_fields(answer),
            "usage": _make_usage(answer),
        }

    def begin(self) -> bytes:
        return b""

    def waiting(self) -> bytes:
        return event({"type": "ping"}, "ping")

    def events(self, answer: Answer, tokens: Sequence[str] | None) -> Iterator[bytes]:
        for data in self._stream(answer):
            yield event(data, data["type"])

    def error_event(self, error: RequestError) -> bytes:
        return event(Messages().error(error), "error")

    @property
    def end(self) -> bytes:
        return b""

    def _stream(self, answer: Answer) -> Iterator[dict[str, Any]]:
        """Yield an answer as Anthropic's events: each content block begins, gets its text, and stops."""
        usage = _make_usage(answer)
        message = self._make_head(answer) | {"content": [], "stop_reason": None, "stop_sequence": None}
        yield {"type": "message_start", "message": message | {"usage": usage | {"output_tokens": 0}}}
        for index, (kind, content) in enumerate(_list_blocks(answer)):
            yield {"type": "content_block_start", "index": index, "content_block": _make_empty_block(kind, content)}
            for delta in _list_deltas(kind, content):
                yield {"type": "content_block_delta", "index": index, "delta": delta}
            yield {"type": "content_block_stop", "index": index}
        yield {"type": "message_delta", "delta": self._make_stop_fields(answer), "usage": usage}
        yield {"type": "message_stop"}

    def _make_head(self, answer: Answer) -> dict[str, Any]:
        return {"id": self.name, "type": "message", "role": "assistant", "model": self.model}

    def _make_stop_fields(self, answer: Answer) -> dict[str, Any]:
        reasons = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}
        reason, stop = reasons[answer.finish_reason], None
        if reason == "end_turn" and answer.call.completion.finish_reason == "stop":
            stop = next((text for text in self.stops if text in answer.completion_text), None)
        return {"stop_reason": "stop_sequence" if stop else reason, "stop_sequence": stop}


def _refuse_unsupported(body: Mapping[str, Any]) -> None:
    """Raise RequestError for an unsupported field that would change the samples or the prompt."""
    output_config = body.get("output_config")
    history_edits = body.get("context_management")
    tool_choice = body.get("tool_choice")
    unsupported_by_field: dict[str, bool] = {
        "mcp_servers": bool(body.get("mcp_servers")),
        "container": body.get("container") is not None,
        "output_format": body.get("output_format") is not None,
        "output_config": output_config is not None
        and not (isinstance(output_config, Mapping) and output_config.get("format") is None),
        # The chat template decides about thoughts of earlier turns. Other edits would cut the history.
        "context_management": history_edits is not None and not _clears_only_thoughts(history_edits),
        "tool_choice": tool_choice is not None and not _leaves_model_free(tool_choice),
    }
    for name, is_unsupported in unsupported_by_field.items():
        if is_unsupported:
            raise unsupported_field_error(name, body[name], CHANGES_SAMPLES)


def _leaves_model_free(choice: Any) -> bool:
    """Return whether `tool_choice` lets the model choose. With `none` it sees no tools."""
    return (
        isinstance(choice, Mapping)
        and choice.get("type") in ("auto", "none")
        and not choice.get("disable_parallel_tool_use")
    )


def _clears_only_thoughts(edits: Any) -> bool:
    entries = edits.get("edits", []) if isinstance(edits, Mapping) else None
    return isinstance(entries, list) and all(
        isinstance(entry, Mapping) and str(entry.get("type")).startswith("clear_thinking") for entry in entries
    )


def _read_text(content: Any, field_path: str) -> str:
    """Return a text, or the joined texts of a list of text blocks. Raises RequestError for other blocks."""
    if isinstance(content, str):
        return content
    return "\n".join(
        _read_text_block(block, f"{field_path}.{i}") for i, block in enumerate(read_objects(content, field_path))
    )


def _read_text_block(block: Mapping[str, Any], field_path: str) -> str:
    if block.get("type") != "text" or not isinstance(block.get("text"), str):
        raise RequestError(
            f"{field_path}.type = {block.get('type')!r:.40}: this model reads blocks of type text only",
            param=field_path,
        )
    return block["text"]


def _make_message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _convert_messages(message: Mapping[str, Any], field_path: str) -> list[dict[str, Any]]:
    """Convert a request's message to chat messages. Raises RequestError if it is invalid."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise RequestError(
            f"{field_path}.role: is {role!r:.40}; give user, assistant or system", param=f"{field_path}.role"
        )
    if role == "assistant":
        return [_convert_assistant(content, f"{field_path}.content")]
    if role == "system" or isinstance(content, str):
        return [_make_message("user", _read_text(content, f"{field_path}.content"))]
    results, texts = [], []
    if content == []:
        raise RequestError(f"{field_path}.content: must not be empty", param=f"{field_path}.content")
    for index, block in enumerate(read_objects(content, f"{field_path}.content")):
        block_path = f"{field_path}.content.{index}"
        if block.get("type") == "tool_result":
            results.append(_convert_tool_result(block, block_path))
        else:
            texts.append(_read_text_block(block, block_path))
    return [*results, *([_make_message("user", "\n".join(texts))] if texts else [])]


def _convert_tool_result(block: Mapping[str, Any], field_path: str) -> dict[str, Any]:
    if not isinstance(call_id := block.get("tool_use_id"), str):
        raise RequestError(f"{field_path}.tool_use_id: must be a text", param=field_path)
    text = _read_text("" if block.get("content") is None else block["content"], f"{field_path}.content")
    # Chat templates have no field for a failed call.
    return _make_message("tool", f"error: {text}" if block.get("is_error") else text) | {"tool_call_id": call_id}


def _convert_assistant(content: Any, field_path: str) -> dict[str, Any]:
    """Convert an assistant message of a request's history to a chat message. Errors name its place `field_path`.

    Raises RequestError for blocks that the endpoint never produces.
    """
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else read_objects(content, field_path)
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(blocks):
        match block.get("type"):
            case "thinking" if isinstance(block.get("thinking"), str):
                thoughts.append(block["thinking"])
            case "tool_use" if isinstance(block.get("name"), str) and isinstance(block.get("input"), Mapping):
                calls.append(_convert_call(block))
            case _:
                texts.append(_read_text_block(block, f"{field_path}.{index}"))
    message = _make_message("assistant", "".join(texts))
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _convert_call(block: Mapping[str, Any]) -> dict[str, Any]:
    arguments: Any = block["input"]
    # Unwrap only what `_arguments_as_object` would wrap: a text that is not a JSON object.
    if arguments.keys() == {_INVALID_ARGUMENTS} and _arguments_as_object(arguments[_INVALID_ARGUMENTS]) == arguments:
        arguments = arguments[_INVALID_ARGUMENTS]
    return {
        "id": str(block.get("id", "")),
        "type": "function",
        "function": {"name": block["name"], "arguments": arguments},
    }


def _convert_tool(tool: Mapping[str, Any], field_path: str) -> dict[str, Any]:
    """Convert a tool to a function's schema. Raises RequestError for tools that run on the vendor's servers."""
    if tool.get("type") not in (None, "custom"):
        raise RequestError(
            f"{field_path}.type = {tool['type']!r:.40}: tools of this type run on the vendor's servers; remove it",
            param=field_path,
        )
    function = {name: tool[name] for name in ("name", "description") if name in tool}
    return {"type": "function", "function": function | {"parameters": tool.get("input_schema", {})}}


def _list_blocks(answer: Answer) -> Iterator[tuple[str, Any]]:
    """Yield an answer's parts as (kind, content). A tool call's content is (id, name, arguments)."""
    if answer.reasoning:
        yield "thinking", answer.reasoning
    if answer.text:
        yield "text", answer.text
    for call in answer.calls:
        yield "tool_use", call


def _make_empty_block(kind: str, content: Any) -> dict[str, Any]:
    """Return the block that begins a part (`_list_blocks`) in a stream."""
    if kind == "tool_use":
        call_id, name, _ = content
        return {"type": kind, "id": call_id, "name": name, "input": {}}
    return {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})


def _make_block(kind: str, content: Any) -> dict[str, Any]:
    if kind == "tool_use":
        return _make_empty_block(kind, content) | {"input": _arguments_as_object(content[2])}
    return {"type": kind, kind: content} | ({"signature": _SIGNATURE} if kind == "thinking" else {})


def _list_deltas(kind: str, content: Any) -> Iterator[dict[str, Any]]:
    """Yield a block's text in several events. `content` is a tool call's (id, name, arguments), or a text."""
    if kind == "tool_use":
        _, _, arguments = content
        text, name, field = (
            json.dumps(_arguments_as_object(arguments), ensure_ascii=False),
            "input_json_delta",
            "partial_json",
        )
    else:
        text, name, field = content, f"{kind}_delta", kind
    for piece in split_text(text):
        yield {"type": name, field: piece}
    if kind == "thinking":
        yield {"type": "signature_delta", "signature": _SIGNATURE}


def _arguments_as_object(arguments: Any) -> dict[str, Any]:
    """Return a tool call's arguments as an object, the only form that this API has."""
    try:
        value = json.loads(arguments, object_pairs_hook=make_object)
    except (TypeError, ValueError):
        value = None
    return value if isinstance(value, dict) else {_INVALID_ARGUMENTS: arguments}


def _make_usage(answer: Answer) -> dict[str, int]:
    """Return the true numbers of tokens, because agents shorten their history by them."""
    return {
        "input_tokens": answer.num_prompt_tokens,
        "output_tokens": answer.num_sampled_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }
