"""Memory-mapped tensors of a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from megarl.files.model_folder import read_safetensors_header, weight_files


class MappedFolder:
    """The tensors of a model folder. `names` are all names in its safetensors files. Only used elements are read.

    Raises DataError for a folder without safetensors and for a truncated file.
    """

    def __init__(self, folder: str | Path) -> None:
        self._files: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        for file, expected in weight_files(folder).items():
            path = Path(folder) / file
            self._files |= dict.fromkeys(read_safetensors_header(path, expected), path)

    @property
    def names(self) -> set[str]:
        return set(self._files)

    def tensor(self, name: str) -> Tensor:
        """Return a stored tensor [*shape], in its stored dtype."""
        path = self._files[name]
        if path not in self._open:
            self._open[path] = safe_open(path, "pt")
        return self._open[path].get_tensor(name)
