"""The ranks of one data-parallel replica: what the driver sends the first of them, all of them get."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from megarl.config.parallel import ParallelConfig
from megarl.data.batch import TokenBatch
from megarl.platform import signed

_BLOCK_BYTES = 1 << 20
"""A broadcast has this size, which small batches fit into; longer ones take a second."""


class Replica:
    """The replica that this rank belongs to. Making one is a collective over the world.

    Its messages go over gloo, host to host: nothing of Megatron's groups is used, so that a stage that waits for its
    rows holds up nobody but its own replica.
    """

    def __init__(self, layout: ParallelConfig) -> None:
        rank = dist.get_rank()
        self._group: dist.ProcessGroup | None = None
        for replica in range(layout.dp):
            ranks = layout.replica_ranks(replica)
            if len(ranks) == 1:
                continue
            # Every rank takes part in the making of every group.
            group = dist.new_group(sorted(ranks), backend="gloo")
            if rank in ranks:
                assert isinstance(group, dist.ProcessGroup)
                self._group = group
        self._ranks = layout.replica_ranks(layout.coordinates(rank).dp)
        self._first = self._ranks[0]

    def share(self, rows: Sequence[TokenBatch] | None) -> Sequence[TokenBatch]:
        """The rows of the replica's first rank, on all of its ranks; the others pass None. A collective of theirs."""
        if self._group is None:
            assert rows is not None
            return rows
        conversation = signed.between("rows", self._ranks)
        return signed.broadcast(conversation, rows, self._group, self._first, _BLOCK_BYTES)

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
