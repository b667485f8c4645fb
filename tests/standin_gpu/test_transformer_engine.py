"""Transformer Engine on the stand-in: its operators against torch, then megarl's trainer with its layers."""

# The environment of the checks has no Transformer Engine.
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.platform import transformer_engine
from megarl.types import TrainingSequence
from tests.host_waits import host_waits
from tests.rank_pool import RankPool
from tests.token_batches import row_batches
from tests.training import test_training_engine as training
from tests.training.host.test_host_waits import OF_A_PASS, OF_AN_UPDATE, waits
from tests.training.parts import test_lora as lora

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
VOCAB_SIZE = 431
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

    layer = te.RMSNorm(32, eps=1e-3, dtype=dtype, device="cuda", zero_centered_gamma=is_zero_centered)
    torch.nn.init.normal_(layer.weight)
    leaves, gradient = [random(5, 3, 32, dtype=dtype), layer.weight], random(5, 3, 32, dtype=dtype)
    found = outputs_and_gradients(lambda x, _: layer(x), leaves, gradient)
    expected = outputs_and_gradients(lambda x, w: rms_norm(x, w, 1e-3, is_zero_centered), wide(leaves), gradient)
    check(found, expected, LIMITS[dtype])


@DTYPES
def test_norm_and_linear_in_one_layer(dtype: torch.dtype) -> None:
    import transformer_engine.pytorch as te

    layer = te.LayerNormLinear(32, 48, eps=1e-3, bias=False, normalization="RMSNorm", params_dtype=dtype, device="cuda")
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
    ("tensor_format", "cp_size", "cp_rank"),
    [("sbhd", 1, 0), ("bshd", 1, 0), ("thd", 1, 0), ("thd", 2, 0), ("thd", 2, 1)],
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
    check(
        [total, each],
        [torch.cat([x.flatten() for x in given]).norm()[None], torch.stack([x.norm() for x in given])],
        1e-6,
    )
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


# ---- megarl's trainer with these layers


@pytest.fixture(scope="module")
def two_ranks(distributed_tier: None) -> Iterator[RankPool]:
    """Two processes, each with an imitated GPU."""
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[..., Path]) -> Path:
    sizes = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 48}
    return tiny_model(family="qwen3", num_layers=4, vocab_size=VOCAB_SIZE, initializer_range=0.15, **sizes)


def recipe(folder: Path, dtype: str, **trainer: Any) -> Recipe:
    """A recipe of supervised training whose batch fills several rows of several sequences."""
    made = training.recipe_of(folder, "sft", **({"distributed_optimizer": False} | trainer))
    return made.model_copy(update={"model": made.model.model_copy(update={"dtype": dtype})})


@pytest.mark.parametrize(
    ("dtype", "sizes", "limit"),
    [
        pytest.param("float32", (1, 1, 1), 1e-5, id="float32"),
        # 8 bits of mantissa, over four layers forth and back.
        pytest.param("bfloat16", (1, 1, 1), 5e-2, id="bfloat16"),
        pytest.param("float32", (2, 1, 1), 1e-5, id="float32 tp2"),
    ],
)
def test_updates_are_those_of_transformers(
    two_ranks: RankPool, folder: Path, dtype: str, sizes: tuple[int, int, int], limit: float
) -> None:
    """Losses, log-probs and gradients of packed rows against transformers in float64."""
    made = recipe(folder, dtype, max_tokens_per_microbatch=40)
    updates = training.make_updates(made, VOCAB_SIZE)
    got, expected = training.trained(two_ranks, made, sizes), training.transformers_training(made, updates)
    assert got["num_rows"] == [3] * sizes[0]
    losses, norms = ([step[f"train/{name}"] for step in got["metrics"]] for name in ("loss", "grad_norm"))
    assert losses == pytest.approx(expected["loss"], rel=limit)
    assert norms == pytest.approx(expected["grad_norm"], rel=limit)
    assert training.distance(got["gradient"], expected["gradient"]) <= limit
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    for sequence, logprobs in zip(updates[0], got["before"], strict=True):
        tokens = torch.from_numpy(sequence.token_ids)
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, :-1]
        correct = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        np.testing.assert_allclose(logprobs[1:], correct.numpy(), rtol=0, atol=limit)


OF_ROWS = (
    # The stand-in reads the lengths of sequences, where a GPU's kernel does.
    "site-packages/standin_gpu_kernels.py",
    # A row's tokens, lengths and temperatures come from pageable memory. The number depends on rows alone.
    "rows/microbatch.py",
    "rows/packed_rows.py",
    "models/attention.py:from_lengths",
    "models/attention.py:_cumulative_sums",
    "training/model.py:forward_step",
)
"""Beginnings of places where the host waits for each row, not for each layer."""
OF_FLAGS = {("tensor", "training/optimizer_step.py:_reduce_flags")}
"""Flags of an update, copied to the device just before the host waits for their sum over the ranks."""


