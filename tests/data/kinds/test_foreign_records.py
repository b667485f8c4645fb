"""Records as other programs write them: each is trained as it is meant, or refused by the name of its field."""

import datetime
import json
import re
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from megarl.data.formats import FieldNames
from megarl.data.kinds.conversations import Conversations
from megarl.data.kinds.preferences import Judged, Pairs
from megarl.data.kinds.problems import Problems
from megarl.data.reader import read_examples, read_records
from megarl.types import DataError
from tests.data.kinds.test_record_keys import TOOL, texts_of
from tests.data.templates import tokenizer_of

Q = {"role": "user", "content": "q"}
R = {"role": "user", "content": "r"}
X = {"role": "assistant", "content": "x"}
GOOD = {"role": "assistant", "content": "good"}
BAD = {"role": "assistant", "content": "bad"}
CALL = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULTS = [("chosen", "4", GOOD), ("rejected", "timeout", BAD)]
CALLED = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>'

SHAREGPT_CALL = '{"name": "add", "arguments": {"a": 2}}'


def calling(calls):
    return {"messages": [Q, {"role": "assistant", "content": "", "tool_calls": calls}], "tools": [TOOL]}


def turns(*pairs, **fields):
    return {"conversations": [{"from": role, "value": text} for role, text in pairs], **fields}


TRAINED = {
    "calls as text": (calling(json.dumps([CALL])), CALLED),
    "each call as text": (calling([json.dumps(CALL)]), CALLED),
    "a flat call as text": (calling([json.dumps(CALL["function"])]), CALLED),
    "arguments as text": (calling([{"function": {"name": "add", "arguments": '{"a": 2}'}}]), CALLED),
    "sharegpt": (turns(("human", "q"), ("gpt", "x")), "x<|im_end|>"),
    "a call in sharegpt": (
        turns(
            ("human", "q"),
            ("function_call", SHAREGPT_CALL),
            ("observation", "4"),
            ("gpt", "x"),
            tools=json.dumps([TOOL]),
        ),
        CALLED + "x<|im_end|>",
    ),
    "a list of calls in sharegpt": (
        turns(
            ("human", "q"),
            ("function_call", f"[{SHAREGPT_CALL}]"),
            ("observation", "4"),
            ("gpt", "x"),
            tools=json.dumps([TOOL]),
        ),
        CALLED + "x<|im_end|>",
    ),
    "a good answer": ({"prompt": "q", "completion": "x", "label": True}, "x<|im_end|>"),
    "a result of its call": (
        {"messages": [Q, CALLING, {"role": "tool", "tool_call_id": "call00000", "content": "4"}, X], "tools": [TOOL]},
        CALLED + "x<|im_end|>",
    ),
    "messages as text": ({"messages": json.dumps([Q, X])}, "x<|im_end|>"),
    "the same in value and content": (
        {"conversations": [{"from": "human", "value": "q", "content": "q"}, {"from": "gpt", "value": "x"}]},
        "x<|im_end|>",
    ),
    "sharegpt pair": (
        turns(("human", "q"), chosen={"from": "gpt", "value": "good"}, rejected={"from": "gpt", "value": "bad"}),
        "good<|im_end|>bad<|im_end|>",
    ),
    "pair of several turns": (
        {"chosen": [Q, X, R, GOOD], "rejected": [Q, X, R, BAD]},
        "good<|im_end|>bad<|im_end|>",
    ),
    "pair that differs from the first answer on": (
        {"chosen": [Q, GOOD, R, X], "rejected": [Q, BAD, Q, X]},
        "good<|im_end|>x<|im_end|>bad<|im_end|>x<|im_end|>",
    ),
    "pair of one call with two results": (
        {
            "tools": [TOOL],
            **{name: [Q, CALLING, {"role": "tool", "content": result}, end] for name, result, end in RESULTS},
        },
        "good<|im_end|>bad<|im_end|>",
    ),
    "pair with its prompt in messages too": (
        {"prompt": "q", "chosen": [Q, GOOD], "rejected": [Q, BAD]},
        "good<|im_end|>bad<|im_end|>",
    ),
    "response and completion alike": ({"prompt": "q", "response": "x", "completion": "x"}, "x<|im_end|>"),
    "prompt and completion as messages": ({"prompt": [Q], "completion": [X]}, "x<|im_end|>"),
    "kto": ({"prompt": "q", "completion": "x", "label": True}, "x<|im_end|>"),
    "alpaca": ({"instruction": "q", "input": "", "output": "x", "history": [["a", "b"]]}, "b<|im_end|>x<|im_end|>"),
    "openai's empty keys": ({"messages": [Q, {**X, "refusal": None, "annotations": []}]}, "x<|im_end|>"),
    "a mask of slime": (
        {"messages": [Q, {**X, "step_loss_mask": 0}, R, {**GOOD, "step_loss_mask": 1}]},
        "good<|im_end|>",
    ),
    "an empty answer without weight": ({"messages": [Q, {**X, "content": "", "weight": 0}, R, GOOD]}, "good<|im_end|>"),
    "tools in two fields": (
        {"messages": [Q, X], "tools": [TOOL], "metadata": {"tools": [TOOL]}},
        "x<|im_end|>",
    ),
    "a passage with its question": (
        {"context": "The sky is green. What colour?", "question": "What colour?", "response": "x"},
        "x<|im_end|>",
    ),
    "names that are no misspelt parts": (
        {"messages": [Q, X], "tool": "add", "system_id": "a", "story": ["a"], "systems": 3},
        "x<|im_end|>",
    ),
    "results of tools": (
        {"messages": [Q, X], "tool_results": [{"name": "add", "result": 4}], "function": "def add(a): ..."},
        "x<|im_end|>",
    ),
    "names of tools": ({"messages": [Q, X], "metadata": {"tools": ["add"]}}, "x<|im_end|>"),
    "options in the prompt": (
        {"messages": [{**Q, "content": "Which? (A) One\n(B) two  words"}, X], "choices": ["one", "Two words"]},
        "x<|im_end|>",
    ),
    "options of another kind": ({"messages": [Q, X], "options": {"lang": "en", "seed": "3"}}, "x<|im_end|>"),
    "notes on a loss": ({"messages": [Q, X], "loss": 0.25, "train": True}, "x<|im_end|>"),
    "empty masks": ({"messages": [Q, X], "loss_weights": None, "loss_scale": []}, "x<|im_end|>"),
}  # fmt: skip

