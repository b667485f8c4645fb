"""The trained models: Megatron's GPTModel with log-probs or values as output instead of logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import MegatronModule, TransformerConfig
from megatron.core.transformer.moe.router_replay import RouterReplayAction
from torch import Tensor

from megarl.families import FAMILIES
from megarl.families.parts import Latent
from megarl.families.shape import ModelShape, padded_vocab_size
from megarl.models.attention import PackedRow
from megarl.models.configuration import uses_transformer_engine
from megarl.models.exact.logprobs import ExactLogprobs
from megarl.models.exact.rotary import RotaryTable
from megarl.models.expert_dispatch import ExpertCounts
from megarl.models.latent_attention import RowRotary, share_rotary
from megarl.models.layer_specs import block_spec, complete_exact, has_router, has_sinks
from megarl.models.logprobs import Support, vocab_parallel_logprobs
from megarl.models.mtp import build_mtp, embedded
from megarl.models.rotary import frequencies
from megarl.models.tree_attention import TokenTree, gather


def accumulate_in_main_gradients(chunk: torch.nn.Module) -> None:
    """Make Transformer Engine's linear layers add weight gradients to Megatron's float32 gradients directly.

    Otherwise they return gradients in the model's dtype, and DistributedDataParallel adds them.
    """
    for module in chunk.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True  # pyright: ignore[reportArgumentType]


@contextmanager
def evaluating(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Context in which these model chunks are in evaluation mode: no dropout, no router noise."""
    modules = [module for chunk in chunks for module in chunk.modules()]
    # Transformer Engine 2.11 selects other attention kernels in evaluation mode. Old log-probs must come from the
    # kernels of the training pass. Attention has no dropout, so its mode can stay. Its backends are modules of their
    # own (FusedAttention, FlashAttention), so all below it keep their mode too.
    attention = [module for module in modules if "DotProductAttention" in type(module).__name__]
    kept = {id(below) for module in attention for below in module.modules()}
    modes = [(module, module.training) for module in modules if id(module) not in kept]
    for module, _ in modes:
        module.training = False
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


class PackedModel(GPTModel):
    """A pipeline stage of a model over packed rows; with `vp_stage`, one virtual stage of it."""

    def __init__(
        self, config: TransformerConfig, shape: ModelShape, *, exact_blocks: int = 0, vp_stage: int | None = None
    ) -> None:
        """Build the stage on all ranks together.

        With `exact_blocks` above 0 it rounds as the engine does (`models.exact`), with so many blocks, over all ranks,
        of a product split over ranks.
        """
        tp = parallel_state.get_tensor_model_parallel_world_size()
        super().__init__(
            config,
            block_spec(config, shape, vp_stage, exact=exact_blocks > 0),
            vocab_size=padded_vocab_size(shape.vocab_size, tp),
            max_sequence_length=shape.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            share_embeddings_and_output_weights=shape.tie_word_embeddings,
            position_embedding_type="rope",
            rotary_percent=shape.rotary.fraction,
            rotary_base=shape.rotary.theta,  # pyright: ignore[reportArgumentType]  (it takes a float, too)
            vp_stage=vp_stage,
        )
        if isinstance(shape.attention, Latent):
            table = frequencies(shape.rotary, shape.rotary_channels).to(torch.cuda.current_device())
            share_rotary(self.decoder.layers, RowRotary(table, shape.rotary.attention_factor))
        elif shape.rotary.scaling != "default":
            self.rotary_pos_emb.inv_freq = frequencies(shape.rotary, shape.rotary_channels).to(
                self.rotary_pos_emb.inv_freq
            )
        self.is_exact = exact_blocks > 0
        if self.is_exact:
            inv_freq = frequencies(shape.rotary, shape.rotary_channels)
            table = RotaryTable(inv_freq, shape.max_position_embeddings, config.params_dtype)
            complete_exact(self.decoder.layers, config, table, exact_blocks)
        self.qkv_format = "thd" if uses_transformer_engine() and not has_sinks(config) else "packed"

    @property
    def routed_layers(self) -> list[Any]:
        """The chunk's layers with a router, without MTP layers."""
        layers: Any = self.decoder.layers
        return [layer for layer in layers if has_router(layer)]

    def replay_routes(
        self, routes: Tensor, layer_numbers: Sequence[int], counts: Sequence[ExpertCounts | None]
    ) -> None:
        """Route the tokens of the next forward pass to these experts (router replay).

        Shapes: routes int64 [tokens of this rank, layers, top_k]; layer_numbers [layers], from 0, all layers with
        experts of this rank, including this chunk's; counts [layers], None where the layer counts tokens itself.
        """
        for layer in self.routed_layers:
            index = layer_numbers.index(layer.layer_number - 1)
            replay = layer.mlp.router.router_replay
            replay.target_topk_idx = routes[:, index]
            replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
            layer.mlp.token_dispatcher.counts = counts[index]

    def choose_routes(self) -> None:
        """Let the routers choose the experts in the next forward pass, after passes with replayed ones."""
        for layer in self.routed_layers:
            layer.mlp.router.router_replay.clear_router_replay_action()
            layer.mlp.token_dispatcher.counts = None

    def _preprocess(
        self, input_ids: Tensor, position_ids: Any, *args: Any, packed_seq_params: PackedRow, **kwargs: Any
    ) -> Any:
        if packed_seq_params.qkv_format != "packed":
            return super()._preprocess(input_ids, position_ids, *args, packed_seq_params=packed_seq_params, **kwargs)
        # One rotary angle per token. Without Transformer Engine's kernel, Megatron-Core 0.16.1 loops over the sequences
        # of a packed row in Python, in every layer.
        embedded = self.embedding(input_ids=input_ids, position_ids=position_ids) if self.pre_process else None
        if self.config.multi_latent_attention or self.is_exact:
            # The attention computes its angles itself.
            return embedded, None, None, None, None, None
        angles = self.rotary_pos_emb(self.max_sequence_length, packed_seq=True)[packed_seq_params.positions]
        return embedded, angles, None, None, None, None


