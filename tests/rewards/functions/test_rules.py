"""Rewards by rule: which text earns what, and by verl's, DeepScaleR's and ColossalChat's rules too."""

from __future__ import annotations

import random
import re
import time
from typing import Any

import pytest

from megarl.rewards.functions.answer_format import answer_format
from megarl.rewards.functions.final_answers import find_answer_reader, last_tagged
from megarl.rewards.functions.gsm8k import gsm8k
from megarl.rewards.functions.length import check_record as check_length
from megarl.rewards.functions.length import length
from megarl.rewards.functions.math_competition import math_competition
from megarl.rewards.functions.multiple_choice import multiple_choice
from megarl.types import Reward

SOLUTION = "She sold 48/2 = <<48/2=24>>24 clips in May.\nAltogether 48+24 = 72.\n#### 72"


def outcome(reward: Reward) -> tuple[float, bool, bool]:
    return reward.score, reward.format_valid, reward.answer_correct


@pytest.mark.parametrize(
    ("said", "answer", "expected"),
    [
        pytest.param("so\n#### 72", SOLUTION, (1.0, True, True), id="hashes"),
        pytest.param("so \\boxed{72}.", SOLUTION, (1.0, True, True), id="boxed"),
        pytest.param("#### 71 and then \\boxed{72}", "72", (1.0, True, True), id="the last form"),
        pytest.param("\\boxed{72}, no: #### 71", "72", (0.1, True, False), id="the last form is wrong"),
        pytest.param("#### $1,234.00", "1234", (1.0, True, True), id="a sum of money"),
        pytest.param("####-5 apples", "-5", (1.0, True, True), id="with a unit"),
        pytest.param("\\boxed{72 \\text{ clips}}", "72", (1.0, True, True), id="with a unit in the box"),
        pytest.param("#### 3.50", "3.5", (1.0, True, True), id="a decimal"),
        pytest.param("it is 72", "72", (0.0, False, False), id="without a form"),
        pytest.param("#### none", "72", (0.0, False, False), id="hashes without a number"),
        pytest.param("#### 71 \\boxed{many}", "71", (0.0, False, False), id="a box without a number"),
        pytest.param("#### 7" + "2" * 5000, "72", (0.0, False, False), id="too long"),
        pytest.param("<think>a</think><answer>72</answer>", "72", (0.0, False, False), id="tags are not asked for"),
        pytest.param("#### 3/4", "3", (0.1, True, False), id="the numerator"),
        pytest.param("#### 3/4", "0.75", (1.0, True, True), id="a fraction"),
        pytest.param("#### 10-12", "10", (0.0, False, False), id="a range"),
        pytest.param("#### 5 million", "5", (0.1, True, False), id="without its million"),
        pytest.param("#### 5 million", "5000000", (1.0, True, True), id="with its million"),
        pytest.param("#### 1e5", "1", (0.1, True, False), id="a mantissa"),
        pytest.param("#### 1e5", "100000", (1.0, True, True), id="a power of ten"),
        pytest.param("#### 5 dozen", "5", (0.1, True, False), id="without its dozen"),
        pytest.param("#### 5 or 6", "5", (0.0, False, False), id="two numbers"),
        pytest.param("#### 5 maybe", "5", (0.0, False, False), id="a doubt"),
        pytest.param("#### 5, 6", "5", (0.0, False, False), id="a list"),
        pytest.param("#### 5 + 3", "5", (0.0, False, False), id="a sum"),
        pytest.param("#### 5!", "5", (0.0, False, False), id="a factorial"),
        pytest.param("#### 5x", "5", (0.0, False, False), id="a product"),
        pytest.param("#### 5 halves", "5", (0.1, True, False), id="halves"),
        pytest.param("#### \u22123", "-3", (1.0, True, True), id="a typographic minus"),
        pytest.param("#### \u22123", "3", (0.1, True, False), id="a typographic minus against plus"),
        pytest.param("#### 3", "so\n#### \u22123", (0.1, True, False), id="a typographic minus in the gold answer"),
        pytest.param("#### \uff11\uff18", "18", (1.0, True, True), id="full-width digits"),
        pytest.param("#### 2 h 30 min", "2.5", (0.0, False, False), id="a time in two units"),
        pytest.param("#### ٣", "3", (0.0, False, False), id="a digit of another script"),
        pytest.param("**#### 72**", "72", (1.0, True, True), id="in bold"),
        pytest.param("#### **72**.", "72", (1.0, True, True), id="bold"),
        pytest.param("#### $72$", "72", (1.0, True, True), id="between dollar signs"),
        pytest.param("#### \\$72", "72", (1.0, True, True), id="an escaped dollar sign"),
        pytest.param("#### 72 clips.\nDone.", "72", (1.0, True, True), id="a line with a full stop"),
        pytest.param("#### 72</answer>", "72", (1.0, True, True), id="before a tag"),
        pytest.param("so \\boxed 72", "72", (1.0, True, True), id="a box without braces"),
        pytest.param("#### $18 per day", "#### 18", (1.0, True, True), id="money a day"),
        pytest.param("#### $18 per hour.", "#### 18", (1.0, True, True), id="money an hour, with a full stop"),
        pytest.param("#### $18/hour", "#### 18", (1.0, True, True), id="money over a unit"),
        pytest.param("#### \\$18 a week", "18", (1.0, True, True), id="escaped money a week"),
        pytest.param("#### $5 each", "#### 18", (0.1, True, False), id="wrong money for each"),
        pytest.param("#### $18 each", "18", (1.0, True, True), id="money for each"),
        pytest.param("#### 18 dollars each", "18", (1.0, True, True), id="dollars for each"),
        pytest.param("#### -$1,200 per month", "-1200", (1.0, True, True), id="a loss a month"),
        pytest.param("#### $18 per day or $20", "18", (0.0, False, False), id="two amounts"),
        pytest.param("#### $18 a day or two", "18", (0.0, False, False), id="money for one of two times"),
        pytest.param("#### $18 per 2 days", "18", (0.0, False, False), id="money for several days"),
        pytest.param("#### $18 per dozen", "18", (0.0, False, False), id="money for a dozen"),
        pytest.param("#### $18 more", "18", (0.0, False, False), id="a difference of money"),
    ],
)
def test_gsm8k(said: str, answer: str, expected: tuple[float, bool, bool]) -> None:
    assert outcome(gsm8k(said, answer, format_score=0.1)) == expected