REFUSED = {
    "another turn of the user in a pair": (
        {"chosen": [Q, X, Q, GOOD], "rejected": [Q, X, R, BAD]},
        '"q" and "r"',
    ),
    "calls that are not JSON": (calling("add(2)"), "tool_calls"),
    "a call that is not JSON": (calling(["add(2)"]), "tool_calls"),
    "one call": (calling(CALL), "tool_calls"),
    "a call of a repeated key": (calling(['{"name": "add", "name": "sub", "arguments": {}}']), "'name'|\"name"),
    "arguments that are a list": (calling([{"function": {"name": "add", "arguments": "[1]"}}]), "arguments"),
    "two texts of a message": (
        {"conversations": [{"from": "human", "value": "q", "content": "z"}, {"from": "gpt", "value": "x"}]},
        r"conversations\[0\].*content",
    ),
    "function_call": (turns(("human", "q"), ("function_call", "{}"), ("observation", "4")), "function_call"),
    "a call in sharegpt without JSON": (turns(("human", "q"), ("function_call", "add(2)")), "function_call.*JSON"),
    "two turns of calls in sharegpt": (
        turns(("human", "q"), ("function_call", SHAREGPT_CALL), ("function_call", SHAREGPT_CALL), ("observation", "4")),
        r"conversations\[2\]: a message of role function_call follows",
    ),
    "a call after a text in sharegpt": (
        turns(("human", "q"), ("gpt", "wait"), ("function_call", SHAREGPT_CALL), ("observation", "4")),
        r"conversations\[2\]: a message of role function_call follows a message of role gpt",
    ),
    "a text after a call in sharegpt": (
        turns(("human", "q"), ("function_call", SHAREGPT_CALL), ("gpt", "x")),
        r"conversations\[2\]: a message of role gpt follows a message of role function_call",
    ),
    "consecutive calls in columns": (
        {
            "conversations": [
                {"from": role, "value": text, "role": None}
                for role, text in (("human", "q"), *[("function_call", SHAREGPT_CALL)] * 2)
            ]
        },
        r"conversations\[2\]: a message of role function_call follows",
    ),
    "two thoughts of a call in sharegpt": (
        {
            "conversations": [
                {"from": "human", "value": "q"},
                {"from": "function_call", "value": f"<think>a</think>{SHAREGPT_CALL}", "reasoning_content": "b"},
            ]
        },
        "reasoning_content.*keep one",
    ),
    "a call in sharegpt without arguments": (
        turns(("human", "q"), ("function_call", '{"name": "add"}')),
        "tool_calls.*arguments",
    ),
    "a call in sharegpt with a key twice": (
        turns(("human", "q"), ("function_call", '{"name": "add", "name": "sub", "arguments": {}}')),
        "function_call.*name",
    ),
    "a bad conversation": ({"messages": [Q, X], "kto_tag": False}, "'kto_tag' is false.*kto"),
    "a result of no call": (
        {"messages": [Q, CALLING, {"role": "tool", "tool_call_id": "another", "content": "4"}, X]},
        r"messages\[2\] has tool_call_id \"another\".*call00000",
    ),
    "reference log-probs": (
        {"prompt": "q", "chosen": "good", "rejected": "bad", "ref_chosen_logps": -1.5},
        "model.path",
    ),
    "chatgpt": (turns(("user", "q"), ("chatgpt", "x")), "chatgpt"),
    "two prompts of a pair": ({"chosen": [Q, GOOD], "rejected": [R, BAD]}, '"q" and "r"'),
    "two system messages of a pair": (
        {"chosen": [{"role": "system", "content": "s"}, Q, GOOD], "rejected": [Q, BAD]},
        "different prompts|system",
    ),
    "a pair that ends with the user": ({"chosen": [Q, GOOD, R], "rejected": [Q, BAD, R]}, "'chosen'.*user"),
    "a rejected answer that ends with the user": ({"chosen": [Q, GOOD], "rejected": [Q, BAD, R]}, "'rejected'.*user"),
    "answers as lists of texts": ({"prompt": "q", "chosen": ["good"], "rejected": ["bad"]}, "chosen"),
    "margin": ({"prompt": "q", "chosen": "good", "rejected": "bad", "margin": 0.5}, "margin"),
    "two responses": ({"prompt": "q", "response": "x", "completion": "y"}, "'response'.*'completion'"),
    "two judged responses": ({"prompt": "q", "response": "x", "completion": "y", "label": True}, "'response'"),
    "loss_weights": ({"messages": [Q, X], "loss_weights": [0, 1]}, "loss_weights"),
    "loss_scale": ({"messages": [Q, X], "loss_scale": [0, 1]}, "loss_scale"),
    "train_mask": ({"messages": [Q, X], "train_mask": [0, 1]}, "train_mask"),
    "token_weights": ({"messages": [Q, X], "token_weights": [0.5]}, "token_weights"),
    "train_detail": ({"messages": [Q, {**X, "train_detail": [{"begin_offset": 0, "train": False}]}]}, "train_detail"),
    "prefix": ({"messages": [Q, {**X, "prefix": True}]}, "prefix"),
    "thinking_blocks": ({"messages": [Q, {**X, "thinking_blocks": [{"thinking": "t"}]}]}, "thinking_blocks"),
    "a weight between": ({"messages": [Q, {**X, "weight": 0.5}]}, "weight"),
    "a weight as text": ({"messages": [Q, {**X, "weight": "0"}]}, "weight"),
    "capital roles": ({"messages": [{"role": "User", "content": "q"}, X]}, "User"),
    "a name as a number": ({"messages": [Q, {**X, "name": 1.5}]}, r"messages\[1\] has name 1.5; give a string"),
    "content as a number": ({"messages": [{"role": "user", "content": 5}, X]}, "content"),
    "stepwise": ({"prompt": "q", "completions": ["a"], "labels": [True]}, "response"),
    "a question and its passage": (
        {"context": "The sky is green.", "question": "q", "response": "x"},
        "'question' is \"q\", but the prompt is read from 'context'",
    ),
    "misspelt tools": ({"messages": [Q, X], "toolz": [TOOL]}, "'toolz'.*rename it to 'tools'"),
    "a misspelt system message": ({"prompt": "q", "answer": "4", "sytem_prompt": "s"}, "rename it to 'system_prompt'"),
    "a misspelt history": ({"messages": [Q, X], "History": [["a", "b"]]}, "rename it to 'history'"),
    "tools of prime-rl": ({"messages": [Q, X], "tool_defs": [TOOL]}, "'tool_defs'.*data.fields.tools=tool_defs"),
    "tools of prime-rl as text": ({"messages": [Q, X], "tool_defs": json.dumps([TOOL])}, "'tool_defs'.*field tools"),
    "tools of verifiers": (
        {"prompt": [Q], "answer": "4", "info": json.dumps({"tool_defs": [TOOL["function"]]})},
        "'info.tool_defs'.*data.fields.tools=info.tool_defs",
    ),
    "tools of slime": ({"messages": [Q, X], "metadata": {"tools": [TOOL]}}, "'metadata.tools'"),
    "tools of NeMo Gym": (
        {"prompt": [Q], "answer": "4", "responses_create_params": {"tools": [TOOL]}},
        "'responses_create_params.tools'",
    ),
    "tools under another name": (
        {"messages": [Q, X], "available_tools": [TOOL]},
        "'available_tools'.*data.fields.tools=available_tools",
    ),
    "tools of BFCL": (
        {"prompt": "q", "answer": "4", "function": [{"name": "add", "parameters": {"type": "object"}}]},
        "'function'.*field tools",
    ),
    "tools of a rejected answer": (
        {"prompt": "q", "chosen": "good", "rejected": "bad", "tools": [TOOL], "rejected_tools": [TOOL]},
        "'rejected_tools'.*both answers",
    ),
    "boxes in an image": (
        {"messages": [{**Q, "content": "<bbox>"}, X], "objects": {"ref": [], "bbox": [[1, 2, 3, 4]]}},
        "'objects.bbox'.*text alone",
    ),
    "rejected images": (
        {"prompt": "q", "chosen": "good", "rejected": "bad", "rejected_images": ["a.png"]},
        "'rejected_images'.*text alone",
    ),
    "a path of an image": ({"prompt": "q", "answer": "4", "image_path": "a.png"}, "'image_path'.*text alone"),
    "tokens of a pair": (
        {"prompt": "q", "chosen": "good", "rejected": "bad", "chosen_input_ids": [1]},
        "'chosen_input_ids'.*encodes",
    ),
    "a multiplier of the loss": ({"messages": [Q, X], "loss_multiplier": 0.5}, "'loss_multiplier'.*weight of 0"),
    "a record without loss": ({"messages": [Q, X], "loss": False}, "'loss' is false.*weight of 0"),
    "options by letter": (
        {"prompt": "Which? (A) One", "answer": "A", "options": {"A": "one", "B": "two"}},
        "'options' has the option \"two\".*into the prompt",
    ),
    "options in a list": ({"messages": [Q, X], "choices": ["one", "two"]}, "'choices' has the option \"one\""),
    "options with labels": (
        {"prompt": "q", "chosen": "A", "rejected": "B", "choices": {"text": ["one", "two"], "label": ["A", "B"]}},
        "'choices' has the option \"one\"",
    ),
    "an empty answer": ({"messages": [Q, {**X, "content": " "}]}, r"messages\[1\] is an .* message without text"),
    "an empty only answer": (
        {"messages": [Q, {**X, "content": " "}]}, "give the answer, remove the record$",
    ),
    "an empty chosen answer": (
        {"prompt": [Q], "chosen": [{**X, "content": ""}], "rejected": [X]},
        r"messages\[1\] is an .* message without text",
    ),
    "a ratio before a label": (
        {"prompt": "q", "label": 1, "answer": "#### 13"}, "'answer' is \"#### 13\", but the gold answer is read",
    ),
    "a mask of a message": ({"messages": [Q, {**X, "masked": True}]}, "masked.*weight\": 0 if"),
}  # fmt: skip


