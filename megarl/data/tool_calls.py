"""Tool calls in the text of a sampled turn: a table of formats, each read by one function.

The text is decoded with special tokens, since several formats mark their calls by them. Reasoning is cut off first: a
call inside it was thought of, not made. Every call that was begun comes back, in order, with its arguments or with what
is wrong with it; a broken one takes no other with it.

Formats, by the names that vLLM has for them: hermes (JSON between tags: Qwen2.5, Qwen3, Hermes), qwen3_coder (XML-like,
Qwen3-Coder, Qwen3.5), llama3_json (bare JSON: Llama 3), pythonic (Llama 3.2, Llama 4, OLMo 3), mistral, glm45 (GLM 4.5
to 4.7), deepseek_v3 (V3, R1, V3.1), gpt_oss (channels of Harmony).
"""

# ruff: noqa: RUF001 (DeepSeek's special tokens are written with wide bars)
from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from megarl.types import ToolCall

ToolSchema = Mapping[str, Any]
"""A tool as chat templates take it: {"type": "function", "function": {"name", "description", "parameters"}}."""

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


@dataclass(frozen=True, slots=True)
class _Written:
    """A call as it was written: the name, and arguments or what is wrong with them."""

    name: str
    arguments: Any = None
    error: str | None = None


_Read = tuple[str, list[_Written]]
"""The text beside the calls, and the calls."""


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
        body, reasoning = _harmony_reasoning(body)
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


def check_tools(tools: Sequence[ToolSchema]) -> None:
    """Raise ValueError for a tool without a name or with parameters that are no JSON schema, and for a name twice."""
    from jsonschema import Draft202012Validator, SchemaError

    names: set[str] = set()
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
            raise ValueError(f'a tool is {tool!r:.80}; give {{"type": "function", "function": {{"name": ...}}}}')
        if name in names:
            raise ValueError(f"two tools have the name {name!r}; give each its own")
        names.add(name)
        try:
            Draft202012Validator.check_schema(dict(_parameters(tool)))
        except SchemaError as error:
            raise ValueError(f"the parameters of tool {name!r} are no JSON schema: {error.message}") from error


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


# JSON and text of arguments


class _CutOffError(ValueError):
    """JSON ends before it is complete."""


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


# Models write line breaks inside strings as they are.
_DECODER = json.JSONDecoder(strict=False, parse_constant=_no_constant)


def _json_at(text: str, start: int) -> tuple[Any, int]:
    """The JSON value that begins at `start` or after white space there, and where it ends.

    Raises ValueError, _CutOffError where the text ends within it.
    """
    while start < len(text) and text[start].isspace():
        start += 1
    if start == len(text):
        raise _CutOffError("it is cut off")
    try:
        return _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        is_cut = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string")
        if is_cut:
            raise _CutOffError("it is cut off") from error
        raise ValueError(f"it is not JSON ({error.msg})") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _of_object(value: Any, *argument_fields: str) -> _Written:
    """The call that a JSON object {"name": ..., "arguments": ...} is."""
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return _Written("", error='the call is no JSON object with a "name"')
    field = next((field for field in argument_fields if field in value), None)
    if field is None:
        return _Written(value["name"], error=f'the call has no "{argument_fields[0]}"')
    return _Written(value["name"], value[field])


def _name_in(text: str) -> str:
    """The name in JSON that may be broken; empty where there is none."""
    found = re.search(r'"name"\s*:\s*"([^"\\]*)"', text)
    return found.group(1) if found else ""


def _json_argument_text(name: str, text: str) -> _Written:
    """A call whose arguments are the JSON that the text begins with."""
    try:
        arguments, end = _json_at(text, 0)
    except ValueError as error:
        return _Written(name, error=f"the arguments cannot be read: {error}")
    if text[end:].strip():
        return _Written(name, error="the arguments cannot be read: text follows the JSON")
    return _Written(name, arguments)


def _value_of_text(text: str, name: str, tool: str, tools: Sequence[ToolSchema]) -> Any:
    """An argument that was written as bare text: text where the schema says so, else JSON, if it is any."""
    schema = _properties(tool, tools).get(name, {})
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    kinds = {kind} if isinstance(kind, str) else set(kind or ())
    if kinds == {"string"}:
        return text
    try:
        value, end = _json_at(text, 0)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text.strip(), text)
    if text[end:].strip() or ("string" in kinds and not isinstance(value, str) and value is not None):
        return text
    return value


