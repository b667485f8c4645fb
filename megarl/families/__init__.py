"""Model families, one page each: the architecture in config.json, Megatron parameters and their Hugging Face tensors.

`rules.py` defines the rules in a family's table. They are used in both directions: to load, to export, and to reshard
into the engine. `family.py` defines the type of a page. `shape.py` reads a model's sizes. A new family is one file and
one line of FAMILIES.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from megarl.families import llama, mistral, qwen2, qwen2_moe, qwen3, qwen3_moe
from megarl.families.family import Family
from megarl.families.names import TensorName, in_order
from megarl.families.rules import Rule

if TYPE_CHECKING:
    from megarl.families.shape import ModelShape

FAMILIES: dict[str, Family] = {
    "llama": llama.FAMILY,
    "mistral": mistral.FAMILY,
    "qwen2": qwen2.FAMILY,
    "qwen2_moe": qwen2_moe.FAMILY,
    "qwen3": qwen3.FAMILY,
    "qwen3_moe": qwen3_moe.FAMILY,
}
"""Families by the `model_type` of config.json."""


def rules_of(model: ModelShape) -> tuple[Rule, ...]:
    """Return the rules of a model's family. Raises ValueError if two rules describe the same Megatron parameter."""
    rules = FAMILIES[model.family].rules(model)
    names = [rule.parameter for rule in rules]
    # A later rule would silently replace an earlier one in tables by name.
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"family {model.family} has two rules for {', '.join(doubled)}")
    return rules


def templates_of(model: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return shapes of the checkpoint's tensors by template. A template is a name with `{layer}` and `{expert}` for
    numbers.
    """
    return {name: shape for rule in rules_of(model) for name, shape in rule.tensors}


def tensors_of(model: ModelShape) -> tuple[TensorName, ...]:
    """Return every tensor of the model's checkpoint, in the order of a plan."""
    return numbered(templates_of(model), model)


def numbered(templates: Iterable[str], model: ModelShape) -> tuple[TensorName, ...]:
    """Return the tensors of these templates in all layers and experts, in order."""
    return in_order(
        TensorName(template, layer, expert)
        for template in templates
        # -1 sorts tensors outside of layers before the first layer.
        for layer in (range(model.num_layers) if "{layer}" in template else (-1,))
        for expert in (range(model.num_experts) if "{expert}" in template else (0,))
    )


def hf_tensors(model: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors of the model's checkpoint, by name."""
    shapes = templates_of(model)
    return {tensor.name: shapes[tensor.template] for tensor in tensors_of(model)}
