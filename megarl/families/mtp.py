"""Layers for multi-token prediction (MTP), stored in a checkpoint with the model.

An MTP layer reads the hidden state of token t and the embedding of token t + 1. It predicts token t + 2 with the
model's head. Source: DeepSeek-V3 (2024, arXiv 2412.19437, section 2.2). In Megatron-Core 0.16.1 it is a layer of
`MultiTokenPredictionBlock`, in vLLM 0.30 the draft model of the method `mtp`.

It has the tensors of the model's last layer with attention; before it two norms and a projection, after it a norm.
Families name them in two ways: `NUMBERED` and `OWN_PREFIX`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from megarl.families import draft_layers
from megarl.families.tensors.names import TensorName
from megarl.families.tensors.rules import Rule, Variant, column, replicate
from megarl.families.tensors.stacks import Part, Stack

if TYPE_CHECKING:
    from megarl.families.parts import LayerKind
    from megarl.families.shape import ModelShape

OWN = "mtp."
"""Prefix of the MTP layers' tensors, in files that separate them from the model's layers."""

PARAMETERS = draft_layers.PARAMETERS + "layers.0."
"""Prefix of the layer's Megatron parameters. The number is 0, because only one layer can be trained."""

_LAYER, _DECODER = "model.layers.{layer}.", "decoder.layers.{layer}."
_TRANSFORMER = PARAMETERS + "transformer_layer."


class MtpForm(NamedTuple):
    """An MTP layer in a family's checkpoints and in vLLM: names of its tensors, and its first input."""

    layer: str
    """Prefix of the transformer layer's tensors, with `{layer}` for its number."""
    embedding_norm: str
    hidden_norm: str
    projection: str
    final_norm: str
    """Names of the further tensors: the norms of both inputs, the projection of both, and the norm before the head."""
    live_layer: str
    """vLLM's prefix of the transformer layer's parameters."""
    splits_projection: bool
    """Whether vLLM splits the rows of the projection over ranks. False: each rank has all rows."""
    sees_first: bool
    """Whether the layer reads the embedding at a sequence's first position. False: it reads zeros there."""
    num_layers_field: str
    """Field of config.json with the number of MTP layers."""
    copied: Mapping[str, str] = {}
    recipe_field: str = "trainer.mtp_loss_coefficient"

    def has_tensor(self, model: ModelShape, tensor: TensorName) -> bool:
        return tensor.template.startswith(OWN) if self._has_own_prefix else tensor.layer >= model.num_layers

    def layer_kind(self, model: ModelShape) -> LayerKind:
        return model.layers[_last_attention(model)]

    def rules(self, model: ModelShape, model_rules: Iterable[Rule]) -> Iterator[Rule]:
        """Yield the rules of the trained MTP layer: a layer with attention, three norms and a projection."""
        # Names of the parameters have no {layer}, so each rule names the layer in `layers`.
        layers, hidden, reference_layer = (
            frozenset({self._layer_number(model)}),
            model.hidden_size,
            _last_attention(model),
        )

        def move_name(parameter: str) -> str:
            return _TRANSFORMER + parameter.removeprefix(_DECODER)

        def move_to_last_stage(rule: Rule) -> Rule:
            return replace(rule, place="last_stage", layers=layers)

        # The layer inside is like the model's last layer with attention.
        for rule in model_rules:
            if rule.place == "every_layer" and rule.has_layer(reference_layer):
                engine_variant = rule.transformer_engine
                if engine_variant is not None:
                    engine_variant = Variant(move_name(engine_variant.parameter), engine_variant.is_replicated)
                renamed_rule = rule.rename_tensors(lambda name: self.layer + name.removeprefix(_LAYER))
                yield move_to_last_stage(
                    replace(renamed_rule, parameter=move_name(rule.parameter), transformer_engine=engine_variant)
                )
        # Norms of both inputs, their projection, and the norm before the head.
        yield move_to_last_stage(replicate(PARAMETERS + "enorm.weight", self.embedding_norm, (hidden,)))
        yield move_to_last_stage(replicate(PARAMETERS + "hnorm.weight", self.hidden_norm, (hidden,)))
        yield move_to_last_stage(column(PARAMETERS + "eh_proj.weight", self.projection, (hidden, 2 * hidden)))
        yield move_to_last_stage(replicate(PARAMETERS + "final_layernorm.weight", self.final_norm, (hidden,)))

    def make_draft_stacks(
        self, policy_stacks: Iterable[Stack], draft_tensors: Iterable[str], layer_prefix: str
    ) -> Iterator[Stack]:
        """Yield the parameters of vLLM's draft model: first those like the policy's layers, then others."""
        names_without_stack = list(draft_tensors)
        for stack in policy_stacks:
            parts = tuple(
                part._replace(tensor=self.layer + part.tensor.removeprefix(layer_prefix))
                for part in stack.parts
                if part.tensor.startswith(layer_prefix)
            )
            if parts and parts[0].tensor in names_without_stack:
                names_without_stack = [
                    name for name in names_without_stack if name not in {part.tensor for part in parts}
                ]
                live_name = self.live_layer + stack.storage.removeprefix(_LAYER)
                yield stack._replace(storage=draft_layers.DRAFTER + live_name, parts=parts)
        for name in names_without_stack:
            split_kind = "even" if name == self.projection and self.splits_projection else "copy"
            yield Stack(draft_layers.DRAFTER + self._live_name(name), 0, (Part(name, split_kind),))

    def copies(self, model: ModelShape) -> dict[str, str]:
        layer = self.layer.format(layer=self._layer_number(model))
        return {layer + name: original for name, original in self.copied.items()}

    def copied_prefixes(self, model: ModelShape) -> tuple[str, ...]:
        if self._has_own_prefix:
            return (OWN,)
        numbers = range(model.num_layers, model.num_layers + model.num_kept_layers)
        return tuple(self.layer.format(layer=number) for number in numbers)

    @property
    def _has_own_prefix(self) -> bool:
        return self.layer.startswith(OWN)

    def _layer_number(self, model: ModelShape) -> int:
        return 0 if self._has_own_prefix else model.num_layers

    def _live_name(self, template: str) -> str:
        if template in (self.embedding_norm, self.hidden_norm, self.projection, self.final_norm):
            return "model." + template.removeprefix(OWN) if template.startswith(OWN) else template
        return self.live_layer + template.removeprefix(self.layer)


