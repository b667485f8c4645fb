"""A completion that ends, or is cut, inside its thoughts gives no answer, whatever it considered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from megarl.config.sections.rewards import RewardFunctionConfig
from megarl.rewards.functions.answer_format import answer_format
from megarl.rewards.functions.code import code
from megarl.rewards.functions.final_answers import find_answer_reader
from megarl.rewards.functions.gsm8k import gsm8k
from megarl.rewards.functions.marked_answers import boxed, think_answer_tags
from megarl.rewards.functions.math_competition import math_competition
from megarl.rewards.functions.math_verify import math_verify
from megarl.rewards.functions.multiple_choice import multiple_choice
from megarl.rewards.functions.reasoning_gym import scorer_of
from megarl.rewards.scoring.calling import Sample, bind
from megarl.rewards.scoring.http_rewards import make_server_client
from megarl.sandbox.sandbox import Sandbox, SandboxSettings
from megarl.thoughts import ends_in_thoughts, without_thoughts
from megarl.types import Reward

SUM = {"metadata": {"source_dataset": "basic_arithmetic"}, "question": "3 + 4"}
CHOICES = {"choices": ["5", "6", "7"]}
PRINTING = {"inputs": [""], "outputs": ["7"]}
BOX = Sandbox(SandboxSettings())
Judge = Callable[..., Reward]
JUDGES: dict[str, tuple[Judge, str]] = {
    "boxed": (lambda text, **more: boxed(text, "7", **more), "\\boxed{7}"),
    "think_answer_tags": (lambda text, **more: think_answer_tags(text, "7", **more), "<answer>7</answer>"),
    "gsm8k": (lambda text, **more: gsm8k(text, "7", **more), "#### 7"),
    "gsm8k flexible": (lambda text, **more: gsm8k(text, "7", method="flexible", **more), "it is 7"),
    "math_competition": (lambda text, **more: math_competition(text, "7", {}, **more), "\\boxed{7}"),
    "math_competition line": (
        lambda text, **more: math_competition(text, "7", {}, forms=["answer_line"], **more), "\nAnswer: 7"
    ),
    "math_verify": (lambda text, **more: math_verify(text, "7", **more), "\\boxed{7}"),
    "multiple_choice": (lambda text, **more: multiple_choice(text, "C", CHOICES, **more), "the answer is (C)"),
    "reasoning_gym": (lambda text, **more: scorer_of("basic_arithmetic")(text, "7", SUM, **more), "<answer>7</answer>"),
    "code": (lambda text, **more: code(text, PRINTING, {}, BOX, **more), "\n```python\nprint(7)\n```\n"),
}  # fmt: skip
READERS = ("boxed", "think_answer_tags", "gsm8k", "math_competition", "multiple_choice")


@pytest.fixture(scope="module", autouse=True)
def sandbox() -> Iterator[None]:
    yield
    BOX.close()


@pytest.mark.parametrize("name", JUDGES)
def test_no_judge_pays_an_answer_that_was_only_considered(name: str) -> None:
    judge, answer = JUDGES[name]
    for text in (
        f"<think>maybe {answer}, let me check",
        f"<think>{answer}",
        f"So. <think>{answer}\n",
        f"<think>first</think>second <think>maybe {answer}",
        f"[THINK]maybe {answer}",
        f"<seed:think>maybe {answer}",
    ):
        reward = judge(text)
        assert (reward.score, reward.answer_correct, reward.format_valid) == (0.0, False, False), text
    for text in (f"<think>maybe {answer}</think>I do not know.", f"maybe {answer}</think>I do not know."):
        assert (judge(text).score, judge(text).answer_correct) == (0.0, False), text
    # The prompt has opened the thoughts.
    reward = judge(f"maybe {answer}, let me check", in_thoughts=True)
    assert (reward.score, reward.answer_correct, reward.format_valid) == (0.0, False, False)
    for text in (f"<think>first</think>{answer}", f"first</think>{answer}", f"{answer}"):
        assert judge(text).answer_correct, text


@pytest.mark.parametrize(
    ("text", "is_open"),
    [
        ("<think>", True), ("<think>a</think>", False), ("a</think>b", False), ("plain", False), ("", False),
        ("a <think>b</think> c <think> d", True), ("</think><think>", True), ("<think><think>a</think>", False),
        ("<think>a</think>b</think>", False), ("[THINK]a", True), ("[THINK]a[/THINK]b", False),
        ("<seed:think>a", True), ("<seed:think>a</seed:think>b", False),
        ("<|channel|>analysis<|message|>maybe 7", True),
        ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>7", False),
        ("<|channel|>final<|message|>7", False),
        ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary to=f<|message|>{}", False),
        ("<|channel|>final<|message|>7<|end|><|start|>assistant<|channel|>analysis<|message|>", True),
    ],
)  # fmt: skip
def test_thoughts_are_open_after_the_last_opening(text: str, is_open: bool) -> None:
    assert ends_in_thoughts(text) == is_open


def test_thoughts_opened_by_the_prompt_are_open_until_a_mark_closes_them() -> None:
    texts = ("maybe \\boxed{7}", "a</think>7", "a</think>b<think>c", "[/THINK]7", "")
    assert [ends_in_thoughts(text, begins_in_thoughts=True) for text in texts] == [True, False, True, False, True]
    assert without_thoughts("a</think>b</think>c") == without_thoughts("[THINK]a[/THINK]c") == "c"
    final = "<|channel|>final<|message|>c"
    assert without_thoughts(f"<|channel|>analysis<|message|>b{final}") == final


@pytest.mark.parametrize("name", READERS)
def test_a_majority_counts_no_such_answer(name: str) -> None:
    read = find_answer_reader([(name, {})])
    assert read is not None
    answer = JUDGES[name][1]
    assert read(f"<think>{answer}", CHOICES) is None
    assert read(f"<think>a</think>{answer}", CHOICES) is not None


def test_a_whole_completion_of_thoughts_is_no_answer() -> None:
    score = scorer_of("basic_arithmetic")
    assert score("7", "7", SUM, place="text").answer_correct
    assert not score("7", "7", SUM, place="text", in_thoughts=True).answer_correct
    assert not score("<think>7", "7", SUM, place="text").answer_correct


def test_a_form_considered_in_thoughts_is_not_the_completion_s() -> None:
    assert answer_format("<think>\\boxed{7}", form="boxed").score == 0.0
    assert answer_format("maybe \\boxed{7}", form="boxed", in_thoughts=True).score == 0.0
    assert answer_format("<think>\\boxed{7}", pattern="<think>.*").score == 1.0


def test_own_functions_learn_of_it() -> None:
    bound = bind("own", lambda completion_text, in_thoughts: in_thoughts, {})
    samples = (Sample("<think>a", "7"), Sample("a", "7", is_in_thoughts=True), Sample("a", "7"))
    assert [bound(sample.values(bound.needs, 1.0)) for sample in samples] == [True, True, False]


@pytest.mark.parametrize(
    ("kwargs", "score"),
    [
        pytest.param({}, 0.0, id="verdicts"),
        pytest.param({"thoughts": "show"}, 0.0, id="shown"),
        pytest.param({"choices": {"GOOD": 2, "BAD": -1}, "correct_from": 2}, -1.0, id="own verdicts"),
        pytest.param({"scale": [1, 10], "correct_from": 0.9}, 0.0, id="scale"),
        pytest.param({"scale": [1, 10]}, None, id="no verdicts"),
    ],
)
def test_a_judge_model_is_not_asked(kwargs: Mapping[str, Any], score: float | None) -> None:
    settings = {"url": "http://127.0.0.1:9/v1", "model": "m", **kwargs}
    judge = make_server_client(RewardFunctionConfig.model_validate({"name": "judge", "kwargs": settings}))
    for sample in (Sample("<think>It is 7", "7"), Sample("It is 7", "7", is_in_thoughts=True)):
        unasked = judge.score_without_call(sample)
        assert (None if unasked is None else (unasked.score, unasked.answer_correct)) == (
            None if score is None else (score, False)
        )
    assert judge.score_without_call(Sample("<think>a</think>It is 7", "7")) is None
