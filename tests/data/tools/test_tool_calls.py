"""Tool calls in the text of a turn: each format by examples, what is broken, and vLLM's parsers as oracle."""

# ruff: noqa: RUF001 (DeepSeek's special tokens are written with wide bars)
from __future__ import annotations

import json
import re
from typing import Any, get_args

import pytest

from megarl.config import RolloutConfig
from megarl.data.tools.calls import parse, parser_of_template
from megarl.data.tools.formats import PARSERS
from megarl.data.tools.schemas import check_tools

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"terms": {"type": "array", "items": {"type": "number"}}},
            "required": ["terms"],
        },
    },
}
TOOLS = (WEATHER, ADD)
CALLS = [("weather", {"city": "Bonn, Ü", "days": 3}), ("add", {"terms": [1, 2.5, -3]})]

# The calls above as each format writes them, after the word "First."
TEXTS = {
    "hermes": (
        'First.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn, Ü", "days": 3}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"terms": [1, 2.5, -3]}}\n</tool_call><|im_end|>'
    ),
    "qwen3_coder": (
        "First.\n<tool_call>\n<function=weather>\n<parameter=city>\nBonn, Ü\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=add>\n<parameter=terms>\n[1, 2.5, -3]\n"
        "</parameter>\n</function>\n</tool_call><|im_end|>"
    ),
    "llama3_json": (
        '{"name": "weather", "parameters": {"city": "Bonn, Ü", "days": 3}}; '
        '{"name": "add", "parameters": {"terms": [1, 2.5, -3]}}<|eot_id|>'
    ),
    "pythonic": '[weather(city="Bonn, Ü", days=3), add(terms=[1, 2.5, -3])]<|eot_id|>',
    "mistral": (
        'First.[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Bonn, Ü", "days": 3}}, '
        '{"name": "add", "arguments": {"terms": [1, 2.5, -3]}}]</s>'
    ),
    "glm45": (
        "First.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bonn, Ü</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>add\n<arg_key>terms</arg_key>\n"
        "<arg_value>[1, 2.5, -3]</arg_value>\n</tool_call><|observation|>"
    ),
    "deepseek_v3": (
        "First.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
        '```json\n{"city": "Bonn, Ü", "days": 3}\n```<｜tool▁call▁end｜>\n'
        '<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"terms": [1, 2.5, -3]}\n```<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
    ),
    "gpt_oss": (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>First.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        '{"city": "Bonn, Ü", "days": 3}<|call|>'
        "<|start|>assistant to=functions.add<|channel|>commentary json<|message|>"
        '{"terms": [1, 2.5, -3]}<|call|>'
    ),
}
SILENT = ("llama3_json", "pythonic")
"""Formats whose calls are the whole turn."""


def test_the_recipe_has_the_formats_of_the_table() -> None:
    literal, none = get_args(RolloutConfig.model_fields["tool_parser"].annotation)
    assert get_args(literal) == tuple(PARSERS) and none is type(None)


def made(name: str, text: str, **options: Any) -> list[tuple[str, Any, str | None]]:
    return [(call.name, call.arguments, call.error) for call in parse(name, text, TOOLS, **options).calls]


@pytest.mark.parametrize("name", TEXTS)
def test_a_number_of_more_digits_than_python_reads_is_a_faulty_call(name: str) -> None:
    text = re.sub(r"\b3\b", "9" * 5000, TEXTS[name])
    assert text != TEXTS[name]
    faults = [error for _, _, error in made(name, text) if error is not None]
    assert faults and "sys.set_int" not in str(faults)


def test_ids_of_calls_differ_between_the_turns_of_a_long_session() -> None:
    text = TEXTS["hermes"]
    ids = {call.id for turn in (*range(3000), 46_655) for call in parse("hermes", text, TOOLS, turn=turn).calls}
    # Mistral's templates accept nine letters and digits only.
    assert len(ids) == 2 * 3001 and all(re.fullmatch("[a-z0-9]{9}", each) for each in ids)


