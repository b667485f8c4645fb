"""The type of a model family's page: how to read config.json, the tensors, Megatron's settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megarl.families import stacks
from megarl.families.packed import Alias
from megarl.families.reading import Read

if TYPE_CHECKING:
    from megarl.families.rules import Rule
    from megarl.families.shape import ModelShape


def no_settings(model: ModelShape) -> Mapping[str, Any]:
    """Return no settings of Megatron-Core beside those made from the model's parts."""
    return {}


def no_aliases(model: ModelShape) -> tuple[Alias, ...]:
    """Return no aliases: files have each expert's tensors apart."""
    return ()


@dataclass(frozen=True, slots=True)
class Family:
    """One family, defined on its page. `families.FAMILIES` lists it under the `model_type` of config.json."""

    architecture: str
    """The architecture of the family's language models, for example `Qwen3ForCausalLM`. `shape` derives the name for
    reward models."""
    read: Read
    """Function from config.json to the model's parts. Raises DataError for values computed differently here."""
    rules: Callable[[ModelShape], tuple[Rule, ...]]
    """Function from a model's shape to the rules of its Megatron parameters, each with its Hugging Face tensors."""
    stacks: Callable[[ModelShape], Iterable[stacks.Stack]] = stacks.standard
    """Function to vLLM's parameters that fuse, split or retype tensors. Stacks of tensors without a rule are ignored;
    tensors without a stack are stored whole on every rank."""
    settings: Callable[[ModelShape], Mapping[str, Any]] = no_settings
    """Function to fields of Megatron's TransformerConfig of this family alone."""
    section: str = ""
    """The field of config.json with the language model's sizes, such as `text_config`. Empty: config.json itself."""
    prefix: str = "model."
    """The beginning of tensor names in checkpoints. Pages write `model.`; `families.rules_of` replaces it."""
    engine_architecture: str = ""
    """vLLM's architecture for the language model alone. Empty: that of config.json."""
    kept: tuple[str, ...] = ()
    """Prefixes of tensors that are neither trained nor sampled, such as `visual.`. An export copies them from the base
    model, byte for byte. The layers of `ModelShape.num_kept_layers` are kept too."""
    aliases: Callable[[ModelShape], tuple[Alias, ...]] = no_aliases
    """Function to the places of experts' tensors in packed tensors of the checkpoint."""
    reads_mxfp4: bool = False
    """Whether packed tensors may be MXFP4 in files. They are dequantised to bfloat16 on reading."""
    other_model_types: tuple[str, ...] = ()
    """Other values of `model_type` in config.json for models of this architecture."""
    is_quantisable: bool = False
    """Whether `rollout.quantization` is tested with this family: vLLM's quantised weights are written correctly
    (tests/reshard/layouts)."""
