"""Tools and tool calls of records, in the forms in which data sets write them."""

import json

import pytest

from megarl.console.surveys import print_survey
from megarl.data.kinds.conversations import Conversations
from megarl.data.kinds.preferences import Judged, Pairs
from megarl.data.kinds.problems import Problems
from megarl.data.reader import read_examples, read_records
from megarl.data.survey import survey
from megarl.data.tools.calls import parse
from megarl.types import DataError
from tests.data.templates import tokenizer_of

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "d", "parameters": PARAMETERS}}
SUBTRACT = {"type": "function", "function": {"name": "subtract", "parameters": PARAMETERS}}
FLAT_TOOL = {"name": "add", "description": "d", "parameters": PARAMETERS}
ARGUMENTS = {"a": 2, "b": 2}


def conversation(call, **more):
    """A record in which the assistant makes one call before it answers."""
    asked = {"role": "user", "content": "What is 2 + 2?"}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "content": "4", "tool_call_id": "call00000", "name": "add"}
    return {"messages": [asked, calling, result, {"role": "assistant", "content": "4"}], "tools": [TOOL], **more}


def function_call(**function):
    return {"id": "call00000", "type": "function", "function": {"name": "add", **function}}


def trained_text(tmp_path, record, family="qwen"):
    """Return the text that is trained of a record, with special tokens."""
    path = tmp_path / "calls.jsonl"
    path.write_text(json.dumps(record))
    tokenizer = tokenizer_of(family)
    ((sequence,),) = read_examples(path, Conversations(tokenizer=tokenizer, system_prompt=None, max_tokens=2000))
    return tokenizer.decode(sequence.token_ids[sequence.loss_mask])


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(function_call(arguments=ARGUMENTS), id="object"),
        pytest.param(function_call(arguments=json.dumps(ARGUMENTS)), id="text"),
        pytest.param(function_call(arguments=' {"a":2,\n "b":2} '), id="text with other white space"),
        pytest.param({"name": "add", "arguments": json.dumps(ARGUMENTS)}, id="flat"),
        pytest.param({"id": "call00000", "name": "add", "arguments": ARGUMENTS}, id="flat with an id"),
    ],
)
def test_sft_trains_the_call_that_rl_reads(tmp_path, call):
    written = trained_text(tmp_path, conversation(call)).partition("<|im_end|>")[0]
    (read,) = parse("hermes", written, [TOOL]).calls
    assert (read.name, read.arguments, read.error) == ("add", ARGUMENTS, None)
    assert '{"a": 2, "b": 2}' in written


@pytest.mark.parametrize("form", [dict, json.dumps])
@pytest.mark.parametrize(
    ("family", "written"), [("deepseek", 'add\n{"x": "ü"}<call_end>'), ("mistral", '"arguments": {"x": "ü"}')]
)
def test_a_template_gets_arguments_in_the_form_that_it_takes(tmp_path, family, written, form):
    call = function_call(arguments=form({"x": "ü"}))
    assert written in trained_text(tmp_path, conversation(call, tools=None), family)


UNLISTED = {"role": "assistant", "content": "", "tool_calls": [{"name": "subtract", "arguments": {}}]}
ASKED = {"role": "user", "content": "What is 2 + 2?"}
ANSWERED = {"role": "assistant", "content": "4"}
FAILED = {"role": "tool", "content": "no such tool", "name": "subtract"}


@pytest.mark.parametrize(
    ("kind", "record"),
    [
        (Conversations, {"messages": [ASKED, UNLISTED, FAILED, ANSWERED]}),
        (Pairs, {"prompt": [ASKED], "chosen": [UNLISTED], "rejected": [ANSWERED]}),
        (Judged, {"prompt": [ASKED], "response": [UNLISTED], "label": True}),
        (Problems, {"prompt": [ASKED, UNLISTED, FAILED], "answer": "4"}),
    ],
)
def test_a_call_to_a_tool_that_is_not_listed_is_refused(tmp_path, kind, record):
    settings = {"tokenizer": tokenizer_of("qwen"), "system_prompt": None, "max_tokens": 2000}
    path = tmp_path / "calls.jsonl"

    def make(kind, **more):
        path.write_text(json.dumps(record | more))
        [read] = read_records(path)
        return kind.make(0, read)

    with pytest.raises(DataError, match=r"calls.jsonl, line 1: .*\"subtract\", but .* only add; add .* to 'tools'"):
        make(kind(**settings), tools=[TOOL])
    # The tools may be described in a text.
    make(kind(**settings))
    if kind is Problems:
        make(kind(environment_tools=lambda: (SUBTRACT,), **settings))
        with pytest.raises(DataError, match="only add"):
            make(kind(environment_tools=lambda: (TOOL,), **settings))
    make(kind(**settings), tools=[TOOL, SUBTRACT])


