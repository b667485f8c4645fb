"""Defaults of trainer.offload and trainer.recompute: the least with which 8 GiB of each GPU stay free."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from megarl.cli import main
from megarl.config import Recipe
from megarl.config.recipe import load, recipe_changes, to_yaml
from megarl.planner.cache import default_cache_gib
from megarl.planner.defaults import memory_defaults, with_memory_defaults
from megarl.planner.gpus_of_run import gpu_memory
from megarl.planner.judge import MemoryJudge
from megarl.planner.layouts.overrides import overrides_between
from megarl.planner.memory.devices import GPU
from megarl.planner.memory.memory_table import MemoryTable
from megarl.planner.memory.phases import memory_table
from megarl.planner.predictions import models_of
from megarl.planner.search import with_field_values
from megarl.planner.sizes import parallel_of
from tests.planner.memory.conftest import RECIPES

GIB = 2**30
Large = Callable[..., Recipe]
STATES = ((), ("gradients",), ("optimizer", "gradients"), ("optimizer", "gradients", "parameters"))
DENSE = (("none", None), ("selective", ("mlp",)), ("full", None))


def table_with(recipe: Recipe, values: dict[str, Any], *, fills_cache: bool) -> MemoryTable:
    """The predicted memory of a recipe with other values, and with the rest of a GPU as KV cache if it has none."""
    gpus = gpu_memory(recipe)
    assert gpus is not None
    recipe = with_field_values(recipe, values)
    models = models_of(recipe, parallel_of(recipe))
    if fills_cache:
        recipe = with_field_values(
            recipe, {"rollout.kv_cache_gib": default_cache_gib(recipe, MemoryJudge(models, gpus))}
        )
    return memory_table(recipe, models, GPU, gpu_gib=gpus.engine)


def values_of(states: tuple[str, ...], recomputation: tuple[str, tuple[str, ...] | None]) -> dict[str, Any]:
    recompute, modules = recomputation
    further = {} if modules is None else {"trainer.recompute_modules": modules}
    return {"trainer.offload": states, "trainer.recompute": recompute, **further}


@pytest.mark.parametrize(
    ("name", "gib", "overrides", "offload", "recompute"),
    [
        # All of it fits.
        ("qwen3_1_7b_gsm8k", 139.8, (), (), "none"),
        ("qwen3_4b_gsm8k", 139.8, (), (), "none"),
        ("qwen3_4b_gsm8k", 139.8, ("rollout.kv_cache_gib=default",), (), "none"),
        # A cache that the recipe sets must fit, whatever it costs.
        ("qwen3_4b_gsm8k", 139.8, ("rollout.kv_cache_gib=60",), ("gradients",), "none"),
        ("qwen3_4b_gsm8k", 139.8, ("rollout.kv_cache_gib=70",), ("optimizer", "gradients"), "none"),
        ("qwen3_4b_gsm8k", 139.8, ("rollout.kv_cache_gib=118",), STATES[3], "none"),
        ("qwen3_4b_gsm8k", 139.8, ("trainer.max_tokens_per_microbatch=16384",), (), "selective"),
        ("qwen3_4b_gsm8k", 139.8, ("trainer.max_tokens_per_microbatch=40960",), (), "full"),
        ("qwen3_4b_gsm8k", 90.0, ("rollout.kv_cache_gib=default",), ("optimizer", "gradients"), "full"),
        ("qwen3_14b_agent", 79.1, (), STATES[3], "selective"),
        ("qwen3_14b_dapo", 79.1, ("rollout.kv_cache_gib=default",), ("optimizer", "gradients"), "none"),
        ("qwen3_14b_dapo", 139.8, ("rollout.kv_cache_gib=default",), (), "none"),
        ("qwen3_4b_gsm8k", 139.8, ("rollout.kv_cache_gib=default", "rollout.gpu_memory_utilization=0.4"), (), "none"),
    ],
)
def test_the_least_that_leaves_8_gib_is_chosen(
    large: Large, name: str, gib: float, overrides: tuple[str, ...], offload: tuple[str, ...], recompute: str
) -> None:
    written = large(name, f"cluster.gpu_memory_gib={gib}", *overrides)
    chosen = with_memory_defaults(written).trainer
    assert (chosen.offload, chosen.recompute) == (offload, recompute)
    fills_cache = "rollout.kv_cache_gib=default" in overrides and len(overrides) == 1

    def is_enough(table: MemoryTable) -> bool:
        free = gib - max(phase.device_bytes for phase in table.phases) / GIB
        cache = table.cache
        # Completions of a quarter of the limit on average: a decoded request has a fifth of it, and its prompt.
        holds = cache is not None and cache.tokens >= 0.2 * cache.longest * cache.decoding_requests
        return free >= 8 and (holds or not fills_cache)

    # Every cheaper choice is too large.
    cheaper = list(product(DENSE, STATES))
    place = cheaper.index(((recompute, ("mlp",) if recompute == "selective" else None), offload))
    enough = [
        is_enough(table_with(written, values_of(states, recomputation), fills_cache=fills_cache))
        for recomputation, states in cheaper[: place + 1]
    ]
    assert enough == [False] * place + [True]


def test_what_a_recipe_sets_stays(large: Large) -> None:
    full = large("qwen3_4b_gsm8k", "trainer.offload=[parameters]", "trainer.recompute=full")
    assert with_memory_defaults(full).trainer.offload == ("parameters",)
    assert with_memory_defaults(full).trainer.recompute == "full"
    assert not [text for text in memory_defaults(full, with_memory_defaults(full)) if "trainer.offload" in text]
    # Nothing is offloaded, although it does not fit: the start is refused with a remedy.
    empty = large("qwen3_4b_gsm8k", "trainer.offload=[]", "rollout.kv_cache_gib=90")
    assert with_memory_defaults(empty).trainer.offload == ()
    none = large("qwen3_14b_agent", "trainer.recompute=none")
    assert with_memory_defaults(none).trainer.recompute == "none"
    # Megatron-Core's own fields are a choice too.
    own = large(
        "qwen3_14b_agent", "trainer.megatron.recompute_granularity=full", "trainer.megatron.recompute_num_layers=1"
    )
    assert with_memory_defaults(own).trainer.recompute == "none"


def test_without_a_choice_that_fits_the_freest_one_is_taken(large: Large) -> None:
    """Then the remedies of a start begin from it. Recomputation would not help the engine, so it is left out."""
    chosen = with_memory_defaults(large("qwen3_4b_gsm8k", "rollout.kv_cache_gib=150")).trainer
    assert (chosen.offload, chosen.recompute) == (STATES[3], "none")
    # Less than 8 GiB are left, whatever is offloaded.
    chosen = with_memory_defaults(large("qwen3_4b_gsm8k", "rollout.kv_cache_gib=122")).trainer
    assert (chosen.offload, chosen.recompute) == (STATES[3], "none")


def test_a_choice_is_never_one_that_a_check_refuses(large: Large) -> None:
    tight = ("cluster.gpu_memory_gib=40", "rollout.kv_cache_gib=1")
    replayed = with_memory_defaults(large("qwen3_30b_a3b_gspo", *tight)).trainer
    assert replayed.router_replay and replayed.recompute != "full" and "moe" not in replayed.recompute_modules
    free = with_memory_defaults(large("qwen3_30b_a3b_gspo", *tight, "trainer.router_replay=false")).trainer
    assert free.recompute == "full"
    # The CPU holds this optimizer's states already.
    on_host = with_memory_defaults(large("qwen3_8b_gsm8k", "rollout.kv_cache_gib=97")).trainer
    assert on_host.offload == ("gradients", "parameters")
    separate = ("rollout.placement=separate", "rollout.ranks=4", "rollout.max_staleness=0")
    apart = with_memory_defaults(large("qwen3_14b_dapo_h200", *separate, "rollout.kv_cache_gib=115"))
    assert apart.trainer.offload == ()
    supervised = with_memory_defaults(large("qwen3_8b_sft", "cluster.gpu_memory_gib=64")).trainer
    assert (supervised.offload, supervised.recompute) == ((), "selective")


def test_a_start_on_cpus_changes_nothing(large: Large, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.planner.gpus_of_run.runs_on_cpu", lambda: True)
    written = large("qwen3_14b_agent")
    assert with_memory_defaults(written, is_start=True) is written
    unknown = large("tiny_rl", "model.path=models/tiny")
    assert with_memory_defaults(unknown) is unknown
    assert (unknown.trainer.offload, unknown.trainer.recompute) == ((), "none")


def test_a_resumed_run_keeps_what_it_began_with(large: Large, tmp_path: Path) -> None:
    began = with_memory_defaults(large("qwen3_14b_agent"))
    (tmp_path / "config.yaml").write_text(to_yaml(began))
    resumed = with_memory_defaults(load(tmp_path / "config.yaml", ["cluster.gpu_memory_gib=b200"], is_of_run=True))
    assert (resumed.trainer.offload, resumed.trainer.recompute) == (STATES[3], "selective")
    assert resumed.trainer.recompute_modules == ("mlp",)
    again = with_memory_defaults(load(tmp_path / "config.yaml", is_of_run=True))
    assert recipe_changes({}, again) == recipe_changes({}, began)
    assert not [text for text in memory_defaults(again, again) if "trainer." in text]


def test_each_choice_is_printed_with_its_reason(large: Large, capsys: pytest.CaptureFixture[str]) -> None:
    def plan(name: str, *overrides: str) -> list[str]:
        with pytest.raises(SystemExit):
            main(["plan", str(RECIPES / f"{name}.yaml"), *overrides])
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("trainer.")]

    offload, recompute, *_ = plan("qwen3_14b_agent")
    assert offload.startswith(
        "trainer.offload = [optimizer,gradients,parameters] by default: with trainer.offload = [opt"
    )
    assert recompute.startswith(
        "trainer.recompute = selective (mlp) by default: with trainer.recompute = none train would"
    )
    offload, recompute, *_ = plan("qwen3_14b_dapo", "rollout.kv_cache_gib=default")
    assert "the KV cache would hold " in offload and " of 128 concurrent requests of 3,353 tokens" in offload
    assert recompute.startswith("trainer.recompute = none by default: train leaves ")
    # Less than 8 GiB are left in an update, whatever is offloaded: the cache is the reason.
    offload, _, *_ = plan("qwen3_0_6b_gsm8k", "rollout.kv_cache_gib=default", "cluster.gpu_memory_gib=24")
    assert "with trainer.offload = [optimizer,gradients] the KV cache would hold 102 of 256 " in offload
    offload, _, *_ = plan("qwen3_0_6b_gsm8k", "rollout.kv_cache_gib=default", "cluster.gpu_memory_gib=8")
    assert offload == "trainer.offload = [] by default: logprobs takes 8.3 GiB more than a GPU has"
    offload, _, *_ = plan("qwen3_4b_gsm8k")
    assert offload == "trainer.offload = [] by default: rollout leaves 12.0 GiB of a GPU"
    assert not [line for line in plan("qwen3_8b_sft") if "offload" in line]


def test_overrides_of_a_found_layout_name_what_a_start_would_choose(large: Large) -> None:
    """Without its own line, no offloading would become the choice of the start."""
    recipe = large("qwen3_14b_agent")
    values = {"trainer.offload": (), "trainer.recompute": "none"}
    assert overrides_between(recipe, values) == ("trainer.offload=[]", "trainer.recompute=none")
    pasted = large("qwen3_14b_agent", *overrides_between(recipe, values))
    assert with_memory_defaults(pasted).trainer.offload == ()
    assert overrides_between(pasted, values) == ()
