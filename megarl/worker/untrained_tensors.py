"""A notice about untrained tensors of a model folder."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.checkpoint.kept import list_unchanged_tensors
from megarl.families.shape import ModelShape


def untrained_notices(folder: str, shape: ModelShape) -> Iterator[str]:
    """Yield a notice if the model's folder has untrained tensors."""
    if names := list_unchanged_tensors(folder, shape):
        yield f"{len(names)} tensors of {folder} are not trained, such as {min(names)}; exports copy them unchanged"
