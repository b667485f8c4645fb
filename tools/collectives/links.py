"""Bytes of a job's calls by kind of link: within a node, between nodes on one rail, and through a switch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from tools.collectives.programs import EVERY_OTHER, Job, Program

LINKS = ("node", "rail", "switch")
"""Kinds of links: NVLink within a node; between GPUs of equal place in two nodes; between other GPUs."""
_ITEM_BYTES = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2, "int8": 1, "uint8": 1,
    "bool": 1,
}  # fmt: skip
_WHOLE = {"all_reduce": 2, "broadcast": 1}
"""Passes of a ring over the whole tensor."""
_PARTS = ("all_gather", "reduce_scatter")
"""Collectives whose size is that of one rank's part; one pass over all parts."""


def link_bytes(job: Job, ranks_per_node: int) -> dict[str, float]:
    """Return the bytes that cross each kind of link, summed over all ranks, for the calls on devices.

    Messages and exchanges of all with all go from rank to rank. Other collectives run in a ring over the members, node
    by node, as NCCL's rings do. A ring's link between two nodes is a rail if the nodes have members of equal place.
    """
    sums = [_Sums(program) for program in job.programs]
    num_bytes_of: dict[str, float] = dict.fromkeys(LINKS, 0.0)
    first_ranks = {group.ranks[0]: None for group in job.groups}
    for rank, program in enumerate(job.ranks):
        of_program = sums[program.program]
        for slot, by_peer in of_program.pairs.items():
            members = job.groups[program.group(slot)].ranks
            for peer, num_bytes in by_peer.items():
                for receiver in members if peer == EVERY_OTHER else (members[peer],):
                    if receiver != rank:
                        num_bytes_of[_link(rank, receiver, ranks_per_node)] += num_bytes
        if rank not in first_ranks:
            continue
        for slot, num_bytes in of_program.rings.items():
            members = job.groups[program.group(slot)].ranks
            # All members make the same calls, so the first one's are counted.
            if members[0] == rank:
                crossing = (len(members) - 1) * (of_program.parts[slot] + num_bytes / len(members))
                for link, count in _ring_links(members, ranks_per_node).items():
                    num_bytes_of[link] += count * crossing
    return num_bytes_of


class _Sums:
    """Bytes of a program by group: of collectives in a ring, and sent to each group rank."""

    def __init__(self, program: Program) -> None:
        self.rings: dict[int, float] = defaultdict(float)
        """Bytes of whole tensors, times passes."""
        self.parts: dict[int, float] = defaultdict(float)
        self.pairs: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        for call in program.calls:
            if call.on_host:
                continue
            itemsize = _ITEM_BYTES.get(call.dtype, 0)
            for peer, numel in call.sends:
                self.pairs[call.group][peer] += numel * itemsize
            self.rings[call.group] += _WHOLE.get(call.operation, 0) * call.size * itemsize
            if call.operation in _PARTS:
                self.parts[call.group] += call.size * itemsize


def _link(a: int, b: int, ranks_per_node: int) -> str:
    if a // ranks_per_node == b // ranks_per_node:
        return "node"
    return "rail" if a % ranks_per_node == b % ranks_per_node else "switch"


def _ring_links(members: Sequence[int], ranks_per_node: int) -> dict[str, int]:
    """Return the number of links of each kind in a ring over the members."""
    places: dict[int, set[int]] = defaultdict(set)
    for rank in members:
        places[rank // ranks_per_node].add(rank % ranks_per_node)
    nodes = sorted(places)
    counts = Counter({"node": len(members) - (len(nodes) if len(nodes) > 1 else 0)})
    if len(nodes) > 1:
        for node, next_node in zip(nodes, [*nodes[1:], nodes[0]], strict=True):
            counts["rail" if places[node] & places[next_node] else "switch"] += 1
    return dict(counts)
