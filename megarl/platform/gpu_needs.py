"""Requirements of a recipe's number formats: GPU compute capability, versions of Transformer Engine and CUDA.

Without this check, the libraries fail only in the first step, or silently choose another kernel. Sources: Transformer
Engine 2.11 (pytorch/quantization.py), Megatron-Core 0.16.1 (fp8_utils.py, fp4_utils.py) and vLLM 0.30
(platforms/cuda.py, attention backends).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.version import Version

from megarl.platform.cuda_extensions import runs_on_cpu
from megarl.platform.visible_gpus import Capability, Gpu

if TYPE_CHECKING:
    # Not at run time: the ranks import this module, and importing the recipe's models takes 0.1 s.
    from megarl.config import Recipe

NAMED_GPUS: dict[str, Capability] = {"h100": (9, 0), "h200": (9, 0), "b200": (10, 0)}
"""Compute capability of the GPU names accepted by `cluster.gpu_memory_gib`."""

GENERATIONS: dict[Capability, str] = {
    (7, 0): "Volta",
    (7, 5): "Turing",
    (8, 0): "Ampere",
    (8, 9): "Ada",
    (9, 0): "Hopper",
    (10, 0): "Blackwell",
}
"""NVIDIA's generation names by first compute capability. Each is valid up to the next entry."""


@dataclass(frozen=True, slots=True)
class Need:
    """Requirement of a feature: a GPU's compute capability in [`least`, `below`), and minimum versions of libraries.

    `remedy` is advice for machines without it.
    """

    least: Capability
    below: Capability | None = None
    transformer_engine: str | None = None
    cuda: str | None = None
    remedy: str = ""

    def range_missed_by(self, capability: Capability) -> str | None:
        """Return the required range as text if `capability` is outside it, else None."""
        if capability < self.least:
            return f"{_text_of(self.least)} ({generation(self.least)}) or newer"
        if self.below is not None and capability >= self.below:
            return f"{_text_of(self.least)} ({generation(self.least)}) up to below {_text_of(self.below)}"
        return None

    def missed_by_libraries(self, versions: Mapping[str, str]) -> Iterator[str]:
        """Yield a message for each missing or outdated library. `versions` are the installed versions by library.

        A development build counts as the release that it leads to.
        """
        asked = {"Transformer Engine": self.transformer_engine, "CUDA": self.cuda}
        for name, least in asked.items():
            if least is None:
                continue
            if name not in versions:
                yield f"{name} is not installed, it needs {least} or newer"
            elif Version(Version(versions[name]).base_version) < Version(least):
                yield f"{name} {versions[name]} is installed, it needs {least} or newer"


_MEGATRON_FP8 = {
    "tensorwise": Need((8, 9), transformer_engine="2.2.0"),
    "blockwise": Need((9, 0), transformer_engine="2.3.0", cuda="12.9"),
    "mxfp8": Need((10, 0), below=(12, 0), transformer_engine="2.1.0"),
    "custom": Need((8, 9), transformer_engine="2.9.0"),
}
"""Requirements by value of `trainer.megatron.fp8_recipe`. (The value `delayed` is refused elsewhere.)"""
_MEGATRON_FP4 = Need((10, 0), transformer_engine="2.7.0")


def field_needs() -> dict[str, Need]:
    """Return the requirements of recipe fields whose values, except the default, all have the same requirement."""
    # FlashInfer's attention reads an FP8 cache from Ampere on, vLLM 0.30's other backends from Ada on.
    has_flashinfer = not runs_on_cpu() and find_spec("flashinfer") is not None
    return {
        "trainer.fp8": replace(_MEGATRON_FP8["blockwise"], remedy="set trainer.fp8=none"),
        # Older GPUs lack FP8 matrix products. vLLM then chooses kernels with a weight layout that reshards cannot
        # write.
        "rollout.quantization": Need((8, 9), remedy="set rollout.quantization=none"),
        "rollout.kv_cache_dtype": Need((8, 0) if has_flashinfer else (8, 9), remedy="set rollout.kv_cache_dtype=auto"),
    }


def needs(recipe: Recipe, *, is_trained: bool = True) -> dict[str, Need]:
    """Return the requirements of a recipe's values by `field = value`, without values that every GPU supports.

    With `is_trained` False only fields of the engines count.
    """
    trainer, rollout = recipe.trainer, recipe.rollout
    values = {"trainer.fp8": trainer.fp8} if is_trained else {}
    if recipe.has_engine:
        values |= {"rollout.quantization": rollout.quantization, "rollout.kv_cache_dtype": rollout.kv_cache_dtype}
    needs_by_field = field_needs()
    recipe_needs = {
        f"{field} = {value}": needs_by_field[field] for field, value in values.items() if value not in ("none", "auto")
    }
    megatron_settings = trainer.megatron if is_trained else {}
    # "delayed" is the default of Megatron-Core 0.16.1.
    fp8_recipe = str(megatron_settings.get("fp8_recipe", "delayed"))
    if megatron_settings.get("fp8") and fp8_recipe in _MEGATRON_FP8:
        recipe_needs[f"trainer.megatron.fp8_recipe = {fp8_recipe}"] = replace(
            _MEGATRON_FP8[fp8_recipe], remedy="remove trainer.megatron.fp8 and fp8_recipe"
        )
    if megatron_settings.get("fp4"):
        recipe_needs[f"trainer.megatron.fp4 = {megatron_settings['fp4']}"] = replace(
            _MEGATRON_FP4, remedy="remove trainer.megatron.fp4"
        )
    return recipe_needs


def unmet_needs(
    asked: Mapping[str, Need], gpus: Sequence[Gpu], versions: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Yield a message, with its remedy, for each requirement that the GPUs or libraries do not meet.

    `asked` are requirements by `field = value`. Equal GPUs are reported once. `versions` are the installed versions by
    library; None: unknown.
    """
    for field, need in asked.items():
        for gpu in dict.fromkeys(gpus):
            if gpu.capability is not None and (fitting := need.range_missed_by(gpu.capability)) is not None:
                reason = f"{gpu.name} has compute capability {_text_of(gpu.capability)} ({generation(gpu.capability)})"
                yield f"{field}: {reason}, it needs {fitting}; {need.remedy}, or take other GPUs (CUDA_VISIBLE_DEVICES)"
        for fault in need.missed_by_libraries(versions) if versions is not None else ():
            yield f"{field}: {fault}; {need.remedy}, or run launch/setup.sh"


def library_versions() -> dict[str, str]:
    """Return the versions of the installed Transformer Engine and of CUDA in torch, by name, e.g. {"CUDA": "12.9"}."""
    versions: dict[str, str] = {}
    with suppress(PackageNotFoundError):
        versions["Transformer Engine"] = version("transformer-engine")
    torch = find_spec("torch")
    if torch is not None and torch.origin is not None:
        # Read the file: importing torch takes seconds on a login node.
        version_file = Path(torch.origin).with_name("version.py")
        cuda_match = re.search(r"^cuda\b.*= *'([0-9.]+)'$", version_file.read_text(encoding="utf-8"), re.MULTILINE)
        versions |= {"CUDA": cuda_match[1]} if cuda_match else {}
    return versions


def generation(capability: Capability) -> str:
    """Return NVIDIA's generation name of a compute capability; "unknown" before Volta."""
    return next((GENERATIONS[first] for first in sorted(GENERATIONS, reverse=True) if first <= capability), "unknown")


def _text_of(capability: Capability) -> str:
    return ".".join(map(str, capability))