@pytest.mark.parametrize(("record", "trained"), TRAINED.values(), ids=TRAINED)
def test_records_that_are_trained(tmp_path, record, trained) -> None:
    assert texts_of(tmp_path, record)[1] == trained


@pytest.mark.parametrize(("record", "message"), REFUSED.values(), ids=REFUSED)
def test_records_that_are_refused(tmp_path, record, message) -> None:
    with pytest.raises(DataError, match=message):
        texts_of(tmp_path, record)


@pytest.mark.parametrize(
    "record", [{"prompt": "q", "completions": ["a"]}, {"prompt": "q", "answer": None, "labels": [1]}]
)
def test_a_remedy_names_no_field_that_is_read_already(tmp_path, record) -> None:
    with pytest.raises(DataError) as caught:
        texts_of(tmp_path, record)
    assert ": prompt}" not in str(caught.value)


CALL_OF_LLAMA = [{"name": "get", "parameters": {"city": "Paris", "type": "x"}}]


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": [Q], "chosen": [X], "rejected": [{**X, "content": ""}]},
        {"prompt": [Q], "completion": [{**X, "content": ""}], "label": False},
        {"prompt": [{**Q, "prefix": False}], "answer": "4"},
        # The record has no tools, and says so.
        {"prompt": [Q], "answer": "4", "tools": [], "all_tools": [TOOL]},
        {"prompt": [Q], "answer": "4", "wanted_tool_calls": CALL_OF_LLAMA},
        {"prompt": "2+2? A. 3, B. 4", "answer": "B", "options": ["A)3", "(B) 4."]},
        {"prompt": "Is 3 even?", "answer": "no", "choices": ["yes", "no"]},
        {"prompt": "q", "label": 13, "answer": "We add. #### 13"},
    ],
)
def test_harmless_records_are_read(tmp_path, record) -> None:
    path = tmp_path / "data.jsonl"
    # KTO needs good and bad answers.
    good = [{"prompt": [Q], "completion": [X], "label": True}] if "completion" in record else []
    path.write_text("\n".join(map(json.dumps, [record, *good])))
    settings = {"tokenizer": tokenizer_of("qwen"), "system_prompt": None, "max_tokens": 1000}
    kind = Pairs if "chosen" in record else Judged if "completion" in record else Problems
    assert len(read_examples(path, kind(**settings))) == 1 + len(good)


