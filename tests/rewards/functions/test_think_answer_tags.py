import pytest

from megarl.rewards.functions.marked_answers import think_answer_tags
from megarl.types import Reward


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("<think>a</think><answer>1/2</answer>", Reward(2.0, True, True), id="right"),
        pytest.param(
            "Hm. <think>a\n</think>\n<answer>\n0.5\n</answer>", Reward(2.0, True, True), id="lines_and_preface"
        ),
        pytest.param("<think>a</think><answer>7</answer>", Reward(0.0, True, False), id="wrong"),
        pytest.param("<think>a</think><answer></answer>", Reward(0.0, True, False), id="empty_answer"),
        pytest.param(r"<think>a</think><answer>\boxed{\frac12}</answer>", Reward(2.0, True, True), id="box_inside"),
        pytest.param("<think>a</think><answer>{0.5</answer>", Reward(1.0, True, True), id="unparsable_half_score"),
        pytest.param("<think>a</think><answer>1/2</answer>.", Reward(0.0, False, True), id="text_after_the_end"),
        pytest.param("<think>a</think><answer>1/2</answer>\n", Reward(0.0, False, True), id="newline_after_the_end"),
        pytest.param("<think>a<answer>1/2</answer>", Reward(0.0, False, False), id="missing_tag"),
        pytest.param("<answer>1/2</answer><think>a</think>", Reward(0.0, False, True), id="wrong_order"),
        pytest.param("</think><think><answer>1/2</answer>", Reward(0.0, False, False), id="think_tags_swapped"),
        pytest.param(
            "<think>a</think><answer>7</answer><answer>1/2</answer>", Reward(0.0, False, True), id="twice_last_counts"
        ),
        pytest.param("<think>a</think><answer>1/2", Reward(0.0, False, False), id="unclosed"),
        pytest.param("", Reward(0.0, False, False), id="nothing"),
    ],
)
def test_think_answer_tags(text, expected):
    assert think_answer_tags(text, "0.5", correct_score=2.0) == expected
