"""The scorers of reasoning-gym, by name and by each record's own task, for records that went through JSON."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.rewards import resolve
from megarl.rewards.functions.harmless import FORMULAS, LITERALS, is_formula
from megarl.rewards.functions.reasoning_gym import reasoning_gym
from megarl.rewards.scoring.calling import Sample
from megarl.rewards.scoring.reward_pool import RewardPool
from megarl.rewards.scoring.reward_process import Scored
from megarl.types import ConfigError
from tests.rewards.pools import pool_of

pytestmark = pytest.mark.filterwarnings("ignore")  # reasoning-gym's dependencies warn at import

UNANSWERED = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Tasks whose records have no gold answer."""
JUNK = (
    "", "no such thing", "[[1, 2], [3]]", '{"a": 1}', "-1e400", "None", "null", "x" * 200, "1/0", "\\frac{1}{2}", 
    "((((", "[]", "{}", "1 2 3", "9" * 5000, "[" * 5000, "\udcff",
)  # fmt: skip
PROGRAMS = (
    "[__import__('os').mkdir({folder!r})]", "__import__('os').mkdir({folder!r})",
    "[x for x in [open({folder!r}, 'w')]]", "(lambda: __import__('os').mkdir({folder!r}))()",
)  # fmt: skip
SCORED_IN_PART = {"countdown", "knights_knaves", "word_ladder", "zebra_puzzles"}
"""Some of the tasks whose scorers read the metadata."""


def entry_of(task: str) -> dict[str, Any]:
    import reasoning_gym as library

    return json.loads(json.dumps(library.create_dataset(task, seed=5, size=1)[0], default=str))


def all_tasks() -> list[str]:
    from reasoning_gym.factory import DATASETS

    return sorted(DATASETS.keys() - {"composite"})


def test_every_scorer_takes_the_gold_answer_and_no_junk(tmp_path: Path) -> None:
    """Whatever a completion says is scored, and none of it is run."""
    tasks = all_tasks()
    assert len(tasks) > 100 and not tmp_path.joinpath("made").exists()
    programs = [program.format(folder=str(tmp_path / "made")) for program in PROGRAMS]
    for task in tasks:
        entry = entry_of(task)
        gold = entry["answer"]
        if task in UNANSWERED:
            assert gold is None or not gold
        elif "Integral" not in str(gold):  # a task that the library itself has not solved
            assert resolve(f"reasoning_gym.{task}")(f"<answer>{gold}</answer>", gold, entry).answer_correct, task
        for said in (*JUNK, *programs):
            reward = reasoning_gym(said, gold, entry, place="text")
            assert said == gold or not reward.answer_correct, (task, said)
    assert not tmp_path.joinpath("made").exists()


def test_the_tasks_that_evaluate_are_known() -> None:
    """A scorer of another version of the library that evaluates what it is given would be found here."""
    import reasoning_gym as library
    from reasoning_gym.factory import DATASETS

    called = re.compile(r"(?<![\w.])(?:eval|exec|compile|(?:sympy\.|sp\.)?(?:parse_expr|sympify))\(")
    found = {
        name for name in all_tasks()
        if called.search(inspect.getsource(DATASETS[name][0].score_answer))
    }  # fmt: skip
    assert library.__version__ and found == LITERALS | FORMULAS | {"number_sorting"}


@pytest.mark.parametrize(
    ("task", "field", "value"),
    [
        ("simple_integration", "integrand", "open('x')"),
        ("bitwise_arithmetic", "problem", "open('x')"),
        ("number_sorting", None, "[open('x')]"),
        ("polynomial_multiplication", None, "open('x')"),
    ],
)
def test_what_a_record_has_is_not_run(task: str, field: str | None, value: str) -> None:
    entry = entry_of(task)
    if field is None:
        entry["answer"] = value
    else:
        entry["metadata"][field] = value
    with pytest.raises(ValueError, match="would run"):
        reasoning_gym("<answer>1</answer>", entry["answer"], entry)


