"""A run's rank processes, and the recovery from the loss of a trainer rank."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from megarl.cluster.agents.agent_link import RankPlace
from megarl.cluster.calls.rank_errors import RankLostError
from megarl.cluster.calls.worker_group import WorkerGroup
from megarl.cluster.launchers.run_nodes import RunNodes, start_nodes
from megarl.cluster.run_ranks import RunRanks
from megarl.cluster.state_copies import drop_others, files_for_ranks, is_complete, list_copies
from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.files.private_folder import PrivateFolder
from megarl.loops.ranks.resizing import ResizeAskedError, ResizedRecipe, can_grow, shrink_to
from megarl.loops.saving.resume import Origin
from megarl.loops.saving.state_replication import StateReplication
from megarl.loops.stopping import StopRequest
from megarl.tracking.metric_rows import MetricRow
from megarl.tracking.run_folder import RunFolder
from megarl.tracking.run_record import RunRecord, checkpoint_step
from megarl.types import MegarlError, PeerLostError

_GROWTH_SECONDS = 30.0
"""Seconds between searches for nodes while the run has fewer ranks than at first."""
_MOST_GROWTH_SECONDS = 3600.0
"""Maximum seconds between searches, so a node that comes back is used within an hour."""

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
    """The nodes of a run, and its rank processes.

    After the loss of a trainer rank, and for other parallel sizes, all ranks end and new ones start. They continue from
    copies of the state in the memory of the nodes' agents, else from the newest checkpoint.
    """

    def __init__(self, recipe: Recipe, parallel: ParallelConfig) -> None:
        self.recipe, self.parallel = recipe, parallel
        """Recipe and parallel sizes of the next start of ranks. A resize changes them."""
        self.nodes: RunNodes | None = None
        """The run's nodes; None before the first start."""
        self._ranks: RunRanks | None = None
        self._places: list[RankPlace] = []
        """Places of the trainers in the next start; empty: the first places of the living nodes."""
        self._folder = PrivateFolder()
        self._first_loss_time: float | None = None
        """Time of the first loss in this recovery; None: no recovery is in progress."""
        self.copies = StateReplication(recipe.checkpoint.replicate, self._folder.path)
        self.num_recoveries = 0
        """Number of lost trainer ranks that the run has survived."""
        self._full_size: ResizedRecipe | None = None
        """Recipe and sizes before losses made the run smaller; None: it has its full size, or cannot grow."""
        self._node_search: asyncio.Task[None] | None = None
        """Background search for nodes for the full size. When the task is done, there are enough."""
        self.checked_nodes: set[str] = set()
        """Nodes that passed the checks before models were built."""
        self._restored_bytes = 0.0
        """Bytes that ranks received from other nodes to restore the state."""
        self._has_copies = False
        """Whether the agents have copies of the whole state after the newest copied step."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._stop_search()
        try:
            if self._ranks is not None:
                await self._ranks.close_groups()
            if self.nodes is not None:
                await self.nodes.close()
        finally:
            self._folder.remove()

    async def start(
        self, log_folder: Path, avoided_nodes: Sequence[str] = (), notify: Callable[[str], object] = lambda text: None
    ) -> RunRanks:
        """Start the ranks, with logs in `log_folder`. The first call also starts the nodes' agents.

        Ray avoids `avoided_nodes`. A later call continues without an engine that does not start, and notifies of it.
        """
        is_first = self.nodes is None
        if self.nodes is None:
            self.nodes = await start_nodes(self.recipe.cluster, log_folder, avoided_nodes)
        self._ranks = None
        self._ranks = await self.nodes.fork_ranks(
            log_folder,
            self.parallel.world_size,
            self.parallel.replica_sizes,
            trainer=self.parallel,
            trainer_places=self._places,
            on_missing_engine=None
            if is_first
            else lambda reason: notify(f"an engine cannot start again; the run goes on without it: {reason}"),
        )
        self._ranks.nodes, self._places = self.nodes, self._ranks.trainers.places
        return self._ranks

    async def prepare_next_start(
        self,
        cause: PeerLostError | ResizeAskedError,
        stop: StopRequest,
        folder: RunFolder,
        notify: Callable[[str], object],
    ) -> None:
        """Prepare the next start of ranks, after a loss or for other parallel sizes. `notify` gets messages.

        Raises the loss if the run cannot continue. Raises EndedError if `stop` was requested: the progress since the
        last checkpoint is lost.
        """
        if self.nodes is None or (isinstance(cause, PeerLostError) and self.recipe.cluster.recover == "stop"):
            raise cause
        lost_ranks = [] if isinstance(cause, ResizeAskedError) else self._find_lost_ranks(cause)
        stop.refuse_recovery(cause, folder.path)
        # If another rank is lost during the recovery, keep the time of the first loss.
        self._first_loss_time = self._first_loss_time or time.monotonic()
        self._stop_search()
        if self._ranks is not None:
            await self._ranks.close_groups()
        if isinstance(cause, ResizeAskedError):
            notify(f"resize from {self.parallel} to {cause.parallel}")
            # The requested sizes are the run's full sizes from now on.
            self._full_size, self._places = None, []
            self.recipe, self.parallel = cause.recipe, cause.parallel
        else:
            await self._replace_lost(cause, lost_ranks, notify)
            self.num_recoveries += 1
        self.copies.forget_copy_in_progress()
        copies_in_memory, damage_messages = await list_copies(self.nodes.agents, checks=True)
        for message in damage_messages:
            notify(message)
        self._has_copies = self.copies.newest is not None and is_complete(copies_in_memory, self.copies.newest.step)
        if isinstance(cause, ResizeAskedError):
            folder.use_recipe(self.recipe)

    def _find_lost_ranks(self, error: PeerLostError) -> list[int]:
        """Return the trainer ranks that died and so caused `error`. Raises `error` if none died."""
        if self._ranks is not None and self._ranks.trainers.end.lost:
            return [handle.rank for handle in self._ranks.trainers.end.lost]
        # The start ended before its ranks had started.
        if self._ranks is None and isinstance(error, RankLostError) and error.rank < self.parallel.world_size:
            return [error.rank]
        raise error

    async def _replace_lost(
        self, error: PeerLostError, lost_ranks: Sequence[int], notify: Callable[[str], object]
    ) -> None:
        """Choose sizes and places after a loss. Raises the error if the run cannot continue."""
        assert self.nodes is not None
        num_ranks_before = self.parallel.world_size
        living_ranks = [
            rank
            for rank in range(num_ranks_before)
            if rank not in lost_ranks and (rank >= len(self._places) or not self._places[rank].agent.is_lost)
        ]
        # restart: the same number of ranks, on other nodes if necessary.
        if self.recipe.cluster.recover == "restart":
            notify(
                f"{error}. {len(living_ranks)} of {num_ranks_before} ranks are left; all start again, "
                "and the lost are replaced"
            )
            try:
                await self.nodes.replace_lost_nodes()
            except MegarlError as refusal:
                raise error from refusal
            self._places = []
            return
        # shrink: whole data-parallel replicas go on. The full size is remembered, to return to it.
        full_size = self._full_size or ResizedRecipe(self.recipe, self.parallel)
        try:
            shrunk_recipe = shrink_to(self.recipe, self.parallel, living_ranks)
        except MegarlError as refusal:
            raise error from refusal
        self.recipe, self.parallel = shrunk_recipe.recipe, shrunk_recipe.parallel
        self._full_size = full_size if can_grow(self.recipe) else None
        self._places = [self._places[rank] for rank in shrunk_recipe.continuing_ranks] if self._places else []
        notify(
            f"{error}. {len(living_ranks)} of {num_ranks_before} ranks are left; the run continues on "
            f"{self.parallel.world_size} of them: {self.parallel}"
        )
        if self._full_size is not None:
            # Each loss doubles the pause: a node that fails again and again must not cost a restart in every step.
            pause_seconds = min(_GROWTH_SECONDS * 2**self.num_recoveries, _MOST_GROWTH_SECONDS)
            self._node_search = asyncio.create_task(self._await_nodes(self._full_size.parallel, pause_seconds, notify))

    def find_growth(self) -> ResizedRecipe | None:
        """Return the recipe of the full size if the nodes for it have been found, else None."""
        return self._full_size if self._node_search is not None and self._node_search.done() else None

    async def _await_nodes(
        self, parallel: ParallelConfig, pause_seconds: float, notify: Callable[[str], object]
    ) -> None:
        """Wait until there are nodes for these parallel sizes. The first search is after `pause_seconds` seconds."""
        assert self.nodes is not None
        num_ranks = parallel.world_size
        while True:
            await asyncio.sleep(pause_seconds)
            try:
                # In the background, because it takes long to find out that a node is dead.
                await self.nodes.reserve(num_ranks, parallel.replica_sizes)
            except MegarlError:
                pause_seconds = _GROWTH_SECONDS
                continue
            # A smaller run is better than none, whatever error the launcher's library raises.
            except Exception as error:
                pause_seconds = min(2 * pause_seconds, _MOST_GROWTH_SECONDS)
                notify(
                    f"looking for nodes for {num_ranks} ranks failed; the next attempt is in {pause_seconds:g} s: "
                    f"{error!r}"
                )
                continue
            notify(f"there are nodes for {num_ranks} ranks again: the run returns to this size after the current step")
            return

    def _stop_search(self) -> None:
        if self._node_search is not None:
            self._node_search.cancel()
            self._node_search = None

    async def restore_from_copies(self, trainers: WorkerGroup, step: int) -> None:
        """Load the state after a step from the agents' copies into all trainer ranks."""
        assert self.nodes is not None
        files_of_ranks = await files_for_ranks(self.nodes.agents, step, trainers.places)
        self._restored_bytes = float(sum(await trainers.scatter("replicated_state.restore", files_of_ranks)))
        # Drop later copies of the lost start. Otherwise they are mixed with new copies of the same steps.
        await drop_others(self.nodes.agents, step)

    def find_copied_state(self, origin: Origin, earlier: RunRecord) -> Origin | None:
        """Return the copies in host memory as origin; None if they are incomplete or older than a checkpoint.

        `origin` is where the run started before. `earlier` lists the checkpoints on disk.
        """
        newest_copy = self.copies.newest
        is_older = newest_copy is not None and any(
            checkpoint_step(folder) > newest_copy.step for folder in earlier.checkpoints
        )
        if newest_copy is None or not self._has_copies or is_older:
            # The steps after the checkpoint are trained again, so drop the copies of these steps.
            self.copies.newest = None
            return None
        return Origin(
            newest_copy.driver,
            origin.inputs,
            origin.position.after(newest_copy.step, self.recipe),
            checksum=newest_copy.checksum,
            spikes=newest_copy.spikes,
            copied_step=newest_copy.step,
        )

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of a recovery once, when its first step begins; empty otherwise."""
        if self._first_loss_time is None:
            return {}
        seconds, self._first_loss_time = time.monotonic() - self._first_loss_time, None
        return {
            "fault/recoveries": float(self.num_recoveries),
            "fault/recovery_seconds": seconds,
            "fault/restored_bytes": self._restored_bytes,
        }
