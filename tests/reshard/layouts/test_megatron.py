"""The computed layout against live Megatron models: their names, their shapes and their own global coordinates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megarl.checkpoint.safetensors import load
from megarl.config.parallel import ParallelConfig
from megarl.families.shape import ModelShape, padded_vocab_size, read_model_shape
from megarl.reshard.layouts.megatron import check_shapes, chunk_prefix, megatron_layouts, parameter_shapes
from megarl.types import ConfigError
from tests.rank_pool import RankPool


def megatron_tensors(model: ModelShape, tensors: dict[str, torch.Tensor]) -> dict[tuple[str, ...], torch.Tensor]:
    """Megatron's global tensors by key, layer and expert, assembled from the checkpoint's by reshape and cat."""
    groups, width = model.num_kv_heads, model.head_dim
    made = {
        ("embedding.word_embeddings.weight",): tensors["model.embed_tokens.weight"],
        ("decoder.final_layernorm.weight",): tensors["model.norm.weight"],
        ("output_layer.weight",): tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"]),
    }
    for layer in range(model.num_layers):
        own = {
            name.removeprefix(f"model.layers.{layer}."): value
            for name, value in tensors.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        for kind in ("weight", "bias") if model.attention.qkv_bias else ("weight",):
            grouped = [
                x.reshape(groups, -1, width, *x.shape[1:]) for x in (own[f"self_attn.{n}_proj.{kind}"] for n in "qkv")
            ]
            made[f"decoder.layers.self_attention.linear_qkv.{kind}", layer] = torch.cat(grouped, 1).flatten(0, 2)
        mlps = {("mlp", layer): "mlp"} if not model.num_experts else {}
        mlps |= {("mlp.experts.experts", layer, e): f"mlp.experts.{e}" for e in range(model.num_experts)}
        if model.shared_intermediate_size:
            mlps["mlp.shared_experts", layer] = "mlp.shared_expert"
            made["decoder.layers.mlp.shared_experts.gate_weight", layer] = own["mlp.shared_expert_gate.weight"]
        for (place, *index), name in mlps.items():
            gate_up = torch.cat([own[f"{name}.gate_proj.weight"], own[f"{name}.up_proj.weight"]])
            made[f"decoder.layers.{place}.linear_fc1.weight", *index] = gate_up
            made[f"decoder.layers.{place}.linear_fc2.weight", *index] = own[f"{name}.down_proj.weight"]
        plain = {
            "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
            "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
            "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
            "input_layernorm.weight": "input_layernorm.weight",
            "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
        }
        if model.num_experts:
            plain["mlp.router.weight"] = "mlp.gate.weight"
        if model.attention.qk_norm:
            plain |= {f"self_attention.{n}_layernorm.weight": f"self_attn.{n}_norm.weight" for n in "qk"}
        made |= {(f"decoder.layers.{key}", layer): own[name] for key, name in plain.items()}
    return made


def build_chunks(model: ModelShape, parallel: ParallelConfig) -> list[torch.nn.Module]:
    """This rank's model chunks."""
    from megarl.models.configuration import transformer_config
    from megarl.models.parts import build_policy
    from megarl.models.policy import PolicyModel

    config = transformer_config(model, parallel, dtype=torch.float32, sequence_parallel=parallel.tp > 1, overrides={})
    return [
        build_policy(PolicyModel, config, model, logprob_chunk_tokens=64, vp_stage=chunk if parallel.vpp > 1 else None)
        for chunk in range(parallel.vpp)
    ]