def count_waits(made: Recipe, sequences: list[TrainingSequence]) -> dict[str, Any]:
    """Return one rank's kinds of layers and attention, and the reads of tensors' values in a pass and an update."""
    from transformer_engine.pytorch.attention.dot_product_attention import dot_product_attention

    engine, _, _ = training.build(made, ParallelConfig(1, 1, 1, 1))
    rows = row_batches(sequences, training.rows_of(made, ParallelConfig(1, 1, 1, 1), sequences))
    # The first pass fills caches, such as the chosen backend of the attention.
    engine.forward(rows)
    with host_waits() as passed:
        engine.forward(rows)
    with host_waits() as updated:
        engine.update(rows)
    layer: Any = engine.chunks[0].decoder.layers[0]
    return {
        "layers": [type(layer.self_attention.linear_qkv).__name__, type(layer.mlp.linear_fc2).__name__],
        "is_fused": dot_product_attention._attention_backends["use_fused_attention"],
        **{
            name: {at: number for at, number in waits(places).items() if not at[1].startswith(OF_ROWS)}
            for name, places in (("pass", passed), ("update", updated))
        },
        "num_rows": len(rows),
    }


def test_the_host_waits_for_no_layer(two_ranks: RankPool, folder: Path) -> None:
    made = recipe(folder, "bfloat16", max_tokens_per_microbatch=40, distributed_optimizer=True)
    sequences = training.make_updates(made, VOCAB_SIZE)[0]
    [found] = two_ranks.run(count_waits, made, sequences, world_size=1)
    assert found["layers"] == ["TELayerNormColumnParallelLinear", "TERowParallelLinear"] and found["is_fused"]
    assert found["num_rows"] == 3
    assert found["pass"].keys() <= OF_A_PASS.keys() and set(found["pass"].values()) <= {1}
    assert found["update"].keys() <= OF_AN_UPDATE.keys() | OF_FLAGS and set(found["update"].values()) <= {1}


def adapted(is_zero_centered: bool) -> tuple[Tensor, Tensor]:
    """Return the outputs of a layer with a fused norm, and of the adapter that has its weight, on the CPU."""
    from megatron.core import parallel_state
    from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    from megarl.models.lora import Adapter

    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(0)
    config = TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=4, normalization="RMSNorm", add_bias_linear=False,
        layernorm_zero_centered_gamma=is_zero_centered, params_dtype=torch.float32,
    )  # fmt: skip
    options: dict[str, Any] = {"gather_output": False, "bias": False, "skip_bias_add": False, "is_expert": False}
    assert config.init_method is not None
    linear = TELayerNormColumnParallelLinear(32, 48, config=config, init_method=config.init_method, **options)
    torch.nn.init.normal_(linear.layer_norm_weight)
    adapter = Adapter(linear, "layers.0.linear_qkv", rank=32, scale=1.0, dropout=0.0, seed=0)
    adapter.a.data.copy_(torch.eye(32))
    adapter.b.data.copy_(linear.weight.data)
    x = torch.randn(5, 1, 32, device="cuda")
    return linear(x)[0].detach().cpu(), adapter(x).detach().cpu()


@pytest.mark.parametrize("is_zero_centered", [False, True])
def test_an_adapter_sees_the_values_of_a_fused_norm(two_ranks: RankPool, is_zero_centered: bool) -> None:
    [(layer, adapter)] = two_ranks.run(adapted, is_zero_centered, world_size=1)
    torch.testing.assert_close(adapter, layer)


def test_adapters_learn_alike_over_context_ranks(two_ranks: RankPool, folder: Path) -> None:
    """Transformer Engine's exchange of keys adds no more error to 16 bits than their rounding on one rank."""
    made = lora.lora_recipe(folder, max_tokens_per_microbatch=40)

    def trained(dtype: str, cp: int) -> dict[str, Any]:
        model = made.model.model_copy(update={"dtype": dtype})
        return lora.trained(two_ranks, made.model_copy(update={"model": model}), {"cp": cp})

    exact = trained("float32", 1)
    gaps, distances = [], []
    for found in (trained("bfloat16", 2), trained("bfloat16", 1)):
        gaps.append(np.linalg.norm(np.concatenate(found["before"]) - np.concatenate(exact["before"])))
        distances.append(training.distance(found["gradient"], exact["gradient"]))
    for split, alone in (gaps, distances):
        assert 0 < split < 1.5 * alone, (gaps, distances)
    # A gradient of another direction has a distance of 1.4.
    assert distances[1] < 0.15, distances
