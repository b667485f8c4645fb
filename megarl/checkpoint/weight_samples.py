"""Identity of a model folder's weights, from samples of their values."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors import safe_open

from megarl.files.model_folder import read_safetensors_header, weight_files

_MAX_TENSORS = 64
"""Tensors read, spread evenly over the sorted names: a model of any size takes a fraction of a second."""
_MAX_INDEX = 16
"""Elements read in each dimension of a tensor."""


def weights_identity(folder: str | Path) -> str:
    """Return a sha256 of samples of a folder's weights: names, shapes and values in bfloat16.

    It does not depend on the files that hold the tensors. Raises DataError for missing or broken files.
    """
    folder = Path(folder)
    places = {
        name: (file, shape)
        for file, tensors in weight_files(folder).items()
        for name, (_, shape) in read_safetensors_header(folder / file, tensors).items()
    }
    names = sorted(places)
    digest = hashlib.sha256()
    for name in names[:: -(-len(names) // _MAX_TENSORS) or 1]:
        file, shape = places[name]
        digest.update(f"{name} {shape}".encode())
        with safe_open(folder / file, "pt") as stored:
            values = (
                stored.get_slice(name)[tuple(slice(_MAX_INDEX) for _ in shape)] if shape else stored.get_tensor(name)
            )
        # Copies of a model in float32 and bfloat16 are the same model.
        digest.update(values.to(torch.bfloat16).flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
