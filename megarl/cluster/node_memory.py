"""Host memory of a run's nodes: what the plan needs of each, against what the node's ranks may use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megarl.memory_plan.node_bytes import NodeRanks, RankHostBytes

_GIB = 2**30


def shortages(
    reports: Mapping[str, Mapping[str, Any]], nodes: Sequence[str], num_trainers: int, planned: RankHostBytes
) -> Iterator[str]:
    """A line for each node with less memory than its ranks are planned to take.

    `reports` are those of `NodeReport.look`, `nodes` the node of each rank; the first `num_trainers` ranks train.
    """
    for node, report in reports.items():
        trainers, others = nodes[:num_trainers].count(node), nodes[num_trainers:].count(node)
        needed = planned.of_node(NodeRanks(trainers, others))
        if needed > report["memory"]:
            yield (
                f"node {node}: its {trainers + others} ranks need {needed / _GIB:.0f} GiB of host memory, "
                f"{report['memory'] / _GIB:.0f} are there (MemTotal, or the limit of a cgroup); under Slurm ask for "
                "all with --mem=0, else offload less (trainer.offload) or take fewer ranks a node"
            )
