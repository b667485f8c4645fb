"""Each family's FP8 modules against vLLM's own loader, what kernels do besides, and the kernels that are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.families.registry import FAMILIES
from tests.rank_pool import RankPool

SIZES = {"num_layers": 2, "hidden_size": 192, "num_heads": 6, "num_kv_heads": 3, "intermediate_size": 320}


def engine_of(folder: str, quantization: str = "fp8") -> Any:
    from megarl.config import RolloutConfig
    from megarl.engine.engine import RolloutEngine

    config = RolloutConfig(kv_cache_gib=0.05, quantization=quantization)  # pyright: ignore[reportArgumentType]
    return RolloutEngine(folder, config, max_model_len=64, dtype="bfloat16", seed=0)


def weights_of(folder: str) -> dict[str, Any]:
    """The tensors of a folder in bfloat16; one projection begins with a block of zeros."""
    import torch
    from safetensors.torch import load_file

    tensors = {name: t.bfloat16() for name, t in load_file(f"{folder}/model.safetensors").items()}
    torch.manual_seed(1)
    for tensor in tensors.values():
        tensor.copy_(torch.randn(tensor.shape) * 0.1)
    tensors["model.layers.0.self_attn.o_proj.weight"][:128, :128] = 0
    return tensors


def resharding(engine: Any, folder: str, tensors: dict[str, Any]) -> Any:
    """The reshard from whole tensors into an engine on the only rank."""
    import torch

    from megarl.families.shape import read_model_shape
    from megarl.reshard.boxes import dense_piece
    from megarl.reshard.live import DirectReshard, record_engine_layout

    shape = read_model_shape(folder, {})
    recorded, refusal = record_engine_layout(engine.model, shape, torch.bfloat16)
    assert recorded is not None, refusal
    whole = tuple(dense_piece(name, tuple(t.shape), name, 0) for name, t in tensors.items())
    return DirectReshard(
        [whole], None, recorded, tensors, engine.model, dtype=torch.bfloat16, bucket_bytes=1 << 16, topology=[("here",)]
    )


def copies(engine: Any) -> dict[str, Any]:
    import torch

    return {
        name: (p.view(torch.uint8) if p.dtype.itemsize == 1 else p).detach().clone()
        for name, p in engine.model.named_parameters()
    }


def differing(folder: str) -> tuple[list[str], dict[str, str]]:
    """Live parameters that a reshard fills in another way than vLLM's loader; and their types, of one layer."""
    import torch

    engine, tensors = engine_of(folder), weights_of(folder)
    moving = resharding(engine, folder, tensors)
    moving.self_test()
    written = copies(engine)
    zeros = engine.model.get_parameter("model.layers.0.self_attn.o_proj.weight").view(torch.uint8)[:128, :128]
    assert not zeros.any() and not written["model.layers.0.self_attn.o_proj.weight_scale_inv"].isnan().any()
    engine.load_tensors(iter(tensors.items()))
    loaded = copies(engine)
    wrong = [name for name in written if not torch.equal(written[name], loaded[name])]
    types = {name: str(p.dtype) for name, p in engine.model.named_parameters()}
    engine.close()
    return wrong, types


QUANTISABLE = {name for name, family in FAMILIES.items() if family.is_quantisable}


@pytest.mark.parametrize("family", sorted(QUANTISABLE - {"qwen3", "qwen3_moe"}))
def test_every_familys_weights_are_what_the_loader_makes(
    family: str, ranks: RankPool, tiny_model: Callable[..., Path]
) -> None:
    """(Those of Qwen3, and tensor-parallel engines: tests/distributed/test_quantised_reshard.py.)"""
    folder = tiny_model(family=family, **SIZES)
    [(wrong, types)] = ranks.run(differing, str(folder), world_size=1)
    assert wrong == []
    for name, dtype in types.items():
        is_projection = name.endswith(("_proj.weight", "w13_weight", "w2_weight"))
        is_scale = name.endswith("weight_scale_inv")
        assert dtype == f"torch.{'float8_e4m3fn' if is_projection else 'float32' if is_scale else 'bfloat16'}", name


def laid_out_by_a_kernel(folder: str) -> tuple[int, int, list[str]]:
    """As `differing`, where the kernel requantises to scales that are powers of two, as DeepGEMM's do on Blackwell."""
    import torch
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel
    from vllm.model_executor.layers.quantization.utils.fp8_utils import requant_weight_ue8m0_inplace

    def requantise(kernel: Any, layer: Any) -> None:
        requant_weight_ue8m0_inplace(layer.weight.data, layer.weight_scale_inv.data)

    engine, tensors = engine_of(folder), weights_of(folder)
    moving = resharding(engine, folder, tensors)
    moving.run()
    plain = copies(engine)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CPUFp8BlockScaledMMKernel, "process_weights_after_loading", requantise)
        moving.run()
        written = copies(engine)
        engine.load_tensors(iter(tensors.items()))
    loaded = copies(engine)
    scales = [name for name in written if name.endswith("weight_scale_inv")]
    powers = sum(bool((torch.frexp(written[name])[0] == 0.5).all()) for name in scales)
    changed = sum(not torch.equal(plain[name], written[name]) for name in scales)
    engine.close()
    assert powers == len(scales)
    return len(scales), changed, [name for name in written if not torch.equal(written[name], loaded[name])]


def test_what_a_kernel_does_after_quantising_is_done_again(ranks: RankPool, tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model(family="llama", **SIZES)
    [(num_scales, changed, wrong)] = ranks.run(laid_out_by_a_kernel, str(folder), world_size=1)
    assert num_scales == changed == 8 and wrong == []


def refused(folder: str) -> list[str]:
    """Return the error of recording a layout whose kernel is of an unknown kind."""
    import torch
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend

    from megarl.families.shape import read_model_shape
    from megarl.reshard.live import record_engine_layout

    engine = engine_of(folder)
    shape = read_model_shape(folder, {})
    modules = dict(engine.model.named_modules())
    experts = modules["model.layers.0.mlp.experts.routed_experts"].quant_method
    linear = modules["model.layers.1.self_attn.o_proj"].quant_method
    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "fp8_linear", type("MarlinFP8ScaledMMLinearKernel", (), {})())
        said.append(record_engine_layout(engine.model, shape, torch.bfloat16)[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "fp8_backend", Fp8MoeBackend.FLASHINFER_TRTLLM)
        said.append(record_engine_layout(engine.model, shape, torch.bfloat16)[1])
    said.append(record_engine_layout(engine.model, shape, torch.bfloat16)[1])
    # vLLM would quantise this family's.
    assert engine.model.get_parameter("model.layers.0.mlp.gate.weight").dtype == torch.bfloat16
    engine.close()
    return said


def test_unknown_kernels_are_refused_by_name(ranks: RankPool, tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model(family="qwen3_moe", **SIZES)
    [(linear, experts, known)] = ranks.run(refused, str(folder), world_size=1)
    assert "model.layers.1.self_attn.o_proj: MarlinFP8ScaledMMLinearKernel keeps" in linear
    assert "rollout.vllm.linear_backend" in linear
    assert "model.layers.0.mlp.experts.routed_experts: the FLASHINFER_TRTLLM expert backend keeps" in experts
    assert "rollout.vllm.moe_backend to triton" in experts
    assert known == ""