def test_a_response_named_in_the_recipe_is_read(tmp_path) -> None:
    record = {"prompt": "q", "response": "x", "completion": "y"}
    assert texts_of(tmp_path, record, names=FieldNames(fields={"response": "response"}))[1] == "x<|im_end|>"


def problems_of(path):
    problems = read_examples(path, Problems(tokenizer=tokenizer_of("qwen"), system_prompt=None, max_tokens=100))
    return [(problem.messages[-1]["content"], problem.answer) for problem in problems]


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        pytest.param({"prompt": [b"q"], "answer": [b"4"]}, ("q", "4"), id="text as bytes"),
        pytest.param({"prompt": ["q"], "answer": [2**62]}, ("q", str(2**62)), id="integer"),
        pytest.param({"prompt": ["q"], "answer": pa.array([2**63], pa.uint64())}, ("q", str(2**63)), id="uint64"),
        pytest.param({"prompt": pa.array(["q"], pa.large_string()), "answer": ["4"]}, ("q", "4"), id="large_string"),
        pytest.param({"prompt": pa.array(["q"]).dictionary_encode(), "answer": ["4"]}, ("q", "4"), id="dictionary"),
        pytest.param(
            {"prompt": ["q"], "answer": ["4"], "time": [datetime.datetime(2020, 1, 1)]}, ("q", "4"), id="timestamp"
        ),
        pytest.param({"prompt": ["q"], "answer": [["4", "5"]]}, ("q", ["4", "5"]), id="list"),
        pytest.param({"prompt": [[Q]], "reward_model": [{"ground_truth": "4"}]}, ("q", "4"), id="structs"),
        pytest.param(
            {
                "prompt": pa.array([[list(Q.items())]], pa.list_(pa.map_(pa.string(), pa.string()))),
                "reward_model": pa.array([[("ground_truth", "4")]], pa.map_(pa.string(), pa.string())),
            },
            ("q", "4"),
            id="maps",
        ),
        pytest.param(
            {"prompt": ["q"], "answer": pa.array([UUID(int=4).bytes], pa.uuid())}, ("q", str(UUID(int=4))), id="uuid"
        ),
        pytest.param(
            {"prompt": ["q"], "answer": pa.array([[(1, "4")]], pa.map_(pa.int64(), pa.string()))},
            ("q", {"1": "4"}),
            id="map of numbers",
        ),
    ],
)  # fmt: skip
def test_columns_of_a_table(tmp_path, columns, problem) -> None:
    pq.write_table(pa.table(columns), tmp_path / "data.parquet")
    assert problems_of(tmp_path / "data.parquet") == [problem]
    # Reward functions and journals get the record as JSON.
    [record] = read_records(tmp_path / "data.parquet")
    json.dumps(record.fields)


