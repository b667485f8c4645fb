"""The operators of trainer.exact round as vLLM's do, and have the gradients of the usual ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from megarl.data.token_batch import ranges
from megarl.families.config_json.rotary import Rotary
from megarl.models.attention import PackedAttention, PackedRow
from megarl.models.exact.attention import ExactAttention
from megarl.models.exact.logprobs import ExactLogprobs
from megarl.models.exact.residual import wide_addition
from megarl.models.exact.rotary import RotaryTable
from megarl.models.logprobs import Support, vocab_parallel_logprobs
from megarl.models.norms import RMSNorm
from megarl.models.rotary import frequencies
from megarl.platform import libraries
from megarl.platform.exact import attention, engine
from megarl.platform.exact.block_products import block_product, row_product

WIDTH, HEADS, GROUPS = 32, 6, 2


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def half(*shape: int, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(*shape)).bfloat16()


def config(**fields: Any) -> Any:
    common = {"params_dtype": torch.bfloat16, "layernorm_zero_centered_gamma": False, "sequence_parallel": False}
    attention = {"window_size": None, "window_attn_skip_freq": None, "softmax_type": "vanilla", "kv_channels": WIDTH}
    return cast(Any, SimpleNamespace(**common, **attention, **fields))


@pytest.fixture
def in_vllm() -> Any:
    """Context of a vLLM configuration, which vLLM's layers ask for."""
    libraries.prepare_vllm()
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        yield


def test_sums_and_norms_are_those_of_the_engine(in_vllm: Any) -> None:
    from vllm.model_executor.layers.layernorm import RMSNorm as EngineNorm

    for width in (96, 2048):
        ours, theirs = RMSNorm(config(), width), EngineNorm(width, dtype=torch.bfloat16)
        ours.weight.data = theirs.weight.data = half(width)
        x, residual = half(40, width), half(40, width)
        add = wide_addition(training=True, fused=False)
        wide = add((x, None), residual.float(), 0.0)
        normed, rounded = theirs(x.clone(), residual.clone())
        assert torch.equal(ours(wide), normed)
        # The next addition starts from the rounded sum.
        assert torch.equal(add((x, None), wide, 0.0), x.float() + rounded.float())
        assert torch.equal(ours(x), theirs(x.clone()))
        assert not torch.equal(ours(x + residual), normed)


