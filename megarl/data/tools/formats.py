"""Formats of tool calls written by models: one parsing function for each format.

The names are vLLM's. hermes: JSON between tags (Qwen2.5, Qwen3, Hermes). qwen3_coder: like XML (Qwen3-Coder, Qwen3.5).
llama3_json: bare JSON (Llama 3). pythonic: Python calls (Llama 3.2, Llama 4, OLMo 3). mistral. glm45 (GLM 4.5 to 4.7).
deepseek_v3 (V3, R1, V3.1). gpt_oss: channels of Harmony.
"""

# ruff: noqa: RUF001 (DeepSeek's special tokens are written with wide bars)
from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megarl.data.tools.schemas import ToolSchema, argument_schemas
from megarl.files.strict_json import RepeatedKeyError, is_long_integer, make_object


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A tool call as the model wrote it: its name, and its arguments or an error."""

    name: str
    arguments: Any = None
    error: str | None = None


_ParsedText = tuple[str, list[WrittenCall]]
"""The text outside the tool calls, and the calls."""


class _CutOffError(ValueError):
    """Raised for a JSON text that ends before its value is complete."""


def no_constant(name: str) -> Any:
    """Reject NaN and infinities: a `parse_constant` for Python's `json`. Raises ValueError."""
    raise ValueError(f"{name} is not valid JSON")


# Not strict: models write line breaks inside strings without escaping them.
_DECODER = json.JSONDecoder(strict=False, parse_constant=no_constant, object_pairs_hook=make_object)


