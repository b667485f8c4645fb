"""Gated delta-net (arXiv:2412.06464) over packed rows and with context parallelism, as a module of Megatron's layers.

Megatron-Core 0.16.1's own layer supports neither packed rows nor context parallelism; 0.19's has no kernel for CPUs.
Parameters, tensor parallelism and checkpoint keys are Megatron's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn

from megarl.models.attention import PackedRow
from megarl.models.delta_net.rule import causal_convolution, gated_delta_rule, widen
from megarl.models.norms import RMSNorm


class _Inputs(NamedTuple):
    """Inputs of the delta rule for some heads, as projected: [tokens, channels of these heads]."""

    query: Tensor
    key: Tensor
    value: Tensor
    gate: Tensor
    beta: Tensor
    alpha: Tensor


class PlainRMSNorm(RMSNorm):
    """Norm of the layer's output with the factor `weight`, even if the model's other norms multiply by 1 + weight."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: object) -> None:
        super().__init__(config, hidden_size, eps)
        self.is_zero_centered = False
        nn.init.ones_(self.weight)


class DeltaNet(GatedDeltaNet):
    """A gated delta-net layer over packed rows.

    With context parallelism, an all-to-all gives each rank all tokens of some heads, in the order of the row. A second
    all-to-all returns the outputs to the tokens' ranks. Context parallelism does not change the results.
    """

    # Megatron declares these sizes as optional.
    num_key_heads: Any
    num_value_heads: Any
    key_head_dim: Any
    value_head_dim: Any
    out_norm: Any

    def __init__(self, config: TransformerConfig, submodules: GatedDeltaNetSubmodules, **settings: Any) -> None:
        # The constructor refuses to run without FLA's kernels, but this class has a substitute in torch. The flag is
        # set in the constructor's own module: 0.19 has it in another module than 0.16.1.
        GatedDeltaNet.__init__.__globals__["HAVE_FLA"] = True
        super().__init__(config, submodules, **settings)
        self.cp_group: Any = self.pg_collection.cp

    def _setup_variant_attrs(self) -> None:
        """Set sizes, and a kernel if FLA is missing: the constructor of Megatron-Core 0.19 needs one."""
        super()._setup_variant_attrs()  # pyright: ignore[reportAttributeAccessIssue]
        self.gated_delta_rule = self.gated_delta_rule or gated_delta_rule

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  (Megatron's has parameters without use here)
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *, packed_seq_params: PackedRow, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return the layer's output [tokens, 1, hidden_size] and its bias, None.

        `hidden_states` is [tokens, 1, hidden_size]; under sequence parallelism it has this tensor-parallel rank's
        tokens.
        """
        row = packed_seq_params
        projected, _bias = self.in_proj(hidden_states)
        inputs = _Inputs(*projected.squeeze(1).split(self._input_widths, dim=-1))
        gathered_index = row.gathered_index
        if gathered_index is not None:
            inputs = _Inputs(*self._exchange_for_heads(inputs, gathered_index))
        out = self._mix_heads(inputs, row)
        if gathered_index is not None:
            out = self._exchange_for_tokens(out, gathered_index)
        return self.out_proj(out.unsqueeze(1))

    @property
    def _input_widths(self) -> list[int]:
        """Channels of the six parts of the projected input on a tensor-parallel rank."""
        heads = self.num_value_heads
        return [width // self.tp_size for width in (self.qk_dim, self.qk_dim, self.v_dim, self.v_dim, heads, heads)]

    def _mix_heads(self, inputs: _Inputs, row: PackedRow) -> Tensor:
        """Return the gated and normalised outputs of this rank's heads: [tokens, heads * value_dim]."""
        lengths = _list_lengths(row, self.cp_group.size())
        qkv = torch.cat(inputs[:3], dim=-1)
        convolution_weight = torch.cat([self._select_own_heads(part) for part in self._split_convolution()])
        convolved = F.silu(convolution(qkv, convolution_weight, row.cu_seqlens_q, lengths))
        # Each query and key head serves several value heads.
        query, key, value = convolved.split([part.size(-1) for part in inputs[:3]], dim=-1)
        values_per_key = self.num_value_heads // self.num_key_heads
        query, key = (
            x.unflatten(-1, (-1, self.key_head_dim)).repeat_interleave(values_per_key, dim=1) for x in (query, key)
        )
        decay = -widen(self._select_own_heads(self.A_log)).exp() * F.softplus(
            widen(inputs.alpha) + self._select_own_heads(self.dt_bias)
        )
        out = delta_rule(
            query,
            key,
            value.unflatten(-1, (-1, self.value_head_dim)),
            decay,
            inputs.beta.sigmoid(),
            row.cu_seqlens_q,
            lengths,
        )
        gate = widen(inputs.gate.unflatten(-1, (-1, self.value_head_dim)))
        return (self.out_norm(out) * F.silu(gate)).to(out.dtype).flatten(1)

    def _split_convolution(self) -> Sequence[Tensor]:
        return self.conv1d.weight.squeeze(1).split(self._input_widths[:3])

    def _select_own_heads(self, weight: Tensor) -> Tensor:
        """Return the rows of a weight for this context-parallel rank's heads.

        All other rows have no gradient on this rank. Megatron sums the gradient over the ranks.
        """
        return weight.chunk(self.cp_group.size())[self.cp_group.rank()]

    def _exchange_for_heads(self, inputs: _Inputs, gathered_index: Tensor) -> Sequence[Tensor]:
        """Exchange [own tokens, channels] of all inputs for [all tokens of the row, channels of own heads]."""
        cp = self.cp_group.size()
        channels_by_rank = torch.cat([x.unflatten(-1, (cp, -1)) for x in inputs], dim=-1)
        received = all_to_all(self.cp_group, channels_by_rank.transpose(0, 1).contiguous()).flatten(0, 1)
        return received[gathered_index].split([x.size(-1) // cp for x in inputs], dim=-1)

    def _exchange_for_tokens(self, out: Tensor, gathered_index: Tensor) -> Tensor:
        """Exchange [all tokens of the row, channels of own heads] for [own tokens, all channels]."""
        rank_order = torch.empty_like(gathered_index).index_copy(
            0, gathered_index, torch.arange(len(gathered_index), device=gathered_index.device)
        )
        sent = out[rank_order].unflatten(0, (self.cp_group.size(), -1))
        return all_to_all(self.cp_group, sent.contiguous()).transpose(0, 1).flatten(1)


def convolution(x: Tensor, weight: Tensor, cu_seqlens: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the causal convolution of each sequence: by FLA's kernel on GPUs if installed, else by torch.

    Shapes: x [tokens, channels], weight [channels, width], cu_seqlens [sequences + 1]; returns [tokens, channels].
    """
    kernels = _fla_kernels() if x.is_cuda else None
    if kernels is not None:
        return kernels.convolution(x=x.unsqueeze(0), weight=weight, cu_seqlens=cu_seqlens)[0].squeeze(0)
    lengths_on_device = cu_seqlens.diff()
    starts = torch.repeat_interleave(cu_seqlens[:-1], lengths_on_device, output_size=sum(lengths))
    return causal_convolution(x, weight, torch.arange(len(x), device=x.device) - starts)


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    lengths: Sequence[int],
) -> Tensor:
    """Return the gated delta rule of each sequence: by FLA's kernel on GPUs if installed, else by torch.

    Shapes: query and key [tokens, heads, key_dim], value [tokens, heads, value_dim], log_decay and beta [tokens,
    heads], cu_seqlens [sequences + 1]; returns [tokens, heads, value_dim].
    """
    kernels = _fla_kernels() if value.is_cuda else None
    if kernels is None:
        return gated_delta_rule(query, key, value, log_decay, beta, lengths)
    batched = (x.unsqueeze(0).contiguous() for x in (query, key, value, log_decay, beta))
    out, _ = kernels.delta_rule(*batched, use_qk_l2norm_in_kernel=True, cu_seqlens=cu_seqlens.long())
    return out.squeeze(0)


class _Kernels(NamedTuple):
    """Functions of FLA (flash-linear-attention)."""

    convolution: Any
    delta_rule: Any


@cache
def _fla_kernels() -> _Kernels | None:
    try:
        from fla.modules.convolution import causal_conv1d  # pyright: ignore[reportMissingImports]
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    return _Kernels(causal_conv1d, chunk_gated_delta_rule)


def _list_lengths(row: PackedRow, cp: int) -> list[int]:
    # With context parallelism, a part's queries are one of 2 * cp chunks of each sequence.
    chunks_per_sequence = 1 if cp == 1 else 2 * cp
    return (row.parts[0].num_queries * chunks_per_sequence).tolist()


def delta_net_spec(*, transformer_engine: bool) -> ModuleSpec:
    """Return Megatron's spec of a delta-net. Transformer Engine's input projection contains the input norm."""
    linears = (ColumnParallelLinear, RowParallelLinear)
    if transformer_engine:
        # Only importable with Transformer Engine.
        from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear, TERowParallelLinear

        linears = (TELayerNormColumnParallelLinear, TERowParallelLinear)
    # Transformer Engine's norm would be zero-centred like the model's other norms; the output norm is not.
    modules = GatedDeltaNetSubmodules(in_proj=linears[0], out_norm=PlainRMSNorm, out_proj=linears[1])
    return ModuleSpec(module=DeltaNet, submodules=modules)


def with_delta_net(layer: Any, *, transformer_engine: bool) -> Any:
    """Return the spec of an attention layer with a delta-net in place of attention."""
    modules = replace(
        layer.submodules,
        self_attention=delta_net_spec(transformer_engine=transformer_engine),
        # Checkpoints name the input norm after the following layer.
        sharded_state_dict_keys_map={
            **layer.submodules.sharded_state_dict_keys_map,
            **({} if transformer_engine else {"input_layernorm.": "self_attention.in_proj.layer_norm_"}),
        },
    )
    return ModuleSpec(module=layer.module, submodules=modules, params=layer.params)
