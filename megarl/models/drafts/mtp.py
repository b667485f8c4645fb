"""Multi-token prediction (MTP): a layer after the model predicts the token after the next one, to draft tokens.

The layer reads detached hidden states, embeddings and head weights, so its loss does not change the policy's gradient.
Like vLLM 0.30, it reads the hidden states after the final norm. In some families it reads no embedding at a sequence's
first position (`families.mtp.MtpForm`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.tensor_parallel import checkpoint, scatter_to_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    get_mtp_layer_spec_for_backend,
)
from torch import Tensor

from megarl.algorithms.divergences import forward_kl
from megarl.families.mtp import MtpForm
from megarl.families.parts import Latent
from megarl.families.registry import FAMILIES
from megarl.families.shape import ModelShape
from megarl.models.attention import PackedRow
from megarl.models.configuration import uses_transformer_engine
from megarl.models.distillation.divergence import vocab_parallel_divergence
from megarl.models.drafts.embeddings import embed_tokens
from megarl.models.latent_attention import share_rotary
from megarl.models.layer_specs import final_norm, layer_spec
from megarl.models.logprobs import vocab_parallel_logprobs
from megarl.models.policy import PolicyModel


class MtpLayer(MultiTokenPredictionLayer):
    """Megatron's MTP layer, called with the embeddings of the next tokens. No gradient leaves through its inputs."""

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
        self, forward_func: Callable[..., Tensor], *, hidden_states: Tensor, decoder_input: Tensor, **arguments: Any
    ) -> Tensor:
        # Megatron-Core 0.16.1 would save all arguments as tensors, but a packed row is not a tensor.
        return checkpoint(partial(forward_func, **arguments), False, hidden_states, decoder_input)


class MtpHead:
    """The MTP layers of a policy's last stage. They return log-probs of the tokens after the next ones.

    `sees_first`: the layers also read the embedding at a sequence's first position. `learns_distribution`: the output
    is the negative KL between the policy's and the head's distributions instead of a log-prob.
    """

    def __init__(self, model: PolicyModel, *, sees_first: bool, learns_distribution: bool) -> None:
        self._model, self._sees_first, self._learns_distribution = model, sees_first, learns_distribution
        self.labels: Tensor | None = None
        """The token after the next one at each position of the next pass, [tokens]. None: a pass without MTP layers."""

    def outputs(
        self, hidden_states: Tensor, next_tokens: Tensor, weight: Tensor, layer_arguments: Mapping[str, Any]
    ) -> Tensor | None:
        """Return the log-prob of each of `labels`, float32 [tokens]; None without labels. Forgets the labels.

        With `learns_distribution` it is minus the KL from the policy's distribution of the same token, in nats.
        Arguments as in `ExtraHead`; `weight` is the output layer's.
        """
        labels, self.labels = self.labels, None
        if labels is None:
            return None
        model, row = self._model, layer_arguments["packed_seq_params"]
        draft_states = model.gather_states(self._draft(hidden_states, next_tokens, layer_arguments))
        if self._learns_distribution:
            with torch.no_grad():
                # Both distributions are of the same token: the policy predicts it from the state at the next position.
                targets = next_states(model.gather_states(hidden_states), row)
            return -vocab_parallel_divergence(
                draft_states,
                weight,
                targets,
                weight,
                forward_kl,
                group=model.pg_collection.tp,
                temperature=1.0,
                chunk_tokens=model.logprob_chunk_tokens,
            )
        logprobs, _ = vocab_parallel_logprobs(
            draft_states,
            weight,
            labels,
            first_token_id=model.first_token_id,
            group=model.pg_collection.tp,
            temperature=1.0,
            chunk_tokens=model.logprob_chunk_tokens,
        )
        return logprobs

    def _draft(self, hidden_states: Tensor, next_tokens: Tensor, layer_arguments: Mapping[str, Any]) -> Tensor:
        """Return the MTP layer's hidden states, [own tokens, 1, hidden_size]."""
        model, row = self._model, layer_arguments["packed_seq_params"]
        embedding_table = model.embedding_table()

        def embed_next(tokens: Tensor) -> Tensor:
            # Some families read no embedding at a sequence's first position.
            positions = None if self._sees_first else row.positions
            embeddings = embed_tokens(tokens, positions, embedding_table, model.first_token_id, model.pg_collection.tp)
            return scatter_to_sequence_parallel_region(embeddings) if model.config.sequence_parallel else embeddings

        passed_arguments = ("attention_mask", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin", "packed_seq_params")
        layers: Any = model.mtp
        draft_states, _, _ = layers.layers[0](
            input_ids=next_tokens,
            position_ids=None,
            hidden_states=hidden_states,
            embedding=embed_next,
            **{name: layer_arguments[name] for name in passed_arguments},
        )
        return draft_states


@torch.no_grad()
def next_states(states: Tensor, row: PackedRow) -> Tensor:
    """Return the hidden state at the next position of the row: [tokens, hidden_size], like `states`.

    At the last position of a sequence it belongs to another sequence, and must not be used.
    """
    group: Any = parallel_state.get_context_parallel_group()
    if group.size() == 1:
        return states.roll(-1, 0)
    # A token's neighbour may be on another rank: each rank has two chunks of a sequence.
    assert row.gathered_index is not None and row.local is not None
    padded = torch.cat([states, states.new_zeros(row.longest_part - len(states), states.shape[1])])
    parts = padded.new_empty(group.size() * len(padded), padded.shape[1])
    torch.distributed.all_gather_into_tensor(parts, padded, group=group)
    return parts.index_select(0, row.gathered_index.roll(-1).index_select(0, row.local))


def attach_mtp(
    model: PolicyModel, shape: ModelShape, vp_stage: int | None, *, learns_distribution: bool = False
) -> None:
    """Attach the MTP layers, and the head for their loss, to a chunk of the last pipeline stage."""
    # Megatron's schedules look for the name `mtp`, and expect layers in it.
    model.mtp = build_mtp(model.config, shape, vp_stage)
    if isinstance(shape.attention, Latent):
        decoder: Any = model.decoder
        own_layers = [layer.transformer_layer for layer in model.mtp.layers]
        share_rotary(own_layers, decoder.layers[0].self_attention.rotary_pos_emb)
    form = FAMILIES[shape.family].draft_layers
    sees_first = isinstance(form, MtpForm) and form.sees_first
    model.extra_heads.append(MtpHead(model, sees_first=sees_first, learns_distribution=learns_distribution))


def mtp_head(chunk: Any) -> MtpHead | None:
    """Return the MTP head of a model chunk; None: it is on another stage."""
    heads = [head for head in chunk.extra_heads if isinstance(head, MtpHead)]
    return heads[0] if heads else None


def build_mtp(config: TransformerConfig, shape: ModelShape, vp_stage: int | None) -> MultiTokenPredictionBlock:
    """Return Megatron's block of MTP layers, with this package's norm and layer class."""
    layer = layer_spec(config, shape, shape.draft_layer_kind)
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
    specs: Any = MultiTokenPredictionBlockSubmodules(layer_specs=[spec] * shape.num_draft_layers)
    return MultiTokenPredictionBlock(config, specs, vp_stage=vp_stage)
