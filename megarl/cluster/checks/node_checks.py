"""Checks of a run's nodes before models are loaded there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.cluster.calls.deadlines import Deadlines
from megarl.cluster.calls.worker_group import WorkerGroup
from megarl.cluster.checks.bandwidth import describe_bandwidths, find_slow_links
from megarl.cluster.run_ranks import RunRanks, gather_answers
from megarl.config import Recipe
from megarl.config.recipe import error_page
from megarl.files.atomic import LEAST_FREE_BYTES
from megarl.findings import Finding
from megarl.planner.memory.node_bytes import NodeRanks, RankHostBytes
from megarl.platform import cuda_extensions, transformer_engine
from megarl.platform.gpu_needs import Need, needs, unmet_needs
from megarl.types import ConfigError, DiskFullError, MegarlError

_CLOCK_SECONDS = 60.0
"""Maximum seconds by which a node's clock may differ from the median clock."""


async def inspect_nodes(
    ranks: RunRanks, recipe: Recipe, run_folder: Path, planned_memory: RankHostBytes | None = None
) -> tuple[list[Finding], list[str]]:
    """Check the nodes of all ranks, and the bandwidths within each group. Return faults and notices.

    `planned_memory` None: host memory is not checked. The ranks' worker must be a `NodeReport`.
    """
    cluster = recipe.cluster
    ranks.set_deadlines(
        lambda: Deadlines.for_all_methods(cluster.start_timeout_seconds, "cluster.start_timeout_seconds")
    )
    # The node of each rank.
    nodes = [place[0] for place in ranks.topology]
    reports = await _collect_reports(ranks, nodes, recipe, run_folder)
    node_faults: list[Finding] = find_all_faults(reports, nodes, recipe, str(run_folder), planned_memory)
    if len(reports) > 1 and not node_faults:
        node_faults = await _find_unreachable_nodes(ranks, nodes, reports)
    await ranks.call("close")
    # Bandwidths are measured only where ranks have links: not for groups of one rank, nor on one node without GPUs.
    linked_groups = [group for group in ranks.groups if group.world_size > 1]
    if node_faults or not linked_groups or (len(reports) == 1 and not reports[nodes[0]]["gpus"]):
        return node_faults, []
    bandwidths = [
        rank_bandwidths
        for group_bandwidths in await gather_answers([_measure_bandwidths(group, recipe) for group in linked_groups])
        for rank_bandwidths in group_bandwidths
    ]
    topology = [place for group in linked_groups for place in group.topology]
    return list(find_slow_links(topology, bandwidths, cluster.min_bandwidth_fraction)), [
        describe_bandwidths(bandwidths)
    ]


async def _collect_reports(
    ranks: RunRanks, nodes: Sequence[str], recipe: Recipe, run_folder: Path
) -> dict[str, dict[str, Any]]:
    """Return the report of each node (`NodeReport.inspect_node`). `nodes` is each rank's node."""
    models = [str(Path(model).absolute()) for model in (recipe.model.folder, *recipe.further_models.values())]
    # Usually the rank with LOCAL_RANK 0 inspects its node. After a resize a node may have no such rank: its first rank
    # does it.
    nodes_with_rank_0 = {node for node, local in zip(nodes, ranks.local_ranks, strict=True) if local == 0}
    substitute_ranks = [nodes.index(node) for node in dict.fromkeys(nodes) if node not in nodes_with_rank_0]
    reports = await ranks.call_with_first_rank("inspect_node", models, str(run_folder), substitute_ranks)
    return join_reports(nodes, reports)


async def _find_unreachable_nodes(
    ranks: RunRanks, nodes: Sequence[str], reports: Mapping[str, Mapping[str, Any]]
) -> list[Finding]:
    """Let each node connect to all nodes' ports. Return the failures."""
    addresses = {node: (ranks.hosts[nodes.index(node)], report["port"]) for node, report in reports.items()}
    errors_of_ranks = await ranks.call("test_connections", addresses)
    errors_by_node = {node: errors for node, errors in zip(nodes, errors_of_ranks, strict=True) if errors}
    return list(unreachable_nodes(errors_by_node))


def join_reports(nodes: Sequence[str], reports_of_ranks: Sequence[dict[str, Any] | None]) -> dict[str, dict[str, Any]]:
    """Return the report of each node, from the node and the report of each rank.

    Under Ray each group on a node has a report of its own GPUs. These are joined.
    """
    reports: dict[str, dict[str, Any]] = {}
    for node, report in zip(nodes, reports_of_ranks, strict=True):
        if report:
            reports[node] = _join_two_reports(reports[node], report) if node in reports else report
    return reports


