"""Keys of records and messages: each that would change what is trained is used or refused."""

import json

import pytest

from megarl.data.chat import render
from megarl.data.formats import FieldNames
from megarl.data.kinds.conversations import Conversations
from megarl.data.kinds.preferences import Judged, Pairs, read_pair
from megarl.data.kinds.problems import Problems
from megarl.data.reader import read_examples, read_records
from megarl.data.survey import survey
from megarl.data.templates import written_texts
from megarl.types import DataError
from tests.data.templates import GLM, tokenizer_of

ASKED = {"role": "user", "content": "What is 2 + 2?"}
ANSWERED = {"role": "assistant", "content": "It is 4."}
WRONG = {"role": "assistant", "content": "BAD"}
AGAIN = {"role": "user", "content": "Again."}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ASKED_TEXT = "user\nWhat is 2 + 2?<|im_end|>"
SYSTEM_TEXT = "system\nBe brief.<|im_end|>"


def conversation(**keys):
    """A record of two turns, the first of them with these keys."""
    return {"messages": [ASKED, WRONG | keys, AGAIN, ANSWERED]}


def problem(prompt="What is 2 + 2?", **fields):
    return {"prompt": prompt, "answer": "4", **fields}


def write(path, record):
    path.write_text(json.dumps(record))
    return path


def texts_of(tmp_path, record, family="qwen", system_prompt=None, names=None):
    """Return the whole text that a record becomes, and the part of it that is trained."""
    path = write(tmp_path / "data.jsonl", record)
    tokenizer = tokenizer_of(family)
    has_label = isinstance(record.get("label"), bool)
    settings = {"tokenizer": tokenizer, "system_prompt": system_prompt, "max_tokens": 1000}
    if not has_label and any(name in record for name in ("answer", "gt_answer", "label", "reward_model")):
        [problem] = read_examples(path, Problems(**settings), names=names)
        return tokenizer.decode(problem.prompt_token_ids), ""
    if has_label:
        # A source of one record lacks the other label.
        [read] = read_records(path, names)
        sequences = Judged(**settings).make(0, read)
    else:
        kind = Pairs(**settings) if "chosen" in record else Conversations(**settings)
        [sequences] = read_examples(path, kind, names=names)
    trained = [sequence.token_ids[sequence.loss_mask] for sequence in sequences]
    return "".join(tokenizer.decode(s.token_ids) for s in sequences), "".join(map(tokenizer.decode, trained))


@pytest.mark.parametrize(
    "record",
    [
        pytest.param(conversation(weight=0), id="weight"),
        pytest.param(conversation(weight=0.0), id="weight as a float"),
        pytest.param(conversation(loss=False), id="loss"),
        pytest.param(conversation(trainable=False), id="trainable"),
        pytest.param(conversation(loss_mask=0), id="loss_mask"),
        pytest.param(conversation(train=False), id="train"),
        pytest.param(conversation(training=False, weight=0), id="two that agree"),
        pytest.param(
            {"conversations": [
                {"from": "human", "value": "q"}, {"from": "gpt", "value": "BAD", "weight": 0},
                {"from": "human", "value": "r"}, {"from": "gpt", "value": "It is 4.", "weight": 1},
            ]}, id="ShareGPT",
        ),
        pytest.param(
            {"prompt": [ASKED], "chosen": [WRONG | {"weight": 0}, AGAIN, ANSWERED], "rejected": "no"}, id="pair"
        ),
    ],
)  # fmt: skip
def test_an_excluded_turn_is_not_trained(tmp_path, record):
    whole, trained = texts_of(tmp_path, record)
    assert "BAD" in whole
    assert "BAD" not in trained and "It is 4.<|im_end|>" in trained


@pytest.mark.parametrize(
    "chat",
    [
        pytest.param(json.dumps([ASKED]), id="list"),
        pytest.param(json.dumps(ASKED), id="one message"),
        pytest.param("\n " + json.dumps([ASKED], indent=2), id="with white space"),
        pytest.param(json.dumps(json.dumps([ASKED])), id="JSON twice"),
        pytest.param('[{"from": "human", "value": "What is 2 + 2?"}]', id="ShareGPT"),
    ],
)
def test_a_chat_in_text_is_a_chat(tmp_path, chat):
    records = [
        problem(chat), {"messages": chat, "answer": "4"}, {"input": chat, "label": "4"},
        {"instruction": chat, "answer": "4"}, {"prompt": chat, "reward_model": '{"ground_truth": "4"}'},
        {"conversations": chat, "response": "It is 4."},
        {"prompt": chat, "chosen": "4", "rejected": "5"}, {"prompt": chat, "completion": "4", "label": True},
    ]  # fmt: skip
    for record in records:
        assert f"<|im_start|>{ASKED_TEXT}" in texts_of(tmp_path, record)[0]


