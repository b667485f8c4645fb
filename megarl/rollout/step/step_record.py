"""Records of training steps (`train.record`), their files, and the comparison of a step with its record."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save

from megarl.files.atomic import raise_storage_errors, replace_folder, sync
from megarl.files.strict_json import loads
from megarl.reshard.checks.fingerprint import Fingerprint
from megarl.rollout.recording import load_trajectory
from megarl.rollout.state import DAMAGE, flatten
from megarl.rollout.step.rl_batch import RLBatch
from megarl.types import Archive, DataError, FindProblem, Group

RECORD, ARRAYS, RECIPE, CHAIN = "record.json", "record.safetensors", "recipe.yaml", "chain"
"""Names of the files in a record's folder, `records/step_NNNNNN/` of the run folder."""

LOSSES = ("critic/loss", "train/loss")
"""Metrics known before the gradients, in the order of comparison."""
NORMS = ("critic/grad_norm", "train/grad_norm", "train/learning_rate")
"""Metrics known only after the gradients, in the order of comparison."""
COMPARED_METRICS = (*LOSSES, *NORMS)

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
"""Arrays of a batch in the order of their computation. All other arrays are compared later."""

OTHER_LAYOUT_TOLERANCE = 1e-5
"""Relative tolerance for records of different parallel sizes: their float32 sums have different orders."""
STATE_TOLERANCE_FACTOR = 10
"""A state tensor may differ by this factor times OTHER_LAYOUT_TOLERANCE, relative to its norm. Gradients of small
tensors, for example norms, are sums that cancel, and Adam divides by their size. A relative distance of 2.2e-5 was
measured between dp 2 and tp 2 in float32.
"""

_FIRST_MOMENTS = (".exp_avg.", ".momentum_buffer.")
"""Parts of the names of state tensors that show a step's gradient first: Adam's first moment, Muon's momentum."""
_MISSING, _ADDED = "recorded, but not there now", "there now only"

