"""Transformer Engine on the stand-in: its operators against torch, then megarl's trainer with its layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megarl.platform import transformer_engine

pytestmark = [
    pytest.mark.standin_gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not transformer_engine.is_installed(),
        reason="Transformer Engine is left out: launch/setup.sh gpu builds its extension, an hour on two cores",
    ),
]
LENGTHS = [5, 1, 12]
LIMITS = {torch.bfloat16: 2e-2, torch.float32: 1e-5}
"""Allowed distance of results from float64, relative to their norm."""
DTYPES = pytest.mark.parametrize("dtype", LIMITS, ids=str)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype).requires_grad_()


def wide(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


def check(found: Sequence[Tensor], expected: Sequence[Tensor], limit: float) -> None:
    for got, correct in zip(found, expected, strict=True):
        assert got.shape == correct.shape
        assert (got.double() - correct.double()).norm() <= limit * correct.double().norm()


def outputs_and_gradients(function: Any, leaves: Sequence[Tensor], gradient: Tensor) -> list[Tensor]:
    out = function(*leaves)
    return [out, *torch.autograd.grad(out, leaves, gradient.to(out.dtype))]


def cumulative(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int().cuda()


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@DTYPES
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear(dtype: torch.dtype, has_bias: bool) -> None:
    import transformer_engine.pytorch as te

    layer = te.Linear(48, 32, bias=has_bias, params_dtype=dtype, device="cuda")
    leaves, gradient = [random(7, 48, dtype=dtype), *layer.parameters()], random(7, 32, dtype=dtype)
    if has_bias:
        torch.nn.init.normal_(layer.bias)
    found = outputs_and_gradients(lambda x, *_: layer(x), leaves, gradient)
    expected = outputs_and_gradients(functional.linear, wide(leaves), gradient)
    check(found, expected, LIMITS[dtype])


def test_linear_adds_to_float32_gradients() -> None:
    """Two passes: the sum in float32 has less of bfloat16's rounding than a sum of rounded gradients."""
    import transformer_engine.pytorch as te

    layer = te.Linear(48, 32, bias=False, params_dtype=torch.bfloat16, device="cuda", fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.zeros(32, 48, device="cuda")
    expected = torch.zeros(32, 48, device="cuda")
    for _ in range(2):
        x, gradient = random(7, 48, dtype=torch.bfloat16), random(7, 32, dtype=torch.bfloat16)
        layer(x).backward(gradient)
        expected += gradient.float().T @ x.float()
    check([layer.weight.main_grad], [expected], 1e-5)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, is_zero_centered: bool) -> Tensor:
    factor = weight + 1 if is_zero_centered else weight
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * factor


@DTYPES
@pytest.mark.parametrize("is_zero_centered", [False, True])
def test_rms_norm(dtype: torch.dtype, is_zero_centered: bool) -> None:
    import transformer_engine.pytorch as te

    layer = te.RMSNorm(
        32, eps=1e-3, dtype=dtype, device="cuda", zero_centered_gamma=is_zero_centered
    )  # pyright: ignore[reportCallIssue]
    torch.nn.init.normal_(layer.weight)
    leaves, gradient = [random(5, 3, 32, dtype=dtype), layer.weight], random(5, 3, 32, dtype=dtype)
    found = outputs_and_gradients(lambda x, _: layer(x), leaves, gradient)
    expected = outputs_and_gradients(lambda x, w: rms_norm(x, w, 1e-3, is_zero_centered), wide(leaves), gradient)
    check(found, expected, LIMITS[dtype])


@DTYPES
def test_norm_and_linear_in_one_layer(dtype: torch.dtype) -> None:
    import transformer_engine.pytorch as te

    layer = te.LayerNormLinear(
        32, 48, eps=1e-3, bias=False, normalization="RMSNorm", params_dtype=dtype, device="cuda"
    )
    torch.nn.init.normal_(layer.layer_norm_weight)
    leaves = [random(7, 32, dtype=dtype), layer.layer_norm_weight, layer.weight]
    gradient = random(7, 48, dtype=dtype)
    found = outputs_and_gradients(lambda x, *_: layer(x), leaves, gradient)
    expected = outputs_and_gradients(
        lambda x, norm, weight: rms_norm(x, norm, 1e-3, False) @ weight.T, wide(leaves), gradient
    )
    check(found, expected, LIMITS[dtype])


