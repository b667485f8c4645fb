"""Source and destination layouts of the live reshard on all ranks, for shared or separate trainer and engine ranks."""

from __future__ import annotations

from typing import NamedTuple

from megarl.config import LoraConfig
from megarl.config.parallel import ParallelConfig
from megarl.families.shape import ModelShape, padded_vocab_size
from megarl.reshard.layouts.lora import adapter_layouts
from megarl.reshard.layouts.megatron import megatron_layouts
from megarl.reshard.layouts.vllm_adapters import VllmAdapterLayouts
from megarl.reshard.layouts.vllm_computed import VllmLayouts
from megarl.reshard.world import Layouts, PlacedLayouts


class ReshardLayouts(NamedTuple):
    """The computed layouts of trainer and engines on all ranks, and the first rank with an engine."""

    sources: Layouts
    destinations: Layouts
    first_engine: int


def make_reshard_layouts(
    model: ModelShape,
    parallel: ParallelConfig,
    num_ranks: int,
    *,
    transformer_engine: bool = False,
    engine: ModelShape | None = None,
    adapter: LoraConfig | None = None,
) -> ReshardLayouts:
    """Return the layouts of trainer and engines over `num_ranks` ranks.

    With separate engines, only the running replicas count. `engine`: the engines' model if it has fewer tensors than
    `model`. With `adapter`, the layouts describe the matrices of a LoRA adapter.
    """
    padded_size = padded_vocab_size(model.vocab_size, parallel.tp)
    trainer = megatron_layouts(model, parallel, padded_vocab_size=padded_size, transformer_engine=transformer_engine)
    first_engine = parallel.world_size if parallel.is_separate else 0
    engines = VllmLayouts(engine or model, parallel.rollout_tp, num_ranks - first_engine, parallel.rollout_ep)
    if adapter is None:
        return _place_layouts(trainer, engines, first_engine, num_ranks)
    targets, rank = adapter.targets, adapter.rank
    return _place_layouts(
        adapter_layouts(trainer, targets, rank), VllmAdapterLayouts(engines, targets, rank), first_engine, num_ranks
    )


def _place_layouts(trainer: Layouts, engines: Layouts, first_engine: int, num_ranks: int) -> ReshardLayouts:
    if not first_engine:
        return ReshardLayouts(trainer, engines, first_engine)
    return ReshardLayouts(
        PlacedLayouts(trainer, 0, num_ranks), PlacedLayouts(engines, first_engine, num_ranks), first_engine
    )