def _join_two_reports(report: dict[str, Any], other_report: dict[str, Any]) -> dict[str, Any]:
    """Return one report of two groups on a node: the usable GPUs of both, and the faults of either."""
    return {
        **other_report,
        "usable_gpus": (*report["usable_gpus"], *other_report["usable_gpus"]),
        "unread": [*dict.fromkeys((*report["unread"], *other_report["unread"]))],
        "is_writable": report["is_writable"] and other_report["is_writable"],
        "broken": report["broken"] | other_report["broken"],
        "free_bytes": min(report["free_bytes"], other_report["free_bytes"]),
        # The need is that of all groups together. The limit of one small container must not refuse the node.
        "memory": max(report["memory"], other_report["memory"]),
        **{
            name: report[name] or other_report[name]
            for name in ("shared_memory", "full_shared_memory", "device", "compiler")
        },
    }


def find_all_faults(
    reports: Mapping[str, Mapping[str, Any]],
    nodes: Sequence[str],
    recipe: Recipe,
    run_folder: str,
    planned_memory: RankHostBytes | None,
) -> list[Finding]:
    """Return the faults in the nodes' reports. `nodes` is each rank's node.

    `planned_memory` None: host memory is not checked.
    """
    faults_by_node = [
        fault
        for ranks_per_node, kind_needs in split_ranks_by_kind(recipe, nodes)
        for fault in find_node_faults(
            {node: reports[node] for node in ranks_per_node}, run_folder, ranks_per_node, kind_needs
        )
    ]
    return (
        faults_by_node
        if planned_memory is None
        else [*faults_by_node, *find_memory_shortages(reports, nodes, recipe.trainer_ranks, planned_memory)]
    )


def split_ranks_by_kind(recipe: Recipe, nodes: Sequence[str]) -> Iterator[tuple[Counter[str], dict[str, Need]]]:
    """Yield, for the nodes of trainers and of engines, the ranks per node and their needs.

    `nodes` is each rank's node.
    """
    all_needs = needs(recipe)
    if recipe.cluster.groups.engines is None:
        yield Counter(nodes), all_needs
        return
    engine_needs = needs(recipe, is_trained=False)
    num_trainers = recipe.trainer_ranks
    yield Counter(nodes[:num_trainers]), {field: need for field, need in all_needs.items() if field not in engine_needs}
    yield Counter(nodes[num_trainers:]), engine_needs


async def _measure_bandwidths(group: WorkerGroup, recipe: Recipe) -> list[dict[str, float]]:
    """Return each rank's bandwidths within its group in bytes per second, by kind of link."""
    settings = {"topology": group.topology, "timeout_seconds": recipe.cluster.collective_timeout_seconds}
    await group.construct("megarl.cluster.checks.bandwidth:Bandwidth", settings)
    return await group.call("measure")


