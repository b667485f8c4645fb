"""Start and end of a run: its folder, ranks, loop and exported model."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from megarl import faults
from megarl.cluster.launchers.sbatch import reporting_bad_nodes
from megarl.cluster.replacements import Replacements
from megarl.cluster.reshard_calls import ReshardCalls
from megarl.cluster.run_ranks import RunRanks
from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.data.chat import tokenizer_of
from megarl.datasets.counts import RecordDigests
from megarl.datasets.reading import Dropped
from megarl.loops import distillation, preference, rl, sft
from megarl.loops.measuring.performance import Performance
from megarl.loops.measuring.profiles import Profiles
from megarl.loops.models import export, make_rank_models, sharing_notices
from megarl.loops.monitoring import RunMonitor
from megarl.loops.observers.instabilities import make_spike_detector
from megarl.loops.observers.selection import make_observers
from megarl.loops.observers.step_checks import StepChecks
from megarl.loops.observers.weight_checks import WeightChecks
from megarl.loops.ranks.rank_processes import RankProcesses
from megarl.loops.ranks.rank_start import (
    construct_workers,
    describe_hardware,
    format_rank_count,
    replacing_lost_engines,
    start_ranks,
)
from megarl.loops.ranks.resizing import ResizeAskedError
from megarl.loops.reshard_schedule import ReshardSchedule
from megarl.loops.run_data import RunData
from megarl.loops.sample_writer import SampleWriter
from megarl.loops.saving.checkpointing import Checkpoints
from megarl.loops.saving.resume import Origin, Resume, begin_from_copy, find_origin
from megarl.loops.sources import SourceData, make_sources, read_data, start_rewards
from megarl.loops.started_run import Run, StepWatch
from megarl.loops.stopping import DRIVER_LOG, StackRequest, StopRequest, stacks_on_quit, stopping_at_once
from megarl.planner.predictions import predicted_memory
from megarl.report.model_card import write_card
from megarl.rollout.pool import EnginePool
from megarl.rollout.source import Source
from megarl.rollout.stragglers import StragglerDetector
from megarl.tracking.display import Display
from megarl.tracking.run_folder import RunFolder
from megarl.tracking.spikes import SpikeDetector
from megarl.tracking.tracker import Tracker
from megarl.types import PeerLostError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

LOOPS: dict[str, Callable[[Run], Awaitable[None]]] = {
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
    record_digests: RecordDigests | None = None,
    display: Display | None = None,
) -> None:
    """Run a checked recipe, from the beginning or the newest valid checkpoint to the exported model.

    `restart` moves the run folder's contents aside. `record_digests` come from `datasets.counts.count_records`.
    """
    display = display or Display()
    # Signals first, so that a signal while the folder is opened raises StoppedError too.
    with (
        stopping_at_once(),
        RunFolder(recipe, resume=resume is not None, restart=restart, on_wait=display.warn) as folder,
    ):
        faults.reach("start")
        async with RankProcesses(recipe, parallel) as processes, RunMonitor(recipe, folder) as monitor:
            origin = find_origin(recipe, folder, resume, record_digests)
            stop = StopRequest()
            warn = partial(_warn, folder, display)
            while True:
                try:
                    async with _run_from_origin(folder, origin, processes, monitor, stop, display) as started:
                        await LOOPS[started.recipe.loop](started)
                    return
                except (PeerLostError, ResizeAskedError) as error:
                    earlier_stop, stop = stop, StopRequest(has_progress=True)
                    # The next start handles a signal during the change: it saves after its first step.
                    with stop.listening(warn, folder.path):
                        await processes.prepare_next_start(error, earlier_stop, folder, warn)
                    folder.end_attempt(error)
                copied_state = processes.find_copied_state(origin, folder.earlier)
                if copied_state is not None:
                    origin = begin_from_copy(copied_state, processes.recipe, folder)
                else:
                    if processes.recipe.checkpoint.replicate:
                        warn("no complete copies of the state in memory; a checkpoint is used")
                    origin = find_origin(processes.recipe, folder, "if-any", record_digests)


def _warn(folder: RunFolder, display: Display, text: str) -> None:
    folder.note(text, None)
    display.warn(text)


@asynccontextmanager
async def _run_from_origin(
    folder: RunFolder,
    origin: Origin,
    processes: RankProcesses,
    monitor: RunMonitor,
    stop: StopRequest,
    display: Display,
) -> AsyncIterator[Run]:
    """Context of one start of the run, from `origin`. After the loop, it exports the model.

    Raises PeerLostError if a trainer rank is lost.
    """
    logs = folder.logs_folder
    with (
        reporting_bad_nodes(),
        display.live(),
        display.logged_to(logs / DRIVER_LOG),
        stacks_on_quit(logs) as stacks,
    ):
        async with _start_run(folder, origin, processes, monitor, stop, stacks, display) as run:
            yield run
            # Complete all background work before the export, which needs the engines' memory.
            await run.complete_background_work()
            await _export_model(run, display)
            run.watch.observers.end_run()
            run.tracker.summary(_next_commands(folder), has_model=run.recipe.train.steps > 0)


async def _export_model(run: Run, display: Display) -> None:
    if not run.recipe.train.steps:
        return
    with display.phase("exporting the model", is_printed=True):
        await run.reshard_schedule.sleep_engines()
        await run.reshard_schedule.check_last_version()
        await export(run.models, run.folder)
        write_card(run.folder.path, run.folder.model_folder, run.recipe.train.steps)


def _next_commands(folder: RunFolder) -> list[str]:
    return [
        f"megarl report {folder.path}",
        f"megarl samples {folder.path}",
        f"tensorboard --logdir {folder.path.parent}",
    ]


@dataclass(frozen=True, slots=True)
class _Start:
    """A start of the run: what all its steps use. `stack` closes their results in reverse order."""

    folder: RunFolder
    origin: Origin
    processes: RankProcesses
    monitor: RunMonitor
    stop: StopRequest
    display: Display
    tracker: Tracker
    stack: AsyncExitStack

    @property
    def recipe(self) -> Recipe:
        return self.processes.recipe

    @property
    def parallel(self) -> ParallelConfig:
        return self.processes.parallel


class _StartedRanks(NamedTuple):
    """Ranks with their models."""

    ranks: RunRanks
    reshard_calls: ReshardCalls
    replacements: Replacements


class _Sampling(NamedTuple):
    """Engines, and the sources that sample with them."""

    pool: EnginePool
    sources: list[Source]


@asynccontextmanager
async def _start_run(
    folder: RunFolder,
    origin: Origin,
    processes: RankProcesses,
    monitor: RunMonitor,
    stop: StopRequest,
    stacks: StackRequest,
    display: Display,
) -> AsyncIterator[Run]:
    """Start ranks, engines, rewards and tracker, load the state of `origin`, and yield the run.

    Inside the context, a stop signal asks the run to stop (`StopRequest`) and does not end the process at once.
    """
    recipe = processes.recipe
    async with AsyncExitStack() as stack:
        tracker = Tracker(folder, steps=recipe.train.steps, trackers=recipe.trackers, display=display)
        # The stack closes in reverse order, so the tracker closes last and can log all other errors.
        stack.callback(tracker.close)
        stack.enter_context(stop.listening(tracker.notice, folder.path))
        start = _Start(folder, origin, processes, monitor, stop, display, tracker, stack)
        # Before all heavy work: a port that another program took since the checks ends the run at once.
        await monitor.begin_start(tracker)
        checks = StepChecks(recipe, folder, tracker)
        checks.check_learning_rate()
        tokenizer = tokenizer_of(recipe.model)
        dropped: Dropped = Counter()
        # Before the ranks start, to report an error in the data within seconds.
        with display.phase("reading data", is_printed=True):
            source_data = read_data(recipe, tokenizer, dropped, folder.path)
        started_ranks = await _start_ranks(start, stacks)
        sampling = await _start_sampling(start, started_ranks.ranks, source_data, tokenizer)
        run_data = RunData(
            tokenizer=tokenizer,
            sources=sampling.sources,
            dropped=dropped,
            draws_file=folder.draws_file,
            notify=tracker.notice,
        )
        run = await _make_run(start, started_ranks, sampling.pool, run_data, checks)
        if origin.checkpoint is not None:
            with display.phase("loading the checkpoint", is_printed=True):
                await _load_state(run, origin.checkpoint)
        # Last: until here a signal ends the run at once, because there is no progress to save.
        stop.steps_begin()
        yield run


async def _start_ranks(start: _Start, stacks: StackRequest) -> _StartedRanks:
    """Start the ranks and build their models. From then on, lost separate engines are replaced."""
    recipe, folder, tracker, processes = start.recipe, start.folder, start.tracker, start.processes
    with tracker.phase("start"):
        with start.display.phase(f"starting {format_rank_count(recipe)}", is_printed=True):
            ranks = await start_ranks(processes, folder, tracker, start.stop, stacks)
        reshard_calls = ReshardCalls(ranks)
        with start.display.phase("building models", is_printed=True):
            await construct_workers(processes, folder, tracker, ranks, reshard_calls)
        folder.describe({"machine": await describe_hardware(ranks)})
    replacements = await start.stack.enter_async_context(
        replacing_lost_engines(recipe, start.parallel, folder, tracker, ranks)
    )
    return _StartedRanks(ranks, reshard_calls, replacements)


async def _start_sampling(
    start: _Start, ranks: RunRanks, source_data: Mapping[str, SourceData], tokenizer: Tokenizer
) -> _Sampling:
    """Start rewards and environments, and return the sources of samples with the pool of engines."""
    recipe, folder, tracker = start.recipe, start.folder, start.tracker
    rewards = start_rewards(recipe, start.stack, folder.logs_folder, tracker.notice)
    for notice in {text: None for texts in await ranks.call("start_notices") for text in texts}:
        tracker.notice(notice)
    folder.set_status("running")
    # Half of the requests wait in the engine, so that one can start as soon as another ends.
    max_running = 2 * recipe.rollout.max_concurrent_requests
    pool = EnginePool(ranks, start.parallel, max_running=max_running, stragglers=StragglerDetector(tracker.notice))
    start.monitor.pool = pool
    sources = await make_sources(
        recipe, source_data, rewards, pool, tokenizer, start.stack, folder.logs_folder, tracker,
        is_abandoned=lambda: bool(start.stop), earlier=[step.metrics for step in folder.logged_steps()],
        agents=lambda: ranks.agents,
    )  # fmt: skip
    return _Sampling(pool, sources)


async def _make_run(
    start: _Start, started_ranks: _StartedRanks, pool: EnginePool, run_data: RunData, checks: StepChecks
) -> Run:
    """Make everything that the loop uses: models, reshards, checkpoints and observers of the steps."""
    recipe, folder, tracker, stack = start.recipe, start.folder, start.tracker, start.stack
    ranks, reshard_calls, replacements = started_ranks
    spikes = make_spike_detector(recipe, start.origin.spikes)
    # The driver's proxies of the models on the ranks.
    models = make_rank_models(recipe, start.parallel, ranks.trainers, spikes)
    for notice in sharing_notices(models):
        tracker.notice(notice)
    planned_memory = predicted_memory(recipe)
    performance = Performance(recipe, ranks, models, planned_memory)
    weight_checks = WeightChecks(recipe, ranks, folder)
    reshard_schedule = ReshardSchedule(recipe, ranks, reshard_calls, replacements, pool, performance, weight_checks)
    stack.push_async_callback(reshard_schedule.close)
    profiles = Profiles(ranks, folder, tracker, recipe.train.profile_with)
    stack.push_async_callback(profiles.close)
    # What each step does beyond training: saves, checks and measurements.
    checkpoints = _make_checkpoints(start, ranks, weight_checks, spikes)
    observers = make_observers(
        recipe, start.parallel, folder, tracker, ranks, checkpoints, models["policy"],
        checks=checks, weight_checks=weight_checks, spikes=spikes, predicted_memory=planned_memory,
    )  # fmt: skip
    await observers.begin_run()
    return Run(
        recipe=recipe,
        folder=folder,
        origin=start.origin,
        tracker=tracker,
        stop=start.stop,
        data=run_data,
        processes=start.processes,
        ranks=ranks,
        models=models,
        pool=pool,
        reshard_schedule=reshard_schedule,
        checkpoints=checkpoints,
        samples=SampleWriter(recipe, tracker, run_data.tokenizer, models["policy"]),
        watch=StepWatch(performance=performance, profiles=profiles, observers=observers),
    )


def _make_checkpoints(
    start: _Start, ranks: RunRanks, weight_checks: WeightChecks, spikes: SpikeDetector | None
) -> Checkpoints:
    return Checkpoints(
        start.recipe,
        start.folder,
        start.tracker,
        ranks.trainers,
        start.origin.inputs.as_json(),
        checksum_after=weight_checks.checksum_after,
        check_weights=weight_checks.check_trainer,
        copies=start.processes.copies,
        spikes=spikes,
        position=start.origin.position,
    )


async def _load_state(run: Run, checkpoint: Path) -> None:
    """Load the trainers' state from a checkpoint on disk, or from the copies in host memory."""
    origin, trainers, processes = run.origin, run.ranks.trainers, run.processes
    # Colocated: engines must free the GPUs before the trainers load their weights and optimizer states.
    await run.reshard_schedule.sleep_engines()
    if origin.copied_step is None:
        await trainers.call("load_checkpoint", checkpoint)
    else:
        await processes.restore_from_copies(trainers, origin.copied_step)
        # At once: until the next copy is due, another loss would lose all steps since a checkpoint.
        await processes.copies.renew_copies(trainers)
    await run.watch.observers.resume_run(origin)
