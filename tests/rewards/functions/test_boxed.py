import pytest

from megarl.rewards.functions.final_answers import check_gold_answer, check_gold_answers, check_gold_texts, last_boxed
from megarl.rewards.functions.marked_answers import boxed
from megarl.types import Reward


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(r"so \boxed{3}", "3", id="plain"),
        pytest.param(r"\boxed{3} or rather \boxed{4}.", "4", id="last_one"),
        pytest.param(r"\boxed{\frac{1}{2}} done}", r"\frac{1}{2}", id="balanced"),
        pytest.param(r"\boxed{3} then \boxed{4", None, id="last_unclosed"),
        pytest.param(r"\boxed{\frac{1}{2}", None, id="inner_closed_only"),
        pytest.param(r"\boxed{\{1, 2\}}", r"\{1, 2\}", id="escaped_braces"),
        pytest.param(r"\boxed{\left\{ x \right.} tail", r"\left\{ x \right.", id="lone_escaped_brace"),
        pytest.param(r"\boxed{1 \\}", r"1 \\", id="escaped_backslash_before_brace"),
        pytest.param(r"\boxed{}", "", id="empty"),
        pytest.param("boxed{3}", None, id="no_command"),
        pytest.param("\\boxed{3\\", None, id="ends_in_backslash"),
        pytest.param("", None, id="nothing"),
        pytest.param(r"so \boxed 4", "4", id="without_braces"),
        pytest.param(r"so $\boxed 4 + x$, for x", "4 + x", id="without_braces_up_to_the_dollar_sign"),
        pytest.param(r"so \boxed \frac{1}{2}.", r"\frac{1}{2}", id="a_command_without_braces"),
        pytest.param(r"so \boxed {4}.", "4", id="a_space_before_the_brace"),
        pytest.param(r"so \fbox{4}", "4", id="fbox"),
        pytest.param(r"\boxed{3} \fbox{4}", "4", id="the_last_of_both"),
        pytest.param(r"\fbox{3} \boxed{4}", "4", id="the_last_of_both_in_the_other_order"),
        pytest.param(r"\fbox{3} \boxed{4} \fboxes \boxedup", "4", id="commands_with_longer_names_after_both"),
        pytest.param(r"\boxed", None, id="a_box_of_nothing"),
        pytest.param(r"\boxed \boxed", None, id="two_boxes_of_nothing"),
        pytest.param(r"\boxed{\boxed{3}, 4}", r"\boxed{3}, 4", id="a_box_in_a_box"),
        pytest.param(r"\boxed{4\boxed 3}", r"4\boxed 3", id="a_box_without_braces_in_a_box"),
        pytest.param(r"\boxed{1} \fbox{\frac{\boxed{2}}{\boxed{3}}}", r"\frac{\boxed{2}}{\boxed{3}}", id="two_in_one"),
        pytest.param(r"\boxed{1 \{ \boxed{3}", "3", id="a_box_after_an_unclosed_one"),
        pytest.param(r"}}\boxed{1}{\boxed{2}}", "2", id="a_box_in_a_group"),
        pytest.param(r"\boxed{4}, as \boxed asks", "4", id="a_box_that_is_only_mentioned"),
    ],
)
def test_last_boxed(text, expected):
    assert last_boxed(text) == expected


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        pytest.param(r"It is \boxed{\frac{1}{2}}.", "0.5", Reward(10.0, True, True), id="right"),
        pytest.param(r"It is \boxed{3}.", "4", Reward(0.0, True, False), id="wrong"),
        pytest.param("It is 4.", "4", Reward(0.0, False, False), id="no_box"),
        pytest.param(r"It is \boxed{4", "4", Reward(0.0, False, False), id="unclosed"),
        pytest.param(r"\boxed{\boxed{4}, 5}", "4", Reward(0.0, True, False), id="a_right_part"),
        pytest.param(r"\boxed{x = \boxed{4}}", "4", Reward(10.0, True, True), id="a_framed_value"),
        pytest.param(r"It is \boxed{}", "4", Reward(0.0, True, False), id="empty_box"),
        pytest.param(r"\boxed{{a @ b}}", "a@b", Reward(10.0, True, True), id="neither_is_mathematics"),
        pytest.param(r"\boxed{9^{9^{9}}, }", "9^9^9", Reward(10.0, True, True), id="beyond_the_caps_same_text"),
    ],
)
def test_boxed(text, answer, expected):
    assert boxed(text, answer, correct_score=10.0) == expected


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (r"\boxed{4} or \boxed{5}", 0.0),
        (r"$\boxed{4}$, $\boxed{5}$", 0.0),
        (r"\(\boxed{4}\) or \(\boxed{5}\)", 0.0),
        (r"\boxed{4}\text{ or }\boxed{5}", 0.0),
        (r"$\boxed{5}$ and $\boxed{5}$", 1.0),
        (r"\boxed{\frac{\sqrt{2}}{3}} or \boxed{5}", 0.0),
        (r"\boxed{4},\ \boxed{5}", 0.0),
        (r"\boxed{4} \quad\text{or}\quad \boxed{5}", 0.0),
        (r"**\boxed{4}** or **\boxed{5}**", 0.0),
        (r"\boxed{\frac{10}{2}}, or \boxed{5}", 1.0),
        (r"\boxed{4}~\text{or}~\boxed{5}", 0.0),
        (r"\boxed{4} \\ \text{or} \\ \boxed{5}", 0.0),
        (r"First \boxed{4}. Then it is \boxed{5}", 1.0),
    ],
)
def test_joined_boxes_are_one_answer(text, score):
    assert boxed(text, "5").score == score
    assert boxed(r"$\boxed{5}$ and $\boxed{4}$", "4, 5").score == 1.0


def test_a_gold_answer_that_no_answer_equals_is_refused():
    for check in (check_gold_answer, check_gold_answers):
        check("72", {})
        check("#### 72", {})
        with pytest.raises(ValueError, match=r"ends with ####.*gsm8k"):
            check("She sold 72 in May.\n#### 72", {})
    solution = r"We add 2 and 2. So the result is \boxed{4}."
    check_gold_answers(solution, {})
    check_gold_answers(["4", "5"], {})
    check_gold_answer(r"x = \boxed{3} meters per second", {})
    check_gold_answer(r"\boxed{\text{red and blue}} and \boxed{\text{green or dark yellow}}", {})
    # math-verify reads solutions itself.
    check_gold_texts("She sold 72 in May.\n#### 72", {})
    for gold in (solution, ["4", "5"], {"a": 1}):
        with pytest.raises(ValueError, match="math_competition"):
            check_gold_answer(gold, {})
