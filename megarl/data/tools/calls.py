"""Tool calls in the text of a sampled turn.

The text is decoded with special tokens, because several formats mark calls with them. Reasoning is removed first: a
call inside it was considered, not made. Every begun call is returned in order, with its arguments or an error. A broken
call does not affect others.
"""

# ruff: noqa: RUF001 (DeepSeek's special tokens are written with wide bars)
from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.data.tools.formats import PARSERS, WrittenCall, harmony_reasoning, no_constant
from megarl.data.tools.schemas import ToolSchema, arguments_fault, tool_named
from megarl.files.strict_json import RepeatedKeyError, is_deeper, make_object, refuse_surrogates
from megarl.types import ToolCall

END_TOKENS = (
    "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "</s>", "<|user|>", "<|observation|>",
    "<｜end▁of▁sentence｜>", "<|eot|>", "<end_of_turn>",
)  # fmt: skip
"""Tokens that end a turn, in supported model families and in likely future ones."""

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_MAX_DEPTH = 48
"""Maximum depth of a call's arguments. A client sends them back in a request of at most 64 levels."""
_THINK = "<think>", "</think>"
_MISTRAL_THINK = "[THINK]", "[/THINK]"


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """Parts of a turn. `text` excludes reasoning, tool calls and end tokens. `reasoning` is None if there is none.

    `calls` are in the order of the text.
    """

    text: str
    reasoning: str | None
    calls: tuple[ToolCall, ...]


def parse(
    name: str, text: str, tools: Sequence[ToolSchema], *, turn: int = 0, in_reasoning: bool | None = None
) -> ParsedTurn:
    """Return the parts of a turn in the format `name`, a key of `PARSERS`. `text` is decoded with special tokens.

    A call's arguments are checked against its tool's JSON schema. An invalid call has an error and no arguments. An
    unreadable name is empty. Ids consist of the turn number `turn` and the call's place in the turn. They have nine
    letters and digits: Mistral's chat templates accept no others.

    `in_reasoning`: whether the prompt ended inside a reasoning block. None: yes, if the text closes a block without
    opening it.
    """
    body, reasoning = _without_end_tokens(text), None
    if name != "gpt_oss":
        body, reasoning = _split_reasoning(body, *(_MISTRAL_THINK if name == "mistral" else _THINK), in_reasoning)
    else:
        body, reasoning = harmony_reasoning(body)
    remainder, written_calls = PARSERS[name](body, tools)
    ids = (f"call{_base36_digits(turn, 3)}{_base36_digits(index, 2)}" for index in range(len(written_calls)))
    calls = tuple(_check_arguments(call_id, call, tools) for call_id, call in zip(ids, written_calls, strict=True))
    # White space around calls and reasoning belongs to the format; in a plain answer it belongs to the model.
    return ParsedTurn(remainder.strip() if written_calls or reasoning is not None else remainder, reasoning, calls)


def _base36_digits(number: int, count: int) -> str:
    """Return the last `count` digits of a number to the base 36.

    Ids of nine characters differ in 46,656 turns of 1,296 calls each.
    """
    return "".join(_DIGITS[number // 36**power % 36] for power in reversed(range(count)))


def parser_of_template(template: str) -> str | None:
    """Return the format of tool calls in a chat template, a key of `PARSERS`. None: the template does not show it."""
    return next((name for name, marks in _TEMPLATE_MARKS if all(mark in template for mark in marks)), None)


_TEMPLATE_MARKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("gpt_oss", ("<|channel|>", "functions.")),
    ("deepseek_v3", ("<｜tool▁call▁begin｜>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("glm45", ("<tool_call>", "<arg_key>")),
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("hermes", ("<tool_call>",)),
    ("llama3_json", ("<|python_tag|>", '"parameters"')),
)
"""Texts in a chat template that reveal its format of tool calls. The first match counts: specific formats come
first.
"""


def _without_end_tokens(text: str) -> str:
    """Return the text without end tokens at its end. White space before them remains."""
    stripped = text.rstrip()
    while stripped.endswith(END_TOKENS):
        token = next(token for token in END_TOKENS if stripped.endswith(token))
        stripped = text = stripped.removesuffix(token)
        stripped = stripped.rstrip()
    return text


def _split_reasoning(text: str, opening: str, closing: str, in_reasoning: bool | None) -> tuple[str, str | None]:
    """Split off the first reasoning block. Returns the text after it, and the reasoning or None."""
    is_opened = text.lstrip().startswith(opening)
    if in_reasoning is None:
        text_before_closing = text.partition(closing)[0]
        in_reasoning = closing in text and opening not in text_before_closing
    if not is_opened and not in_reasoning:
        return text, None
    reasoning_and_rest = text.lstrip().removeprefix(opening) if is_opened else text
    reasoning, _, remainder = reasoning_and_rest.partition(closing)
    return remainder.lstrip("\n"), reasoning.strip()


def _check_arguments(call_id: str, call: WrittenCall, tools: Sequence[ToolSchema]) -> ToolCall:
    """Return the call with its parsed arguments, or with the error for the model."""
    if call.error is not None:
        return ToolCall(call_id, call.name, None, call.error)
    tool = tool_named(call.name, tools)
    if tool is None:
        names = ", ".join(tool["function"]["name"] for tool in tools)
        return ToolCall(call_id, call.name, None, f"there is no tool {call.name!r:.80}; tools: {names}")
    arguments = call.arguments
    if isinstance(arguments, str):  # Some models write the arguments as JSON inside a JSON string.
        try:
            arguments = json.loads(arguments, parse_constant=no_constant, object_pairs_hook=make_object)
        except RepeatedKeyError as error:
            return ToolCall(call_id, call.name, None, f"the arguments cannot be read: {error}")
        except (ValueError, RecursionError):
            return ToolCall(call_id, call.name, None, "the arguments are a text, not an object")
    if not isinstance(arguments, Mapping):
        return ToolCall(call_id, call.name, None, f"the arguments are {json.dumps(arguments):.80}, not an object")
    if fault := _find_json_fault(arguments) or arguments_fault(arguments, tool):
        return ToolCall(call_id, call.name, None, fault)
    return ToolCall(call_id, call.name, arguments, None)


def _find_json_fault(arguments: Mapping[str, Any]) -> str | None:
    """Return why clients could not read or send back arguments as JSON, else None."""
    if is_deeper(arguments, _MAX_DEPTH):
        return f"the arguments are nested more than {_MAX_DEPTH} levels deep"
    try:
        # The decoder makes an infinity of a number that is too large.
        text = json.dumps(arguments, allow_nan=False)
        # Half of a surrogate pair can only come from an escape. Most arguments have no escape.
        if "\\ud" in text:
            refuse_surrogates(arguments)
    except ValueError as error:
        return f"the arguments are not valid JSON: {error}"
    return None
