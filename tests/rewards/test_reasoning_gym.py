"""The scorers of reasoning-gym, by name and by each record's own task, for records that went through JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megarl.rewards import resolve
from megarl.rewards.reasoning_gym import reasoning_gym
from megarl.types import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore")  # reasoning-gym's dependencies warn at import

SCORED_IN_PART = {"countdown", "knights_knaves", "word_ladder", "zebra_puzzles"}
"""Some of the tasks whose scorers read the metadata."""


def entry_of(task: str) -> dict[str, Any]:
    import reasoning_gym as library

    return json.loads(json.dumps(library.create_dataset(task, seed=5, size=1)[0], default=str))


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
