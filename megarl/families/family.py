"""Definition of a model family: how config.json is read, its tensors, and its settings of Megatron-Core."""

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
    return {}


def no_settings(model: ModelShape) -> Mapping[str, Any]:
    return {}


def no_aliases(model: ModelShape) -> tuple[Alias, ...]:
    return ()


@dataclass(frozen=True, slots=True)
class Family:
    """A model family. `registry.FAMILIES` lists it by `model_type`."""

    architecture: str
    """Architecture of the language models, for example `Qwen3ForCausalLM`."""
    read: Read
    """Read the model's parts from config.json. Raises DataError for values that megarl would compute wrongly."""
    rules: Callable[[ModelShape], tuple[Rule, ...]]
    """Return the rules of a model's Megatron parameters."""
    defaults: Mapping[str, Any] = field(default_factory=lambda: DEFAULTS)
    """Values of missing fields in transformers' configuration class; vLLM uses them too. A missing field without a
    default is an error.
    """
    added_fields: Callable[[Mapping[str, Any], StoredNames], Mapping[str, Any]] = no_fields
    """Return fields that vLLM reads and transformers 5 does not write, from config.json and the folder's tensor names.
    Engines and exports get these fields.
    """
    stacks: Callable[[ModelShape], Iterable[stacks.Stack]] = stacks.standard
    """Return vLLM's parameters that fuse, split or convert tensors (`stacks.Stack`). Every rank stores all other
    tensors whole. Stacks of tensors without a rule are ignored.
    """
    settings: Callable[[ModelShape], Mapping[str, Any]] = no_settings
    """Return fields of TransformerConfig that only this family needs."""
    section: str = ""
    """Field of config.json with the language model's sizes, like `text_config`. Empty: config.json itself has them."""
    prefix: str = "model."
    """Prefix of the language model's tensor names in checkpoints, like `model.language_model.`. In the family's module,
    names begin with `model.` instead.
    """
    engine_architecture: str = ""
    """vLLM's architecture for the language model alone. Empty: the architecture in config.json."""
    copied_prefixes: tuple[str, ...] = ()
    """Prefixes of tensors unused by trainer and engine, like `visual.`. An export copies them byte for byte."""
    draft_layers: DraftLayers | None = None
    """Kind of the checkpoints' draft layers. None: the family has no draft layers."""
    aliases: Callable[[ModelShape], tuple[Alias, ...]] = no_aliases
    """Return the places of single experts' tensors in packed tensors (one tensor for all experts of a layer)."""
    reads_mxfp4: bool = False
    """Whether packed tensors in files may be MXFP4. They are dequantised to bfloat16 when read."""
    classifier: str = ""
    """transformers' class with a value head. Empty: `architecture`, ending in `ForSequenceClassification`."""
    other_model_types: tuple[str, ...] = ()
    """Further values of `model_type` for this architecture."""
    is_quantisable: bool = False
    """Whether tests cover `rollout.quantization` for this family (tests/reshard/layouts)."""
    has_adapter_slots: bool = False
    """Whether tests cover LoRA adapters in vLLM's slots (lora.sync: adapter), on attention and dense layers
    (tests/distributed/test_adapter_reshard.py).
    """
