"""Packed rows, and attention over them against one plain attention per sequence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.models import sinks
from megarl.models.attention import PackedAttention, PackedRow

CPU = torch.device("cpu")


def test_packed_row() -> None:
    row = PackedRow.from_lengths([3, 1, 4], CPU, "packed")
    assert row.cu_seqlens_q.tolist() == row.cu_seqlens_kv.tolist() == [0, 3, 4, 8]
    assert row.cu_seqlens_q.dtype == torch.int32
    assert (row.max_seqlen_q, row.max_seqlen_kv, row.qkv_format) == (4, 4, "packed")
    assert row.positions is not None and row.positions.tolist() == [0, 1, 2, 0, 0, 1, 2, 3]
    (part,) = row.parts
    assert part.queries is None and part.keys is None and part.cu_keys.tolist() == [0, 3, 4, 8]


def test_padded_lengths_are_given_only_where_they_are_needed() -> None:
    """Transformer Engine compares both on the GPU, in each layer, unless there are none; its context parallelism needs
    them."""
    whole = PackedRow.from_lengths([4, 8], CPU, "thd")
    assert whole.cu_seqlens_q_padded is None and whole.cu_seqlens_kv_padded is None
    shared = PackedRow.from_lengths([4, 8], CPU, "thd", cp=2, cp_rank=1)
    assert shared.cu_seqlens_q_padded.tolist() == shared.cu_seqlens_kv_padded.tolist() == [0, 4, 12]


def config_of(width: int, window: int = 0, *, has_sinks: bool = False) -> Any:
    """What `PackedAttention` reads of Megatron's config, for 4 heads."""
    return SimpleNamespace(
        kv_channels=width,
        window_size=(window - 1, 0) if window else None,
        window_attn_skip_freq=None,
        softmax_type="learnable" if has_sinks else "vanilla",
        num_attention_heads=4,
        tensor_model_parallel_size=1,
        params_dtype=torch.float64,
        perform_initialization=True,
        init_method=torch.nn.init.normal_,
    )


