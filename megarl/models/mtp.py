"""Multi-token prediction (MTP): a layer after the model predicts the token after the next one, to draft tokens.

The layer sees detached hidden states, embeddings and head weights, so its loss does not change the policy's gradient.
Like vLLM 0.30, it takes the hidden states after the final norm. In some families it sees no embedding at a sequence's
first position (`families.mtp.MtpForm`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from megatron.core import parallel_state
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.tensor_parallel import checkpoint
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    get_mtp_layer_spec_for_backend,
)
from torch import Tensor

from megarl.families.mtp import mtp_kind_number
from megarl.families.shape import ModelShape
from megarl.models.configuration import uses_transformer_engine
from megarl.models.layer_specs import final_norm, layer_spec
from megarl.models.logprobs import all_reduce


class MtpLayer(MultiTokenPredictionLayer):
    """Megatron's layer with given embeddings of the next tokens. Its gradient ends at the layer's inputs."""

    def _get_embeddings(
        self,
        input_ids: Tensor,
        position_ids: Any,
        embedding: Callable[..., Tensor],
        hidden_states: Tensor,
        packed_seq_params: Any = None,
    ) -> tuple[Tensor, Any, Tensor, Tensor]:
        # Megatron's recomputation makes gradients of parameters only if an input needs one too.
        return input_ids, position_ids, embedding(input_ids), hidden_states.detach().requires_grad_()

    def _checkpointed_forward(
        self, forward_func: Callable[..., Tensor], *, hidden_states: Tensor, decoder_input: Tensor, **given: Any
    ) -> Tensor:
        # Megatron-Core 0.16.1 would save all arguments as tensors, and a packed row is none.
        return checkpoint(partial(forward_func, **given), False, hidden_states, decoder_input)


def build_mtp(config: TransformerConfig, shape: ModelShape, vp_stage: int | None) -> MultiTokenPredictionBlock:
    """Return the trained MTP layers of a model, new ones. They are part of its last stage."""
    layer = layer_spec(config, shape, shape.layers[mtp_kind_number(shape)])
    if uses_transformer_engine():
        # Only importable with Transformer Engine.
        from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

        backend: Any = TESpecProvider()
    else:
        backend = LocalSpecProvider()
    spec = get_mtp_layer_spec_for_backend(layer, backend)
    modules: Any = spec.submodules
    modules.enorm = modules.hnorm = modules.layer_norm = final_norm()
    spec.module = MtpLayer
    specs: Any = MultiTokenPredictionBlockSubmodules(layer_specs=[spec] * shape.num_mtp_layers)
    return MultiTokenPredictionBlock(config, specs, vp_stage=vp_stage)


@torch.no_grad()
def embedded(tokens: Tensor, positions: Tensor | None, table: Tensor, first_token_id: int, group: Any) -> Tensor:
    """Return the embeddings of these tokens without gradient: [tokens, 1, hidden_size], zero at position 0.

    Shapes: tokens and positions [tokens]; table [local vocabulary, hidden_size], rows from `first_token_id` on. The
    vocabulary is split over `group`. Without positions, no embedding is set to zero.
    """
    local = tokens - first_token_id
    is_here = (local >= 0) & (local < len(table))
    found = F.embedding(local.clamp(0, len(table) - 1), table) * is_here[:, None]
    all_reduce(found, group, torch.distributed.ReduceOp.SUM)
    if positions is not None:
        found = found.masked_fill_(positions[:, None] == 0, 0.0)
    return found[:, None]


@torch.no_grad()
def copy_embedding_to_last_stage(chunks: Sequence[Any]) -> None:
    """Copy the embedding of the first pipeline stage to the last stage's MTP layers. A collective of these stages."""
    if not parallel_state.is_rank_in_embedding_group(ignore_virtual=True):
        return
    is_first = parallel_state.is_pipeline_first_stage()
    # Megatron's groups of first and last stages list the first one first.
    group: Any = parallel_state.get_embedding_group()
    last = chunks[-1]
    table = chunks[0].embedding.word_embeddings.weight if is_first else torch.empty_like(last.output_layer.weight)
    torch.distributed.broadcast(table.data, group=group, group_src=0)
    if not is_first:
        last.mtp_table = table
