"""Sources and destinations of the live reshard on all its ranks, whether or not trainer and engines share them."""

from __future__ import annotations

from typing import NamedTuple

from megarl.config.parallel import ParallelConfig
from megarl.families.shape import ModelShape, padded_vocab_size
from megarl.reshard.layouts.megatron import megatron_layouts
from megarl.reshard.layouts.vllm_computed import VllmLayouts
from megarl.reshard.world import Layouts, PlacedLayouts


class Ends(NamedTuple):
    """The trainer's and the engines' computed layouts, each on all ranks of the reshard; the first with an engine."""

    sources: Layouts
    destinations: Layouts
    first_engine: int


def reshard_ends(
    model: ModelShape, parallel: ParallelConfig, num_ranks: int, *, transformer_engine: bool = False
) -> Ends:
    """Both ends over `num_ranks` ranks: of separate engines those of the replicas that take part."""
    padded = padded_vocab_size(model.vocab_size, parallel.tp)
    trainer = megatron_layouts(model, parallel, padded_vocab_size=padded, transformer_engine=transformer_engine)
    first = parallel.world_size if parallel.is_separate else 0
    engines = VllmLayouts(model, parallel.rollout_tp, num_ranks - first, parallel.rollout_ep)
    if not first:
        return Ends(trainer, engines, first)
    return Ends(PlacedLayouts(trainer, 0, num_ranks), PlacedLayouts(engines, first, num_ranks), first)