StateParts = Mapping[str, Mapping[int, Fingerprint]]
"""Fingerprints of the trainer's state: by tensor name, then by the rank storing the part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """Inputs and results of a training step.

    `groups` are the trajectories as sampled, before log-probs are computed. `waiting` are groups of the same batch for
    later steps. `arrays` are the step's batch, [tokens] or [samples]; empty with train.record = tokens. `digests`
    [samples] are CRC-32 numbers of each sample's part of an array. `borders` int64 [samples + 1] are the indices of the
    samples' first tokens. `state` has fingerprints of the trainer's new state.
    """

    step: int
    recipe: str
    """The step's recipe as YAML, with secrets as references."""
    layout: Mapping[str, Any]
    """Parallel sizes and the recipe's section trainer, as JSON values. They decide the rounding."""
    kl_coefficient: float
    groups: Sequence[Group]
    waiting: Sequence[Group]
    arrays: Mapping[str, NDArray[Any]]
    digests: Mapping[str, NDArray[np.int64]]
    borders: NDArray[np.int64]
    metrics: Mapping[str, float]
    state: StateParts
    role_baselines: Mapping[str, float] = field(default_factory=dict)
    """Baselines of roles before the step."""
    chain: str = ""
    """sha256 over the results of all steps recorded so far, in hexadecimal. `save` sets it."""

    @property
    def num_tokens(self) -> int:
        return int(self.borders[-1])

    def save(self, records: Path) -> int:
        """Write the record to `step_NNNNNN/` in the folder `records`. Return the bytes written. Raises StorageError.

        Replaces an existing record of the step, because a resumed run repeats steps.
        """
        archive = Archive()
        values = self._to_json(archive)
        arrays = {f"sampled.{name}": array for name, array in archive.arrays.items()}
        arrays |= {f"array.{name}": array for name, array in self.arrays.items()}
        arrays |= {f"digest.{name}": array for name, array in self.digests.items()} | {"borders": self.borders}
        # safetensors writes the underlying buffer, so a strided view would be stored wrongly.
        tensors = save({name: np.ascontiguousarray(array) for name, array in arrays.items()})
        # In a file of its own: the next step and --bisect need only the chain.
        chain = self._compute_chain(chain_of(records, self.step - 1))
        contents = {
            RECORD: json.dumps(values).encode(),
            ARRAYS: tensors,
            RECIPE: self.recipe.encode(),
            CHAIN: chain.encode(),
        }
        folder = record_folder(records, self.step)
        partial = folder.with_name(f".{folder.name}.partial")
        with raise_storage_errors(folder):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            for name, content in contents.items():
                (partial / name).write_bytes(content)
                sync(partial / name)
            replace_folder(partial, folder)
        return sum(map(len, contents.values()))

    def _to_json(self, archive: Archive) -> dict[str, Any]:
        """Return the record as JSON values. Arrays and times of its trajectories go to `archive`."""
        trajectories = [
            trajectory.to_json(archive, f"{trajectory_index}.")
            for trajectory_index, trajectory in enumerate(flatten([*self.groups, *self.waiting]))
        ]
        return {
            "step": self.step,
            "layout": self.layout,
            "kl_coefficient": self.kl_coefficient,
            "role_baselines": dict(self.role_baselines),
            "sizes": [len(group) for group in self.groups],
            "waiting": [len(group) for group in self.waiting],
            "trajectories": trajectories,
            "times": archive.times,
            "metrics": dict(self.metrics),
            "state": {
                name: [[rank, *_fingerprint_values(fingerprint)] for rank, fingerprint in parts.items()]
                for name, parts in self.state.items()
            },
        }

    def _compute_chain(self, previous: str) -> str:
        """Return the hash of this step's results and of the `previous` hash, which covers all earlier steps."""
        digest = hashlib.sha256(previous.encode())
        for name in sorted(self.digests):
            digest.update(f"{name} {self.digests[name].tolist()}".encode())
        digest.update(json.dumps(dict(self.metrics), sort_keys=True).encode())
        for name in sorted(self.state):
            checksums = {rank: fingerprint.checksum for rank, fingerprint in sorted(self.state[name].items())}
            digest.update(f"{name} {checksums}".encode())
        return digest.hexdigest()

    @classmethod
    def load(cls, records: Path, step: int, find_problem: FindProblem | None = None) -> StepRecord:
        """Read the record of a step.

        `find_problem` looks up problems by source and index; None: no trajectories are read. Raises DataError with the
        file's name if the record is missing or damaged.
        """
        folder = record_folder(records, step)
        with _raise_damage_as_data_error(folder):
            values = loads((folder / RECORD).read_bytes(), None)
            arrays = load_file(folder / ARRAYS)
            record = cls(
                step=int(values["step"]),
                recipe=(folder / RECIPE).read_text(encoding="utf-8"),
                layout=dict(values["layout"]),
                kl_coefficient=float(values["kl_coefficient"]),
                # Earlier versions of megarl write no baselines.
                role_baselines={name: float(value) for name, value in values.get("role_baselines", {}).items()},
                groups=(),
                waiting=(),
                arrays=_select_by_prefix(arrays, "array."),
                digests=_select_by_prefix(arrays, "digest."),
                borders=arrays["borders"],
                metrics={name: float(value) for name, value in values["metrics"].items()},
                state=_read_fingerprints(values["state"]),
                chain=chain_of(records, step),
            )
            record._check_sizes(step)
            if find_problem is None:
                return record
            archive = Archive(_select_by_prefix(arrays, "sampled."), values["times"])
            trajectories = iter(
                [
                    load_trajectory(entry, archive, f"{trajectory_index}.", find_problem)
                    for trajectory_index, entry in enumerate(values["trajectories"])
                ]
            )
            # Lists, because a generator would turn the StopIteration of a missing trajectory into a RuntimeError.
            groups, waiting = [
                [[next(trajectories) for _ in range(size)] for size in values[name]] for name in ("sizes", "waiting")
            ]
            return replace(record, groups=groups, waiting=waiting)

    def _check_sizes(self, step: int) -> None:
        """Raise ValueError if the record is of another step, or its arrays do not fit its samples and tokens."""
        if self.step != step:
            raise ValueError(f"it is the record of step {self.step}")
        num_samples = len(self.borders) - 1
        if self.borders.ndim != 1 or num_samples < 0 or (np.diff(self.borders) < 0).any():
            raise ValueError("the samples' borders are not ascending")
        misfitting_names = [name for name, array in self.digests.items() if array.shape != (num_samples,)]
        misfitting_names += [
            name for name, array in self.arrays.items() if array.shape not in ((num_samples,), (self.num_tokens,))
        ]
        misfitting_names += [name for name in self.arrays if name not in self.digests]
        if misfitting_names:
            raise ValueError(f"the array {misfitting_names[0]} does not fit the number of samples or tokens")


