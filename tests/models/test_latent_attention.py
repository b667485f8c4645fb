"""Latent attention over packed rows against transformers' attention of DeepSeek-V3, sequence by sequence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megarl.families.config_json.rotary import Rotary
from megarl.models.attention import PackedAttention, PackedRow
from megarl.models.latent_attention import RowRotary, with_padded_values
from megarl.models.rotary import frequencies
from tests.rank_pool import RankPool

LENGTHS = [12, 4, 36]
HIDDEN, HEADS, NOPE, ROPE, VALUE, LATENT = 24, 4, 6, 8, 10, 16
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
CASES = {
    "rope, no query latent": (None, {"rope_type": "default", "rope_theta": 100.0}),
    "yarn": (20, YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}),
}
"""Query rank and rope_parameters. Ranks and sizes have no common factors that could hide a permutation."""
NAMES = {
    "q_proj": "linear_q_proj",
    "q_a_proj": "linear_q_down_proj",
    "q_a_layernorm": "q_layernorm",
    "q_b_proj": "linear_q_up_proj",
    "kv_a_proj_with_mqa": "linear_kv_down_proj",
    "kv_a_layernorm": "kv_layernorm",
    "kv_b_proj": "linear_kv_up_proj",
    "o_proj": "linear_proj",
}
"""Megatron's modules by transformers' names."""
SPLIT = {"linear_q_proj": 0, "linear_q_up_proj": 0, "linear_kv_up_proj": 0, "linear_proj": 1}
"""Dimensions split by tensor parallelism; all other weights are replicated."""


def rotary_of(rope: dict[str, Any]) -> tuple[Rotary, float]:
    """Return the rotary embeddings of rope_parameters and the factor of the attention scores, written out."""
    if rope["rope_type"] == "default":
        return Rotary(rope["rope_theta"]), 1.0
    # 0.1 * ln(4) = 0.138629...
    small, large = (1 + 0.1386294361 * rope[name] for name in ("mscale", "mscale_all_dim"))
    rotary = Rotary(
        rope["rope_theta"],
        "yarn",
        rope["factor"],
        rope["original_max_position_embeddings"],
        attention_factor=small / large,
    )
    return rotary, large**2


def their_attention(case: str, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """Return transformers' attention and rotary embedding, with the same weights on every call."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

    query_rank, rope = CASES[case]
    config = DeepseekV3Config(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        q_lora_rank=query_rank,
        kv_lora_rank=LATENT,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE,
        v_head_dim=VALUE,
        rope_parameters=rope,
        max_position_embeddings=64,
        attn_implementation="eager",
    )
    torch.manual_seed(3)
    attention = DeepseekV3Attention(config, layer_idx=0)
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.3)
    return attention.to(dtype), DeepseekV3RotaryEmbedding(config)


def inputs() -> tuple[Tensor, Tensor]:
    """Return hidden states and the direction of the gradient, float64 [tokens, hidden]."""
    generator = torch.Generator().manual_seed(5)
    return (
        torch.randn(sum(LENGTHS), HIDDEN, dtype=torch.float64, generator=generator),
        torch.randn(sum(LENGTHS), HIDDEN, dtype=torch.float64, generator=generator),
    )


