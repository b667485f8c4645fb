"""Names and shapes of a model's tensors, in Megatron and in Hugging Face folders, from its family's rules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING

from megarl.families.registry import FAMILIES
from megarl.families.tensors.names import TensorName, in_order
from megarl.families.tensors.packed import Alias
from megarl.families.tensors.rules import Rule, overlap
from megarl.families.tensors.stacks import Stack

if TYPE_CHECKING:
    from megarl.families.shape import ModelShape


def list_rules(model: ModelShape) -> tuple[Rule, ...]:
    """Return a model's rules: the Hugging Face tensors that make up each Megatron parameter.

    Raises ValueError if two rules describe the same Megatron parameter.
    """
    family = FAMILIES[model.family]
    rules = family.rules(model)
    if model.num_draft_layers and family.draft_layers:
        rules = (*_limit_layers(model, rules), *family.draft_layers.rules(model, rules))
    rules = tuple(rule.rename_tensors(partial(checkpoint_name, model=model)) for rule in rules)
    # A later rule would silently replace an earlier one in tables by name.
    for first, second in combinations(rules, 2):
        if first.parameter == second.parameter and overlap(first, second):
            raise ValueError(f"family {model.family} has two rules for {first.parameter}")
    return rules


def list_stacks(model: ModelShape) -> tuple[Stack, ...]:
    """Return a model's stacks: parameters of vLLM, composed of Hugging Face tensors.

    Stacks of tensors without a rule are included.
    """
    family = FAMILIES[model.family]
    return tuple(
        stack._replace(parts=tuple(part._replace(tensor=checkpoint_name(part.tensor, model)) for part in stack.parts))
        for stack in family.stacks(model)
    )


def list_draft_stacks(model: ModelShape) -> tuple[Stack, ...]:
    """Return the parameters of vLLM's draft model for trained draft layers; empty without them."""
    draft_layers = FAMILIES[model.family].draft_layers
    if not model.num_draft_layers or draft_layers is None:
        return ()
    layers = layers_by_template(list_rules(model), model)
    templates = (name for name, numbers in layers.items() if is_draft_tensor(model, TensorName(name, numbers[-1])))
    return tuple(
        draft_layers.make_draft_stacks(list_stacks(model), templates, checkpoint_name("model.layers.{layer}.", model))
    )


def is_draft_tensor(model: ModelShape, tensor: TensorName) -> bool:
    draft_layers = FAMILIES[model.family].draft_layers
    return draft_layers is not None and draft_layers.has_tensor(model, tensor)


def live_name(template: str, model: ModelShape) -> str:
    """Return vLLM's name of an unfused tensor. vLLM replaces longer prefixes by `model.`."""
    prefix = FAMILIES[model.family].prefix
    return "model." + template.removeprefix(prefix) if template.startswith(prefix) else template


def checkpoint_name(name: str, model: ModelShape) -> str:
    """Return a tensor's name in checkpoints from its name in the family's module, beginning with `model.`."""
    prefix = FAMILIES[model.family].prefix
    return prefix + name.removeprefix("model.") if name.startswith("model.") else name


def template_shapes(model: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the checkpoint's tensors by template: a name with `{layer}` and `{expert}` for numbers."""
    return {name: shape for rule in list_rules(model) for name, shape in rule.tensors}


def float32_templates(rules: Iterable[Rule]) -> frozenset[str]:
    return frozenset(name for rule in rules if rule.dtype == "float32" for name, _ in rule.tensors)


def layers_by_template(rules: Iterable[Rule], model: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return the layers with a tensor, by the tensor's template. Outside of layers: (-1,)."""
    numbers: dict[str, set[int]] = {}
    for rule in rules:
        rule_layers = range(model.num_layers) if rule.layers is None else rule.layers
        for template, _ in rule.tensors:
            # -1 sorts tensors outside of layers before the first layer.
            numbers.setdefault(template, set()).update(rule_layers if "{layer}" in template else (-1,))
    return {template: tuple(sorted(layers)) for template, layers in numbers.items()}


def list_model_tensors(model: ModelShape) -> tuple[TensorName, ...]:
    return list_tensors(list_rules(model), model)


def list_tensors(rules: Iterable[Rule], model: ModelShape) -> tuple[TensorName, ...]:
    """Return these rules' tensors in all layers and experts, sorted by layer, template and expert."""
    return in_order(
        TensorName(template, layer, expert)
        for template, layers in layers_by_template(rules, model).items()
        for layer in layers
        for expert in (range(model.num_experts) if "{expert}" in template else (0,))
    )


def hf_tensors(model: ModelShape) -> dict[str, tuple[int, ...]]:
    shapes = template_shapes(model)
    return {tensor.name: shapes[tensor.template] for tensor in list_model_tensors(model)}


def float32_tensors(model: ModelShape) -> tuple[str, ...]:
    """Return the names of tensors that are float32 in models of any dtype."""
    templates = float32_templates(list_rules(model))
    return tuple(tensor.name for tensor in list_model_tensors(model) if tensor.template in templates)


def list_aliases(model: ModelShape) -> tuple[Alias, ...]:
    """Return the places of single experts' tensors inside the packed tensors (all experts in one) of the model's
    files.
    """
    return tuple(
        alias._replace(tensor=checkpoint_name(alias.tensor, model), packed=checkpoint_name(alias.packed, model))
        for alias in FAMILIES[model.family].aliases(model)
    )


def list_copied_prefixes(model: ModelShape) -> tuple[str, ...]:
    """Return the name prefixes of unused tensors. Exports copy them from the base model."""
    family = FAMILIES[model.family]
    if family.draft_layers is None:
        return family.copied_prefixes
    if model.num_draft_layers:
        # Copies in trained draft layers are not loaded. An export writes them from the original tensors.
        return (*list_draft_copies(model), *family.copied_prefixes)
    return (*family.draft_layers.copied_prefixes(model), *family.copied_prefixes)


def is_read_by_drafter(model: ModelShape, name: str) -> bool:
    """Return whether vLLM's draft model loads a tensor, in a checkpoint with untrained draft layers."""
    draft_layers = FAMILIES[model.family].draft_layers
    if draft_layers is None:
        return False
    # Copies of embedding and head in the checkpoint may be outdated, and would replace the trained tensors.
    return name.startswith(draft_layers.copied_prefixes(model)) and not name.endswith(tuple(draft_layers.copied))


def list_draft_copies(model: ModelShape) -> dict[str, str]:
    """Return the trained draft layers' copies of other tensors: name of the copy -> name of the original."""
    draft_layers = FAMILIES[model.family].draft_layers
    return draft_layers.copies(model) if model.num_draft_layers and draft_layers else {}


def _limit_layers(model: ModelShape, rules: Iterable[Rule]) -> Iterator[Rule]:
    """Restrict rules of every layer to the model's own layers, so that draft layers can have rules of their own."""
    all_layers = frozenset(range(model.num_layers))
    for rule in rules:
        yield replace(rule, layers=all_layers) if rule.place == "every_layer" and rule.layers is None else rule
