"""The command `megarl service`: checks a recipe for a service, starts its ranks, and serves until a signal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from megarl.cluster.calls.deadlines import run_deadlines
from megarl.cluster.launchers.run_nodes import start_ranks
from megarl.cluster.run_ranks import RunRanks, gather_answers
from megarl.config import AlgorithmConfig, Recipe, RewardConfig
from megarl.config.idle import fields_set_by_user
from megarl.config.parallel import ParallelConfig
from megarl.config.recipe import error_page
from megarl.families.shape import read_model_shape
from megarl.files.atomic import raise_storage_errors
from megarl.files.folder_lock import FolderLock
from megarl.loops.models import make_rank_models
from megarl.loops.stopping import leaving_on_signals
from megarl.planner.defaults import with_memory_defaults
from megarl.preflight import check, download_missing, load
from megarl.rollout.pool import EnginePool
from megarl.service.handlers.desk import IDLE_SECONDS, Desk
from megarl.service.http.accounts import Accounts, read_accounts
from megarl.service.http.routes import make_server
from megarl.service.messages import wire
from megarl.service.queueing.admission import QueueLimits
from megarl.service.ranks.rank_trainer import RankTrainer
from megarl.service.storage.checkpoints import MAX_BYTES, Checkpoints
from megarl.service.storage.deletion import delete_tree
from megarl.service.trainer import ServedModel
from megarl.tracking.display import Display
from megarl.types import ConfigError

_WORKERS = "megarl.service.ranks.rank_worker"
"""Module with the worker classes of the ranks."""
ENGINE_SLOTS = 4
"""Default number of adapters that an engine uses at once."""
_ENGINE_SECONDS = 0.1
"""Maximum seconds of sampling in one call of an engine."""
_MLP, _ATTENTION = {"gate_up_proj", "down_proj"}, {"qkv_proj", "o_proj"}
UNUSED = (
    "trackers", "samples_every_steps", "samples_with_tokens", "model.chat_template", "model.chat_template_kwargs",
    "data.validation", "data.ptx", "data.format", "data.fields", "data.answer_field", "data.system_prompt",
    "data.overlong", "data.streaming", "data.shuffle", "data.curriculum", "mixture", "cluster.recover",
    "cluster.spare_nodes", "cluster.max_restarts", "cluster.peak_tflops", "trainer.share_prefixes",
    "lora.export_adapter", "optimizer.learning_rate", "optimizer.schedule", "optimizer.decay_steps",
    "optimizer.warmup_steps", "optimizer.warmup_ratio", "optimizer.min_learning_rate", "optimizer.weight_decay",
    "optimizer.betas", "optimizer.epsilon", "optimizer.clip_grad_norm", "optimizer.max_skipped_updates",
    "rollout.sampling.temperature", "rollout.sampling.temperature_schedule", "rollout.sampling.end_temperature",
    "rollout.sampling.temperature_steps", "rollout.sampling.top_p", "rollout.sampling.top_k",
    "rollout.sampling.min_p", "rollout.sampling.stop", "rollout.sampling.stop_token_ids", "rollout.environment",
    "rollout.environment_kwargs", "rollout.environment_processes", "rollout.environment_memory_gib",
    "rollout.tool_parser", "rollout.agent", "rollout.endpoint", "rollout.max_turns", "rollout.truncated_turn",
    "rollout.history", "rollout.budget", "rollout.on_stale", "rollout.stragglers", "rollout.max_staleness",
    "rollout.sync_every", "reward", "sandbox", "algorithm", "critic", "train", "evaluation", "weights.verify_every",
    "weights.check_every", "weights.canary_every", "weights.probe_tolerance", "checkpoint", "health", "monitor",
)  # fmt: skip
"""Fields and sections of a recipe that a service ignores: the client's program decides them, or only a run has them."""


@dataclass(frozen=True, slots=True)
class Service:
    """A service with checked inputs, ready to start. `folder` holds its logs and checkpoints.

    An engine uses `num_slots` adapters at once. 0: adapters are merged into the engine's weights.
    """

    recipe: Recipe
    parallel: ParallelConfig
    served: ServedModel
    accounts: Accounts
    folder: Path
    host: str
    port: int
    idle_seconds: float
    max_checkpoint_bytes: int
    max_host_bytes: int | None
    num_slots: int
    limits: QueueLimits
    notices: tuple[str, ...]


