"""Places of rank processes on the nodes of a run."""

from __future__ import annotations

from typing import NamedTuple

from megarl.cluster.agent_link import AgentLink


class RankPlace(NamedTuple):
    """Place of one rank: its node's agent, the number of the node in the run, and its GPU's index on the node."""

    agent: AgentLink
    node_number: int
    local_rank: int
