"""Values that have not run on a GPU: in descriptions, in printed recipes, and at a start on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megarl.config import Recipe
from megarl.config.annotations import UntriedOnGpu
from megarl.config.recipe import to_yaml
from megarl.config.references.field_table import fields_markdown
from megarl.config.references.json_schema import recipe_schema
from megarl.config.schema import all_fields, annotated_with
from megarl.preflight import check, list_resource_warnings
from megarl.preflight.memory.resources import warn_of_untried_fields

ASYNCHRONOUS = {
    "cluster": {"ranks_per_node": 4},
    "algorithm": {"importance_sampling": "tis"},
}
PLACED = {"placement": "separate", "ranks": 2, "max_staleness": 1}
CASES = {
    "rollout.quantization": ("fp8", {"rollout": {"quantization": "fp8"}}),
    "rollout.kv_cache_dtype": ("fp8", {"rollout": {"kv_cache_dtype": "fp8"}}),
    "lora.rank": ("8", {"lora": {"rank": 8}}),
    "trainer.router_replay": ("true", {"trainer": {"router_replay": True}}),
    "trainer.share_prefixes": ("auto", {"trainer": {"share_prefixes": "auto"}}),
    "trainer.keep_logits": ("true", {"trainer": {"keep_logits": True}}),
    "trainer.fp8": ("blockwise", {"trainer": {"fp8": "blockwise"}}),
    "trainer.moe_dispatcher": ("flex", {"trainer": {"moe_dispatcher": "flex"}}),
    "trainer.optimizer_offload_fraction": ("0.5", {"trainer": {"optimizer_offload_fraction": 0.5}}),
    "trainer.drafter_learning_rate": ("0.0001", {"trainer": {"drafter_learning_rate": 1e-4}}),
    "weights.overlap": ("true", {**ASYNCHRONOUS, "rollout": PLACED, "weights": {"overlap": True}}),
    "rollout.recompute_kv": ("false", {**ASYNCHRONOUS, "rollout": {**PLACED, "recompute_kv": False}}),
    "train.record": ("all", {"train": {"record": "all"}}),
    "train.on_spike": ("skip", {"train": {"on_spike": "skip"}}),
    "weights.canary_every": ("10", {"weights": {"canary_every": 10}}),
    "optimizer.name": ("muon", {"optimizer": {"name": "muon"}}),
    "critic.optimizer.name": (
        "muon",
        {"algorithm": {"advantage": "gae"}, "critic": {"optimizer": {"name": "muon"}}},
    ),
    "cluster.recover": ("restart", {"cluster": {"recover": "restart"}}),
    "checkpoint.replicate": ("2", {"checkpoint": {"replicate": 2}}),
}
"""By field: a value that no GPU has run, and sections of a recipe with it. tests/gpu/README.md lists what has run."""


def test_these_fields_are_marked() -> None:
    marked = {name for name in all_fields() if annotated_with(name, UntriedOnGpu)}
    assert marked == CASES.keys()
    page = fields_markdown()
    assert page.count("Untried on a GPU: ") == len(CASES)
    # A mark written by hand gives no notice at a start.
    assert page.count("Untried on") == len(CASES)
    schema = recipe_schema()["$defs"]
    assert schema["WeightsConfig"]["properties"]["overlap"]["description"].endswith("Untried on a GPU: true.")


@pytest.mark.parametrize("name", CASES)
def test_a_start_on_a_gpu_warns_once(recipe: Callable[..., Recipe], name: str) -> None:
    value, sections = CASES[name]
    made = recipe(**sections)
    [warning] = warn_of_untried_fields(made)
    assert warning.startswith(f"{name} = {value}: untried on a GPU;") and f"steps with {name}=" in warning
    assert "Untried on a GPU: " in to_yaml(made, comments=True)
    assert [*warn_of_untried_fields(recipe())] == []


def test_a_default_chosen_by_memory_is_compared_with_the_tried_value(recipe: Callable[..., Recipe]) -> None:
    [warning] = warn_of_untried_fields(recipe(trainer={"keep_logits": True}))
    assert warning.endswith("compare the first steps with trainer.keep_logits=false")
    assert [*warn_of_untried_fields(recipe(trainer={"keep_logits": False}))] == []


def test_ranks_on_cpus_are_not_warned(recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch) -> None:
    made = recipe(**CASES["weights.overlap"][1])
    parallel = check(made)
    assert not [text for text in list_resource_warnings(made, parallel) if "untried on a GPU" in text]
    monkeypatch.setattr("megarl.preflight.memory.resources.ranks_on_cpu", lambda recipe: False)
    assert len([text for text in list_resource_warnings(made, parallel) if "untried on a GPU" in text]) == 1
