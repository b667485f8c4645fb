"""The trained models: Megatron's GPTModel with log-probs or values as output instead of logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import MegatronModule, TransformerConfig
from torch import Tensor

from megarl.families.parts import Latent
from megarl.families.shape import ModelShape, padded_vocab_size
from megarl.models.attention import PackedRow
from megarl.models.configuration import uses_transformer_engine
from megarl.models.latent_attention import RowRotary, share_rotary
from megarl.models.layer_specs import block_spec, has_sinks
from megarl.models.logprobs import Support, vocab_parallel_logprobs
from megarl.models.rotary import frequencies


def accumulate_in_main_gradients(chunk: torch.nn.Module) -> None:
    """Make Transformer Engine's linear layers add weight gradients directly to Megatron's float32 gradients.

    Otherwise they return gradients in the model's dtype, and DistributedDataParallel adds them.
    """
    for module in chunk.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True  # pyright: ignore[reportArgumentType]


@contextmanager
def evaluation_mode(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Context in which these model chunks are in evaluation mode: no dropout, no router noise."""
    modules = [module for chunk in chunks for module in chunk.modules()]
    # Transformer Engine 2.11 selects other attention kernels in evaluation mode. But old log-probs must come from the
    # kernels of the training pass. Attention has no dropout, so its mode can stay. Its backends are modules of their
    # own (FusedAttention, FlashAttention), so all modules below it keep their mode too.
    attention_modules = [module for module in modules if "DotProductAttention" in type(module).__name__]
    unchanged_ids = {id(submodule) for module in attention_modules for submodule in module.modules()}
    modes = [(module, module.training) for module in modules if id(module) not in unchanged_ids]
    for module, _ in modes:
        module.training = False
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


class StateCarrier(Protocol):
    """A part of a chunk that sends states [own tokens, 1, hidden_size], without gradient, from stage to stage.

    These carried states are stacked on the hidden states, so that Megatron's schedules send one tensor. The gradient
    has the stack's shape, with zeros for the carried states.
    """

    num_received: int
    """Number of states carried by the previous chunk's output, in a pass with gradients; in other passes none."""
    num_sent: int
    """Number of states carried by this chunk's output, in a pass with gradients; in other passes none."""

    def unpack(self, received: Tensor) -> Tensor:
        """Split the previous chunk's tensor [1 + num_received, own tokens, 1, hidden_size], and store the carried
        states.

        Returns the hidden states. A tensor [own tokens, 1, hidden_size] has no carried states.
        """
        ...

    def pack(self, hidden_states: Tensor) -> Tensor:
        """Return the tensor for the next chunk, [1 + num_sent, own tokens, 1, hidden_size].

        Without carried states it is `hidden_states` [own tokens, 1, hidden_size].
        """
        ...