def attend_each(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: list[int],
    scale: float,
    window: int = 0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax attention written out, sequence by sequence, in float64; heads repeated for their group.

    A sink [heads] adds its exponential to the sum of a head's exponentials.
    """
    out = []
    for queries, keys, values in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        repeats = q.size(1) // k.size(1)
        keys, values = (x.repeat_interleave(repeats, dim=1).double() for x in (keys, values))
        scores = torch.einsum("ihd,jhd->hij", queries.double(), keys) * scale
        ones = torch.ones(len(queries), len(queries), dtype=torch.bool)
        future = ones.triu(1) | ones.tril(-window if window else -len(queries))
        weights = scores.masked_fill(future, -torch.inf).exp()
        total = weights.sum(-1, keepdim=True) + (0 if sinks is None else sinks.exp()[:, None, None])
        out.append(torch.einsum("hij,jhd->ihd", weights / total, values))
    return torch.cat(out)


@pytest.mark.parametrize(("heads", "groups"), [pytest.param(4, 4, id="all heads"), pytest.param(4, 2, id="grouped")])
@pytest.mark.parametrize("scale", [pytest.param(None, id="usual scale"), pytest.param(0.7, id="own scale")])
@pytest.mark.parametrize("window", [0, 1, 3, 7, 8])
def test_each_sequence_attends_to_itself(heads: int, groups: int, scale: float | None, window: int) -> None:
    lengths, width = [5, 1, 8, 2], 8
    torch.manual_seed(1)
    q, k, v = (torch.randn(16, 1, n, width, requires_grad=True) for n in (heads, groups, groups))
    attention = PackedAttention(config=config_of(width, window), softmax_scale=scale)
    out = attention(q, k, v, None, packed_seq_params=PackedRow.from_lengths(lengths, CPU, "packed"))
    expected = attend_each(q.squeeze(1), k.squeeze(1), v.squeeze(1), lengths, scale or width**-0.5, window)
    torch.testing.assert_close(out.double(), expected.reshape(16, 1, heads * width), rtol=0, atol=1e-6)
    direction = torch.randn_like(out)
    ours = torch.autograd.grad(out, (q, k, v), direction)
    theirs = torch.autograd.grad(expected, (q, k, v), direction.double().view_as(expected))
    for got, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("window", [0, 3])
def test_sinks_take_part_in_the_softmax(window: int) -> None:
    lengths, width = [5, 1, 8, 2], 8
    torch.manual_seed(1)
    q, k, v = (torch.randn(16, 1, n, width, dtype=torch.float64, requires_grad=True) for n in (4, 2, 2))
    attention = PackedAttention(config=config_of(width, window, has_sinks=True))
    (sinks,) = attention.parameters()
    assert sinks.shape == (4,)
    out = attention(q, k, v, None, packed_seq_params=PackedRow.from_lengths(lengths, CPU, "packed"))
    expected = attend_each(q.squeeze(1), k.squeeze(1), v.squeeze(1), lengths, width**-0.5, window, sinks)
    torch.testing.assert_close(out, expected.reshape(16, 1, 4 * width), rtol=0, atol=1e-12)
    direction = torch.randn_like(out)
    ours = torch.autograd.grad(out, (q, k, v, sinks), direction)
    theirs = torch.autograd.grad(expected, (q, k, v, sinks), direction.view_as(expected))
    for got, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


class FlashOnCpu:
    """torch's flash attention of one causal sequence on a CPU, as a kernel without sinks."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = (x.transpose(0, 1)[None] for x in (q, k, v))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*inputs, is_causal=True)
        return out[0].transpose(0, 1), lse[0]

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        inputs = [x.transpose(0, 1)[None] for x in (grad, q, k, v, out)]
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        to_q, to_k, to_v = (x[0].transpose(0, 1) for x in backward(*inputs, lse[None], 0.0, True))
        return to_q, to_k, to_v


def test_a_kernel_without_sinks_computes_them() -> None:
    torch.manual_seed(1)
    q, k, v = (torch.randn(9, 4, 16, dtype=torch.float64, requires_grad=True) for _ in range(3))
    scores = torch.randn(4, dtype=torch.float64, requires_grad=True)
    out = sinks.attend(q, k, v, scores, FlashOnCpu())
    expected = attend_each(q, k, v, [9], 0.25, sinks=scores)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    direction = torch.randn_like(out)
    ours = torch.autograd.grad(out, (q, k, v, scores), direction)
    theirs = torch.autograd.grad(expected, (q, k, v, scores), direction)
    for got, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("has_sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("window", [0, 1, 3, 6, 20])
@pytest.mark.parametrize("cp", [2, 3])
def test_context_parallel_ranks_compute_the_same(cp: int, window: int, has_sinks: bool) -> None:
    lengths, width = [2 * cp, 6 * cp, 4 * cp], 8
    torch.manual_seed(1)
    q, k, v = (torch.randn(sum(lengths), n, width, dtype=torch.float64) for n in (4, 2, 2))
    rows = [PackedRow.from_lengths(lengths, CPU, "packed", cp=cp, cp_rank=rank) for rank in range(cp)]
    attention = PackedAttention(config=config_of(width, window, has_sinks=has_sinks))
    gathered = [torch.cat([x[row.local] for row in rows]) for x in (k, v)]
    expected = attend_each(q, k, v, lengths, width**-0.5, window, attention.softmax_offset)
    for row in rows:
        assert row.output_order is not None
        outs = torch.cat([attention.attend(q[row.local], *gathered, part) for part in row.parts])
        torch.testing.assert_close(outs[row.output_order], expected[row.local], rtol=0, atol=1e-12)


class CalledOperators(TorchDispatchMode):
    """Notes the names of all operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("has_sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "is_varlen"),
    [
        pytest.param(torch.bfloat16, True, id="bfloat16"),
        pytest.param(torch.float16, True, id="float16"),
        pytest.param(torch.float32, False, id="float32"),
    ],
)
def test_the_kernel_on_a_gpu_takes_the_type(
    cuda_factories: None, dtype: torch.dtype, is_varlen: bool, cp: int, has_sinks: bool
) -> None:
    """Fake CUDA tensors: an index tensor on the host, or a kernel for other types, fails without a GPU."""
    device = torch.device("cuda", 0)
    attention = PackedAttention(config=config_of(16, window=5, has_sinks=has_sinks))
    # torch's autograd cannot make a graph for a GPU that does not exist.
    with torch.no_grad(), FakeTensorMode(), CalledOperators() as called, sdpa_kernel(SDPBackend.MATH):
        if has_sinks:
            attention.softmax_offset = torch.nn.Parameter(torch.zeros(4, dtype=dtype, device=device))
        row = PackedRow.from_lengths([8, 4, 12], device, "packed", cp=cp, cp_rank=0)
        # Values may be narrower than queries and keys, as in latent attention, which has no sinks.
        wide = 16 if has_sinks else 12
        q, k, v = (torch.zeros(24 // cp, n, w, dtype=dtype, device=device) for n, w in ((4, 16), (2, 16), (2, wide)))
        gathered = [torch.zeros(24, 2, width, dtype=dtype, device=device) for width in (16, wide)]
        for part in row.parts:
            out = attention.attend(q, *(gathered if cp > 1 else (k, v)), part)
            assert out.device == device and out.dtype == dtype and out.shape[1:] == (4, wide)
            if has_sinks and is_varlen:
                lengths = part.cu_queries, part.cu_keys, part.longest_query, part.longest_key
                kernel = sinks.FlashKernel(lengths, attention.scale, attention.window)
                keys = torch.zeros(int(part.num_keys.sum()), 2, 16, dtype=dtype, device=device)
                lse = torch.zeros(4, len(out), device=device)
                grads = kernel.backward(out, out, keys, keys, out, lse)
                assert [grad.shape for grad in grads] == [out.shape, keys.shape, keys.shape]
    expected = "_flash_attention_forward" if has_sinks else "varlen"
    assert any(expected in name for name in called.names) is is_varlen
    # Reading a length from the device would wait for the GPU in every layer.
    assert not any("_local_scalar_dense" in name for name in called.names)


@pytest.mark.parametrize("has_argument", [True, False], ids=["torch 2.13", "torch 2.11"])
def test_grouped_heads_on_every_torch(has_argument: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that does not take grouped heads gets keys and values repeated."""
    from torch.nn.attention import varlen

    given: dict[str, Any] = {}

    def newer(q: Any, k: Any, v: Any, *places: Any, scale: float, window_size: Any, enable_gqa: bool = False) -> Any:
        given.update(heads=(q.size(1), k.size(1), v.size(1)), enable_gqa=enable_gqa, key=k)
        return q

    def older(q: Any, k: Any, v: Any, *places: Any, scale: float, window_size: Any) -> Any:
        return newer(q, k, v, *places, scale=scale, window_size=window_size)

    monkeypatch.setattr(varlen, "varlen_attn", newer if has_argument else older)
    attention = PackedAttention(config=config_of(8))
    (part,) = PackedRow.from_lengths([3, 2], CPU, "packed").parts
    q, k, v = (torch.randn(5, n, 8) for n in (4, 2, 2))
    attention._attend_varlen(q, k, v, part)
    assert given["heads"] == ((4, 2, 2) if has_argument else (4, 4, 4))
    assert given["enable_gqa"] is has_argument
    if not has_argument:
        assert torch.equal(given["key"][:, 0], given["key"][:, 1]) and torch.equal(given["key"][:, 3], k[:, 1])