COPIED = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
"""`MtpForm.copied` of `NUMBERED`."""

NUMBERED = MtpForm(
    layer=_LAYER,
    embedding_norm=_LAYER + "enorm.weight",
    hidden_norm=_LAYER + "hnorm.weight",
    projection=_LAYER + "eh_proj.weight",
    final_norm=_LAYER + "shared_head.norm.weight",
    # vLLM puts the transformer layer into a module of its own.
    live_layer=_LAYER + "mtp_block.",
    splits_projection=False,
    sees_first=False,
    num_layers_field="num_nextn_predict_layers",
    copied=COPIED,
)
"""Form of DeepSeek-V3 and GLM-4.5: the number after the model's last layer, and copies of embedding and head."""

OWN_PREFIX = MtpForm(
    layer=OWN + "layers.{layer}.",
    embedding_norm=OWN + "pre_fc_norm_embedding.weight",
    hidden_norm=OWN + "pre_fc_norm_hidden.weight",
    projection=OWN + "fc.weight",
    final_norm=OWN + "norm.weight",
    live_layer=_LAYER,
    splits_projection=True,
    sees_first=True,
    num_layers_field="num_nextn_predict_layers",
)
"""Form of Qwen3-Next and Qwen3.5: separate names, numbered from 0. `num_layers_field` is Qwen3-Next's."""


def _last_attention(model: ModelShape) -> int:
    """Return the number, from 0, of the model's last layer with attention: the MTP layer has the same parts."""
    return max(number for number, kind in enumerate(model.layers) if kind.mixer == "attention")