def test_gsm8k_takes_the_last_number_where_it_is_flexible() -> None:
    flexible = gsm8k("First 5, then 10-3=7 and $72.", "72", method="flexible")
    assert outcome(flexible) == (1.0, False, True) and flexible.metrics == {"fallback": 1.0}
    assert outcome(gsm8k("none", "72", method="flexible")) == (0.0, False, False)
    assert gsm8k("#### 72", "72", method="flexible").metrics == {"fallback": 0.0}


def test_gsm8k_of_colossalchat() -> None:
    given: dict[str, Any] = {"correct_score": 10.0, "format_score": 1.0, "forms": ["tags"]}
    assert outcome(gsm8k("<think>a</think><answer> 72 </answer>", "72", **given)) == (10.0, True, True)
    assert outcome(gsm8k("<think>a</think><answer>71</answer>", "72", **given)) == (1.0, True, False)
    assert outcome(gsm8k("<answer>72</answer>", "72", **given)) == (0.0, False, False)


@pytest.mark.parametrize("given", [{"answer": "many"}, {"method": "lax"}, {"forms": ["box"]}, {"forms": []}])
def test_gsm8k_refuses(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"gold answer|method|forms"):
        gsm8k("#### 72", **({"answer": "72"} | given))


@pytest.mark.parametrize(
    ("said", "answer", "expected"),
    [
        pytest.param("\\boxed{\\frac12}", "0.5", (1.0, True, True), id="right"),
        pytest.param("\\boxed{3}", "0.5", (-0.5, True, False), id="wrong"),
        pytest.param("one half", "0.5", (-1.0, False, False), id="invalid"),
        pytest.param("\\boxed{7}</think>\\boxed{0.5}", "0.5", (1.0, True, True), id="after the thoughts"),
        pytest.param("\\boxed{0.5}</think>so", "0.5", (-1.0, False, False), id="in the thoughts only"),
        pytest.param("\\boxed{4}", ["3", "\\boxed{4}"], (1.0, True, True), id="several gold answers"),
    ],
)
def test_levels_of_math_competition(said: str, answer: Any, expected: tuple[float, bool, bool]) -> None:
    assert outcome(math_competition(said, answer, {}, wrong_score=-0.5, invalid_score=-1.0)) == expected