def test_bytes_that_are_no_text_stay_base64(tmp_path) -> None:
    pq.write_table(pa.table({"prompt": ["q"], "answer": [b"\xff\xfe"]}), tmp_path / "data.parquet")
    assert problems_of(tmp_path / "data.parquet") == [("q", "//4=")]
    pq.write_table(pa.table({"prompt": [b"\xff\xfe"], "answer": ["4"]}), tmp_path / "data.parquet")
    with pytest.raises(DataError, match="row 1: 'prompt' has bytes"):
        problems_of(tmp_path / "data.parquet")
    columns = {"prompt": [[{"role": "user", "content": b"\xff\xfe"}]], "answer": ["4"]}
    pq.write_table(pa.table(columns), tmp_path / "data.parquet")
    with pytest.raises(DataError, match=r"prompt\[0\] has content of bytes"):
        problems_of(tmp_path / "data.parquet")


@pytest.mark.parametrize(
    ("column", "fault"),
    [
        (pa.array([[("a", 1), ("a", 2)]], pa.map_(pa.string(), pa.int8())), "duplicate key was 'a'"),
        (pa.array([10**12], pa.timestamp("s")), "date value out of range"),
    ],
)
def test_values_without_a_form_in_json_are_refused(tmp_path, column, fault) -> None:
    pq.write_table(pa.table({"prompt": ["q"], "answer": ["4"], "info": column}), tmp_path / "data.parquet")
    with pytest.raises(DataError, match=f"data.parquet: has a value .*{fault}.*save its column as text"):
        problems_of(tmp_path / "data.parquet")


