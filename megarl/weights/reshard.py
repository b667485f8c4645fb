"""The live reshard: from the trainer's parameters into the engine's, planned once and carried out every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.weights.boxes import Layout
from megarl.weights.plan import make_plan
from megarl.weights.transport import Transport


class Reshard:
    """The plan between two layouts over the whole world, bound to this rank's tensors.

    `sources` are all ranks' layouts, `destination` is this rank's: what the engines recorded is exchanged here, so
    making one is a collective. Raises RuntimeError if the ranks arrive at different plans.
    """

    def __init__(
        self,
        sources: Sequence[Layout],
        destination: Layout,
        source_parameters: Mapping[str, Tensor],
        destination_parameters: Mapping[str, Tensor],
        *,
        dtype: torch.dtype,
        bucket_bytes: int,
        ranks_per_node: int,
    ) -> None:
        world = dist.get_world_size()
        destinations: list[Layout] = [()] * world
        dist.all_gather_object(destinations, destination)
        nodes = [rank // ranks_per_node for rank in range(world)]
        plan = make_plan(sources, destinations, itemsize=dtype.itemsize, bucket_bytes=bucket_bytes, nodes=nodes)
        digests = [""] * world
        dist.all_gather_object(digests, plan.digest())
        if len(set(digests)) > 1:
            raise RuntimeError(f"the ranks made different reshard plans: {digests}")
        self.statistics = plan.statistics()
        self._transport = Transport(
            plan.for_rank(dist.get_rank()), source_parameters, destination_parameters, dtype=dtype
        )

    def run(self) -> dict[str, float]:
        """Move all weights, in lockstep with the other ranks. Returns seconds and bytes by stage."""
        return self._transport.reshard()