# The formats


def _hermes(text: str, tools: Sequence[ToolSchema]) -> _Read:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""
    opening, closing = "<tool_call>", "</tool_call>"
    texts, calls, place = [], [], 0
    while (found := text.find(opening, place)) >= 0:
        texts.append(text[place:found])
        start = found + len(opening)
        try:
            value, place = _json_at(text, start)
            calls.append(_of_object(value, "arguments", "parameters"))
            gap = re.compile(r"\s*").match(text, place)
            place = gap.end() if gap else place
            if text.startswith(closing, place):
                place += len(closing)
        except ValueError as error:
            ends = [end for end in (text.find(closing, start), text.find(opening, start)) if end >= 0]
            end = min(ends, default=len(text))
            body = text[start:end]
            calls.append(_Written(_name_in(body), error=f"the call cannot be read: {error}"))
            place = end + len(closing) if text.startswith(closing, end) else end
    return "".join([*texts, text[place:]]), calls


def _tagged(text: str, opening: str, closing: str) -> tuple[str, list[tuple[str, bool]]]:
    """Text outside of tags, and each body between them with whether it was closed."""
    texts, bodies, place = [], [], 0
    while (found := text.find(opening, place)) >= 0:
        texts.append(text[place:found])
        start = found + len(opening)
        end = text.find(closing, start)
        bodies.append((text[start:] if end < 0 else text[start:end], end >= 0))
        place = len(text) if end < 0 else end + len(closing)
    return "".join([*texts, text[place:]]), bodies


def _qwen3_coder(text: str, tools: Sequence[ToolSchema]) -> _Read:
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`."""
    rest, bodies = _tagged(text, "<function=", "</function>")
    rest = rest.replace("<tool_call>", "").replace("</tool_call>", "")
    calls = []
    for body, is_closed in bodies:
        name, found, inner = body.partition(">")
        name = name.strip()
        if not found or not is_closed:
            calls.append(_Written(name if found else "", error="the call cannot be read: it is cut off"))
            continue
        arguments = {}
        _, parameters = _tagged(inner, "<parameter=", "</parameter>")
        for parameter, _ in parameters:
            key, _, value = parameter.partition(">")
            value = value.removeprefix("\n").removesuffix("\n")
            arguments[key.strip()] = _value_of_text(value, key.strip(), name, tools)
        calls.append(_Written(name, arguments))
    return rest, calls


def _glm45(text: str, tools: Sequence[ToolSchema]) -> _Read:
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`."""
    rest, bodies = _tagged(text, "<tool_call>", "</tool_call>")
    calls = []
    for body, is_closed in bodies:
        name, _, _ = body.partition("<arg_key>")
        name = name.strip()
        if not is_closed:
            calls.append(_Written(name, error="the call cannot be read: it is cut off"))
            continue
        pairs = re.findall(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", body, re.DOTALL)
        arguments = {key.strip(): _value_of_text(value.strip(), key.strip(), name, tools) for key, value in pairs}
        calls.append(_Written(name, arguments))
    return rest, calls


def _llama3_json(text: str, tools: Sequence[ToolSchema]) -> _Read:
    """`{"name": ..., "parameters": {...}}`, several after each other or parted by semicolons.

    An object without a name and parameters is text: an answer may be JSON.
    """
    texts, calls, place = [], [], 0
    text = text.replace("<|python_tag|>", "")
    for brace in re.finditer(r"\{", text):
        start = brace.start()
        if start < place:
            continue
        try:
            value, end = _json_at(text, start)
        except ValueError as error:
            if re.match(r'\{\s*"name"\s*:', text[start:]):
                texts.append(text[place:start])
                following = re.search(r';\s*(?=\{\s*"name"\s*:)', text[start:])
                place = start + following.end() if following else len(text)
                calls.append(_Written(_name_in(text[start:place]), error=f"the call cannot be read: {error}"))
            continue
        if isinstance(value, Mapping) and isinstance(value.get("name"), str) and {"parameters", "arguments"} & {*value}:
            texts.append(text[place:start])
            calls.append(_of_object(value, "parameters", "arguments"))
            separator = re.compile(r"\s*;?\s*").match(text, end)
            place = separator.end() if separator else end
    return "".join([*texts, text[place:]]), calls


def _pythonic(text: str, tools: Sequence[ToolSchema]) -> _Read:
    """`[f(a=1), g(b="x")]`: calls with literal keyword arguments."""
    inner = text.replace("<|python_start|>", "").replace("<|python_end|>", "").replace("<|python_tag|>", "").strip()
    if not re.match(r"\[\s*[A-Za-z_][\w.]*\(", inner):
        return text, []
    pieces = _split_top_level(inner.removeprefix("["))
    return "", [_python_call(piece) for piece in pieces if piece.strip()]


def _split_top_level(text: str) -> list[str]:
    """Text up to the bracket that closes it, split at the commas that stand in no bracket and no string."""
    pieces, start, depth, quote, place = [], 0, 0, "", 0
    while place < len(text):
        sign = text[place]
        if quote:
            if sign == "\\":
                place += 1
            elif sign == quote:
                quote = ""
        elif sign in "'\"":
            quote = sign
        elif sign in "([{":
            depth += 1
        elif sign in ")]}":
            depth -= 1
            if depth < 0:
                return [*pieces, text[start:place]]
        elif sign == "," and depth == 0:
            pieces.append(text[start:place])
            start = place + 1
        place += 1
    return [*pieces, text[start:]]


def _python_call(text: str) -> _Written:
    written = text.strip()
    named = re.match(r"([A-Za-z_][\w.]*)\(", written)
    name = named.group(1) if named else ""
    try:
        call = ast.parse(written, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        problem = "it is no call" if written.endswith(")") else "it is cut off"
        return _Written(name, error=f"the call cannot be read: {problem}")
    if not isinstance(call, ast.Call) or not name:
        return _Written(name, error="the call cannot be read: it is no call")
    if call.args or any(keyword.arg is None for keyword in call.keywords):
        return _Written(name, error="the arguments must have names: f(name=value)")
    try:
        return _Written(name, {keyword.arg: _literal(keyword.value) for keyword in call.keywords})
    except (ValueError, RecursionError):
        return _Written(name, error="the arguments must be values, not expressions")


def _literal(node: ast.expr) -> Any:
    """The value of a literal; JSON's names of constants count too."""
    constants = {"true": True, "false": False, "null": None}
    if isinstance(node, ast.Name) and node.id in constants:
        return constants[node.id]
    if isinstance(node, ast.List):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict) and all(key is not None for key in node.keys):
        pairs = zip(node.keys, node.values, strict=True)
        return {ast.literal_eval(key): _literal(value) for key, value in pairs if key is not None}
    return ast.literal_eval(node)