def test_math_competition_of_verl_and_of_deepscaler() -> None:
    dapo: dict[str, Any] = {"forms": ["answer_line"], "wrong_score": -1.0, "invalid_score": -1.0}
    assert outcome(math_competition("Answer: 3\nAnswer: $\\boxed{34}$", "34", {}, **dapo)) == (1.0, True, True)
    assert outcome(math_competition("**answer:** 33", "34", {}, **dapo)) == (-1.0, True, False)
    assert outcome(math_competition("**Answer:** 34", "34", {}, **dapo)) == (1.0, True, True)
    assert outcome(math_competition("**Answer: 34**", "34", {}, **dapo)) == (1.0, True, True)
    assert outcome(math_competition("\\boxed{34}", "34", {}, **dapo)) == (-1.0, False, False)
    assert outcome(math_competition("\\boxed{34}", "34", {}, thoughts="required")) == (0.0, False, False)
    assert outcome(math_competition("a</think>\\boxed{34}", "34", {}, thoughts="required")) == (1.0, True, True)


def test_accuracy_by_level() -> None:
    assert math_competition("\\boxed{1}", "1", {"level": "Level 5"}).metrics == {"level_5": 1.0}
    assert math_competition("?", "1", {"level": 3}).metrics == {"level_3": 0.0}
    assert math_competition("\\boxed{1}", "1", {"level": "hard"}).metrics == {}


COLOURS = {"choices": ["red", "green", "blue", "A"]}


@pytest.mark.parametrize(
    ("said", "letter"),
    [
        ("\\boxed{B}", "B"),
        ("\\boxed{\\text{(B)}}", "B"),
        ("<answer>b</answer>", "B"),
        ("\\boxed{A}, no: <answer>B</answer>", "B"),
        ("The answer is A. Wait: the answer is (B).", "B"),
        ("**Answer: B**", "B"),
        ("So it must be\nB", "B"),
        ("\\boxed{B. green}", "B"),
        ("\\boxed{green}", "B"),
        ("<think>The answer is A.</think>The answer is B.", "B"),
        ("A. red\nB. green", None),
        ("It is one of these.\n\nA. red\n\nB. green\n", None),
        ("Red would be too warm.\nB. green", "B"),
        ("A. red\nB. green\nC. blue\n\nA", "A"),
        ("A. red\nB. green\nC. blue\n\n**B. green**", "B"),
        ("A. red\nB. green\nC. blue\n\nC", "C"),
        ("\\boxed{A or B}", None),
        ("\\boxed{A. and B.}", None),
        ("\\boxed{B. and A.}", None),
        ("\\boxed{B. or A.}", None),
        ("\\boxed{(B) (A)}", None),
        ("\\boxed{B) A}", None),
        ("\\boxed{B, A}", None),
        ("\\boxed{B. red}", None),
        ("\\boxed{not B}", None),
        ("\\boxed{B. or maybe C}", None),
        ("\\boxed{B: green}", "B"),
        ("\\boxed {B}", "B"),
        ("\\fbox{B}", "B"),
        ("$\\boxed B$", "B"),
        ("B, since option A, is wrong", "B"),
        ("The answer is B, since option A, is wrong", "B"),
        ("Option A, is wrong. The answer is B.", "B"),
        ("The answer is B, or C.", None),
        ("The answer is (A) or (B).", None),
        ("The answer is B, A", None),
        ("The answer is B, A and C", None),
        ("The answer is (B), (A), and (C).", None),
        ("The answer is B; C", None),
        ("The answer is B; C\nI am sure.", None),
        ("The answer is **B**, **C**.", None),
        ("The answer is B. C", None),
        ("The answer is B, option C.", None),
        ("The correct answer is B. C is also correct.", None),
        ("The answer is B. Option C could also be right.", None),
        ("\\boxed{B. C is also correct}", None),
        ("\\boxed{B; C}", None),
        ("\\boxed{B. C, D}", None),
        ("B. C, D", None),
        ("The answer is B. C is wrong.", "B"),
        ("The answer is B. C is also wrong.", "B"),
        ("The answer is B; A, C and D are wrong.", "B"),
        ("The answer is B. A, C and D are incorrect.", "B"),
        ("The answer is B, as green is the colour of leaves.", "B"),
        ("The answer is B.\nA. red\nis wrong", "B"),
        ("I choose option B.", "B"),
        ("The answer is B, and I think that is right.", "B"),
        ("The correct option is (B)", "B"),
        ("Option B.", "B"),
        ("The answer is not B.", None),
        ("\\boxed{AB}", None),
        ("\\boxed{E}", None),
        ("The answer is Bright.", None),
        ("I do not know", None),
    ],
)
def test_the_chosen_letter(said: str, letter: str | None) -> None:
    record = {"choices": ["red", "green", "blue", "black"]}
    reward = multiple_choice(said, "B", record)
    assert outcome(reward) == (float(letter == "B"), letter is not None, letter == "B")
    assert reward.metrics == {f"chosen_{each}": float(each == letter) for each in "ABCD"}