@pytest.mark.parametrize("name", PARSERS)
def test_two_calls_come_in_order_with_arguments_of_their_types_beside_the_text(name: str) -> None:
    turn = parse(name, TEXTS[name], TOOLS, turn=7)
    assert [(call.name, call.arguments) for call in turn.calls] == CALLS
    assert [call.error for call in turn.calls] == [None, None]
    assert [call.id for call in turn.calls] == ["call00700", "call00701"]
    assert turn.text == ("" if name in SILENT else "First.")
    assert turn.reasoning == ("Hm." if name == "gpt_oss" else None)


def test_other_dialects_of_a_format() -> None:
    newer = 'First.[TOOL_CALLS]weather[ARGS]{"city": "Bonn, Ü", "days": 3}[TOOL_CALLS]add{"terms": [1, 2.5, -3]}</s>'
    assert made("mistral", newer) == [(*call, None) for call in CALLS]
    v31 = (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Bonn, Ü", "days": 3}'
        '<｜tool▁call▁end｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"terms": [1, 2.5, -3]}<｜tool▁call▁end｜>'
    )
    assert made("deepseek_v3", v31) == [(*call, None) for call in CALLS]


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize("text", ["The answer is 4.", "", 'A set {x: x > 0} and {"name": 3}.', "a [b](c) d"])
def test_text_without_a_call_is_text(name: str, text: str) -> None:
    for ended in (text, text + "<|im_end|>\n"):
        turn = parse(name, ended, TOOLS)
        assert (turn.text, turn.reasoning, turn.calls) == (text, None, ())


# What each format writes with the first call broken off or wrong, and the second good.
BROKEN = {
    "hermes": TEXTS["hermes"].replace('"days": 3}}', '"days": }}'),
    "qwen3_coder": TEXTS["qwen3_coder"].replace("\n3\n", "\nthree\n"),
    "llama3_json": TEXTS["llama3_json"].replace('"days": 3}}', '"days": }}'),
    "pythonic": TEXTS["pythonic"].replace("days=3", "days=today()"),
    "mistral": TEXTS["mistral"].replace('"days": 3}}', '"days": }}'),
    "glm45": TEXTS["glm45"].replace("<arg_value>3<", "<arg_value>three<"),
    "deepseek_v3": TEXTS["deepseek_v3"].replace('"days": 3}', '"days": }'),
    "gpt_oss": TEXTS["gpt_oss"].replace('"days": 3}', '"days": }'),
}


@pytest.mark.parametrize("name", PARSERS)
def test_a_broken_call_does_not_drop_the_good_one_beside_it(name: str) -> None:
    first, second = made(name, BROKEN[name])
    assert first[:2] == ("weather", None)
    assert first[2]
    assert second == (*CALLS[1], None)


@pytest.mark.parametrize("name", PARSERS)
def test_a_call_that_is_cut_off_is_no_call_with_fewer_arguments(name: str) -> None:
    whole = TEXTS[name]
    cut = whole[: whole.index("2.5")]
    first, second = made(name, cut)
    assert first == (*CALLS[0], None)
    assert second[:2] == ("add", None)
    assert "cut off" in str(second[2])
    for end in range(len(whole)):  # no prefix of a turn raises, or makes a call of another meaning
        for call in made(name, whole[:end]):
            assert call[2] is not None or call[:2] in CALLS, whole[:end]


def test_an_unknown_tool_and_arguments_that_do_not_fit_are_errors() -> None:
    def error_of(call: str) -> str:
        ((_, arguments, error),) = made("hermes", f"<tool_call>{call}</tool_call>")
        assert arguments is None
        return str(error)

    unknown = error_of('{"name": "rain", "arguments": {}}')
    assert "rain" in unknown and "weather, add" in unknown
    assert "'city' is a required property" in error_of('{"name": "weather", "arguments": {}}')
    assert "argument days" in error_of('{"name": "weather", "arguments": {"city": "Bonn", "days": "3"}}')
    assert "argument terms.1" in error_of('{"name": "add", "arguments": {"terms": [1, "x"]}}')
    assert "towns" in error_of('{"name": "weather", "arguments": {"city": "Bonn", "towns": 1}}')
    assert "object" in error_of('{"name": "weather", "arguments": [1]}')
    assert "object" in error_of('{"name": "weather", "arguments": "Bonn"}')
    assert '"arguments"' in error_of('{"name": "weather"}')
    assert '"name"' in error_of('{"arguments": {}}')
    assert "NaN" in error_of('{"name": "add", "arguments": {"terms": [NaN]}}')
    assert "nested" in error_of('{"name": "add", "arguments": {"terms": ' + "[" * 100_000)


