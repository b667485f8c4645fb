"""Start of a run's ranks: processes, node checks, workers, and new workers for lost engines."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from megarl.cluster.calls.deadlines import run_deadlines
from megarl.cluster.calls.worker_group import WorkerGroup
from megarl.cluster.checks.node_checks import inspect_nodes, unfit_nodes_error
from megarl.cluster.checks.node_report import gpus
from megarl.cluster.replacements import Replacements
from megarl.cluster.reshard_calls import ReshardCalls
from megarl.cluster.run_ranks import RunRanks, gather_answers
from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.loops.ranks.rank_processes import RankProcesses
from megarl.loops.stopping import StackRequest, StopRequest
from megarl.planner.predictions import planned_host_bytes
from megarl.planner.sizes import parallel_of
from megarl.platform import device
from megarl.tracking.run_folder import RunFolder
from megarl.tracking.tracker import Tracker
from megarl.types import FaultyNodeError

COLOCATED_WORKER = "megarl.worker.colocated:Worker"
"""Class of a worker that trains and samples. Benchmarks replace it by a measuring class."""


def format_rank_count(recipe: Recipe) -> str:
    count, nodes = recipe.cluster.world_size, recipe.cluster.num_nodes
    text = f"{count} rank{'s' * (count > 1)}" + (f" on {nodes} nodes" if nodes > 1 else "")
    if recipe.separate_ranks:
        text += f", of which {recipe.separate_ranks} only sample"
    return text


async def start_ranks(
    processes: RankProcesses, folder: RunFolder, tracker: Tracker, stop: StopRequest, stacks: StackRequest
) -> RunRanks:
    """Start the ranks of the run. Connect stop signals, hang reports and SIGQUIT with them."""
    ranks = await processes.start(folder.logs_folder, folder.bad_nodes, tracker.notice)
    ranks.on_stop_signal(stop.record_signal)
    stop.end_ranks = ranks.begin_close
    ranks.report_hangs(folder.logs_folder, tracker.notice)
    # From now on SIGQUIT prints the stacks of the ranks too.
    stacks.ask_others = ranks.show_stacks
    return ranks


async def construct_workers(
    processes: RankProcesses, folder: RunFolder, tracker: Tracker, ranks: RunRanks, reshard_calls: ReshardCalls
) -> None:
    """Construct a worker on each rank, and send separate engines their first weights. Raises as `_check_nodes`."""
    recipe, parallel = processes.recipe, processes.parallel
    await _check_nodes(processes, folder, tracker, ranks)
    # The node checks used cluster.start_timeout_seconds. From here on each method has its own deadline.
    ranks.set_deadlines(lambda: run_deadlines(recipe.cluster))
    teacher_parallel = parallel_of(recipe.for_teachers) if recipe.distillation.sizes else None
    settings = {"recipe": recipe, "parallel": parallel, "frozen_parallel": teacher_parallel}
    settings["topology"] = ranks.trainers.topology
    if not ranks.is_separate:
        await ranks.trainers.construct(COLOCATED_WORKER, settings)
        return
    replicas = [_construct_engine(group, recipe, parallel) for group in ranks.replicas]
    await gather_answers([ranks.trainers.construct("megarl.worker.trainer_worker:TrainerWorker", settings), *replicas])
    # Separate engines start without weights. The first reshard is verified, whatever weights.verify_every says.
    await reshard_calls.run(verify=True, version=1)


async def _check_nodes(processes: RankProcesses, folder: RunFolder, tracker: Tracker, ranks: RunRanks) -> None:
    """Print the ranks' nodes and the results of their checks.

    Raises ConfigError for unfit nodes, DiskFullError if they only lack space, or FaultyNodeError if they joined after a
    loss.
    """
    recipe = processes.recipe
    if len(nodes := dict.fromkeys(place[0] for place in ranks.topology)) > 1:
        tracker.info(f"ranks on {', '.join(nodes)}")
    _refuse_bad_nodes(recipe, folder, tracker, list(nodes))
    uses_gpu = recipe.cluster.device != "cpu" and device.current().type == "cuda"
    if uses_gpu and (notice := device.toolkit_notice()) is not None:
        tracker.notice(notice)
    # After a loss most nodes have passed the checks; a spare one has not.
    checked_nodes = processes.checked_nodes
    if not recipe.cluster.preflight or checked_nodes >= nodes.keys():
        return
    node_faults, lines = await inspect_nodes(ranks, recipe, folder.path.absolute(), planned_host_bytes(recipe))
    if node_faults:
        error = unfit_nodes_error(f"nodes of run {recipe.name}", node_faults)
        if checked_nodes:
            # An unfit spare node must not end the run for ever: the job is queued again without it.
            raise FaultyNodeError(str(error), nodes=tuple(node for node in nodes if node not in checked_nodes))
        raise error
    checked_nodes.update(nodes)
    for line in lines:
        tracker.info(line)


def _refuse_bad_nodes(recipe: Recipe, folder: RunFolder, tracker: Tracker, nodes: Sequence[str]) -> None:
    """Raise FaultyNodeError for a node recorded as faulty. On a single machine, only warn."""
    bad_nodes = [node for node in nodes if node in folder.bad_nodes]
    if not bad_nodes:
        return
    text = f"bad_nodes in status.json has {', '.join(bad_nodes)}, where a canary was wrong (weights.canary_every)"
    if recipe.cluster.launcher == "local":
        tracker.notice(f"{text}; the run goes on there, because it has no other node")
        return
    raise FaultyNodeError(
        f"{text}: exclude the node (Slurm: --exclude), or remove it from bad_nodes after its repair. Go on with: "
        f"megarl train {folder.path} --resume",
        nodes=tuple(bad_nodes),
    )


@asynccontextmanager
async def replacing_lost_engines(
    recipe: Recipe, parallel: ParallelConfig, folder: RunFolder, tracker: Tracker, ranks: RunRanks
) -> AsyncIterator[Replacements]:
    """Context that restarts lost separate engines while the others sample."""
    cluster = recipe.cluster

    async def start_replica(lost: WorkerGroup) -> WorkerGroup:
        assert ranks.nodes is not None
        group = await ranks.nodes.fork_replica(lost, ranks.groups, folder.logs_folder)
        group.deadlines, group.on_stop_signal = run_deadlines(cluster), ranks.trainers.on_stop_signal
        try:
            await _construct_engine(group, recipe, parallel)
        # Includes cancellation: started processes must never outlive the run.
        except BaseException:
            await group.close()
            raise
        return group

    replacements = Replacements(start_replica, tracker.notice)
    if ranks.is_separate:
        ranks.on_lost = lambda group, error: replacements.replace(group, error, len(ranks.replicas))
    try:
        yield replacements
    finally:
        # Losses while the run ends must not start new replicas.
        ranks.on_lost = None
        await replacements.close()


async def _construct_engine(group: WorkerGroup, recipe: Recipe, parallel: ParallelConfig) -> None:
    # A replica keeps its number for life: its first rank determines it.
    replica_number = parallel.leaders().index(group.part.first_rank)
    settings = {"recipe": recipe, "parallel": parallel, "replica": replica_number}
    await group.construct("megarl.worker.engine_worker:EngineWorker", settings)


async def describe_hardware(ranks: RunRanks) -> dict[str, str]:
    """Return the number of ranks by node, and the GPUs of the driver's node, for attempt.json."""
    rank_counts = Counter(place[0] for place in ranks.topology)
    gpu_counts = Counter(await asyncio.to_thread(gpus))
    gpu_text = "; ".join(f"{count} x {gpu}" for gpu, count in gpu_counts.items()) or "none: on the CPU"
    return {"ranks": ", ".join(f"{count} on {node}" for node, count in rank_counts.items()), "GPUs": gpu_text}
