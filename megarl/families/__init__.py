"""Model families: which Hugging Face tensors make up which Megatron parameter, one page of data each.

`rules.py` is the grammar. The tables are read in both directions: to load, to export, and to reshard into the engine.
A new family is one file and one line of FAMILIES.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from megarl.families import llama, qwen2, qwen2_moe, qwen3, qwen3_moe
from megarl.families.names import TensorName, in_order
from megarl.families.rules import Rule
from megarl.families.shape import ModelShape

FAMILIES: dict[str, Callable[[ModelShape], tuple[Rule, ...]]] = {
    "llama": llama.rules,
    "mistral": llama.rules,
    "qwen2": qwen2.rules,
    "qwen2_moe": qwen2_moe.rules,
    "qwen3": qwen3.rules,
    "qwen3_moe": qwen3_moe.rules,
}


def rules_of(model: ModelShape) -> tuple[Rule, ...]:
    """The rules of a model's family. Raises ValueError if two rules describe one Megatron parameter."""
    rules = FAMILIES[model.family](model)
    names = [rule.parameter for rule in rules]
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"family {model.family} has two rules for {', '.join(doubled)}")
    return rules


def templates_of(model: ModelShape) -> dict[str, tuple[int, ...]]:
    """The checkpoint's tensors with their shapes, `{layer}` and `{expert}` standing for numbers."""
    return {name: shape for rule in rules_of(model) for name, shape in rule.tensors}


def tensors_of(model: ModelShape) -> tuple[TensorName, ...]:
    """Every tensor of the model's checkpoint, in the order in which a plan counts them."""
    return numbered(templates_of(model), model)


def numbered(templates: Iterable[str], model: ModelShape) -> tuple[TensorName, ...]:
    """The tensors of these kinds in all layers and experts, in order."""
    return in_order(
        TensorName(template, layer, expert)
        for template in templates
        for layer in (range(model.num_layers) if "{layer}" in template else (-1,))
        for expert in (range(model.num_experts) if "{expert}" in template else (0,))
    )


def hf_tensors(model: ModelShape) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model's checkpoint by name and its shape."""
    shapes = templates_of(model)
    return {tensor.name: shapes[tensor.template] for tensor in tensors_of(model)}
