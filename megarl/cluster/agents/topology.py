"""Nodes of a run: their kinds, the first messages of their agents, and their addresses for other nodes."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

_SIOCGIFADDR = 0x8915
"""Number of Linux's ioctl returning the IPv4 address of a network interface."""


class NodeKind(NamedTuple):
    """The nodes of one kind: all nodes of the run, or only those of the trainers or of the engines."""

    first_rank: int
    """First rank on nodes of this kind. The other ranks follow, node by node."""
    nodes: int
    ranks_per_node: int
    component: int | None = None
    """Index of these nodes' component in a heterogeneous Slurm job; None: the job has one component."""
    ray_resources: Mapping[str, float] = {}
    """Ray resources that nodes of this kind have, in addition to GPUs or CPUs."""


class Introduction(NamedTuple):
    """First message that a node's agent sends to the driver.

    `turn` is the node's index in the launcher's order. `host` is its host name or address. `switches` are the network
    switches above it, from the root. `gpus` are its GPUs, if the launcher assigned any. `pid` is the agent's process
    id; 0: not known.
    """

    turn: int
    node: str
    host: str
    switches: tuple[str, ...] = ()
    gpus: tuple[int, ...] = ()
    pid: int = 0

    @classmethod
    def from_plain(cls, fields: Mapping[str, Any]) -> Introduction:
        """Read the first message of an agent from JSON values. Raises TypeError or ValueError if it is not valid."""
        plain: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
        process = cls(**plain)
        kinds = (process.turn, int), (process.node, str), (process.host, str), (process.pid, int)
        if not all(isinstance(value, kind) for value, kind in kinds):
            raise TypeError(f"the first message of an agent is not valid: {fields}")
        return process


def in_order(nodes: Iterable[Introduction]) -> list[Introduction]:
    """Return the nodes sorted, so that nodes under one switch are consecutive."""
    return sorted(nodes, key=lambda node: (node.switches, node.turn))


def visible_gpus(node: Introduction) -> dict[str, str]:
    """Return the variable that shows ranks the GPUs of their node; empty if the launcher assigned none.

    Every rank sees all GPUs of its node's ranks. Its own GPU is the one at its local rank.
    """
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, node.gpus))} if node.gpus else {}


def own_interface(address: str) -> str | None:
    """Return the name of the network interface whose first IPv4 address is `address`; None: there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                # struct ifreq has 16 bytes for the name, with a final zero, then a sockaddr_in. Its
                # bytes 20 to 23 are the address.
                request = struct.pack("256s", name.encode()[:15])
                if socket.inet_ntoa(fcntl.ioctl(sock, _SIOCGIFADDR, request)[20:24]) == address:
                    return name
    return None


def find_addresses(connections: Sequence[tuple[str, str]]) -> list[str]:
    """Return, for each rank, an address at which ranks of other nodes reach it.

    `connections` has, for each rank, its agent's address and the driver's on their connection. For a node that is the
    driver's machine both may be the loopback address. The result is then the address at which other machines reach the
    driver, if there are any.
    """
    outside = next((driver for agent, driver in connections if agent != driver), None)
    return [(outside or driver) if agent == driver else agent for agent, driver in connections]