def test_a_remedy_names_fields_as_yaml_reads_them(tmp_path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({" prompt": "q", "on": "4"}))
    kind = Problems(tokenizer=tokenizer_of("qwen"), system_prompt=None, max_tokens=100)
    with pytest.raises(DataError, match=r"data\.fields={") as caught:
        read_examples(path, kind)
    [fields] = re.findall(r"data.fields=({.*})'", str(caught.value))
    assert yaml.safe_load(fields) == {"prompt": " prompt", "answer": "on"}


def test_a_remedy_names_the_usual_fields_of_other_programs(tmp_path) -> None:
    path = tmp_path / "data.jsonl"
    for record, remedy in (
        ({"prompt": "q", "reward_spec": {"ground_truth": "4"}}, "{answer: reward_spec.ground_truth}"),
        ({"prompt": "q", "expected_answer": "4", "source": "s"}, "{answer: expected_answer}"),
    ):
        path.write_text(json.dumps(record))
        with pytest.raises(DataError, match=f"data.fields={remedy}"):
            problems_of(path)


@pytest.mark.parametrize("names", [["prompt", "prompt", "answer"], ["prompt", "answer", "answer"]])
def test_a_column_that_occurs_twice_is_refused(tmp_path, names) -> None:
    table = pa.Table.from_arrays([pa.array(["q"]), pa.array(["r"]), pa.array(["4"])], names=names)
    pq.write_table(table, tmp_path / "data.parquet")
    with pytest.raises(DataError, match=f"'{names[1]}'"):
        problems_of(tmp_path / "data.parquet")


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b'{"prompt":"q","prompt":"r","answer":"4"}', id="repeated key"),
        pytest.param(b'{"prompt":"q\x00","answer":"4"}', id="null byte"),
        pytest.param(b'{"prompt":"q\\ud800","answer":"4"}', id="half a surrogate pair"),
        pytest.param(b'{"prompt":"q","answer":"4"}\r{"prompt":"r","answer":"5"}\r', id="carriage returns"),
        pytest.param(b'{"prompt":"q","answer":"4"}{"prompt":"r","answer":"5"}', id="objects side by side"),
        pytest.param(b'{"prompt":"q","answer":NaN}', id="NaN"),
        pytest.param(b'{"prompt":"q","answer":1e400}', id="infinite number"),
        pytest.param(b'{"prompt":"q","answer":true}', id="true"),
        pytest.param(b'[{"prompt":"q","answer":"4"}]', id="list in a line"),
        pytest.param('{"prompt":"qé","answer":"4"}'.encode("latin1"), id="latin1"),
        pytest.param(b"PAR1\x00\x01", id="Parquet"),
        pytest.param(b"\x1f\x8b\x08\x00", id="gzip"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_texts_that_are_not_json_lines_are_refused(tmp_path, content) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError):
        problems_of(path)


