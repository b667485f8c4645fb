"""Records of training steps (`train.record`), their files, and the comparison of a step with its record.

A record holds what the step received (trajectories, KL coefficient) and what it computed: arrays of its batch, metrics
of its updates, fingerprints of the trainer's state after it.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save

from megarl.files.atomic import storage_faults_named, sync
from megarl.reshard.fingerprint import Fingerprint
from megarl.rollout.rl_batch import RLBatch
from megarl.rollout.state import flatten
from megarl.types import Archive, DataError, FindProblem, Group, Trajectory

RECORD, ARRAYS = "record.json", "record.safetensors"
"""Files of a record in `records/step_NNNNNN/` of the run folder."""

COMPARED_METRICS = ("train/loss", "train/grad_norm", "train/learning_rate", "critic/loss", "critic/grad_norm")
"""Metrics of a step's updates that a record holds, in the order in which they are computed."""

_FIRST_ARRAYS = (
    "token_ids",
    "rewards",
    "rollout_logprobs",
    "old_logprobs",
    "reference_logprobs",
    "values",
    "advantages",
    "returns",
)
"""Arrays of a batch in the order in which a step computes them. Others are compared after these."""

StateParts = Mapping[str, Mapping[int, Fingerprint]]
"""Fingerprints of the trainer's state: by tensor name, then by the rank that stores the part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """Inputs and results of a training step.

    `groups` are the trajectories as sampled, before the step computes log-probs. `arrays` are those of the batch,
    [tokens] or [samples]; empty with train.record = tokens. `digests` [samples] are CRC-32 numbers of each sample's
    part of an array. `borders` int64 [samples + 1] are the samples' first tokens.
    """

    step: int
    layout: Mapping[str, int | str]
    """Parallel sizes of the trainer by name, as in the recipe's section trainer."""
    kl_coefficient: float
    groups: Sequence[Group]
    arrays: Mapping[str, NDArray[Any]]
    digests: Mapping[str, NDArray[np.int64]]
    borders: NDArray[np.int64]
    metrics: Mapping[str, float]
    state: StateParts

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of all samples."""
        return int(self.borders[-1])

    def save(self, records: Path) -> int:
        """Write the record to `step_NNNNNN/` in the folder of all records. Returns the bytes written.

        An existing record of the step is replaced: a resumed run repeats steps after its checkpoint. Raises
        StorageError.
        """
        archive = Archive()
        trajectories = [one.to_json(archive, f"{place}.") for place, one in enumerate(flatten(self.groups))]
        values = {
            "step": self.step,
            "layout": self.layout,
            "kl_coefficient": self.kl_coefficient,
            "sizes": [len(group) for group in self.groups],
            "trajectories": trajectories,
            "times": archive.times,
            "metrics": dict(self.metrics),
            "state": {
                name: [[rank, *_plain(one)] for rank, one in parts.items()] for name, parts in self.state.items()
            },
        }
        arrays = {f"sampled.{name}": array for name, array in archive.arrays.items()}
        arrays |= {f"array.{name}": array for name, array in self.arrays.items()}
        arrays |= {f"digest.{name}": array for name, array in self.digests.items()} | {"borders": self.borders}
        # safetensors writes the underlying buffer: a strided view would be saved wrongly.
        tensors = save({name: np.ascontiguousarray(array) for name, array in arrays.items()})
        text = json.dumps(values).encode()
        folder = record_folder(records, self.step)
        partial = folder.with_name(f".{folder.name}.partial")
        with storage_faults_named(folder):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            for name, content in ((RECORD, text), (ARRAYS, tensors)):
                (partial / name).write_bytes(content)
                sync(partial / name)
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
        return len(text) + len(tensors)

    @classmethod
    def load(cls, records: Path, step: int, find_problem: FindProblem) -> StepRecord:
        """Read the record of a step. `find_problem` looks up problems by source and index.

        Raises DataError naming the file if it is missing or damaged.
        """
        folder = record_folder(records, step)
        values, arrays = _read(folder)
        try:
            archive = Archive(_named(arrays, "sampled."), values["times"])
            trajectories = iter(
                Trajectory.from_json(one, archive, f"{place}.", find_problem)
                for place, one in enumerate(values["trajectories"])
            )
            return cls(
                step=values["step"],
                layout=values["layout"],
                kl_coefficient=values["kl_coefficient"],
                groups=[[next(trajectories) for _ in range(size)] for size in values["sizes"]],
                arrays=_named(arrays, "array."),
                digests=_named(arrays, "digest."),
                borders=arrays["borders"],
                metrics=values["metrics"],
                state=_state_of(values["state"]),
            )
        except (KeyError, TypeError, ValueError, StopIteration) as error:
            raise DataError(f"{folder}: is no complete record of a step ({error!r}); replay another step") from None


def record_folder(records: Path, step: int) -> Path:
    """Return the folder of a step's record."""
    return records / f"step_{step:06d}"