@pytest.mark.parametrize(
    ("answer", "record"),
    [
        ("B", {}),
        ("(b)", {}),
        ("1", {"choices": ["red", "green"]}),
        ("green", {"options": {"A": "red", "B": "green"}}),
        ("2", {"choices": {"label": ["1", "2"], "text": ["red", "green"]}}),
    ],
)
def test_gold_choices(answer: str, record: dict[str, Any]) -> None:
    assert outcome(multiple_choice("\\boxed{B}", answer, record)) == (1.0, True, True)
    assert outcome(multiple_choice("\\boxed{A}", answer, record)) == (0.0, True, False)


@pytest.mark.parametrize(
    ("answer", "record"),
    [("E", COLOURS), ("7", COLOURS), ("yellow", {}), ("A", {"choices": "red"}), ("A", {"choices": ["red"]})],
)
def test_gold_choices_that_are_none(answer: str, record: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"gold answer|choices is"):
        multiple_choice("\\boxed{A}", answer, record)


def test_a_gold_answer_that_could_be_two_choices_must_say_which() -> None:
    record = {"choices": ["3", "0", "2", "1"]}
    with pytest.raises(ValueError, match="B as text, A as index"):
        multiple_choice("\\boxed{A}", "0", record)
    assert multiple_choice("\\boxed{A}", "0", record, gold="index").answer_correct
    assert multiple_choice("\\boxed{B}", "0", record, gold="text").answer_correct
    assert multiple_choice("\\boxed{B}", "1", {"choices": ["0", "1"]}).answer_correct  # by either
    for given in ({"gold": "number"}, {"num_choices": "4"}):
        with pytest.raises(ValueError, match=next(iter(given))):
            multiple_choice("\\boxed{A}", "A", {}, **given)  # type: ignore[arg-type]


LONG = 200_000
LONG_TEXTS = (
    "Answer: 1" + " " * LONG + "x", "<answer>" * LONG, "</answer>" * LONG, "answer" + " " * LONG, "answer " * LONG,
    "\\boxed{" * LONG, "#### " * LONG, "####" + " " * LONG, "1," * LONG, "answer:" * LONG, "\\text{" * LONG,
    "\\boxed " * LONG, "\\fbox " * LONG, "\\boxed \\fbox " * LONG, "The answer is B" + ", " * LONG + "x",
    "(A" * LONG, "answer A" + " *" * LONG + "x", "Answer:\n" * LONG,
)  # fmt: skip


@pytest.mark.parametrize(
    "functions",
    [
        ("gsm8k", {"forms": ["hashes", "boxed", "tags"], "method": "flexible"}), ("think_answer_tags", {}),
        ("math_competition", {"forms": ["boxed", "answer_line", "tags"]}), ("multiple_choice", {}),
    ],
    ids=lambda given: given[0],
)  # fmt: skip
def test_the_answer_of_a_long_text_is_read_in_time_that_grows_with_its_length(
    functions: tuple[str, dict[str, Any]],
) -> None:
    """The driver's event loop reads it. What took the square of the length would take hours."""
    read = find_answer_reader([functions])
    assert read is not None
    started = time.process_time()
    for text in LONG_TEXTS:
        read(text, {})
    assert time.process_time() - started < 30.0


def test_the_last_tags_are_those_of_a_scan_from_the_front() -> None:
    draw = random.Random(1)
    for _ in range(2000):
        text = "".join(draw.choice(["<answer>", "</answer>", "a", "b\n"]) for _ in range(draw.randrange(9)))
        found = re.findall("<answer>(.*?)</answer>", text, re.DOTALL)
        assert last_tagged(text) == (found[-1] if found else None)