def _mistral(text: str, tools: Sequence[ToolSchema]) -> _Read:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or `[TOOL_CALLS]NAME[ARGS]{...}` for each call."""
    rest, *parts = text.split("[TOOL_CALLS]")
    calls: list[_Written] = []
    for part in parts:
        body = part.strip()
        if body.startswith("["):
            calls += _mistral_list(body)
            continue
        name = re.split(r"\[ARGS\]|\[CALL_ID\]|\{", body, maxsplit=1)[0].strip()
        brace = body.find("{")
        arguments = body[brace:] if brace >= 0 else ""
        calls.append(_json_argument_text(name, arguments))
    return rest, calls


def _mistral_list(text: str) -> list[_Written]:
    """Calls of a JSON list whose objects are read one by one."""
    calls, place = [], 1
    while True:
        place += len(text[place:]) - len(text[place:].lstrip(" \t\r\n,"))
        if place >= len(text) or text[place] == "]":
            return calls
        try:
            value, place = _json_at(text, place)
            calls.append(_of_object(value, "arguments", "parameters"))
        except ValueError as error:
            following = re.search(r'\}\s*,\s*(?=\{\s*"(?:name|arguments|id)"\s*:)', text[place:])
            end = place + following.end() if following else len(text)
            calls.append(_Written(_name_in(text[place:end]), error=f"the call cannot be read: {error}"))
            place = end


def _deepseek_v3(text: str, tools: Sequence[ToolSchema]) -> _Read:
    """`<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`.

    V3 and R1 write the kind before the name, and the arguments in a fenced block.
    """
    rest, bodies = _tagged(text, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
    rest = rest.replace("<｜tool▁calls▁begin｜>", "").replace("<｜tool▁calls▁end｜>", "")
    calls = []
    for body, _ in bodies:
        head, _, tail = body.partition("<｜tool▁sep｜>")
        if head.strip() == "function" and not tail.lstrip().startswith("{"):
            head, _, tail = tail.partition("\n")
            tail = tail.strip().removeprefix("```json").removesuffix("```")
        calls.append(_json_argument_text(head.strip(), tail))
    return rest, calls


_HARMONY_MESSAGE = re.compile(
    r"(?:<\|start\|>assistant)?(?P<head>(?:(?!<\|message\|>).)*)<\|message\|>"
    r"(?P<body>.*?)(?:<\|end\|>|<\|call\|>|<\|return\|>|(?=<\|start\|>)|$)",
    re.DOTALL,
)


def _harmony_reasoning(text: str) -> tuple[str, str | None]:
    """The messages but those of the analysis channel, and these."""
    reasoning: list[str] = []

    def cut(message: re.Match[str]) -> str:
        if _is_call(message["head"]) or "analysis" not in message["head"]:
            return message.group()
        reasoning.append(message["body"].strip())
        return ""

    rest = _HARMONY_MESSAGE.sub(cut, text)
    return rest, "\n".join(reasoning) if reasoning else None


def _is_call(head: str) -> bool:
    return "to=functions." in head


def _gpt_oss(text: str, tools: Sequence[ToolSchema]) -> _Read:
    """`<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`; else text."""
    calls: list[_Written] = []

    def read(message: re.Match[str]) -> str:
        recipient = re.search(r"to=functions\.([^\s<]+)", message["head"])
        if recipient is None:
            return message["body"]
        calls.append(_json_argument_text(recipient.group(1), message["body"]))
        return ""

    return _HARMONY_MESSAGE.sub(read, text), calls


PARSERS: dict[str, Callable[[str, Sequence[ToolSchema]], _Read]] = {
    "hermes": _hermes,
    "qwen3_coder": _qwen3_coder,
    "llama3_json": _llama3_json,
    "pythonic": _pythonic,
    "mistral": _mistral,
    "glm45": _glm45,
    "deepseek_v3": _deepseek_v3,
    "gpt_oss": _gpt_oss,
}
"""The formats of tool calls."""


# The tools' schemas


def _parameters(tool: ToolSchema) -> Mapping[str, Any]:
    return tool["function"].get("parameters") or {"type": "object"}


def _tool_named(name: str, tools: Sequence[ToolSchema]) -> ToolSchema | None:
    return next((tool for tool in tools if tool["function"]["name"] == name), None)


def _properties(name: str, tools: Sequence[ToolSchema]) -> Mapping[str, Any]:
    tool = _tool_named(name, tools)
    return _parameters(tool).get("properties", {}) if tool else {}


def _checked(call_id: str, call: _Written, tools: Sequence[ToolSchema]) -> ToolCall:
    """The call with its arguments checked against its tool's schema."""
    if call.error is not None:
        return ToolCall(call_id, call.name, None, call.error)
    tool = _tool_named(call.name, tools)
    if tool is None:
        known = ", ".join(tool["function"]["name"] for tool in tools)
        return ToolCall(call_id, call.name, None, f"there is no tool {call.name!r:.80}; tools: {known}")
    arguments = call.arguments
    if isinstance(arguments, str):  # some models write JSON within JSON
        try:
            arguments = json.loads(arguments, parse_constant=_no_constant)
        except (ValueError, RecursionError):
            return ToolCall(call_id, call.name, None, "the arguments are a text, not an object")
    if not isinstance(arguments, Mapping):
        return ToolCall(call_id, call.name, None, f"the arguments are {json.dumps(arguments):.80}, not an object")
    if fault := _fault(arguments, json.dumps(_parameters(tool), sort_keys=True)):
        return ToolCall(call_id, call.name, None, fault)
    return ToolCall(call_id, call.name, arguments, None)


def _fault(arguments: Mapping[str, Any], schema: str) -> str | None:
    """A message on what does not fit a JSON schema; None: all does."""
    from jsonschema.exceptions import best_match

    error = best_match(_validator(schema).iter_errors(arguments))
    if error is None:
        return None
    place = ".".join(str(part) for part in error.absolute_path)
    return f"argument {place}: {error.message:.200}" if place else f"arguments: {error.message:.200}"


@lru_cache(maxsize=256)
def _validator(schema: str) -> Any:
    from jsonschema import Draft202012Validator
    from referencing import Registry

    return Draft202012Validator(json.loads(schema), registry=Registry())  # nothing is fetched for a $ref
