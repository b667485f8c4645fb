"""Start and end of a run: its folder, ranks, loop and exported model."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from megarl import faults
from megarl.cluster.deadlines import run_deadlines
from megarl.cluster.launchers import start_group
from megarl.cluster.node_checks import gpus, inspect, unfit_nodes_error
from megarl.cluster.rank_model import RankModel
from megarl.cluster.replacements import Replacements
from megarl.cluster.reshard_calls import ReshardCalls
from megarl.cluster.run_ranks import RunRanks, together
from megarl.cluster.sbatch import reporting_bad_nodes
from megarl.cluster.worker_group import WorkerGroup
from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.data.chat import tokenizer_of
from megarl.loops import distillation, preference, rl, sft
from megarl.loops.models import export, models_of, sharing_notices
from megarl.loops.monitoring import start_monitor
from megarl.loops.observers.instabilities import spike_detector
from megarl.loops.observers.selection import make_observers
from megarl.loops.observers.step_checks import StepChecks
from megarl.loops.observers.weight_checks import WeightChecks
from megarl.loops.performance import Performance, Profiles
from megarl.loops.rank_processes import RankProcesses
from megarl.loops.reshard_schedule import ReshardSchedule
from megarl.loops.resizing import ResizeAskedError
from megarl.loops.sample_writer import SampleWriter
from megarl.loops.saving.checkpointing import Checkpoints
from megarl.loops.saving.resume import Origin, Resume, begin_from_copy, find_origin
from megarl.loops.session import Session
from megarl.loops.sources import make_sources, read_data, start_rewards
from megarl.loops.steps import Steps
from megarl.loops.stopping import DRIVER_LOG, StackRequest, StopRequest, stacks_on_quit, stopping_at_once
from megarl.platform import device
from megarl.preflight import Dropped, RecordDigests, parallel_of, planned_host_bytes, predicted_memory
from megarl.report.model_card import write_card
from megarl.rollout.pool import EnginePool
from megarl.rollout.stragglers import StragglerDetector
from megarl.tracking.display import Display
from megarl.tracking.run_folder import RunFolder
from megarl.tracking.spikes import SpikeDetector
from megarl.tracking.tracker import Tracker
from megarl.types import FaultyNodeError, PeerLostError

COLOCATED_WORKER = "megarl.worker.colocated:Worker"
"""Class of the worker on each rank: it trains and samples. Benchmarks replace it by a measuring class."""
LOOPS: dict[str, Callable[[Session], Awaitable[None]]] = {
    "rl": rl.train,
    "sft": sft.train,
    "preference": preference.train,
    "reward_model": preference.train,
    "distillation": distillation.train,
}


async def run(
    recipe: Recipe,
    parallel: ParallelConfig,
    *,
    resume: Resume | None = None,
    restart: bool = False,
    kept: RecordDigests | None = None,
    display: Display | None = None,
) -> None:
    """Run a checked recipe, from the start or the newest good checkpoint to the exported model.

    `restart` moves the run folder's contents aside. `kept` is the result of `preflight.count_records`.
    """
    display = display or Display()
    # Signals first, so that one arriving while the folder is opened raises StoppedError too.
    with (
        stopping_at_once(),
        RunFolder(recipe, resume=resume is not None, restart=restart, on_wait=display.warn) as folder,
    ):
        faults.reach("start")
        async with RankProcesses(recipe, parallel) as processes:
            origin = find_origin(recipe, folder, resume, kept)
            stop = StopRequest()
            warn = partial(_warn, folder, display)
            while True:
                try:
                    async with _attempt(folder, origin, processes, stop, display) as session:
                        await LOOPS[session.recipe.loop](session)
                    return
                except (PeerLostError, ResizeAskedError) as error:
                    earlier_stop, stop = stop, StopRequest(has_progress=True)
                    # A signal during the change is heeded by the next attempt: it saves after its first step.
                    with stop.listening(warn, folder.path):
                        await processes.change(error, earlier_stop, folder, warn)
                    folder.end_attempt(error)
                copied = processes.copied_origin(origin, folder.earlier)
                if copied is not None:
                    origin = begin_from_copy(copied, processes.recipe, folder)
                else:
                    if processes.recipe.checkpoint.replicate:
                        warn("no complete copies of the state in memory; a checkpoint is used")
                    origin = find_origin(processes.recipe, folder, "if-any", kept)


def _warn(folder: RunFolder, display: Display, text: str) -> None:
    """Print a warning between two attempts, and record it in the run folder."""
    folder.note(text, None)
    display.warn(text)


@asynccontextmanager
async def _attempt(
    folder: RunFolder, origin: Origin, processes: RankProcesses, stop: StopRequest, display: Display
) -> AsyncIterator[Session]:
    """Enter a session that starts from the origin. After the loop, export the model. Raises PeerLostError if a rank is
    lost.
    """
    logs = folder.logs_folder
    with (
        reporting_bad_nodes(),
        display.live(),
        display.logged_to(logs / DRIVER_LOG),
        stacks_on_quit(logs) as stacks,
    ):
        async with _start_session(folder, origin, processes, stop, stacks, display) as session:
            yield session
            # Complete all background work before the export, which needs the engines' memory.
            await session.steps.complete_background_work()
            await _export(session, display)
            session.steps.observers.end_run()
            session.tracker.summary(_next_commands(folder), has_model=session.recipe.train.steps > 0)


async def _export(session: Session, display: Display) -> None:
    """Export the trained models. A run with 0 training steps exports nothing."""
    if not session.recipe.train.steps:
        return
    with display.phase("exporting the model", is_printed=True):
        await session.reshard_schedule.sleep_engines()
        await session.reshard_schedule.check_last_version()
        await export(session.models, session.folder)
        write_card(session.folder.path, session.folder.model_folder, session.recipe.train.steps)


def _next_commands(folder: RunFolder) -> list[str]:
    """Return the commands for looking at the run's results."""
    return [
        f"megarl report {folder.path}",
        f"megarl samples {folder.path}",
        f"tensorboard --logdir {folder.path.parent}",
    ]


