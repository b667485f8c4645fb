"""An EAGLE-3 drafter that learns from the policy's hidden states (arXiv 2503.01840), on the policy's last stage.

The drafter reads the inputs of three layers (`AuxStates`) and the policy's embedding. Both are detached, so its loss
does not change the policy's gradient. At position t it predicts the policy's prediction at t + 1. In later steps of a
training pass the drafter reads its own states, as when an engine drafts several tokens: step k predicts the policy's
prediction at t + 1 + k (training-time test, section 3.2 of the paper).

Every rank has the whole parameters; Megatron adds up their gradients. The positions of a row are divided over the
context-parallel ranks, and with sequence parallelism over the tensor-parallel ranks too. Only the policy's detached
states are gathered, so no collective has a gradient.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from megatron.core import parallel_state
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megarl.algorithms.divergences import forward_kl
from megarl.families.eagle3 import DrafterShape
from megarl.models.attention import PackedRow
from megarl.models.distillation.divergence import vocab_parallel_divergence
from megarl.models.drafts.aux_states import AuxStates
from megarl.models.drafts.embeddings import embed_tokens
from megarl.models.policy import PolicyModel
from megarl.models.rotary import frequencies

_CHUNK_QUERIES = 128
"""Queries whose attention scores exist at once, for all keys of a sequence: 1 GiB at 32 heads and 65,536 tokens."""


class DrafterRow(NamedTuple):
    """A whole packed row, padding included, on all context-parallel ranks.

    `tokens` [tokens] is on the device. `sequence_starts` [tokens], in host memory: index in the row of the first token
    of each token's sequence.
    """

    tokens: Tensor
    sequence_starts: NDArray[np.int64]


class Norm(nn.Module):
    """y = x / rms(x) * weight over the last dimension, computed in float32."""

    def __init__(self, size: int, epsilon: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self._epsilon = nn.Parameter(torch.ones(size, dtype=dtype)), epsilon

    def forward(self, x: Tensor) -> Tensor:
        wide_x = x.float()
        return (wide_x * torch.rsqrt(wide_x.square().mean(-1, keepdim=True) + self._epsilon)).to(x.dtype) * self.weight


class Drafter(nn.Module):
    """The layer, the norms and the head of an EAGLE-3 drafter. Parameters are named as in published files."""

    target_ids: Tensor
    angles: Tensor

    def __init__(self, shape: DrafterShape, target_ids: Tensor, dtype: torch.dtype) -> None:
        """Make a drafter with unset weights. `target_ids` [drafted tokens] maps the drafter's token ids to the
        policy's.
        """
        super().__init__()
        self.shape = shape
        for name, tensor_shape in shape.tensors.items():
            module_names = name.split(".")
            parent: nn.Module = self
            for module_name in module_names[:-2]:
                if not hasattr(parent, module_name):
                    parent.add_module(module_name, nn.Module())
                parent = getattr(parent, module_name)
            is_norm = len(tensor_shape) == 1
            # Without initial values, because the drafter's files replace them.
            module = (
                Norm(tensor_shape[0], shape.norm_epsilon, dtype)
                if is_norm
                else nn.utils.skip_init(nn.Linear, tensor_shape[1], tensor_shape[0], bias=False, dtype=dtype)
            )
            parent.add_module(module_names[-2], module)
        self.register_buffer("target_ids", target_ids, persistent=False)
        self.register_buffer("angles", frequencies(shape.rotary, shape.head_dim), persistent=False)

    def attention_inputs(self, embeddings: Tensor, states: Tensor) -> Tensor:
        """Return the layer's inputs [tokens, 2 * hidden_size]: normed embeddings and states, both [tokens,
        hidden_size].
        """
        layer: Any = self.midlayer
        return torch.cat([layer.input_layernorm(embeddings), layer.hidden_norm(states)], dim=-1)

    def queries(self, inputs: Tensor, positions: Tensor) -> Tensor:
        """Return rotated queries [tokens, heads, head_dim]. `positions` [tokens] count within the sequence."""
        layer: Any = self.midlayer
        return self._rotate(layer.self_attn.q_proj(inputs), positions)

    def keys_and_values(self, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return rotated keys and unrotated values, both [tokens, key-value heads, head_dim]."""
        layer: Any = self.midlayer
        values = layer.self_attn.v_proj(inputs)
        keys = self._rotate(layer.self_attn.k_proj(inputs), positions)
        return keys, values.view(keys.shape)

    def next_states(self, attended: Tensor, states: Tensor) -> Tensor:
        """Return the states of the next step [tokens, hidden_size]: the layer's output before the last norm.

        `attended` [tokens, heads * head_dim] is the attention's output, `states` [tokens, hidden_size] the layer's
        input.
        """
        layer: Any = self.midlayer
        residual = layer.hidden_norm(states) if self.shape.adds_normed_state else states
        residual = residual + layer.self_attn.o_proj(attended)
        x = layer.post_attention_layernorm(residual)
        return residual + layer.mlp.down_proj(F.silu(layer.mlp.gate_proj(x)) * layer.mlp.up_proj(x))

    def _rotate(self, flat_vectors: Tensor, positions: Tensor) -> Tensor:
        """Return queries or keys [tokens, heads, head_dim], rotated by their positions, from [tokens, heads *
        head_dim].
        """
        vectors = flat_vectors.view(len(flat_vectors), -1, self.shape.head_dim)
        angles = positions[:, None, None] * self.angles
        factor = self.shape.rotary.attention_factor
        cos, sin = (values.mul(factor).to(vectors.dtype) for values in (angles.cos(), angles.sin()))
        # Channels i and i + head_dim / 2 are a pair, as in Hugging Face's Llama.
        first_half, second_half = vectors.chunk(2, dim=-1)
        return torch.cat([first_half * cos - second_half * sin, second_half * cos + first_half * sin], dim=-1)


