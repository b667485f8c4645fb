"""Runs that send weights to their engines during the next step: what engines sampled with, metrics, and waits.

Two ranks train, two sample one step ahead; each reshard is verified.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pytest

from tests.end_to_end.recorded_metrics import metrics, unknown_metrics
from tools.make_dataset import make_dataset
from tools.make_tiny_model import make_tiny_model
from tools.runs import DIGITS_REWARD, read_metrics, train

pytestmark = [pytest.mark.end_to_end, pytest.mark.long]

WARM_STEPS = 2
"""Steps that are not measured: a run's first, and the one in which sampling ahead begins."""


class Sizes(NamedTuple):
    """Sizes of a run and its model."""

    steps: int
    """Number of measured steps."""
    prompts: int
    samples: int
    layers: int
    hidden_size: int


SMALL = Sizes(steps=2, prompts=2, samples=8, layers=2, hidden_size=128)
LARGE = Sizes(steps=8, prompts=4, samples=4, layers=8, hidden_size=512)


def make_inputs(folder: Path, sizes: Sizes) -> None:
    """Write model, data and reward into a folder."""
    make_tiny_model(folder / "model", num_layers=sizes.layers, hidden_size=sizes.hidden_size)
    make_dataset(folder / "data")
    (folder / "share_of_digits.py").write_text(DIGITS_REWARD)


def measure_steps(folder: Path, name: str, sizes: Sizes, *, overlap: bool) -> list[dict[str, Any]]:
    """Train a run. Returns metrics of its steps without the first ones and the last, whose reshard overlaps none."""
    recipe = {
        "name": name, "loop": "rl", "model": {"path": "model", "dtype": "float32"},
        "data": {"train": "data/train.jsonl", "max_prompt_tokens": 48},
        "cluster": {"ranks_per_node": 4},
        "optimizer": {"learning_rate": 1e-3},
        "reward": {"functions": ["share_of_digits:digits"]},
        "trainer": {"tp": 1, "max_tokens_per_microbatch": 2048},
        "rollout": {
            "placement": "separate", "ranks": 2, "max_staleness": 1, "kv_cache_gib": 0.25,
            "sampling": {"max_new_tokens": 16},
        },
        "algorithm": {"importance_sampling": "tis"},
        "weights": {"verify_every": 1, "overlap": overlap},
        "train": {
            "steps": WARM_STEPS + sizes.steps + 1, "prompts_per_step": sizes.prompts,
            "samples_per_prompt": sizes.samples,
        },
    }  # fmt: skip
    (folder / f"{name}.yaml").write_text(json.dumps(recipe))
    train(f"{name}.yaml", folder=folder)
    last = WARM_STEPS + sizes.steps
    return [row for row in read_metrics(folder / "runs" / name) if WARM_STEPS < row["step"] <= last]


def check_versions(rows: list[dict[str, float]]) -> None:
    """Assert that the trainer's log-probs agree with those of a token's own version, and of no other one."""
    gaps = [[row[name] for row in rows if (name := f"logprob_gap/mean/age_{age}") in row] for age in (0, 1)]
    assert gaps[0] and max(gaps[0]) < 1e-6 < 1e-5 < max(gaps[1])


def test_engines_sample_with_each_step_s_weights_while_the_next_one_trains(tmp_path: Path) -> None:
    make_inputs(tmp_path, SMALL)
    rows = measure_steps(tmp_path, "run", SMALL, overlap=True)
    run = tmp_path / "runs/run"
    every = metrics(run)[1:]
    assert [row["step"] for row in rows] == [3, 4] and [row["step"] for row in every] == [1, 2, 3, 4, 5]
    # A reshard that overlaps a step is in that step's line. The last step's reshard overlaps none.
    assert ["time/reshard_hidden_seconds" in row for row in every] == [False, True, True, True, True]
    for row in rows:
        assert 0 <= row["time/reshard_hidden_seconds"] <= row["perf/engine_pause_seconds"]
        assert 0 <= row["time/reshard_waited_seconds"] < row["time/step_seconds"]
        # Each was compared with the copy that was sent.
        assert row["time/reshard_verify_seconds"] > 0 and row["rollout/replicas"] == 2
        assert row["reshard/received_bytes"] == row["reshard/sent_bytes"] == rows[0]["reshard/sent_bytes"] > 0
        assert row["staleness/max"] <= 1 and 0 <= row["time/engines_idle"] <= 1
    check_versions(every)
    assert unknown_metrics(run) == set()


@pytest.mark.timeout(1200)
def test_the_trainer_waits_less_with_the_overlap(tmp_path: Path) -> None:
    make_inputs(tmp_path, LARGE)
    waited: dict[bool, list[float]] = {False: [], True: []}
    # Runs alternate, so that a change of the machine's speed hits both kinds.
    for number, overlap in enumerate((True, False, False, True)):
        rows = measure_steps(tmp_path, f"run_{number}", LARGE, overlap=overlap)
        waited[overlap].append(median(row["time/reshard_seconds"] for row in rows))
    assert median(waited[True]) < median(waited[False])
