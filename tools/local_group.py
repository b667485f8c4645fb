"""A group of ranks on this machine without a run around it, for benchmarks, checks and tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from megarl.cluster.calls.group_ranks import PartOfRun
from megarl.cluster.calls.worker_group import WorkerGroup
from megarl.cluster.launchers.local import LocalNodes


class LocalGroup(WorkerGroup):
    """Group of ranks with an agent of its own, which ends with the group. Call `start`.

    `imports` are modules imported once, before the first rank is forked.
    """

    def __init__(self, world_size: int, part: PartOfRun | None = None, *, imports: Sequence[str] = ()) -> None:
        super().__init__(world_size, part)
        self._imports = tuple(imports)

    async def start(
        self,
        worker: str,
        kwargs: Mapping[str, Any],
        *,
        log_folder: Path,
        start_timeout_seconds: float = 300.0,
        environment: Mapping[str, str] | None = None,
        imports: Sequence[str] = (),
    ) -> Self:
        imports = imports or self._imports
        nodes = LocalNodes(environment or {}, imports)
        self.end.resources.push_async_callback(nodes.close)
        try:
            await nodes.start(log_folder, start_timeout_seconds)
        except BaseException as error:
            await self.end.interrupt("start", error)
            raise
        used_places = {(0, number) for number in range(self.part.first_rank)}
        self.ranks.places = nodes.choose_places(self.world_size, used_places, on_one_node=True)
        return await super().start(
            worker,
            kwargs,
            log_folder=log_folder,
            start_timeout_seconds=start_timeout_seconds,
            environment=environment,
            imports=imports,
        )
