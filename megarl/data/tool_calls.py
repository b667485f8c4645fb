"""Tool calls in the text of a sampled turn.

The text is decoded with special tokens, since several formats mark their calls by them. Reasoning is cut off first: a
call inside it was thought of, not made. Every call that was begun comes back, in order, with its arguments or with what
is wrong with it; a broken one takes no other with it. `tool_formats` has the formats.
"""

# ruff: noqa: RUF001 (DeepSeek's special tokens are written with wide bars)
from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megarl.data.tool_formats import PARSERS, WrittenCall, harmony_reasoning, no_constant
from megarl.data.tool_schemas import ToolSchema, fault_of, tool_named
from megarl.types import ToolCall

END_TOKENS = (
    "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "</s>", "<|user|>", "<|observation|>",
    "<｜end▁of▁sentence｜>", "<|eot|>", "<end_of_turn>",
)  # fmt: skip
"""Tokens that end a turn, in the families that megarl knows or may come to know."""

_THINK = "<think>", "</think>"
_MISTRAL_THINK = "[THINK]", "[/THINK]"


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """A turn as its parts: the text without reasoning, calls and end tokens; the reasoning, None where there is none.

    Calls are in the order in which they were written.
    """

    text: str
    reasoning: str | None
    calls: tuple[ToolCall, ...]


def parse(
    name: str, text: str, tools: Sequence[ToolSchema], *, turn: int = 0, in_reasoning: bool | None = None
) -> ParsedTurn:
    """The parts of a turn in the format `name`, a key of `PARSERS`; `text` is decoded with special tokens.

    A call's arguments are checked against its tool's JSON schema. A call has an error and no arguments where its tool
    is unknown, an argument is missing or of a wrong type, or its text is broken or cut off; the name is empty where
    that cannot be read. Ids are those of turn number `turn` and the call's place in it: nine letters and digits, since
    Mistral's chat templates take no other.

    `in_reasoning`: whether the prompt ended inside a block of reasoning; None: it did where the text closes one that it
    did not open.
    """
    body, reasoning = _without_end_tokens(text), None
    if name != "gpt_oss":
        body, reasoning = _cut_reasoning(body, *(_MISTRAL_THINK if name == "mistral" else _THINK), in_reasoning)
    else:
        body, reasoning = harmony_reasoning(body)
    rest, written = PARSERS[name](body, tools)
    calls = tuple(_checked(f"call{turn % 1000:03}{place % 100:02}", call, tools) for place, call in enumerate(written))
    return ParsedTurn(rest.strip() if written or reasoning is not None else rest, reasoning, calls)


def parser_of_template(template: str) -> str | None:
    """The format that a chat template writes calls in, a key of `PARSERS`; None where the template does not show it."""
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
"""Texts that only the template of a format holds; the first that fits counts."""


def _without_end_tokens(text: str) -> str:
    stripped = text.rstrip()
    while stripped.endswith(END_TOKENS):
        token = next(token for token in END_TOKENS if stripped.endswith(token))
        stripped = text = stripped.removesuffix(token)
        stripped = stripped.rstrip()
    return text


def _cut_reasoning(text: str, opening: str, closing: str, in_reasoning: bool | None) -> tuple[str, str | None]:
    """Text after the first block of reasoning, and the reasoning."""
    begins = text.lstrip().startswith(opening)
    if in_reasoning is None:
        before = text.partition(closing)[0]
        in_reasoning = closing in text and opening not in before
    if not begins and not in_reasoning:
        return text, None
    inner = text.lstrip().removeprefix(opening) if begins else text
    reasoning, _, rest = inner.partition(closing)
    return rest.lstrip("\n"), reasoning.strip()


def _checked(call_id: str, call: WrittenCall, tools: Sequence[ToolSchema]) -> ToolCall:
    """The call with its arguments checked against its tool's schema."""
    if call.error is not None:
        return ToolCall(call_id, call.name, None, call.error)
    tool = tool_named(call.name, tools)
    if tool is None:
        known = ", ".join(tool["function"]["name"] for tool in tools)
        return ToolCall(call_id, call.name, None, f"there is no tool {call.name!r:.80}; tools: {known}")
    arguments = call.arguments
    if isinstance(arguments, str):  # some models write JSON within JSON
        try:
            arguments = json.loads(arguments, parse_constant=no_constant)
        except (ValueError, RecursionError):
            return ToolCall(call_id, call.name, None, "the arguments are a text, not an object")
    if not isinstance(arguments, Mapping):
        return ToolCall(call_id, call.name, None, f"the arguments are {json.dumps(arguments):.80}, not an object")
    if fault := fault_of(arguments, tool):
        return ToolCall(call_id, call.name, None, fault)
    return ToolCall(call_id, call.name, arguments, None)
