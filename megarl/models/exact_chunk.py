"""Completion of a model chunk with the engine's rounding: rotary angles, blocks of products, and log-probs."""

from __future__ import annotations

from typing import Any

from megarl.families.shape import ModelShape
from megarl.models.exact.logprobs import ExactLogprobs
from megarl.models.exact.rotary import RotaryTable
from megarl.models.layer_specs import complete_exact_layers
from megarl.models.policy import PolicyModel
from megarl.models.rotary import frequencies


def complete_exact_model(model: PolicyModel, shape: ModelShape, num_blocks: int) -> None:
    """Make a chunk of exact layers round like the engine, bit for bit.

    `num_blocks`: parts in which a matrix product is summed, over all tensor-parallel ranks.
    """
    inv_freq = frequencies(shape.rotary, shape.rotary_channels)
    table = RotaryTable(inv_freq, shape.max_position_embeddings, model.config.params_dtype)
    decoder: Any = model.decoder
    complete_exact_layers(decoder.layers, model.config, table, num_blocks)
    model.attention_rotates = True
    model.logprob_function = ExactLogprobs