def test_answers_in_text_are_chats_too(tmp_path):
    whole, other = json.dumps([ASKED, ANSWERED]), json.dumps([ASKED, WRONG])
    for record in (
        {"prompt": "q", "response": json.dumps([ANSWERED])},
        {"chosen": whole, "rejected": other},
        {"prompt": "q", "completion": json.dumps(ANSWERED), "label": False},
    ):
        assert "<|im_start|>assistant\nIt is 4.<|im_end|>" in texts_of(tmp_path, record)[0]


@pytest.mark.parametrize(
    "text",
    [
        '[{"x": 1}]', '[{"role": "admin", "name": "Bob"}]', json.dumps([ASKED]) + " is printed by what?", "[1, 2]",
        "Write [{'role': 'user', 'content': 'x'}] as JSON.", "[{'role': 'user', 'content': 'x'}] is what in Python?",
        "{'name': 'x', 'role': 'admin'}", '{"type": "div", "role": "button", // x\n"n": 1}',
        '{"role": "admin", "id": 1}\n{"role": "user", "id": 2}', '{"from": "Alice", "to": "Bob", "content": "hi"}',
        '{"role": "admin", "content": "all"}', "{'content': 1, 'role': 'admin'}", '[{"role": "user", "id": 1}]',
        '[{"role": "user", "content": "x", "id": 1}, {"role": "admin", "id": 2}]', '[{"role": ["user"], "value": 1}]',
    ],
)  # fmt: skip
def test_other_text_remains_text(tmp_path, text):
    assert f"user\n{text}<|im_end|>" in texts_of(tmp_path, problem(text))[0]
    assert_answer_remains_text(tmp_path, text)


def assert_answer_remains_text(tmp_path, text):
    for record in (
        {"prompt": "q", "response": text},
        {"prompt": "q", "chosen": text, "rejected": "no"},
        {"prompt": "q", "chosen": "no", "rejected": text},
        {"prompt": "q", "completion": text, "label": True},
    ):
        assert f"{text}<|im_end|>" in texts_of(tmp_path, record)[1]


@pytest.mark.parametrize(
    "text",
    [
        '{"model": "gpt-4o", "messages": [{"role": "user", "content": "Hello"}]}',
        "{'model': 'gpt-4o', 'messages': [{'role': 'user', 'content': 'Hello'}]}",
        json.dumps([[ASKED, ANSWERED]]),
    ],
)
def test_a_chat_inside_an_answer_remains_text(tmp_path, text):
    assert_answer_remains_text(tmp_path, text)
    with pytest.raises(DataError, match="line 1: 'prompt'"):
        texts_of(tmp_path, problem(text))


@pytest.mark.parametrize(
    ("answer", "fault"),
    [(str([ANSWERED]), "Python's notation"), (json.dumps([ANSWERED])[:-1] + ",]", "not valid JSON")],
)
def test_broken_chats_in_answers_are_refused(tmp_path, answer, fault):
    with pytest.raises(DataError, match=f"line 1: 'response' .*{fault}"):
        texts_of(tmp_path, {"prompt": "q", "response": answer})


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        pytest.param(str([ASKED]), "Python's notation", id="repr"),
        pytest.param(f"array([{ASKED}], dtype=object)", "Python's notation", id="numpy"),
        pytest.param(str([{"role": "user", "content": "It's 4?"}]), "Python's notation", id="repr with an apostrophe"),
        pytest.param(str([ASKED, ANSWERED])[:-20], "Python's notation", id="cut repr"),
        pytest.param(json.dumps([ASKED, ANSWERED])[:-20], "not valid JSON", id="cut"),
        pytest.param(json.dumps([ASKED])[:-1] + ",]", "not valid JSON", id="comma"),
        pytest.param(str((ASKED,)), "Python's notation", id="repr of a tuple"),
        pytest.param(json.dumps({"messages": [ASKED]}), "a whole record", id="record"),
        pytest.param(json.dumps([[ASKED]]), "a list of chats", id="two lists"),
        pytest.param(json.dumps([{"role": "bot", "content": "x"}]), 'has role "bot"', id="role"),
    ],
)
def test_broken_chats_in_text_are_refused(tmp_path, text, fault):
    with pytest.raises(DataError, match=f"line 1: '?prompt.*{fault}"):
        texts_of(tmp_path, problem(text))


