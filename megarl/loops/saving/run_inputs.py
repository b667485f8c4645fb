"""Identity of the models and data that a run reads: hashes by recipe field. A resume compares them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from megarl.checkpoint.manifest import canonical_sha256, file_record
from megarl.checkpoint.weight_samples import weights_identity
from megarl.config import Recipe
from megarl.config.override import apply_override
from megarl.data.chat import template_text
from megarl.data.kinds.problems import num_made
from megarl.data.sources.rows import data_files
from megarl.datasets.counts import RecordDigests
from megarl.datasets.fields import data_paths
from megarl.families.eagle3 import read_vocabulary_maps
from megarl.files.atomic import raise_storage_errors
from megarl.files.model_folder import TOKENIZER, find_folder, read_object, vocabulary_of

_PASSING_FIELDS = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
"""Fields of config.json that do not identify a model: they change with its path or transformers' version."""
_MODEL_SECTIONS = ("text_config", "vision_config")
"""Sections of config.json with a whole model's fields, in models with a vision tower."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Identity of a run's models and data, by recipe field: sha256 of config.json and of each data file.

    `template` is the sha256 of the chat template's text, `vocabulary` that of the tokenizer's tokens with their ids;
    None: the folder has no tokenizer.json. `record_digests` has, by data file, number and digest of the
    training records that are not too long. `drafter` describes a drafter that is trained with the policy. It has the
    sha256 of config.json and of each vocabulary map, by file and tensor. `frozen` identifies the weights missing in
    checkpoints, because the run does not train them.
    """

    models: Mapping[str, str]
    data: Mapping[str, str]
    template: str | None
    vocabulary: str | None
    record_digests: Mapping[str, str]
    drafter: Mapping[str, str]
    frozen: Mapping[str, str]

    @classmethod
    def read(cls, recipe: Recipe, record_digests: RecordDigests | None = None) -> Self:
        """Hash the files that the recipe names.

        Raises DataError for a broken config.json or a drafter's broken weights, ConfigError for a missing chat
        template file, StorageError for unreadable files.
        """
        folders = {"model.path": recipe.model.folder, **recipe.further_models}
        models = {field: _model_identity(Path(folder), recipe.override_of(folder)) for field, folder in folders.items()}
        data = {}
        for field, path in data_paths(recipe).items():
            # Generated problems have no file. Their name determines them completely.
            if num_made(path) is not None:
                data[field] = canonical_sha256({"source": path})
                continue
            files = data_files(path)
            with raise_storage_errors(files[0]):
                hashes = [file_record(file)["sha256"] for file in files]
            data[field] = hashes[0] if len(files) == 1 else canonical_sha256({"files": hashes})
        template = template_text(recipe.model)
        frozen = {name: weights_identity(folder) for name, folder in _frozen_models(recipe).items()}
        return cls(
            models,
            data,
            template and canonical_sha256({"template": template}),
            _vocabulary_identity(recipe.model.folder),
            record_digests or {},
            _drafter_identity(recipe),
            frozen,
        )

    def as_json(self) -> dict[str, Any]:
        fields = {
            "models": self.models, "data": self.data, "kept": self.record_digests, "drafter": self.drafter,
            "frozen": self.frozen,
        }  # fmt: skip
        texts = {"template": self.template, "vocabulary": self.vocabulary}
        return {name: dict(by_field) for name, by_field in fields.items()} | texts


def _frozen_models(recipe: Recipe) -> dict[str, str]:
    """Return the folders of weights that the run reads but does not train, by recipe field."""
    # The critic is trained, so checkpoints have its weights.
    folders = {field: folder for field, folder in recipe.further_models.items() if field != "critic.path"}
    if recipe.lora.rank or recipe.has_reference:
        folders["model.path"] = recipe.model.folder
    return folders


def _model_identity(folder: Path, override: Mapping[str, Any]) -> str:
    """Return the sha256 of a model's config.json with overrides, without fields that do not identify it."""
    config = _select_identifying_fields(apply_override(read_object(folder / "config.json"), override))
    sections = {
        name: _select_identifying_fields(config[name]) for name in _MODEL_SECTIONS if isinstance(config.get(name), dict)
    }
    return canonical_sha256({**config, **sections})


def _vocabulary_identity(folder: str) -> str | None:
    path = Path(folder) / TOKENIZER[0]
    return canonical_sha256({"tokens": vocabulary_of(folder)}) if path.is_file() else None


def _drafter_identity(recipe: Recipe) -> dict[str, str]:
    """Return the sha256 of a trained drafter's config.json and vocabulary maps, by file and tensor.

    Empty for a drafter that is not trained: engines may draft with another one at any time.
    """
    if not recipe.trains_drafter or recipe.drafter is None:
        return {}
    folder = find_folder(recipe.drafter)
    maps = {
        f"tensor {name}": canonical_sha256({"shape": values.shape, "values": values.astype(np.int64).tobytes().hex()})
        for name, values in read_vocabulary_maps(folder).items()
    }
    return {"config.json": _model_identity(Path(folder), {}), **maps}


def _select_identifying_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in _PASSING_FIELDS}
