"""The ranks of a data-parallel replica: the first rank passes the driver's rows on to the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from megarl.config.parallel import ParallelConfig
from megarl.data.token_batch import TokenBatch
from megarl.groups import signed
from megarl.groups.backends import HOST_ONLY

_BLOCK_BYTES = 1 << 20
"""Bytes of a batch's first broadcast. The rest of a longer batch needs a second one."""


class Replica:
    """The data-parallel replica of this rank. Building it is a collective over the world.

    It has its own gloo group: in one of Megatron's groups, a stage waiting for rows would delay other replicas too.
    """

    def __init__(self, parallel: ParallelConfig) -> None:
        """Create the groups of all replicas, and keep this rank's."""
        rank = dist.get_rank()
        self._group: dist.ProcessGroup | None = None
        for replica_number in range(parallel.dp):
            replica_ranks = parallel.replica_ranks(replica_number)
            if len(replica_ranks) == 1:
                continue
            # torch requires all ranks for the creation of any group.
            group = dist.new_group(sorted(replica_ranks), backend=HOST_ONLY, group_desc="rows of a replica")
            if rank in replica_ranks:
                assert isinstance(group, dist.ProcessGroup)
                self._group = group
        self._ranks = parallel.replica_ranks(parallel.coordinates(rank).dp)
        self._first_rank = self._ranks[0]

    def share_rows(self, rows: Sequence[TokenBatch] | None) -> Sequence[TokenBatch]:
        """Broadcast the rows of the replica's first rank; other ranks pass None. A collective of the replica."""
        if self._group is None:
            assert rows is not None
            return rows
        conversation = signed.channel_between("rows", self._ranks)
        return signed.broadcast(conversation, rows, self._group, self._first_rank, _BLOCK_BYTES)

    def close(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)