@pytest.mark.parametrize(
    "record",
    [
        pytest.param(problem(system="Be brief."), id="problem"),
        pytest.param({"messages": ASKED, "gt_answer": "4", "answer": "4", "system_prompt": "Be brief."}, id="name"),
        pytest.param({"prompt": [ASKED], "reward_model": {"ground_truth": "4"}, "system": "Be brief."}, id="verl"),
        pytest.param(problem(system={"role": "system", "content": "Be brief."}), id="message"),
        pytest.param({"prompt": "q", "completion": "a", "system": "Be brief."}, id="prompt and completion"),
        pytest.param({"conversations": [
            {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}
        ], "system": "Be brief."}, id="ShareGPT"),
        pytest.param({"instruction": "q", "input": "x", "output": "a", "system": "Be brief."}, id="Alpaca"),
        pytest.param({"prompt": "q", "chosen": "a", "rejected": "b", "system": "Be brief."}, id="pair"),
        pytest.param({"chosen": [ASKED, ANSWERED], "rejected": [ASKED, WRONG], "system": "Be brief."}, id="whole pair"),
        pytest.param({"prompt": "q", "response": "a", "label": True, "system": "Be brief."}, id="judged"),
        pytest.param({"messages": [{"role": "system", "content": "Be brief."}, ASKED, ANSWERED],
                      "system": "Be brief."}, id="twice the same"),
        pytest.param({"messages": [{"role": "system", "content": " "}, ASKED, ANSWERED],
                      "system_prompt": "Be brief."}, id="a blank one in the chat"),
        pytest.param(problem([{"role": "system", "content": "Be brief."}, ASKED], system="\n"), id="a blank field"),
        pytest.param({"prompt": "q", **{name: [{"role": "system", "content": "Be brief."}, ASKED | {"content": "q "},
                      ANSWERED | {"content": name}] for name in ("chosen", "rejected")}}, id="answers"),
        pytest.param({"messages": [{"role": "developer", "content": "Be brief."}, ASKED, ANSWERED]}, id="developer"),
        pytest.param(problem(system="", system_prompt="Be brief."), id="the name with a text"),
        pytest.param(problem(history=[{"role": "system", "content": "Be brief."}, ASKED, ANSWERED]), id="history"),
    ],
)  # fmt: skip
def test_the_records_system_message_is_used(tmp_path, record):
    assert texts_of(tmp_path, record, system_prompt="Be long.")[0].startswith(f"<|im_start|>{SYSTEM_TEXT}")


def test_an_empty_system_field_leaves_the_recipes(tmp_path):
    for empty in (None, "", "  "):
        assert "system\nBe brief.<" in texts_of(tmp_path, problem(system=empty), system_prompt="Be brief.")[0]


@pytest.mark.parametrize(
    "history", [[["h1", "h2"]], json.dumps([["h1", "h2"]]), [said | {"content": text} for said, text in
                                                           ((ASKED, "h1"), (ANSWERED, "h2"))]],
    ids=["pairs", "text", "messages"],
)  # fmt: skip
def test_earlier_turns_come_before_the_prompt(tmp_path, history):
    turns = "<|im_start|>user\nh1<|im_end|>\n<|im_start|>assistant\nh2<|im_end|>\n<|im_start|>user\nq"
    for record in (
        {"instruction": "q", "output": "a", "history": history},
        problem("q", history=history),
        {"prompt": "q", "chosen": "a", "rejected": "b", "history": history},
    ):
        assert turns in texts_of(tmp_path, record)[0]


def test_tools_reach_the_prompt(tmp_path, monkeypatch):
    assert '"name": "add"' in texts_of(tmp_path, problem([ASKED], tools=[TOOL]))[0]
    monkeypatch.setattr(tokenizer_of("glm"), "chat_template", GLM)
    with pytest.raises(DataError, match="the chat template does not write the tool, 'add'"):
        texts_of(tmp_path, problem([ASKED], tools=[TOOL]), family="glm")


