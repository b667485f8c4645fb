"""Model folders to Megatron's checkpoints and back, bit for bit; Megatron-Core itself reads and writes in between."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.checkpoint import convert
from megarl.checkpoint.convert import to_hf, to_megatron
from megarl.checkpoint.safetensors import check_folder, read_head_rows
from megarl.checkpoint.weight_checksums import read_stored_checksums
from megarl.families.model_tensors import hf_tensors
from megarl.families.parts import Latent
from megarl.families.shape import ModelShape, read_model_shape
from megarl.types import ConfigError
from tests.checkpoint.model_folders import (
    GLM,
    LATENT,
    MODELS,
    MOE,
    SIZES,
    assert_equal_bits,
    moe_folder,
    other_files,
    tensors_of,
)
from tests.rank_pool import RankPool


@pytest.mark.parametrize("shape", MODELS)
@pytest.mark.parametrize(("tp", "pp"), [pytest.param(2, 2, id="tp2 pp2"), pytest.param(4, 1, id="tp4")])
@pytest.mark.parametrize("slab_bytes", [pytest.param(1 << 26, id="whole"), pytest.param(3000, id="sliced")])
def test_there_and_back(
    tmp_path: Path, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch,
    shape: dict, tp: int, pp: int, slab_bytes: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(convert, "SLAB_BYTES", slab_bytes)
    source = tiny_model(**SIZES, **shape)
    to_megatron(source, tmp_path / "megatron", tp=tp, pp=pp)
    done = to_hf(tmp_path / "megatron", tmp_path / "hf")
    assert_equal_bits(tensors_of(source), tensors_of(tmp_path / "hf"))
    assert other_files(source) == other_files(tmp_path / "hf")
    check_folder(tmp_path / "hf")
    assert read_stored_checksums(tmp_path / "hf").keys() == hf_tensors(read_model_shape(source)).keys()
    assert done.weight_bytes == sum(value.nbytes for value in tensors_of(source).values())
    files = {path.name for path in (tmp_path / "megatron" / "release").glob("*.distcp")}
    assert files == {f"__{rank}_0.distcp" for rank in range(tp * pp)}
    assert {path.name for path in tmp_path.iterdir()} == {"megatron", "hf"}


def test_of_a_run_the_newest_checkpoint_is_taken(tmp_path: Path) -> None:
    source, run = moe_folder(tmp_path / "source"), tmp_path / "run"
    to_megatron(source, tmp_path / "megatron")
    home = run / "checkpoints"
    (home / "step_000002").mkdir(parents=True)
    (tmp_path / "megatron/release").rename(home / "step_000010")
    (run / "config.yaml").touch()
    for named in (run, home, home / "step_000010"):
        assert convert.find_checkpoint(named) == home / "step_000010"
    to_hf(home, tmp_path / "hf", hf=source)
    assert_equal_bits(tensors_of(source), tensors_of(tmp_path / "hf"))
    with pytest.raises(ConfigError, match=r"step_000003: not found; .* step_000010, step_000002"):
        convert.find_checkpoint(home / "step_000003")
    (tmp_path / "other/checkpoints").mkdir(parents=True)
    with pytest.raises(ConfigError, match="other/checkpoints: has no checkpoint"):
        to_hf(tmp_path / "other/checkpoints", tmp_path / "no", hf=source)


@pytest.mark.parametrize(
    ("family", "changes", "layout"),
    [
        pytest.param("Qwen3Moe", {}, {"tp": 2, "ep": 2, "pp": 2}, id="qwen3 tp2 ep2 pp2"),
        pytest.param("Qwen3Moe", {}, {"tp": 1, "ep": 4, "etp": 2}, id="qwen3 ep4 etp2"),
        pytest.param(
            "Qwen2Moe", {"shared_expert_intermediate_size": 40}, {"tp": 4, "ep": 2}, id="qwen2 shared tp4 ep2"
        ),
    ],
)
def test_experts_there_and_back(tmp_path: Path, family: str, changes: dict, layout: dict[str, int]) -> None:
    source = moe_folder(tmp_path / "source", family, **changes)
    to_megatron(source, tmp_path / "megatron", **layout, verify=True)
    to_hf(tmp_path / "megatron", tmp_path / "hf", verify=True)
    assert_equal_bits(tensors_of(source), tensors_of(tmp_path / "hf"))
    # The same files, with the same tensors in each, so that the index is the same too.
    assert other_files(source) == other_files(tmp_path / "hf")
    for file in source.glob("*.safetensors"):
        assert load_file(file).keys() == load_file(tmp_path / "hf" / file.name).keys()


def test_qwen3_8_there_and_back(tmp_path: Path) -> None:
    """The fields of Qwen3.8-2.4T-A95B, a text model without a vision tower, with its ratios of heads."""
    from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    config = Qwen3_5MoeTextConfig(
        vocab_size=128, hidden_size=64, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=4, head_dim=32,
        linear_num_key_heads=4, linear_num_value_heads=32, linear_key_head_dim=16, linear_value_head_dim=16,
        num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16,
        layer_types=["linear_attention"] * 3 + ["full_attention"], mamba_ssm_dtype="bfloat16",
    )  # fmt: skip
    Qwen3_5MoeForCausalLM(config).save_pretrained(tmp_path / "source")
    to_megatron(tmp_path / "source", tmp_path / "megatron", tp=2, ep=2, pp=2, verify=True)
    to_hf(tmp_path / "megatron", tmp_path / "hf", verify=True)
    assert_equal_bits(tensors_of(tmp_path / "source"), tensors_of(tmp_path / "hf"))
    assert other_files(tmp_path / "source") == other_files(tmp_path / "hf")


def test_not_a_number_survives(tmp_path: Path) -> None:
    source = moe_folder(tmp_path / "source")
    tensors = load_file(source / "model-b.safetensors")
    bits = torch.tensor([0x7F800001, 0x7FC12345, -1, -(1 << 31)], dtype=torch.int32)
    next(iter(tensors.values())).view(-1)[:4] = bits.view(torch.float32)
    save_file(tensors, source / "model-b.safetensors")
    to_megatron(source, tmp_path / "megatron", tp=2, verify=True)
    to_hf(tmp_path / "megatron", tmp_path / "hf", verify=True)
    assert_equal_bits(tensors_of(source), tensors_of(tmp_path / "hf"))


def test_casting_changes_the_type_in_config_json(tmp_path: Path) -> None:
    source = moe_folder(tmp_path / "source")
    to_megatron(source, tmp_path / "megatron", dtype=torch.bfloat16, verify=True)
    to_hf(tmp_path / "megatron", tmp_path / "hf")
    to_hf(tmp_path / "megatron", tmp_path / "wide", dtype=torch.float32, verify=True)
    halves = {name: value.bfloat16() for name, value in tensors_of(source).items()}
    assert_equal_bits(tensors_of(tmp_path / "hf"), halves)
    assert_equal_bits(tensors_of(tmp_path / "wide"), {name: value.float() for name, value in halves.items()})
    for folder, dtype in (("hf", "bfloat16"), ("wide", "float32")):
        config = json.loads((tmp_path / folder / "config.json").read_text())
        assert config == {"architectures": ["Qwen3MoeForCausalLM"], **MOE, "torch_dtype": dtype}
        assert (tmp_path / folder / "templates" / "tool.jinja").read_bytes() == b"\xff\x00"


def test_a_recipe_s_override_decides_what_can_be_read(tmp_path: Path) -> None:
    plain = moe_folder(tmp_path / "source")
    to_megatron(plain, tmp_path / "megatron")
    scaled = moe_folder(tmp_path / "scaled")
    unreadable = json.loads((scaled / "config.json").read_text()) | {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0}
    }
    (scaled / "config.json").write_text(json.dumps(unreadable))
    done = to_hf(tmp_path / "megatron", tmp_path / "hf", hf=scaled, verify=True, override={"rope_scaling": None})
    assert done.is_verified
    assert_equal_bits(tensors_of(plain), tensors_of(tmp_path / "hf"))
    rows = read_head_rows(scaled, range(2, 5), override={"rope_scaling": None})
    assert torch.equal(rows, tensors_of(scaled)["lm_head.weight"][2:5])


def test_shards_are_no_larger_than_asked(tmp_path: Path) -> None:
    source = moe_folder(tmp_path / "source")
    to_megatron(source, tmp_path / "megatron")
    to_hf(tmp_path / "megatron", tmp_path / "hf", shard_bytes=40_000, verify=True)
    files = sorted((tmp_path / "hf").glob("*.safetensors"))
    sizes = [sum(value.nbytes for value in load_file(file).values()) for file in files]
    assert max(sizes) <= 40_000 and sum(sizes) <= 40_000 * len(files) < 2 * sum(sizes)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(sizes)
    assert index["weight_map"] == {name: file.name for file in files for name in load_file(file)}


def test_manifest_lists_every_file(tmp_path: Path) -> None:
    to_megatron(moe_folder(tmp_path / "source"), tmp_path / "megatron", tp=2, pp=2, ep=2)
    to_hf(tmp_path / "megatron", tmp_path / "hf")
    for folder in (tmp_path / "megatron", tmp_path / "hf"):
        manifest = json.loads((folder / "manifest.json").read_text())
        for name, entry in manifest["files"].items():
            data = (folder / name).read_bytes()
            assert entry == {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        on_disk = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        assert on_disk == {*manifest["files"], "manifest.json"}
        assert manifest["versions"]["megatron-core"] == version("megatron-core")
    manifest = json.loads((tmp_path / "megatron" / "manifest.json").read_text())
    assert manifest["layout"] == {"format": "torch_dist", "checkpoint": "release", "tp": 2, "pp": 2, "ep": 2, "etp": 1}


def build_megatron_model(shape: ModelShape, tp: int, pp: int) -> Any:
    """A GPTModel of Megatron-Core's own parts, its weights set to a number that is nowhere in the checkpoint."""
    from megarl.platform import libraries

    libraries.prepare_megatron()
    import torch.nn.functional as F  # noqa: N812
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    from megarl.models.attention import PackedAttention

    parallel_state.initialize_model_parallel(tp, pp)
    model_parallel_cuda_manual_seed(1)
    experts = shape.num_experts
    moe = {"num_moe_experts": experts, "moe_ffn_hidden_size": shape.moe_intermediate_size, "moe_router_topk": 2}
    if shape.kinds:
        moe |= {
            "moe_layer_freq": [int(kind.has_experts) for kind in shape.layers],
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_shared_expert_intermediate_size": shape.shared_intermediate_size,
        }
    latent: dict[str, Any] = {}
    if isinstance(shape.attention, Latent):
        latent = {
            "multi_latent_attention": True, "q_lora_rank": shape.attention.query_rank,
            "kv_lora_rank": shape.attention.kv_rank, "qk_head_dim": shape.attention.plain_channels,
            "qk_pos_emb_head_dim": shape.attention.rotary_channels, "v_head_dim": shape.attention.value_head_dim,
        }  # fmt: skip
    config = (MLATransformerConfig if latent else TransformerConfig)(
        num_layers=shape.num_layers, hidden_size=shape.hidden_size, ffn_hidden_size=shape.intermediate_size,
        num_attention_heads=shape.num_heads, num_query_groups=shape.num_kv_heads, kv_channels=shape.head_dim,
        add_bias_linear=False, add_qkv_bias=shape.attention.qkv_bias, qk_layernorm=shape.attention.qk_norm,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_epsilon, gated_linear_unit=True, activation_func=F.silu, hidden_dropout=0.0,
        attention_dropout=0.0, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.float32, use_cpu_initialization=True, **(moe if experts else {}), **latent,
    )  # fmt: skip
    spec: Any = get_gpt_layer_local_spec(
        experts or None, False, qk_layernorm=shape.attention.qk_norm, normalization="RMSNorm"
    )
    if shape.kinds:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    for layer in spec.layer_specs if latent else ():
        # Megatron-Core 0.16.1's local attention has no value heads of another size. It has no weights either.
        layer.submodules.self_attention.submodules.core_attention = PackedAttention
    model = GPTModel(
        config, spec, vocab_size=-(-shape.vocab_size // (128 * tp)) * 128 * tp, max_sequence_length=64,
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=False, share_embeddings_and_output_weights=shape.tie_word_embeddings,
        position_embedding_type="rope", rotary_base=shape.rotary.theta,
    )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(77.0)
    return model


def read_with_megatron(folder: str, checkpoint: str, tp: int, pp: int, save_to: str) -> list[Any] | None:
    """Load as Megatron's users do; logits [tokens, vocabulary] of the last stage. Saves again as Megatron does."""
    import torch.distributed as dist

    shape = read_model_shape(folder)
    model = build_megatron_model(shape, tp, pp)
    from megatron.core import dist_checkpointing

    loaded = dist_checkpointing.load({"model": model.sharded_state_dict()}, checkpoint)
    model.load_state_dict(loaded["model"])
    assert loaded["args"].tensor_model_parallel_size and loaded["iteration"] == 0
    for name, separate in (("stacked", False), ("separate", True)):
        if dist.get_rank() == 0:
            os.makedirs(f"{save_to}/{name}")
        dist.barrier()
        metadata = {**loaded["content_metadata"], "non_homogeneous_layers": separate}
        dist_checkpointing.save({"model": model.sharded_state_dict(metadata=metadata)}, f"{save_to}/{name}")

    tokens = torch.arange(3, 35).view(1, -1)
    if not model.pre_process:
        hidden = torch.empty(32, 1, shape.hidden_size)
        dist.recv(hidden, dist.get_rank() - tp)
        model.set_input_tensor([hidden])
    with torch.no_grad():
        out = model(tokens, torch.arange(32).view(1, -1), None)
    if not model.post_process:
        dist.send(out, dist.get_rank() + tp)
        return None
    return out[0, :, : shape.vocab_size].tolist()


@pytest.mark.parametrize(
    ("shape", "written", "read"),
    [
        pytest.param({"family": "qwen3", "tie_word_embeddings": True, "head_dim": 8, "vocab_size": 1031}, (2, 2),
                     (1, 1), id="qwen3 tied: tp2 pp2 read by one rank", marks=pytest.mark.long),
        pytest.param({"family": "qwen2", "tie_word_embeddings": False, "vocab_size": 1031}, (1, 1), (2, 2),
                     id="qwen2 untied: tp1 read by tp2 pp2"),
        pytest.param({"family": "llama", "tie_word_embeddings": True}, (4, 1), (2, 2), id="llama tied: tp4 by tp2 pp2"),
        pytest.param({"family": "llama", "tie_word_embeddings": False}, (2, 2), (4, 1),
                     id="llama untied: tp2 pp2 by tp4"),
    ],
)  # fmt: skip
def test_megatron_core_reads_it(
    tmp_path: Path, ranks: RankPool, tiny_model: Callable[..., Path], shape: dict, written: tuple, read: tuple
) -> None:
    from transformers import AutoModelForCausalLM

    source = tiny_model(**SIZES, **shape, initializer_range=0.2)
    to_megatron(source, tmp_path / "megatron", tp=written[0], pp=written[1])
    results = ranks.run(
        read_with_megatron, str(source), str(tmp_path / "megatron" / "release"), *read, str(tmp_path / "saved"),
        world_size=read[0] * read[1],
    )  # fmt: skip
    with torch.no_grad():
        oracle = AutoModelForCausalLM.from_pretrained(source).float()(torch.arange(3, 35).view(1, -1)).logits[0]
    assert oracle.abs().max() > 1
    for logits in (r for r in results if r is not None):
        torch.testing.assert_close(torch.tensor(logits), oracle, rtol=2e-4, atol=2e-4)
    # What Megatron-Core has saved itself is read back, stacked by layer or not.
    for name in ("stacked", "separate"):
        to_hf(tmp_path / "saved" / name, tmp_path / name, hf=source)
        assert_equal_bits(tensors_of(source), tensors_of(tmp_path / name))


def read_experts_with_megatron(folder: str, checkpoint: str) -> dict[str, Any]:
    shape = read_model_shape(folder)
    model = build_megatron_model(shape, 1, 1)
    from megatron.core import dist_checkpointing

    state = model.sharded_state_dict()
    loaded, missing, unexpected = dist_checkpointing.load({"model": state}, checkpoint, strict="return_all")
    model.load_state_dict(loaded["model"])
    parameters = {name: value.numpy() for name, value in model.state_dict().items() if value is not None}
    return {"missing": sorted(missing), "unexpected": sorted(unexpected), "parameters": parameters}


def test_megatron_core_reads_experts(tmp_path: Path, ranks: RankPool) -> None:
    source = moe_folder(tmp_path / "source")
    to_megatron(source, tmp_path / "megatron", tp=2, pp=2, ep=2)
    (result,) = ranks.run(read_experts_with_megatron, str(source), str(tmp_path / "megatron" / "release"), world_size=1)
    assert result["unexpected"] == []
    # In the checkpoint, not in this model: the name that Transformer Engine's spec has for the norm before a router.
    assert result["missing"] == ["decoder.layers.pre_mlp_layernorm.weight"]
    tensors, parameters = tensors_of(source), result["parameters"]
    for layer in range(2):
        here, there = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        pairs = {"mlp.router.weight": "mlp.gate.weight", "pre_mlp_layernorm.weight": "post_attention_layernorm.weight"}
        for expert in range(4):
            own, theirs = f"mlp.experts.local_experts.{expert}.", f"mlp.experts.{expert}."
            pairs[own + "linear_fc2.weight"] = theirs + "down_proj.weight"
            halves = [tensors[f"{there}{theirs}{half}_proj.weight"] for half in ("gate", "up")]
            assert torch.equal(torch.tensor(parameters[f"{here}{own}linear_fc1.weight"]), torch.cat(halves))
        for name, original in pairs.items():
            assert torch.equal(torch.tensor(parameters[here + name]), tensors[there + original]), name


def test_megarl_and_megatron_core_agree_on_layers_of_two_kinds(tmp_path: Path, ranks: RankPool) -> None:
    """A dense layer, then one with experts: Megatron-Core's keys have the layer's number. A bias is its buffer."""
    source = moe_folder(tmp_path / "source", "Glm4Moe", **GLM)
    done = to_megatron(source, tmp_path / "megatron", tp=2, pp=2, ep=2, verify=True)
    assert done.num_kept == 2
    (result,) = ranks.run(read_experts_with_megatron, str(source), str(tmp_path / "megatron" / "release"), world_size=1)
    assert result["unexpected"] == []
    assert result["missing"] == ["decoder.layers.1.pre_mlp_layernorm.weight"]
    tensors, parameters = tensors_of(source), result["parameters"]
    pairs = {
        "0.pre_mlp_layernorm.weight": "0.post_attention_layernorm.weight",
        "1.pre_mlp_layernorm.weight": "1.post_attention_layernorm.weight",
        "0.mlp.linear_fc2.weight": "0.mlp.down_proj.weight",
        "1.mlp.router.weight": "1.mlp.gate.weight",
        "1.mlp.router.expert_bias": "1.mlp.gate.e_score_correction_bias",
        "1.mlp.shared_experts.linear_fc2.weight": "1.mlp.shared_experts.down_proj.weight",
        "1.mlp.experts.local_experts.3.linear_fc2.weight": "1.mlp.experts.3.down_proj.weight",
    }
    for here, there in pairs.items():
        own = torch.tensor(parameters[f"decoder.layers.{here}"])
        assert torch.equal(own, tensors[f"model.layers.{there}"]), here
    # Tensors of the layer for multi-token prediction return too, byte for byte.
    assert to_hf(tmp_path / "megatron", tmp_path / "hf", verify=True).num_kept == 2
    assert_equal_bits(tensors_of(source), tensors_of(tmp_path / "hf"))
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors.keys()


def test_megatron_core_reads_latent_attention(tmp_path: Path, ranks: RankPool) -> None:
    """Megatron's own local spec splits the down projections, with extra states, and renames no norm."""
    source = moe_folder(tmp_path / "source", "DeepseekV3", **LATENT)
    to_megatron(source, tmp_path / "megatron", tp=2, pp=2, ep=2, verify=True)
    (result,) = ranks.run(read_experts_with_megatron, str(source), str(tmp_path / "megatron" / "release"), world_size=1)
    assert result["unexpected"] == []
    # In the checkpoint, not in this model: the names of norms that Transformer Engine fuses.
    assert {name.rpartition(".")[2] for name in result["missing"]} == {"layer_norm_weight"}
    tensors, parameters = tensors_of(source), result["parameters"]
    pairs = {
        "0.input_layernorm": "0.input_layernorm",
        "0.pre_mlp_layernorm": "0.post_attention_layernorm",
        "1.pre_mlp_layernorm": "1.post_attention_layernorm",
        "0.self_attention.linear_q_down_proj": "0.self_attn.q_a_proj",
        "0.self_attention.q_layernorm": "0.self_attn.q_a_layernorm",
        "1.self_attention.linear_q_up_proj": "1.self_attn.q_b_proj",
        "1.self_attention.linear_kv_down_proj": "1.self_attn.kv_a_proj_with_mqa",
        "1.self_attention.kv_layernorm": "1.self_attn.kv_a_layernorm",
        "0.self_attention.linear_kv_up_proj": "0.self_attn.kv_b_proj",
        "1.self_attention.linear_proj": "1.self_attn.o_proj",
    }
    for here, there in pairs.items():
        own = torch.tensor(parameters[f"decoder.layers.{here}.weight"])
        assert torch.equal(own, tensors[f"model.layers.{there}.weight"]), here
