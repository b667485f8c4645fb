"""Identity of a model folder's weights."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from pathlib import Path

import torch
from safetensors import safe_open

from megarl.files.model_folder import read_safetensors_header, weight_files

_NUMBER = re.compile(r"\d+")
_SPACES = 4
"""Spaces between the sampled tensors of a kind: at most 8 tensors are read of each kind."""
_MAX_INDEX = 16
"""Elements read in each dimension of a tensor."""


def weights_identity(folder: str | Path) -> str:
    """Return a sha256 of samples of a folder's weights: names, shapes and values in bfloat16.

    It does not depend on the files that hold the tensors. Raises DataError for missing or broken files.
    """
    folder = Path(folder)
    file_and_shape = {
        name: (file, shape)
        for file, tensors in weight_files(folder).items()
        for name, (_, shape) in read_safetensors_header(folder / file, tensors).items()
    }
    digest = hashlib.sha256()
    for name in _choose_sample_names(file_and_shape):
        file, shape = file_and_shape[name]
        digest.update(f"{name} {shape}".encode())
        with safe_open(folder / file, "pt") as weight_file:
            values = (
                weight_file.get_slice(name)[tuple(slice(_MAX_INDEX) for _ in shape)]
                if shape
                else weight_file.get_tensor(name)
            )
        # Copies of a model in float32 and bfloat16 are the same model.
        digest.update(values.to(torch.bfloat16).flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _choose_sample_names(names: Collection[str]) -> list[str]:
    """Return some names of each kind of tensor, such as the query matrices of all layers, evenly spread.

    Training may change only a few kinds, such as adapters' targets.
    """
    names_of_kind: dict[str, list[str]] = {}
    for name in sorted(names):
        names_of_kind.setdefault(_NUMBER.sub("", name), []).append(name)
    return [name for kind in names_of_kind.values() for name in kind[:: max(1, (len(kind) - 1) // _SPACES)]]