def find_node_faults(
    reports: Mapping[str, Mapping[str, Any]],
    run_folder: str,
    num_ranks: Mapping[str, int],
    kind_needs: Mapping[str, Need],
) -> Iterator[Finding]:
    """Yield the faults of one kind of nodes: those in their reports, and unmet needs.

    `reports` are results of `NodeReport.inspect_node` by node. `num_ranks` has the ranks per node, `kind_needs` their
    needs by recipe field.
    """
    ranks_per_node = max(num_ranks.values())
    num_gpus = max(len(report["gpus"]) for report in reports.values())
    distinct_gpus = {gpu for report in reports.values() for gpu in report["gpus"]}
    # The median clock is the reference, so that one wrong clock does not make all others look wrong.
    median_clock = sorted(report["time"] for report in reports.values())[len(reports) // 2]
    for node, report in reports.items():
        yield from _find_storage_faults(node, report, run_folder)
        yield from _find_gpu_faults(node, report, num_gpus, num_ranks[node], ranks_per_node)
        yield from _find_software_faults(node, report, kind_needs)
        if abs(report["time"] - median_clock) > _CLOCK_SECONDS:
            text = f"its clock is {report['time'] - median_clock:+.0f} s off"
            yield _bad_node(node, text, "synchronise it, for example with NTP")
    if len(distinct_gpus) > 1:
        text = f"nodes have different GPUs or drivers: {', '.join(sorted(distinct_gpus))}"
        yield Finding("bad", "", text, "use nodes of one kind")


def _find_storage_faults(node: str, report: Mapping[str, Any], run_folder: str) -> Iterator[Finding]:
    """Yield faults of model folders, run folder and shared memory."""
    for folder in report["unread"]:
        text = f"{folder} does not exist or cannot be read"
        yield _bad_node(node, text, "put it on storage shared by all nodes")
    if not report["is_writable"]:
        text = f"{run_folder} cannot be written"
        yield _bad_node(node, text, "set runs_folder to storage shared by all nodes")
    elif report["free_bytes"] < LEAST_FREE_BYTES:
        free_mib = report["free_bytes"] / 2**20
        text = f"{run_folder} has {free_mib:.0f} MiB left, a run needs {LEAST_FREE_BYTES >> 20}"
        yield _bad_node(node, text, "free space there, or set runs_folder", exit_code=DiskFullError.exit_code)
    if report["shared_memory"]:
        yield _bad_node(node, report["shared_memory"])
    if report["full_shared_memory"]:
        yield _bad_node(node, report["full_shared_memory"], exit_code=DiskFullError.exit_code)


def _find_gpu_faults(
    node: str, report: Mapping[str, Any], num_gpus: int, num_ranks: int, ranks_per_node: int
) -> Iterator[Finding]:
    """Yield faults of the device, and missing GPUs. `num_gpus`: most GPUs of any node of this kind; 0: without GPUs."""
    if report["device"]:
        yield _bad_node(node, report["device"])
    # Nodes of one kind have the same number of GPUs. A node with fewer has lost a GPU.
    if num_gpus and len(report["gpus"]) < max(ranks_per_node, num_gpus):
        text = f"shows {len(report['gpus'])} GPUs; it should have {max(ranks_per_node, num_gpus)}"
        yield _bad_node(node, text, "exclude the node")
    elif num_gpus and 0 < len(report["usable_gpus"]) < num_ranks:
        # Without any visible GPU the device's own check reports the fault.
        yield _bad_node(
            node,
            f"CUDA_VISIBLE_DEVICES leaves {len(report['usable_gpus'])} of its {len(report['gpus'])} GPUs visible, "
            f"but {num_ranks} ranks run there",
            "unset it, or use fewer ranks per node (cluster.ranks_per_node)",
        )


def _find_software_faults(node: str, report: Mapping[str, Any], kind_needs: Mapping[str, Need]) -> Iterator[Finding]:
    """Yield faults of CUDA extensions and the compiler, and unmet needs of recipe fields."""
    for module, fault in report["broken"].items():
        is_engine = module == "transformer_engine.pytorch"
        remedy = transformer_engine.REMEDY if is_engine else cuda_extensions.REMEDY
        name = "Transformer Engine" if is_engine else module
        yield _bad_node(node, f"{name} is installed but cannot be imported ({fault})", remedy)
    if report["compiler"]:
        yield _bad_node(node, f"Triton cannot compile kernels when the engine starts: {report['compiler']}")
    for text in unmet_needs(kind_needs, report["usable_gpus"], report["versions"]):
        yield _bad_node(node, text)


def _bad_node(node: str, text: str, remedy: str = "", *, exit_code: int = ConfigError.exit_code) -> Finding:
    return Finding("bad", f"node {node}", text, remedy, exit_code)


def unfit_nodes_error(title: str, unfit: Sequence[Finding]) -> MegarlError:
    """Return the error for these faults: DiskFullError if nodes lack only space, else ConfigError."""
    error_class = DiskFullError if all(fault.exit_code == DiskFullError.exit_code for fault in unfit) else ConfigError
    return error_class(error_page(title, list(map(str, unfit))))


def unreachable_nodes(reach_errors: Mapping[str, Mapping[str, str]]) -> Iterator[Finding]:
    """Yield a fault for each node that others cannot reach, from the results of `NodeReport.test_connections`."""
    for node in dict.fromkeys(node for errors in reach_errors.values() for node in errors):
        errors_by_peer = {peer: errors[node] for peer, errors in reach_errors.items() if node in errors}
        yield _bad_node(
            node,
            f"its ports cannot be reached from {', '.join(errors_by_peer)} ({next(iter(errors_by_peer.values()))})",
            "open its firewall to the job's nodes, or exclude the node",
        )


def find_memory_shortages(
    reports: Mapping[str, Mapping[str, Any]], nodes: Sequence[str], num_trainers: int, planned_memory: RankHostBytes
) -> Iterator[Finding]:
    """Yield a fault for each node with less host memory than its ranks will take.

    `nodes` is each rank's node; the first `num_trainers` ranks train.
    """
    for node, report in reports.items():
        trainers, num_engines = nodes[:num_trainers].count(node), nodes[num_trainers:].count(node)
        needed_bytes = planned_memory.of_node(NodeRanks(trainers=trainers, engines=num_engines))
        if needed_bytes > report["memory"]:
            yield _bad_node(
                node,
                f"its {trainers + num_engines} ranks need {needed_bytes / 2**30:.0f} GiB of host memory, but the node "
                f"has {report['memory'] / 2**30:.0f} (MemTotal, or the limit of a cgroup)",
                "under Slurm request all with --mem=0, else offload less (trainer.offload) or use fewer ranks per node",
            )
