"""The search prices a layout as the check against published steps does, with all fields of the recipe that cost."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.config import Recipe
from megarl.families.published import PUBLISHED
from megarl.planner.layouts import recipe_seconds as recipe_module
from megarl.planner.layouts import search as search_module
from megarl.planner.layouts.candidates import Candidates, EngineSizes, Placement, TrainerSizes
from megarl.planner.layouts.combinations import LayoutChoice
from megarl.planner.layouts.recipe_seconds import recipe_seconds
from megarl.planner.layouts.search import LayoutSearch, make_layout_search
from megarl.planner.search import with_field_values
from megarl.planner.seconds.constants import FITTED
from megarl.planner.seconds.lengths import log_normal
from tests.planner.memory.conftest import large
from tools.checks import plan_search

__all__ = ["large"]


def _kind(row: Mapping[str, Any]) -> tuple[bool | str, ...]:
    """Return which axes of a row's layout are split, whether its engines are separate, and what is recomputed."""
    return *(row[axis] > 1 for axis in ("tp", "cp", "pp", "ep", "engine_gpus")), row["recompute"]


# A row of each kind, on GPUs that recipes name. A row without a step has measurements of a phase alone.
ROWS = {
    _kind(row): row for row in plan_search.read_rows() if row["gpu"] in ("h100", "h200") and "step" in row["measured"]
}


def _search(recipe: Recipe, *, mean: float, prompt_tokens: float) -> LayoutSearch:
    limit = recipe.rollout.sampling.max_new_tokens
    return make_layout_search(recipe, log_normal(mean=mean, limit=limit, prompt_tokens=prompt_tokens))


