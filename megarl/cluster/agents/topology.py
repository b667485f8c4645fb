"""Kinds of nodes, their agents' first messages, and addresses at which they reach each other."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

_SIOCGIFADDR = 0x8915
"""Linux's ioctl that returns a network interface's IPv4 address."""


class NodeKind(NamedTuple):
    """Nodes of one kind: all nodes of the run, or those of the trainers or engines only."""

    first_rank: int
    """The first of the run's ranks on these nodes. Further ranks follow node by node."""
    nodes: int
    ranks_per_node: int
    component: int | None = None
    """The nodes' component in a heterogeneous Slurm job. None: the job has one component."""
    ray_resources: Mapping[str, float] = {}
    """Ray resources of a node, in addition to GPUs or CPUs."""


class Introduction(NamedTuple):
    """First message of an agent to the driver, about its node.

    `turn` is the node's index in the launcher's order. `host` is its host name or address. `switches` are the network
    switches above it, root first. `gpus` are the indices of GPUs that the launcher assigned. `pid` is the agent's
    process id; 0: unknown.
    """

    turn: int
    node: str
    host: str
    switches: tuple[str, ...] = ()
    gpus: tuple[int, ...] = ()
    pid: int = 0

    @classmethod
    def from_plain(cls, fields: Mapping[str, Any]) -> Introduction:
        """Read an introduction from JSON values. Raises TypeError or ValueError if it is not valid."""
        values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
        introduction = cls(**values)
        typed_values = (
            (introduction.turn, int),
            (introduction.node, str),
            (introduction.host, str),
            (introduction.pid, int),
        )
        if not all(isinstance(value, value_type) for value, value_type in typed_values):
            raise TypeError(f"the first message of an agent is not valid: {fields}")
        return introduction


def sort_by_switches(nodes: Iterable[Introduction]) -> list[Introduction]:
    """Sort nodes so that nodes under one switch are consecutive."""
    return sorted(nodes, key=lambda node: (node.switches, node.turn))


def visible_gpu_variables(node: Introduction) -> dict[str, str]:
    """Return the variable that shows a node's GPUs to its ranks; empty if the launcher assigned none.

    Every rank sees all of them, and uses the one at its local rank.
    """
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, node.gpus))} if node.gpus else {}


def find_interface(address: str) -> str | None:
    """Return the name of the network interface with this first IPv4 address, or None."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                # struct ifreq has 16 bytes for the name, with a final zero, then a sockaddr_in. Bytes 20 to 23 are the
                # address.
                request = struct.pack("256s", name.encode()[:15])
                if socket.inet_ntoa(fcntl.ioctl(sock, _SIOCGIFADDR, request)[20:24]) == address:
                    return name
    return None


def find_addresses(connections: Sequence[tuple[str, str]]) -> list[str]:
    """Return, for each rank, an address at which ranks of other nodes reach it.

    `connections` has the addresses of each rank's agent and of the driver. On the driver's own machine both may be the
    loopback address. Then the result is the driver's address on another connection, if any.
    """
    driver_address = next((driver for agent, driver in connections if agent != driver), None)
    return [(driver_address or driver) if agent == driver else agent for agent, driver in connections]
