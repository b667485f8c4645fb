"""The canary (weights.canary_every): a fixed batch that every replica computes twice. Sound ranks give equal bits."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from megarl.cluster.run_ranks import RunRanks
from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.loops.observers.step_observer import StepObserver
from megarl.loops.step import Step
from megarl.tracking.metric_rows import SLOWEST_RANK, MetricRow
from megarl.tracking.model_outputs import CanaryReport, Place
from megarl.tracking.run_folder import RunFolder
from megarl.types import FaultyNodeError

METRICS = (
    MetricRow(
        "time/canary_seconds",
        "seconds",
        "both passes of the canary's batch, in steps that compute it",
        SLOWEST_RANK,
        condition="weights.canary_every",
    ),
)


class Verdict(NamedTuple):
    """Ranks with wrong results of the canary.

    `output` is the name of the first different output. `is_unstable`: a rank's two results differ; otherwise replicas
    differ. `is_decided`: the wrong rank is certainly among `ranks`.
    """

    ranks: tuple[int, ...]
    output: str
    is_unstable: bool
    is_decided: bool


class _ReplicaDifference(NamedTuple):
    """First output of the canary that differs between ranks with the same part of the model.

    `place` orders outputs by computation. `ranks` are the wrong ones if a majority agrees, else all of them.
    """

    place: Place
    output: str
    ranks: tuple[int, ...]
    is_majority: bool


class Canary(StepObserver):
    """Computes the canary before the updates of every n-th step. A wrong result ends the run and excludes the node."""

    def __init__(self, recipe: Recipe, parallel: ParallelConfig, ranks: RunRanks, folder: RunFolder) -> None:
        self._every_steps, self._parallel, self._ranks, self._folder = (
            recipe.weights.canary_every,
            parallel,
            ranks,
            folder,
        )
        self._last_step = folder.resumed_step
        """Newest step with a right canary; at first, the step of the resumed checkpoint."""

    async def before_updates(self, step: Step) -> None:
        """Compute the canary if due, and add its metric. Raises FaultyNodeError for a difference."""
        if not self._every_steps or step.number % self._every_steps:
            return
        reports: list[CanaryReport] = await self._ranks.trainers.call("weight_checks.compute_canary")
        verdict = find_wrong_ranks(reports, self._parallel)
        if verdict is not None:
            raise self._make_error(verdict, step.number)
        self._last_step = step.number
        step.log({"time/canary_seconds": max(report.seconds for report in reports)})

    def _make_error(self, verdict: Verdict, step: int) -> FaultyNodeError:
        """Return the error for wrong results: which ranks, on which nodes, and whether a node is excluded."""
        nodes = [self._ranks.topology[rank][0] for rank in verdict.ranks]
        ranks_text = ", ".join(f"rank {rank} on {node}" for rank, node in zip(verdict.ranks, nodes, strict=True))
        one_of_text = "one of " if len(verdict.ranks) > 1 else ""
        fault_text = (
            "computed two different results" if verdict.is_unstable else "computed another result than its replicas"
        )
        # If all wrong ranks are on one node, this node is at fault, whichever rank it is.
        excluded_nodes = tuple(dict.fromkeys(nodes)) if len(set(nodes)) == 1 else ()
        remedy = (
            f"Node {excluded_nodes[0]} is excluded from now on" if excluded_nodes else self._undecided_remedy(verdict)
        )
        return FaultyNodeError(
            f"weights.canary_every = {self._every_steps}: before the updates of step {step}, {one_of_text}trainer "
            f"{ranks_text} {fault_text} of the canary batch with the same weights, first at {verdict.output}. The GPU "
            f"or the memory is probably faulty. {remedy}. The canary was right at step {self._last_step}: remove "
            f"checkpoints after it if in doubt. Go on with: megarl train {self._folder.path} --resume",
            rank=verdict.ranks[0] if len(verdict.ranks) == 1 else None,
            nodes=excluded_nodes,
        )

    @staticmethod
    def _undecided_remedy(verdict: Verdict) -> str:
        if verdict.is_decided:
            return "No node is excluded, because the ranks that share this output are on several nodes"
        return "No node is excluded: both ranks repeat their own result, and two replicas have no majority"


def find_wrong_ranks(reports: Sequence[CanaryReport], parallel: ParallelConfig) -> Verdict | None:
    """Return the ranks with wrong results among the reports of all trainer ranks, or None.

    A rank that does not repeat its own result is wrong. Otherwise ranks with the same part of the model compare their
    results, and the majority of replicas is right. Only the first different output counts, because later ones follow
    from it. With expert parallelism replicas compute each other's experts, so only the repetition is compared.
    """
    unstable = {
        rank: first_difference
        for rank, report in enumerate(reports)
        if (first_difference := _find_unrepeated(report)) is not None
    }
    # A rank that does not repeat its own result is certainly wrong.
    if unstable:
        first_unstable = min(unstable.values())
        ranks = tuple(rank for rank, (place, _) in unstable.items() if place == first_unstable[0])
        return Verdict(ranks, first_unstable[1], is_unstable=True, is_decided=True)
    if parallel.ep > 1:
        return None
    # Compare the ranks with the same part of the model.
    differences = [
        difference
        for group in _group_replicas(parallel)
        if (difference := _find_difference(reports, group)) is not None
    ]
    if not differences:
        return None
    earliest = min(differences, key=lambda difference: (difference.place, difference.output))
    earliest_differences = [difference for difference in differences if difference.place == earliest.place]
    ranks = tuple(sorted({rank for difference in earliest_differences for rank in difference.ranks}))
    is_decided = all(difference.is_majority for difference in earliest_differences)
    return Verdict(ranks, earliest.output, is_unstable=False, is_decided=is_decided)


def _find_unrepeated(report: CanaryReport) -> tuple[Place, str] | None:
    """Return place and name of the first output that a rank's second pass computed differently, or None."""
    # The `number` of an output is its checksum.
    for output, repeated_checksum in zip(report.outputs, report.repeated, strict=True):
        if output.number != repeated_checksum:
            return output.place, output.name
    return None


def _group_replicas(parallel: ParallelConfig) -> Iterator[list[int]]:
    """Yield groups of ranks with the same part of the model, one rank of each data-parallel replica."""
    groups: Mapping[tuple[int, int, int], list[int]] = defaultdict(list)
    for rank in range(parallel.world_size):
        coordinates = parallel.coordinates(rank)
        groups[coordinates.tp, coordinates.pp, coordinates.cp].append(rank)
    yield from groups.values()


def _find_difference(reports: Sequence[CanaryReport], group: Sequence[int]) -> _ReplicaDifference | None:
    """Return the first output in which the ranks of `group`, replicas of one model part, differ, or None.

    It names the ranks of the minority; without a majority, all ranks of the group.
    """
    for outputs in zip(*(reports[rank].outputs for rank in group), strict=True):
        checksum_counts = Counter(output.number for output in outputs)
        if len(checksum_counts) == 1:
            continue
        [(majority_checksum, num_equal)] = checksum_counts.most_common(1)
        is_majority = 2 * num_equal > len(group)
        minority_ranks = [
            rank for rank, output in zip(group, outputs, strict=True) if output.number != majority_checksum
        ]
        ranks = tuple(minority_ranks if is_majority else group)
        return _ReplicaDifference(outputs[0].place, outputs[0].name, ranks, is_majority)
    return None