def test_tools_next_to_a_named_prompt_are_not_lost(tmp_path):
    record = {
        "input": {"messages": [ASKED], "tools": [TOOL]},
        "preferred": [ANSWERED],
        "other": [WRONG],
        "chosen": None,
    }
    fields = {"prompt": "input.messages", "chosen": "preferred", "rejected": "other"}
    with pytest.raises(DataError, match=r"'input.tools' .*data.fields.tools=input.tools"):
        texts_of(tmp_path, record, names=FieldNames(fields=fields))
    whole, _ = texts_of(tmp_path, record, names=FieldNames(fields=fields | {"tools": "input.tools"}))
    assert whole.count(ASKED_TEXT) == whole.count("parameters") == 2


def test_tools_of_the_record_and_of_the_environment_must_be_equal(tmp_path):
    path = write(tmp_path / "data.jsonl", problem(tools=[TOOL]))
    settings = {"tokenizer": tokenizer_of("qwen"), "system_prompt": None, "max_tokens": 1000}
    for offered in ((), (TOOL,)):
        kind = Problems(environment_tools=lambda: offered, **settings)  # noqa: B023
        [made] = read_examples(path, kind)
        assert made.tools == (TOOL,)
    with pytest.raises(DataError, match=r"line 1: .tools. is .* rollout.environment offers tools"):
        read_examples(path, Problems(environment_tools=lambda: (TOOL, TOOL), **settings))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([{"type": "text", "text": "q1 ", "image": None}, {"type": "text", "text": "q2"}], "q1 q2"),
        ([{"type": "input_text", "text": "q1"}], "q1"),
        ([{"text": "q1"}], "q1"),
    ],
)
def test_text_parts_are_joined(tmp_path, content, text):
    assert f"user\n{text}<|im_end|>" in texts_of(tmp_path, problem([{"role": "user", "content": content}]))[0]


def test_empty_keys_and_other_columns_change_nothing(tmp_path):
    empty = {
        "tool_calls": None,
        "refusal": None,
        "audio": [],
        "image": {"bytes": None},
        "weight": None,
        "name": "",
        "from": None,
        "value": None,
    }
    assert "It is 4." in texts_of(tmp_path, {"messages": [ASKED | empty, ANSWERED | empty]})[1]
    columns = {"id": 7, "difficulty": "easy", "data_source": "x", "extra_info": {"index": 0}, "question": "2 + 2"}
    columns |= {"images": [], "enable_thinking": None, "chat_template_kwargs": {}, "weight": 1, "messages": [ASKED]}
    columns |= {"image": {"bytes": None, "path": None}, "videos": [None], "documents": [{"text": None}]}
    columns |= {"apply_chat_template_kwargs": {"enable_thinking": None}}
    whole, _ = texts_of(tmp_path, problem(**columns))
    assert whole == texts_of(tmp_path, problem())[0]
    kind = Problems(tokenizer=tokenizer_of("qwen"), system_prompt=None, max_tokens=100)
    [made] = read_examples(write(tmp_path / "data.jsonl", problem(**columns)), kind)
    assert made.record == problem(**columns)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_written_under_the_name_that_the_template_reads(tmp_path, key):
    tokenizer = tokenizer_of("forgetful")
    record = {"messages": [ASKED, ANSWERED | {key: "so so"}]}
    assert "<think>so so</think>" in texts_of(tmp_path, record, family="forgetful")[1]
    template = str(tokenizer.chat_template)
    try:
        tokenizer.chat_template = template.replace("reasoning_content", "thinking")
        assert "<think>so so</think>" in texts_of(tmp_path, record, family="forgetful")[1]
    finally:
        tokenizer.chat_template = template


