"""Start and end of a run: its folder, ranks, loop and exported model."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

from megarl.algorithms.policy_losses import POLICY_LOSSES, is_sequence_loss
from megarl.cluster.deadlines import run_deadlines
from megarl.cluster.launchers import start_group, start_ranks
from megarl.cluster.node_checks import gpus, inspect
from megarl.cluster.rank_model import RankModel
from megarl.cluster.replacements import Replacements
from megarl.cluster.run_ranks import RunRanks, together
from megarl.cluster.weight_transfer import WeightTransfer
from megarl.cluster.worker_group import WorkerGroup
from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.config.recipe import error_page
from megarl.data.chat import tokenizer_of
from megarl.data.packing import attention_ratio
from megarl.environments.shared import close_shared
from megarl.families.shape import ModelShape, read_model_shape
from megarl.files.import_path import function_of
from megarl.loops import distillation, preference, rl, sft
from megarl.loops.checkpointing import Checkpoints
from megarl.loops.performance import Performance, Profiles
from megarl.loops.reshards import Reshards
from megarl.loops.resume import Origin, Resume, find_origin
from megarl.loops.sample_writer import SampleWriter
from megarl.loops.session import Session
from megarl.loops.sources import make_source, read_data, start_environments, start_rewards
from megarl.loops.stopping import StackRequest, StopRequest, stacks_on_quit, stopping_at_once
from megarl.platform import device
from megarl.preflight import Dropped, Kept, layout_of, planned_host_bytes, predicted_memory, row_multiple
from megarl.preflight.learning import learning_rate_finding, thresholds
from megarl.rollout.accuracy import had_ended
from megarl.rollout.pool import EnginePool
from megarl.rollout.stragglers import StragglerDetector
from megarl.rollout.tool_use import uncalled_text
from megarl.tracking.display import Display
from megarl.tracking.health import LEARNING_RATE, Health
from megarl.tracking.run_folder import RunFolder
from megarl.tracking.tracker import Tracker
from megarl.types import ConfigError, UnhealthyError

LOOPS: dict[str, Callable[[Session], Awaitable[None]]] = {
    "rl": rl.train,
    "sft": sft.train,
    "preference": preference.train,
    "reward_model": preference.train,
    "distillation": distillation.train,
}


async def run(
    recipe: Recipe,
    layout: ParallelConfig,
    *,
    resume: Resume | None = None,
    restart: bool = False,
    kept: Kept | None = None,
    display: Display | None = None,
) -> None:
    """Run a checked recipe, from the start or the newest good checkpoint to the exported model.

    `restart` moves the run folder's contents aside. `kept` is the result of `preflight.count_records`.
    """
    display = display or Display()
    # Signals first, so that one arriving while the folder is opened raises StoppedError too.
    with stopping_at_once(), RunFolder(recipe, resume=resume is not None, restart=restart) as folder:
        origin = find_origin(recipe, folder, resume, kept)
        with display.live(), stacks_on_quit(folder.logs_folder) as stacks:
            async with _started(recipe, layout, folder, origin, stacks, display) as session:
                await LOOPS[recipe.loop](session)
                # Complete all background work before the export, which needs the engines' memory.
                await session.reshards.finish()
                await session.profiles.finish()
                await session.checkpoints.complete(wait=True)
                with display.phase("exporting the model", is_told=recipe.train.steps > 0):
                    await _export(session)
                if tools := session.tool_use.never_called:
                    look = f"megarl samples {folder.path}"
                    session.tracker.notice(uncalled_text(tools, "in this start of the run", look))
                session.tracker.summary(_next_commands(folder), has_model=recipe.train.steps > 0)


def _next_commands(folder: RunFolder) -> list[str]:
    """Return the commands for looking at the run's results."""
    return [
        f"megarl report {folder.path}",
        f"megarl samples {folder.path}",
        f"tensorboard --logdir {folder.path.parent}",
    ]