class PackedModel(GPTModel):
    """A pipeline stage of a model over packed rows; with `vp_stage`, one virtual stage."""

    def __init__(
        self,
        config: TransformerConfig,
        shape: ModelShape,
        *,
        block: Callable[..., Any] = block_spec,
        vp_stage: int | None = None,
    ) -> None:
        """Build the stage on all ranks together. `block` makes Megatron's spec of its layers."""
        tp = parallel_state.get_tensor_model_parallel_world_size()
        super().__init__(
            config,
            block(config, shape, vp_stage),
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
        self.attention_rotates = config.multi_latent_attention
        """Whether the attention computes its rotary angles itself."""
        self.qkv_format = "thd" if uses_transformer_engine() and not has_sinks(config) else "packed"
        self.carrier: StateCarrier | None = None
        """Sends states between pipeline stages in passes with gradients. None: only hidden states are sent."""

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Take the previous pipeline stage's output, as a list of one tensor (None on the first stage)."""
        if self.carrier is not None:
            input_tensor = [None if received is None else self.carrier.unpack(received) for received in input_tensor]
        super().set_input_tensor(input_tensor)

    def _preprocess(
        self, input_ids: Tensor, position_ids: Any, *args: Any, packed_seq_params: PackedRow, **kwargs: Any
    ) -> Any:
        """Return embeddings and rotary angles, in the tuple that Megatron expects."""
        if packed_seq_params.qkv_format != "packed":
            return super()._preprocess(input_ids, position_ids, *args, packed_seq_params=packed_seq_params, **kwargs)
        # One rotary angle per token. Without Transformer Engine's kernel, Megatron-Core 0.16.1 loops over the sequences
        # of a packed row in Python, in every layer.
        embedded = self.embedding(input_ids=input_ids, position_ids=position_ids) if self.pre_process else None
        if self.attention_rotates:
            return embedded, None, None, None, None, None
        angles = self.rotary_pos_emb(self.max_sequence_length, packed_seq=True)[packed_seq_params.positions]
        return embedded, angles, None, None, None, None


class RowSettings(NamedTuple):
    """Sampling settings of a row's tokens in the engine: they define the distribution for the log-probs."""

    temperature: float | Tensor = 1.0
    """One temperature for all tokens, or [tokens]."""
    support: Support | None = None
    """The tokens that the engine could sample: log-probs are normalised over them. None: the whole vocabulary."""


class ExtraHead(Protocol):
    """Computes further values per token from the last hidden states, such as the most likely tokens.

    The policy's last pipeline stage appends them to its output as additional rows.
    """

    def outputs(
        self, hidden_states: Tensor, next_tokens: Tensor, weight: Tensor, layer_arguments: Mapping[str, Any]
    ) -> Tensor | None:
        """Return float32 [tokens] or [rows, tokens], or None if this pass does not use the head.

        Shapes: hidden_states [own tokens, 1, hidden_size], next_tokens [tokens], weight [local vocabulary,
        hidden_size], without gradient. `layer_arguments` are Megatron's arguments of a layer.
        """
        ...


class PolicyModel(PackedModel):
    """A language model: the last stage returns log-probs and entropies, all others hidden states."""

    def __init__(
        self,
        config: TransformerConfig,
        shape: ModelShape,
        *,
        logprob_chunk_tokens: int,
        keeps_logits: bool = False,
        trains_entropy: bool = False,
        block: Callable[..., Any] = block_spec,
        vp_stage: int | None = None,
    ) -> None:
        """Build the stage, and find this rank's rows of the output head. `trains_entropy`: entropies have gradients."""
        super().__init__(config, shape, block=block, vp_stage=vp_stage)
        self.logprob_chunk_tokens, self.keeps_logits = logprob_chunk_tokens, keeps_logits
        self.trains_entropy = trains_entropy
        rows_per_rank = self.vocab_size // parallel_state.get_tensor_model_parallel_world_size()
        self.first_token_id = parallel_state.get_tensor_model_parallel_rank() * rows_per_rank
        self.num_local_tokens = max(0, min(rows_per_rank, shape.vocab_size - self.first_token_id))
        self.row_settings = RowSettings()
        """Sampling settings of the tokens of the next forward pass."""
        self.logprob_function: Any = None
        """Autograd function that computes log-probs. None: the default of `vocab_parallel_logprobs`."""
        self.extra_heads: list[ExtraHead] = []
        self.embedding_copy: Tensor | None = None
        """Copy of the first stage's embedding on the last stage, for extra heads: [local vocabulary, hidden_size]."""

    def embedding_table(self) -> Tensor:
        """Return this rank's rows of the embedding, without gradient: [local vocabulary, hidden_size]."""
        table = self.embedding.word_embeddings.weight if self.pre_process else self.embedding_copy
        assert table is not None
        return table.detach()

    def _postprocess(
        self, hidden_states: Tensor, input_ids: Any, position_ids: Any, labels: Tensor, *_: Any, **layer_arguments: Any
    ) -> Tensor:
        """Return log-probs and entropies, float32 [2, tokens], in nats, on the last stage; hidden states on all others.

        The rows of each extra head follow. Shapes: hidden_states [computed tokens, 1, hidden_size], labels [1,
        predictions].
        """
        # Megatron-Core 0.19 has `output_processor` for this, but 0.16.1 does not. Extra heads need an override anyway.
        if not self.post_process:
            return hidden_states if self.carrier is None else self.carrier.pack(hidden_states)
        weight = self.head_weight()
        next_tokens = labels.squeeze(0)
        outputs = self._token_outputs(
            self.gather_states(hidden_states), weight, next_tokens, layer_arguments["packed_seq_params"]
        )
        for head in self.extra_heads:
            if (values := head.outputs(hidden_states, next_tokens, weight.detach(), layer_arguments)) is not None:
                outputs = torch.cat([outputs, values.view(-1, outputs.size(1))])
        return outputs

    def head_weight(self) -> Tensor:
        """Return this rank's rows of the output layer, [local tokens, hidden_size]. Only on the last stage."""
        is_tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if is_tied else self.output_layer.weight
        assert weight is not None
        return weight[: self.num_local_tokens]

    def gather_states(self, hidden_states: Tensor) -> Tensor:
        """Return the hidden states [tokens, hidden_size] that each tensor-parallel rank multiplies by its head rows."""
        tp_group = self.pg_collection.tp
        if self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, group=tp_group)
        else:
            hidden_states = copy_to_tensor_model_parallel_region(hidden_states, group=tp_group)
        return hidden_states.squeeze(1)

    def _token_outputs(self, hidden: Tensor, weight: Tensor, labels: Tensor, row: PackedRow) -> Tensor:
        """Return the last stage's output: log-prob and entropy of each predicted token, [2, predictions].

        `hidden` is [computed tokens, hidden_size] for `row`. `weight` has this rank's rows of the output head. `labels`
        [predictions] are the token ids to predict.
        """
        logprobs, entropies = vocab_parallel_logprobs(
            row.prediction_states(hidden),
            weight,
            labels,
            first_token_id=self.first_token_id,
            group=self.pg_collection.tp,
            temperature=self.row_settings.temperature,
            chunk_tokens=self.logprob_chunk_tokens,
            support=self.row_settings.support,
            # The backward pass follows at once, so keeping the logits of a single chunk takes no more memory.
            keeps_logits=self.keeps_logits or self.logprob_chunk_tokens >= len(labels),
            function=self.logprob_function,
        )
        # Entropies used only for metrics are detached: this saves their part of the backward pass.
        outputs = torch.stack([logprobs, entropies if self.trains_entropy else entropies.detach()])
        return row.spread_predictions(outputs)


class ValueModel(PackedModel):
    """A critic or reward model: the last stage returns values, all others hidden states."""

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
        """Return values [1, tokens] on the last stage; hidden states on all others."""
        if not self.post_process:
            return hidden_states
        if self.config.sequence_parallel:
            # Every tensor-parallel rank continues with all tokens, so the head's gradient is complete on each rank.
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        values = F.linear(hidden_states.squeeze(1).float(), self.value_head.weight.float()).T
        return packed_seq_params.spread_states(values)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """Return the state of the model's modules. GPTModel's own method expects an output layer."""
        return MegatronModule.sharded_state_dict(self, prefix, sharded_offsets, metadata)