@pytest.mark.parametrize(
    ("record", "key"),
    [
        (conversation(weight=0.5), "weight"),
        (conversation(weight="0"), "weight"),
        (conversation(loss_mask=[0, 1]), "loss_mask"),
        (conversation(weight=0, loss=True), "weight and loss"),
        ({"messages": [ASKED, ANSWERED | {"weight": 0}]}, "weight 0"),
        ({"messages": [ASKED | {"train": True}, ANSWERED]}, "train"),
        (conversation(citations=["x"]), "citations"),
        (conversation(images=["x"]), "images"),
        (conversation(function_call={"name": "now", "arguments": "{}"}), "function_call"),
        (problem([ASKED | {"prefix": True}]), "prefix"),
        ({"messages": [ASKED | {"name": "Alice"}, ANSWERED]}, "name"),
        ({"messages": [ASKED | {"tool_calls": [{"name": "add", "arguments": {}}]}, ANSWERED]}, "tool_calls"),
        (conversation(tool_calls=[{"function": {"name": "add", "arguments": {}, "result": "4"}}]), "result"),
        (conversation(tool_calls=[{"output": 1, "function": {"name": "add", "arguments": {}}}]), "output"),
        (conversation(tool_calls=[{"type": "custom", "function": {"name": "add", "arguments": {}}}]), "type"),
        (conversation(reasoning="hm hm"), "reasoning"),
        (conversation(reasoning="hm", thinking="so"), "reasoning and thinking"),
        ({"prompt": [ASKED], "chosen": [ANSWERED | {"thinking": "2+2"}], "rejected": "5"}, "thinking"),
        (problem([ASKED, ANSWERED | {"reasoning_content": "2+2"}, AGAIN]), "reasoning_content"),
        ({"prompt": "q", "response": "a", "reasoning_content": "hm hm"}, "reasoning_content"),
        ({"prompt": "q", "response": "a", "reasoning": "二加二等于四"}, "reasoning"),
        ({"prompt": "q", "response": [ANSWERED], "reasoning": "hm hm"}, "reasoning"),
        ({"messages": [ASKED, ANSWERED], "reasoning": "hm hm"}, "reasoning"),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "thinking": "hm hm"}, "thinking"),
        ({"prompt": "q", "response": "a", "label": True, "reasoning": "hm hm"}, "reasoning"),
        ({"messages": [ASKED, {"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}]}]}, "thinking"),
        (problem([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "q"}]}]), "image"),
        (problem([{"role": "user", "content": [{"type": "text", "text": "q", "cache": "x"}]}]), "cache"),
        (problem(image="a.png"), "image"),
        ({"messages": [ASKED, ANSWERED], "videos": ["a.mp4"]}, "videos"),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "audio": {"path": "x"}}, "audio"),
        (problem(multi_modal_data={"image": ["x"]}), "multi_modal_data"),
        (problem(images=[None, {"bytes": None, "path": "a.png"}]), "images"),
        (conversation(tool_calls=[None]), "tool_calls"),
        (problem(chat_template_kwargs={"enable_thinking": False}), "chat_template_kwargs"),
        ({"messages": [ASKED, ANSWERED], "enable_thinking": False}, "enable_thinking"),
        ({"messages": [ASKED, ANSWERED], "loss_mask": [0, 1]}, "loss_mask"),
        ({"messages": [ASKED, ANSWERED], "mask": "User"}, "mask"),
        ({"messages": [ASKED, ANSWERED], "weight": 0}, "weight"),
        ({"messages": [ASKED, ANSWERED], "input_ids": [1, 2]}, "input_ids"),
        ({"messages": [ASKED, ANSWERED], "functions": [{"name": "add"}]}, "functions"),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "margin": 0.4}, "margin"),
        (problem(system=7), "system"),
        (problem(system="a", system_prompt="b"), "system"),
        ({"messages": [{"role": "system", "content": "Be long."}, ASKED, ANSWERED], "system": "Be brief."}, "system"),
        (problem(history=["x"]), "history"),
        (problem(ground_truth="5"), "ground_truth"),
        (problem(ground_truth=5), "data.fields"),
        (problem(label="5"), "answer"),
        ({"prompt": "q", "label": 5, "ground_truth": "4"}, "ground_truth"),
        ({"messages": [ASKED, ANSWERED], "train_on_input": True}, "train_on_input"),
        (problem(sampling_params={"temperature": 0.2}), "sampling_params"),
        (problem(temperature=0), "temperature"),
        (problem(max_tokens=64), "max_tokens"),
        (problem(stop=["\n"]), "stop"),
        (problem(stop_strings="\n"), "stop_strings"),
        (problem(tool_choice="required"), "tool_choice"),
        (problem(response_format={"type": "json_object"}), "response_format"),
        (problem(gt_answer="5"), "answer"),
        (problem(final_answer="5"), "final_answer"),
        (problem(expected_answer=["5"]), "expected_answer"),
        ({"prompt": [ASKED], "gt_answer": "4", "ground_truth": "5"}, "ground_truth"),
        ({"prompt": [ASKED], "reward_model": {"ground_truth": "4"}, "gt_answer": "5"}, "gt_answer"),
        ({"prompt": [ASKED], "answer": "4", "reward_model": {"ground_truth": "5"}}, "answer"),
        (problem(responses_create_params={"temperature": 0.2}), "responses_create_params.temperature"),
        (problem(responses_create_params={"instructions": "Be brief."}), "data.fields.system"),
        (problem("q", context="The sky is green."), "context"),
        (problem("q", messages=[ASKED]), "prompt"),
        ({"prompt": "other", "messages": [ASKED, ANSWERED]}, "prompt"),
        ({"messages": [ASKED, ANSWERED], "response": "It is 5."}, "response"),
        ({"prompt": "q", "chosen": [{"role": "system", "content": "x"}, ANSWERED], "rejected": "b"}, "system"),
        (
            {
                "prompt": [{"role": "system", "content": "y"}, ASKED],
                "chosen": [{"role": "system", "content": "x"}, ANSWERED],
                "rejected": "b",
            },
            "system",
        ),
        ({"prompt": "q", "chosen": [{"role": "system", "content": "x"}], "rejected": "b"}, "chosen"),
    ],
)
def test_what_is_not_read_is_refused_by_name(tmp_path, record, key):
    with pytest.raises(DataError, match=rf"data.jsonl, line 1: .*\b{key}\b"):
        texts_of(tmp_path, record)