@DTYPES
def test_swiglu(dtype: torch.dtype) -> None:
    import transformer_engine_torch as tex

    x, gradient = random(7, 64, dtype=dtype), random(7, 32, dtype=dtype)

    def plain(x: Tensor) -> Tensor:
        gate, value = x.chunk(2, -1)
        return functional.silu(gate) * value

    found = [tex.swiglu(x.detach(), None), tex.dswiglu(gradient.detach(), x.detach(), None)]
    check(found, outputs_and_gradients(plain, wide([x]), gradient), LIMITS[dtype])


@DTYPES
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize(
    ("tensor_format", "cp_size", "cp_rank"), [("sbhd", 1, 0), ("bshd", 1, 0), ("thd", 1, 0), ("thd", 2, 0), ("thd", 2, 1)]
)
def test_rotary_embedding(
    tensor_format: str, cp_size: int, cp_rank: int, is_interleaved: bool, dtype: torch.dtype
) -> None:
    """The fused function against the one of plain torch; 4 of 12 channels are not turned."""
    from transformer_engine.pytorch.attention.rope import RotaryPositionEmbedding, apply_rotary_pos_emb

    # Each rank has two of four chunks of a sequence.
    lengths = [8, 4, 12]
    angles = RotaryPositionEmbedding(8, interleaved=is_interleaved)(max_seq_len=16).cuda()
    shape = (sum(lengths) // cp_size, 3) if tensor_format == "thd" else (7, 2, 3)
    # A view, as queries are one of the output of a projection.
    x, gradient = random(*shape, 20, dtype=dtype), random(*shape, 12, dtype=dtype)
    options: dict[str, Any] = {"tensor_format": tensor_format, "interleaved": is_interleaved}
    if tensor_format == "thd":
        options |= {"cu_seqlens": cumulative(lengths), "cp_size": cp_size, "cp_rank": cp_rank}

    def turned(is_fused: bool) -> Any:
        return lambda x: apply_rotary_pos_emb(x[..., 3:15], angles.to(x.device), fused=is_fused, **options)

    found = outputs_and_gradients(turned(True), [x], gradient)
    expected = outputs_and_gradients(turned(False), wide([x]), gradient)
    check(found, expected, LIMITS[dtype])


def plain_attention(q: Tensor, k: Tensor, v: Tensor, window: int = -1) -> Tensor:
    """Return causal attention of one sequence, [tokens, heads, channels]; a query sees `window` earlier tokens."""
    mask = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril()
    if window >= 0:
        mask = mask.triu(-window)
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(0, 1)


@pytest.mark.parametrize("window", [-1, 3])
@pytest.mark.parametrize(
    ("dtype", "backend"), [(torch.bfloat16, "FusedAttention"), (torch.float32, "UnfusedDotProductAttention")], ids=str
)
def test_attention_of_packed_rows(
    dtype: torch.dtype, backend: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformer Engine chooses cuDNN's kernel for 16 bits and its own composition for float32."""
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.attention.dot_product_attention import backends

    used = []
    kernel = getattr(backends, backend)
    forward = kernel.forward
    monkeypatch.setattr(kernel, "forward", lambda self, *a, **k: (used.append(backend), forward(self, *a, **k))[1])
    layer = te.DotProductAttention(
        4, 16, num_gqa_groups=2, attention_dropout=0.0, qkv_format="thd", attn_mask_type="padding_causal"
    )
    leaves = [random(sum(LENGTHS), heads, 16, dtype=dtype) for heads in (4, 2, 2)]
    gradient, starts = random(sum(LENGTHS), 4, 16, dtype=dtype), cumulative(LENGTHS)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = layer(
            q, k, v, cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=max(LENGTHS), max_seqlen_kv=max(LENGTHS),
            window_size=(window, 0),
        )  # fmt: skip
        return out.view(len(q), 4, 16)

    def plain(*leaves: Tensor) -> Tensor:
        parts = zip(*(x.split(LENGTHS) for x in leaves), strict=True)
        return torch.cat([plain_attention(q, k, v, window) for q, k, v in parts])

    found = outputs_and_gradients(attention, leaves, gradient)
    check(found, outputs_and_gradients(plain, wide(leaves), gradient), LIMITS[dtype])
    assert used == [backend]


@pytest.mark.parametrize("qkv_format", ["sbhd", "bshd"])
def test_attention_of_a_batch(qkv_format: str) -> None:
    import transformer_engine.pytorch as te

    layer = te.DotProductAttention(
        4, 16, num_gqa_groups=2, attention_dropout=0.0, qkv_format=qkv_format, attn_mask_type="causal"
    )
    leaves = [random(6, 6, heads, 16, dtype=torch.bfloat16) for heads in (4, 2, 2)]
    gradient = random(6, 6, 4, 16, dtype=torch.bfloat16)
    batch = 1 if qkv_format == "sbhd" else 0

    def plain(*leaves: Tensor) -> Tensor:
        parts = zip(*(x.unbind(batch) for x in leaves), strict=True)
        return torch.stack([plain_attention(q, k, v) for q, k, v in parts], dim=batch)

    found = outputs_and_gradients(lambda q, k, v: layer(q, k, v).view(6, 6, 4, 16), leaves, gradient)
    check(found, outputs_and_gradients(plain, wide(leaves), gradient), LIMITS[torch.bfloat16])


@pytest.mark.parametrize("is_decoupled", [False, True])
def test_adam(is_decoupled: bool) -> None:
    from transformer_engine.pytorch.optimizers import FusedAdam

    settings: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-3, "weight_decay": 0.1}
    own = [random(5, 7), random(3)]
    other = [x.detach().clone().requires_grad_() for x in own]
    optimizer = FusedAdam(own, adam_w_mode=is_decoupled, **settings)
    reference = (torch.optim.AdamW if is_decoupled else torch.optim.Adam)(other, **settings)
    for _ in range(3):
        for mine, theirs in zip(own, other, strict=True):
            mine.grad = torch.randn_like(mine)
            theirs.grad = mine.grad.clone()
        optimizer.step()
        reference.step()
    check([x.detach() for x in own], [x.detach() for x in other], 1e-6)


def test_norms_and_factors_of_many_tensors() -> None:
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.optimizers import multi_tensor_applier

    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    given = [torch.randn(5, 7, device="cuda"), torch.randn(3, device="cuda")]
    total, each = multi_tensor_applier(tex.multi_tensor_l2norm, flag, [given], True)
    check([total, each], [torch.cat([x.flatten() for x in given]).norm()[None], torch.stack([x.norm() for x in given])], 1e-6)
    results = [torch.empty_like(x) for x in given]
    multi_tensor_applier(tex.multi_tensor_scale, flag, [given, results], 0.25)
    check(results, [x / 4 for x in given], 1e-6)
    assert flag.item() == 0
    given[1][1] = float("inf")
    multi_tensor_applier(tex.multi_tensor_scale, flag, [given, results], 0.25)
    assert flag.item() == 1


def test_an_unknown_operator_is_named() -> None:
    import transformer_engine.pytorch as te

    layer = te.LayerNorm(32, device="cuda")
    with pytest.raises(RuntimeError, match="nvte_layernorm_fwd is not imitated"):
        layer(random(5, 32))


def test_positions_beyond_the_frequencies_are_an_error() -> None:
    """The kernel of a GPU reads what lies behind them."""
    from transformer_engine.pytorch.attention.rope import RotaryPositionEmbedding, apply_rotary_pos_emb

    angles = RotaryPositionEmbedding(16)(max_seq_len=11).cuda()
    with pytest.raises(RuntimeError, match="position 11 of 11 frequencies"):
        apply_rotary_pos_emb(
            random(sum(LENGTHS), 2, 16), angles, tensor_format="thd", fused=True, cu_seqlens=cumulative(LENGTHS)
        )
