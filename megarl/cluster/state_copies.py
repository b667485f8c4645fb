"""Copies of the training state in the agents' memory.

A copy is several files of one agent, named STEP/ORIGIN/NUM_RANKS/PART. ORIGIN is the rank that had the state, of
NUM_RANKS at that time.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.cluster.agents.agent_link import AgentLink, RankPlace
from megarl.cluster.agents.topology import find_addresses
from megarl.cluster.calls.worker_group import WorkerGroup
from megarl.reshard.state_holders import hand_overs
from megarl.types import PeerLostError

Files = Mapping[str, Mapping[str, Any]]
"""Path, bytes and checksum of files by name."""


@dataclass(frozen=True, slots=True)
class StateCopy:
    """An agent's copy of the state of rank `origin`, one of `num_ranks`, after a step."""

    agent: AgentLink
    step: int
    origin: int
    num_ranks: int
    files: dict[str, Mapping[str, Any]] = field(default_factory=dict)


async def hold(group: WorkerGroup, files_of_ranks: Sequence[Files]) -> None:
    """Let the agents open files that their ranks filled, so the files outlive the ranks.

    Raises PeerLostError or OSError.
    """
    files_by_agent: defaultdict[AgentLink, dict[str, Any]] = defaultdict(dict)
    for place, files in zip(group.places, files_of_ranks, strict=True):
        files_by_agent[place.agent] |= files
    await asyncio.gather(*(agent.request("hold", files=files) for agent, files in files_by_agent.items()))


async def list_copies(agents: Sequence[AgentLink], *, checks: bool = False) -> tuple[list[StateCopy], list[str]]:
    """Return all copies in the memory of living agents, and a sentence about each damaged copy.

    Only with `checks` do the agents look for damaged copies. These are dropped.
    """
    living_agents = _list_living(agents)
    answers = await asyncio.gather(
        *(agent.request("copies", checks=checks) for agent in living_agents), return_exceptions=True
    )
    copies: list[StateCopy] = []
    damages: list[str] = []
    for agent, answer in zip(living_agents, answers, strict=True):
        if isinstance(answer, PeerLostError):
            continue
        if isinstance(answer, BaseException):
            raise answer
        damaged_copies = {name.rpartition("/")[0] for name in answer["damaged"]}
        # A copy with one damaged file is useless, and the agent has deleted the file.
        for copy_name in sorted(damaged_copies):
            step, origin, _ = copy_name.split("/")
            damages.append(
                f"node {agent.node}: the copy of rank {origin}'s state after step {step} has changed in its memory; "
                "this copy is dropped"
            )
        # Collect the files of each intact copy.
        copies_by_name: dict[str, StateCopy] = {}
        for name, fields in answer["files"].items():
            copy_name = name.rpartition("/")[0]
            step, origin, num_ranks = map(int, copy_name.split("/"))
            if copy_name not in damaged_copies:
                copy = copies_by_name.setdefault(copy_name, StateCopy(agent, step, origin, num_ranks))
                copy.files[name] = fields
        copies += copies_by_name.values()
    return copies, damages


def _list_living(agents: Sequence[AgentLink]) -> list[AgentLink]:
    return [agent for agent in dict.fromkeys(agents) if not agent.is_lost]


def is_complete(copies: Sequence[StateCopy], step: int) -> bool:
    """Return whether every rank's state after a step has a copy."""
    step_copies = [copy for copy in copies if copy.step == step]
    return bool(step_copies) and {copy.origin for copy in step_copies} == set(range(step_copies[0].num_ranks))


async def drop_others(agents: Sequence[AgentLink], step: int | None) -> None:
    """Drop the copies of all steps except `step` (None: of all). Raises PeerLostError if an agent is lost meanwhile."""
    # No name of a file begins with a slash.
    prefix = "/" if step is None else f"{step}/"
    await asyncio.gather(*(agent.request("keep_only", prefix=prefix) for agent in _list_living(agents)))


async def files_for_ranks(agents: Sequence[AgentLink], step: int, places: Sequence[RankPlace]) -> list[Files]:
    """Return, for each rank at `places`, the files to read in a restore: all copies of a step on its node.

    A copy held on none of these nodes is first sent to one. Raises PeerLostError if an agent is lost meanwhile.
    """
    copies = [copy for copy in (await list_copies(agents))[0] if copy.step == step]
    copies_by_origin: defaultdict[int, dict[AgentLink, StateCopy]] = defaultdict(dict)
    for copy in copies:
        copies_by_origin[copy.origin][copy.agent] = copy
    nodes = list(dict.fromkeys(place.agent for place in places))
    # Send the copies that no node of these places holds.
    for origin, receiver in hand_overs(copies_by_origin, nodes).items():
        copies.append(await _send_copy(next(iter(copies_by_origin[origin].values())), receiver))
    files_by_agent: defaultdict[AgentLink, dict[str, Mapping[str, Any]]] = defaultdict(dict)
    for copy in copies:
        files_by_agent[copy.agent] |= copy.files
    return [files_by_agent[place.agent] for place in places]


async def _send_copy(copy: StateCopy, receiver: AgentLink) -> StateCopy:
    addresses = [agent.addresses or ("127.0.0.1", "127.0.0.1") for agent in (copy.agent, receiver)]
    fetch_arguments = await copy.agent.request("offer", names=list(copy.files), address=find_addresses(addresses)[0])
    await receiver.request("fetch", **fetch_arguments)
    copies, _ = await list_copies([receiver])
    return next(sent_copy for sent_copy in copies if (sent_copy.step, sent_copy.origin) == (copy.step, copy.origin))