VERL = {"prompt": [ASKED], "data_source": "x"}
SLIME = {"prompt": [ASKED], "label": "4"}
REWARDS_OF_RECORDS = [
    (VERL | {"reward_model": {"style": "model", "ground_truth": "4"}}, "reward_model.style", "judge"),
    (VERL | {"reward_model": '{"style": "model", "ground_truth": "4"}'}, "reward_model.style", "reward.model"),
    (VERL | {"data_source": "apps", "reward_model": {"ground_truth": "{}"}}, "data_source", "code"),
    (VERL | {"data_source": "searchR1_nq", "reward_model": {"ground_truth": "x"}}, "data_source", "my.py:exact"),
    (SLIME | {"metadata": {"rm_type": "gpqa"}}, "metadata.rm_type", "multiple_choice"),
    (SLIME | {"metadata": '{"rm_type": "remote_rm"}'}, "metadata.rm_type", "remote"),
    (SLIME | {"metadata": {"rm_type": "f1"}}, "metadata.rm_type", "my.py:f1"),
    (problem(reward_spec={"method": "reward_model"}), "reward_spec.method", "judge"),
    ({"prompt": [ASKED], "ground_truth": "x", "dataset": ["code"]}, "dataset", "code"),
    ({"prompt": [ASKED], "ground_truth": "x", "dataset": "ifeval"}, "dataset", "my.py:ifeval"),
]


@pytest.mark.parametrize(("record", "field", "fitting_reward"), REWARDS_OF_RECORDS)
def test_a_record_s_choice_of_another_reward_is_refused(tmp_path, record, field, fitting_reward):
    path = write(tmp_path / "data.jsonl", record)
    settings = {"tokenizer": tokenizer_of("qwen"), "system_prompt": None, "max_tokens": 100}
    # A judge, a reward model or the user's own server can score any record.
    for rewards in ((fitting_reward,), ("boxed", fitting_reward), ("boxed", "remote"), ("judge",), None):
        read_examples(path, Problems(rewards=rewards, **settings))
    remedy = "a function of your own" if ":" in fitting_reward else rf"set it to .*\b{fitting_reward}\b.*"
    with pytest.raises(DataError, match=rf"line 1: '{field}' is .* = boxed; .*{remedy}, or remove the field"):
        read_examples(path, Problems(rewards=("boxed",), **settings))
    read_examples(path, Problems(rewards=("boxed",), environment="my.py:Environment", **settings))


@pytest.mark.parametrize(
    "record",
    [
        VERL | {"reward_model": {"style": "rule", "ground_truth": "4"}},
        VERL | {"reward_model": {"style": "rule-lighteval/MATH_v2", "ground_truth": "4"}},
        SLIME | {"metadata": {"rm_type": "math"}},
        SLIME | {"metadata": {"rm_type": " "}},
        SLIME | {"metadata": ["rm_type"]},
        problem(dataset="ifeval", reward_spec={"method": "rule"}),
        {"prompt": [ASKED], "ground_truth": "4", "dataset": "math"},
    ],
)
def test_a_record_s_choice_of_the_recipe_s_reward_changes_nothing(tmp_path, record):
    path = write(tmp_path / "data.jsonl", record)
    kind = Problems(rewards=("boxed",), tokenizer=tokenizer_of("qwen"), system_prompt=None, max_tokens=100)
    [made] = read_examples(path, kind)
    assert made.answer == "4"