def attend(
    query: Tensor,
    first_keys: Tensor,
    first_values: Tensor,
    later_keys: list[Tensor],
    later_values: list[Tensor],
    mask: Tensor,
) -> Tensor:
    """Attend to the drafter's keys of step 0, and to each query's own keys of later steps: [queries, heads * dim].

    Shapes: query [queries, heads, dim]; first_keys and first_values [keys, key-value heads, dim], of step 0, with
    `mask` bool [queries, keys]; later_keys and later_values [queries, key-value heads, dim] of each later step.
    """
    heads = query.unflatten(1, (first_keys.shape[1], -1)) / query.shape[-1] ** 0.5
    scores = torch.einsum("qgrd,kgd->qgrk", heads, first_keys).masked_fill(~mask[:, None, None], -torch.inf)
    # Among later steps' keys, a query attends only to the ones of its own position: the tokens drafted before it.
    own_scores = [torch.einsum("qgrd,qgd->qgr", heads, keys)[..., None] for keys in later_keys]
    attention_weights = torch.cat([scores, *own_scores], dim=-1).float().softmax(-1).to(first_values.dtype)
    first_weights, *own_weights = attention_weights.split([len(first_keys), *[1] * len(later_keys)], dim=-1)
    out = torch.einsum("qgrk,kgd->qgrd", first_weights, first_values)
    for weight_of_step, values in zip(own_weights, later_values, strict=True):
        out = out + weight_of_step * values[:, :, None]
    return out.flatten(1)