def test_format() -> None:
    good = answer_format("<think>a</think><answer>b</answer>", form="think_answer_tags", invalid_score=-1.0)
    assert (good.score, good.format_valid, good.answer_correct, good.metrics) == (1.0, True, None, {"valid": 1.0})
    assert answer_format("b", form="think_answer_tags", invalid_score=-1.0).score == -1.0
    assert answer_format("a\n\\boxed{1}\n", form="boxed", pattern=".*boxed.*").score == 1.0
    assert answer_format("a\n\\boxed{1}\n", form="boxed", pattern="a").score == 0.0
    assert answer_format("```python\npass\n```", form="code").score == 1.0
    assert answer_format("a\n#### 3", form="hashes").score == 1.0 and answer_format("a", form="hashes").score == 0.0
    for given in ({}, {"form": "tags"}):
        with pytest.raises(ValueError, match="form"):
            answer_format("a", **given)  # type: ignore[arg-type]


def test_length() -> None:
    found = [length(tokens, {}, target=100).score for tokens in (1, 100, 150, 200, 300)]
    assert found == [1.0, 1.0, 0.5, 0.0, 0.0]
    exact = [length(tokens, {"n": 100}, field="n", mode="exact", width=50).score for tokens in (50, 75, 100, 125, 200)]
    assert exact == [0.0, 0.5, 1.0, 0.5, 0.0]
    assert length(100, {"n": 100.0}, field="n").score == 1.0
    over = length(130, {}, target=100)
    assert over.metrics == {"over": 1.0, "distance_tokens": 30.0} and over.format_valid is None
    for record, given in (
        ({}, {"field": "n"}), ({"n": "x"}, {"field": "n"}), ({}, {}), ({}, {"target": 0}), ({"n": 0.5}, {"field": "n"}),
        ({"n": 12.7}, {"field": "n"}),
        ({}, {"target": 9, "width": 0}), ({}, {"target": 9, "width": -1}),
    ):  # fmt: skip
        for refuses in (lambda r, g: length(1, r, **g), lambda r, g: check_length(None, r, **g)):
            with pytest.raises(ValueError, match=r"target|width"):
                refuses(record, given)


@pytest.mark.parametrize(
    ("functions", "text", "answer"),
    [
        ([("boxed", {})], r"\boxed{1} or \boxed{2}", "1 or 2"),
        ([("boxed", {})], r"First \boxed{1}. Then it is \boxed{2}", "2"),
        ([("format", {"form": "boxed"}), ("think_answer_tags", {})], "<answer>3</answer> 4", "3"),
        ([("gsm8k", {})], "<think>#### 9</think> so #### 4", "4"),
        ([("gsm8k", {"forms": ["tags"]})], "<think>a</think><answer>5</answer>", "5"),
        ([("math_competition", {"forms": ["answer_line", "boxed"]})], "\\boxed{1}\nAnswer: \\boxed{x}", "x"),
        ([("math_competition", {})], "<think>\\boxed{1}</think> Answer: 2", None),
        ([("math_competition", {"thoughts": "required"})], "\\boxed{1}", None),
        ([("gsm8k", {})], "#### 9</think> so four", None),
        ([("gsm8k", {})], "it is 1,234", None),
        ([("gsm8k", {"method": "flexible"})], "it is 1,234", "1234"),
        ([("gsm8k", {"forms": ["tags"]})], "<answer>5</answer>", None),
        ([("multiple_choice", {})], "The answer is (B).", "B"),
        ([("reasoning_gym.gcd", {})], "<answer> 5 </answer>", "5"),
        ([("reasoning_gym", {"place": "boxed"})], "\\boxed{5}", "5"),
    ],
)
def test_the_answer_that_votes_stands_where_the_reward_function_looks(
    functions: list[tuple[str, dict[str, Any]]], text: str, answer: str | None
) -> None:
    read = find_answer_reader(functions)
    assert read is not None and read(text, {"choices": ["x", "y"]}) == answer


def test_functions_that_say_nothing_of_where_an_answer_stands_have_no_reader() -> None:
    assert find_answer_reader([("length", {"target": 1}), ("code", {})]) is None