@pytest.mark.parametrize(
    "record",
    [
        {"input": [ASKED], "output": "It is 4.", "reasoning": "off", "system_prompt": ""},
        {"messages": [ASKED, ANSWERED], "reasoning": "detailed", "thinking": None},
        {"messages": [ASKED, ANSWERED | {"content": "<think>so so</think>It is 4."}], "reasoning": "so so\n"},
        {"prompt": [ASKED], "chosen": "It is 4.", "rejected": "BAD", "reasoning": "on"},
        {"messages": [ASKED, ANSWERED], "generation_kwargs": {"temperature": 0.7}},
    ],
)
def test_labels_and_notes_change_nothing(tmp_path, record):
    assert "It is 4.<|im_end|>" in texts_of(tmp_path, record)[1]


@pytest.mark.parametrize(
    ("record", "fields", "num_users"),
    [
        ({"history": [ASKED], "answer": "4"}, {"prompt": "history", "answer": "answer"}, 1),
        ({"history": [ASKED], "gold": "4", "answer": "5"}, {"prompt": "history", "answer": "gold"}, 1),
        ({"system": "What is 2 + 2?", "answer": "4"}, {"prompt": "system", "answer": "answer"}, 1),
        ({"messages": [AGAIN, ANSWERED], "prompt": [ASKED], "answer": "4"}, {"history": "messages"}, 2),
    ],
)
def test_a_named_field_is_read_once(tmp_path, record, fields, num_users):
    whole, _ = texts_of(tmp_path, record, names=FieldNames(fields=fields))
    assert whole.count("What is 2 + 2?") == 1
    assert whole.count("<|im_start|>user") == num_users
    assert "<|im_start|>system" not in whole


def test_equal_answers_and_a_named_one_are_taken(tmp_path):
    settings = {"tokenizer": tokenizer_of("qwen"), "system_prompt": None, "max_tokens": 100}
    same = problem(ground_truth="4 ", solution="2 + 2 = 4")
    listed, number = problem(ground_truth=["4"]), problem(ground_truth=4.0)
    clear = {"prompt": [ASKED], "reward_model": {"ground_truth": "4"}, "answer": "2 + 2 = 4"}
    solved = {"prompt": [ASKED], "label": "4", "answer": "2 + 2 = 4"}
    two = problem(ground_truth="5")
    by_name = FieldNames(fields={"answer": "answer"}), FieldNames(answer_field="answer"), FieldNames("rl2")
    for record, names in (
        (same, None),
        (listed, None),
        (number, None),
        (clear, None),
        (solved, None),
        *((two, names) for names in by_name),
    ):
        [made] = read_examples(write(tmp_path / "data.jsonl", record), Problems(**settings), names=names)
        assert made.answer == "4"


def test_a_pair_may_have_its_prompt_in_history(tmp_path):
    record = {"history": "What is 2 + 2?", "human_ref_A": "It is 4.", "human_ref_B": "BAD"}
    fields = {"prompt": "history", "chosen": "human_ref_A", "rejected": "human_ref_B"}
    [read] = read_records(write(tmp_path / "data.jsonl", record), FieldNames(fields=fields))
    assert read_pair(read, None) == ((ASKED, ANSWERED), (ASKED, WRONG))


def test_a_prompt_is_not_its_own_answer(tmp_path):
    with pytest.raises(DataError, match=r"no field for answer; .*\(answer\)"):
        texts_of(tmp_path, {"answer": "4"}, names=FieldNames("rl2", {"prompt": "answer"}))


def test_an_answer_may_be_the_response_too():
    format = FieldNames("alpaca", {"prompt": "instruction", "answer": "output"}).format_of({})
    assert format.answer == ("output",) and "output" in format.response


def test_a_named_prompt_is_the_only_one(tmp_path):
    names = FieldNames(fields={"prompt": "prompt"})
    record = problem("q", context="The sky is green.", messages=[ASKED])
    assert "user\nq<|im_end|>" in texts_of(tmp_path, record, names=names)[0]


