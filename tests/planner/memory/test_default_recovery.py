"""Defaults of cluster.recover and checkpoint.replicate: on where a node's host memory holds the copies."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megarl.config import Recipe
from megarl.planner import recovery
from megarl.planner.defaults import memory_defaults, with_memory_defaults
from megarl.planner.memory.node_bytes import fullest_node_bytes
from megarl.planner.predictions import table_of
from megarl.preflight import check_plan

Large = Callable[..., Recipe]
DENSE, SFT, EXPERTS = "qwen3_14b_dapo_h200", "qwen3_8b_sft", "qwen3_30b_a3b_gspo"


@pytest.fixture
def on_gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Returns a function that makes this machine a node with GPUs and so many bytes of host memory."""

    def pretend(num_bytes: int) -> None:
        monkeypatch.setattr("megarl.planner.gpus_of_run.runs_on_cpu", lambda: False)
        monkeypatch.setattr(recovery, "machine_bytes", lambda: num_bytes)

    return pretend


def chosen(recipe: Recipe) -> tuple[str, int]:
    return recipe.cluster.recover, recipe.checkpoint.replicate


@pytest.mark.parametrize(
    ("name", "overrides", "expected"),
    [
        pytest.param(DENSE, (), ("restart", 1), id="left out"),
        # Their steps are short.
        pytest.param(SFT, (), ("restart", 10), id="without sampling"),
        pytest.param(DENSE, ("cluster.recover=stop",), ("stop", 0), id="stop"),
        pytest.param(DENSE, ("cluster.recover=shrink",), ("shrink", 1), id="shrink"),
        pytest.param(DENSE, ("checkpoint.replicate=0",), ("stop", 0), id="no copies"),
        pytest.param(DENSE, ("cluster.recover=restart", "checkpoint.replicate=0"), ("restart", 0), id="checkpoints"),
        pytest.param(DENSE, ("checkpoint.replicate=5",), ("restart", 5), id="fewer copies"),
        pytest.param(DENSE, ("train.steps=0",), ("stop", 0), id="no steps"),
        pytest.param(DENSE, ("cluster.device=cpu",), ("stop", 0), id="ranks on cpus"),
        # Copies do not hold the recorded experts.
        pytest.param(EXPERTS, ("trainer.router_replay=true",), ("stop", 0), id="router replay"),
        # A login node says nothing about the memory of the job's nodes.
        pytest.param(DENSE, ("cluster.launcher=slurm",), ("stop", 0), id="login node"),
    ],
)
def test_a_recipe_keeps_its_fields_and_gets_those_that_it_leaves_out(
    large: Large, on_gpus: Callable[[int], None], name: str, overrides: tuple[str, ...], expected: tuple[str, int]
) -> None:
    on_gpus(4 << 40)
    written = large(name, "cluster.launcher=local", *overrides)
    completed = with_memory_defaults(written)
    assert chosen(completed) == expected
    lines = [line for line in memory_defaults(written, completed) if line.startswith(("cluster.", "checkpoint."))]
    changes = zip(("cluster.recover", "checkpoint.replicate"), chosen(written), expected, strict=True)
    assert [line.partition(" = ")[0] for line in lines] == [field for field, old, new in changes if old != new]


def test_a_node_of_a_slurm_job_is_like_the_others(
    large: Large, on_gpus: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpus(4 << 40)
    monkeypatch.setenv("SLURMD_NODENAME", "node1")
    assert chosen(with_memory_defaults(large(DENSE, "cluster.launcher=slurm"))) == ("restart", 1)


def test_a_quarter_of_the_memory_of_a_node_stays_free(large: Large, on_gpus: Callable[[int], None]) -> None:
    on_gpus(4 << 40)
    written = large(DENSE, "cluster.launcher=local")
    completed = with_memory_defaults(written)
    needed = fullest_node_bytes(completed, table_of(completed, check_plan(completed)[1]))
    least = -(-needed * 4 // 3)
    on_gpus(least)
    assert chosen(with_memory_defaults(written)) == ("restart", 1)
    on_gpus(least - 4)
    assert chosen(with_memory_defaults(written)) == ("stop", 0)


def test_a_start_on_a_cpu_is_unchanged(large: Large) -> None:
    written = large(DENSE, "cluster.launcher=local")
    assert chosen(with_memory_defaults(written)) == ("stop", 0)