def record_folder(records: Path, step: int) -> Path:
    return records / f"step_{step:06d}"


def recorded_steps(records: Path) -> set[int]:
    names = [re.fullmatch(r"step_(\d+)", folder.name) for folder in records.glob("step_*") if folder.is_dir()]
    return {int(name[1]) for name in names if name}


@contextmanager
def _raise_damage_as_data_error(folder: Path) -> Iterator[None]:
    """Context that raises errors of reading a record as DataError with the record's folder."""
    if not (folder / RECORD).is_file():
        raise DataError(
            f"{folder}: there is no record of this step; records are written by runs with train.record=tokens or all"
        )
    try:
        with raise_storage_errors(folder):
            yield
    except DAMAGE as error:
        raise DataError(f"{folder}: is no complete record of a step ({error!r}); replay another step") from None


def chain_of(records: Path, step: int) -> str:
    """Return the sha256 over the results of all steps recorded up to `step`; empty if its file cannot be read."""
    try:
        return (record_folder(records, step) / CHAIN).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _select_by_prefix(arrays: Mapping[str, NDArray[Any]], prefix: str) -> dict[str, NDArray[Any]]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def _fingerprint_values(fingerprint: Fingerprint) -> list[Any]:
    # As text: JSON readers of other languages are exact only up to 53 bits.
    return [f"{fingerprint.checksum:016x}", fingerprint.squares, fingerprint.numel, *fingerprint.sketch]


def _read_fingerprints(parts_by_tensor: Mapping[str, Sequence[Sequence[Any]]]) -> dict[str, dict[int, Fingerprint]]:
    """Return the fingerprints by tensor and rank, from lists [rank, `_fingerprint_values`]."""
    return {
        name: {
            rank: Fingerprint(int(checksum, 16), tuple(sketch), squares, numel)
            for rank, checksum, squares, numel, *sketch in parts
        }
        for name, parts in parts_by_tensor.items()
    }


def batch_arrays(batch: RLBatch) -> dict[str, NDArray[Any]]:
    """Return the arrays of a batch with advantages by name, [tokens] or [samples]."""
    arrays: dict[str, NDArray[Any]] = {"rewards": batch.rewards, **batch.per_token}
    if batch.entropies is not None:
        arrays["entropies"] = batch.entropies
    return arrays


