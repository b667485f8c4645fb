import json
import random

import pytest

from megarl.data.chat import load_tokenizer
from megarl.data.kinds.conversations import Conversations
from megarl.data.kinds.problems import Problems
from megarl.data.reader import read_examples
from tools import make_dataset

pytestmark = pytest.mark.filterwarnings("ignore")  # reasoning-gym's dependencies warn at import


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return make_dataset.make_dataset(tmp_path_factory.mktemp("dataset"), sft=60, train=70, heldout=50, seed=3)


def test_no_question_is_in_two_files(dataset):
    questions = [
        record["messages"]["content"] for name in ("train", "heldout") for record in lines(dataset / f"{name}.jsonl")
    ]
    questions += [record["messages"][0]["content"] for record in lines(dataset / "sft.jsonl")]
    assert len(set(questions)) == len(questions) == 60 + 70 + 50


def test_answers_are_right(dataset):
    for record in lines(dataset / "train.jsonl"):
        expression = record["messages"]["content"].removeprefix("Calculate ").removesuffix(".")
        assert record["gt_answer"] == str(eval(expression))


def test_the_readers_take_the_files(dataset, tiny_model):
    tokenizer = load_tokenizer(tiny_model())
    problems = read_examples(dataset / "train.jsonl", Problems(tokenizer=tokenizer, system_prompt=None, max_tokens=48))
    conversations = read_examples(
        dataset / "sft.jsonl", Conversations(tokenizer=tokenizer, system_prompt=None, max_tokens=64)
    )
    assert (len(problems), len(conversations)) == (70, 60)
    assert max(sequence.loss_mask.sum() for (sequence,) in conversations) <= 48
    for (sequence,) in conversations:
        assert tokenizer.decode(sequence.token_ids[sequence.loss_mask]).endswith("}<|im_end|>")


@pytest.mark.parametrize(
    ("question", "answer", "worked"),
    [
        pytest.param("Calculate 5 - 3 - 6.", "-4", "5-3=2\n2-6=-4\n\\boxed{-4}", id="two steps"),
        pytest.param(
            "State the final answer: 5 - 3 - 6 + 14 =", "10", "5-3=2\n2-6=-4\n-4+14=10\n\\boxed{10}", id="three steps"
        ),
        pytest.param("Calculate 50 + 7.", "57", "50+7=57\n\\boxed{57}", id="one step"),
        pytest.param("Calculate 2 * 3 + 1.", "7", "\\boxed{7}", id="a chain inside something else"),
        pytest.param("Spell sun backward.", "nus", "\\boxed{nus}", id="no chain"),
    ],
)
def test_worked_answers(question, answer, worked):
    assert make_dataset.worked_answer(question, answer) == worked


def test_the_work_is_mostly_left_out_where_the_chain_is_short():
    generator = random.Random(0)

    def worked_share(question, answer):
        answers = [make_dataset.demonstration(question, answer, generator) for _ in range(1000)]
        assert set(answers) <= {make_dataset.worked_answer(question, answer), make_dataset.box_answer(answer)}
        return sum("=" in text for text in answers) / 1000

    assert worked_share("Calculate 9 - 2 + 4.", "11") == pytest.approx(make_dataset.WORKED_IF_SHORT, abs=0.05)
    assert worked_share("Calculate 9 - 2 + 4 - 7.", "4") == pytest.approx(make_dataset.WORKED_IF_LONG, abs=0.05)


def test_equal_seeds_give_equal_files(dataset, tmp_path):
    again = make_dataset.make_dataset(tmp_path / "again", sft=60, train=70, heldout=50, seed=3)
    other = make_dataset.make_dataset(tmp_path / "other", sft=60, train=70, heldout=50, seed=4)
    for name in ("sft.jsonl", "train.jsonl", "heldout.jsonl"):
        assert (again / name).read_bytes() == (dataset / name).read_bytes() != (other / name).read_bytes()
    mine, theirs = (
        {record["messages"]["content"] for record in lines(folder / "heldout.jsonl")} for folder in (dataset, other)
    )
    assert len(mine & theirs) < 5


def test_a_task_with_too_few_questions():
    settings = {"operators": ["+"], "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    settings |= {"allow_parentheses": False, "allow_negation": False}
    with pytest.raises(ValueError, match=r"basic_arithmetic gave \d+ different questions"):
        make_dataset.distinct_questions("basic_arithmetic", settings, 400, seed=0)
