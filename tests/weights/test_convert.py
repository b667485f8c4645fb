"""Model folders to Megatron's checkpoints and back, bit for bit; Megatron-Core itself reads and writes in between."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.model_shape import ModelShape, read_model_shape
from megarl.testing import RankPool
from megarl.types import ConfigError, DataError
from megarl.weights import convert
from megarl.weights.convert import to_hf, to_megatron, verify_copy
from megarl.weights.families import hf_tensors
from megarl.weights.layouts.safetensors import FolderReader

SIZES = {"hidden_size": 32, "num_layers": 2, "num_heads": 8, "num_kv_heads": 4, "intermediate_size": 48}

MODELS = [
    pytest.param({"family": "qwen3", "tie_word_embeddings": True, "head_dim": 8, "vocab_size": 1031}, id="qwen3 tied"),
    pytest.param({"family": "qwen3", "tie_word_embeddings": False, "head_dim": 8}, id="qwen3 untied"),
    pytest.param({"family": "qwen2", "tie_word_embeddings": True}, id="qwen2 tied"),
    pytest.param({"family": "qwen2", "tie_word_embeddings": False, "vocab_size": 1031}, id="qwen2 untied"),
    pytest.param({"family": "llama", "tie_word_embeddings": True, "vocab_size": 1031}, id="llama tied"),
    pytest.param({"family": "llama", "tie_word_embeddings": False}, id="llama untied"),
]

MOE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 8, "vocab_size": 101, "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True,
}  # fmt: skip


def random_folder(folder: Path, config: dict[str, Any], dtype: torch.dtype = torch.float32) -> Path:
    """A model folder of random bits, in two files; texts end in what a rewrite would change."""
    folder.mkdir()
    (folder / "config.json").write_bytes(json.dumps({**config, "torch_dtype": "float32"}).encode() + b"\r\n")
    torch.manual_seed(3)
    shapes = hf_tensors(read_model_shape(folder))
    tensors = {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}
    files = {
        "model-b.safetensors": list(tensors)[::3],
        "model-a.safetensors": [*list(tensors)[1::3], *list(tensors)[2::3]],
    }
    for file, names in files.items():
        save_file({name: tensors[name] for name in names}, folder / file)
    index = {"weight_map": {name: file for file, names in files.items() for name in names}, "metadata": {}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "tokenizer.json").write_bytes(b'{"a":   1}\r\n')
    (folder / "templates").mkdir()
    (folder / "templates" / "tool.jinja").write_bytes(b"\xff\x00")
    return folder


def moe_folder(folder: Path, family: str = "Qwen3Moe", **changes: Any) -> Path:
    return random_folder(folder, {"architectures": [f"{family}ForCausalLM"], **MOE, **changes})


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def other_files(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".safetensors")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if path.name != "manifest.json"}


def assert_equal_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.dtype == other[name].dtype and value.shape == other[name].shape, name
        assert value.contiguous().view(torch.uint8).equal(other[name].contiguous().view(torch.uint8)), name


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
    assert done.weight_bytes == sum(value.nbytes for value in tensors_of(source).values())
    files = {path.name for path in (tmp_path / "megatron" / "release").glob("*.distcp")}
    assert files == {f"__{rank}_0.distcp" for rank in range(tp * pp)}
    assert {path.name for path in tmp_path.iterdir()} == {"megatron", "hf"}


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
        assert manifest["versions"]["megatron-core"] == "0.16.1"
    manifest = json.loads((tmp_path / "megatron" / "manifest.json").read_text())
    assert manifest["layout"] == {"format": "torch_dist", "checkpoint": "release", "tp": 2, "pp": 2, "ep": 2, "etp": 1}


def build_megatron_model(shape: ModelShape, tp: int, pp: int) -> Any:
    """A GPTModel of Megatron-Core's own parts, its weights set to a number that is nowhere in the checkpoint."""
    from megarl.platform import megatron_on_cpu

    megatron_on_cpu.prepare()
    import torch.nn.functional as F  # noqa: N812
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel(tp, pp)
    model_parallel_cuda_manual_seed(1)
    experts = shape.num_experts
    moe = {"num_moe_experts": experts, "moe_ffn_hidden_size": shape.moe_intermediate_size, "moe_router_topk": 2}
    config = TransformerConfig(
        num_layers=shape.num_layers, hidden_size=shape.hidden_size, ffn_hidden_size=shape.intermediate_size,
        num_attention_heads=shape.num_heads, num_query_groups=shape.num_kv_heads, kv_channels=shape.head_dim,
        add_bias_linear=False, add_qkv_bias=shape.qkv_bias, qk_layernorm=shape.qk_norm, normalization="RMSNorm",
        layernorm_epsilon=shape.norm_epsilon, gated_linear_unit=True, activation_func=F.silu, hidden_dropout=0.0,
        attention_dropout=0.0, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.float32, use_cpu_initialization=True, **(moe if experts else {}),
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(experts or None, False, qk_layernorm=shape.qk_norm, normalization="RMSNorm")
    model = GPTModel(
        config, spec, vocab_size=-(-shape.vocab_size // (128 * tp)) * 128 * tp, max_sequence_length=64,
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=False, share_embeddings_and_output_weights=shape.tie_word_embeddings,
        position_embedding_type="rope", rotary_base=shape.rope_theta,
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
                     (1, 1), id="qwen3 tied: tp2 pp2 read by one rank"),
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


def _to_megatron(folder: Path) -> None:
    to_megatron(folder / "source", folder / "new", tp=2)


def _to_hf(folder: Path) -> None:
    to_hf(folder / "megatron", folder / "new")


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 40)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _edit_index(path: Path, name: str, file: str | None) -> None:
    index = json.loads(path.read_text())
    index["weight_map"] |= {name: file} if file else {}
    path.write_text(json.dumps(index))


def _drop_tensor(folder: Path) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    file = folder / index["weight_map"].pop("model.norm.weight")
    save_file({name: value for name, value in load_file(file).items() if name != "model.norm.weight"}, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _pickle_only(folder: Path) -> None:
    for path in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        path.unlink()
    torch.save({}, folder / "pytorch_model.bin")


@dataclass
class Evil:
    folder: str

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.folder,)


def _edit_metadata(folder: Path, edit: Callable[[Any], Any]) -> None:
    """Change `.metadata` as somebody would who also knows the manifest."""
    (folder / "manifest.json").unlink()
    path = folder / "release" / ".metadata"
    path.write_bytes(pickle.dumps(edit(pickle.loads(path.read_bytes()))))


def _file_elsewhere(metadata: Any) -> Any:
    next(iter(metadata.storage_data.values())).relative_path = "../__0_0.distcp"
    return metadata


def _lose_key(metadata: Any) -> Any:
    del metadata.state_dict_metadata["decoder.final_layernorm.weight"]
    return metadata


def _lose_chunk(metadata: Any) -> Any:
    metadata.state_dict_metadata["decoder.layers.mlp.experts.experts.linear_fc2.weight"].chunks.pop()
    return metadata


INDEX = "model.safetensors.index.json"

DAMAGES = [
    pytest.param(lambda f: _edit_index(f / "source" / INDEX, "x", "../a.safetensors"), _to_megatron,
                 "index.json: x is said to be in '../a.safetensors'", id="index points outside"),
    pytest.param(lambda f: _pickle_only(f / "source"), _to_megatron,
                 "pytorch_model.bin: neither .* Weights are read from safetensors only", id="pickled weights"),
    pytest.param(lambda f: _edit_index(f / "source" / INDEX, "x", "pytorch_model.bin"), _to_megatron,
                 "pytorch_model.bin: not found", id="index names a pickle"),
    pytest.param(lambda f: _cut(f / "source" / "model-a.safetensors"), _to_megatron,
                 "model-a.safetensors: cut short", id="file cut short"),
    pytest.param(lambda f: _drop_tensor(f / "source"), _to_megatron,
                 "source: tensor model.norm.weight is missing", id="tensor missing"),
    pytest.param(lambda f: (f / "source" / "model-a.safetensors").unlink(), _to_megatron,
                 "model-a.safetensors: not found", id="file missing"),
    pytest.param(lambda f: _cut(f / "megatron" / "release" / "__1_0.distcp"), _to_hf,
                 "__1_0.distcp: .* bytes where manifest.json says", id="chunk file cut short"),
    pytest.param(lambda f: [(f / "megatron" / "manifest.json").unlink(),
                            _cut(f / "megatron" / "release" / "__1_0.distcp")], _to_hf,
                 "__1_0.distcp: .* bytes, cut short", id="chunk file cut short, no manifest"),
    pytest.param(lambda f: (f / "megatron" / "release" / "__0_0.distcp").unlink(), _to_hf, "__0_0.distcp: not found",
                 id="chunk file missing"),
    pytest.param(lambda f: _flip(f / "megatron" / "release" / "__0_0.distcp"), _to_hf, "__0_0.distcp: ",
                 id="a bit flipped"),
    pytest.param(lambda f: _flip(f / "megatron" / "hf" / "tokenizer.json"), _to_hf, "tokenizer.json: its sha256 is",
                 id="a bit of the tokenizer flipped"),
    pytest.param(lambda f: _edit_metadata(f / "megatron", lambda m: [m, Evil(str(f / "evil"))]), _to_hf,
                 r"\.metadata: cannot be read \(UnpicklingError: it names posix.mkdir", id="metadata runs code"),
    pytest.param(lambda f: _edit_metadata(f / "megatron", lambda m: [m]), _to_hf, r"\.metadata: cannot be read",
                 id="metadata of another kind"),
    pytest.param(lambda f: _edit_metadata(f / "megatron", _file_elsewhere), _to_hf,
                 r"\.metadata: .* is said to be in '\.\./__0_0.distcp'", id="metadata points outside"),
    pytest.param(lambda f: _edit_metadata(f / "megatron", _lose_key), _to_hf,
                 r"\.metadata: lacks decoder.final_layernorm.weight", id="parameter missing"),
    pytest.param(lambda f: _edit_metadata(f / "megatron", _lose_chunk), _to_hf,
                 r"\.metadata: the checkpoint does not hold all of model.layers.1.mlp", id="chunk missing"),
    pytest.param(lambda f: (f / "megatron" / "latest_checkpointed_iteration.txt").write_text("../x") and
                 (f / "megatron" / "manifest.json").unlink(), _to_hf, "names no checkpoint but '../x'", id="tracker"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "run", "message"), DAMAGES)
def test_damage_is_refused_by_name(
    tmp_path: Path, damage: Callable[[Path], Any], run: Callable[[Path], None], message: str
) -> None:
    to_megatron(moe_folder(tmp_path / "source"), tmp_path / "megatron", tp=2)
    damage(tmp_path)
    with pytest.raises(DataError, match=message):
        run(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"source", "megatron"}


def test_a_flipped_bit_of_weights_fails_the_hash_or_the_checksum_of_its_chunk(tmp_path: Path) -> None:
    to_megatron(moe_folder(tmp_path / "source"), tmp_path / "megatron")
    _flip(tmp_path / "megatron" / "release" / "common.pt")
    with pytest.raises(DataError, match=r"common.pt: its sha256 is"):
        _to_hf(tmp_path)


def test_legacy_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "megatron" / "iter_0000007" / "mp_rank_00").mkdir(parents=True)
    (tmp_path / "megatron" / "hf").mkdir()
    (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").write_text("7\n")
    torch.save({}, tmp_path / "megatron" / "iter_0000007" / "mp_rank_00" / "model_optim_rng.pt")
    source = moe_folder(tmp_path / "source")
    with pytest.raises(DataError, match=r"mp_rank_00/model_optim_rng.pt: not a torch_dist checkpoint"):
        to_hf(tmp_path / "megatron", tmp_path / "new", hf=source)


def test_settings_that_do_not_fit_are_refused(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    dense = tiny_model(**SIZES)
    for sizes, message in (
        ({"tp": 3}, "tp 3 does not divide"),
        ({"pp": 4}, "pp 4 does not divide the model's 2 layers"),
        ({"ep": 2}, "--ep 2 --etp 1: the model has no experts"),
        ({"tp": 0}, "--tp 0 must be at least 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            to_megatron(dense, tmp_path / "new", **sizes)
    with pytest.raises(ConfigError, match="ep 3 does not divide the model's 4 experts"):
        to_megatron(moe_folder(tmp_path / "moe"), tmp_path / "new", ep=3)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").touch()
    with pytest.raises(ConfigError, match="full: is there already"):
        to_megatron(dense, tmp_path / "full")
    to_megatron(dense, tmp_path / "megatron")
    with pytest.raises(ConfigError, match="megatron: has no folder hf"):
        (tmp_path / "megatron" / "hf").rename(tmp_path / "hf")
        (tmp_path / "megatron" / "manifest.json").unlink()
        to_hf(tmp_path / "megatron", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_mixed_types_are_kept_or_refused(tmp_path: Path) -> None:
    source = moe_folder(tmp_path / "source")
    file = source / "model-b.safetensors"
    tensors = load_file(file)
    save_file({n: v.bfloat16() if n == "model.embed_tokens.weight" else v for n, v in tensors.items()}, file)
    to_megatron(source, tmp_path / "megatron", tp=2, verify=True)
    to_hf(tmp_path / "megatron", tmp_path / "hf", verify=True)
    assert_equal_bits(tensors_of(source), tensors_of(tmp_path / "hf"))
    first_query = "model.layers.0.self_attn.q_proj.weight"
    for path in source.glob("*.safetensors"):
        tensors = load_file(path)
        save_file({n: v.bfloat16() if n == first_query else v for n, v in tensors.items()}, path)
    with pytest.raises(
        DataError, match=r"torch.float32, other parts of .*linear_qkv.weight are torch.bfloat16; cast them"
    ):
        to_megatron(source, tmp_path / "other")
    to_megatron(source, tmp_path / "other", dtype=torch.float32, verify=True)


def test_verification_names_the_tensor(tmp_path: Path) -> None:
    source = moe_folder(tmp_path / "source")
    model = read_model_shape(source)
    changed = moe_folder(tmp_path / "changed")
    verify_copy(FolderReader(source, model), FolderReader(changed, model), model, changed)
    tensors = load_file(changed / "model-a.safetensors")
    name = "model.layers.1.self_attn.o_proj.weight"
    file = next(path for path in changed.glob("*.safetensors") if name in load_file(path))
    tensors = load_file(file)
    tensors[name].view(torch.int32)[-1, -1] ^= 1
    save_file(tensors, file)
    with pytest.raises(DataError, match=f"changed: {name} is not what was read"):
        verify_copy(FolderReader(source, model), FolderReader(changed, model), model, changed)
