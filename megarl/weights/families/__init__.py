"""Model families: which Hugging Face tensors make up which Megatron parameter, one page of data each.

`rules.py` is the grammar. The tables are read in both directions: to load, to export, and to reshard into the engine.
A new family is one file and one line of FAMILIES.
"""

from __future__ import annotations

from collections.abc import Callable

from megarl.model_shape import ModelShape
from megarl.weights.families import llama, qwen2, qwen3
from megarl.weights.families.rules import Rule

FAMILIES: dict[str, Callable[[ModelShape], tuple[Rule, ...]]] = {
    "llama": llama.rules,
    "qwen2": qwen2.rules,
    "qwen3": qwen3.rules,
}


def rules_of(model: ModelShape) -> tuple[Rule, ...]:
    """The rules of a model's family. Raises ValueError if two rules describe one Megatron parameter."""
    rules = FAMILIES[model.family](model)
    names = [rule.parameter for rule in rules]
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"family {model.family} has two rules for {', '.join(doubled)}")
    return rules


def hf_tensors(model: ModelShape) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model's checkpoint and its shape."""
    return {
        name.format(layer=layer): shape
        for rule in rules_of(model)
        for layer in (range(model.num_layers) if rule.place == "every_layer" else (0,))
        for name, shape in rule.tensors
    }
