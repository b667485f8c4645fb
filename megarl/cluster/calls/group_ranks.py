"""Rank processes of a group, reached through the agents of their nodes."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.cluster.agents.agent_link import AgentLink, RankPlace
from megarl.cluster.agents.topology import visible_gpu_variables
from megarl.cluster.ranks.messages import pack_cancel
from megarl.cluster.ranks.rank_handle import Answers, RankHandle


@dataclass(frozen=True, slots=True)
class PartOfRun:
    """Position of a group in a run of `num_ranks` ranks.

    Logs and messages use the run's rank numbers. Calls, and ranks themselves, number a group's ranks from 0. Ranks of
    all groups sign their messages to each other with `key`.
    """

    first_rank: int
    num_ranks: int
    key: bytes

    def ranks(self, world_size: int) -> range:
        return range(self.first_rank, self.first_rank + world_size)


class GroupRanks:
    """Rank processes of one group. Call `fork` first.

    `handles` is empty after the group's end. `places` are the ranks' nodes and numbers there.
    """

    def __init__(self, part: PartOfRun, places: Sequence[RankPlace]) -> None:
        self.part, self.places = part, list(places)
        self.handles: list[RankHandle] = []

    async def fork(
        self, log_folder: Path, environment: Mapping[str, str], imports: Sequence[str], timeout_seconds: float
    ) -> None:
        """Let the agents fork the rank processes. They import the modules `imports` once. Raises OSError or
        MegarlError.
        """
        log_folder.mkdir(parents=True, exist_ok=True)
        for rank in range(len(self.places)):
            rank_in_run = self.part.first_rank + rank
            self.handles.append(RankHandle(rank_in_run, log_folder / f"rank_{rank_in_run:04d}.log"))
        forks: list[Coroutine[Any, Any, None]] = []
        for agent, handles in self._group_by_agent(self.handles).items():
            variables = [
                {
                    "RANK": str(handle.rank - self.part.first_rank),
                    "WORLD_SIZE": str(len(self.places)),
                    "LOCAL_RANK": str(self._place_of(handle).local_rank),
                    "LOCAL_WORLD_SIZE": str(len(handles)),
                }
                for handle in handles
            ]
            # The recipe's variables come last and win: ranks on the CPU see no GPU.
            shared_variables = {**visible_gpu_variables(agent.introduction), **environment}
            forks.append(agent.fork(handles, variables, shared_variables, imports, timeout_seconds))
        await asyncio.gather(*forks)

    def ask(self, messages: Mapping[RankHandle, bytes]) -> tuple[Answers, list[asyncio.Future[None]]]:
        """Send a command to each rank. Return a future of each answer, and futures to wait for.

        The latter complete when all ranks have answered. One of them fails as soon as any rank fails.
        """
        loop = asyncio.get_running_loop()
        answers: Answers = {handle: loop.create_future() for handle in messages}
        return answers, [
            agent.ask({handle: messages[handle] for handle in handles}, answers)
            for agent, handles in self._group_by_agent(messages).items()
        ]

    def cancel_process_group(self, name: str, reason: str) -> None:
        """Cancel a cross-world process group on all ranks, even during a call."""
        notice = pack_cancel(name, reason)
        for agent, handles in self._group_by_agent(self.handles).items():
            agent.send_notice(handles, notice)

    async def dismiss(self, timeout_seconds: float) -> None:
        """Let the ranks exit by closing their streams of commands, and wait for their ends."""
        if not self.handles:
            return
        for agent, handles in self._group_by_agent(self.handles).items():
            agent.dismiss(handles)
        await asyncio.wait([handle.died for handle in self.handles], timeout=timeout_seconds)

    async def kill(self, timeout_seconds: float) -> None:
        """Kill all ranks, and wait for their ends. Close the connection to each agent with a rank still alive after the
        timeout.
        """
        handles, self.handles = self.handles, []
        for agent, handles_of_node in self._group_by_agent(handles).items():
            agent.kill(handles_of_node)
        if handles:
            await asyncio.wait([handle.died for handle in handles], timeout=timeout_seconds)
        for agent in self._group_by_agent(handle for handle in handles if not handle.died.done()):
            # The agent or its node is stopped. It ends its ranks when it continues.
            agent.cut()

    async def request(
        self, do: str, handles: Sequence[RankHandle], patience_seconds: float, **fields: Any
    ) -> dict[RankHandle, Any]:
        """Send request `do` (an agent's command) to the agents of these ranks' nodes. Return their answers by rank.

        Each agent answers for its own ranks. A rank's answer is None if its agent is lost, or silent for
        `patience_seconds`. Ranks that an agent leaves out of its answer are missing in the result.
        """
        handles_by_agent = self._group_by_agent(handles)
        answers = await asyncio.gather(
            *(
                agent.request(
                    do,
                    patience_seconds=patience_seconds,
                    processes=[handle.process for handle in agent_handles],
                    **fields,
                )
                for agent, agent_handles in handles_by_agent.items()
            ),
            return_exceptions=True,
        )
        results: dict[RankHandle, Any] = {}
        for agent_handles, answer in zip(handles_by_agent.values(), answers, strict=True):
            if isinstance(answer, dict):
                results |= {
                    handle: answer[str(handle.process)] for handle in agent_handles if str(handle.process) in answer
                }
            else:
                results |= dict.fromkeys(agent_handles)
        return results

    def _group_by_agent(self, handles: Iterable[RankHandle]) -> dict[AgentLink, list[RankHandle]]:
        handles_by_agent: defaultdict[AgentLink, list[RankHandle]] = defaultdict(list)
        for handle in handles:
            handles_by_agent[self._place_of(handle).agent].append(handle)
        return handles_by_agent

    def _place_of(self, handle: RankHandle) -> RankPlace:
        return self.places[handle.rank - self.part.first_rank]