@pytest.mark.parametrize(
    ("task", "said", "score"),
    [
        ("spiral_matrix", lambda gold: f"[{', '.join(gold.split())}]", 0.1),
        ("countdown", lambda gold: f"({gold})", 1.0),
        ("simple_integration", lambda gold: f"{gold} + 3", 1.0),
    ],
)
def test_literals_and_formulas_are_evaluated(task: str, said: Callable[[str], str], score: float) -> None:
    entry = entry_of(task)
    assert reasoning_gym(said(entry["answer"]), entry["answer"], entry, place="text").score == score


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("(8 - 4) * 2.5 + x^2/3 + log(x)**.5", True),
        ("9" * 100_000, True),
        ("9" * 100_000 + "!", False),
        ("x.y", False),
        ("(1).real", False),
        ("open(x)", False),
        ("x_", False),
        ("'x'", False),
        ("[x]", False),
        ("x=1", False),
        ("(" * 1000, False),
    ],
    ids=lambda given: str(given)[:20],
)
def test_formulas(text: str, is_one: bool) -> None:
    assert is_formula(text) == is_one


async def test_a_formula_that_takes_for_ever_ends_its_process_alone() -> None:
    entry = entry_of("countdown")
    gold = f"<answer>{entry['answer']}</answer>"
    endless = "<answer>9**9**9</answer>"

    async def score(pool: RewardPool) -> list[Scored]:
        return [await pool.score(Sample(text, entry["answer"], record=entry)) for text in (gold, endless, gold)]

    # The first completion imports the library: 3 s of CPU here, over 5 s on a machine that others use too.
    with pool_of("reasoning_gym", timeout_seconds=15.0) as pool:
        right, late, again = await score(pool)
    assert (right.failure, late.failure, again.failure) == (None, "timeout", None)
    assert again.reward == right.reward and right.reward.answer_correct


def test_a_record_at_fault_is_no_wrong_answer() -> None:
    entry = entry_of("prime_factorization")
    with pytest.raises(ValueError, match="int"):
        reasoning_gym("<answer>2</answer>", "prime", entry)


@pytest.mark.parametrize("task", ["chain_sum", *sorted(SCORED_IN_PART)])
def test_a_task_by_name_and_by_record(task: str) -> None:
    entry = entry_of(task)
    own = resolve(f"reasoning_gym.{task}")
    said = f"<answer>{entry['answer']}</answer>"
    assert own(said, entry["answer"], entry, correct_score=10.0).score == 10.0
    reward = reasoning_gym(said, entry["answer"], {"extra_info": json.loads(json.dumps(entry))})
    assert (reward.score, reward.format_valid, reward.answer_correct) == (1.0, True, True)
    assert reward.metrics == {task: 1.0, "raw": 1.0}
    wrong = own("<answer>no such thing</answer>", entry["answer"], entry)
    assert wrong.score < 0.5 and wrong.format_valid and not wrong.answer_correct
    assert not own(str(entry["answer"]), entry["answer"], entry).format_valid


def test_places_and_metadata_as_text() -> None:
    entry = entry_of("chain_sum")
    record = {"metadata": json.dumps(entry["metadata"])}
    assert reasoning_gym(f"\\boxed{{{entry['answer']}}}", entry["answer"], record, place="boxed").answer_correct
    assert reasoning_gym(f" {entry['answer']}\n", entry["answer"], record, place="text").answer_correct
    with pytest.raises(ValueError, match="place"):
        reasoning_gym("", "1", record, place="line")  # type: ignore[arg-type]


@pytest.mark.parametrize("record", [{}, {"metadata": "x"}, {"metadata": [1]}, {"metadata": {}}])
def test_a_record_that_does_not_tell_its_task(record: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="metadata"):
        reasoning_gym("<answer>1</answer>", "1", record)


def test_a_task_that_is_none() -> None:
    with pytest.raises(ConfigError, match=r"no task 'chain_sums'; did you mean reasoning_gym\.chain_sum\?"):
        resolve("reasoning_gym.chain_sums")
    with pytest.raises(ConfigError, match="several tasks; use reasoning_gym"):
        resolve("reasoning_gym.composite")


@pytest.mark.parametrize("name", ["reasoning_gym", "reasoning_gym.basic_arithmetic"])
def test_without_the_extra_the_error_names_the_commands(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("megarl.rewards.functions.reasoning_gym.find_spec", lambda name: None)
    record = {"metadata": {"source_dataset": "basic_arithmetic"}}
    with pytest.raises(ConfigError, match=r"launch/setup.sh reasoning-gym.*pip install"):
        resolve(name)("no answer", "4", record)
