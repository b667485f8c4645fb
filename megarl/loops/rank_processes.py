"""Rank processes of a run, and recovery from the loss of a trainer rank: the other processes continue."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from megarl.cluster.launchers import start_group, start_ranks
from megarl.cluster.run_ranks import RunRanks
from megarl.cluster.stacks import engine_named
from megarl.cluster.topology import NodeKind
from megarl.cluster.worker_group import PartOfRun, WorkerGroup
from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.files.private_folder import PrivateFolder
from megarl.loops.resizing import ResizeAskedError, shrunk
from megarl.loops.saving.resume import Origin
from megarl.loops.saving.state_replication import StateReplication
from megarl.loops.stopping import StopRequest
from megarl.reshard.state_holders import hand_overs
from megarl.tracking.metric_rows import MetricRow
from megarl.tracking.run_folder import RunFolder
from megarl.tracking.run_record import RunRecord, checkpoint_step
from megarl.types import MegarlError, PeerLostError

_GROWTH_SECONDS = 30.0
"""Seconds between searches for nodes, after a run continued without lost ranks."""
_MOST_GROWTH_SECONDS = 3600.0
"""Maximum seconds between searches: a node that comes back should be used within an hour."""

METRICS = (
    MetricRow(
        "fault/recoveries", "count", "recoveries from lost trainer ranks since the start; logged after each recovery"
    ),
    MetricRow(
        "fault/recovery_seconds",
        "seconds",
        "time from a trainer rank's loss, or a resize, to the next step: processes, models, engines, state",
    ),
    MetricRow(
        "fault/restored_bytes",
        "bytes",
        "bytes that all ranks together received from other ranks to restore the state after a loss or a resize; 0 if "
        "it came from a checkpoint, or each rank had what it needs",
    ),
)


class RankProcesses:
    """All rank processes of a run. After the loss of a trainer rank, `recover` starts only the missing ones."""

    def __init__(self, recipe: Recipe, parallel: ParallelConfig) -> None:
        self.recipe, self.parallel = recipe, parallel
        """The recipe and the layout of the next attempt. A resize changes their parallel sizes."""
        self._ranks: RunRanks | None = None
        self._folder = PrivateFolder()
        self._lost_at: float | None = None
        self.copies = StateReplication(recipe.checkpoint.replicate, self._folder.path)
        self.num_recoveries = 0
        """Number of losses of trainer ranks that the run has survived."""
        self._full: ResizeAskedError | None = None
        """Recipe and layout before losses made the run smaller; None: it has its full size, or cannot grow."""
        self._search: asyncio.Task[None] | None = None
        """Search for nodes for the full size, in the background; done when there are some."""
        self.checked_nodes: set[str] = set()
        """Nodes that passed the checks before models were built."""
        self._received = 0.0
        self._has_copies = False
        self._engine_kind: NodeKind | None = None
        """Nodes of separate engines at the run's start; None: there are no such engines. The recipe's sizes change."""
        self._engine_places: dict[int, list[int]] = {}
        """Last places of each separate engine replica on these nodes."""
        self._avoided_nodes: Sequence[str] = ()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._stop_search()
        try:
            if self._ranks is not None:
                await self._ranks.close()
        finally:
            self._folder.remove()

    async def ready(self, log_folder: Path, avoided_nodes: Sequence[str] = ()) -> RunRanks:
        """Return the ranks, without workers. The first call starts their processes, with logs in `log_folder`.

        Faulty nodes in `avoided_nodes` get no ranks, where the launcher can choose.
        """
        if self._ranks is None:
            cluster = self.recipe.cluster
            self._ranks = await start_ranks(
                cluster,
                log_folder,
                self.parallel.replica_sizes,
                avoided_nodes=avoided_nodes,
                trainer=self.parallel,
            )
            self._avoided_nodes = avoided_nodes
            self._engine_kind = next((group.kind for group in self._ranks.replicas), None)
            self._engine_places = {number: group.places for number, group in enumerate(self._ranks.replicas)}
        return self._ranks

    async def change(
        self,
        cause: PeerLostError | ResizeAskedError,
        stop: StopRequest,
        folder: RunFolder,
        notify: Callable[[str], object],
    ) -> None:
        """Recover from a lost rank, or continue with other parallel sizes: see `recover` and `resize`."""
        if isinstance(cause, ResizeAskedError):
            await self.resize(cause, stop, folder, notify)
        else:
            await self.recover(cause, stop, folder, notify)

    async def recover(
        self, error: PeerLostError, stop: StopRequest, folder: RunFolder, notify: Callable[[str], object]
    ) -> None:
        """Replace the lost processes of the trainer. Raises `error`, the loss, if the run cannot continue.

        `notify` is called with a message about the loss. New processes write their logs to the folder's `logs_folder`.
        Raises EndedError if a stop was requested (`stop`): the progress since the last checkpoint is lost.
        """
        lost = self._ranks.trainers if self._ranks is not None else None
        if lost is None or not lost.survivors or self.recipe.cluster.recover == "stop":
            raise error
        stop.refuse_recovery(error, folder.path)
        self._lost_at = time.monotonic()
        survivors = [handle.rank - lost.part.first_rank for handle in lost.survivors]
        sources: Sequence[int | None] = range(lost.world_size)
        then = "the lost ones are replaced"
        if self.recipe.cluster.recover == "shrink":
            full = self._full or ResizeAskedError(self.recipe, self.parallel)
            try:
                self.recipe, self.parallel, chosen_ranks = shrunk(self.recipe, self.parallel, survivors)
            except MegarlError as refusal:
                raise error from refusal
            # On this machine a lost rank means a fault of this machine, and no node can come back.
            self._full = full if self.recipe.cluster.launcher != "local" else None
            sources, then = chosen_ranks, f"the run continues on {len(chosen_ranks)} of them: {self.parallel}"
        notify(f"{error}. {len(survivors)} of {lost.world_size} processes are left; {then}")
        self.copies.forget_begun()
        await self._replace(lost, sources, folder.logs_folder, notify)
        if self._full is not None:
            # Each loss doubles the pause: a node that fails again and again must not cost a restart in every step.
            pause = min(_GROWTH_SECONDS * 2**self.num_recoveries, _MOST_GROWTH_SECONDS)
            self._search = asyncio.create_task(self._await_nodes(self._full.parallel, pause, notify))
        self.num_recoveries += 1

    async def resize(
        self, asked: ResizeAskedError, stop: StopRequest, folder: RunFolder, notify: Callable[[str], object]
    ) -> None:
        """Continue with other parallel sizes. Processes stay; missing ones start, and superfluous ones end.

        The state after the current step must have been copied, and nodes for new processes reserved.
        """
        assert self._ranks is not None
        # The sizes asked for are now the full ones.
        self._full = None
        stop.refuse_recovery(asked, folder.path)
        trainers = self._ranks.trainers
        self._lost_at = time.monotonic()
        notify(f"resize from {self.parallel} to {asked.parallel}")
        self.recipe, self.parallel = asked.recipe, asked.parallel
        await trainers.set_apart()
        await self._replace(trainers, trainers.arranged(asked.parallel.world_size), folder.logs_folder, notify)
        folder.use_recipe(self.recipe)

    def growth(self) -> ResizeAskedError | None:
        """Return the change back to the size before losses, if there are nodes for it again; else None."""
        return self._full if self._search is not None and self._search.done() else None

    async def _await_nodes(self, parallel: ParallelConfig, pause: float, notify: Callable[[str], object]) -> None:
        """Wait until there are nodes for the ranks of a layout. The first attempt is after `pause` seconds."""
        assert self._ranks is not None
        count = parallel.world_size
        while True:
            await asyncio.sleep(pause)
            try:
                # In the background of the steps: it takes long to find out that a node is dead.
                await self._ranks.reserve(count, parallel.replica_sizes)
            except MegarlError:
                pause = _GROWTH_SECONDS
                continue
            # A smaller run is better than none, whatever the launcher's library raises.
            except Exception as error:
                pause = min(2 * pause, _MOST_GROWTH_SECONDS)
                notify(f"looking for nodes for {count} ranks failed; the next attempt is in {pause:g} s: {error!r}")
                continue
            notify(f"there are nodes for {count} ranks again: the run returns to this size after the current step")
            return

    def _stop_search(self) -> None:
        if self._search is not None:
            self._search.cancel()
            self._search = None

    async def _replace(
        self,
        group: WorkerGroup,
        sources: Sequence[int | None],
        log_folder: Path,
        notify: Callable[[str], object],
    ) -> None:
        """Form the next group of trainer ranks from an ended one (see `WorkerGroup.successor`), and those of the
        engines. `notify` is called with a message about each engine without a group.
        """
        assert self._ranks is not None
        self._stop_search()
        remaining = self._ranks.retained_replicas(self.parallel.replica_sizes)
        # First, because the trainers may need the places of ended replicas.
        await asyncio.gather(*(g.close() for g in self._ranks.replicas if g not in remaining.values()))
        ended = group
        group, sources = await self._without_leavers(group, sources, list(remaining.values()), log_folder, notify)
        part = replace(group.part, num_ranks=self.parallel.num_ranks)
        trainers = await group.successor(sources, log_folder, part)
        # If a later start fails, these processes must end with the run.
        self._ranks = RunRanks(trainers, list(remaining.values()))
        newest = self.copies.newest
        # If processes leave, `_without_leavers` has compared all checksums. They take seconds for large copies.
        steps_of_ranks, damages = await trainers.inherited_steps(checks=group is ended)
        for damage in damages:
            notify(damage)
        self._has_copies = newest is not None and _is_complete(steps_of_ranks, newest.step)
        if self.parallel.replica_sizes:
            await self._replace_replicas(self._ranks, remaining, log_folder, notify)

    async def _replace_replicas(
        self,
        ranks: RunRanks,
        remaining: Mapping[int, WorkerGroup],
        log_folder: Path,
        notify: Callable[[str], object],
    ) -> None:
        """Give the `remaining` separate engine replicas groups without workers, and start the others.

        A replica may fail to start. Raises its error if no other replica is left.
        """
        errors: list[MegarlError] = []
        for number, (first_rank, size) in enumerate(
            zip(self.parallel.leaders(), self.parallel.replica_sizes, strict=True)
        ):
            part, old = replace(ranks.trainers.part, first_rank=first_rank), remaining.get(number)
            try:
                after = await self._next_replica(ranks, number, size, part, old, log_folder)
            except MegarlError as error:
                if old is not None:
                    ranks.replicas.remove(old)
                errors.append(error)
                notify(f"{engine_named(part.ranks(size))} cannot start again; the run goes on without it: {error}")
                continue
            # At once: if a later replica fails, these processes must end with the run.
            if old is not None:
                ranks.replace_replica(old, after)
            else:
                ranks.add([after])
            self._engine_places[number] = after.places
        if not ranks.replicas:
            raise errors[0]

    async def _next_replica(
        self, ranks: RunRanks, number: int, size: int, part: PartOfRun, old: WorkerGroup | None, log_folder: Path
    ) -> WorkerGroup:
        """Return the next group of an engine replica: with the processes of `old`, or newly started ones."""
        if old is not None:
            await old.set_apart()
            return await old.successor(list(range(size)), log_folder, part)
        places = self._engine_places.get(number, ())
        assert self._engine_kind is not None
        return await start_group(
            self.recipe.cluster, log_folder, size, part, self._engine_kind, self._avoided_nodes,
            others=lambda: ranks.groups, places=places if len(places) == size else (),
        )  # fmt: skip

    async def _without_leavers(
        self,
        group: WorkerGroup,
        sources: Sequence[int | None],
        replicas: Sequence[WorkerGroup],
        log_folder: Path,
        notify: Callable[[str], object],
    ) -> tuple[WorkerGroup, Sequence[int | None]]:
        """Move copies of the state from processes that will end to those that stay. `replicas` are the run's engines.

        `notify` is called with a sentence about each damaged copy.

        Returns the ended group to succeed, and its rank for each new rank.
        """
        present = [handle.rank - group.part.first_rank for handle in group.survivors]
        if not set(present) - set(sources):
            return group, sources
        between = await group.successor(present, log_folder)
        self._ranks = RunRanks(between, replicas)
        steps_of_ranks, damages = await between.inherited_steps()
        for damage in damages:
            notify(damage)
        stays = [number for number, rank in enumerate(present) if rank in sources]
        step = self.copies.newest.step if self.copies.newest else None
        if step is not None and _is_complete(steps_of_ranks, step) and (moves := _moves(steps_of_ranks, step, stays)):
            await between.construct(
                "megarl.worker.copy_keeper:CopyKeeper",
                {"timeout_seconds": self.recipe.cluster.collective_timeout_seconds},
            )
            await between.call("hand_over", step, moves)
        await between.set_apart()
        return between, [present.index(source) if source in present else None for source in sources]

    def copied_origin(self, origin: Origin, earlier: RunRecord) -> Origin | None:
        """Return the copies in host memory as the run's origin; None if they are incomplete or older than a checkpoint.

        `origin` is where the run started before. `earlier` lists the checkpoints on disk.
        """
        newest = self.copies.newest
        is_older = newest is not None and any(checkpoint_step(folder) > newest.step for folder in earlier.checkpoints)
        if newest is None or not self._has_copies or is_older:
            # The steps after the checkpoint are trained again, so copies of them are void.
            self.copies.newest = None
            return None
        return Origin(
            newest.driver,
            origin.inputs,
            origin.position.after(newest.step, self.recipe),
            checksum=newest.checksum,
            spikes=newest.spikes,
            copied_step=newest.step,
        )

    def note_received(self, num_bytes: int) -> None:
        """Record the bytes that ranks received from other ranks to restore the state."""
        self._received = float(num_bytes)

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of a recovery, once, when its first step begins; else an empty dictionary."""
        if self._lost_at is None:
            return {}
        seconds, self._lost_at = time.monotonic() - self._lost_at, None
        return {
            "fault/recoveries": float(self.num_recoveries),
            "fault/recovery_seconds": seconds,
            "fault/restored_bytes": self._received,
        }


def _moves(
    steps_of_ranks: Sequence[Mapping[int, tuple[int, list[int]]]], step: int, stays: Sequence[int]
) -> list[tuple[int, int, int]]:
    """Return the copies of a step to hand over (see `hand_overs`).

    `steps_of_ranks` has each rank's steps, as in `_is_complete`; `stays` are the remaining ranks.
    """
    return hand_overs([steps.get(step, (0, []))[1] for steps in steps_of_ranks], stays)


def _is_complete(steps_of_ranks: Sequence[Mapping[int, tuple[int, list[int]]]], step: int) -> bool:
    """Return whether the ranks together hold all copies of a step.

    `steps_of_ranks` has each rank's steps, with the number of ranks then and the ranks whose copies it holds.
    """
    copies = [steps[step] for steps in steps_of_ranks if step in steps]
    origins = {origin for _, ranks in copies for origin in ranks}
    return any(origins == set(range(num_ranks)) for num_ranks, _ in copies)