class DrafterHead:
    """The drafter of a policy's last stage. It returns the KL from the policy's distributions to the drafter's.

    Set `row` before each pass that trains the drafter; without `row`, a pass does not run it. The distributions cover
    the drafted tokens, at temperature 1.
    """

    def __init__(self, model: PolicyModel, drafter: Drafter, aux_states: AuxStates, num_steps: int) -> None:
        self._model, self._drafter, self._aux_states, self._num_steps = model, drafter, aux_states, num_steps
        self.row: DrafterRow | None = None

    def outputs(
        self, hidden_states: Tensor, next_tokens: Tensor, weight: Tensor, layer_arguments: Any
    ) -> Tensor | None:
        """Return the KL of each drafting step in nats, float32 [steps, tokens]; None without a row.

        Arguments as in `ExtraHead`. Step k (from 0) at position t compares the drafter's distribution with the policy's
        at position t + 1 + k. If this position is in another sequence, the entry has no meaning.
        """
        drafter_row, self.row = self.row, None
        if drafter_row is None:
            return None
        packed_row: PackedRow = layer_arguments["packed_seq_params"]
        assert packed_row.host_local is not None
        with torch.no_grad():
            inputs = torch.cat(
                [self._gather_row(states, packed_row) for states in self._aux_states.take_states()], dim=-1
            )
            targets = self._gather_row(hidden_states.detach(), packed_row)
            embeddings = self._embed(drafter_row.tokens, self._model.embedding_table())
            # The policy's head rows for the drafted tokens, in the drafter's order of tokens.
            target_weight = self._embed(self._drafter.target_ids, weight)
        group: Any = self._model.pg_collection.tp
        num_parts = group.size() if self._model.config.sequence_parallel else 1
        rank_part = group.rank() if num_parts > 1 else 0
        rank_indices = np.split(packed_row.host_local, num_parts)[rank_part]
        losses = self._compute_losses(rank_indices, drafter_row, inputs, embeddings, targets, target_weight)
        if num_parts == 1:
            return losses
        # Gather all ranks' values. Only this rank's own positions carry gradient.
        rank_losses = [torch.empty_like(losses) for _ in range(num_parts)]
        torch.distributed.all_gather(rank_losses, losses.detach().contiguous(), group=group)
        rank_losses[rank_part] = losses
        return torch.cat(rank_losses, dim=1)

    def _compute_losses(
        self,
        row_indices: NDArray[np.int64],
        row: DrafterRow,
        inputs: Tensor,
        embeddings: Tensor,
        targets: Tensor,
        target_weight: Tensor,
    ) -> Tensor:
        """Return the KL of each step at some tokens of the row, `row_indices` [tokens]: float32 [steps, tokens].

        Shapes: inputs [row tokens, 3 * hidden_size], embeddings and targets [row tokens, hidden_size], target_weight
        [drafted tokens, hidden_size].
        """
        drafter, device = self._drafter, inputs.device
        input_projection, output_norm, output_head = (getattr(drafter, name) for name in ("fc", "norm", "lm_head"))
        device_indices = torch.from_numpy(row_indices).to(device)
        row_positions = torch.from_numpy(np.arange(len(row.sequence_starts)) - row.sequence_starts).to(device)
        positions = row_positions[device_indices]
        # Each rank makes the keys of step 0 for the whole row: cheaper than a gather with a gradient.
        states = input_projection(inputs)
        layer_inputs = drafter.attention_inputs(embeddings.roll(-1, 0), states)
        first_keys, first_values = drafter.keys_and_values(layer_inputs, row_positions)
        states, layer_inputs = states[device_indices], layer_inputs[device_indices]
        later_keys: list[Tensor] = []
        later_values: list[Tensor] = []
        losses = []
        for step in range(self._num_steps):
            if step:
                layer_inputs = drafter.attention_inputs(embeddings.roll(-1 - step, 0)[device_indices], states)
                key, value = drafter.keys_and_values(layer_inputs, positions + step)
                later_keys, later_values = [*later_keys, key], [*later_values, value]
            query = drafter.queries(layer_inputs, positions + step)
            attended = self._attend_row(
                query, first_keys, first_values, later_keys, later_values, row_indices, row.sequence_starts
            )
            states = drafter.next_states(attended, states)
            losses.append(
                vocab_parallel_divergence(
                    output_norm(states),
                    output_head.weight,
                    targets.roll(-1 - step, 0)[device_indices],
                    target_weight,
                    forward_kl,
                    group=None,
                    temperature=1.0,
                    chunk_tokens=self._model.logprob_chunk_tokens,
                )
            )
        return torch.stack(losses)

    def _attend_row(
        self,
        query: Tensor,
        first_keys: Tensor,
        first_values: Tensor,
        later_keys: list[Tensor],
        later_values: list[Tensor],
        query_indices: NDArray[np.int64],
        sequence_starts: NDArray[np.int64],
    ) -> Tensor:
        """Call `attend` in chunks of queries. The backward pass computes the scores again.

        `query_indices` [queries] are ascending indices in the row, `first_keys` and `first_values` [row tokens, ...]
        belong to step 0 and the whole row. `sequence_starts` [row tokens] as in `DrafterRow`.
        """
        chunk_outputs = []
        for chunk_start in range(0, len(query_indices), _CHUNK_QUERIES):
            chunk = slice(chunk_start, chunk_start + _CHUNK_QUERIES)
            chunk_indices = query_indices[chunk]
            starts_of_queries = sequence_starts[chunk_indices]
            key_indices = np.arange(starts_of_queries[0], chunk_indices[-1] + 1)
            is_attended = (key_indices >= starts_of_queries[:, None]) & (key_indices <= chunk_indices[:, None])
            mask = torch.from_numpy(is_attended).to(query.device)
            keys = slice(int(key_indices[0]), int(key_indices[-1]) + 1)
            later_chunks = [[tensor[chunk] for tensor in tensors] for tensors in (later_keys, later_values)]
            chunk_outputs.append(
                checkpoint(
                    attend, query[chunk], first_keys[keys], first_values[keys], *later_chunks, mask, use_reentrant=False
                )
            )
        return torch.cat(chunk_outputs)

    def _gather_row(self, states: Tensor, row: PackedRow) -> Tensor:
        """Gather the states [row tokens, hidden_size] from all ranks. `states`: this rank's part [own tokens, 1,
        hidden_size].
        """
        states = self._model.gather_states(states)
        group: Any = parallel_state.get_context_parallel_group()
        if group.size() == 1:
            return states
        assert row.gathered_index is not None
        parts = states.new_empty(group.size() * len(states), states.shape[1])
        torch.distributed.all_gather_into_tensor(parts, states.contiguous(), group=group)
        return parts.index_select(0, row.gathered_index)

    def _embed(self, tokens: Tensor, table: Tensor) -> Tensor:
        return embed_tokens(tokens, None, table, self._model.first_token_id, self._model.pg_collection.tp)[:, 0]


def attach_drafter(
    model: PolicyModel, shape: DrafterShape, target_ids: Tensor, aux_states: AuxStates, *, num_steps: int
) -> DrafterHead:
    """Add a drafter with unset weights to the last chunk of a policy. The chunk must have `aux_states`.

    `target_ids` [drafted tokens]: the policy's ids of the drafted tokens.
    """
    drafter = Drafter(shape, target_ids, model.config.params_dtype).to(target_ids.device)
    # Named as in `families.eagle3.PARAMETERS`.
    model.drafter = drafter
    for parameter in drafter.parameters():
        megatron_parameter: Any = parameter
        # Megatron leaves parameters marked `shared` out of the gradient's norm. It adds up gradients marked
        # `sequence_parallel` over the tensor-parallel ranks, each with other positions.
        megatron_parameter.shared, megatron_parameter.sequence_parallel = True, model.config.sequence_parallel
    head = DrafterHead(model, drafter, aux_states, num_steps)
    model.extra_heads.append(head)
    return head