@pytest.mark.parametrize(
    ("kind", "record", "tool"),
    [
        ("conversations", {"messages": [ASKED, UNLISTED, FAILED, ANSWERED]}, "subtract"),
        ("conversations", {"messages": [ASKED, ANSWERED | {"content": "I subtract."}, ASKED, UNLISTED]}, "subtract"),
        ("pairs", {"prompt": [ASKED], "chosen": [UNLISTED], "rejected": [ANSWERED]}, "subtract"),
        ("judged", {"prompt": [ASKED], "response": [UNLISTED], "label": True}, "subtract"),
        ("conversations", {"messages": [ASKED, UNLISTED | {"weight": 0}, FAILED, ANSWERED]}, None),
        ("conversations", {"messages": [ASKED | {"content": "Call subtract."}, UNLISTED]}, None),
        ("conversations", {"messages": [ASKED, UNLISTED], "tools": [SUBTRACT]}, None),
        ("pairs", {"prompt": [ASKED], "chosen": [ANSWERED], "rejected": [UNLISTED]}, None),
        ("problems", {"prompt": [ASKED, UNLISTED, FAILED], "answer": "4"}, None),
    ],
)
def test_a_survey_counts_calls_to_tools_that_nothing_describes(tmp_path, capsys, kind, record, tool):
    path = tmp_path / "calls.jsonl"
    path.write_text(json.dumps(record))
    result = survey(str(path), kind=kind)
    assert result.num_records == 1
    assert (result.num_undescribed_calls, result.undescribed_calls) == ((1, [f"line 1 ({tool})"]) if tool else (0, []))
    print_survey(result, unit="characters")
    assert ("names before: 1 line 1 (subtract); give them in the field tools" in capsys.readouterr().out) == bool(tool)


def test_a_call_that_is_not_to_be_learnt_may_be_to_any_tool(tmp_path):
    record = {"messages": [ASKED, UNLISTED | {"weight": 0}, FAILED, ANSWERED], "tools": [TOOL]}
    assert trained_text(tmp_path, record) == "4<|im_end|>"
    settings = {"tokenizer": tokenizer_of("qwen"), "system_prompt": None, "max_tokens": 2000}
    for kind, record in (
        (Pairs(**settings), {"prompt": [ASKED], "rejected": [UNLISTED], "chosen": [ANSWERED], "tools": [TOOL]}),
        (Judged(**settings), {"prompt": [ASKED], "response": [UNLISTED], "label": False, "tools": [TOOL]}),
    ):
        path = tmp_path / "calls.jsonl"
        path.write_text(json.dumps(record))
        [read] = read_records(path)
        assert "subtract" in "".join(settings["tokenizer"].decode(s.token_ids) for s in kind.make(0, read))


def test_arguments_of_no_value_are_an_empty_object(tmp_path):
    assert '"arguments": {}' in trained_text(tmp_path, conversation(function_call(arguments="{}")))


@pytest.mark.parametrize(
    ("call", "value"),
    [
        pytest.param(function_call(), "null", id="missing"),
        pytest.param(function_call(arguments=None), "null", id="null"),
        pytest.param(function_call(arguments=""), '""', id="empty text"),
        pytest.param(function_call(arguments='{"a": 2'), "a.*not valid JSON", id="cut text"),
        pytest.param(function_call(arguments='{"a": NaN}'), "NaN", id="NaN"),
        pytest.param(function_call(arguments='{"a": 1, "a": 2}'), "twice", id="key twice"),
        pytest.param(function_call(arguments="{'a': 2}"), "not valid JSON", id="Python's form"),
        pytest.param(function_call(arguments=json.dumps(json.dumps(ARGUMENTS))), "not an object", id="encoded twice"),
        pytest.param(function_call(arguments="[2, 2]"), "not an object", id="list as text"),
        pytest.param(function_call(arguments=[2, 2]), "not an object", id="list"),
        pytest.param({"function": {"name": "", "arguments": {}}}, '"name": ""', id="empty name"),
    ],
)
def test_a_call_that_rl_would_count_as_invalid_is_refused(tmp_path, call, value):
    with pytest.raises(DataError, match=rf"line 1: messages\[1\] has tool_calls\[0\].*{value}"):
        trained_text(tmp_path, conversation(call))