def expected(case: str, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    """Return transformers' output [tokens, hidden] and gradients by Megatron's names, in a dtype."""
    attention, rotary = their_attention(case, dtype)
    hidden, direction = inputs()
    leaf = hidden.to(dtype).requires_grad_()
    outs = []
    for part in leaf.split(LENGTHS):
        future = torch.full((len(part), len(part)), -torch.inf, dtype=dtype).triu(1)
        positions = rotary(part[None], torch.arange(len(part))[None])
        outs.append(attention(part[None], positions, future[None, None])[0][0])
    out = torch.cat(outs)
    out.backward(direction.to(dtype))
    assert leaf.grad is not None
    found = {NAMES[name.split(".")[0]]: weight.grad for name, weight in attention.named_parameters()}
    return out.detach(), {"hidden": leaf.grad} | {name: grad for name, grad in found.items() if grad is not None}


def own_output(case: str, tp: int, cp: int, qkv_format: str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return this rank's tokens [n], the output of them [n, hidden] and gradients, in float32 with Megatron's module.

    Gradients of replicated weights are summed over tensor-parallel ranks, all over context-parallel ranks.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    from megarl.models.latent_attention import use_local_modules
    from megarl.models.norms import RMSNorm

    parallel_state.initialize_model_parallel(tp, context_parallel_size=cp, create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(1)
    query_rank, rope = CASES[case]
    rotary, factor = rotary_of(rope)
    config = MLATransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        q_lora_rank=query_rank,  # pyright: ignore[reportArgumentType]  (None means no latent, too)
        kv_lora_rank=LATENT,
        qk_head_dim=NOPE,
        qk_pos_emb_head_dim=ROPE,
        v_head_dim=VALUE,
        qk_layernorm=True,
        add_bias_linear=False,
        layernorm_epsilon=1e-6,
        attention_dropout=0.0,
        rotary_scaling_factor=1.0,
        softmax_scale=factor * (NOPE + ROPE) ** -0.5,
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        sequence_parallel=tp > 1,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
    )
    layer = get_gpt_layer_local_spec(qk_layernorm=True, multi_latent_attention=True, normalization="RMSNorm")
    use_local_modules(layer, RMSNorm)
    layer.submodules.self_attention.submodules.core_attention = PackedAttention
    attention = build_module(layer.submodules.self_attention, config=config, layer_number=1)
    attention.rotary_pos_emb = RowRotary(frequencies(rotary, ROPE), rotary.attention_factor)
    attention.core_attention.scale *= factor
    theirs = dict(their_attention(case, torch.float32)[0].named_parameters())
    own = dict(attention.named_parameters())
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    for name, weight in theirs.items():
        module = NAMES[name.split(".")[0]]
        dim = SPLIT.get(module)
        part = weight.detach() if dim is None else weight.detach().chunk(tp, dim)[tp_rank]
        own[f"{module}.weight"].data.copy_(part)
    hidden, direction = (x.float()[:, None] for x in inputs())
    cp_rank = parallel_state.get_context_parallel_rank()
    row = PackedRow.from_lengths(LENGTHS, torch.device("cpu"), qkv_format, cp=cp, cp_rank=cp_rank)
    assert row.local is not None
    places = row.local.chunk(tp)[tp_rank]
    leaf = hidden[places].requires_grad_()
    out, _ = attention(leaf, None, packed_seq_params=row)
    out.backward(direction[places])
    assert leaf.grad is not None
    grads = {name.removesuffix(".weight"): weight.grad for name, weight in own.items() if weight.grad is not None}
    assert len(grads) == len(own)
    for name, grad in grads.items():
        if name not in SPLIT:
            assert tp == 1 or own[f"{name}.weight"].sequence_parallel, name  # pyright: ignore[reportAttributeAccessIssue]
            dist.all_reduce(grad)
        elif cp > 1:
            dist.all_reduce(grad)
    return places, out.detach().squeeze(1), grads | {"hidden": leaf.grad.squeeze(1)}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("tp", "cp", "qkv_format"), [(1, 1, "packed"), (2, 1, "packed"), (1, 2, "packed"), (1, 2, "thd")]
)
def test_packed_rows_are_sequences(ranks: RankPool, case: str, tp: int, cp: int, qkv_format: str) -> None:
    exact, exact_grads = expected(case, torch.float64)
    results = ranks.run(own_output, case, tp, cp, qkv_format, world_size=tp * cp)
    for places, out, _ in results:
        torch.testing.assert_close(out.double(), exact[places], rtol=0, atol=1e-5)
    norm = sum(grad.square().sum() for grad in exact_grads.values()) ** 0.5
    for rank, (places, _, grads) in enumerate(results):
        error = torch.zeros((), dtype=torch.float64)
        for name, grad in exact_grads.items():
            is_split = name in SPLIT and tp > 1
            wanted = grad.chunk(tp, SPLIT[name])[rank] if is_split else grad[places] if name == "hidden" else grad
            error += (grads[name].double() - wanted).square().sum()
        assert error**0.5 < 1e-6 * norm


def test_tables_of_the_fused_kernel_are_megatrons() -> None:
    from megatron.core.models.common.embeddings import YarnRotaryEmbedding

    rotary, _ = rotary_of(CASES["yarn"][1])
    theirs = YarnRotaryEmbedding(
        ROPE,
        rotary_base=rotary.theta,
        scaling_factor=rotary.factor,
        original_max_position_embeddings=16,
        mscale=0.7,
        mscale_all_dim=1.3,
        use_cpu_initialization=True,
    )
    own = RowRotary(frequencies(rotary, ROPE), rotary.attention_factor)
    for length in (5, 64, 30):
        expected = theirs.get_cached_cos_sin(length, dtype=torch.float32, packed_seq=True)
        for got, wanted in zip(own.get_cached_cos_sin(length, torch.float32, packed_seq=True), expected, strict=True):
            assert got.is_contiguous()
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6)


class EqualHeads(nn.Module):
    """A core attention in Transformer Engine's manner: equal head sizes, heads and channels joined in the output."""

    def __init__(self, *, k_channels: int, v_channels: int) -> None:
        super().__init__()
        self.attention = PackedAttention(
            config=SimpleNamespace(
                kv_channels=k_channels, window_size=None, window_attn_skip_freq=None, softmax_type="vanilla"
            )
        )  # pyright: ignore[reportArgumentType]
        assert k_channels == v_channels

    def forward(self, query: Tensor, key: Tensor, value: Tensor, row: PackedRow) -> Tensor:
        assert key.shape == value.shape
        return self.attention(query, key, value, None, packed_seq_params=row).squeeze(1)


def test_padded_values() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(9, 4, width, generator=generator, requires_grad=True) for width in (6, 6, 4))
    row = PackedRow.from_lengths([2, 7], torch.device("cpu"), "thd")
    padded = with_padded_values(EqualHeads)(k_channels=6, v_channels=4)
    out = padded(q, k, v, row)
    expected = padded.attention(q, k, v, None, packed_seq_params=row).squeeze(1)  # pyright: ignore[reportCallIssue]
    assert out.shape == (9, 16)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
    (got,), (wanted,) = (torch.autograd.grad(x.square().sum(), v, retain_graph=True) for x in (out, expected))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6)
