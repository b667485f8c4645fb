"""Delta-net layers of Megatron's against those of transformers: packed rows, tensor and context parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megarl.config.parallel import ParallelConfig
from tests.rank_pool import RankPool

HIDDEN, KEY_HEADS, VALUE_HEADS, KEY, VALUE = 24, 4, 8, 8, 4
LENGTHS = [12, 4, 72]
"""Multiples of 4, for two context-parallel ranks; the last one has two chunks."""
BLOCKS = (KEY_HEADS * KEY, KEY_HEADS * KEY, VALUE_HEADS * VALUE, VALUE_HEADS * VALUE, VALUE_HEADS, VALUE_HEADS)


def weights() -> dict[str, torch.Tensor]:
    """Return the whole layer's weights under transformers' names for Qwen3.5, without a layer's prefix."""
    generator = torch.Generator().manual_seed(5)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    return {
        "in_proj_qkv.weight": drawn(sum(BLOCKS[:3]), HIDDEN),
        "in_proj_z.weight": drawn(BLOCKS[3], HIDDEN),
        "in_proj_b.weight": drawn(VALUE_HEADS, HIDDEN),
        "in_proj_a.weight": drawn(VALUE_HEADS, HIDDEN),
        "conv1d.weight": drawn(sum(BLOCKS[:3]), 1, 4),
        "A_log": drawn(VALUE_HEADS),
        "dt_bias": drawn(VALUE_HEADS),
        "norm.weight": 1 + drawn(VALUE),
        "out_proj.weight": drawn(HIDDEN, VALUE_HEADS * VALUE),
    }


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row's hidden states and the gradient of its output, [tokens, hidden_size] each."""
    generator = torch.Generator().manual_seed(6)
    tokens, gradient = (torch.randn(sum(LENGTHS), HIDDEN, generator=generator) for _ in range(2))
    return tokens, gradient


def cut(weight: torch.Tensor, blocks: tuple[int, ...], tp: int, rank: int) -> torch.Tensor:
    """Return a tensor-parallel rank's rows of each block."""
    return torch.cat([block.chunk(tp)[rank] for block in weight.split(blocks)])