def load_and_compare(folder: str, parallel: ParallelConfig) -> int:
    """Fill a live model through the layout; compare with what its sharded_state_dict says each shard is."""
    from megarl.platform import libraries

    libraries.prepare_megatron()
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    model = read_model_shape(folder)
    parallel_state.initialize_model_parallel(
        parallel.tp,
        parallel.pp,
        parallel.vpp if parallel.vpp > 1 else None,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.etp,
        order=parallel.order,
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(1)
    chunks = build_chunks(model, parallel)
    live = {
        chunk_prefix(index, parallel.vpp) + name: parameter
        for index, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    }
    at = parallel.coordinates(dist.get_rank())
    padded = padded_vocab_size(model.vocab_size, parallel.tp)
    layouts = megatron_layouts(model, parallel, padded_vocab_size=padded)
    check_shapes(parameter_shapes(layouts, at), live)
    load(folder, layouts[dist.get_rank()], live)

    globals_ = megatron_tensors(model, load_file(Path(folder) / "model.safetensors"))
    compared = 0
    for chunk in chunks:
        state = chunk.sharded_state_dict(metadata={"dp_cp_group": parallel_state.get_data_parallel_group(True)})
        apply_factories(state)
        for shard in (value for value in nested_values(state) if isinstance(value, ShardedTensor)):
            expected = globals_[shard.key, *shard.global_offset[: shard.prepend_axis_num]]
            offsets = shard.global_offset[shard.prepend_axis_num :]
            for dim, (offset, length) in enumerate(zip(offsets, shard.local_shape, strict=True)):
                expected = expected.narrow(
                    dim, min(offset, expected.shape[dim]), min(length, max(0, expected.shape[dim] - offset))
                )
            assert torch.equal(shard.data[: len(expected)], expected), shard.key
            compared += expected.numel()
    return compared


@pytest.mark.parametrize(
    ("tp", "pp"), [pytest.param(4, 1, id="tp4"), pytest.param(2, 2, id="tp2 pp2"), pytest.param(1, 2, id="pp2 dp2")]
)
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param({"family": "qwen3", "tie_word_embeddings": True, "head_dim": 8}, id="qwen3 tied"),
        pytest.param({"family": "qwen2", "tie_word_embeddings": False}, id="qwen2 untied"),
        pytest.param({"family": "llama", "tie_word_embeddings": True, "num_kv_heads": 4}, id="llama tied"),
    ],
)
def test_live_model_agrees(ranks: RankPool, tiny_model: Callable[..., Path], shape: dict, tp: int, pp: int) -> None:
    folder = tiny_model(**shape, hidden_size=32, num_layers=2, num_heads=8, intermediate_size=48)
    model = read_model_shape(folder)
    copies = 4 // (tp * pp)
    compared = ranks.run(load_and_compare, str(folder), ParallelConfig(tp=tp, pp=pp, dp=copies, rollout_tp=1))
    stored = sum(value.numel() for value in load_file(folder / "model.safetensors").values())
    embedding = model.vocab_size * model.hidden_size
    small = 2 * model.hidden_size + (2 * model.head_dim if model.attention.qk_norm else 0)
    replicated = (tp - 1) * (model.num_layers * small + model.hidden_size)
    assert sum(compared) == copies * (stored + replicated + (embedding if model.tie_word_embeddings and pp > 1 else 0))


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        pytest.param("qwen3_moe", {"tp": 2, "dp": 2, "ep": 2}, id="tp2 ep2, experts twice"),
        pytest.param("qwen3_moe", {"tp": 2, "dp": 2, "ep": 2, "etp": 2}, id="tp2 ep2 etp2"),
        pytest.param("qwen2_moe", {"tp": 2, "pp": 2, "vpp": 2, "ep": 2}, id="tp2 pp2 vpp2 ep2, shared expert"),
        pytest.param("qwen2_moe", {"cp": 2, "dp": 2, "ep": 4}, id="cp2 dp2 ep4, shared expert"),
        pytest.param("qwen3_moe", {"pp": 2, "dp": 2, "order": "tp-cp-ep-pp-dp"}, id="stages before replicas"),
        pytest.param("mistral", {"pp": 2, "vpp": 2, "dp": 2}, id="pp2 vpp2 dense"),
        pytest.param("mistral", {"pp": 2, "vpp": 2, "dp": 2, "layers": 6}, id="pp2 vpp2, chunks of 1, 2, 2, 1"),
        pytest.param("qwen3_moe", {"pp": 4, "layers": 5}, id="pp4, stages of 1, 2, 1, 1"),
    ],
)
def test_live_experts_and_chunks_agree(
    ranks: RankPool, tiny_model: Callable[..., Path], family: str, sizes: dict
) -> None:
    sizes = {"layers": 4} | sizes
    folder = tiny_model(
        family=family, hidden_size=32, num_layers=sizes.pop("layers"), num_heads=8, intermediate_size=48
    )
    parallel = ParallelConfig(**({"tp": 1, "pp": 1, "dp": 1, "rollout_tp": 1} | sizes))
    compared = ranks.run(load_and_compare, str(folder), parallel)
    layouts = megatron_layouts(
        read_model_shape(folder), parallel, padded_vocab_size=padded_vocab_size(415, parallel.tp)
    )
    # All that a rank holds but the padding has been compared.
    assert compared == [sum(piece.box.numel for piece in layout) for layout in layouts]


