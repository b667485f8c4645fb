"""Checks that only updates and reshards change weights. A flipped bit is reported with tensor and rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from megarl.cluster.run_ranks import RunRanks
from megarl.config import Recipe
from megarl.loops.observers.step_observer import StepObserver
from megarl.loops.saving.resume import Origin
from megarl.loops.step import Step
from megarl.reshard.boxes import Box
from megarl.reshard.checks.ledger import RankChanges, RankChecksums
from megarl.reshard.checks.version_checksums import (
    Difference,
    engine_differences,
    merge_checksums,
    sum_by_tensor,
    version_checksum,
)
from megarl.reshard.reshard_report import ReshardReport
from megarl.tracking.metric_rows import MetricRow
from megarl.tracking.run_folder import RunFolder
from megarl.types import DataError, MegarlError

METRICS = (
    MetricRow(
        "time/weight_check_seconds",
        "seconds",
        "the step's checksums of trainer and engine weights, slowest ranks",
        condition="weights.check_every",
    ),
)

_MOST_NAMED = 3
"""Maximum tensors in a message. A flipped bit changes one; a lost device changes all."""


class WeightChecks(StepObserver):
    """Finds unwanted changes of weights, by checksums of the run's weight versions (weights.check_every).

    The update of step n makes version n + 1. Its checksums are taken after the update on every trainer rank, and after
    the reshard on every engine rank. They are compared with each other, and with the same weights after their last use.
    A difference raises MegarlError.
    """

    def __init__(self, recipe: Recipe, ranks: RunRanks, folder: RunFolder) -> None:
        self._weights, self._ranks, self._folder = recipe.weights, ranks, folder
        self._boxes: dict[int, Mapping[Box, int]] = {}
        """Checksums of the trainer's boxes (parts of tensors), by version, for the newest versions."""
        self._dtypes: dict[str, str] = {}
        """Dtypes of the trainer's tensors by name. Engines have some tensors, such as routers, in another dtype."""
        self._checksums: dict[int, str] = {}
        self._has_adapters = recipe.lora.rank > 0
        self._seconds = 0.0

    def checksum_after(self, step: int) -> str | None:
        """Return the checksum of the weights after a step, 16 hexadecimal digits; None if not computed."""
        return self._checksums.get(step + 1)

    async def begin_run(self) -> None:
        """Fetch the checksums of the initial weights, which the ranks took when they built the model."""
        if self._weights.check_every:
            rank_checksums = await self._ranks.trainers.call("weight_checks.newest_checksums")
            self._add_checksums(0, rank_checksums, is_new=self._folder.resumed_step == 0)

    async def resume_run(self, origin: Origin) -> None:
        """Take the checksums of the weights loaded from `origin`'s checkpoint.

        Raises DataError if they differ from the saved checksum.
        """
        if not self._weights.check_every:
            return
        step, saved_checksum = self._folder.resumed_step, origin.checksum
        self._add_checksums(
            step, await self._ranks.trainers.call("weight_checks.take_checksums", step + 1), is_new=False
        )
        loaded_checksum = self._checksums[step + 1]
        # The checksum is of merged weights: a resume may change lora.alpha, and other processors merge with other
        # rounding.
        if saved_checksum is not None and loaded_checksum != saved_checksum and not self._has_adapters:
            raise DataError(
                f"the weights loaded from the checkpoint of step {step} have the checksum {loaded_checksum}, but were "
                f"saved with {saved_checksum}: they were damaged before they were written, or while they were loaded. "
                f"Remove the checkpoint, then resume from an earlier one: megarl train {self._folder.path} --resume"
            )

    async def check_trainer(self) -> None:
        if self._weights.check_every:
            self.refuse_changes(await self._ranks.trainers.call("weight_checks.compare_weights"))

    async def before_updates(self, step: Step) -> None:
        await self.check_trainer()

    async def after_updates(self, step: Step) -> None:
        """Take the checksums of a step's new weights. Raises MegarlError if trainer ranks differ."""
        if not self._weights.check_every:
            return
        version = step.number + 1
        if self._weights.is_checked(version):
            self._add_checksums(step.number, await self._ranks.trainers.call("weight_checks.take_checksums", version))
        else:
            await self._ranks.trainers.call("weight_checks.forget_checksums")

    def refuse_changes(self, answers: Iterable[RankChanges | None]) -> None:
        """Raise MegarlError if a rank's answer lists changed weights."""
        changes = [answer for answer in answers if answer is not None]
        self._seconds += max((answer.seconds for answer in changes), default=0.0)
        for answer in changes:
            if answer.boxes:
                last_write = "the update" if answer.holder.startswith("trainer") else "the reshard"
                raise self._make_error(
                    f"weights changed in the memory of {answer.holder} after {last_write} of step {answer.version - 1} "
                    f"(version {answer.version})",
                    answer.boxes,
                )

    async def check_engines(self, reports: Sequence[ReshardReport]) -> None:
        """Check the checksums in a reshard's reports. Raises MegarlError for two kinds of faults.

        The engines' old weights changed before the reshard. Or the weights received differ from the trainer's.
        """
        self.refuse_changes(report.changes for report in reports)
        checksums_of_ranks = [report.ledger for report in reports if report.ledger is not None]
        self._seconds += max((checksums.seconds for checksums in checksums_of_ranks), default=0.0)
        for version in {checksums.version for checksums in checksums_of_ranks}.intersection(self._boxes):
            received = [
                checksums.select_dtypes(self._dtypes)
                for checksums in checksums_of_ranks
                if checksums.version == version
            ]
            if differences := list(engine_differences(self._boxes[version], received)):
                # The trainer's weights may have changed before they were sent. Then `check_trainer` names the trainer
                # rank. Colocated: engines must first free the GPU for the trainer's weights.
                if not self._ranks.is_separate:
                    await self._ranks.trainers.call("sleep_engine")
                await self.check_trainer()
                raise self._make_difference_error(version, "after the reshard", differences)

    async def observe(self, step: Step) -> None:
        if self._weights.check_every:
            step.log({"time/weight_check_seconds": self._seconds})
        self._seconds = 0.0

    def _add_checksums(self, step: int, rank_checksums: Sequence[RankChecksums], *, is_new: bool = True) -> None:
        """Compare the trainer ranks' checksums of a step's version, and store them by box (a part of a tensor).

        `is_new`: the run folder does not list this version yet.
        """
        self._seconds += max(rank.seconds for rank in rank_checksums)
        self._dtypes = {
            box.name: dtype for rank in rank_checksums for box, dtype in zip(rank.boxes, rank.dtypes, strict=True)
        }
        version = step + 1
        merged_boxes, differences = merge_checksums(rank_checksums)
        if differences:
            raise self._make_difference_error(version, "after the update", differences)
        # A reshard in the background may deliver the version before the newest one.
        self._boxes = {
            earlier_version: self._boxes[earlier_version]
            for earlier_version in self._boxes
            if earlier_version >= version - 1
        } | {version: merged_boxes}
        self._checksums[version] = version_checksum(sum_by_tensor(merged_boxes))
        if is_new:
            self._folder.add_version(version, step, self._checksums[version])

    def _make_difference_error(self, version: int, when: str, differences: Sequence[Difference]) -> MegarlError:
        first_difference = differences[0]
        holders = list(dict.fromkeys(holder for difference in differences for holder in difference.holders))
        one_of_text = "" if first_difference.is_certain else "one of "
        return self._make_error(
            f"weights of version {version} {when} of step {version - 1} differ from the others' on {one_of_text}"
            f"{', '.join(holders)}",
            [difference.box for difference in differences],
        )

    def _make_error(self, problem: str, boxes: Sequence[Box]) -> MegarlError:
        """Return the error that names the first of these boxes (parts of tensors)."""
        box_names = ", ".join(_format_box(box) for box in boxes[:_MOST_NAMED])
        remainder = f" and {len(boxes) - _MOST_NAMED} more" if len(boxes) > _MOST_NAMED else ""
        return MegarlError(
            f"weights.check_every = {self._weights.check_every}: {problem}: {box_names}{remainder}. "
            "The memory of that rank's GPU or node is probably faulty. Exclude the node (Slurm: --exclude), then go on "
            f"from the last checkpoint with: megarl train {self._folder.path} --resume"
        )


def _format_box(box: Box) -> str:
    ranges = ", ".join(f"{start}:{stop}" for start, stop in zip(box.start, box.stop, strict=True))
    return f"{box.name}[{ranges}]"
