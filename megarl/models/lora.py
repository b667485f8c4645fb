"""LoRA (arXiv:2106.09685, section 4.1): low-rank adapters for Megatron's frozen linear layers, with any parallel sizes.

y = W x + scale * B A dropout(x). scale is alpha / rank or alpha / sqrt(rank). An adapter is a submodule of its linear
layer, and a forward hook adds its output. (Not yet run with Transformer Engine's layers.) If the layer is split over
ranks, A or B is split on the same side. The other matrix is replicated. Exact models multiply by the merged weights; A
and B have the same gradients.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from torch import Tensor, nn

from megarl.models.exact.gradients import add_gradient_of
from megarl.models.policy import PackedModel
from megarl.types import ConfigError

_COLUMN = ("linear_qkv", "linear_fc1", "linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj")
"""Names of column-parallel linear layers (split over output features). All others are row-parallel."""
_EQUAL_DROPOUT, _RANK_DROPOUT = "adapters-alike", "adapters-apart"
"""Names of the dropout's random states: equal, and different, on the tensor-parallel ranks of a replica."""


class Adapter(nn.Module):
    """The LoRA adapter of a linear layer: scale * B A dropout(x), added to the layer's output.

    Shapes of this rank's parts: `a` [rank, in], `b` [out, rank]. A gated layer's `b` is [2, out / 2, rank], so that
    both halves are split evenly. `key` names the layer within the whole model.
    """

    def __init__(self, linear: Any, key: str, *, rank: int, scale: float, dropout: float, seed: int) -> None:
        """Make the adapter of the layer `linear`, with B = 0."""
        super().__init__()
        self.key, self.scale, self.dropout, self.is_on = key, scale, dropout, True
        self.is_expert, self.is_column = ".experts." in key, key.endswith(_COLUMN)
        self.sequence_parallel = linear.config.sequence_parallel
        self.group: Any = (
            parallel_state.get_expert_tensor_parallel_group()
            if self.is_expert
            else parallel_state.get_tensor_model_parallel_group()
        )
        # A layer with a fused norm normalises its input before the weight, so the adapter does too. The norm's
        # parameters belong to the layer and are not registered here.
        self.norm = None
        if hasattr(linear, "layer_norm_weight"):
            self.norm = (linear.layer_norm_weight, linear.eps, linear.zero_centered_gamma)
        out_features, in_features = linear.weight.shape
        tensor_rank = self.group.rank()
        initial_a = self._draw_a(seed, (rank, in_features))
        is_gated = key.endswith("linear_fc1")
        self.a = nn.Parameter(initial_a.to(linear.weight).contiguous())
        self.b = nn.Parameter(
            linear.weight.new_zeros((2, out_features // 2, rank) if is_gated else (out_features, rank))
        )
        self.split_dims = {"a": None, "b": int(is_gated)} if self.is_column else {"a": 1, "b": None}
        for letter, dim in self.split_dims.items():
            self._mark_for_megatron(getattr(self, letter), dim, tensor_rank)

    def reset(self, seed: int) -> None:
        """Set the matrices to the values of a new adapter with this seed."""
        with torch.no_grad():
            rank, columns = self.a.shape
            self.a.copy_(self._draw_a(seed, (rank, columns)))
            self.b.zero_()

    def _draw_a(self, seed: int, shape: tuple[int, int]) -> Tensor:
        # Each rank draws the full matrix and cuts its part, so that the values do not depend on the parallel sizes.
        rank, columns = shape
        splits = 1 if self.is_column else self.group.size()
        whole_matrix = _random_values((rank, columns * splits), f"{seed} {self.key}")
        return whole_matrix if self.is_column else whole_matrix.chunk(splits, dim=1)[self.group.rank()]

    def _mark_for_megatron(self, parameter: Any, dim: int | None, tensor_rank: int) -> None:
        """Set the attributes by which Megatron decides how to reduce a parameter's gradient, and whether the norm
        counts it.
        """
        # Megatron-Core 0.16.1 selects copies for the norm by tp rank. `shared`: only the first of the etp ranks counts
        # a parameter that all of them replicate.
        is_counted = dim is not None or self.is_expert
        set_tensor_model_parallel_attributes(parameter, is_counted, dim if dim is not None else -1, 1)
        parameter.allreduce = not self.is_expert
        if self.is_expert:
            parameter.shared = dim is None and tensor_rank > 0
        else:
            parameter.sequence_parallel = dim is None and self.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """Return the adapter's output [..., local out] for the layer's input `x` [..., local in]."""
        if self.norm is not None:
            weight, epsilon, is_zero_centered = self.norm
            if is_zero_centered:
                # Add 1 in float32, as in the fused kernel: the stored weight would lose bits.
                x = F.rms_norm(x.float(), x.shape[-1:], 1.0 + weight.float(), epsilon).to(x.dtype)
            else:
                x = F.rms_norm(x, x.shape[-1:], weight, epsilon)
        if self.dropout and self.training:
            # Ranks must drop the same elements if and only if they have the same features of the same tokens.
            drops_alike = self.is_column and not self.sequence_parallel
            tracker = get_cuda_rng_tracker()
            assert tracker is not None
            with tracker.fork(_EQUAL_DROPOUT if drops_alike else _RANK_DROPOUT):
                x = F.dropout(x, self.dropout)
        a, b = self.a, self.b.flatten(0, -2)
        if self.is_expert:
            # The expert dispatcher gives every rank all tokens, and sums outputs and gradients of inputs. Only the
            # gradient of the replicated matrix must still be summed.
            a, b = (self._copy_to_region(a), b) if self.is_column else (a, self._copy_to_region(b))
            return F.linear(F.linear(x, a) * self.scale, b)
        return F.linear(self._exchange_low_rank(F.linear(x, a)) * self.scale, b)

    def _copy_to_region(self, x: Tensor) -> Tensor:
        return copy_to_tensor_model_parallel_region(x, group=self.group)

    def _exchange_low_rank(self, low_rank_values: Tensor) -> Tensor:
        """Return B's input [..., rank] from A's output `low_rank_values` [..., rank].

        Column-parallel layers gather it over tokens. Row-parallel layers sum it over the ranks' input features.
        """
        if self.is_column and self.sequence_parallel:
            return gather_from_sequence_parallel_region(low_rank_values, group=self.group)
        if self.is_column:
            return self._copy_to_region(low_rank_values)
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(low_rank_values, group=self.group)
        return reduce_from_tensor_model_parallel_region(low_rank_values, group=self.group)

    @property
    def is_first_replica(self) -> bool:
        """Whether this rank is the first of the data-parallel ranks with the same matrices."""
        if self.is_expert:
            return parallel_state.get_expert_data_parallel_rank() == 0
        return parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0

    def merge_into(self, weight: Tensor, merged: Tensor) -> Tensor:
        """Set merged = weight + scale * B A, computed in float32 and rounded once; both [local out, local in].

        Returns the unrounded float32 sum.
        """
        b = self.b.detach().flatten(0, -2).float()
        unrounded = torch.addmm(weight.detach().float(), b, self.a.detach().float(), alpha=self.scale)
        merged.copy_(unrounded)
        return unrounded

    def squared_norms(self, unrounded: Tensor, merged: Tensor) -> Tensor:
        """Return float32 [2]: the squared norm of a merge's rounding error, and of the update scale * B A.

        `unrounded` and `merged` come from `merge_into`. `unrounded` is overwritten.
        """
        error = torch.linalg.vector_norm(unrounded.sub_(merged)).square()
        # Two small products [rank, rank] give the norm of B A without the update itself.
        a, b = self.a.detach().float(), self.b.detach().flatten(0, -2).float()
        update = ((b.T @ b) * (a @ a.T)).sum() * self.scale**2
        return torch.stack([error, update])


def attach_adapters(
    chunk: PackedModel,
    linears: Collection[str],
    *,
    rank: int,
    scale: float,
    dropout: float,
    seed: int,
    is_exact: bool = False,
) -> None:
    """Attach new LoRA adapters, with B = 0, to a chunk's linear layers named in `linears`; freeze all other parameters.

    Call it after the chunk's weights are loaded, and before gradient buffers and optimizer are created. An exact model
    multiplies by merged weights (`is_exact`). Raises ConfigError for layers that fuse several experts' weights.
    """
    chunk.requires_grad_(False)
    layers: Any = chunk.decoder.layers
    for layer in layers:
        for name, linear in list(layer.named_modules()):
            if name.rpartition(".")[2] not in linears:
                continue
            if not isinstance(getattr(linear, "weight", None), Tensor):
                raise ConfigError(
                    "lora.targets: Transformer Engine's grouped experts cannot have adapters; leave gate_up_proj and "
                    "down_proj out."
                )
            key = _name_in_whole_model(layer, name)
            linear.adapter = Adapter(linear, key, rank=rank, scale=scale, dropout=dropout, seed=seed).eval()
            if is_exact:
                linear.register_forward_pre_hook(_merge_weight, with_kwargs=True)
                linear.register_forward_hook(_add_gradient)
            else:
                linear.register_forward_hook(_add_adapter_output)
    if chunk.pre_process:
        # torch's activation checkpointing computes gradients only if an input requires one; frozen embeddings do not.
        chunk.embedding.register_forward_hook(lambda _, __, embedded: embedded.requires_grad_(torch.is_grad_enabled()))
    _seed_dropout(seed)


def _name_in_whole_model(layer: Any, name: str) -> str:
    """Return a linear layer's name, with its layer counted over all stages, and its expert over all ranks."""
    if (match := re.search(r"local_experts\.(\d+)", name)) is not None:
        num_local = len(layer.mlp.experts.local_experts)
        first_expert = parallel_state.get_expert_model_parallel_rank() * num_local
        name = name.replace(match[0], str(first_expert + int(match[1])))
    return f"decoder.layers.{layer.layer_number - 1}.{name}"


def adapters_of(chunks: Sequence[nn.Module]) -> Iterator[tuple[int, str, Adapter]]:
    for index, chunk in enumerate(chunks):
        yield from ((index, name, module) for name, module in chunk.named_modules() if isinstance(module, Adapter))


@contextmanager
def switch_adapters(chunks: Sequence[nn.Module], *, on: bool, drops: bool) -> Iterator[None]:
    """Context in which LoRA adapters are on, with dropout if `drops`. `on` False: they are off (the frozen model).

    At its end the adapters are on, without dropout.
    """
    adapters = [adapter for _, _, adapter in adapters_of(chunks)]
    for adapter in adapters:
        adapter.is_on = on
        adapter.train(drops)
    yield
    for adapter in adapters:
        adapter.is_on = True
        adapter.eval()


def shard_adapters(chunk: nn.Module) -> dict[str, ShardedTensor]:
    """Return the parameters of a chunk's adapters by name as Megatron's sharded tensors, for a checkpoint."""
    state = {}
    for _, name, adapter in adapters_of([chunk]):
        replica_rank = (
            parallel_state.get_expert_data_parallel_rank()
            if adapter.is_expert
            else parallel_state.get_data_parallel_rank(with_context_parallel=True)
        )
        tensor_rank, num_tensor_ranks = adapter.group.rank(), adapter.group.size()
        for letter, dim in adapter.split_dims.items():
            rank_offsets = [] if dim is None else [(dim, tensor_rank, num_tensor_ranks)]
            state[f"{name}.{letter}"] = ShardedTensor.from_rank_offsets(
                f"{adapter.key}.adapter.{letter}",
                getattr(adapter, letter),
                *rank_offsets,
                replica_id=(0, tensor_rank if dim is None else 0, replica_rank),
            )
    return state


def _add_adapter_output(linear: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor | None]) -> Any:
    if not linear.adapter.is_on:
        return None
    return output[0] + linear.adapter(inputs[0]), output[1]


def _merge_weight(linear: Any, inputs: tuple[Tensor, ...], named: dict[str, Any]) -> Any:
    """Return the arguments of an exact linear layer, with the merged weight that the next reshard will send."""
    if not linear.adapter.is_on:
        return None
    merged = torch.empty_like(linear.weight, requires_grad=False)
    with torch.no_grad():
        linear.adapter.merge_into(linear.weight, merged)
    return inputs, {**named, "weight": merged}


def _add_gradient(linear: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor | None]) -> Any:
    """Return the layer's output, and attach the gradients of A and B to it.

    The merged weight already gives the gradient of the inputs.
    """
    if not linear.adapter.is_on or not torch.is_grad_enabled():
        return None
    return add_gradient_of(linear.adapter(inputs[0].detach()), output[0]), output[1]


def _random_values(shape: tuple[int, int], name: str) -> Tensor:
    """Return a full matrix, Kaiming-uniform like torch's linear layers. Its name is the seed."""
    generator = torch.Generator().manual_seed(_seed_of(name))
    return torch.empty(shape, device="cpu").uniform_(-1, 1, generator=generator) * shape[1] ** -0.5


def _seed_dropout(seed: int) -> None:
    """Seed the random states of the adapters' dropout. Replicas and stages have different seeds."""
    tracker: Any = get_cuda_rng_tracker()
    tp = parallel_state.get_tensor_model_parallel_rank()
    replica_rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    for name, rank_text in ((_EQUAL_DROPOUT, ""), (_RANK_DROPOUT, tp)):
        # Several chunks and models of a rank share the tracker. Megatron raises an error for a name added twice.
        if name not in tracker.get_states():
            tracker.add(name, _seed_of(f"{seed} {name} {replica_rank} {stage} {rank_text}"))


def _seed_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])