def test_only_the_assistant_calls_tools(tmp_path):
    record = conversation(function_call(arguments={}))
    record["messages"][0]["tool_calls"] = [function_call(arguments={})]
    with pytest.raises(DataError, match=r"line 1: messages\[0\] has tool_calls"):
        trained_text(tmp_path, record)


@pytest.mark.parametrize("calls", [None, []])
def test_null_and_an_empty_list_are_no_calls(tmp_path, calls):
    roles = ("system", "user", "assistant", "tool", "assistant")
    messages = [{"role": role, "content": "4", "tool_calls": calls} for role in roles]
    assert trained_text(tmp_path, {"messages": messages}) == "4<|im_end|>4<|im_end|>"


def rendered_tools(tmp_path, tools):
    path = tmp_path / "tools.jsonl"
    path.write_text(json.dumps(conversation(function_call(arguments=ARGUMENTS), tools=tools)))
    tokenizer = tokenizer_of("qwen")
    ((sequence,),) = read_examples(path, Conversations(tokenizer=tokenizer, system_prompt=None, max_tokens=2000))
    return tokenizer.decode(sequence.token_ids)


@pytest.mark.parametrize(
    "tools",
    [
        pytest.param(json.dumps([TOOL]), id="text"),
        pytest.param([json.dumps(TOOL)], id="list of texts"),
        pytest.param([FLAT_TOOL], id="flat"),
        pytest.param(json.dumps([FLAT_TOOL]), id="flat as text"),
        pytest.param([{"type": "function", **FLAT_TOOL}], id="flat with a type"),
        pytest.param(
            [
                FLAT_TOOL
                | {
                    "strict": None,
                    "parameters": PARAMETERS
                    | {
                        "properties": PARAMETERS["properties"] | {"query": None},
                        "required": PARAMETERS.get("required"),
                        "enum": None,
                        "items": None,
                    },
                }
            ],
            id="columns with null",
        ),
    ],
)
def test_every_form_of_tools_is_shown_to_the_policy_alike(tmp_path, tools):
    assert rendered_tools(tmp_path, tools) == rendered_tools(tmp_path, [TOOL])


def test_null_as_a_value_of_a_schema_is_shown(tmp_path):
    schema = {"type": "object", "properties": {"x": {"enum": ["a", None], "default": None}}}
    shown = rendered_tools(tmp_path, [FLAT_TOOL | {"parameters": schema}])
    assert '"enum": ["a", null], "default": null' in shown


@pytest.mark.parametrize("tools", [None, [], "", "[]", "null"])
def test_records_without_tools(tmp_path, tools):
    assert '"description"' not in rendered_tools(tmp_path, tools)


@pytest.mark.parametrize(
    ("tools", "value"),
    [
        pytest.param("[{", "not valid JSON", id="broken text"),
        pytest.param(json.dumps(TOOL), "not a list", id="one tool as text"),
        pytest.param([{"name": "add", "input_schema": PARAMETERS}], "input_schema", id="key of another program"),
        pytest.param([FLAT_TOOL, TOOL], "two tools have the name 'add'", id="name twice"),
    ],
)
def test_tools_that_cannot_be_read_are_refused(tmp_path, tools, value):
    with pytest.raises(DataError, match=f"line 1: 'tools' is .*{value}"):
        rendered_tools(tmp_path, tools)


def test_columns_of_json_text_in_parquet(tmp_path):
    import pyarrow
    import pyarrow.parquet

    record = conversation(function_call(arguments=ARGUMENTS))
    texts = {"messages": [record["messages"]], "tools": pyarrow.array([json.dumps([TOOL])], pyarrow.json_())}
    pyarrow.parquet.write_table(pyarrow.table(texts), tmp_path / "calls.parquet")
    ((sequence,),) = read_examples(
        tmp_path / "calls.parquet", Conversations(tokenizer=tokenizer_of("qwen"), system_prompt=None, max_tokens=2000)
    )
    assert '"description": "d"' in tokenizer_of("qwen").decode(sequence.token_ids)