def _recipe_of(row: Mapping[str, Any], folder: Path) -> Recipe:
    """Return the recipe of a published row: its model, GPUs, samples and passes."""
    stated = json.loads(plan_search.ROWS.read_text(encoding="utf-8"))["models"]
    config = stated.get(row["model"]) or PUBLISHED[row["model"]]
    (folder / "config.json").write_text(json.dumps(dict(config)))
    placement = {"placement": "separate", "ranks": row["engine_gpus"], "max_staleness": row["staleness"]}
    return Recipe.model_validate(
        {
            "name": "row", "loop": "rl", "model": {"path": str(folder)},
            "data": {"train": "unused", "max_prompt_tokens": row["prompt_tokens"]},
            "cluster": {"nodes": row["gpus"] // 8, "ranks_per_node": 8, "gpu_memory_gib": row["gpu"]},
            "rollout": {
                "sampling": {"max_new_tokens": row["max_tokens"]}, "max_concurrent_requests": row["max_requests"],
                **(placement if row["engine_gpus"] else {}),
            },
            "reward": {"functions": ["gsm8k"]},
            # A reference, so that every row has a scoring pass.
            "algorithm": {"kl_coefficient": 0.01},
            "train": {
                "prompts_per_step": row["prompts"], "samples_per_prompt": row["samples"] // row["prompts"],
                "updates_per_step": row["updates"],
            },
        }
    )  # fmt: skip


@pytest.mark.parametrize("row", ROWS.values(), ids=[row["id"] for row in ROWS.values()])
def test_seconds_are_those_of_the_check(
    row: Mapping[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = _search(_recipe_of(row, tmp_path), mean=row["mean_tokens"], prompt_tokens=row["prompt_tokens"])
    dp = (row["gpus"] - row["engine_gpus"]) // (row["tp"] * row["cp"] * row["pp"])
    sizes = TrainerSizes(tp=row["tp"], pp=row["pp"], cp=row["cp"], vpp=1, ep=row["ep"], etp=1, dp=dp)
    # A row's sizes are priced even where a check of recipes refuses them.
    engine = EngineSizes(row["rollout_tp"], ep=False)
    monkeypatch.setattr(Candidates, "list_trainers", lambda *_: [sizes])
    monkeypatch.setattr(Candidates, "list_engines", lambda *_: [engine])
    monkeypatch.setattr(Candidates, "list_row_lengths", lambda *_: [row["row_tokens"]])
    placement = Placement(ranks=row["engine_gpus"], staleness=row["staleness"])
    group = search._make_combinations(Candidates(search.recipe, search.shape, Counter()), placement)
    assert group is not None
    (number,) = [
        i for i, choice in enumerate(group.trainer_options) if choice.recomputation.recompute == row["recompute"]
    ]
    phases = {"step": 0, "train": 0, "logprobs": 0, "rollout": 0, "reshard": 0, "other": 0}
    # The search scores rows of one length.
    alike = dict(row) | {"forward_row_tokens": row["row_tokens"], "measured": phases}
    expected = plan_search.predict(alike, FITTED)
    cache_tokens = plan_search._engines(row, search.costs.engine_speeds.memory_bytes).cache_tokens
    passes = search.costs.workload.scoring_passes
    found = {
        "train": float(group.update_seconds.seconds[number]),
        "logprobs": float(group.scoring_seconds[number]) / passes * row["scoring_passes"],
        "rollout": search.costs.rollout_seconds(placement, engine, cache_tokens).seconds,
        "reshard": float(group.reshard_seconds[0]),
        "other": search.costs.other_seconds,
    }
    assert found == pytest.approx({phase: expected[phase] for phase in found})
    # Every exchange of the layout has its seconds.
    parts = group.update_seconds.at(number)
    assert ("tensor_exchange" in parts) == (row["tp"] > 1)
    assert ("context_exchange" in parts) == (row["cp"] > 1)
    assert ("expert_exchange" in parts) == (row["ep"] > 1)
    assert ("bubble" in parts) == (row["pp"] > 1)


@pytest.mark.parametrize("keeps_logits", [True, False])
def test_an_update_is_that_of_the_start(
    large: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch, keeps_logits: bool
) -> None:
    """A start keeps the logits where they fit, and the seconds of a planned layout are those of this choice."""
    search = _search(large("qwen3_4b_gsm8k"), mean=1024, prompt_tokens=200.0)
    group = search._make_combinations(
        Candidates(search.recipe, search.shape, Counter()), Placement(ranks=0, staleness=0)
    )
    assert group is not None
    if not keeps_logits:
        monkeypatch.setattr(search_module, "can_keep_logits", lambda *_, **__: False)
    choices = [
        LayoutChoice(group=group, option_number=row, engine_number=0, offload_number=0)
        for row in range(len(group.trainer_options))
    ]
    planned = (
        search._plan_layout(with_field_values(search.recipe, choice.values), choice, Counter()) for choice in choices
    )
    row, layout = next((row, layout) for row, layout in enumerate(planned) if layout is not None)
    update = group.update_seconds if keeps_logits else group.update_seconds_without_logits
    assert layout.seconds.train == update.seconds[row] and layout.update == update.at(row)
    assert group.update_seconds_without_logits.compute[row] > group.update_seconds.compute[row]
    # A run compares its steps with the seconds of its recipe: those of the layout that the recipe is.
    rows = {
        "trainer.max_tokens_per_forward": group.trainer_options[row].row_tokens,
        "trainer.keep_logits": keeps_logits,
    }
    planned_values = {**choices[row].values, "rollout.kv_cache_gib": layout.kv_cache_gib, **rows}
    monkeypatch.setattr(recipe_module, "assumed_lengths", lambda **_: search.costs.lengths)
    seconds = recipe_seconds(with_field_values(search.recipe, planned_values))
    assert seconds is not None and seconds.step == pytest.approx(layout.seconds.step, rel=1e-9)


def test_wider_tensor_parallelism_sends_more_bytes(
    large: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    search = _search(large("qwen3_14b_dapo_h200"), mean=4096, prompt_tokens=512.0)
    sizes = [TrainerSizes(tp=tp, pp=1, cp=1, vpp=1, ep=1, etp=1, dp=8 // tp) for tp in (2, 4, 8)]
    monkeypatch.setattr(Candidates, "list_trainers", lambda *_: sizes)
    group = search._make_combinations(
        Candidates(search.recipe, search.shape, Counter()), Placement(ranks=0, staleness=0)
    )
    assert group is not None
    seconds = [float(group.update_seconds.tensor_exchange[group.option_numbers_by_trainer[at][0]]) for at in sizes]
    link = FITTED.for_gpu(search.costs.speeds).link_efficiency * search.costs.speeds.nvlink
    sent = np.array(seconds) * link
    # Each of 4 * 40 collectives of a layer's halves sends (tp - 1) / tp of a row's hidden states in bfloat16, on ranks
    # whose rows are `8 / tp` times fewer.
    assert sent[0] > 0
    assert sent[1:] / sent[0] == pytest.approx([3 / 4 / (1 / 2) * 2, 7 / 8 / (1 / 2) * 4], rel=0.02)


@pytest.mark.parametrize(
    ("override", "field", "value"),
    [
        ("rollout.kv_cache_dtype=fp8", "cache_item_bytes", 1),
        ("rollout.quantization=fp8", "item_bytes", 1),
        ("model.dtype=float32", "activation_bytes", 4),
        ("model.dtype=float32", "item_bytes", 4),
        ("model.dtype=float32", "cache_item_bytes", 4),
    ],
)
def test_bytes_of_the_engine_are_those_of_the_recipe(
    large: Callable[..., Recipe], override: str, field: str, value: int
) -> None:
    plain, changed = (
        _search(large("qwen3_14b_dapo_h200", *given), mean=4096, prompt_tokens=512.0).costs.rollout_cost
        for given in ((), (override,))
    )
    assert (getattr(plain, field), getattr(changed, field)) == (2, value)
    requests, context = np.array([64.0]), np.array([4096.0])
    seconds = [float(cost.step_seconds(2, requests=requests, context=context)[0]) for cost in (plain, changed)]
    assert (seconds[1] < seconds[0]) == (value == 1)


def test_bytes_of_the_trainer_are_those_of_the_recipe(large: Callable[..., Recipe]) -> None:
    def cost(*given: str) -> Any:
        return _search(large("qwen3_14b_dapo_h200", *given), mean=4096, prompt_tokens=512.0).costs.trainer_cost

    assert (cost().item_bytes, cost().host_share) == (2, 0.0)
    assert cost("model.dtype=float32").item_bytes == 4
    half = cost("trainer.optimizer_offload_fraction=0.5", "trainer.offload=[gradients]")
    assert (half.item_bytes, half.host_share) == (2, 0.5)
