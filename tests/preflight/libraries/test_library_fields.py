"""Fields that go to Megatron-Core and vLLM as they are."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from megarl.config import Recipe
from megarl.config.recipe import load
from megarl.preflight import check
from megarl.preflight.libraries.library_fields import accepts, check_megatron_fields, check_vllm_fields, class_fields
from megarl.types import ConfigError
from tests.shapes import small_shape

MODEL_FIELDS = [
    pytest.param(
        {"trainer": {"megatron": {"recompute_granularty": "full"}}},
        [
            "trainer.megatron.recompute_granularty: Megatron-Core's TransformerConfig has no such field",
            "did you mean recompute_granularity?",
        ],
        id="Megatron, unknown",
    ),
    pytest.param(
        {"trainer": {"megatron": {"hidden_dropout": "none"}}},
        ["trainer.megatron.hidden_dropout = 'none'", "has the type float"],
        id="Megatron, type",
    ),
    pytest.param(
        {"trainer": {"megatron": {"bias_dropout_fusion": 1}}},
        ["bias_dropout_fusion = 1", "has the type bool"],
        id="Megatron, bool",
    ),
    pytest.param(
        {"trainer": {"megatron": {"recompute_granularity": "half"}}},
        ["recompute_granularity = 'half'", "Literal['full', 'selective']"],
        id="Megatron, literal",
    ),
    pytest.param(
        {"trainer": {"megatron": {"num_layers": 4}}},
        ["num_layers = 4: megarl sets this from the model's"],
        id="Megatron, decided",
    ),
    pytest.param(
        {"trainer": {"megatron": {"adam_beta1": 0.9}}},
        ["trainer.megatron.adam_beta1 = 0.9: is a field of Megatron-Core's OptimizerConfig"],
        id="Megatron, the optimizer's",
    ),
    pytest.param(
        {"trainer": {"megatron": {"num_distributed_optimizer_instances": 2}}},
        ["num_distributed_optimizer_instances = 2: is a field of Megatron-Core's DistributedDataParallelConfig"],
        id="Megatron, several instances of the optimizer",
    ),
    pytest.param(
        {"rollout": {"vllm": {"block_sise": 16}}},
        ["rollout.vllm.block_sise = 16: vLLM's EngineArgs has no such field", "did you mean block_size?"],
        id="vLLM, unknown",
    ),
    pytest.param(
        {"rollout": {"vllm": {"block_size": "16"}}},
        ["rollout.vllm.block_size = '16'", "has the type int | None"],
        id="vLLM, type",
    ),
    pytest.param(
        {"rollout": {"vllm": {"max_num_seqs": 8}}},
        ["rollout.vllm.max_num_seqs = 8: set rollout.max_concurrent_requests instead"],
        id="vLLM, decided",
    ),
    pytest.param(
        {"rollout": {"vllm": {"kv_transfer_config": {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}}}},
        ["rollout.vllm.kv_transfer_config = {'kv_connector'", "would outlive a weight update", "remove it"],
        id="vLLM, a cache outside the engine",
    ),
    pytest.param(
        {"rollout": {"vllm": {"kv_offloading_size": 4.0}}},
        ["rollout.vllm.kv_offloading_size = 4.0", "would outlive a weight update", "remove it"],
        id="vLLM, a cache on the host",
    ),
    pytest.param(
        {"rollout": {"vllm": {"pipeline_parallel_size": 2}}},
        ["rollout.vllm.pipeline_parallel_size = 2", "needs another executor", "rollout.tp"],
        id="vLLM, pipeline stages",
    ),
    pytest.param(
        {"rollout": {"vllm": {"data_parallel_size": 2}}},
        ["rollout.vllm.data_parallel_size = 2", "needs another executor"],
        id="vLLM, replicas inside an engine",
    ),
    pytest.param(
        {"rollout": {"vllm": {"cpu_offload_gb": 2}}},
        ["rollout.vllm.cpu_offload_gb = 2", "a reshard writes each weight"],
        id="vLLM, weights elsewhere",
    ),
    pytest.param(
        {"rollout": {"vllm": {"enable_eplb": True}}},
        ["rollout.vllm.enable_eplb = True", "a reshard writes each weight"],
        id="vLLM, experts that move",
    ),
    pytest.param(
        {"rollout": {"vllm": {"load_format": "auto"}}},
        ["rollout.vllm.load_format = 'auto'", "megarl sets it", "remove it"],
        id="vLLM, set by megarl",
    ),
    pytest.param(
        {"rollout": {"vllm": {"trust_remote_code": True}}},
        ["rollout.vllm.trust_remote_code = True", "is never run"],
        id="vLLM, code of a folder",
    ),
    pytest.param(
        {"lora": {"rank": 8, "sync": "adapter"}, "rollout": {"vllm": {"max_lora_rank": 32}}},
        ["rollout.vllm.max_lora_rank = 32: set lora.rank instead"],
        id="vLLM, slots of adapters",
    ),
    pytest.param(
        {"rollout": {"vllm": {"spec_method": "eagle"}}},
        ["rollout.vllm.spec_method = 'eagle'", "rollout.vllm.speculative_config"],
        id="vLLM, a drafter in short",
    ),
]


@pytest.mark.parametrize(("changed", "parts"), MODEL_FIELDS)
def test_fields_of_the_libraries_are_checked(
    recipe: Callable[..., Recipe], changed: dict[str, Any], parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        check(recipe(**changed))
    title, line = str(caught.value).split("\n")
    assert title == "recipe small: 1 error"
    assert all(part in line for part in parts), line


@pytest.mark.parametrize(
    ("family", "field", "reason"),
    [
        ("gpt_oss", "apply_rope_fusion", "the model's attention sinks"),
        ("qwen3", "q_lora_rank", "the model's config.json"),
        ("qwen3", "linear_conv_kernel_dim", "the model's config.json"),
        ("qwen3", "softmax_type", "the model's config.json"),
        ("qwen3", "no_rope_freq", "the model's config.json"),
    ],
)
def test_fields_of_the_architecture_are_refused(
    family: str, field: str, reason: str, recipe: Callable[..., Recipe]
) -> None:
    (line,) = check_megatron_fields(recipe(trainer={"megatron": {field: True}}), small_shape(family))
    assert line.startswith(f"trainer.megatron.{field} = True: megarl sets this from {reason}")


def test_fp8_with_a_history_is_refused(recipe: Callable[..., Recipe]) -> None:
    made = recipe(cluster={"gpu_memory_gib": "h100"}, trainer={"megatron": {"fp8": "e4m3"}})
    with pytest.raises(ConfigError) as caught:
        check(made, is_start=False)
    title, line = str(caught.value).split("\n")
    assert title == "recipe small: 1 error" and "trainer.megatron.fp8_recipe = 'delayed'" in line
    assert "set it to blockwise, tensorwise or mxfp8" in line


@pytest.mark.parametrize(
    ("megatron", "told"),
    [
        ({"moe_router_fusion": True}, "moe_router_fusion = True: the fused router chooses experts itself"),
        (
            {"recompute_granularity": "full"},
            "recompute_granularity = 'full': with trainer.router_replay, recomputed layers",
        ),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe"]},
            "recompute_modules = ['core_attn', 'moe']: with trainer.router_replay, recomputed routers",
        ),
    ],
)
def test_fields_that_would_choose_experts_anew(
    recipe: Callable[..., Recipe], tiny_model: Callable[..., Path], megatron: dict[str, Any], told: str
) -> None:
    model = {"path": str(tiny_model(family="qwen3_moe", num_heads=4, num_kv_heads=2, head_dim=32))}
    trainer = {"router_replay": True, "megatron": megatron}
    with pytest.raises(ConfigError) as caught:
        check(recipe(model=model, trainer=trainer))
    title, line = str(caught.value).split("\n")
    assert title == "recipe small: 1 error" and f"trainer.megatron.{told}" in line
    check(recipe(model=model, trainer={"megatron": megatron}))
    check(recipe(model=model, trainer={"router_replay": True, "megatron": dict.fromkeys(megatron)}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("moe_router_force_load_balancing", True),
        ("moe_router_load_balancing_type", "sinkhorn"),
        ("moe_router_load_balancing_type", ["seq_aux_loss", "sinkhorn"]),
    ],
)
def test_routes_that_no_engine_has_are_refused(field: str, value: object, recipe: Callable[..., Recipe]) -> None:
    """In training, the log-probs of a tiny model differed by up to 0.06 nats from those of the engine's routes."""
    megatron = {field: value, "moe_aux_loss_coeff": [0.1, 0.1] if isinstance(value, list) else 0.0}
    (line,) = check_megatron_fields(recipe(trainer={"megatron": megatron}), small_shape("qwen3_moe"))
    assert line.startswith(f"trainer.megatron.{field} = {value!r}: the trainer would choose other experts")