@asynccontextmanager
async def _start_session(
    folder: RunFolder,
    origin: Origin,
    processes: RankProcesses,
    stop: StopRequest,
    stacks: StackRequest,
    display: Display,
) -> AsyncIterator[Session]:
    """Start ranks, engines, rewards and tracker, and yield the session using them. Resume from a checkpoint, if any.

    Inside the context, a stop signal asks the session to stop (`StopRequest`) and does not end the process at once.
    """
    recipe, parallel = processes.recipe, processes.parallel
    async with AsyncExitStack() as stack:
        tracker = Tracker(folder, steps=recipe.train.steps, trackers=recipe.trackers, display=display)
        # The stack closes in reverse order, so the tracker closes last and can log every other end.
        stack.callback(tracker.close)
        stack.enter_context(stop.listening(tracker.notice, folder.path))
        # Before all heavy work: a port that another program took since the checks ends the run at once.
        monitor = await start_monitor(recipe, folder, tracker, stack)
        start = _Start(recipe, parallel, folder, origin, processes, tracker, display, stop, stack)
        checks = StepChecks(recipe, folder, tracker)
        checks.check_learning_rate()
        tokenizer = tokenizer_of(recipe.model)
        dropped: Dropped = Counter()
        # Before the ranks start: an error in the data is then reported within seconds.
        with display.phase("reading data", is_printed=True):
            data = read_data(recipe, tokenizer, dropped, folder.path)
        with tracker.phase("start"):
            ranks = await start.ranks(stacks)
            reshard_calls = ReshardCalls(ranks)
            with display.phase("building models", is_printed=True):
                await start.workers(ranks, reshard_calls)
            folder.describe({"machine": await _hardware(ranks)})
        replacements = await stack.enter_async_context(start.replacements(ranks))
        rewards = start_rewards(recipe, stack, folder.logs_folder, tracker.notice)
        for notice in {text: None for texts in await ranks.call("start_notices") for text in texts}:
            tracker.notice(notice)
        folder.set_status("running")
        max_running = 2 * recipe.rollout.max_concurrent_requests
        pool = EnginePool(ranks, parallel, max_running=max_running, stragglers=StragglerDetector(tracker.notice))
        monitor.pool = pool
        # A signal may have interrupted a step's evaluation: its other metrics are in the checkpoint alone.
        earlier = [*folder.logged_steps(), *([origin.unlogged.metrics] if origin.unlogged else [])]
        sources = await make_sources(
            recipe, data, rewards, pool, tokenizer, stack, folder.logs_folder, tracker,
            is_abandoned=lambda: bool(stop), earlier=earlier,
        )  # fmt: skip
        spikes = spike_detector(recipe, origin.spikes)
        models = models_of(recipe, parallel, ranks.trainers, spikes)
        for notice in sharing_notices(models):
            tracker.notice(notice)
        steps = start.steps(ranks, reshard_calls, replacements, pool, models, checks, dropped, spikes)
        await steps.observers.begin_run()
        session = Session(
            recipe=recipe,
            folder=folder,
            origin=origin,
            tracker=tracker,
            tokenizer=tokenizer,
            dropped=dropped,
            models=models,
            sources=sources,
            pool=pool,
            reshard_schedule=steps.reshard_schedule,
            checkpoints=steps.checkpoints,
            samples=SampleWriter(recipe, tracker, tokenizer, models["policy"]),
            steps=steps,
        )
        if origin.checkpoint:
            with display.phase("loading the checkpoint", is_printed=True):
                await session.reshard_schedule.sleep_engines()
                if origin.copied_step is None:
                    await ranks.trainers.call("load_checkpoint", origin.checkpoint)
                else:
                    received = await ranks.trainers.call("replicated_state.restore", origin.copied_step)
                    processes.note_received(sum(received))
                    # At once: until the next copy is due, another loss would cost the steps since a checkpoint.
                    await processes.copies.renew(ranks.trainers)
                await steps.observers.resume_run(origin)
        # Last: until here a signal ends the run at once, because there is no progress to save.
        stop.steps_begin()
        yield session


