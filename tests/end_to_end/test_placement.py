"""Engines on ranks of their own: what is learned is what colocated engines' samples teach, also over a resume.

In float32, with old log-probs by the trainer and no importance sampling, the exported weights are equal in every bit,
and a reshard to other ranks moves the bytes that engines hold and no more. Two ranks train, two more sample. The
separate run is ended a step early and resumed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.end_to_end.recorded_metrics import unknown_metrics
from tests.logged_steps import logged_steps
from tools.checks.same_weights import hashes
from tools.make_dataset import make_dataset
from tools.make_tiny_model import make_tiny_model
from tools.runs import DIGITS_REWARD, output_end, read_metrics, run_megarl, train

pytestmark = pytest.mark.end_to_end

STEPS = 2
LAYOUTS: dict[str, tuple[str, Mapping[str, int]]] = {
    "tp2 -> tp2": ("llama", {"trainer.tp": 2, "rollout.tp": 2}),
    "pp2 -> tp1 x 2": ("llama", {"trainer.pp": 2, "rollout.tp": 1}),
    "ep2 -> tp2": ("qwen3_moe", {"trainer.ep": 2, "rollout.tp": 2}),
}
"""Family of the model and parallel sizes, by name."""
RECIPE = """
name: run
loop: rl
model: {{path: {model}, dtype: float32}}
data: {{train: data/train.jsonl, validation: {{heldout: data/heldout.jsonl}}, max_prompt_tokens: 96}}
trainer: {{max_tokens_per_microbatch: 512}}
optimizer: {{learning_rate: 1e-3}}
rollout: {{kv_cache_gib: 0.25, sampling: {{max_new_tokens: 16}}}}
reward: {{functions: ["share_of_digits:digits"]}}
algorithm: {{old_logprobs: trainer}}
weights: {{verify_every: 1}}
train: {{prompts_per_step: 4, samples_per_prompt: 4, updates_per_step: 2, profile_steps: [1]}}
checkpoint: {{every_steps: 1}}
evaluation: {{every_steps: 1, at_start: false}}
"""
SEPARATE = {"rollout.placement": "separate", "rollout.ranks": 2, "cluster.ranks_per_node": 4}
PLACEMENTS: dict[str, Mapping[str, Any]] = {"colocated": {"cluster.ranks_per_node": 2}, "separate": SEPARATE}


class Runs(NamedTuple):
    """Folders of two runs of one layout."""

    colocated: Path
    separate: Path
    num_least_bytes: float
    """Smallest number of bytes that a reshard of all ranks can move, by `megarl plan`."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models, data, recipes and reward."""
    folder = tmp_path_factory.mktemp("placement")
    for family in dict.fromkeys(family for family, _ in LAYOUTS.values()):
        make_tiny_model(folder / family, family=family, num_layers=2, initializer_range=0.08)
        (folder / f"{family}.yaml").write_text(RECIPE.format(model=family))
    make_dataset(folder / "data", train=64, heldout=8, sft=8)
    (folder / "share_of_digits.py").write_text(DIGITS_REWARD)
    return folder


def train_both(folder: Path, name: str, steps: int) -> Runs:
    """Train one layout in both placements."""
    family, sizes = LAYOUTS[name]
    recipe, names = f"{family}.yaml", [f"{placement}_{len(list(folder.glob('runs/*')))}" for placement in PLACEMENTS]
    overrides: list[str] = []
    for run_name, settings in zip(names, PLACEMENTS.values(), strict=True):
        overrides = [f"{field}={value}" for field, value in {"name": run_name, **sizes, **settings}.items()]
        if settings is SEPARATE:
            train(recipe, *overrides, f"train.steps={steps - 1}", folder=folder)
            train(recipe, *overrides, f"train.steps={steps}", "--resume", folder=folder)
        else:
            train(recipe, *overrides, f"train.steps={steps}", folder=folder)
    done = run_megarl("plan", recipe, "--json", *overrides, folder=folder)
    assert done.returncode == 0, output_end(done)
    planned = json.loads(done.stdout)
    num_least_bytes = planned["reshard"]["lower_bound_bytes"]["mean"] * planned["num_ranks"]
    return Runs(*(folder / "runs" / run_name for run_name in names), num_least_bytes)


@pytest.fixture(scope="module")
def runs(folder: Path) -> Runs:
    return train_both(folder, "pp2 -> tp1 x 2", STEPS)


