"""Data in the formats of other programs make the same problems, conversations and pairs as megarl's own."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from megarl.config import DataConfig, Recipe
from megarl.data.chat import load_tokenizer
from megarl.data.formats import FORMATS, RecordFormat
from megarl.datasets.counts import count_records, recognised_formats
from megarl.datasets.reading import read_conversations, read_preferences, read_problems
from megarl.datasets.reward_trials import check_rewards
from megarl.preflight import check
from megarl.types import DataError

USER = {"role": "user", "content": "1 + 2"}
SAID = {"role": "assistant", "content": "3"}
WRONG = {"role": "assistant", "content": "4"}
TESTS = {"inputs": ["1 2"], "outputs": ["3"]}

PROBLEMS = {
    "colossalrl, one message": ({"messages": USER, "gt_answer": "3"}, "colossalrl (prompt messages, answer gt_answer)"),
    "colossalrl, a list": ({"messages": [USER], "gt_answer": 3}, "colossalrl (prompt messages, answer gt_answer)"),
    "rl2": ({"messages": [USER], "answer": "3"}, "rl2 (prompt messages, answer answer)"),
    "verl": (
        {
            "data_source": "sums", "prompt": [USER], "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "3"}, "extra_info": {"index": 7},
        },
        "verl (prompt prompt, answer reward_model.ground_truth)",
    ),
    "trl, conversational": ({"prompt": [USER], "solution": "3"}, "trl (prompt prompt, answer solution)"),
    "trl, plain": ({"prompt": "1 + 2", "ground_truth": "3"}, "trl (prompt prompt, answer ground_truth)"),
    "slime": ({"prompt": [USER], "label": "3", "metadata": {"n": 1}}, "slime (prompt prompt, answer label)"),
    "openrlhf": ({"input": "1 + 2", "label": "3"}, "openrlhf (prompt input, answer label)"),
    "alpaca": (
        {"instruction": "1 + 2", "input": "", "output": "3"},
        "alpaca (prompt instruction, input input, answer output)",
    ),
    "alpaca's prompt, an answer": (
        {"instruction": "1 + 2", "answer": "3", "output": "it is 3"}, "alpaca (prompt instruction, answer answer)"
    ),
    "a prompt beside other fields": (
        {"prompt": "1 + 2", "instruction": "x", "input": "y", "answer": "3"}, "trl (prompt prompt, answer answer)"
    ),
    "ShareGPT's names": (
        {"conversations": [{"from": "human", "value": "1 + 2"}], "gt_answer": "3"},
        "colossalrl (prompt conversations, answer gt_answer)",
    ),
}  # fmt: skip


def write(path: Path, *records: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.mark.parametrize("name", PROBLEMS)
def test_problems(recipe: Callable[..., Recipe], tmp_path: Path, name: str) -> None:
    record, told = PROBLEMS[name]
    own = recipe()
    other = recipe(data={"train": write(tmp_path / "other.jsonl", record, record)})
    check(other)
    if name == "verl":
        check_rewards(other)
    assert count_records(other) == {"train": 2}
    assert recognised_formats(other) == {"data.train": told}
    tokenizer = load_tokenizer(own.model.path)
    expected = read_problems(own, tokenizer, own.data.train)[0]
    found = read_problems(other, tokenizer, other.data.train)[0]
    assert (found.messages, found.prompt_token_ids, found.answer) == (
        expected.messages,
        expected.prompt_token_ids,
        expected.answer,
    )
    assert found.record == record


def test_the_recipe_names_all_formats_and_their_fields() -> None:
    formats = {name for kind in get_args(DataConfig.model_fields["format"].annotation) for name in get_args(kind)}
    assert formats == FORMATS.keys()
    roles = {field.name for field in dataclasses.fields(RecordFormat)} - {"name", "other_prompts"}
    assert set(get_args(get_args(DataConfig.model_fields["fields"].annotation)[0])) == roles


def test_a_format_and_fields_may_be_named(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    record = {"messages": USER, "gt_answer": "3", "reward_model": {"ground_truth": "5"}, "q": {"text": "2 + 3"}}
    path = write(tmp_path / "other.jsonl", record)
    tokenizer = load_tokenizer(recipe().model.path)

    def read(**data: Any) -> tuple[str, Any]:
        made = recipe(data={"train": path, **data})
        problem = read_problems(made, tokenizer, path)[0]
        return problem.messages[0]["content"], problem.answer

    with pytest.raises(DataError, match=r"'gt_answer' is \"3\", but .* from 'reward_model\.ground_truth', \"5\""):
        read()  # what verl writes is recognised
    assert read(format="verl") == ("1 + 2", "5")
    assert read(format="colossalrl") == ("1 + 2", "3")
    assert read(fields={"prompt": "q.text"}, answer_field="q") == ("2 + 3", {"text": "2 + 3"})
    with pytest.raises(DataError, match=r"line 1: no field for answer; .* the names of the format slime"):
        read(format="slime")
    with pytest.raises(DataError, match=r"Looked for q\.none \(prompt\), the names given in the recipe"):
        read(fields={"prompt": "q.none"})


@pytest.mark.parametrize(
    ("loop", "record", "words"),
    [
        pytest.param(
            "rl", {"question": "1 + 2", "solution": "3"},
            ["no field for prompt and answer;", "'data.fields={prompt: question, answer: solution}'", *FORMATS],
            id="usual names",
        ),
        pytest.param(
            "rl", {"frage": "1 + 2", "antwort": "3"},
            ["no field for prompt and answer;", "'data.fields={prompt: frage, answer: antwort}'"], id="two texts",
        ),
        pytest.param(
            "rl", {"frage": "1 + 2", "antwort": "3", "quelle": "x"},
            ["'data.fields={prompt: FIELD, answer: FIELD}'", "the record has 'frage', 'antwort', 'quelle'"],
            id="three texts",
        ),
        pytest.param(
            "sft", {"frage": "1 + 2", "antwort": "3"},
            ["no field for prompt and response;", "'data.fields={prompt: frage, response: antwort}'"], id="sft",
        ),
        pytest.param(
            "preference", {"question": "1", "good": "2", "bad": "3"},
            ["no field for prompt and chosen and rejected;", "{prompt: question, chosen: good, rejected: bad}"],
            id="pairs",
        ),
    ],
)  # fmt: skip
def test_all_missing_fields_are_named_with_the_line_to_paste(
    recipe: Callable[..., Recipe], tmp_path: Path, loop: str, record: dict[str, Any], words: list[str]
) -> None:
    path = write(tmp_path / "other.jsonl", record)
    sampling = {"sampling": {"max_new_tokens": 24} if loop == "rl" else {}}
    with pytest.raises(DataError) as caught:
        count_records(recipe(loop=loop, data={"train": path}, rollout=sampling))
    assert [word for word in words if word not in str(caught.value)] == []


def test_each_data_set_may_name_its_own_fields(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", {"question": "1 + 2", "solution": "3"})
    own = write(tmp_path / "own.jsonl", {"messages": USER, "gt_answer": "5"})
    other = write(tmp_path / "other.jsonl", {"q": "1 + 2", "a": "7"})
    talk = write(tmp_path / "talk.jsonl", {"q": "1 + 2", "said": "3"})
    sets: dict[str, Any] = {
        "same": train,
        "own": {"path": own, "fields": {}},
        "other": {"path": other, "fields": {"prompt": "q"}, "answer_field": "a"},
    }
    made = recipe(
        data={
            "train": train, "fields": {"prompt": "question", "answer": "solution"}, "validation": sets,
            "ptx": {"path": talk, "fields": {"prompt": "q", "response": "said"}},
        },
        algorithm={"ptx_coefficient": 0.1, "ptx_conversations": 8},
    )  # fmt: skip
    check(made)
    check_rewards(made)
    assert count_records(made) == {"train": 1, "same": 1, "own": 1, "other": 1, "ptx": 1}
    tokenizer = load_tokenizer(made.model.path)
    answers = {name: read_problems(made, tokenizer, found)[0].answer for name, found in made.data.validation.items()}
    assert answers == {"same": "3", "own": "5", "other": "7"}
    assert Recipe.model_validate(made.model_dump(mode="json")).data == made.data
    wrong = recipe(data={"train": own, "validation": {"other": {"path": other, "format": "trl"}}})
    with pytest.raises(DataError, match=r"'data\.validation\.other=\{path: .*, fields: \{prompt: q, answer: a\}\}'"):
        count_records(wrong)


@pytest.mark.parametrize("loop", ["rl", "sft", "preference"])
@pytest.mark.parametrize("names", [("instruction", "input"), ("instruction", "context"), ("question", "passage")])
def test_an_instruction_and_its_input_are_one_prompt(
    recipe: Callable[..., Recipe], tmp_path: Path, loop: str, names: tuple[str, str]
) -> None:
    answers = {"output": "3", "chosen": "3", "rejected": "4"}
    text = {"messages": "Add.\n\n1 + 2" if loop == "preference" else {**USER, "content": "Add.\n\n1 + 2"}}
    own = {"prompt": "Add.\n\n1 + 2", "response": "3"} if loop == "sft" else text | {"gt_answer": "3"} | answers
    other = dict(zip(names, ("Add.", "1 + 2"), strict=True)) | answers
    fields = {} if names[0] == "instruction" else {"prompt": "question", "input": "passage", "response": "output"}
    paths = [write(tmp_path / "own.jsonl", own), write(tmp_path / "other.jsonl", other)]
    made = recipe(
        loop=loop, data={"train": paths[1], "fields": fields, "answer_field": "output" if fields else None},
        rollout={"sampling": {"max_new_tokens": 24} if loop == "rl" else {}},
    )  # fmt: skip
    tokenizer = load_tokenizer(made.model.path)
    if loop == "rl":
        one, found = (read_problems(r, tokenizer, r.data.train)[0] for r in (recipe(data={"train": paths[0]}), made))
        assert (found.messages, found.answer) == (one.messages, one.answer)
    elif loop == "sft":
        plain = recipe(loop="sft", data={"train": paths[0]}, rollout={"sampling": {}})
        [[one]], [[found]] = (read_conversations(r, tokenizer, r.data.train) for r in (plain, made))
        assert np.array_equal(found.token_ids, one.token_ids) and np.array_equal(found.loss_mask, one.loss_mask)
    else:
        plain = recipe(loop="preference", data={"train": paths[0]}, rollout={"sampling": {}})
        [one], [found] = (read_preferences(r, tokenizer, r.data.train) for r in (plain, made))
        assert all(np.array_equal(a.token_ids, b.token_ids) for a, b in zip(found, one, strict=True))


def test_an_instruction_with_an_input_of_another_kind_is_refused(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    path = write(tmp_path / "other.jsonl", {"instruction": "Add.", "input": ["1", "2"], "output": "3"})
    with pytest.raises(DataError, match=r"'instruction' is \"Add\.\" and 'input' is \[.*give texts"):
        count_records(recipe(data={"train": path}))


def test_a_structured_answer_reaches_the_reward_function(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    path = write(tmp_path / "code.jsonl", {"messages": USER, "test_cases": TESTS})
    own = tmp_path / "own.py"
    own.write_text("def tests(completion_text, answer, record):\n    return float(answer['outputs'] == ['3'])\n")
    made = recipe(data={"train": path}, reward={"functions": [f"{own}:tests"]})
    check_rewards(made)
    assert read_problems(made, load_tokenizer(made.model.path), path)[0].answer == TESTS


@pytest.mark.parametrize(
    "record",
    [
        pytest.param({"messages": [USER, SAID]}, id="messages"),
        pytest.param({"prompt": [USER], "completion": [SAID]}, id="trl, conversational"),
        pytest.param({"prompt": "1 + 2", "completion": "3"}, id="trl, plain"),
        pytest.param({"prompt": "1 + 2", "response": "3"}, id="verl and RL2"),
        pytest.param({"input": "1 + 2", "output": "3"}, id="openrlhf"),
        pytest.param({"instruction": "1 + 2", "input": "", "output": "3"}, id="alpaca"),
        pytest.param({"messages": [{"from": "user", "content": "1 + 2"}, {"from": "gpt", "value": "3"}]}, id="from"),
    ],
)
def test_conversations(recipe: Callable[..., Recipe], tmp_path: Path, record: dict[str, Any]) -> None:
    own = write(tmp_path / "own.jsonl", {"messages": [USER, SAID]})
    path = write(tmp_path / "other.jsonl", record)
    made = recipe(loop="sft", data={"train": path}, rollout={"sampling": {}})
    tokenizer = load_tokenizer(made.model.path)
    [[expected]], [[found]] = (read_conversations(made, tokenizer, name) for name in (own, path))
    assert np.array_equal(found.token_ids, expected.token_ids)
    assert np.array_equal(found.loss_mask, expected.loss_mask) and found.loss_mask.any()


@pytest.mark.parametrize(
    "record",
    [
        pytest.param({"prompt": [USER], "chosen": [SAID], "rejected": [WRONG]}, id="trl, conversational"),
        pytest.param({"prompt": "1 + 2", "chosen": "3", "rejected": "4"}, id="trl, plain"),
        pytest.param({"chosen": [USER, SAID], "rejected": [USER, WRONG]}, id="trl, the prompt in both"),
        pytest.param({"input": "1 + 2", "chosen": "3", "rejected": "4"}, id="openrlhf"),
    ],
)
def test_pairs(recipe: Callable[..., Recipe], tmp_path: Path, record: dict[str, Any]) -> None:
    own = write(tmp_path / "own.jsonl", {"messages": USER, "chosen": "3", "rejected": "4"})
    path = write(tmp_path / "other.jsonl", record)
    made = recipe(loop="preference", data={"train": path}, rollout={"sampling": {}})
    tokenizer = load_tokenizer(made.model.path)
    [expected], [found] = (read_preferences(made, tokenizer, name) for name in (own, path))
    for one, other in zip(found, expected, strict=True):
        assert np.array_equal(one.token_ids, other.token_ids) and np.array_equal(one.loss_mask, other.loss_mask)


def test_what_is_too_long_is_left_out_and_counted_where_that_is_wanted(
    recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    long = {"messages": {"role": "user", "content": "1 + " * 200 + "2"}, "gt_answer": "402"}
    short = {"messages": USER, "gt_answer": "3"}
    path = write(tmp_path / "mixed.jsonl", short, long, short, long, long)
    with pytest.raises(DataError, match=r"line 2: the prompt has .* or set data\.overlong=drop"):
        count_records(recipe(data={"train": path}))
    made, dropped = recipe(data={"train": path, "overlong": "drop"}), Counter[str]()
    assert count_records(made, dropped) == {"train": 2} and dropped == {path: 3}
    numbers: list[dict[str, str]] = [{}, {}, {}]
    second = write(tmp_path / "second.jsonl", long, short, short, long, long)
    third = recipe(data={"train": path, "overlong": "drop", "validation": {"ptx": second}})
    for noted, train in zip(numbers, (made, recipe(data={"train": second, "overlong": "drop"}), third), strict=True):
        count_records(train, digests=noted)
    assert [list(noted) for noted in numbers] == [["data.train"]] * 3 and numbers[0] == numbers[2] != numbers[1]
    assert all(noted["data.train"].startswith("2 records, ") for noted in numbers)
    kept = read_problems(made, load_tokenizer(made.model.path), path)
    assert [problem.index for problem in kept] == [0, 2]
    only_long = write(tmp_path / "long.jsonl", long)
    with pytest.raises(DataError, match="every record is too long"):
        count_records(recipe(data={"train": only_long, "overlong": "drop"}))


def test_conversations_and_pairs_that_are_too_long(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    words = "1 + " * 200
    talk = write(tmp_path / "talk.jsonl", {"prompt": words, "response": "3"}, {"prompt": "1", "response": "1"})
    pairs = write(tmp_path / "pairs.jsonl", {"prompt": "1", "chosen": "1", "rejected": "2"},
                  {"prompt": words, "chosen": "1", "rejected": "2"})  # fmt: skip
    settings: dict[str, Any] = {"trainer": {"max_tokens_per_microbatch": 200}, "rollout": {"sampling": {}}}
    for loop, path in (("sft", talk), ("preference", pairs), ("reward_model", pairs)):
        with pytest.raises(DataError, match="allows"):
            count_records(recipe(loop=loop, data={"train": path}, **settings))
        dropped = Counter[str]()
        assert count_records(recipe(loop=loop, data={"train": path, "overlong": "drop"}, **settings), dropped) == {
            "train": 1
        }
        assert dropped == {path: 1}