@dataclass(frozen=True, slots=True)
class _Start:
    """Start of a run. `stack` closes what was started, in reverse order."""

    recipe: Recipe
    parallel: ParallelConfig
    folder: RunFolder
    origin: Origin
    processes: RankProcesses
    tracker: Tracker
    display: Display
    stop: StopRequest
    stack: AsyncExitStack

    async def ranks(self, stacks: StackRequest) -> RunRanks:
        """Start the processes of all ranks, or after a loss only the missing ones."""
        with self.display.phase(f"starting {_count_of_ranks(self.recipe)}", is_printed=True):
            ranks = await self.processes.ready(self.folder.logs_folder, self.folder.bad_nodes)
        ranks.on_asked(self.stop.ask)
        ranks.report_hangs(self.folder.logs_folder, self.tracker.notice)
        # From now on SIGQUIT prints the stacks of the ranks too.
        stacks.ask_others = ranks.show_stacks
        return ranks

    async def workers(self, ranks: RunRanks, reshard_calls: ReshardCalls) -> None:
        """Construct a worker on each rank, and send separate engines their first weights.

        Raises ConfigError naming the unfit nodes.
        """
        recipe, parallel = self.recipe, self.parallel
        await self._check_nodes(ranks)
        # The node checks used cluster.start_timeout_seconds. From here on each method has its own deadline.
        ranks.set_deadlines(lambda: run_deadlines(recipe.cluster))
        teachers = parallel_of(recipe.for_teachers) if recipe.distillation.sizes else None
        settings = {"recipe": recipe, "parallel": parallel, "frozen_parallel": teachers}
        settings["topology"] = ranks.trainers.topology
        if not ranks.is_separate:
            await ranks.trainers.construct(COLOCATED_WORKER, settings)
            return
        replicas = [_construct_engine(group, recipe, parallel) for group in ranks.replicas]
        await together([ranks.trainers.construct("megarl.worker.trainer_worker:TrainerWorker", settings), *replicas])
        # Separate engines start without weights. The first reshard is verified, whatever weights.verify_every says.
        await reshard_calls.run(verify=True, version=1)

    async def _check_nodes(self, ranks: RunRanks) -> None:
        """Print the nodes of the ranks, and the results of their checks.

        Raises ConfigError naming the unfit nodes, DiskFullError if they only lack room, or FaultyNodeError if they
        joined the run after a loss.
        """
        recipe, tracker = self.recipe, self.tracker
        if len(nodes := dict.fromkeys(place[0] for place in ranks.topology)) > 1:
            tracker.info(f"ranks on {', '.join(nodes)}")
        self._refuse_bad_nodes(list(nodes))
        uses_gpu = recipe.cluster.device != "cpu" and device.current().type == "cuda"
        if uses_gpu and (notice := device.toolkit_notice()) is not None:
            tracker.notice(notice)
        # After a loss most nodes have passed the checks; a spare one has not.
        checked = self.processes.checked_nodes
        if not recipe.cluster.preflight or checked >= nodes.keys():
            return
        if self.processes.num_recoveries or checked:
            # After a loss or a resize the ranks have no workers.
            await together([group.construct("megarl.cluster.node_checks:NodeReport", {}) for group in ranks.groups])
        wrong, lines = await inspect(ranks, recipe, self.folder.path.absolute(), planned_host_bytes(recipe))
        if wrong:
            error = unfit_nodes_error(f"nodes of run {recipe.name}", wrong)
            if checked:
                # An unfit spare node must not end the run for good: the job is queued again without it.
                raise FaultyNodeError(str(error), nodes=tuple(node for node in nodes if node not in checked))
            raise error
        checked.update(nodes)
        for line in lines:
            tracker.info(line)

    def _refuse_bad_nodes(self, nodes: Sequence[str]) -> None:
        """Raise FaultyNodeError if one of the nodes is recorded as faulty. On a single machine, only warn."""
        bad = [node for node in nodes if node in self.folder.bad_nodes]
        if not bad:
            return
        text = f"bad_nodes in status.json has {', '.join(bad)}, where a canary was wrong (weights.canary_every)"
        if self.recipe.cluster.launcher == "local":
            self.tracker.notice(f"{text}; the run goes on there, because it has no other node")
            return
        raise FaultyNodeError(
            f"{text}: exclude the node (Slurm: --exclude), or remove it from bad_nodes after its repair. Go on with: "
            f"megarl train {self.folder.path} --resume",
            nodes=tuple(bad),
        )

    @asynccontextmanager
    async def replacements(self, ranks: RunRanks) -> AsyncIterator[Replacements]:
        """Restart lost engine replicas (separate engines) while the others sample, until the context exits."""
        cluster = self.recipe.cluster

        async def start(lost: WorkerGroup) -> WorkerGroup:
            group = await start_group(
                cluster, self.folder.logs_folder, lost.world_size, lost.part, lost.kind, self.folder.bad_nodes,
                others=lambda: ranks.groups, places=lost.places,
            )  # fmt: skip
            group.deadlines, group.on_asked = run_deadlines(cluster), ranks.trainers.on_asked
            try:
                await _construct_engine(group, self.recipe, self.parallel)
            # Includes cancellation: started processes must never outlive the run.
            except BaseException:
                await group.close()
                raise
            return group

        replacements = Replacements(start, self.tracker.notice)
        if ranks.is_separate:
            ranks.on_lost = lambda group, error: replacements.replace(group, error, len(ranks.replicas))
        try:
            yield replacements
        finally:
            # Losses while the run ends must not start new replicas.
            ranks.on_lost = None
            await replacements.close()

    def steps(
        self,
        ranks: RunRanks,
        reshard_calls: ReshardCalls,
        replacements: Replacements,
        pool: EnginePool,
        models: Mapping[str, RankModel],
        checks: StepChecks,
        dropped: Dropped,
        spikes: SpikeDetector | None,
    ) -> Steps:
        """Return the run's steps, with their measurements, reshards and saves."""
        recipe, folder, tracker = self.recipe, self.folder, self.tracker
        performance = Performance(recipe, ranks, models, predicted_memory(recipe))
        weight_checks = WeightChecks(recipe, ranks, folder)
        reshard_schedule = ReshardSchedule(recipe, ranks, reshard_calls, replacements, pool, performance, weight_checks)
        self.stack.push_async_callback(reshard_schedule.close)
        profiles = Profiles(ranks, folder, tracker, recipe.train.profile_with)
        self.stack.push_async_callback(profiles.close)
        checkpoints = Checkpoints(
            recipe,
            folder,
            tracker,
            ranks.trainers,
            self.origin.inputs.as_json(),
            checksum_after=weight_checks.checksum_after,
            check_weights=weight_checks.check_trainer,
            copies=self.processes.copies,
            spikes=spikes,
            position=self.origin.position,
        )
        return Steps(
            recipe=recipe,
            ranks=ranks,
            folder=folder,
            tracker=tracker,
            checkpoints=checkpoints,
            reshard_schedule=reshard_schedule,
            stop=self.stop,
            performance=performance,
            profiles=profiles,
            observers=make_observers(
                recipe,
                self.parallel,
                folder,
                tracker,
                ranks,
                checkpoints,
                models["policy"],
                checks=checks,
                weight_checks=weight_checks,
                spikes=spikes,
            ),
            dropped=dropped,
            recovery_metrics=self.processes.take_metrics,
            growth=self.processes.growth,
        )


