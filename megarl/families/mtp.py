"""Layers for multi-token prediction (MTP), numbered after a checkpoint's last layer.

Such a layer sees the hidden state of token t and the embedding of token t + 1, and predicts token t + 2 with the
model's own head. Source: DeepSeek-V3 (2024, arXiv 2412.19437, section 2.2). In Megatron-Core 0.16.1 it is a layer of
`MultiTokenPredictionBlock`, in vLLM 0.30 the draft model of the method `mtp`.

Its tensors are those of the model's last layer, two norms and a projection before it, and a norm after it. The
checkpoint also has copies of the embedding and of the head.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from megarl.families.rules import Rule, Variant, column, replicated
from megarl.families.stacks import Part, Stack

if TYPE_CHECKING:
    from megarl.families.shape import ModelShape

DRAFTER = "drafter."
"""Prefix of the draft model's parameters among those of an engine."""

_LAYER, _DECODER = "model.layers.{layer}.", "decoder.layers.{layer}."
_MTP, _TRANSFORMER = "mtp.layers.{layer}.", "mtp.layers.{layer}.transformer_layer."
_AROUND = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight")
"""Tensors of an MTP layer around its transformer layer."""


COPIED = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
"""Tensors of an MTP layer equal to others of the model, with the names of the latter."""


def mtp_rules(model: ModelShape, rules: Iterable[Rule]) -> Iterator[Rule]:
    """Yield the rules of the trained MTP layers; `rules` are those of the other layers."""
    layers, hidden = frozenset(range(model.num_layers, model.num_layers + model.num_mtp_layers)), model.hidden_size
    for rule in rules:
        if rule.place == "every_layer" and rule.has_layer(model.num_layers - 1):
            variant = rule.transformer_engine
            if variant is not None:
                variant = Variant(_moved(variant.parameter), variant.is_replicated)
            yield replace(rule, parameter=_moved(rule.parameter), transformer_engine=variant, layers=layers)
    around = (
        replicated(_MTP + "enorm.weight", _LAYER + "enorm.weight", (hidden,)),
        replicated(_MTP + "hnorm.weight", _LAYER + "hnorm.weight", (hidden,)),
        column(_MTP + "eh_proj.weight", _LAYER + "eh_proj.weight", (hidden, 2 * hidden)),
        replicated(_MTP + "final_layernorm.weight", _LAYER + "shared_head.norm.weight", (hidden,)),
    )
    yield from (replace(rule, layers=layers) for rule in around)


def without_mtp_layers(model: ModelShape, rules: Iterable[Rule]) -> Iterator[Rule]:
    """Yield the rules of a model with MTP layers, each limited to the layers before them."""
    every = frozenset(range(model.num_layers))
    for rule in rules:
        yield replace(rule, layers=every) if rule.place == "every_layer" and rule.layers is None else rule


def mtp_stacks(stacks: Iterable[Stack], templates: Iterable[str]) -> Iterator[Stack]:
    """Yield the parameters of vLLM's draft model. `templates` are its tensors, `stacks` the policy's parameters."""
    left = list(templates)
    for stack in stacks:
        if stack.parts[0].tensor in left:
            left = [name for name in left if name not in {part.tensor for part in stack.parts}]
            yield stack._replace(storage=_live_name(stack.storage))
    yield from (Stack(_live_name(name), 0, (Part(name, "copy"),)) for name in left)


def mtp_copies(model: ModelShape) -> dict[str, str]:
    """Return the tensors of trained MTP layers equal to others: the name of each copy, and of its original."""
    layers = range(model.num_layers, model.num_layers + model.num_mtp_layers)
    return {f"model.layers.{layer}.{name}": original for layer in layers for name, original in COPIED.items()}


def _moved(parameter: str) -> str:
    return _TRANSFORMER + parameter.removeprefix(_DECODER)


def _live_name(storage: str) -> str:
    """Return the draft model's name of a layer's parameter. vLLM puts the transformer layer into a module of its
    own."""
    name = storage.removeprefix(_LAYER)
    return f"{DRAFTER}{_LAYER}{'' if name in _AROUND else 'mtp_block.'}{name}"