def prepare(
    file: Path,
    overrides: Sequence[str],
    *,
    host: str,
    port: int,
    keys: Path | None = None,
    served_name: str | None = None,
    tokenizer: str | None = None,
    idle_seconds: float = IDLE_SECONDS,
    max_checkpoint_bytes: int = MAX_BYTES,
    max_host_bytes: int | None = None,
    engine_slots: int | None = None,
    limits: QueueLimits | None = None,
) -> Service:
    """Check everything before a process starts. Raises ConfigError or DataError listing all errors of the recipe.

    Clients call the base model `served_name` (default: model.path), and load its tokenizer from `tokenizer`. A model
    without requests for `idle_seconds` moves to disk. `max_checkpoint_bytes` limits the checkpoints of each account.
    `max_host_bytes` limits models and copies of weights in the memory of each host (default: a share of it). An engine
    samples from `engine_slots` adapters at once (default: `ENGINE_SLOTS`). `limits` are limits of waiting tokens.
    """
    accounts = read_accounts(keys, host)
    # Report a missing or unknown SDK now, before any rank starts.
    wire.load_messages()
    user_recipe = load(file, overrides)
    if problems := list(_list_unfit_fields(user_recipe)):
        raise ConfigError(error_page(f"recipe {user_recipe.name} for a service", problems))
    display = Display()
    download_missing(user_recipe, display.info)
    # Remove the loop's models first: the memory is planned for the service alone.
    recipe = with_memory_defaults(_remove_training_loop(user_recipe), is_start=True)
    parallel = check(recipe)
    served = _make_served_model(recipe, served_name, tokenizer)
    folder = Path(recipe.runs_folder) / recipe.name
    if not recipe.sends_adapter and (engine_slots or 1) > 1:
        raise ConfigError(
            f"--engine-slots = {engine_slots}: with lora.sync = {recipe.lora.sync} the engines get merged weights, of "
            "one adapter at a time; leave it out"
        )
    return Service(
        recipe=recipe,
        parallel=parallel,
        served=served,
        accounts=accounts,
        folder=folder,
        host=host,
        port=port,
        idle_seconds=idle_seconds,
        max_checkpoint_bytes=max_checkpoint_bytes,
        max_host_bytes=max_host_bytes,
        num_slots=(engine_slots or ENGINE_SLOTS) if recipe.sends_adapter else 0,
        limits=limits or QueueLimits(),
        notices=(*user_recipe.notices, *warn_of_unused_fields(user_recipe)),
    )


def _make_served_model(recipe: Recipe, served_name: str | None, tokenizer: str | None) -> ServedModel:
    """Describe the base model for clients. Names default to model.path."""
    shape = read_model_shape(recipe.model.folder, recipe.model.override_config)
    lora_targets = set(recipe.lora.targets)
    return ServedModel(
        name=served_name or recipe.model.path,
        architecture=shape.family,
        tokenizer=tokenizer or recipe.model.path,
        rank=recipe.lora.rank,
        trains_mlp=lora_targets >= _MLP,
        trains_attention=lora_targets >= _ATTENTION,
        vocab_size=shape.vocab_size,
        row_tokens=recipe.trainer.max_tokens_per_microbatch,
        context_tokens=recipe.context_tokens,
    )


def warn_of_unused_fields(recipe: Recipe) -> Iterator[str]:
    """Yield a notice that names the recipe's fields and sections without effect in a service."""
    set_fields = list(fields_set_by_user(recipe))
    unused = [name for name in UNUSED if any(f"{field}.".startswith(f"{name}.") for field in set_fields)]
    if unused:
        yield (
            f"not used by a service: {', '.join(unused)}. The client's program decides these, or only a training run "
            "has them"
        )


def _list_unfit_fields(recipe: Recipe) -> Iterator[str]:
    """Yield an error for each field that a service does not support."""
    if recipe.loop != "rl":
        yield f"loop = {recipe.loop}: a service trains and samples; give a recipe with loop rl"
    if not recipe.lora.rank:
        yield "lora.rank = 0: a service trains LoRA adapters; set lora.rank"
    if recipe.lora.dropout:
        yield f"lora.dropout = {recipe.lora.dropout}: models would share its random numbers; set it to 0"
    targets = set(recipe.lora.targets)
    for module_group in (_MLP, _ATTENTION):
        if len(targets & module_group) == 1:
            yield (
                f"lora.targets = {', '.join(recipe.lora.targets)}: clients choose between attention and MLP as a "
                f"whole; name both of {' and '.join(sorted(module_group))}, or neither"
            )
    if recipe.optimizer.name != "adam":
        yield f"optimizer.name = {recipe.optimizer.name}: clients send settings of AdamW; set adam"
    if fraction := recipe.trainer.optimizer_offload_fraction:
        yield (
            f"trainer.optimizer_offload_fraction = {fraction}: models take turns, and this optimizer's state cannot be "
            "exchanged; set it to 0"
        )
    if recipe.weights.overlap:
        yield "weights.overlap = true: the trainer of a service sends adapters between two calls; leave it out"
    if recipe.trainer.overlap_grad_reduce:
        yield "trainer.overlap_grad_reduce = true: gradients of several calls add up before one reduction; leave it out"
    if recipe.trainer.router_replay:
        yield "trainer.router_replay = true: clients send no experts to replay; leave it out"
    if setting := recipe.trainer.draft_layers_setting:
        yield f"{setting}: no client sends this loss; leave it out"
    if (rate := recipe.trainer.drafter_learning_rate) is not None:
        yield f"trainer.drafter_learning_rate = {rate}: no client sends this loss; leave it out"


