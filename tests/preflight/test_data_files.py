"""Data files: counted, their faulty lines, their system prompt."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.config import Recipe
from megarl.data.chat import load_tokenizer
from megarl.datasets.counts import count_records
from megarl.datasets.fields import system_prompt
from megarl.datasets.reading import read_problems
from megarl.rewards import FORM_PROMPTS, SYSTEM_PROMPTS
from megarl.types import ConfigError, DataError
from tests.preflight.records import RECORD


def test_records_are_counted_by_file(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(json.dumps(RECORD) + "\n\n" + json.dumps(RECORD) + "\n")
    assert count_records(recipe(data={"validation": {"easy": str(held_out)}})) == {"train": 3, "easy": 2}
    talk = tmp_path / "talk.jsonl"
    talk.write_text(json.dumps({"prompt": "1 + 2", "response": "3"}) + "\n")
    beside = {"ptx": str(talk), "validation_conversations": {"talk": str(talk)}}
    assert count_records(recipe(data=beside)) == {"train": 3, "ptx": 1, "talk (conversations)": 1}


def test_the_first_faulty_line_of_each_file_is_told(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(json.dumps(RECORD) + "\n{broken\n")
    with pytest.raises(DataError) as caught:
        count_records(recipe(loop="sft", data={"validation": {"easy": str(held_out)}}))
    title, *lines = str(caught.value).splitlines()
    assert title == "data of recipe small: 2 errors"
    assert "train.jsonl, line 1: no message has the role assistant" in lines[0]
    assert "held_out.jsonl, line 2: not JSON" in lines[1]


@pytest.mark.parametrize(
    ("given", "functions", "expected"),
    [
        (None, ["boxed"], None),
        ("none", ["boxed"], None),
        ("Be brief.", ["boxed"], "Be brief."),
        ("default", ["a.b:c", "think_answer_tags", "boxed"], SYSTEM_PROMPTS["think_answer_tags"]),
        ("default", [{"name": "gsm8k", "kwargs": {"forms": ["tags"]}}], FORM_PROMPTS["tags"]),
        ("default", [{"name": "math_competition", "kwargs": {"forms": ["answer_line"]}}], FORM_PROMPTS["answer_line"]),
        ("default", [{"name": "format", "kwargs": {"form": "hashes"}}], FORM_PROMPTS["hashes"]),
        ("default", [{"name": "reasoning_gym.gcd", "kwargs": {"place": "boxed"}}], FORM_PROMPTS["boxed"]),
        ("default", ["reasoning_gym"], FORM_PROMPTS["tags"]),
    ],
)
def test_system_prompts(
    recipe: Callable[..., Recipe], given: str | None, functions: list[Any], expected: str | None
) -> None:
    made = recipe(data={"system_prompt": given, "max_prompt_tokens": 400}, reward={"functions": functions})
    assert system_prompt(made) == expected
    shown = read_problems(made, load_tokenizer(made.model.path), made.data.train)[0].messages[0]
    assert (shown["role"], shown["content"]) == ("system", expected) if expected else shown["role"] == "user"


def test_no_default_system_prompt_is_an_error(recipe: Callable[..., Recipe]) -> None:
    with pytest.raises(ConfigError, match=r"data\.system_prompt = default: .*a\.b:c has none"):
        system_prompt(recipe(data={"system_prompt": "default"}, reward={"functions": ["a.b:c"]}))