def read_results(records: Path, step: int) -> StepRecord:
    """Read a step's record without its trajectories, so that the data need not be read. Raises DataError."""
    folder = record_folder(records, step)
    values, arrays = _read(folder)
    try:
        return StepRecord(
            step=values["step"],
            layout=values["layout"],
            kl_coefficient=values["kl_coefficient"],
            groups=(),
            arrays=_named(arrays, "array."),
            digests=_named(arrays, "digest."),
            borders=arrays["borders"],
            metrics=values["metrics"],
            state=_state_of(values["state"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{folder}: is no complete record of a step ({error!r}); compare other runs") from None


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    if not (folder / RECORD).is_file():
        raise DataError(
            f"{folder}: there is no record of this step; records are written by runs with train.record=tokens or all"
        )
    with storage_faults_named(folder):
        try:
            return json.loads((folder / RECORD).read_text(encoding="utf-8")), load_file(folder / ARRAYS)
        except (ValueError, UnicodeDecodeError) as error:
            raise DataError(f"{folder}: the record cannot be read ({error}); replay another step") from None


def _named(arrays: Mapping[str, NDArray[Any]], prefix: str) -> dict[str, NDArray[Any]]:
    """Return the arrays whose names begin with a prefix, by the rest of the name."""
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def _plain(one: Fingerprint) -> list[Any]:
    """Return a fingerprint's fields as JSON values."""
    # JSON readers of other languages hold integers of 53 bits only.
    return [f"{one.checksum:016x}", one.squares, one.numel, *one.sketch]


def _state_of(values: Mapping[str, Sequence[Sequence[Any]]]) -> dict[str, dict[int, Fingerprint]]:
    return {
        name: {
            rank: Fingerprint(int(checksum, 16), tuple(sketch), squares, numel)
            for rank, checksum, squares, numel, *sketch in parts
        }
        for name, parts in values.items()
    }


def batch_arrays(batch: RLBatch) -> dict[str, NDArray[Any]]:
    """Return the arrays of a weighed batch by name, [tokens] or [samples]."""
    found: dict[str, NDArray[Any]] = {"rewards": batch.rewards, **batch.per_token}
    if batch.entropies is not None:
        found["entropies"] = batch.entropies
    return found


def digests_of(arrays: Mapping[str, NDArray[Any]], borders: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
    """Return a CRC-32 number of each sample's part of each array, int64 [samples]."""
    num_samples = len(borders) - 1

    def parts(array: NDArray[Any]) -> list[NDArray[Any]]:
        if len(array) == num_samples:
            return [array[number : number + 1] for number in range(num_samples)]
        return np.split(array, borders[1:-1])

    return {
        name: np.array([zlib.crc32(np.ascontiguousarray(part).tobytes()) for part in parts(array)], np.int64)
        for name, array in arrays.items()
    }


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference of a step and its record.

    `tensor` is the array, metric or state tensor, `place` where it differs, `amount` by how much. `samples` int64
    [differing] are the samples with another value.
    """

    tensor: str
    place: str
    amount: str
    samples: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def __str__(self) -> str:
        """Return a text for the terminal."""
        return ": ".join(part for part in (" ".join(filter(None, (self.tensor, self.place))), self.amount) if part)


def differences(recorded: StepRecord, replayed: StepRecord, tolerance: float) -> Iterator[Difference]:
    """Yield the differences of two executions of a step, in the order in which the step computes the values.

    `tolerance` is relative to the larger of 1 and the value, for state tensors to their norm. With 0 all values must be
    bit-equal; state tensors are then compared for each rank. With another tolerance, arrays are compared only if both
    records hold their values.
    """
    yield from _array_differences(recorded, replayed, tolerance)
    for name in COMPARED_METRICS:
        if name in recorded.metrics and name in replayed.metrics:
            before, now = recorded.metrics[name], replayed.metrics[name]
            if not _is_close(np.array([before]), np.array([now]), tolerance)[0]:
                yield Difference(name, "", f"{before:.9g} recorded, {now:.9g} now")
    # First moments of Adam hold the gradients, so they come before what follows from them.
    for name in sorted(recorded.state.keys() & replayed.state.keys(), key=_place_in_step):
        yield from _state_differences(name, recorded.state[name], replayed.state[name], tolerance)


def _array_differences(recorded: StepRecord, replayed: StepRecord, tolerance: float) -> Iterator[Difference]:
    if not np.array_equal(recorded.borders, replayed.borders):
        yield Difference("token_ids", "", "the numbers of tokens or samples differ")
        return
    common = recorded.digests.keys() & replayed.digests.keys()
    first = [name for name in _FIRST_ARRAYS if name in common]
    for name in [*first, *sorted(common - set(first))]:
        has_values = name in recorded.arrays and name in replayed.arrays
        if has_values:
            before, now = recorded.arrays[name], replayed.arrays[name]
            wrong = (~_is_close(before, now, tolerance)).nonzero()[0]
            if not len(wrong):
                continue
            is_per_sample = len(before) == len(recorded.borders) - 1
            samples = wrong if is_per_sample else np.searchsorted(recorded.borders, wrong, side="right") - 1
            place, first = f"of sample {samples[0]}", wrong[0]
            if not is_per_sample:
                place += f", token {first - recorded.borders[samples[0]]}"
            amount = f"{before[first]:.9g} recorded, {now[first]:.9g} now"
        elif tolerance == 0 or name == "token_ids":
            samples = (recorded.digests[name] != replayed.digests[name]).nonzero()[0]
            if not len(samples):
                continue
            place, amount = f"of sample {samples[0]}", "another CRC-32"
        else:
            continue
        unique = np.unique(samples)
        yield Difference(name, place, f"{amount}; {len(unique)} of {len(recorded.borders) - 1} samples differ", unique)


def _is_close(before: NDArray[Any], now: NDArray[Any], tolerance: float) -> NDArray[np.bool_]:
    """Return where two arrays of one shape agree; NaN agrees with NaN."""
    if tolerance == 0:
        return (before == now) | (np.isnan(before) & np.isnan(now))
    return np.isclose(now, before, rtol=tolerance, atol=tolerance, equal_nan=True)


def _state_differences(
    name: str, before: Mapping[int, Fingerprint], now: Mapping[int, Fingerprint], tolerance: float
) -> Iterator[Difference]:
    if tolerance == 0 and before.keys() == now.keys():
        for rank in sorted(before):
            if before[rank].checksum != now[rank].checksum:
                distance = before[rank].distance(now[rank])
                yield Difference(name, f"on rank {rank}", f"relative distance about {distance:.2g}")
                return
        return
    distance = sum(before.values(), Fingerprint()).distance(sum(now.values(), Fingerprint()))
    # Written so that NaN counts as a difference.
    if not distance <= tolerance:
        yield Difference(name, "", f"relative distance about {distance:.2g}")


def _place_in_step(name: str) -> tuple[int, str]:
    """Return a sort key of a state tensor: gradients (first moments), second moments, weights."""
    order = (".exp_avg.", ".exp_avg_sq.", ".param.", ".fp32_param.")
    return next((place for place, part in enumerate(order) if part in name), len(order)), name
