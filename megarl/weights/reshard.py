"""The live reshard: from the trainer's parameters into the engine's, planned once and carried out every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.weights.boxes import Layout
from megarl.weights.plan import make_plan
from megarl.weights.staging import gathered
from megarl.weights.transport import Transport


class Reshard:
    """The plan between two layouts over the whole world, bound to this rank's tensors.

    `sources` and `destinations` are all ranks' layouts; `recorded` is what this rank's engine says of its own. Where it
    says the same on every rank, the plan needs no exchange but of digests; else the recorded layouts are exchanged and
    count. Making one is a collective. Raises RuntimeError if the ranks arrive at different plans.
    """

    def __init__(
        self,
        sources: Sequence[Layout],
        destinations: Sequence[Layout] | None,
        recorded: Layout,
        source_parameters: Mapping[str, Tensor],
        destination_parameters: Mapping[str, Tensor],
        *,
        dtype: torch.dtype,
        bucket_bytes: int,
        ranks_per_node: int,
    ) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        nodes = [r // ranks_per_node for r in range(world)]
        as_computed = destinations is not None and set(recorded) == set(destinations[rank])
        self.is_computed = all(gathered(as_computed))
        wanted = destinations if self.is_computed and destinations is not None else gathered(recorded)
        plan = make_plan(sources, wanted, itemsize=dtype.itemsize, bucket_bytes=bucket_bytes, nodes=nodes)
        digests = gathered(plan.digest())
        if len(set(digests)) > 1:
            raise RuntimeError(f"the ranks made different reshard plans: {digests}")
        self._transport = Transport(plan.for_rank(rank), source_parameters, destination_parameters, dtype=dtype)

    def run(self) -> dict[str, float]:
        """Move all weights, in lockstep with the other ranks. Returns seconds and bytes by stage."""
        return self._transport.reshard()
