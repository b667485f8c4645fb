"""One recipe on every layout, by overrides alone: the same samples, the same loss, the same gradient."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.train_command import train, write_inputs
from tests.logged_steps import logged_steps

pytestmark = pytest.mark.end_to_end

REFERENCE = (1, 1, 1, 1)
LAYOUTS = [(1, 2, 1, 2), (2, 2, 1, 2), (2, 1, 2, 4)]
RECIPE = """
name: layout
loop: rl
model: {{path: {model}, dtype: float32}}
data: {{train: data/train.jsonl, max_prompt_tokens: 96}}
trainer: {{max_tokens_per_microbatch: 512}}
optimizer: {{learning_rate: 1e-3}}
rollout: {{kv_cache_gib: 0.02, sampling: {{max_new_tokens: 16, temperature: 1.5, top_p: 0.7, top_k: 20, min_p: 0.1}}}}
reward: {{functions: ["digits:digits"]}}
algorithm: {{kl_coefficient: 0.1}}
train: {{steps: 2, prompts_per_step: 4, samples_per_prompt: 4, updates_per_step: 2}}
"""


@pytest.fixture(scope="module")
def run(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path]
) -> Callable[[tuple[int, int, int, int]], list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("layouts")
    write_inputs(folder, RECIPE.format(model=tiny_model(num_layers=3)), num_problems=32)
    made: dict[tuple[int, int, int, int], list[dict[str, Any]]] = {}

    def train_layout(layout: tuple[int, int, int, int]) -> list[dict[str, Any]]:
        if layout not in made:
            tp, pp, dp, rollout_tp = layout
            name = "_".join(map(str, layout))
            overrides = [f"trainer.tp={tp}", f"trainer.pp={pp}", f"trainer.dp={dp}", f"rollout.tp={rollout_tp}"]
            train(folder, "recipe.yaml", f"name=run_{name}", f"cluster.ranks_per_node={tp * pp * dp}", *overrides)
            made[layout] = logged_steps(folder / f"runs/run_{name}")
        return made[layout]

    return train_layout


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "tp{}_pp{}_dp{}_to_tp{}".format(*layout))
def test_a_layout_learns_as_one_rank_does(
    run: Callable[..., list[dict[str, Any]]], layout: tuple[int, int, int, int]
) -> None:
    alone, spread = run(REFERENCE), run(layout)
    for name in ("train/loss", "train/grad_norm", "train/entropy", "kl/reference", "reward/mean"):
        for step, expected in zip(spread[1:], alone[1:], strict=True):
            assert step[name] == pytest.approx(expected[name], rel=1e-5 if step["step"] == 1 else 1e-3, abs=1e-6), name
    assert alone[1]["reward/std"] > 0
    assert all(step["logprob_gap/max"] <= 1e-5 for step in spread[1:])