def _parse_json_at(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON value at `start` (or after white space there), and its end.

    Raises ValueError for invalid JSON, _CutOffError if the text ends inside the value.
    """
    while start < len(text) and text[start].isspace():
        start += 1
    if start == len(text):
        raise _CutOffError("its JSON is cut off")
    try:
        return _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        # An error at the very end means that the turn stopped at its token limit; the policy then needs another
        # message.
        is_cut = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string")
        if is_cut:
            raise _CutOffError("its JSON is cut off") from error
        raise ValueError(f"its JSON is not valid ({error.msg})") from error
    except RecursionError as error:
        raise ValueError("its JSON is nested too deeply") from error
    except ValueError as error:
        # Other errors name the refused value, such as NaN, or the repeated key.
        if not is_long_integer(error):
            raise
        raise ValueError("its JSON has a number with too many digits") from error


def _call_from_object(value: Any, *argument_fields: str) -> WrittenCall:
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return WrittenCall("", error='the call is not a JSON object with a "name"')
    fields = [field for field in argument_fields if field in value]
    if not fields:
        return WrittenCall(value["name"], error=f'the call has no "{argument_fields[0]}"')
    if len(fields) > 1:
        return WrittenCall(value["name"], error=f'the call has both "{fields[0]}" and "{fields[1]}"')
    return WrittenCall(value["name"], value[fields[0]])


def _find_call_name(text: str) -> str:
    match = re.search(r'"name"\s*:\s*"([^"\\]*)"', text)
    return match.group(1) if match else ""


def _call_from_json_text(name: str, text: str) -> WrittenCall:
    try:
        arguments, json_end = _parse_json_at(text, 0)
    except ValueError as error:
        return WrittenCall(name, error=f"the arguments cannot be read: {error}")
    if text[json_end:].strip():
        return WrittenCall(name, error="the arguments cannot be read: text follows the JSON")
    return WrittenCall(name, arguments)


def _parse_unquoted_argument(text: str, argument_name: str, tool_name: str, tools: Sequence[ToolSchema]) -> Any:
    """Return the value of an unquoted argument: text if the schema says so, else JSON if valid, else text.

    Raises RepeatedKeyError.
    """
    schema = argument_schemas(tool_name, tools).get(argument_name, {})
    type_name = schema.get("type") if isinstance(schema, Mapping) else None
    type_names = {type_name} if isinstance(type_name, str) else set(type_name or ())
    if type_names == {"string"}:
        return text
    try:
        value, end = _parse_json_at(text, 0)
    except RepeatedKeyError:
        if "string" in type_names:
            return text
        raise
    except ValueError:
        # Templates of Qwen3-Coder print constants as Python does.
        return {"True": True, "False": False, "None": None}.get(text.strip(), text)
    if text[end:].strip() or ("string" in type_names and not isinstance(value, str) and value is not None):
        return text
    return value


def _call_from_pairs(tool: str, pairs: Iterable[tuple[str, str]], tools: Sequence[ToolSchema]) -> WrittenCall:
    try:
        arguments = make_object([(name, _parse_unquoted_argument(value, name, tool, tools)) for name, value in pairs])
    except RepeatedKeyError as error:
        return WrittenCall(tool, error=f"the arguments cannot be read: {error}")
    return WrittenCall(tool, arguments)


def _parse_hermes(text: str, tools: Sequence[ToolSchema]) -> _ParsedText:
    """Read `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""
    opening, closing = "<tool_call>", "</tool_call>"
    outside_texts, calls, position = [], [], 0
    while (opening_position := text.find(opening, position)) >= 0:
        outside_texts.append(text[position:opening_position])
        start = opening_position + len(opening)
        try:
            value, position = _parse_json_at(text, start)
            calls.append(_call_from_object(value, "arguments", "parameters"))
            separator = re.compile(r"\s*").match(text, position)
            position = separator.end() if separator else position
            if text.startswith(closing, position):
                position += len(closing)
        except ValueError as error:
            # Skip to the nearer of this call's end and the next call's start, so that one broken call loses no other.
            ends = [end for end in (text.find(closing, start), text.find(opening, start)) if end >= 0]
            end = min(ends, default=len(text))
            body = text[start:end]
            calls.append(WrittenCall(_find_call_name(body), error=f"the call cannot be read: {error}"))
            position = end + len(closing) if text.startswith(closing, end) else end
    return "".join([*outside_texts, text[position:]]), calls


class _TagBody(NamedTuple):
    """The text after an opening tag, up to the closing tag or, without one, to the end."""

    text: str
    is_closed: bool


def _split_tags(text: str, opening: str, closing: str) -> tuple[str, list[_TagBody]]:
    """Return the text outside the tags, and the texts inside."""
    outside_texts, bodies, position = [], [], 0
    while (opening_start := text.find(opening, position)) >= 0:
        outside_texts.append(text[position:opening_start])
        body_start = opening_start + len(opening)
        end = text.find(closing, body_start)
        bodies.append(_TagBody(text[body_start:], False) if end < 0 else _TagBody(text[body_start:end], True))
        position = len(text) if end < 0 else end + len(closing)
    return "".join([*outside_texts, text[position:]]), bodies


def _parse_qwen3_coder(text: str, tools: Sequence[ToolSchema]) -> _ParsedText:
    """Read `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`."""
    remainder, bodies = _split_tags(text, "<function=", "</function>")
    remainder = remainder.replace("<tool_call>", "").replace("</tool_call>", "")
    calls = []
    for body, is_closed in bodies:
        name, separator, inner = body.partition(">")
        name = name.strip()
        if not separator or not is_closed:
            calls.append(WrittenCall(name if separator else "", error="the call cannot be read: it is cut off"))
            continue
        pairs = []
        _, parameters = _split_tags(inner, "<parameter=", "</parameter>")
        for parameter, _ in parameters:
            key, _, value = parameter.partition(">")
            # The format puts one line break before and after each value; further ones belong to the value.
            pairs.append((key.strip(), value.removeprefix("\n").removesuffix("\n")))
        calls.append(_call_from_pairs(name, pairs, tools))
    return remainder, calls


def _parse_glm45(text: str, tools: Sequence[ToolSchema]) -> _ParsedText:
    """Read `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`."""
    remainder, bodies = _split_tags(text, "<tool_call>", "</tool_call>")
    calls = []
    for body, is_closed in bodies:
        name, _, _ = body.partition("<arg_key>")
        name = name.strip()
        if not is_closed:
            calls.append(WrittenCall(name, error="the call cannot be read: it is cut off"))
            continue
        pairs = re.findall(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", body, re.DOTALL)
        calls.append(_call_from_pairs(name, [(key.strip(), value.strip()) for key, value in pairs], tools))
    return remainder, calls


def _parse_llama3_json(text: str, tools: Sequence[ToolSchema]) -> _ParsedText:
    """Read `{"name": ..., "parameters": {...}}`; several calls follow each other, perhaps with semicolons between them.

    An object without a name and parameters is text, because an answer may be JSON.
    """
    outside_texts, calls, position = [], [], 0
    # Llama 3.1 writes this tag before some calls.
    text = text.replace("<|python_tag|>", "")
    for brace in re.finditer(r"\{", text):
        start = brace.start()
        if start < position:
            continue
        try:
            value, end = _parse_json_at(text, start)
        except ValueError as error:
            # Broken JSON that begins like a call is a broken call. Other braces are text.
            if re.match(r'\{\s*"name"\s*:', text[start:]):
                outside_texts.append(text[position:start])
                next_call = re.search(r';\s*(?=\{\s*"name"\s*:)', text[start:])
                position = start + next_call.end() if next_call else len(text)
                calls.append(
                    WrittenCall(_find_call_name(text[start:position]), error=f"the call cannot be read: {error}")
                )
            continue
        if isinstance(value, Mapping) and isinstance(value.get("name"), str) and {"parameters", "arguments"} & {*value}:
            outside_texts.append(text[position:start])
            calls.append(_call_from_object(value, "parameters", "arguments"))
            separator = re.compile(r"\s*;?\s*").match(text, end)
            position = separator.end() if separator else end
    return "".join([*outside_texts, text[position:]]), calls


def _parse_pythonic(text: str, tools: Sequence[ToolSchema]) -> _ParsedText:
    """Read `[f(a=1), g(b="x")]`: calls with literal keyword arguments."""
    # Llama 4 encloses calls in the first two tags, Llama 3.2 may begin with the third.
    inner = text.replace("<|python_start|>", "").replace("<|python_end|>", "").replace("<|python_tag|>", "").strip()
    if not re.match(r"\[\s*[A-Za-z_][\w.]*\(", inner):
        return text, []
    pieces = _split_at_outer_commas(inner.removeprefix("["))
    return "", [_parse_python_call(piece) for piece in pieces if piece.strip()]


def _split_at_outer_commas(text: str) -> list[str]:
    """Return the text up to its closing bracket, split at commas outside of brackets and strings."""
    # `depth` counts open brackets, `quote` is the quote sign of an open string.
    pieces, start, depth, quote, position = [], 0, 0, "", 0
    while position < len(text):
        sign = text[position]
        if quote:
            if sign == "\\":
                position += 1
            elif sign == quote:
                quote = ""
        elif sign in "'\"":
            quote = sign
        elif sign in "([{":
            depth += 1
        elif sign in ")]}":
            depth -= 1
            if depth < 0:
                return [*pieces, text[start:position]]
        elif sign == "," and depth == 0:
            pieces.append(text[start:position])
            start = position + 1
        position += 1
    return [*pieces, text[start:]]


def _parse_python_call(text: str) -> WrittenCall:
    """Return the tool call in a Python expression. The text is parsed, never evaluated."""
    expression = text.strip()
    name_match = re.match(r"([A-Za-z_][\w.]*)\(", expression)
    name = name_match.group(1) if name_match else ""
    try:
        call = ast.parse(expression, mode="eval").body
    # `ast.parse` raises MemoryError for text nested too deeply.
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        problem = "it is not a call" if expression.endswith(")") else "it is cut off"
        return WrittenCall(name, error=f"the call cannot be read: {problem}")
    if not isinstance(call, ast.Call) or not name:
        return WrittenCall(name, error="the call cannot be read: it is not a call")
    if call.args or any(keyword.arg is None for keyword in call.keywords):
        return WrittenCall(name, error="the arguments must have names: f(name=value)")
    try:
        pairs = [(keyword.arg or "", _read_literal(keyword.value)) for keyword in call.keywords]
        return WrittenCall(name, make_object(pairs))
    except RepeatedKeyError as error:
        return WrittenCall(name, error=f"the arguments cannot be read: {error}")
    except (ValueError, RecursionError):
        return WrittenCall(name, error="the arguments must be values, not expressions")


def _read_literal(node: ast.expr) -> Any:
    """Return the value of a Python literal, or of one of JSON's names (true, null).

    Raises ValueError for a value that JSON does not have, such as bytes, and for an object's key that is not a text.
    """
    constants = {"true": True, "false": False, "null": None}
    if isinstance(node, ast.Name) and node.id in constants:
        return constants[node.id]
    if isinstance(node, ast.List):
        return [_read_literal(item) for item in node.elts]
    if isinstance(node, ast.Tuple):
        return tuple(_read_literal(item) for item in node.elts)
    if isinstance(node, ast.Dict) and all(key is not None for key in node.keys):
        pairs = zip(node.keys, node.values, strict=True)
        return make_object(
            [(_read_constant(key, str), _read_literal(value)) for key, value in pairs if key is not None]
        )
    return _read_constant(node, str, int, float, type(None))


def _read_constant(node: ast.expr | None, *types: type) -> Any:
    value = None if node is None else ast.literal_eval(node)
    if not isinstance(value, types):
        raise ValueError(f"{value!r:.80} is not a value of JSON")
    return value


def _parse_mistral(text: str, tools: Sequence[ToolSchema]) -> _ParsedText:
    """Read `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or `[TOOL_CALLS]NAME[ARGS]{...}` for each call."""
    remainder, *parts = text.split("[TOOL_CALLS]")
    calls: list[WrittenCall] = []
    for part in parts:
        body = part.strip()
        if body.startswith("["):
            calls += _parse_mistral_list(body)
            continue
        name = re.split(r"\[ARGS\]|\[CALL_ID\]|\{", body, maxsplit=1)[0].strip()
        brace = body.find("{")
        arguments = body[brace:] if brace >= 0 else ""
        calls.append(_call_from_json_text(name, arguments))
    return remainder, calls


def _parse_mistral_list(text: str) -> list[WrittenCall]:
    """Return the tool calls in a JSON list. Objects are read one by one, so a broken object does not affect others."""
    calls, position = [], 1
    while True:
        position += len(text[position:]) - len(text[position:].lstrip(" \t\r\n,"))
        if position >= len(text) or text[position] == "]":
            return calls
        try:
            value, position = _parse_json_at(text, position)
            calls.append(_call_from_object(value, "arguments", "parameters"))
        except ValueError as error:
            # Continue at the next object that begins like a call.
            next_call = re.search(r'\}\s*,\s*(?=\{\s*"(?:name|arguments|id)"\s*:)', text[position:])
            end = position + next_call.end() if next_call else len(text)
            calls.append(WrittenCall(_find_call_name(text[position:end]), error=f"the call cannot be read: {error}"))
            position = end


def _parse_deepseek_v3(text: str, tools: Sequence[ToolSchema]) -> _ParsedText:
    """Read `<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`.

    V3 and R1 write the kind before the name, and put the arguments in a fenced block.
    """
    remainder, bodies = _split_tags(text, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
    remainder = remainder.replace("<｜tool▁calls▁begin｜>", "").replace("<｜tool▁calls▁end｜>", "")
    calls = []
    for body, _ in bodies:
        name_text, _, arguments_text = body.partition("<｜tool▁sep｜>")
        if name_text.strip() == "function" and not arguments_text.lstrip().startswith("{"):
            name_text, _, arguments_text = arguments_text.partition("\n")
            arguments_text = arguments_text.strip().removeprefix("```json").removesuffix("```")
        calls.append(_call_from_json_text(name_text.strip(), arguments_text))
    return remainder, calls


_HARMONY_MESSAGE = re.compile(
    r"(?:<\|start\|>assistant)?(?P<head>(?:(?!<\|message\|>).)*)<\|message\|>"
    r"(?P<body>.*?)(?:<\|end\|>|<\|call\|>|<\|return\|>|(?=<\|start\|>)|$)",
    re.DOTALL,
)


def harmony_reasoning(text: str) -> tuple[str, str | None]:
    """Return the text without messages of Harmony's analysis channel, and these messages' text or None."""
    reasoning: list[str] = []

    def cut_analysis(message: re.Match[str]) -> str:
        # A message to a function is a call in any channel, also in the analysis channel.
        if _is_function_call(message["head"]) or "analysis" not in message["head"]:
            return message.group()
        reasoning.append(message["body"].strip())
        return ""

    remainder = _HARMONY_MESSAGE.sub(cut_analysis, text)
    return remainder, "\n".join(reasoning) if reasoning else None


def _is_function_call(head: str) -> bool:
    return "to=functions." in head


def _parse_gpt_oss(text: str, tools: Sequence[ToolSchema]) -> _ParsedText:
    """Read `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`. Other messages are
    text.
    """
    calls: list[WrittenCall] = []

    def read_message(message: re.Match[str]) -> str:
        recipient = re.search(r"to=functions\.([^\s<]+)", message["head"])
        if recipient is None:
            return message["body"]
        calls.append(_call_from_json_text(recipient.group(1), message["body"]))
        return ""

    return _HARMONY_MESSAGE.sub(read_message, text), calls


PARSERS: dict[str, Callable[[str, Sequence[ToolSchema]], _ParsedText]] = {
    "hermes": _parse_hermes,
    "qwen3_coder": _parse_qwen3_coder,
    "llama3_json": _parse_llama3_json,
    "pythonic": _parse_pythonic,
    "mistral": _parse_mistral,
    "glm45": _parse_glm45,
    "deepseek_v3": _parse_deepseek_v3,
    "gpt_oss": _parse_gpt_oss,
}
"""Parsing functions by the name of the format."""
