"""Redundant tensors of a model folder: they repeat other tensors, or numbers that follow from config.json. No torch.

Examples are a head next to a tied embedding, rotary frequencies, and copies in a trained draft layer. They are not
loaded. A different value is an error, because it belongs to another model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from megarl.checkpoint.kept import UnchangedTensor, read_tensor_places
from megarl.families.config_json.frequencies import scaled_frequencies
from megarl.families.model_tensors import checkpoint_name, list_draft_copies
from megarl.families.pages.llama import EMBEDDING, HEAD
from megarl.families.registry import FAMILIES
from megarl.families.shape import ModelShape, read_model_shape

_FREQUENCIES = ".rotary_emb.inv_freq"
_RELATIVE_TOLERANCES = {"F64": 1e-5, "F32": 1e-5, "F16": 2e-3, "BF16": 1e-2}
"""Largest relative rounding of a stored frequency, by its dtype in safetensors."""
_ABSOLUTE_TOLERANCE = 1e-7
"""Frequencies below it have few bits in float16."""


def is_redundant(name: str, model: ModelShape) -> bool:
    """Return whether a tensor repeats other tensors or numbers that follow from config.json."""
    return name.endswith(_FREQUENCIES) or name in _original_names(model)


def redundant_faults(folder: Path, model: ModelShape, files: Mapping[str, Path]) -> Iterator[str]:
    """Yield a line for each redundant tensor with a wrong value. `files` has the file of every tensor in the folder."""
    names = [name for name in files if is_redundant(name, model)]
    if not names:
        return
    originals = _original_names(model)
    compared_files = {files[name] for name in (*names, *originals.values()) if name in files}
    tensors = {name: tensor for path in sorted(compared_files) for name, tensor in read_tensor_places(path)}
    # An override may have changed the rotary embeddings of `model`.
    folder_shape = read_model_shape(folder) if (folder / "config.json").exists() else model
    for name in names:
        if name.endswith(_FREQUENCIES):
            if not _has_model_frequencies(tensors[name], folder_shape):
                yield (
                    f"{files[name]}: {name} differs from the rotary frequencies that config.json gives "
                    f"(rope_theta {folder_shape.rotary.theta:g}, rope_type {folder_shape.rotary.scaling}). "
                    "Correct config.json, or remove the tensor."
                )
        elif originals[name] in tensors and not _are_equal(tensors[name], tensors[originals[name]]):
            yield f"{files[name]}: {name} differs from {originals[name]}, {_explain_difference(name, model)}"


def _original_names(model: ModelShape) -> dict[str, str]:
    """Return the tensors that must equal another tensor, as {name: the other tensor's name}."""
    tied = {HEAD: checkpoint_name(EMBEDDING, model)} if model.tie_word_embeddings else {}
    return {**tied, **list_draft_copies(model)}


def _explain_difference(name: str, model: ModelShape) -> str:
    """Return the end of the error about a copy of another tensor whose values differ."""
    if name == HEAD:
        return (
            "but config.json has tie_word_embeddings true, which uses the embedding as head. Set it to false if the "
            "head was trained apart, or remove the tensor."
        )
    draft_layers = FAMILIES[model.family].draft_layers
    assert draft_layers is not None
    return (
        "of which it is a copy in a draft layer. Only equal copies can be trained; leave out "
        f"{draft_layers.recipe_field}."
    )


def _are_equal(tensor: UnchangedTensor, original: UnchangedTensor) -> bool:
    if (tensor.code, tensor.shape) != (original.code, original.shape):
        return False
    return all(piece == copy for piece, copy in zip(tensor.content(), original.content(), strict=True))


def _has_model_frequencies(tensor: UnchangedTensor, model: ModelShape) -> bool:
    """Return whether a tensor has the model's rotary frequencies, rounded to the tensor's dtype."""
    relative_tolerance = _RELATIVE_TOLERANCES.get(tensor.code)
    if relative_tolerance is None or tensor.shape != (model.rotary_channels // 2,):
        return False
    exponents = np.arange(0, model.rotary_channels, 2, dtype=np.float32) / np.float32(model.rotary_channels)
    pair_numbers = np.arange(model.rotary_channels // 2, dtype=np.float32)
    # Models compute the same function with torch.where.
    expected = scaled_frequencies(model.rotary, model.rotary_channels, exponents, pair_numbers, where=np.where)
    return np.allclose(_read_numbers(tensor), expected, rtol=relative_tolerance, atol=_ABSOLUTE_TOLERANCE)


def _read_numbers(tensor: UnchangedTensor) -> np.ndarray:
    """Return a tensor's numbers, flat: float64 [elements]."""
    content = b"".join(tensor.content())
    if tensor.code == "BF16":
        # numpy has no bfloat16. It is the first half of a float32.
        return (np.frombuffer(content, "<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    numpy_dtypes = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
    return np.frombuffer(content, numpy_dtypes[tensor.code]).astype(np.float64)