def test_a_response_continues_the_messages(tmp_path):
    record = {"messages": [ASKED, ANSWERED, AGAIN], "response": "It is 5."}
    assert texts_of(tmp_path, record)[1] == "It is 4.<|im_end|>It is 5.<|im_end|>"


@pytest.mark.parametrize("response", ["It is 4.\n", [ANSWERED | {"content": " It is 4."}]])
def test_a_response_may_repeat_the_last_message(tmp_path, response):
    record = {"messages": [ASKED, ANSWERED], "response": response}
    assert texts_of(tmp_path, record)[1] == "It is 4.<|im_end|>"


@pytest.mark.parametrize(
    ("opening", "rest"),
    [("<think>\n", "Two twos.\n</think>\n\nIt is 4."), ("<think>\n\n</think>\n\n", "It is 4.")],
)
def test_an_answer_may_begin_with_what_the_generation_prompt_opens(tmp_path, opening, rest):
    tokenizer = tokenizer_of("qwen")
    template = str(tokenizer.chat_template)
    answer = ANSWERED | {"content": opening + rest}
    try:
        tokenizer.chat_template = template.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n" + opening)
        for record in ({"messages": [ASKED, answer]}, problem([ASKED, answer, AGAIN])):
            assert f"assistant\n{opening}{rest}<|im_end|>" in texts_of(tmp_path, record)[0]
        # The opening is not a part of another answer.
        with pytest.raises(DataError, match=r"writes messages\[1\] without the prompt"):
            texts_of(tmp_path, {"messages": [ASKED, ANSWERED]})
    finally:
        tokenizer.chat_template = template


def test_a_template_that_drops_text_is_refused(tmp_path):
    tokenizer = tokenizer_of("qwen")
    template = str(tokenizer.chat_template)
    try:
        # DeepSeek-R1's template drops the reasoning in an answer's text.
        tokenizer.chat_template = template.replace("m.content }}", "m.content.split('</think>')[-1] }}")
        assert "It is 4." in texts_of(tmp_path, {"messages": [ASKED, ANSWERED]})[1]
        with pytest.raises(DataError, match=r"the content of messages\[1\]"):
            texts_of(tmp_path, {"messages": [ASKED, ANSWERED | {"content": "<think>so</think>It is 4."}]})
    finally:
        tokenizer.chat_template = template


@pytest.mark.parametrize("family", ["forgetful", "qwen"])
def test_the_check_of_a_long_prompt_renders_each_message_a_few_times(monkeypatch, family):
    turns = [
        message for n in range(100) for message in (ASKED, ANSWERED | {"content": f"It is {n}.", **thought(family)})
    ]
    num_rendered = []

    def count(tokenizer, messages, **settings):
        num_rendered.append(len(messages))
        return render(tokenizer, messages, **settings)

    monkeypatch.setattr(written_texts, "render", count)
    messages = [*turns, AGAIN]
    rendered = render(tokenizer_of(family), messages, generation_prompt=True)
    written_texts.check_prompt_written(tokenizer_of(family), messages, (), rendered)
    # Two short renderings for each answer: with it, and without it.
    assert sum(num_rendered) <= 3 * len(turns) / 2


def thought(family):
    return {"reasoning_content": "hm hm"} if family == "forgetful" else {}


def test_an_answer_that_needs_the_earlier_messages_is_looked_for_among_them(tmp_path):
    """This template writes an answer after a second question only, and no reasoning."""
    tokenizer = tokenizer_of("qwen")
    template = str(tokenizer.chat_template)
    prompt = [ASKED, AGAIN, ANSWERED, AGAIN]
    try:
        tokenizer.chat_template = template.replace(
            "m.content }}", "(m.content if loop.index != 2 or m.role == 'user' else '') }}"
        )
        assert "It is 4." in texts_of(tmp_path, problem(prompt))[0]
        with pytest.raises(DataError, match=r"line 1: .* the content of messages\[1\], 'It is 4\.'"):
            texts_of(tmp_path, problem([ASKED, ANSWERED, AGAIN]))
    finally:
        tokenizer.chat_template = template


def test_a_survey_without_a_model_refuses_them_too(tmp_path):
    path = write(tmp_path / "data.jsonl", problem(images=["a.png"]))
    found = survey(str(path))
    assert found.num_faults == 1 and "'images' is" in str(found.faults[0])
