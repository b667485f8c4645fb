"""Router replay: the forward pass sends each token to the experts that the engine chose for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.transformer.moe.router_replay import RouterReplayAction
from torch import Tensor

from megarl.models.experts.dispatch import ExpertCounts
from megarl.models.experts.layers import has_router


def routed_layers(chunk: Any) -> list[Any]:
    """Return a model chunk's layers with a router, without draft layers."""
    return [layer for layer in chunk.decoder.layers if has_router(layer)]


def expert_layers(chunks: Sequence[Any]) -> list[int]:
    """Return the numbers, from 0, of the layers with experts in a rank's chunks."""
    return [layer.layer_number - 1 for chunk in chunks for layer in routed_layers(chunk)]


def replay_routes(
    chunk: Any, routes: Tensor, layer_numbers: Sequence[int], counts: Sequence[ExpertCounts | None]
) -> None:
    """Set the experts of a chunk's next forward pass.

    Shapes: routes int64 [tokens of this rank, layers, top_k]; layer_numbers [layers], the rank's layers with experts,
    numbered from 0; counts [layers], the tokens per expert (None: the layer counts itself).
    """
    for layer in routed_layers(chunk):
        index = layer_numbers.index(layer.layer_number - 1)
        replay = layer.mlp.router.router_replay
        replay.target_topk_idx = routes[:, index]
        replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        layer.mlp.token_dispatcher.counts = counts[index]


def stop_replay(chunk: Any) -> None:
    """End the replay: in the next forward pass a chunk's routers choose the experts themselves."""
    for layer in routed_layers(chunk):
        layer.mlp.router.router_replay.clear_router_replay_action()
        layer.mlp.token_dispatcher.counts = None