def test_grouped_experts_have_transformer_engines_names(tiny_model: Callable[..., Path]) -> None:
    """The second expert-parallel rank's four experts, on the last of two stages."""
    model = read_model_shape(tiny_model(family="qwen2_moe", num_layers=2))
    parallel = ParallelConfig(tp=1, pp=2, dp=2, rollout_tp=1, ep=2)
    layouts = megatron_layouts(model, parallel, padded_vocab_size=1 << 20, transformer_engine=True)
    names = parameter_shapes(layouts, parallel.coordinates(3))
    mlp = "decoder.layers.0.mlp."
    assert {name: shape for name, shape in names.items() if "mlp" in name} == {
        "decoder.layers.0.pre_mlp_layernorm.weight": (128,),
        mlp + "router.weight": (8, 128),
        **{f"{mlp}experts.linear_fc1.weight{expert}": (128, 128) for expert in range(4)},
        **{f"{mlp}experts.linear_fc2.weight{expert}": (128, 64) for expert in range(4)},
        mlp + "shared_experts.linear_fc1.weight": (256, 128),
        mlp + "shared_experts.linear_fc2.weight": (128, 128),
        mlp + "shared_experts.gate_weight": (1, 128),
    }
    pieces = layouts[3]
    assert {p.box.name for p in pieces if p.storage == mlp + "experts.linear_fc2.weight1"} == {
        "model.layers.1.mlp.experts.5.down_proj.weight"
    }


def test_the_norm_of_a_dense_layer_is_fused_and_that_of_a_router_is_not(tiny_model: Callable[..., Path]) -> None:
    """Stages of two layers: the first stage begins with the dense one. Biases of routers are buffers."""
    model = read_model_shape(tiny_model(family="glm4_moe", num_layers=4))
    parallel = ParallelConfig(tp=1, pp=2, dp=1, rollout_tp=1)
    layouts = megatron_layouts(model, parallel, padded_vocab_size=1 << 20, transformer_engine=True)
    dense = {"mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"}
    routed = {"pre_mlp_layernorm.weight", "mlp.router.weight", "mlp.router.expert_bias"}
    routed |= {f"mlp.shared_experts.linear_fc{number}.weight" for number in (1, 2)}
    for stage, kinds in enumerate([[dense, routed], [routed, routed]]):
        shapes = parameter_shapes(layouts, parallel.coordinates(stage))
        for layer, expected in enumerate(kinds):
            start = f"decoder.layers.{layer}."
            names = {name.removeprefix(start) for name in shapes if name.startswith(start)}
            assert {name for name in names if "mlp" in name and ".experts." not in name} == expected
            assert any(".experts." in name for name in names) == (expected is routed)
        trained = parameter_shapes(layouts, parallel.coordinates(stage), has_buffers=False)
        assert {name for name in shapes.keys() - trained.keys() if not name.endswith("expert_bias")} == set()


def test_transformer_engine_names_replace_the_norms(tiny_model: Callable[..., Path]) -> None:
    model = read_model_shape(tiny_model(family="qwen3", num_layers=2))
    parallel = ParallelConfig(tp=1, pp=1, dp=1, rollout_tp=1)
    at = parallel.coordinates(0)
    local, fused = (
        parameter_shapes(megatron_layouts(model, parallel, padded_vocab_size=1 << 20, transformer_engine=flag), at)
        for flag in (False, True)
    )
    assert {name for name in fused if "layers.0" in name} - local.keys() == {
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
    }
    assert sorted(local.values()) == sorted(fused.values())


@pytest.mark.parametrize(
    ("live", "message"),
    [
        pytest.param({"a": (2, 3), "extra": (1,)}, r"extra \(1,\) has no rule", id="no rule"),
        pytest.param({"a": (3, 2)}, r"a is \(3, 2\); the family's rule says \(2, 3\)", id="shape"),
        pytest.param({}, "a is in the family's table but not in the model", id="absent"),
    ],
)
def test_a_model_that_differs_is_refused(live: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_shapes({"a": (2, 3)}, {name: torch.empty(shape) for name, shape in live.items()})


@pytest.mark.parametrize(
    ("tp", "pp", "message"),
    [
        pytest.param(1, 3, "pp 3 exceeds the model's 2 layers", id="layers"),
        pytest.param(
            3, 1, r"tp 3 does not divide the model's (num_attention_heads|vocab_size|intermediate_size) \d+", id="rows"
        ),
    ],
)
def test_sizes_that_do_not_divide(tiny_model: Callable[..., Path], tp: int, pp: int, message: str) -> None:
    model = read_model_shape(tiny_model(family="qwen3", num_layers=2))
    parallel = ParallelConfig(tp=tp, pp=pp, dp=1, rollout_tp=1)
    with pytest.raises(ConfigError, match=message):
        megatron_layouts(model, parallel, padded_vocab_size=3 << 18)