def _ranks(recipe: Recipe) -> str:
    """Return the number of ranks and nodes as text for the terminal."""
    count, nodes = recipe.cluster.world_size, recipe.cluster.num_nodes
    told = f"{count} rank{'s' * (count > 1)}" + (f" on {nodes} nodes" if nodes > 1 else "")
    if recipe.separate_ranks:
        told += f", of which {recipe.separate_ranks} only sample"
    return told


async def _prepare(
    ranks: RunRanks,
    transfer: WeightTransfer,
    recipe: Recipe,
    layout: ParallelConfig,
    folder: RunFolder,
    tracker: Tracker,
) -> None:
    """Construct a worker on each rank, and send separate engines their first weights.

    Raises ConfigError naming the unfit nodes.
    """
    if len(nodes := dict.fromkeys(place[0] for place in ranks.topology)) > 1:
        tracker.tell(f"ranks on {', '.join(nodes)}")
    uses_gpu = recipe.cluster.device != "cpu" and device.current().type == "cuda"
    if uses_gpu and (notice := device.toolkit_notice()) is not None:
        tracker.notice(notice)
    if recipe.cluster.preflight:
        wrong, told = await inspect(ranks, recipe, folder.path.absolute(), planned_host_bytes(recipe))
        if wrong:
            raise ConfigError(error_page(f"nodes of run {recipe.name}", wrong))
        for line in told:
            tracker.tell(line)
    # The node checks used cluster.start_timeout_seconds. From here on each method has its own deadline.
    ranks.set_deadlines(lambda: run_deadlines(recipe.cluster))
    teachers = layout_of(recipe.for_teachers) if recipe.distillation.sizes else None
    settings = {"recipe": recipe, "layout": layout}
    of_trainers = settings | {"teacher_layout": teachers}
    if not ranks.is_separate:
        of_trainers["topology"] = ranks.topology
        await ranks.trainers.construct("megarl.worker.colocated:Worker", of_trainers)
        return
    replicas = [_construct_engine(group, recipe, layout) for group in ranks.replicas]
    await together([ranks.trainers.construct("megarl.worker.trainer_worker:TrainerWorker", of_trainers), *replicas])
    # Separate engines start without weights. The first reshard is verified, whatever weights.verify_every says.
    await transfer.run(verify=True, version=1)


async def _construct_engine(group: WorkerGroup, recipe: Recipe, layout: ParallelConfig) -> None:
    """Construct an engine's worker on each rank of a separate replica."""
    # A replica keeps its number for life: its first rank determines it.
    number = layout.leaders().index(group.part.first_rank)
    settings = {"recipe": recipe, "layout": layout, "replica": number}
    await group.construct("megarl.worker.engine_worker:EngineWorker", settings)


@asynccontextmanager
async def _replaced(
    ranks: RunRanks, recipe: Recipe, layout: ParallelConfig, folder: RunFolder, tracker: Tracker
) -> AsyncIterator[Replacements]:
    """Restart lost engine replicas (separate engines) while the others sample, until the context exits."""
    key = ranks.trainers.part.key

    async def start(size: int, first_rank: int) -> WorkerGroup:
        group = await start_group(recipe.cluster, folder.logs_folder, size, first_rank, key)
        group.deadlines, group.on_asked = run_deadlines(recipe.cluster), ranks.trainers.on_asked
        try:
            await _construct_engine(group, recipe, layout)
        # Includes cancellation: started processes must never outlive the run.
        except BaseException:
            await group.close()
            raise
        return group

    replacements = Replacements(start, tracker.notice)
    if ranks.is_separate:
        ranks.on_lost = lambda group, error: replacements.replace(group, error, len(ranks.replicas))
    try:
        yield replacements
    finally:
        # Losses while the run ends must not start new replicas.
        ranks.on_lost = None
        await replacements.close()


