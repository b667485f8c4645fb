"""The dry run's table names what trains: environment, rewards, algorithm, learning rate, trackers, evaluation."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.config import Recipe
from megarl.console.predictions import print_sizes
from megarl.planner.sizes import parallel_of
from megarl.preflight import check, overview

Make = Callable[..., Recipe]


def test_what_a_recipe_trains_with(recipe: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heldout = tmp_path / "heldout.jsonl"
    heldout.write_text((tmp_path / "train.jsonl").read_text())
    made = recipe(
        data={"validation": {"math": str(heldout)}},
        rollout={"environment": "python", "max_turns": 4, "kv_cache_gib": 0.5},
        reward={"functions": ["boxed", {"name": "gsm8k", "weight": 0.25}], "function_weight": 2.0},
        algorithm={"preset": "dapo", "kl_coefficient": 0.02, "importance_sampling": "tis"},
        optimizer={"learning_rate": 3e-5, "schedule": "cosine", "min_learning_rate": 1e-6, "warmup_ratio": 0.25},
        train={"steps": 10, "updates_per_step": 2},
        trackers=["tensorboard", "wandb"],
        evaluation={"every_steps": 5, "samples_per_prompt": 4},
    )
    rows = overview(made)
    assert rows == {
        "environment": "python, at most 4 turns",
        "rewards": "boxed * 2, gsm8k * 0.5",
        "KV cache": "0.5 GiB a rank",
        "algorithm": "preset dapo, advantage grpo, policy loss clipped, token_mean, KL 0.02 in the loss, "
        "importance sampling tis, groups of accuracy between 0 and 1",
        "learning rate": "3e-05, cosine to 1e-06 after 5 of 20 updates of warm-up; adam",
        "trackers": "tensorboard, wandb",
        "evaluation": "math: every 5 steps, before the first step, after the last; 4 attempts a problem, temperature 1",
        "lost rank": "the run ends; it costs all steps, because checkpoint.every_steps = 0",
    }
    print_sizes(made, parallel_of(made), {"train": 3, "math": 3}, {})
    printed = "".join(capsys.readouterr().out.split())
    assert all("".join((name + text).split()) in printed.replace("│", "") for name, text in rows.items())


ACCURACY, SPREAD = "accuracy between 0.2 and 1", "rewards spread by more than 0.2"


@pytest.mark.parametrize(
    ("metric", "function", "groups"),
    [
        ("reward", "boxed", SPREAD),
        ("accuracy", "boxed", ACCURACY),
        (None, "boxed", ACCURACY),
        (None, "length", SPREAD),
        (None, "own:score", f"{ACCURACY}, or without verdicts of {SPREAD}"),
    ],
)
def test_the_metric_of_dynamic_sampling_is_named(recipe: Make, metric: str | None, function: str, groups: str) -> None:
    algorithm = {"dynamic_sampling": [0.2, 1], "dynamic_sampling_metric": metric}
    rows = overview(recipe(reward={"functions": [function]}, algorithm=algorithm))
    assert rows["algorithm"].endswith(f", groups of {groups}")


def test_a_critic_has_a_learning_rate_of_its_own(recipe: Make) -> None:
    rows = overview(recipe(algorithm={"preset": "ppo"}, trackers=[]))
    assert rows["learning rate"].startswith("1e-06, constant")
    assert rows["learning rate of the critic"].startswith("5e-06, constant")
    assert rows["trackers"].startswith("none") and rows["evaluation"].startswith("none")


def test_loops_without_engine_have_no_environment(recipe: Make) -> None:
    rows = overview(recipe(loop="sft", rollout={}))
    assert rows["algorithm"] == "cross-entropy" and not {"environment", "rewards", "KV cache"} & rows.keys()


def test_sources_of_a_mixture_are_named_where_they_differ(recipe: Make) -> None:
    given = {"data": {"train": "train.jsonl"}}
    rows = overview(
        recipe(mixture={"math": given, "tools": given | {"rollout": {"environment": "python", "max_turns": 3}}})
    )
    assert rows["environment"] == "math: single_turn; tools: python, at most 3 turns"
    assert rows["rewards"] == "boxed * 1"


@pytest.mark.parametrize(
    ("arguments", "is_there"),
    [
        (["absent.py"], False),
        (["-W", "ignore", "absent.py", "other.sh"], False),
        (["agent.py", "absent.py"], True),
        (["-m", "own_agent", "absent.py"], True),
        (["-c", "print(1)", "absent.py"], True),
        (["run"], True),
    ],
)
def test_the_file_of_an_agents_program_exists(
    recipe: Make,
    only_fault: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    is_there: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text("")
    rollout = {"environment": "command", "agent": {"command": [sys.executable, *arguments]}}
    if is_there:
        check(recipe(rollout=rollout))
        return
    text = only_fault(rollout=rollout)
    assert text.startswith("rollout.agent.command = ") and "there is no file 'absent.py'" in text


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, ["the run ends", "all steps"]),
        ({"checkpoint": {"every_steps": 20}}, ["the run ends", "checkpoint.every_steps = 20"]),
        (
            {"cluster": {"recover": "restart"}, "checkpoint": {"every_steps": 20}},
            ["all ranks start again", "checkpoint.every_steps = 20"],
        ),
        (
            {"cluster": {"recover": "shrink", "nodes": 2, "launcher": "slurm"}, "checkpoint": {"replicate": 3}},
            ["with fewer ranks", "at most 6 steps"],
        ),
        # A single node takes its copies with it.
        (
            {"cluster": {"recover": "restart"}, "checkpoint": {"replicate": 1, "every_steps": 20}},
            ["at most 2 steps", "the loss of the node", "checkpoint.every_steps = 20"],
        ),
        # Copies are of no use to a run that ends.
        ({"checkpoint": {"replicate": 1}}, ["the run ends", "all steps"]),
    ],
)
def test_the_cost_of_a_loss_is_named(recipe: Make, changed: dict[str, Any], words: list[str]) -> None:
    text = overview(recipe(**changed))["lost rank"]
    assert all(word in text for word in words), text
    assert ("the loss of the node" in text) is ("the loss of the node" in words)