def compute_digests(arrays: Mapping[str, NDArray[Any]], borders: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
    """Return a CRC-32 number of each sample's part of each array, int64 [samples]."""
    num_samples = len(borders) - 1

    def split_by_sample(array: NDArray[Any]) -> list[NDArray[Any]]:
        if len(array) == num_samples:
            return [array[sample : sample + 1] for sample in range(num_samples)]
        return np.split(array, borders[1:-1])

    return {
        name: np.array([zlib.crc32(np.ascontiguousarray(part).tobytes()) for part in split_by_sample(array)], np.int64)
        for name, array in arrays.items()
    }


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference between a step and its record.

    `tensor` is the array, metric or state tensor, `place` where it differs, `amount` by how much. `samples` int64
    [differing] are the indices of the differing samples.
    """

    tensor: str
    place: str
    amount: str
    samples: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    distance: float = 0.0
    """Estimated relative distance of a state tensor."""

    def __str__(self) -> str:
        return ": ".join(part for part in (" ".join(filter(None, (self.tensor, self.place))), self.amount) if part)


def find_differences(recorded: StepRecord, replayed: StepRecord) -> Iterator[Difference]:
    """Yield the differences between two executions of a step, in the order in which a step computes the values.

    With equal parallel sizes, all values must be bit-equal, and state tensors are compared rank by rank. With different
    sizes, a value may differ by OTHER_LAYOUT_TOLERANCE * max(1, |value|), and a state tensor by
    STATE_TOLERANCE_FACTOR * OTHER_LAYOUT_TOLERANCE of its norm. State tensors are then compared as a whole, and arrays
    only if both records hold their values.
    """
    tolerance = 0.0 if recorded.layout == replayed.layout else OTHER_LAYOUT_TOLERANCE
    yield from _find_array_differences(recorded, replayed, tolerance)
    yield from _find_metric_differences(LOSSES, recorded.metrics, replayed.metrics, tolerance)
    # Adam's first moments hold the gradients. Norms and weights follow from them, so compare them later.
    gradient_names, other_names = _select_names_to_compare(recorded.state, replayed.state, tolerance)
    # Clipping spreads one wrong gradient to all tensors. The wrong one has the largest distance, so sort by distance.
    state_differences = [
        difference
        for name in gradient_names
        for difference in _find_state_differences(name, recorded, replayed, tolerance)
    ]
    yield from sorted(state_differences, key=lambda difference: -difference.distance)
    yield from _find_metric_differences(NORMS, recorded.metrics, replayed.metrics, tolerance)
    for name in other_names:
        yield from _find_state_differences(name, recorded, replayed, tolerance)


def _select_names_to_compare(
    recorded: StateParts, replayed: StateParts, tolerance: float
) -> tuple[list[str], list[str]]:
    """Return the names of state tensors to compare: first moments (they hold the gradients), then all others."""
    names = recorded.keys() | replayed.keys()
    if not all(any("optimizer." in name for name in state) for state in (recorded, replayed)):
        # With train.record = tokens, a record has weights only.
        names = {name for name in names if "optimizer." not in name}
    if tolerance:
        # Other parallel sizes may use another optimizer, with other names.
        names &= recorded.keys() & replayed.keys()
    ordered = sorted(names, key=_make_sort_key)
    first_moments = [name for name in ordered if any(part in name for part in _FIRST_MOMENTS)]
    return first_moments, [name for name in ordered if name not in set(first_moments)]


def _find_metric_differences(
    names: Sequence[str], recorded: Mapping[str, float], replayed: Mapping[str, float], tolerance: float
) -> Iterator[Difference]:
    """Yield the metrics that differ by more than the tolerance, or exist in one of the records only."""
    for name in names:
        if (name in recorded) != (name in replayed):
            yield Difference(name, "", _MISSING if name in recorded else _ADDED)
        elif name in recorded:
            # Not a sum of rounded values, and smaller than any absolute tolerance: compare it exactly.
            metric_tolerance = 0.0 if name == "train/learning_rate" else tolerance
            if not _is_close(np.array([recorded[name]]), np.array([replayed[name]]), metric_tolerance)[0]:
                yield Difference(name, "", f"{recorded[name]:.9g} recorded, {replayed[name]:.9g} now")


def _find_array_differences(recorded: StepRecord, replayed: StepRecord, tolerance: float) -> Iterator[Difference]:
    """Yield the arrays of the batch that differ, each with the place of its first difference."""
    if not np.array_equal(recorded.borders, replayed.borders):
        yield Difference("token_ids", "", "the numbers of tokens or samples differ")
        return
    names = recorded.digests.keys() | replayed.digests.keys()
    first_names = [name for name in _FIRST_ARRAYS if name in names]
    for name in [*first_names, *sorted(names - set(first_names))]:
        if not (name in recorded.digests and name in replayed.digests):
            yield Difference(name, "", _MISSING if name in recorded.digests else _ADDED)
            continue
        # Compare the values if both records have them, else the CRC-32 of each sample's part.
        if name in recorded.arrays and name in replayed.arrays:
            difference = _compare_values(name, recorded, replayed, tolerance)
        elif tolerance == 0 or name == "token_ids":
            difference = _compare_digests(name, recorded, replayed)
        else:
            continue
        if difference is not None:
            yield difference


def _compare_values(name: str, recorded: StepRecord, replayed: StepRecord, tolerance: float) -> Difference | None:
    """Compare the values of one array, of samples or of tokens. None: they are equal within the tolerance."""
    recorded_values, replayed_values = recorded.arrays[name], replayed.arrays[name]
    differing_indices = (~_is_close(recorded_values, replayed_values, tolerance)).nonzero()[0]
    if not len(differing_indices):
        return None
    first_index = differing_indices[0]
    is_per_sample = len(recorded_values) == len(recorded.borders) - 1
    if is_per_sample:
        samples = differing_indices
        location = f"of sample {samples[0]}"
    else:
        samples = np.searchsorted(recorded.borders, differing_indices, side="right") - 1
        location = f"of sample {samples[0]}, token {first_index - recorded.borders[samples[0]]}"
    description = f"{recorded_values[first_index]:.9g} recorded, {replayed_values[first_index]:.9g} now"
    return _make_array_difference(name, location, description, samples, recorded)


def _compare_digests(name: str, recorded: StepRecord, replayed: StepRecord) -> Difference | None:
    """Compare the CRC-32 of each sample's part of one array. None: all are equal."""
    samples = (recorded.digests[name] != replayed.digests[name]).nonzero()[0]
    if not len(samples):
        return None
    return _make_array_difference(name, f"of sample {samples[0]}", "another CRC-32", samples, recorded)


def _make_array_difference(
    name: str, location: str, description: str, samples: NDArray[np.int64], recorded: StepRecord
) -> Difference:
    """`samples` may contain a sample several times."""
    differing_samples = np.unique(samples)
    num_samples = len(recorded.borders) - 1
    text = f"{description}; {len(differing_samples)} of {num_samples} samples differ"
    return Difference(name, location, text, differing_samples)


def _is_close(recorded_values: NDArray[Any], replayed_values: NDArray[Any], tolerance: float) -> NDArray[np.bool_]:
    if tolerance == 0:
        return (recorded_values == replayed_values) | (np.isnan(recorded_values) & np.isnan(replayed_values))
    return np.isclose(replayed_values, recorded_values, rtol=tolerance, atol=tolerance, equal_nan=True)


def _find_state_differences(
    name: str, recorded: StepRecord, replayed: StepRecord, tolerance: float
) -> Iterator[Difference]:
    """Yield a difference if a tensor of the trainer's state differs, or exists in one of the records only.

    With equal parallel sizes, the fingerprints of each rank's part must be equal. Otherwise ranks hold other parts, so
    only the whole tensor is compared: its fingerprint is the sum over its parts.
    """
    recorded_parts, replayed_parts = recorded.state.get(name, {}), replayed.state.get(name, {})
    if not recorded_parts or not replayed_parts:
        yield Difference(name, "", _MISSING if recorded_parts else _ADDED, distance=1.0)
        return
    if tolerance == 0 and recorded_parts.keys() == replayed_parts.keys():
        differing_ranks = [
            rank for rank in sorted(recorded_parts) if recorded_parts[rank].checksum != replayed_parts[rank].checksum
        ]
        if differing_ranks:
            distance = max(recorded_parts[rank].distance(replayed_parts[rank]) for rank in differing_ranks)
            yield Difference(
                name, f"on rank {differing_ranks[0]}", f"relative distance about {distance:.2g}", distance=distance
            )
        return
    recorded_whole, replayed_whole = (sum(parts.values(), Fingerprint()) for parts in (recorded_parts, replayed_parts))
    distance = recorded_whole.distance(replayed_whole)
    # `not <=` rather than `>`, so that NaN counts as a difference.
    if not distance <= STATE_TOLERANCE_FACTOR * tolerance:
        yield Difference(name, "", f"relative distance about {distance:.2g}", distance=distance)


def _make_sort_key(name: str) -> tuple[int, list[str | int]]:
    """Return a sort key of a state tensor: first moments, second moments, main weights, weights; each by layer."""
    name_parts_in_order = (*_FIRST_MOMENTS, ".exp_avg_sq.", ".param.", ".fp32_param.")
    position = next(
        (position for position, name_part in enumerate(name_parts_in_order) if name_part in name),
        len(name_parts_in_order),
    )
    words = re.split(r"(\d+)", name)
    return position, [int(word) if word.isdigit() else word for word in words]