async def _hardware(ranks: RunRanks) -> dict[str, str]:
    """Return the ranks by node, and the GPUs of the driver's node, for attempt.json."""
    on_nodes = Counter(place[0] for place in ranks.topology)
    found = Counter(await asyncio.to_thread(gpus))
    shown = "; ".join(f"{count} x {gpu}" for gpu, count in found.items()) or "none: on the CPU"
    return {"ranks": ", ".join(f"{count} on {node}" for node, count in on_nodes.items()), "GPUs": shown}


@asynccontextmanager
async def _started(
    recipe: Recipe,
    layout: ParallelConfig,
    folder: RunFolder,
    origin: Origin,
    stacks: StackRequest,
    display: Display,
) -> AsyncIterator[Session]:
    """Start ranks, engines, rewards and tracker, and yield the session using them. Resume from a checkpoint, if any.

    Inside the context, a stop signal asks the session to stop (`StopRequest`) and does not end the process at once.
    """
    stop = StopRequest()
    async with AsyncExitStack() as stack:
        tracker = Tracker(folder, steps=recipe.train.steps, trackers=recipe.trackers, display=display)
        # The stack closes in reverse order, so the tracker closes last and can log every other end.
        stack.callback(tracker.close)
        stack.enter_context(stop.heard(tracker.notice, folder.path))
        health = _health(recipe, folder, tracker)
        tokenizer = tokenizer_of(recipe.model)
        dropped: Dropped = Counter()
        # Before the ranks start: an error in the data is then reported within seconds.
        with display.phase("reading data", is_told=True):
            data = read_data(recipe, tokenizer, dropped, folder.path)
        with tracker.phase("start"):
            with display.phase(f"starting {_ranks(recipe)}", is_told=True):
                replicas = [layout.rollout_tp] * (layout.rollout_ranks // layout.rollout_tp)
                ranks = await start_ranks(recipe.cluster, folder.logs_folder, replicas)
            stack.push_async_callback(ranks.close)
            transfer = WeightTransfer(ranks)
            ranks.on_asked(stop.ask)
            # From now on SIGQUIT prints the stacks of the ranks too.
            stacks.ask_others = ranks.show_stacks
            with display.phase("building models", is_told=True):
                await _prepare(ranks, transfer, recipe, layout, folder, tracker)
            folder.describe({"machine": await _hardware(ranks)})
        replacements = await stack.enter_async_context(_replaced(ranks, recipe, layout, folder, tracker))
        rewards = start_rewards(recipe, stack, folder.logs_folder, tracker.notice)
        for notice in {text: None for texts in await ranks.call("start_notices") for text in texts}:
            tracker.notice(notice)
        folder.set_status("running")
        most = 2 * recipe.rollout.max_concurrent_requests
        pool = EnginePool(ranks, layout, max_running=most, stragglers=StragglerDetector(tracker.notice))
        stack.push_async_callback(close_shared)
        environments = start_environments(recipe, stack, folder.logs_folder)
        # Sources need the steps of earlier attempts for `had_ended`, and reading a long file once is enough.
        # A signal may have interrupted a step's evaluation: its other metrics are in the checkpoint alone.
        earlier = [*folder.logged_steps(), *([origin.unlogged] if origin.unlogged else [])]
        sources = [
            await make_source(
                given,
                data[given.name],
                rewards[given.name],
                environments.get(given.name),
                pool,
                tokenizer,
                stack,
                lambda: bool(stop),
                tracker,
                had_ended(earlier, given.name, data[given.name][1], is_mixture=bool(recipe.mixture)),
            )
            for given in recipe.sources
        ]
        models = _models(recipe, layout, ranks.trainers)
        performance = Performance(recipe, ranks, models, predicted_memory(recipe))
        reshards = Reshards(recipe, ranks, transfer, replacements, pool, performance)
        stack.push_async_callback(reshards.close)
        profiles = Profiles(ranks, folder, tracker)
        stack.push_async_callback(profiles.close)
        session = Session(
            recipe=recipe,
            folder=folder,
            tracker=tracker,
            tokenizer=tokenizer,
            ranks=ranks,
            reshards=reshards,
            models=models,
            pool=pool,
            sources=sources,
            samples=SampleWriter(recipe, tracker, tokenizer, models["policy"]),
            checkpoints=Checkpoints(recipe, folder, tracker, ranks.trainers, origin.inputs.as_json()),
            origin=origin,
            stop=stop,
            performance=performance,
            profiles=profiles,
            health=health,
            dropped=dropped,
        )
        if origin.checkpoint:
            with display.phase("loading the checkpoint", is_told=True):
                await session.sleep_engines()
                await ranks.trainers.call("load_checkpoint", origin.checkpoint)
        # Last: until here a signal ends the run at once, because there is no progress to save.
        stop.steps_begin()
        yield session


def _health(recipe: Recipe, folder: RunFolder, tracker: Tracker) -> Health:
    """Return the health rules with the state of earlier attempts. Warn of an unusual learning rate.

    Raises UnhealthyError for such a rate if train.on_unhealthy = stop, because there is nothing to save yet.
    """
    health = Health(thresholds(recipe))
    health.replay(folder.logged_steps())
    # A step after the checkpoint may have warned. It is trained again and its metrics are dropped, but the warning is
    # not repeated.
    health.warned.update(finding["rule"] for finding in folder.findings)
    finding = learning_rate_finding(recipe, folder.resumed_step) if health.takes(LEARNING_RATE) else None
    if finding is not None:
        health.warned.add(finding.rule)
        tracker.unhealthy(finding)
        if recipe.train.on_unhealthy == "stop":
            raise UnhealthyError(f"train.on_unhealthy = stop: {finding.text}")
    return health


def _models(recipe: Recipe, layout: ParallelConfig, ranks: WorkerGroup) -> dict[str, RankModel]:
    """Return the recipe's models by name."""

    def shape_of(folder: str) -> ModelShape:
        return read_model_shape(folder, recipe.override_of(folder))

    shape = shape_of(recipe.model.folder)
    policy = RankModel(
        ranks,
        layout,
        recipe.trainer.max_tokens_per_microbatch,
        row_multiple(recipe),
        attention_ratio(shape),
        together=recipe.sequences_per_example,
        shape=shape.with_value_head() if recipe.loop == "reward_model" else shape,
        # A backward pass costs two forward passes. With LoRA the base weights need no gradients, which saves one.
        update_passes=2.0 if recipe.lora.rank else 3.0,
    )
    shapes: dict[str, ModelShape] = {}
    if recipe.has_reference:
        shapes["reference"] = shape
    if recipe.has_critic:
        shapes["critic"] = shape_of(recipe.further_models.get("critic.path", recipe.model.folder)).with_value_head()
    if (reward_model := recipe.further_models.get("reward.model")) is not None:
        shapes["reward_model"] = shape_of(reward_model)
    models = {"policy": policy} | {
        name: replace(policy, name=name, shape=own, update_passes=3.0) for name, own in shapes.items()
    }
    teacher = policy
    if recipe.distillation.sizes:
        own = recipe.for_teachers
        teacher = replace(policy, layout=layout_of(own), row_multiple=row_multiple(own))
    models |= {name: replace(teacher, name=name, shape=shape_of(folder)) for name, folder in recipe.teachers.items()}
    if recipe.has_advantages:
        policy_loss = function_of(recipe.algorithm.policy_loss, POLICY_LOSSES, "algorithm.policy_loss")
        models["policy"] = replace(policy, keeps_samples=is_sequence_loss(policy_loss))
    return models


async def _export(session: Session) -> None:
    """Export the trained model, and the critic if any. A run with 0 training steps exports nothing."""
    if not session.recipe.train.steps:
        return
    await session.sleep_engines()
    await session.ranks.trainers.call("export", session.folder.model_folder)
    if session.recipe.has_critic:
        await session.ranks.trainers.call("export", session.folder.path / "hf_critic", "critic")