REPEATED = {
    "hermes": '<tool_call>{"name": "weather", "arguments": {"city": "Rom", "city": "Bonn"}}</tool_call>',
    "qwen3_coder": (
        "<tool_call><function=weather><parameter=city>Rom</parameter><parameter=city>Bonn</parameter></function>"
        "</tool_call>"
    ),
    "llama3_json": '{"name": "weather", "parameters": {"city": "Rom", "city": "Bonn"}}',
    "pythonic": '[weather(city="Rom", city="Bonn")]',
    "mistral": '[TOOL_CALLS]weather[ARGS]{"city": "Rom", "city": "Bonn"}',
    "glm45": (
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Rom</arg_value><arg_key>city</arg_key>"
        "<arg_value>Bonn</arg_value></tool_call>"
    ),
    "deepseek_v3": '<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Rom", "city": "Bonn"}<｜tool▁call▁end｜>',
    "gpt_oss": '<|start|>assistant to=functions.weather<|message|>{"city": "Rom", "city": "Bonn"}<|call|>',
}


@pytest.mark.parametrize("name", PARSERS)
def test_an_argument_given_twice_is_a_faulty_call(name: str) -> None:
    ((tool, arguments, error),) = made(name, REPEATED[name])
    assert (tool, arguments) == ("weather", None)
    assert 'the key "city" occurs twice' in str(error)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "add", "name": "weather", "arguments": {"city": "Bonn"}}</tool_call>'),
        (
            "hermes",
            '<tool_call>{"name": "weather", "arguments": {"city": "B"}, "parameters": {"city": "C"}}</tool_call>',
        ),
        ("hermes", '<tool_call>{"name": "weather", "arguments": "{\\"city\\": 1, \\"city\\": \\"B\\"}"}</tool_call>'),
        ("mistral", '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "B"}, "arguments": {"city": "C"}}]'),
        ("qwen3_coder", '<function=add><parameter=terms>{"x": 1, "x": 2}</parameter></function>'),
        ("pythonic", "[weather(city={'x': 1, 'x': 2})]"),
    ],
)
def test_a_call_with_two_readings_is_faulty(name: str, text: str) -> None:
    ((_, arguments, error),) = made(name, text)
    assert arguments is None
    assert "occurs twice" in str(error) or "has both" in str(error)


def test_constants_of_json_and_python_are_values_of_a_pythonic_call() -> None:
    tool = {"type": "function", "function": {"name": "set", "parameters": {"type": "object", "properties": {}}}}
    text = "[set(a=true, b=false, c=null, d=True, e=False, f=None, g=[false, {'x': true}])]"
    (call,) = parse("pythonic", text, (tool,)).calls
    assert call.error is None
    constants = {"a": True, "b": False, "c": None, "d": True, "e": False, "f": None}
    assert call.arguments == {**constants, "g": [False, {"x": True}]}


@pytest.mark.parametrize("value", ["b'x'", "{1, 2}", "1j", "...", "{1: 2}", "{[1]: 2}", "[b'x']", "(1, {b'x': 1})"])
def test_a_python_value_that_json_does_not_have_is_a_faulty_call(value: str) -> None:
    ((tool, arguments, error),) = made("pythonic", f"[weather(city={value})]")
    assert (tool, arguments) == ("weather", None)
    assert "values" in str(error)


def test_reasoning_is_cut_off_and_calls_in_it_are_not_made() -> None:
    thought = '<tool_call>{"name": "add", "arguments": {"terms": [1]}}</tool_call>'
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Bonn"}}</tool_call>'
    written = [("weather", {"city": "Bonn"}, None)]
    for opening in ("<think>", "\n<think>", ""):  # the last: the generation prompt opened it
        turn = parse("hermes", f"{opening}\nLet me see. {thought}\n</think>\n\nSo {call}<|im_end|>", TOOLS)
        assert turn.reasoning == f"Let me see. {thought}"
        assert turn.text == "So"
        assert [(c.name, c.arguments, c.error) for c in turn.calls] == written
    cut = parse("hermes", f"Let me see. {thought}", TOOLS, in_reasoning=True)
    assert (cut.text, cut.reasoning, cut.calls) == ("", f"Let me see. {thought}", ())
    assert parse("hermes", f"<think>{thought}", TOOLS).calls == ()
    mistral = parse("mistral", f"[THINK]Hm.[/THINK]{TEXTS['mistral']}", TOOLS)
    assert (mistral.reasoning, len(mistral.calls)) == ("Hm.", 2)


