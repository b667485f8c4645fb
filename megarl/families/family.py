"""Definition of a model family: how its config.json is read, its tensors, and its settings of Megatron-Core."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megarl.families.draft_layers import DraftLayers
from megarl.families.reading import Read
from megarl.families.tensors import stacks
from megarl.families.tensors.packed import Alias

if TYPE_CHECKING:
    from megarl.families.shape import ModelShape
    from megarl.families.tensors.rules import Rule


DEFAULTS: Mapping[str, Any] = {
    "attention_bias": False,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "mlp_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
"""Values of missing fields in most of transformers' configuration classes."""


StoredNames = Callable[[], Collection[str]]
"""Function that reads the names of all tensors in a folder."""


def no_fields(config: Mapping[str, Any], stored_names: StoredNames) -> Mapping[str, Any]:
    """Return no fields, for families with all fields of vLLM in config.json."""
    return {}


def no_settings(model: ModelShape) -> Mapping[str, Any]:
    return {}


def no_aliases(model: ModelShape) -> tuple[Alias, ...]:
    """Return no aliases, for families with one tensor per expert in files."""
    return ()


@dataclass(frozen=True, slots=True)
class Family:
    """A model family. `registry.FAMILIES` lists it by `model_type`."""

    architecture: str
    """Architecture of the family's language models, for example `Qwen3ForCausalLM`."""
    read: Read
    """Function from config.json to the model's parts. Raises DataError for values that megarl would compute wrongly."""
    rules: Callable[[ModelShape], tuple[Rule, ...]]
    """Function from a model's shape to the rules of its Megatron parameters."""
    defaults: Mapping[str, Any] = field(default_factory=lambda: DEFAULTS)
    """Values of missing fields in transformers' configuration class, which vLLM uses too. Any other missing field is an
    error.
    """
    added_fields: Callable[[Mapping[str, Any], StoredNames], Mapping[str, Any]] = no_fields
    """Function from config.json and the folder's tensor names to fields that vLLM reads and transformers 5 does not
    write. Engines and exports get these fields too.
    """
    stacks: Callable[[ModelShape], Iterable[stacks.Stack]] = stacks.standard
    """Function from a model's shape to vLLM's parameters that fuse, split or convert tensors (`stacks.Stack`). All
    further tensors are stored whole on every rank. Stacks of tensors without a rule are ignored.
    """
    settings: Callable[[ModelShape], Mapping[str, Any]] = no_settings
    """Function from a model's shape to fields of TransformerConfig that only this family needs."""
    section: str = ""
    """Field of config.json with the language model's sizes, like `text_config`. Empty: config.json itself."""
    prefix: str = "model."
    """Prefix of tensor names in checkpoints. In the family's module, names have the prefix `model.` instead."""
    engine_architecture: str = ""
    """vLLM's architecture for the language model alone. Empty: the architecture in config.json."""
    copied_prefixes: tuple[str, ...] = ()
    """Prefixes of tensors that trainer and engine do not use, like `visual.`. An export copies them byte for byte."""
    draft_layers: DraftLayers | None = None
    """Kind of the checkpoints' draft layers. None: the family has no draft layers."""
    aliases: Callable[[ModelShape], tuple[Alias, ...]] = no_aliases
    """Function from a model's shape to the places of single experts' tensors in packed tensors (all experts in one)."""
    reads_mxfp4: bool = False
    """Whether packed tensors may be MXFP4 in files. They are dequantised to bfloat16 on reading."""
    classifier: str = ""
    """transformers' class with a value head. Empty: `architecture`, with the ending `ForSequenceClassification`."""
    other_model_types: tuple[str, ...] = ()
    """Other values of `model_type` for models of this architecture."""
    is_quantisable: bool = False
    """Whether tests cover `rollout.quantization` for this family (tests/reshard/layouts)."""
    has_adapter_slots: bool = False
    """Whether tests cover LoRA adapters in vLLM's slots (lora.sync: adapter) for this family, on attention and dense
    layers (tests/distributed/test_adapter_reshard.py).
    """