@pytest.mark.parametrize("rotated", [WIDTH, WIDTH // 2], ids=["whole head", "half"])
def test_rotations_are_those_of_the_engine(in_vllm: Any, rotated: int) -> None:
    from vllm.model_executor.layers.rotary_embedding import get_rope

    parameters = {"rope_theta": 1e6, "rope_type": "default", "partial_rotary_factor": rotated / WIDTH}
    theirs = get_rope(WIDTH, max_position=512, rope_parameters=parameters, dtype=torch.bfloat16)
    positions, q, k = torch.randint(0, 512, (70,)), half(70, HEADS * WIDTH), half(70, GROUPS * WIDTH)
    table = RotaryTable(frequencies(Rotary(1e6), rotated), 512, torch.bfloat16)
    for ours, rotated_by_engine in zip((q, k), theirs(positions, q.clone(), k.clone()), strict=True):
        assert torch.equal(table.rotate(ours.view(70, -1, WIDTH), positions).flatten(1), rotated_by_engine)


@pytest.mark.parametrize("window", [0, 48], ids=["all keys", "window"])
def test_attention_is_the_same_token_by_token(window: int) -> None:
    """One pass over whole sequences gives what its steps of one token do, in batches of any size, on two threads."""
    torch.set_num_threads(2)
    lengths = np.array([3, 2100, 64, 129])
    q, k, v = (half(lengths.sum(), heads, WIDTH) for heads in (HEADS, GROUPS, GROUPS))
    settings: dict[str, Any] = {"scale": WIDTH**-0.5, "window": window}
    whole = attention.attend(q, k, v, lengths, lengths, **settings)
    starts = lengths.cumsum() - lengths
    for batch in ([1], [1, 2, 3], [0, 1, 2, 3]):
        for back in (0, 1, 60, 1400):
            seen = np.maximum(lengths[batch] - back, 1)
            keys = ranges(starts[batch], seen)
            last = starts[batch] + seen - 1
            step = attention.attend(q[last], k[keys], v[keys], np.ones(len(batch), np.int64), seen, **settings)
            assert torch.equal(step, whole[last])


def test_attention_has_the_gradient_of_the_usual_one() -> None:
    lengths = [16, 48, 32]
    row = PackedRow.from_lengths(lengths, torch.device("cpu"), "packed")
    plain = PackedAttention(config=config())
    exact: Any = ExactAttention(config=config())
    exact.rotary = RotaryTable(frequencies(Rotary(1e4), WIDTH), 64, torch.bfloat16)
    inputs = [half(96, 1, heads, WIDTH).requires_grad_() for heads in (HEADS, GROUPS, GROUPS)]
    out = exact(*inputs, None, packed_seq_params=row)
    direction = torch.randn_like(out)
    found = torch.autograd.grad(out, inputs, direction)
    assert row.positions is not None
    q, k = (exact.rotary.rotate(x[:, 0], row.positions)[:, None] for x in inputs[:2])
    usual = plain(q, k, inputs[2], None, packed_seq_params=row)
    torch.testing.assert_close(out, usual, rtol=0.02, atol=0.02)
    for ours, expected in zip(found, torch.autograd.grad(usual, inputs, direction), strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=0)


def test_products_of_rows_do_not_depend_on_other_rows() -> None:
    for inner, out in ((192, 96), (3072, 256)):
        x, weight = half(300, inner), half(out, inner, scale=inner**-0.5)
        whole = row_product(x, weight)
        for count in (1, 2, 17, 33, 129, 257):
            assert torch.equal(row_product(x[7 : 7 + count], weight), whole[7 : 7 + count])
        assert torch.equal(row_product(x, weight[: out // 2]), whole[:, : out // 2])


def test_products_of_blocks_do_not_depend_on_the_ranks() -> None:
    x, weight = half(40, 1, 384), half(64, 384, scale=0.05)
    of_one_rank = block_product(x, weight, 4)
    halves = [block_product(a, b, 2) for a, b in zip(x.chunk(2, -1), weight.chunk(2, -1), strict=True)]
    quarters = [block_product(a, b, 1) for a, b in zip(x.chunk(4, -1), weight.chunk(4, -1), strict=True)]
    assert torch.equal(halves[0] + halves[1], of_one_rank)
    assert torch.equal((quarters[0] + quarters[1]) + (quarters[2] + quarters[3]), of_one_rank)
    assert not torch.equal(block_product(x, weight, 1), of_one_rank)
    torch.testing.assert_close(of_one_rank, x.float() @ weight.float().T, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_gradients_of_confident_tokens_are_those_of_float64(temperature: float) -> None:
    """Where a probability is nearly 1, logits rounded otherwise than in the forward pass would dominate its slope."""
    vocabulary, tokens = 500, 64
    hidden = half(tokens, 64).requires_grad_()
    targets = torch.arange(tokens)
    with torch.no_grad():
        # Each target's row of the head has a large logit for its own hidden state.
        directions = hidden / hidden.float().square().sum(-1, keepdim=True)
        weight = half(vocabulary, 64, scale=0.1)
        weight[:tokens] += (torch.linspace(6, 16, tokens)[:, None] * directions).bfloat16()
    found, _ = vocab_parallel_logprobs(
        hidden, weight, targets, first_token_id=0, group=None, temperature=temperature, chunk_tokens=32,
        function=ExactLogprobs,
    )  # fmt: skip
    [ours] = torch.autograd.grad(found.sum(), hidden)
    wide = hidden.detach().double().requires_grad_()
    logits = wide @ weight.double().T
    # The forward pass rounds logits to bfloat16; the slope is taken at these values.
    rounded = logits + (row_product(hidden.detach(), weight).double() - logits).detach()
    expected = torch.autograd.grad((rounded / temperature).log_softmax(-1).gather(1, targets[:, None]).sum(), wide)[0]
    errors = (ours.double() - expected).norm(dim=-1)
    # float32 knows 1 - p to 1e-7 only.
    assert (errors < 0.03 * expected.norm(dim=-1) + 1e-5).all()


@pytest.mark.parametrize("is_truncated", [False, True], ids=["whole vocabulary", "sets"])
def test_logprobs_are_those_of_the_engines_sampler(is_truncated: bool) -> None:
    vocabulary, tokens = 433, 70
    hidden, weight = half(tokens, 64).requires_grad_(), half(vocabulary, 64, scale=0.3).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,))
    temperature = torch.rand(tokens) + 0.5
    support, outside = None, torch.zeros(tokens, vocabulary, dtype=torch.bool)
    if is_truncated:
        sets = [torch.tensor([int(target), (int(target) + 5) % vocabulary]) for target in targets]
        counts = torch.tensor([2] * (tokens - 1) + [0])
        support = Support(torch.cat(sets[:-1]), counts)
        outside = torch.ones_like(outside).scatter(1, torch.stack(sets), False)
        outside[-1] = False
    # The order of vLLM's sampler: float32 logits, temperature, masks, log_softmax.
    logits = row_product(hidden.detach(), weight.detach()).float().div_(temperature[:, None])
    engine = logits.masked_fill_(outside, -torch.inf).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    settings: dict[str, Any] = dict(
        first_token_id=0, group=None, temperature=temperature, chunk_tokens=32, support=support
    )
    found = vocab_parallel_logprobs(hidden, weight, targets, **settings, function=ExactLogprobs)
    assert torch.equal(found[0], engine)
    usual = vocab_parallel_logprobs(hidden, weight, targets, **settings)
    for ours, expected in zip(found, usual, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0.05, atol=0.05)
    directions = torch.randn(2, tokens)
    ours, expected = (torch.autograd.grad(each, (hidden, weight), tuple(directions)) for each in (found, usual))
    for one, other in zip(ours, expected, strict=True):
        assert (one - other).float().norm() < 0.02 * other.float().norm()


def test_padding_after_a_sequence_of_full_length_has_angles() -> None:
    table = RotaryTable(frequencies(Rotary(1e4), WIDTH), 8, torch.bfloat16)
    x = half(10, 2, WIDTH)
    rotated = table.rotate(x, torch.arange(10))
    assert torch.equal(rotated[:8], table.rotate(x[:8], torch.arange(8)))


def test_an_exact_engine_does_not_split_keys_over_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_ATTN_SPLIT_KV", "1")
    libraries.prepare_vllm()
    from vllm import envs

    engine.fix_attention_order()
    assert envs.VLLM_CPU_ATTN_SPLIT_KV is False