class PolicyModel(PackedModel):
    """A language model: the last stage returns log-probs and entropies, the others hidden states."""

    def __init__(
        self,
        config: TransformerConfig,
        shape: ModelShape,
        *,
        logprob_chunk_tokens: int,
        exact_blocks: int = 0,
        trains_entropy: bool = False,
        vp_stage: int | None = None,
    ) -> None:
        super().__init__(config, shape, exact_blocks=exact_blocks, vp_stage=vp_stage)
        self.logprob_chunk_tokens = logprob_chunk_tokens
        self.trains_entropy = trains_entropy
        rows = self.vocab_size // parallel_state.get_tensor_model_parallel_world_size()
        self.first_token_id = parallel_state.get_tensor_model_parallel_rank() * rows
        self.num_local_tokens = max(0, min(rows, shape.vocab_size - self.first_token_id))
        self._temperature: float | Tensor = 1.0
        self._support: Support | None = None
        if shape.num_mtp_layers and self.post_process:
            # Megatron's schedules look for this name, and expect layers in it.
            self.mtp = build_mtp(config, shape, vp_stage)
            if isinstance(shape.attention, Latent):
                layers: Any = self.decoder.layers
                own = [layer.transformer_layer for layer in self.mtp.layers]
                share_rotary(own, layers[0].self_attention.rotary_pos_emb)
        form = FAMILIES[shape.family].mtp
        self._mtp_sees_first = form is not None and form.sees_first
        self.mtp_table: Tensor | None = None
        """A copy of the embedding [local vocabulary, hidden_size] for the MTP layers, if another stage has it."""
        self._mtp_labels: Tensor | None = None

    def sample_as(self, temperature: float | Tensor, support: Support | None) -> None:
        """Let the next forward pass use the engine's sampling settings for log-probs and entropies.

        `temperature` is one for all or [tokens]; distributions are renormalised over the sets in `support`.
        """
        self._temperature, self._support = temperature, support

    def predict_beyond_next(self, labels: Tensor | None) -> None:
        """Let the MTP layers predict these tokens in the next forward pass with gradients. None: they are not used.

        `labels` [tokens] has for each position the token after the next one.
        """
        self._mtp_labels = labels

    def _postprocess(
        self, hidden_states: Tensor, input_ids: Any, position_ids: Any, labels: Tensor, *_: Any, **given: Any
    ) -> Tensor:
        """Return log-probs and entropies, float32 [2, tokens], in nats, on the last stage; hidden states on the others.

        After `predict_beyond_next`, a row with the MTP layers' log-probs follows. Shapes: hidden_states [tokens, 1,
        hidden_size], labels [1, tokens]. If the row is a tree, hidden_states are [stored tokens, 1, hidden_size] and
        labels [1, edges].
        """
        # Megatron-Core 0.19 has `output_processor` for this. 0.16.1 does not, and MTP layers need an override anyway.
        if not self.post_process:
            return hidden_states
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        assert weight is not None
        weight = weight[: self.num_local_tokens]
        tree = given["packed_seq_params"].tree
        outputs = self._token_outputs(self._whole(hidden_states), weight, labels.squeeze(0), tree)
        if self._mtp_labels is None:
            return outputs
        drafts = self._mtp_logprobs(hidden_states, labels.squeeze(0), weight.detach(), given)
        return torch.cat([outputs, drafts[None]])

    def _whole(self, hidden_states: Tensor) -> Tensor:
        """Return the hidden states [tokens, hidden_size] that each tensor-parallel rank multiplies by its head rows."""
        tp_group = self.pg_collection.tp
        if self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, group=tp_group)
        else:
            hidden_states = copy_to_tensor_model_parallel_region(hidden_states, group=tp_group)
        return hidden_states.squeeze(1)

    def _mtp_logprobs(
        self, hidden_states: Tensor, next_tokens: Tensor, weight: Tensor, given: dict[str, Any]
    ) -> Tensor:
        """Return the MTP layer's log-prob of each label of `predict_beyond_next`: float32 [tokens].

        Shapes: hidden_states [own tokens, 1, hidden_size], next_tokens [tokens], weight [local vocabulary,
        hidden_size]. `given` are Megatron's arguments of a layer.
        """
        assert self._mtp_labels is not None
        tp_group, row = self.pg_collection.tp, given["packed_seq_params"]
        table = self.embedding.word_embeddings.weight if self.pre_process else self.mtp_table
        assert table is not None

        def next_embeddings(tokens: Tensor) -> Tensor:
            positions = None if self._mtp_sees_first else row.positions
            found = embedded(tokens, positions, table.detach(), self.first_token_id, tp_group)
            return scatter_to_sequence_parallel_region(found) if self.config.sequence_parallel else found

        names = ("attention_mask", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin", "packed_seq_params")
        layer: Any = self.mtp.layers[0]
        predicted, _, _ = layer(
            input_ids=next_tokens,
            position_ids=None,
            hidden_states=hidden_states,
            embedding=next_embeddings,
            **{name: given[name] for name in names},
        )
        logprobs, _ = vocab_parallel_logprobs(
            self._whole(predicted),
            weight,
            self._mtp_labels,
            first_token_id=self.first_token_id,
            group=tp_group,
            temperature=1.0,
            chunk_tokens=self.logprob_chunk_tokens,
        )
        return logprobs

    def _token_outputs(self, hidden: Tensor, weight: Tensor, labels: Tensor, tree: TokenTree | None) -> Tensor:
        """Return the last stage's output [2, tokens].

        `hidden` is [tokens, hidden_size], `weight` holds this rank's head rows, `labels` is [tokens]. With a tree,
        `hidden` is [stored tokens, hidden_size] and `labels` [edges].
        """
        logprobs, entropies = vocab_parallel_logprobs(
            hidden if tree is None else gather(hidden, tree.edge_sources),
            weight,
            labels,
            first_token_id=self.first_token_id,
            group=self.pg_collection.tp,
            temperature=self._temperature,
            chunk_tokens=self.logprob_chunk_tokens,
            support=self._support,
            function=ExactLogprobs if self.is_exact else None,
        )
        # Entropies for metrics only are detached: this saves their part of the backward pass.
        outputs = torch.stack([logprobs, entropies if self.trains_entropy else entropies.detach()])
        # The gradient of an edge is the sum of those of all tokens that it stands for.
        return outputs if tree is None else gather(outputs, tree.edges, dim=1)


class ValueModel(PackedModel):
    """A critic or reward model: the last stage returns values, the others hidden states."""

    def __init__(self, config: TransformerConfig, shape: ModelShape, *, vp_stage: int | None = None) -> None:
        super().__init__(config, shape, vp_stage=vp_stage)
        if self.post_process:
            del self.output_layer
            self.value_head = torch.nn.Linear(shape.hidden_size, 1, bias=False, dtype=config.params_dtype)
            # A new head returns zeros until it is trained, equal on every rank.
            torch.nn.init.zeros_(self.value_head.weight)

    def _postprocess(
        self,
        hidden_states: Tensor,
        input_ids: Any,
        position_ids: Any,
        labels: Tensor,
        *_: Any,
        packed_seq_params: PackedRow,
        **__: Any,
    ) -> Tensor:
        """Return values [1, tokens] on the last stage; hidden states on the others."""
        if not self.post_process:
            return hidden_states
        if self.config.sequence_parallel:
            # Every tensor-parallel rank continues with all tokens, so the head's gradient is complete on each of them.
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        values = F.linear(hidden_states.squeeze(1).float(), self.value_head.weight.float()).T
        tree = packed_seq_params.tree
        return values if tree is None else gather(values, tree.stored_of, dim=1)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """Return the state of the model's modules. GPTModel's own method would look for an output layer."""
        return MegatronModule.sharded_state_dict(self, prefix, sharded_offsets, metadata)
