"""Tensors stored in a model folder: file and dtype of each, read from the files' headers. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from megarl.checkpoint.redundant import is_redundant, redundant_faults
from megarl.families.model_tensors import list_aliases, list_copied_prefixes
from megarl.families.registry import FAMILIES
from megarl.families.shape import ModelShape
from megarl.families.tensors.names import parse_name
from megarl.files.model_folder import read_safetensors_header, weight_files
from megarl.reshard.layouts.packed import checkpoint_tensors

CODES = ("F64", "F32", "F16", "BF16")
"""Dtype codes in safetensors files accepted for training."""

_PACKED = (".experts.gate_up_proj", ".experts.down_proj")
"""Endings of the names of packed tensors: all experts of a layer in one tensor."""

# Maximum faults listed of each kind: a wrong config.json can cause one for every tensor.
_NAMED = 5


MXFP4 = "MXFP4"
"""Value of `Stored.code` for tensors in the 4-bit format MXFP4 (`checkpoint.mxfp4`)."""
BLOCKS, SCALES = "_blocks", "_scales"
"""An MXFP4 tensor is stored as two tensors with these name endings: 4-bit numbers, and their scales."""
_GROUP = 32
"""Consecutive MXFP4 numbers with one scale."""


class Stored(NamedTuple):
    """Place of a tensor in a model folder: its file, and its dtype code in the file's header (`CODES` or `MXFP4`).

    An MXFP4 tensor (gpt-oss) has 4-bit numbers in the file `path`, and one scale per `_GROUP` numbers in the file
    `scales`. Any other tensor has `scales` None.
    """

    path: Path
    code: str
    scales: Path | None = None


class Fault(NamedTuple):
    """An error of one tensor, described by `text`.

    `kind` is `extra`, `packed`, `doubled`, `type`, `shape`, `missing` or `redundant`.
    """

    kind: str
    text: str


def find_stored_tensors(folder: str | Path, model: ModelShape) -> tuple[dict[str, Stored], list[Fault]]:
    """Return the files and dtypes of a model's tensors in a folder, and faults in names, dtypes and shapes.

    Raises DataError for a folder without safetensors and for a truncated file.
    """
    shapes, prefixes = checkpoint_tensors(model), list_copied_prefixes(model)
    quantised = _quantised_shapes(shapes, model)
    quantised_parts: dict[str, Path] = {}
    stored: dict[str, Stored] = {}
    files: dict[str, Path] = {}
    faults: list[Fault] = []
    for file, expected in weight_files(folder).items():
        path = Path(folder) / file
        for name, (code, shape) in read_safetensors_header(path, expected).items():
            files.setdefault(name, path)
            if name in quantised:
                # Numbers or scales in MXFP4: they are joined below.
                faults += _find_doubled(path, name, quantised_parts.get(name))
                quantised_parts[name] = path
                if (code, shape) != ("U8", quantised[name]):
                    expected_form = f"U8 {quantised[name]}"
                    faults.append(Fault("shape", f"{path}: {name} is {code} {shape}; MXFP4 has {expected_form} there."))
            elif name not in shapes:
                faults += _find_fault_of_untrained(path, name, model, prefixes)
            else:
                doubled = _find_doubled(path, name, stored[name].path if name in stored else None)
                faults += doubled or _find_fault_of_trained_tensor(path, name, code, shape, shapes[name])
                stored[name] = Stored(path, code)
    faults += _join_quantised(quantised_parts, stored)
    faults += [
        Fault("missing", f"{folder}: tensor {name} is missing. Copy or download the model again.")
        for name in shapes
        if name not in stored
    ]
    faults += [Fault("redundant", text) for text in redundant_faults(Path(folder), model, files)]
    return stored, faults


def _find_doubled(path: Path, name: str, earlier_file: Path | None) -> list[Fault]:
    if earlier_file is None:
        return []
    return [Fault("doubled", f"{path}: {name} is also in {earlier_file}. Remove one of the files.")]


def _find_fault_of_untrained(path: Path, name: str, model: ModelShape, copied_prefixes: tuple[str, ...]) -> list[Fault]:
    """Return a fault unless an untrained tensor is one to copy or to compare.

    Redundant tensors are only compared (`checkpoint.redundant`). Exports copy those with `copied_prefixes`
    (`checkpoint.kept`).
    """
    if name.startswith(copied_prefixes):
        return []
    if name.endswith(_PACKED):
        text = f"{path}: {name} holds all experts of a layer; rewrite it with one tensor per expert."
        return [Fault("packed", text)]
    if is_redundant(name, model):
        return []
    return [Fault("extra", f"{path}: {name} has no place in a {model.family} model.")]


def _find_fault_of_trained_tensor(
    path: Path, name: str, code: str, shape: tuple[int, ...], expected_shape: tuple[int, ...]
) -> list[Fault]:
    if code not in CODES:
        return [Fault("type", f"{path}: {name} is {code}; only {', '.join(CODES)} can be trained.")]
    if shape != expected_shape:
        return [Fault("shape", f"{path}: {name} is {shape}; config.json says {expected_shape}.")]
    return []


def _join_quantised(parts: Mapping[str, Path], stored: dict[str, Stored]) -> Iterator[Fault]:
    """Add each tensor stored as MXFP4 to `stored`. Yield faults of tensors with one half, or also in another form.

    `parts` has the file of each tensor of numbers (BLOCKS) or scales (SCALES), by name.
    """
    for name in sorted({part.removesuffix(BLOCKS).removesuffix(SCALES) for part in parts}):
        blocks, scales = parts.get(name + BLOCKS), parts.get(name + SCALES)
        if name in stored:
            text = f"{stored[name].path}: {name} is here, and again as MXFP4. Remove one form."
            yield Fault("doubled", text)
        if blocks and scales:
            stored[name] = Stored(blocks, MXFP4, scales)
            continue
        present, absent = (BLOCKS, SCALES) if blocks else (SCALES, BLOCKS)
        text = f"{name}{present} is here but {name}{absent} is missing: MXFP4 weights need both"
        yield Fault("missing", f"{parts[name + present]}: {text}. Copy or download the model again.")
        stored[name] = Stored(parts[name + present], MXFP4)


def _quantised_shapes(shapes: Mapping[str, tuple[int, ...]], model: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return, by name, the shapes of the two tensors of an MXFP4 weight: 4-bit numbers (BLOCKS) and scales (SCALES).

    `shapes` are those of the whole weights.
    """
    if not FAMILIES[model.family].reads_mxfp4:
        return {}
    # Only tensors of all experts of a layer, with three dimensions, are stored as MXFP4.
    packed = {alias.packed for alias in list_aliases(model) if len(alias.packed_shape) == 3}
    part_shapes = {}
    for name, shape in shapes.items():
        if parse_name(name).template in packed:
            # Rows and columns are exchanged: each group of input features has a scale.
            groups = (shape[0], shape[2], shape[1] // _GROUP)
            part_shapes |= {name + BLOCKS: (*groups, _GROUP // 2), name + SCALES: groups}
    return part_shapes


def tensor_faults(folder: str | Path, model: ModelShape) -> Iterator[str]:
    """Yield the faults of a folder's tensors as lines: the first few of each kind, then the number of further faults.

    Raises DataError as `find_stored_tensors`.
    """
    texts_by_kind: dict[str, list[str]] = defaultdict(list)
    for fault in find_stored_tensors(folder, model)[1]:
        texts_by_kind[fault.kind].append(fault.text)
    for kind, texts in texts_by_kind.items():
        yield from texts[:_NAMED]
        if len(texts) > _NAMED:
            yield f"{folder}: and {len(texts) - _NAMED} more tensors like these ({kind})"