def test_a_conversation_kind_reads_mixed_formats(tmp_path) -> None:
    path = tmp_path / "data.jsonl"
    records = [{"messages": [Q, X]}, {"prompt": "q", "response": "y"}, turns(("human", "q"), ("gpt", "z"))]
    path.write_text("\n".join(map(json.dumps, records)))
    tokenizer = tokenizer_of("qwen")
    examples = read_examples(path, Conversations(tokenizer=tokenizer, system_prompt=None, max_tokens=100))
    trained = [tokenizer.decode(sequence.token_ids[sequence.loss_mask]) for [sequence] in examples]
    assert trained == ["x<|im_end|>", "y<|im_end|>", "z<|im_end|>"]


def test_a_bad_answer_is_not_trained_as_a_good_one(tmp_path) -> None:
    path = tmp_path / "judged.jsonl"
    kind = Conversations(tokenizer=tokenizer_of("qwen"), system_prompt=None, max_tokens=100)
    path.write_text(json.dumps({"prompt": "q", "completion": "x", "label": True}))
    assert len(read_examples(path, kind)) == 1
    # Tables in CSV have only texts.
    for label in (False, "False"):
        path.write_text(json.dumps({"prompt": "q", "completion": "x", "label": label}))
        with pytest.raises(DataError, match="'label' is false"):
            read_examples(path, kind)


def problem_with(**fields):
    return {"prompt": [Q], "reward_model": {"style": "rule", "ground_truth": "4"}} | fields


CALC = {"calc_reward": {"create_kwargs": {"ground_truth": "4"}}}
ELSEWHERE = {
    "agent_name": problem_with(agent_name="tool_agent"),
    "extra_info.tools_kwargs": problem_with(extra_info={"index": 0, "tools_kwargs": CALC}),
    "extra_info.need_tools_kwargs": problem_with(extra_info={"need_tools_kwargs": True}),
    "extra_info.interaction_kwargs": problem_with(extra_info=json.dumps({"interaction_kwargs": {"name": "gsm8k"}})),
    "tools_kwargs": problem_with(tools_kwargs=CALC),
    "env_class": problem_with(env_class="gsm8k_multi_turn"),
    "max_turns": problem_with(max_turns=3),
    "extra_info.max_turns": problem_with(extra_info={"max_turns": 5}),
    "env_config": problem_with(env_config={"max_steps": 3, "env_configs": []}),
    "environment": problem_with(environment="wordle"),
    "info.env_id": problem_with(info=json.dumps({"env_id": "wordle"})),
}
"""Records of verl, SkyRL, open-instruct, TRL and verifiers with settings of an environment, by the field."""


def read_problem(tmp_path, record, environment):
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps(record))
    settings = {"tokenizer": tokenizer_of("qwen"), "system_prompt": None, "max_tokens": 100}
    [problem] = read_examples(path, Problems(environment=environment, **settings))
    return problem


@pytest.mark.parametrize("field", ELSEWHERE)
@pytest.mark.parametrize("environment", ["single_turn", "calculator"])
def test_settings_of_an_environment_that_the_recipe_does_not_name_are_refused(tmp_path, field, environment) -> None:
    with pytest.raises(DataError, match="environment of your own") as caught:
        read_problem(tmp_path, ELSEWHERE[field], environment)
    assert f"'{field}' is " in str(caught.value)


def test_a_number_of_turns_gets_a_remedy_that_works(tmp_path) -> None:
    for environment, has_setting in (("single_turn", False), ("calculator", True)):
        with pytest.raises(DataError) as caught:
            read_problem(tmp_path, ELSEWHERE["max_turns"], environment)
        # With a single turn the recipe's field is refused too.
        assert ("set rollout.max_turns" in str(caught.value)) is has_setting


@pytest.mark.parametrize("field", ELSEWHERE)
@pytest.mark.parametrize("environment", ["command", "my_game:Game"])
def test_an_environment_of_the_user_gets_the_settings(tmp_path, field, environment) -> None:
    assert read_problem(tmp_path, ELSEWHERE[field], environment).record == ELSEWHERE[field]


@pytest.mark.parametrize(
    "fields",
    [
        {"agent_name": "single_turn_agent", "extra_info": {"need_tools_kwargs": False, "tools_kwargs": None}},
        {"agent_name": None, "max_turns": 1, "extra_info": {"index": 3, "tools_kwargs": {"calc_reward": None}}},
    ],
)
def test_settings_of_a_single_turn_are_read(tmp_path, fields) -> None:
    assert read_problem(tmp_path, problem_with(**fields), "single_turn").answer == "4"
    if fields["agent_name"]:
        with pytest.raises(DataError, match="agent_name"):
            read_problem(tmp_path, problem_with(**fields), "calculator")
