"""Dispatch of tokens to experts, with counts that the host knows before the pass."""

from __future__ import annotations

from typing import Any, NamedTuple

from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor


class ExpertCounts(NamedTuple):
    """Token counts of one row and one layer, int64 in host memory. A token counts once for each of its experts.

    `sent` [experts]: tokens that this rank sends to each expert. `received` [ranks of the expert group, own experts]:
    tokens that each rank sends to each expert of this rank. The expert group has ep * etp ranks.
    """

    sent: Tensor
    received: Tensor


def takes_known_counts(config: TransformerConfig) -> bool:
    """Return whether replayed experts determine all counts, because no token is dropped or added."""
    return (
        config.moe_enable_routing_replay
        and config.moe_token_dispatcher_type == "alltoall"
        and config.moe_expert_capacity_factor is None
        and not config.moe_router_padding_for_quantization
    )


class KnownCountsDispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's all-to-all dispatcher. With `counts` set, the host does not wait for the device.

    Megatron-Core 0.16.1 counts tokens on the device in each layer and pass, and the host waits for the counts. Router
    replay knows the experts earlier, so `counts` is computed before the pass.
    """

    counts: ExpertCounts | None = None

    def preprocess(self, routing_map: Tensor) -> Tensor:
        """Set the sizes of the exchanges. Return the tokens for each expert of this rank: [own experts].

        `routing_map` [tokens, experts] is True where a token goes to an expert.
        """
        if self.counts is None:
            return super().preprocess(routing_map)
        sent, received = self.counts
        self.num_out_tokens = routing_map.size(0) * self.config.moe_router_topk
        num_counted = int(sent.sum())
        if num_counted != self.num_out_tokens:
            raise AssertionError(
                f"router replay: {num_counted} pairs of token and expert were counted before the pass, but the pass "
                f"routes {self.num_out_tokens}"
            )
        # Megatron orders the expert group's ranks by ep, then etp; it sorts received tokens by etp, then ep.
        counts_by_rank = received.view(self.ep_size, self.tp_size, self.num_local_experts).transpose(0, 1).contiguous()
        num_from_rank = counts_by_rank.sum(2)
        self.input_splits: Any = sent.view(self.ep_size, self.num_local_experts).sum(1).numpy()
        self.output_splits: Any = num_from_rank[self.tp_rank].numpy()
        self.output_splits_tp: Any = num_from_rank.sum(1).numpy()
        if self.num_local_experts > 1:
            # Transformer Engine's fused permutation reads these sizes on the device, Megatron's own on the host.
            self.num_global_tokens_per_local_expert = counts_by_rank.view(-1, self.num_local_experts).to(
                self.permute_idx_device, non_blocking=True
            )
        return counts_by_rank.sum((0, 1))

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Tensor | None = None) -> Any:
        # Megatron's method copies sizes to the host and waits. Known counts are already there.
        if self.counts is not None:
            return tokens_per_expert
        return super()._maybe_dtoh_and_synchronize(point, tokens_per_expert)


class ReplayedMoELayer(MoELayer):
    """Megatron's MoE layer with `KnownCountsDispatcher`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        dispatcher: Any = self.token_dispatcher
        # Megatron-Core 0.16.1 chooses the dispatcher's class itself; the layer has no parameter for it.
        dispatcher.__class__ = KnownCountsDispatcher