def layer_on_ranks(parallel: ParallelConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return this rank's outputs [own tokens, hidden_size], and its gradients by Megatron's names and `input`."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.spec_utils import build_module

    from megarl.models.attention import PackedRow
    from megarl.models.delta_net.layer import delta_net_spec

    parallel_state.initialize_model_parallel(
        parallel.tp, context_parallel_size=parallel.cp, create_gloo_process_groups=False
    )
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        layernorm_zero_centered_gamma=True,
        add_bias_linear=False,
        activation_func=torch.nn.functional.silu,
        tensor_model_parallel_size=parallel.tp,
        context_parallel_size=parallel.cp,
        sequence_parallel=parallel.tp > 1,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=KEY,
        linear_value_head_dim=VALUE,
        linear_num_key_heads=KEY_HEADS,
        linear_num_value_heads=VALUE_HEADS,
        use_cpu_initialization=True,
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    layer = build_module(delta_net_spec(transformer_engine=False), config=config, layer_number=1, pg_collection=groups)
    tp, tp_rank, cp_rank = parallel.tp, groups.tp.rank(), groups.cp.rank()
    whole = weights()
    projections = torch.cat([whole[f"in_proj_{part}.weight"] for part in ("qkv", "z", "b", "a")])
    own = {
        "in_proj.weight": cut(projections, BLOCKS, tp, tp_rank),
        "conv1d.weight": cut(whole["conv1d.weight"], BLOCKS[:3], tp, tp_rank),
        "A_log": whole["A_log"].chunk(tp)[tp_rank],
        "dt_bias": whole["dt_bias"].chunk(tp)[tp_rank],
        "out_norm.weight": whole["norm.weight"],
        "out_proj.weight": whole["out_proj.weight"].chunk(tp, dim=1)[tp_rank],
    }
    parameters = dict(layer.named_parameters())
    assert parameters.keys() == own.keys()
    for name, parameter in parameters.items():
        parameter.data.copy_(own[name])
    row = PackedRow.from_lengths(LENGTHS, torch.device("cpu"), "packed", cp=parallel.cp, cp_rank=cp_rank)
    hidden, gradient = (x[row.local].chunk(tp)[tp_rank] for x in data())
    hidden = hidden.clone().requires_grad_()
    out, bias = layer(hidden.unsqueeze(1), None, packed_seq_params=row)
    assert bias is None
    out.squeeze(1).backward(gradient)
    gradients = {name: parameter.grad for name, parameter in parameters.items()}
    return out.detach().squeeze(1), {**gradients, "input": hidden.grad}


@pytest.fixture(scope="module")
def single(ranks: RankPool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    [result] = ranks.run(layer_on_ranks, ParallelConfig(1, 1, 1, 1), world_size=1)
    return result


def hugging_face_layer() -> torch.nn.Module:
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

    config = Qwen3_5TextConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_conv_kernel_dim=4,
        linear_key_head_dim=KEY,
        linear_value_head_dim=VALUE,
        linear_num_key_heads=KEY_HEADS,
        linear_num_value_heads=VALUE_HEADS,
        rms_norm_eps=1e-6,
    )
    layer = Qwen3_5GatedDeltaNet(config, 0)
    layer.load_state_dict(weights())
    return layer


def test_packed_sequences_equal_transformers_layer(single: Any) -> None:
    out, gradients = single
    layer = hugging_face_layer()
    hidden, gradient = data()
    hidden.requires_grad_()
    expected = torch.cat([layer(part[None])[0] for part in hidden.split(LENGTHS)])
    expected.backward(gradient)
    # Relative to the largest value: processors sum float32 numbers in different orders.
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5 * expected.abs().max().item())
    theirs = {name: parameter.grad for name, parameter in layer.named_parameters()}
    projections = torch.cat([theirs.pop(f"in_proj_{part}.weight") for part in ("qkv", "z", "b", "a")])
    wanted = {
        "in_proj.weight": projections,
        "out_norm.weight": theirs.pop("norm.weight"),
        "input": hidden.grad,
        **theirs,
    }
    assert gradients.keys() == wanted.keys()
    for name, values in wanted.items():
        assert (gradients[name] - values).norm() < 1e-5 * values.norm(), name


@pytest.mark.parametrize("tp, cp", [(2, 1), (1, 2), (2, 2)])
def test_parallel_ranks_compute_the_same(ranks: RankPool, single: Any, tp: int, cp: int) -> None:
    from megarl.models.attention import PackedRow

    results = ranks.run(layer_on_ranks, ParallelConfig(tp, 1, 1, tp, cp=cp), world_size=tp * cp)
    whole_out, whole = single
    sums = {name: torch.zeros_like(values) for name, values in whole.items()}
    for rank, (out, gradients) in enumerate(results):
        # Megatron numbers tensor-parallel ranks first.
        tp_rank, cp_rank = rank % tp, rank // tp
        row = PackedRow.from_lengths(LENGTHS, torch.device("cpu"), "packed", cp=cp, cp_rank=cp_rank)
        assert row.local is not None
        places = row.local.chunk(tp)[tp_rank]
        torch.testing.assert_close(out, whole_out[places], rtol=0, atol=1e-5)
        sums["input"][places] += gradients["input"]
        sums["out_norm.weight"] += gradients["out_norm.weight"]
        for name in ("A_log", "dt_bias"):
            sums[name].chunk(tp)[tp_rank].add_(gradients[name])
        sums["out_proj.weight"].chunk(tp, dim=1)[tp_rank].add_(gradients["out_proj.weight"])
        for name, blocks in (("in_proj.weight", BLOCKS), ("conv1d.weight", BLOCKS[:3])):
            parts = gradients[name].split([size // tp for size in blocks])
            for block, part in zip(sums[name].split(blocks), parts, strict=True):
                block.chunk(tp)[tp_rank].add_(part)
    for name, values in whole.items():
        assert (sums[name] - values).norm() < 1e-5 * values.norm(), name