def test_a_tag_inside_of_an_argument_is_text() -> None:
    city = "</tool_call> <tool_call>"
    call = json.dumps({"name": "weather", "arguments": {"city": city}})
    turn = parse("hermes", f"<tool_call>{call}</tool_call>after", TOOLS)
    assert [(c.arguments, c.error) for c in turn.calls] == [({"city": city}, None)]
    assert turn.text == "after"


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>\\n' }}", "hermes"),
        ("{{ '<tool_call>\\n<function=' + name }}", "qwen3_coder"),
        ("{{ '<tool_call>' }}{{ '<arg_key>' }}", "glm45"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("{{ '<｜tool▁call▁begin｜>' }}", "deepseek_v3"),
        ("{{ '<|channel|>commentary to=functions.' }}", "gpt_oss"),
        ("{{ '<|python_tag|>' }}{{ '\"parameters\": ' }}", "llama3_json"),
        ("{{ message.content }}", None),
    ],
)
def test_a_chat_template_shows_its_format(template: str, name: str | None) -> None:
    assert parser_of_template(template) == name


def test_faulty_tools_are_named() -> None:
    check_tools(TOOLS)
    with pytest.raises(ValueError, match="two tools have the name 'add'"):
        check_tools((ADD, ADD))
    with pytest.raises(ValueError, match="'f' are not a JSON schema"):
        check_tools(({"type": "function", "function": {"name": "f", "parameters": {"type": "int"}}},))
    with pytest.raises(ValueError, match="it must have the form"):
        check_tools(({"name": "f"},))


# vLLM's parsers read the same calls. The names are its own.
VLLM = {
    "hermes": "hermes",
    "qwen3_coder": "qwen3_coder",
    "llama3_json": "llama3_json",
    "pythonic": "pythonic",
    "mistral": "mistral",
    "glm45": "glm45",
    "deepseek_v3": "deepseek_v3",
}
MARKERS = (
    "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "<arg_key>", "</arg_key>",
    "<arg_value>", "</arg_value>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
    "<think>", "</think>", "<function=", "</function>", "<parameter=", "</parameter>",
)  # fmt: skip


def test_vllm_reads_the_same_calls_and_ours_reads_more() -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    from tools.make_tiny_model import make_tokenizer

    tokenizer = make_tokenizer()
    tokenizer.add_tokens(list(MARKERS))
    request = ChatCompletionRequest.model_validate(
        {"model": "m", "messages": [{"role": "user", "content": "?"}], "tools": list(TOOLS)}
    )

    def vllm_calls(name: str, text: str) -> list[tuple[str, Any]]:
        parser = ToolParserManager.get_tool_parser(VLLM[name])(tokenizer, request.tools)
        found = parser.extract_tool_calls(text, request).tool_calls
        return [(call.function.name, json.loads(call.function.arguments)) for call in found]

    for name in VLLM:
        text = parse_free_of_end(TEXTS[name])
        assert vllm_calls(name, text) == CALLS, name

    # Where ours is better: the call beside a broken one, and a call that was only thought of.
    assert vllm_calls("hermes", parse_free_of_end(BROKEN["hermes"])) == []
    thought = f"<think>{parse_free_of_end(TEXTS['hermes'])}</think>No."
    assert vllm_calls("hermes", thought) == CALLS
    assert made("hermes", thought) == []


def parse_free_of_end(text: str) -> str:
    """The text without its end token, as vLLM's server gives it to its parsers."""
    for token in ("<|im_end|>", "<|eot_id|>", "</s>", "<|observation|>", "<｜end▁of▁sentence｜>"):
        text = text.removesuffix(token)
    return text