def steps(run: Path) -> list[dict[str, Any]]:
    return logged_steps(run)


def check_weights(runs: Runs) -> None:
    """Assert that exported weights are equal in every bit, and that a reshard moved no more than it must."""
    colocated, separate = hashes(runs.colocated), hashes(runs.separate)
    weights = {file: digest for file, digest in colocated.items() if file != "completions"}
    assert weights and weights == {file: separate.get(file) for file in weights}
    num_moved_bytes = read_metrics(runs.separate)[-1]["reshard/received_bytes"]
    assert num_moved_bytes == pytest.approx(runs.num_least_bytes, rel=0.005)


def test_the_weights_are_equal_and_nothing_is_moved_twice(runs: Runs) -> None:
    check_weights(runs)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", list(LAYOUTS))
def test_the_weights_are_equal_in_each_layout_after_five_steps(folder: Path, name: str) -> None:
    check_weights(train_both(folder, name, 5))


def test_the_same_is_sampled_and_measured(runs: Runs) -> None:
    colocated, separate = steps(runs.colocated), steps(runs.separate)
    assert [step["step"] for step in separate] == [step["step"] for step in colocated] == list(range(1, STEPS + 1))
    for apart, shared in zip(separate, colocated, strict=True):
        for name in ("reward/mean", "train/loss", "train/grad_norm", "val/heldout/accuracy", "rollout/sampled_tokens"):
            assert apart[name] == pytest.approx(shared[name], rel=1e-6), name
        assert apart["logprob_gap/max"] <= 1e-5 and apart["staleness/max"] == 0
        assert shared.keys() - apart.keys() == set()
        of_engines = {"perf/engine_pause_seconds", "rollout/replicas", "rollout/lost_requests"}
        of_engines |= {"time/reshard_meet_seconds"}
        of_both = {"time/trainers_idle", "time/rollout_waited_seconds"}
        # A resumed run's first step has its start's time, its first few no judgement of the balance.
        not_always = {"time/start_seconds", "rollout/balanced_ranks"}
        assert apart.keys() - shared.keys() - not_always == of_both | of_engines
        assert apart["rollout/replicas"] == 2 and apart["rollout/lost_requests"] == 0
        assert 0 < apart["perf/engine_pause_seconds"] < apart["time/step_seconds"]
        assert 0 < apart["time/trainers_idle"] < 1 and apart["memory/rollout_gib"] > 0.1
        # Engines get all their weights from trainers' ranks, and nothing from their own.
        assert apart["reshard/local_bytes"] == 0 and apart["reshard/received_bytes"] == apart["reshard/sent_bytes"] > 0
    assert unknown_metrics(runs.separate) == set()


def test_profile_logs_and_status_have_all_ranks(runs: Runs) -> None:
    trace = json.loads((runs.separate / "profiles/step_000001.json").read_text())
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert [name.split(" on ")[0] for name in names] == ["driver", *(f"rank {rank}" for rank in range(4))]
    found = {(event["pid"], event["name"]) for event in trace["traceEvents"] if event["ph"] == "X"}
    for process in (1, 2):
        assert (process, "policy.update") in found and (process, "advance") not in found
    for process in (3, 4):
        assert (process, "advance") in found and (process, "policy.update") not in found
    assert sorted(path.name for path in (runs.separate / "logs/latest").glob("rank_*")) == [
        f"rank_{rank:04d}.log" for rank in range(4)
    ]
    assert json.loads((runs.separate / "status.json").read_text())["state"] == "done"


def test_engines_that_share_their_ranks_go_to_sleep_before_the_last_reward_is_there(runs: Runs) -> None:
    trace = json.loads((runs.colocated / "profiles/step_000001.json").read_text())
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    [sleeping] = [event for event in spans if event["pid"] == 0 and event["name"] == "sleep engines"]
    [rollout] = [event for event in spans if event["pid"] == 0 and event["name"] == "rollout"]
    assert rollout["ts"] < sleeping["ts"] < sleeping["ts"] + sleeping["dur"] <= rollout["ts"] + rollout["dur"]
    asleep = [event for event in spans if event["name"] == "sleep_engine"]
    assert sorted(event["pid"] for event in asleep) == [1, 2]


def test_a_report_is_made_of_both(runs: Runs, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = run_megarl("report", runs.separate, runs.colocated, "--out", page)
    assert done.returncode == 0 and page.stat().st_size > 0, done.stderr