def test_fields_without_effect(recipe: Callable[..., Recipe]) -> None:
    with pytest.raises(ConfigError) as caught:
        check(recipe(trainer={"megatron": {"attention_dropout": 0.1, "moe_aux_loss_coeff": 1e-3}}))
    title, *lines = str(caught.value).split("\n")
    assert title == "recipe small: 2 errors"
    assert all("no effect" in line for line in lines) and "attention_dropout = 0.1" in lines[0]
    assert "moe_aux_loss_coeff = 0.001" in lines[1]


def test_fields_of_the_libraries_that_fit(recipe: Callable[..., Recipe]) -> None:
    megatron = {"hidden_dropout": 0, "recompute_granularity": "selective", "recompute_modules": ["mlp"]}
    vllm = {"block_size": 64, "enforce_eager": True, "disable_custom_all_reduce": True, "attention_backend": None}
    check(recipe(trainer={"megatron": megatron}, rollout={"vllm": vllm}))


@pytest.mark.parametrize(
    ("annotation", "fitting", "others"),
    [
        pytest.param("int", [1, 0, None], [True, 1.0, "1"], id="int"),
        pytest.param("float", [1, 1.5], [True, "1.5"], id="float"),
        pytest.param("Optional[Union[int, List[int]]]", [1, [1, 2]], ["1", [1, "2"]], id="union"),
        pytest.param("'dict[str, Any] | None'", [{"a": 1}], [1], id="text"),
        pytest.param("Literal['a', 'b'] | None", ["a"], ["c", 1], id="literal"),
        pytest.param("CacheDType", [1, "x"], [], id="not simple"),
    ],
)
def test_values_against_annotations(annotation: str, fitting: list[Any], others: list[Any]) -> None:
    parsed = ast.parse(annotation, mode="eval").body
    assert [accepts(parsed, value) for value in fitting] == [True] * len(fitting)
    assert [accepts(parsed, value) for value in others] == [False] * len(others)


def test_fallbacks_of_the_guide_are_names_of_vllm() -> None:
    """The table of launch/recipes/README.md: overrides that a start accepts, and variables that vLLM reads."""
    folder = Path(__file__).resolve().parents[3] / "launch/recipes"
    _, _, section = (folder / "README.md").read_text().partition("## First run on several GPUs")
    table, _, _ = section.partition("\n## ")
    overrides = re.findall(r"`(rollout\.vllm\.[^`]+)`", table)
    variables = re.findall(r"`(VLLM_\w+)=0`", table)
    assert (len(overrides), len(variables)) == (3, 2)
    recipe = load(folder / "qwen3_14b_dapo_h200.yaml", overrides)
    assert list(check_vllm_fields(recipe)) == []
    passes = recipe.rollout.vllm["compilation_config"]["pass_config"]
    assert passes.keys() <= class_fields("vllm", "config/compilation.py", "PassConfig").keys()
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None
    source = (Path(spec.origin).parent / "envs.py").read_text()
    assert all(f'"{variable}": lambda' in source for variable in variables)
