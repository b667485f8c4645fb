"""Kernels of tools/standin_gpu/kernels.py against another computation: attention, its gradients, vLLM's layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytestmark = pytest.mark.standin_gpu
LENGTHS = [5, 1, 12]


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def cumulative(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int().cuda()


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention [queries, heads, dim] of one sequence's last queries, by torch's SDPA in float64."""
    mask = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril(len(k) - len(q))
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(0, 1)


def test_varlen_attention_and_its_gradients() -> None:
    from torch.nn.attention.varlen import varlen_attn

    torch.manual_seed(0)
    tokens, heads = sum(LENGTHS), 4
    q, k, v = leaves = [random(tokens, heads, 16).requires_grad_() for _ in range(3)]
    starts = cumulative(LENGTHS)
    out = varlen_attn(q, k, v, starts, starts, max(LENGTHS), max(LENGTHS), window_size=(-1, 0))
    assert isinstance(out, Tensor)
    gradient = random(tokens, heads, 16)
    found = torch.autograd.grad(out, leaves, gradient)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    expected = torch.cat([plain_attention(*parts) for parts in zip(*(x.split(LENGTHS) for x in wide), strict=True)])
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-2)
    for got, correct in zip(found, torch.autograd.grad(expected, wide, gradient.double()), strict=True):
        torch.testing.assert_close(got.double(), correct, rtol=0, atol=3e-2)


@pytest.mark.parametrize("shape", [(32,), (4, 8)])
def test_gradients_of_an_rms_norm(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(5, 3, *shape, device="cuda").requires_grad_(), torch.randn(shape, device="cuda")]
    leaves[1].requires_grad_()
    gradient = torch.randn(5, 3, *shape, device="cuda")
    found = torch.autograd.grad(functional.rms_norm(leaves[0], shape, leaves[1], 1e-3), leaves, gradient)
    x, weight = wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    dims = tuple(range(-len(shape), 0))
    plain = x * torch.rsqrt(x.square().mean(dims, keepdim=True) + 1e-3) * weight
    for got, correct in zip(found, torch.autograd.grad(plain, wide, gradient.double()), strict=True):
        torch.testing.assert_close(got.double(), correct, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_captured", [False, True])
def test_paged_attention(is_captured: bool) -> None:
    """Two sequences, their keys in pages of another order; a captured call reads the new lengths at each replay."""
    flash = pytest.importorskip("vllm.vllm_flash_attn")
    torch.manual_seed(0)
    page, num_pages = 16, 8
    keys, values = random(num_pages, page, 2, 64), random(num_pages, page, 2, 64)
    table = torch.tensor([[6, 1, 3], [2, 0, 7]], dtype=torch.int32, device="cuda")
    lengths = torch.tensor([40, 7], dtype=torch.int32, device="cuda")
    q, starts = random(3, 4, 64), cumulative([2, 1])
    out = torch.zeros_like(q)

    def run() -> None:
        flash.flash_attn_varlen_func(
            q, keys, values, max_seqlen_q=2, cu_seqlens_q=starts, max_seqlen_k=48, seqused_k=lengths, causal=True,
            block_table=table, out=out, fa_version=3,
        )  # fmt: skip

    graph = torch.cuda.CUDAGraph()
    if is_captured:
        with torch.cuda.graph(graph):
            run()
        assert out.abs().sum().item() == 0
    for first in (40, 33):
        lengths[0] = first
        graph.replay() if is_captured else run()
        for number, (rows, length) in enumerate([(slice(0, 2), first), (slice(2, 3), 7)]):
            k, v = (cache[table[number].long()].flatten(0, 1)[:length] for cache in (keys, values))
            torch.testing.assert_close(out[rows].double(), plain_attention(q[rows], k, v), rtol=0, atol=1e-2)


def layers() -> dict[str, Any]:
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.rotary_embedding import get_rope

    return {"norm": RMSNorm, "silu": SiluAndMul, "rope": get_rope}


@pytest.mark.parametrize("name", ["norm", "norm of a sum", "silu", "rope"])
def test_layers_of_vllm(name: str) -> None:
    """The layer's CUDA code against its own code in plain torch."""
    pytest.importorskip("vllm.platforms.cuda")
    from vllm.config import VllmConfig, set_current_vllm_config

    torch.manual_seed(0)
    with set_current_vllm_config(VllmConfig()), torch.device("cuda"):
        made = layers()
        if name == "rope":
            layer = made["rope"](64, 128, True, {"rope_theta": 10000, "rope_type": "default"}, torch.bfloat16)
            given = [torch.tensor([3, 0, 77]), random(3, 256), random(3, 128)]
        elif name == "silu":
            layer, given = made["silu"](), [random(5, 64)]
        else:
            layer = made["norm"](32).bfloat16()
            given = [random(5, 32)] + [random(5, 32)] * (name == "norm of a sum")
        found = layer.forward_cuda(*(x.clone() for x in given))
        expected = layer.forward_native(*(x.clone() for x in given))
    for got, correct in zip(*(x if isinstance(x, tuple) else (x,) for x in (found, expected)), strict=True):
        torch.testing.assert_close(got.float(), correct.float(), rtol=0, atol=3e-2)


def test_quantisation_to_fp8() -> None:
    """Groups of 128 values have a scale each, so that the largest of them is FP8's largest number, 448."""
    fp8 = pytest.importorskip("vllm.model_executor.layers.quantization.utils.fp8_utils")
    torch.manual_seed(0)
    x = random(5, 256) * torch.tensor([1.0, 100.0], device="cuda").bfloat16().repeat_interleave(128)
    quantised, scales = fp8.per_token_group_quant_fp8(x, 128, use_ue8m0=False)
    assert quantised.dtype == torch.float8_e4m3fn and scales.shape == (5, 2)
    groups = quantised.float().unflatten(-1, (2, 128))
    assert (groups.abs().amax(-1) == 448).all()
    # Three bits of mantissa: half a unit in the last place is a sixteenth.
    torch.testing.assert_close((groups * scales[..., None]).flatten(-2), x.float(), rtol=1 / 16, atol=1e-2)
