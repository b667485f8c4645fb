"""Settings of the trainer at their limits, adapters of experts, warm-ups longer than the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from megarl.config import Recipe
from megarl.preflight import check, warn_of_shortened_warmups
from megarl.preflight.algorithm.learning import check_adapters
from tests.shapes import small_shape


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"loop": "sft", "trainer": {"max_tokens_per_microbatch": 63}}, id="no rollout length in sft"),
        pytest.param({"trainer": {"max_tokens_per_microbatch": 64}}, id="microbatch of one sequence"),
        pytest.param({"evaluation": {"sampling": {"max_new_tokens": 2008}}}, id="all positions"),
        pytest.param({"optimizer": {"warmup_steps": 20}, "train": {"steps": 10, "updates_per_step": 2}}, id="warm-up"),
    ],
)
def test_the_limits_themselves_are_allowed(recipe: Callable[..., Recipe], changed: dict[str, Any]) -> None:
    assert check(recipe(**changed)).world_size == 1


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_5_moe_text", "gpt_oss"])
def test_adapters_of_experts_do_not_depend_on_the_form_of_files(recipe: Callable[..., Recipe], family: str) -> None:
    """transformers packs the experts of Qwen3.5 in memory from both forms. gpt-oss has one form."""
    targeted = recipe(lora={"rank": 4, "targets": ["gate_up_proj"]})
    forms = (replace(small_shape(family), packs_experts=packs) for packs in (True, False))
    one, other = (list(check_adapters(targeted, shape)) for shape in forms)
    assert one == other
    assert ["gate_up_proj of a gpt_oss model are packed experts" in line for line in one] == (
        [True] if family == "gpt_oss" else []
    )


def test_a_warm_up_longer_than_the_run_is_held_to_it(recipe: Callable[..., Recipe]) -> None:
    long = recipe(optimizer={"warmup_steps": 21}, train={"steps": 10, "updates_per_step": 2})
    check(long)
    assert [*warn_of_shortened_warmups(long)] == [
        "optimizer.warmup_steps = 21: the run makes only 20 updates, so the warm-up is shortened to 20"
    ]
    assert [
        *warn_of_shortened_warmups(recipe(optimizer={"warmup_steps": 20}, train={"steps": 10, "updates_per_step": 2}))
    ] == []