def _count_of_ranks(recipe: Recipe) -> str:
    """Return the number of ranks and nodes as text for the terminal."""
    count, nodes = recipe.cluster.world_size, recipe.cluster.num_nodes
    text = f"{count} rank{'s' * (count > 1)}" + (f" on {nodes} nodes" if nodes > 1 else "")
    if recipe.separate_ranks:
        text += f", of which {recipe.separate_ranks} only sample"
    return text


async def _construct_engine(group: WorkerGroup, recipe: Recipe, parallel: ParallelConfig) -> None:
    """Construct the worker (an engine shard) on each rank of a separate engine replica."""
    # A replica keeps its number for life: its first rank determines it.
    number = parallel.leaders().index(group.part.first_rank)
    settings = {"recipe": recipe, "parallel": parallel, "replica": number}
    await group.construct("megarl.worker.engine_worker:EngineWorker", settings)


async def _hardware(ranks: RunRanks) -> dict[str, str]:
    """Return the ranks by node, and the GPUs of the driver's node, for attempt.json."""
    on_nodes = Counter(place[0] for place in ranks.topology)
    gpu_counts = Counter(await asyncio.to_thread(gpus))
    gpu_text = "; ".join(f"{count} x {gpu}" for gpu, count in gpu_counts.items()) or "none: on the CPU"
    return {"ranks": ", ".join(f"{count} on {node}" for node, count in on_nodes.items()), "GPUs": gpu_text}
