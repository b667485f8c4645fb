"""`megarl plan` begins with a verdict: it fits, or which phase is too large by how much, and the cheapest remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from megarl.cli import main
from megarl.config import Recipe
from megarl.planner.defaults import with_memory_defaults
from megarl.planner.memory.devices import GPU_MEMORY_GIB
from megarl.planner.sizes import parallel_of
from megarl.preflight.memory.memory_fit import memory_faults
from tests.planner.memory.conftest import RECIPES

GIB = 2**30
Large = Callable[..., Recipe]


@pytest.fixture
def plan(large: Large, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """`plan("qwen3_14b_dapo", ...)` returns the exit code and the output of that command."""

    def run(name: str, *arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as caught:
            main(["plan", str(RECIPES / f"{name}.yaml"), *arguments])
        assert isinstance(caught.value.code, int)
        return caught.value.code, capsys.readouterr().out

    return run


def as_json(plan: Callable[..., tuple[int, str]], *arguments: str) -> tuple[int, dict[str, Any]]:
    code, text = plan(*arguments, "--json")
    return code, json.loads(text)


TOO_LARGE = ("rollout.kv_cache_gib=104", "trainer.recompute=none", "trainer.max_tokens_per_microbatch=40960")


def test_a_plan_that_does_not_fit_begins_with_the_cheapest_remedy(large: Large, plan: Any) -> None:
    """The remedy is the first of those that the dry run names, and with it the plan fits."""
    name, given = "qwen3_14b_dapo", ("cluster.gpu_memory_gib=h100", *TOO_LARGE)
    code, text = plan(name, *given)
    verdict, remedy, *_ = text.splitlines()
    assert code == 2
    assert verdict.startswith("does not fit: cluster.gpu_memory_gib = h100: ")
    for phase in ("start", "rollout", "train"):
        assert f"{phase} takes " in verdict
    recipe = with_memory_defaults(large(name, *given))
    (refusal,) = memory_faults(recipe, parallel_of(recipe), is_start=False)
    overrides = remedy.removeprefix("cheapest remedy: ")
    assert f"what fits: {overrides}" in refusal
    code, text = plan(name, *given, *overrides.split())
    assert code == 0 and text.startswith("fits: cluster.gpu_memory_gib = h100: ")


def test_the_excess_of_each_phase_is_in_the_json(plan: Any) -> None:
    code, found = as_json(plan, "qwen3_14b_dapo", "cluster.gpu_memory_gib=h100", *TOO_LARGE)
    assert code == 2 and found["fits"] is False and found["remedies"]
    limit = int(GPU_MEMORY_GIB["h100"] * GIB)
    taken = {phase["phase"]: phase["device_bytes"] for phase in found["memory"]["phases"]}
    assert set(found["limit_bytes"].values()) == {limit}
    assert found["excess_bytes"] == {name: size - limit for name, size in taken.items() if size > limit}
    assert {"rollout", "train"} <= found["excess_bytes"].keys() and "save" not in found["excess_bytes"]

    code, found = as_json(plan, "qwen3_14b_dapo", "cluster.gpu_memory_gib=200", *TOO_LARGE)
    assert code == 0 and found["fits"] is True and found["excess_bytes"] == {} and found["remedies"] == []


@pytest.mark.parametrize(("kind", "bandwidth"), [("h100", 450e9), ("b200", 900e9)])
def test_the_limits_are_those_of_the_gpu_that_is_named(plan: Any, kind: str, bandwidth: float) -> None:
    _, text = plan("qwen3_14b_dapo", f"cluster.gpu_memory_gib={kind}")
    assert f"\nlimits of {kind.upper()}: " in text
    _, named = as_json(plan, "qwen3_14b_dapo", f"cluster.gpu_memory_gib={kind}")
    _, h200 = as_json(plan, "qwen3_14b_dapo", "cluster.gpu_memory_gib=h200")
    wire, memory = (found["reshard"] for found in (named, h200))
    assert named["gpu"] == kind and named["bytes_per_second"]["nvlink"] == bandwidth
    assert wire["wire_seconds"] == pytest.approx(memory["wire_seconds"] * 450e9 / bandwidth)
    assert wire["memory_seconds"] != memory["memory_seconds"]


def test_without_named_gpus_the_verdict_is_of_this_machine_or_none(plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.planner.gpus_of_run.runs_on_cpu", lambda: True)
    monkeypatch.setattr("megarl.planner.verdict.machine_bytes", lambda: 64 * GIB)
    tiny = ("tiny_rl", "model.path=models/tiny")
    code, text = plan(*tiny)
    assert code == 0 and text.startswith("fits on CPUs: ")
    large = ("qwen3_14b_dapo", "cluster.gpu_memory_gib=null")
    code, found = as_json(plan, *large)
    assert code == 2 and found["fits"] is False and list(found["excess_bytes"]) == ["train"]
    code, text = plan(*large, "cluster.launcher=slurm")
    assert code == 0 and text.startswith("no verdict: ")


TIGHT = ("trainer.offload=[]", "trainer.recompute=full", "trainer.max_tokens_per_microbatch=18432")


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (("rollout.kv_cache_gib=0.01",), "rollout.kv_cache_gib=default"),
        # The least cache is larger than the free memory of these GPUs, so states are offloaded too.
        (
            ("rollout.kv_cache_gib=0.01", "cluster.gpu_memory_gib=64", "trainer.tp=4", "trainer.cp=1", *TIGHT),
            "rollout.kv_cache_gib=",
        ),
        (("rollout.kv_cache_gib=default", "rollout.gpu_memory_utilization=0.05"), "rollout.gpu_memory_utilization="),
    ],
)
def test_a_cache_shorter_than_one_request_has_a_remedy(plan: Any, given: tuple[str, ...], field: str) -> None:
    arguments = ("qwen3_14b_dapo_h200", *given)
    code, found = as_json(plan, *arguments)
    assert code == 2 and found["fits"] is False and found["excess_bytes"] == {}
    assert found["remedies"] and found["remedies"][0].startswith(field)
    code, found = as_json(plan, *arguments, *found["remedies"][0].split())
    assert code == 0 and found["fits"] is True


def test_a_cpu_plan_counts_the_longest_request_too(plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.planner.gpus_of_run.runs_on_cpu", lambda: True)
    monkeypatch.setattr("megarl.planner.cache.runs_on_cpu", lambda: True)
    monkeypatch.setattr("megarl.planner.verdict.machine_bytes", lambda: 64 * GIB)
    arguments = ("tiny_rl", "model.path=models/tiny", "rollout.kv_cache_gib=0.00001")
    code, found = as_json(plan, *arguments)
    (remedy,) = found["remedies"]
    assert code == 2 and found["fits"] is False and remedy.startswith("rollout.kv_cache_gib=")
    code, found = as_json(plan, *arguments, remedy)
    assert code == 0 and found["fits"] is True
