"""LoRA adapters in PEFT's names, derived from the rules of the linears that they belong to.

A fused linear has one adapter. Its A is shared by the Hugging Face projections in it; its B is split like the weight.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from megarl.families import rules_of
from megarl.families.rules import Rule, Segment
from megarl.families.shape import ModelShape

LINEARS = {"qkv_proj": "linear_qkv", "o_proj": "linear_proj", "gate_up_proj": "linear_fc1", "down_proj": "linear_fc2"}
"""Megatron's linears by the recipe's `lora.targets`."""


def adapter_rules(model: ModelShape, targets: Collection[str], rank: int) -> tuple[Rule, ...]:
    """The rules of all adapters of a model; `rank` is LoRA's."""
    endings = tuple(f".{LINEARS[target]}.weight" for target in targets)
    return tuple(
        made for rule in rules_of(model) if rule.parameter.endswith(endings) for made in _of_linear(rule, rank)
    )


def projections(rules: Collection[Rule]) -> list[str]:
    """The last parts of the names of the Hugging Face modules that adapters belong to."""
    return sorted({name.split(".")[-3] for rule in rules for name, _ in rule.tensors})


def _of_linear(rule: Rule, rank: int) -> tuple[Rule, ...]:
    stem = rule.parameter.removesuffix("weight") + "adapter."
    a, b = ({name: _name(name, letter) for name, _ in rule.tensors} for letter in "AB")
    shape_a = tuple((a[name], (rank, shape[1])) for name, shape in rule.tensors)
    shape_b = tuple((b[name], (shape[0], rank)) for name, shape in rule.tensors)

    def split(parameter: str, tensors: tuple[tuple[str, tuple[int, ...]], ...], names: dict[str, str]) -> Rule:
        blocks = tuple(tuple(replace(part, tensor=names[part.tensor]) for part in block) for block in rule.blocks)
        return replace(rule, parameter=stem + parameter, tensors=tensors, blocks=blocks, transformer_engine=None)

    def copied(parameter: str, name: str, shape: tuple[int, ...]) -> Rule:
        block = (Segment(name, 0, shape[0]),)
        made = replace(rule, parameter=stem + parameter, tensors=((name, shape),), dim=None, blocks=(block,))
        return replace(made, transformer_engine=None)

    if rule.dim == 0:
        return (*(copied("a", name, shape) for name, shape in shape_a), split("b", shape_b, b))
    return (split("a", shape_a, a), *(copied("b", name, shape) for name, shape in shape_b))


def _name(tensor: str, letter: str) -> str:
    return f"base_model.model.{tensor.removesuffix('weight')}lora_{letter}.weight"
