"""trainer.exact refuses by name whatever makes trainer and engine round differently."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from megarl.config import Recipe
from megarl.families.config_json.rotary import Rotary
from megarl.families.parts import Router
from megarl.preflight import check
from megarl.preflight.model.exactness import exactness_faults
from megarl.preflight.model.exactness_on_gpus import OPERATORS
from tests.shapes import small_shape, with_sizes

EXACT = {"trainer": {"exact": True}, "model": {"dtype": "bfloat16"}}


def faults(recipe: Recipe, family: str = "qwen3", **sizes: Any) -> list[str]:
    return list(exactness_faults(recipe, with_sizes(small_shape(family), **sizes)))


def with_sections(**sections: Mapping[str, Any]) -> dict[str, Any]:
    return {name: {**EXACT.get(name, {}), **sections.get(name, {})} for name in {*EXACT, *sections}}


def test_a_dense_model_in_bfloat16_is_accepted(recipe: Callable[..., Recipe]) -> None:
    check(recipe(**EXACT))
    for trainer_tp, tp in ((1, 2), (2, 1), (2, 4), (4, 1), (1, 3), (3, 3)):
        made = recipe(**with_sections(trainer={"tp": trainer_tp}, rollout={"tp": tp}))
        assert made.exact_blocks == max(trainer_tp, tp)
        assert faults(made) == []
    assert faults(recipe(), "qwen2_moe") == []


def test_experts_and_adapters_are_accepted(recipe: Callable[..., Recipe]) -> None:
    lora = {"rank": 8}
    for trainer, rollout in (
        ({"tp": 2, "ep": 2}, {"tp": 2}),
        ({"etp": 2, "dp": 2}, {"tp": 1}),
        ({"tp": 2, "etp": 2}, {"tp": 4, "vllm": {"enable_expert_parallel": True}}),
    ):
        made = recipe(**with_sections(trainer=trainer, rollout=rollout, lora=lora))
        assert made.exact_blocks == max(trainer.get("tp", 1), trainer.get("etp", 1), rollout["tp"])
        assert faults(made, "qwen3_moe") == []


@pytest.mark.parametrize(
    ("sections", "cause"),
    [
        ({"model": {"dtype": "float32"}}, "model.dtype is float32"),
        ({"trainer": {"tp": 2}, "rollout": {"tp": 6}}, "with trainer.tp = 2 and rollout.tp = 6"),
        ({"trainer": {"tp": 3}, "rollout": {"tp": 2}}, "trainer.tp = 3 and rollout.tp = 2"),
        ({"trainer": {"share_prefixes": "auto"}}, "share_prefixes=off"),
        ({"trainer": {"megatron": {"softmax_scale": 0.1}}}, "trainer.megatron"),
        ({"lora": {"rank": 8, "sync": "adapter"}}, "lora.sync=merged"),
        ({"lora": {"rank": 8, "dropout": 0.1}}, "lora.dropout=0"),
        ({"rollout": {"quantization": "fp8"}}, "rollout.quantization=none"),
        ({"rollout": {"kv_cache_dtype": "fp8"}}, "rollout.kv_cache_dtype=auto"),
        ({"rollout": {"recompute_kv": False}}, "rollout.recompute_kv=true"),
        ({"train": {"max_logprob_gap": 0.1}}, "train.max_logprob_gap is 0.1"),
        ({"rollout": {"vllm": {"attention_backend": "TORCH_SDPA"}}}, "rollout.vllm.attention_backend"),
        ({"rollout": {"vllm": {"block_size": 64}}}, "rollout.vllm.block_size"),
        ({"rollout": {"vllm": {"speculative_config": {"method": "ngram"}}}}, "rollout.vllm.speculative_config"),
    ],
)
def test_settings_that_round_differently_are_named(
    recipe: Callable[..., Recipe], sections: dict[str, Any], cause: str
) -> None:
    [fault] = faults(recipe(**with_sections(**sections)))
    assert fault.startswith("trainer.exact = True: ") and cause in fault


@pytest.mark.parametrize(
    ("family", "sizes", "part"),
    [
        ("qwen2_moe", {}, "shared experts"),
        ("glm4_moe", {}, "a router with sigmoid scores"),
        ("glm4_moe", {}, "a router with biases"),
        ("glm4_moe", {}, "routing weights scaled by 2.5"),
        ("qwen3_moe", {"router": Router(8, 2, 64, num_groups=4)}, "a router with groups of experts"),
        ("deepseek_v3", {}, "latent attention"),
        ("qwen3_next", {}, "linear attention"),
        ("qwen2", {}, "biases in attention"),
        ("qwen3", {"rotary": Rotary(1e4, scaling="yarn", factor=4.0)}, "rotary scaling of type yarn"),
    ],
)
def test_models_without_proof_are_named(
    recipe: Callable[..., Recipe], family: str, sizes: dict[str, Any], part: str
) -> None:
    assert any(f"the model has {part}" in fault for fault in faults(recipe(**EXACT), family, **sizes))


@pytest.mark.parametrize(
    ("sections", "cause"),
    [
        ({"trainer": {"etp": 3, "tp": 2}}, "set trainer.etp=1"),
        ({"rollout": {"tp": 3}}, "channels cannot be divided so"),
        ({"trainer": {"router_replay": True}}, "set trainer.router_replay=false"),
    ],
)
def test_settings_of_experts_are_named(recipe: Callable[..., Recipe], sections: dict[str, Any], cause: str) -> None:
    assert any(cause in fault for fault in faults(recipe(**with_sections(**sections)), "qwen3_moe"))


def faults_on_gpus(made: Recipe, monkeypatch: pytest.MonkeyPatch, **sizes: Any) -> list[str]:
    monkeypatch.setattr("megarl.preflight.model.exactness.runs_on_cpu", lambda: False)
    return faults(made, **sizes)


def test_a_gpu_is_refused_by_operator(recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch) -> None:
    found = faults_on_gpus(recipe(**EXACT), monkeypatch)
    causes = [*OPERATORS, "vLLM compiles the model", "have never run on a GPU"]
    assert len(found) == len(causes)
    for fault, cause in zip(found, causes, strict=True):
        assert fault.startswith("trainer.exact = True: ") and cause in fault
    assert "launch/setup.sh cpu" in found[-1]


def test_sums_over_ranks_are_refused_on_gpus(recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch) -> None:
    made = recipe(**with_sections(trainer={"tp": 2}, rollout={"tp": 2}))
    assert any("trainer.tp = 2 and rollout.tp = 2" in fault for fault in faults_on_gpus(made, monkeypatch))


@pytest.mark.parametrize(
    ("tp", "layers"),
    [
        (1, {"gate_up_proj": "hopper", "down_proj": "ada, hopper, blackwell", "lm_head": "hopper",
             "qkv_proj": "hopper, blackwell, sm120", "o_proj": "hopper, blackwell, sm120"}),
        (2, {"down_proj": "sm120", "qkv_proj": "hopper, blackwell, sm120"}),
        (16, {}),
    ],
)  # fmt: skip
def test_products_with_other_blocks_are_named(
    recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch, tp: int, layers: dict[str, str]
) -> None:
    # Qwen3-1.7B, for which vLLM's table was tuned.
    sizes = {
        "hidden_size": 2048, "intermediate_size": 6144, "vocab_size": 151936,
        "num_heads": 16, "num_kv_heads": 8, "head_dim": 128,
    }  # fmt: skip
    found = faults_on_gpus(recipe(**with_sections(rollout={"tp": tp})), monkeypatch, **sizes)
    named = {layer: kinds for layer in ("gate_up_proj", "down_proj", "lm_head", "qkv_proj", "o_proj")
             for kinds in [fault.partition("of type ")[2].partition(", vLLM's")[0] for fault in found
                           if f"vLLM's {layer} " in fault]}  # fmt: skip
    assert named == layers