def _remove_training_loop(recipe: Recipe) -> Recipe:
    """Return the recipe without the loop's models and tasks: clients bring data, rewards and losses."""
    # The default None may enable the overlap, but gradients of several calls add up before one reduction.
    trainer = recipe.trainer.model_copy(update={"overlap_grad_reduce": False, "share_prefixes": "off"})
    return recipe.model_copy(update={"trainer": trainer, "algorithm": AlgorithmConfig(), "reward": RewardConfig()})


async def run(service: Service, announce: Callable[[str], object]) -> None:
    """Start the ranks, and serve until a signal arrives. `announce` is called with the URL.

    Raises StoppedError. Raises RunFolderLockedError if another service uses the folder.
    """
    recipe, display = service.recipe, Display()
    logs_folder, idle_folder = service.folder / "service" / "logs", service.folder / "service" / "idle"
    with raise_storage_errors(logs_folder):
        logs_folder.mkdir(parents=True, exist_ok=True)
        # Two services in one folder would delete each other's models.
        lock = FolderLock(service.folder / "service", recipe.name)
        # Sessions end with their service: nobody can ask for the models that an earlier service left here.
        delete_tree(idle_folder, display.warn)
        # Another user's file may be left in it.
        idle_folder.mkdir(exist_ok=True)
    with leaving_on_signals("the service has ended; named checkpoints remain, and can be loaded after the next start"):
        async with AsyncExitStack() as stack:
            stack.callback(lock.release)
            # Runs after the ranks have ended: nobody can ask for these models any more.
            stack.callback(delete_tree, idle_folder, display.warn)
            ranks = await start_ranks(
                recipe.cluster, logs_folder, service.parallel.replica_sizes, trainer=service.parallel
            )
            stack.push_async_callback(ranks.close)
            ranks.set_deadlines(lambda: run_deadlines(recipe.cluster))
            await construct_workers(ranks, service)
            trainer = make_trainer(ranks, service, idle_folder, display.warn)
            display.info(await trainer.start())
            checkpoints = Checkpoints(
                service.folder / "service" / "checkpoints", display.warn, max_bytes=service.max_checkpoint_bytes
            )
            desk = Desk(
                trainer, checkpoints, report=display.warn, limits=service.limits, idle_seconds=service.idle_seconds
            )
            server = make_server(desk, service.accounts)
            url = await server.start(service.host, service.port)
            # The stack closes in reverse: the server ends before the ranks that serve its requests.
            stack.push_async_callback(server.close)
            announce(url)
            # Wait until a signal cancels this, or the ranks fail.
            await trainer.failure


async def construct_workers(ranks: RunRanks, service: Service) -> None:
    """Construct a worker on each rank, with trainer, engine or both."""
    recipe, parallel = service.recipe, service.parallel
    trainer_arguments = {"recipe": recipe, "parallel": parallel, "topology": ranks.trainers.topology}
    slot_argument = {"num_slots": service.num_slots}
    if not ranks.is_separate:
        await ranks.trainers.construct(f"{_WORKERS}:ServiceWorker", trainer_arguments | slot_argument)
        return
    engines = [
        group.construct(
            f"{_WORKERS}:ServiceEngine", {"recipe": recipe, "parallel": parallel, "replica": number, **slot_argument}
        )
        for number, group in enumerate(ranks.replicas)
    ]
    await gather_answers([ranks.trainers.construct(f"{_WORKERS}:ServiceTrainer", trainer_arguments), *engines])


def make_trainer(ranks: RunRanks, service: Service, idle_folder: Path, report: Callable[[str], object]) -> RankTrainer:
    """Return the trainer of a service. Call its `start` first.

    `idle_folder` exists on every node, for idle models. `report` is called with disk faults.
    """
    recipe, parallel = service.recipe, service.parallel
    num_running = recipe.rollout.max_concurrent_requests
    # Adapters are written between two calls of an engine. Short calls let requests for new versions wait less.
    pool = EnginePool(ranks, parallel, max_running=2 * num_running, budget_seconds=_ENGINE_SECONDS)
    return RankTrainer(
        service.served,
        ranks,
        pool,
        make_rank_models(recipe, parallel, ranks.trainers)["policy"],
        idle_folder=idle_folder,
        num_slots=service.num_slots,
        num_sequences=num_running * len(parallel.leaders()),
        report=report,
        max_bytes=service.max_host_bytes,
    )
