"""Tensors stored in a model folder: file and dtype of each, read from the files' headers. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from megarl.families import hf_tensors, kept_prefixes
from megarl.families.shape import ModelShape
from megarl.files.model_folder import read_safetensors_header, weight_files

CODES = ("F64", "F32", "F16", "BF16")
"""Dtype codes in safetensors files that are accepted for training."""

# Faults listed of each kind: a wrong config.json can cause one for every tensor.
_NAMED = 5


class Stored(NamedTuple):
    """The file storing a tensor, and the tensor's dtype code in safetensors."""

    path: Path
    code: str


class Fault(NamedTuple):
    """A fault of one tensor. `kind` is `extra`, `doubled`, `type`, `shape` or `missing`."""

    kind: str
    text: str


def stored_tensors(folder: str | Path, model: ModelShape) -> tuple[dict[str, Stored], list[Fault]]:
    """Return where the model's tensors are stored in a folder, and faults of their names, dtypes and shapes.

    Raises DataError for a folder without safetensors and for a truncated file.
    """
    shapes, kept = hf_tensors(model), kept_prefixes(model)
    found: dict[str, Stored] = {}
    faults: list[Fault] = []
    for file, expected in weight_files(folder).items():
        path = Path(folder) / file
        for name, (code, shape) in read_safetensors_header(path, expected).items():
            if name not in shapes:
                # Old checkpoints store redundant tensors: rotary frequencies (computed from config.json), and a tied
                # head (equal to the embedding). Both are ignored.
                # Others are kept: copied by exports, never trained (`checkpoint.kept`).
                is_tied_head = name == "lm_head.weight" and model.tie_word_embeddings
                if not (name.endswith(".rotary_emb.inv_freq") or is_tied_head or name.startswith(kept)):
                    faults.append(Fault("extra", f"{path}: {name} has no place in a {model.family} model."))
                continue
            if name in found:
                faults.append(
                    Fault("doubled", f"{path}: {name} is also in {found[name].path}. Remove one of the files.")
                )
            elif code not in CODES:
                faults.append(Fault("type", f"{path}: {name} is {code}; only {', '.join(CODES)} can be trained."))
            elif shape != shapes[name]:
                faults.append(Fault("shape", f"{path}: {name} is {shape}; config.json says {shapes[name]}."))
            found[name] = Stored(path, code)
    faults += [
        Fault("missing", f"{folder}: tensor {name} is missing. Copy or download the model again.")
        for name in shapes
        if name not in found
    ]
    return found, faults


def tensor_faults(folder: str | Path, model: ModelShape) -> Iterator[str]:
    """Yield the faults of a folder's tensors as lines: the first few of each kind, and the number of others.

    Raises DataError for a folder without safetensors and for a truncated file.
    """
    by_kind: dict[str, list[str]] = defaultdict(list)
    for fault in stored_tensors(folder, model)[1]:
        by_kind[fault.kind].append(fault.text)
    for kind, texts in by_kind.items():
        yield from texts[:_NAMED]
        if len(texts) > _NAMED:
            yield f"{folder}: and {len(texts) - _NAMED} more tensors like these ({kind})"
