"""Limits on the models and copies of weights in the memory of each host of the trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

# Ranks, logs and clients' requests need the rest. Copies of training states get the same share (cluster.recover).
_SHARE = 0.75
"""Default share of a host's available memory for models and copies."""


class RankMemory(NamedTuple):
    """Memory on a rank: its host, bytes of one model, bytes of one copy of weights, and the host's available bytes."""

    host: str
    model_bytes: int
    copy_bytes: int
    available_bytes: int


@dataclass(frozen=True, slots=True)
class HostRoom:
    """Room on a host: `num_bytes` for models and copies of weights. One model needs `model_bytes` on its ranks
    together.
    """

    host: str
    num_bytes: int
    model_bytes: int
    copy_bytes: int

    def fits(self, *, num_models: int, num_copies: int) -> bool:
        return num_models * self.model_bytes + num_copies * self.copy_bytes <= self.num_bytes


class MemoryLimits:
    """The hosts of the trainer's ranks, each with `max_bytes` of room; None: a share of its available memory."""

    def __init__(self, ranks: Sequence[RankMemory], max_bytes: int | None) -> None:
        """Add up the memory of the ranks of each host. `max_bytes` None: a share of the memory available there."""
        hosts: dict[str, HostRoom] = {}
        for rank in ranks:
            host = hosts.setdefault(rank.host, HostRoom(rank.host, 0, 0, 0))
            num_bytes = int(_SHARE * rank.available_bytes) if max_bytes is None else max_bytes
            hosts[rank.host] = replace(
                host,
                # All ranks of a host see the same memory.
                num_bytes=min(num_bytes, host.num_bytes or num_bytes),
                model_bytes=host.model_bytes + rank.model_bytes,
                copy_bytes=host.copy_bytes + rank.copy_bytes,
            )
        self._hosts = list(hosts.values())

    def find_full_host(self, *, num_models: int, num_copies: int) -> HostRoom | None:
        return next((host for host in self._hosts if not host.fits(num_models=num_models, num_copies=num_copies)), None)

    def describe(self) -> str:
        """Return one line about the smallest host, for the operator."""
        host = min(self._hosts, key=lambda host: host.num_bytes / host.model_bytes)
        return (
            f"host memory for clients' models: {host.num_bytes / 2**30:.2f} GiB on {host.host}; a model takes "
            f"{host.model_bytes / 2**20:.1f} MiB there, and a copy to sample from {host.copy_bytes / 2**20:.1f} MiB"
        )
