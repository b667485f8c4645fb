"""LoRA adapters under PEFT's names, derived from the rules of their linear layers.

A fused linear layer has one adapter: its projections share the matrix A, and matrix B is split like the weight.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from megarl.families.model_tensors import list_rules, list_tensors
from megarl.families.shape import ModelShape
from megarl.families.tensors.rules import Rule, Segment

LINEARS = {
    # The last three are latent attention's projections to heads. Its down projections get no adapter.
    "qkv_proj": ("linear_qkv", "linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj"),
    "o_proj": ("linear_proj",),
    "gate_up_proj": ("linear_fc1",),
    "down_proj": ("linear_fc2",),
}
"""Megatron's linear layers, keyed by the values of the recipe's `lora.targets`."""


PEFT_PREFIX = "base_model.model."
"""Prefix of all tensor names in a PEFT folder."""


def adapter_rules(model: ModelShape, targets: Collection[str], rank: int) -> tuple[Rule, ...]:
    """Return the rules of all adapters of a model. `rank` is the LoRA rank."""
    endings = tuple(f".{linear}.weight" for target in targets for linear in LINEARS[target])
    return tuple(
        adapter_rule
        for rule in list_rules(model)
        if rule.parameter.endswith(endings)
        for adapter_rule in _make_adapter_rules(rule, rank)
    )


def adapter_shapes(model: ModelShape, targets: Collection[str], rank: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all matrices A [rank, in features] and B [out features, rank], by name in a PEFT folder."""
    rules = adapter_rules(model, targets, rank)
    shapes = {template: shape for rule in rules for template, shape in rule.tensors}
    return {tensor.name: shapes[tensor.template] for tensor in list_tensors(rules, model)}


def projections(names: Iterable[str]) -> list[str]:
    """Return the last name parts of the modules with adapters, sorted, for PEFT's `target_modules`: `q_proj`."""
    # Names end in MODULE.lora_A.weight or MODULE.lora_B.weight.
    return sorted({name.split(".")[-3] for name in names})


def adapter_tensor(tensor: str, letter: str) -> str:
    """Return the name, in a PEFT folder, of matrix A or B (`letter`) of a weight's adapter."""
    return f"{PEFT_PREFIX}{tensor.removesuffix('weight')}lora_{letter}.weight"


def _make_adapter_rules(rule: Rule, rank: int) -> tuple[Rule, ...]:
    """Return the rules of a linear layer's adapters A [rank, inputs] and B [outputs, rank]."""
    parameter_prefix = rule.parameter.removesuffix("weight") + "adapter."
    names_a, names_b = ({name: adapter_tensor(name, letter) for name, _ in rule.tensors} for letter in "AB")
    tensors_a = tuple((names_a[name], (rank, shape[1])) for name, shape in rule.tensors)
    tensors_b = tuple((names_b[name], (shape[0], rank)) for name, shape in rule.tensors)

    def split_rule(parameter: str, tensors: tuple[tuple[str, tuple[int, ...]], ...], names: dict[str, str]) -> Rule:
        # Adapters are megarl's own modules. Transformer Engine's layers do not rename them.
        blocks = tuple(tuple(replace(part, tensor=names[part.tensor]) for part in block) for block in rule.blocks)
        return replace(
            rule, parameter=parameter_prefix + parameter, tensors=tensors, blocks=blocks, transformer_engine=None
        )

    def replicated_rule(parameter: str, name: str, shape: tuple[int, ...]) -> Rule:
        block = (Segment(name, 0, shape[0]),)
        new_rule = replace(
            rule, parameter=parameter_prefix + parameter, tensors=((name, shape),), dim=None, blocks=(block,)
        )
        return replace(new_rule, transformer_engine=None)

    # A column-split weight splits its outputs: B is split and A replicated. A row-split weight is the reverse.
    if rule.dim == 0:
        return (*(replicated_rule("a", name, shape) for name, shape in tensors_a), split_rule("b", tensors_b, names_b))
    return (split_rule("a", tensors_a, names_a), *(replicated_rule("b", name, shape) for name, shape in tensors_b))
