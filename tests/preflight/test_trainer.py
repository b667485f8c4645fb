"""Rows, memory and precision of the trainer that do not fit each other or the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from megarl.config import Recipe
from megarl.preflight import check, shortened_warmups
from megarl.preflight.learning import adapters
from tests.shapes import small_shape

PPO = {"preset": "ppo"}
RANKS_4 = {"ranks_per_node": 4}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        pytest.param(
            {"trainer": {"sequence_parallel": True}}, ["trainer.sequence_parallel", "trainer.tp > 1"], id="sp"
        ),
        pytest.param(
            {"loop": "sft", "algorithm": {"aggregation": "constant_length"}},
            ["algorithm.aggregation = constant_length: divides by the longest completion", "sft has none; use another"],
            id="sft has no longest completion",
        ),
        pytest.param(
            {"train": {"steps": 10, "profile_steps": [2, 11, 30]}},
            ["train.profile_steps = [2, 11, 30]: the run ends with step 10; leave out [11, 30]"],
            id="a profile of no step",
        ),
        pytest.param(
            {"train": {"profile_steps": [2], "profile_with": ["spans", "memory"]}, "cluster": {"device": "cpu"}},
            [
                "train.profile_with = ['spans', 'memory']: memory takes snapshots of CUDA's allocator",
                "leave out memory",
            ],
            id="a profile of a CPU's memory",
        ),
        pytest.param(
            {"algorithm": PPO, "critic": {"optimizer": {"name": "sgd"}}},
            ["critic.optimizer.name = sgd"],
            id="critic's optimizer",
        ),
        pytest.param(
            {"trainer": {"max_tokens_per_microbatch": 64, "max_tokens_per_forward": 63}},
            ["trainer.max_tokens_per_forward = 63", "max_tokens_per_microbatch = 64", "raise it to 64"],
            id="forward rows shorter than an update's",
        ),
        pytest.param(
            {"trainer": {"max_tokens_per_microbatch": 63}},
            ["trainer.max_tokens_per_microbatch = 63", "max_prompt_tokens 40", "max_new_tokens 24", "raise it to 64"],
            id="microbatch",
        ),
        pytest.param(
            {
                "cluster": {"ranks_per_node": 2},
                "trainer": {"tp": 2, "max_tokens_per_microbatch": 65},
                "rollout": {"sampling": {"max_new_tokens": 25}},
            },
            ["trainer.max_tokens_per_microbatch = 65", "raise it to 66"],
            id="microbatch, padded for sequence parallelism",
        ),
        pytest.param(
            {"algorithm": {"kl_coefficient": 0.1, "reference_update_steps": 4}, "lora": {"rank": 4}},
            ["algorithm.reference_update_steps = 4", "without its adapters", "leave one of both out"],
            id="a reference without adapters",
        ),
        pytest.param(
            {
                "cluster": RANKS_4,
                "trainer": {"tp": 2, "cp": 2, "max_tokens_per_microbatch": 65},
                "rollout": {"sampling": {"max_new_tokens": 25}},
            },
            ["trainer.max_tokens_per_microbatch = 65", "raise it to 72"],
            id="microbatch, padded for context parallelism",
        ),
        pytest.param(
            {
                "cluster": RANKS_4,
                "trainer": {"pp": 2, "vpp": 3},
                "train": {"prompts_per_step": 2, "samples_per_prompt": 2, "updates_per_step": 2},
            },
            ["trainer.vpp = 3", "trainer.pp 2 microbatches at a time", "has 1 sequences"],
            id="too few microbatches for chunks",
        ),
        pytest.param({"trainer": {"ep": 2}, "cluster": RANKS_4}, ["trainer.ep = 2", "has no experts"], id="experts"),
        pytest.param({"trainer": {"router_replay": True}}, ["trainer.router_replay", "leave it out"], id="no router"),
        pytest.param(
            {"trainer": {"recompute": "selective", "recompute_modules": []}},
            ["trainer.recompute_modules = []", "trainer.recompute=none"],
            id="nothing computed anew",
        ),
        pytest.param(
            {"trainer": {"recompute": "selective", "recompute_modules": ["mlp", "moe"]}},
            ["trainer.recompute_modules = ['mlp', 'moe']", "has no experts; leave moe out"],
            id="experts computed anew",
        ),
        pytest.param({"lora": {"rank": 65}}, ["lora.rank = 65: exceeds", "64; lower it"], id="lora rank"),
        pytest.param(
            {"loop": "reward_model", "lora": {"rank": 8}},
            ["lora.rank = 8", "set lora.rank=0"],
            id="adapters under a head",
        ),
        pytest.param({"optimizer": {"name": "sgd"}}, ["trainer.distributed_optimizer=false"], id="sgd"),
        pytest.param(
            {"trainer": {"fp8": "blockwise"}},
            ["trainer.fp8 = blockwise", "needs GPUs and Transformer Engine, which this machine lacks; leave it out"],
            id="FP8 on a CPU",
        ),
        pytest.param(
            {"trainer": {"moe_dispatcher": "flex"}},
            ["trainer.moe_dispatcher = flex", "a qwen3 model has no experts; leave it out"],
            id="a dispatcher without experts",
        ),
        *(
            pytest.param(
                {"model": {"dtype": "bfloat16"}, "trainer": {"optimizer_offload_fraction": 0.5}, **fields},
                ["trainer.optimizer_offload_fraction = 0.5", text],
                id=f"an optimizer on the host: {text}",
            )
            for fields, text in (
                ({"model": {"dtype": "float32"}}, "set model.dtype=bfloat16"),
                (
                    {"trainer": {"optimizer_offload_fraction": 0.5, "distributed_optimizer": False}},
                    "leave trainer.distributed_optimizer out",
                ),
                (
                    {"trainer": {"optimizer_offload_fraction": 0.5, "offload": ["optimizer"]}},
                    "trainer.offload includes optimizer",
                ),
                ({"lora": {"rank": 4}}, "under lora.rank = 4"),
            )
        ),
        pytest.param(
            {"evaluation": {"sampling": {"max_new_tokens": 2009}}},
            ["evaluation.sampling.max_new_tokens = 2009", "2048 positions; use at most 2008"],
            id="positions",
        ),
        pytest.param(
            {"optimizer": {"learning_rate": 1e-6, "min_learning_rate": 1e-5}},
            ["optimizer.min_learning_rate"],
            id="minimum",
        ),
    ],
)
def test_each_misfit_is_one_line_with_field_value_and_remedy(
    only_fault: Callable[..., str], changed: dict[str, Any], told: list[str]
) -> None:
    line = only_fault(**changed)
    assert all(words in line for words in told), line


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
    one, other = (list(adapters(targeted, shape)) for shape in forms)
    assert one == other
    assert ["gate_up_proj of a gpt_oss model are packed experts" in line for line in one] == (
        [True] if family == "gpt_oss" else []
    )


def test_a_warm_up_longer_than_the_run_is_held_to_it(recipe: Callable[..., Recipe]) -> None:
    long = recipe(optimizer={"warmup_steps": 21}, train={"steps": 10, "updates_per_step": 2})
    check(long)
    assert [*shortened_warmups(long)] == [
        "optimizer.warmup_steps = 21: the run makes only 20 updates, so the warm-up is shortened to 20"
    ]
    assert [
        *shortened_warmups(recipe(optimizer={"warmup_steps": 20}, train={"steps": 10, "updates_per_step": 2}))
    ] == []
