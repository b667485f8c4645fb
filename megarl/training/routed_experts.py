"""Router replay: the trainer uses the experts that the engine chose for each token.

A completion's experts [tokens, layers, top_k] are far larger than its other data, so the driver gets only a handle. The
sampling rank stores them (`StoredExperts`). Before a pass, each rank fetches the experts of its tokens and layers
(`ExpertExchange`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from numpy.typing import NDArray
from safetensors.numpy import load_file, save

from megarl.data.token_batch import TokenBatch
from megarl.files.atomic import raise_disk_full_errors
from megarl.groups import signed
from megarl.models.experts.dispatch import ExpertCounts, takes_known_counts
from megarl.models.experts.replay import expert_layers, replay_routes, stop_replay
from megarl.training.exchange import fetch_values, token_runs
from megarl.training.rows.feeds import RowFeed
from megarl.training.rows.microbatch import Microbatch
from megarl.types import NO_EXPERTS, DataError, ExpertsHandle

if TYPE_CHECKING:
    from megarl.training.model import ModelShard

_MAX_RANKS = 1 << 20
"""Limit of ranks: a completion's number modulo this value is the rank that issued the number."""


class StoredExperts:
    """Experts of completions sampled by this rank, in host memory: int16 [tokens, layers, top_k] by number.

    After a resume with another world size, rank r modulo this size has the experts of rank r.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._arrays: dict[int, NDArray[np.int16]] = {}
        self._num_issued = 0

    def store(self, experts: NDArray[np.integer]) -> ExpertsHandle:
        """Store a completion's experts [tokens, layers, top_k] and return their handle."""
        handle_number = self._num_issued * _MAX_RANKS + self._rank
        self._num_issued += 1
        self._arrays[handle_number] = experts.astype(np.int16)
        return ExpertsHandle(self._rank, handle_number)

    def retain(self, handles: Iterable[ExpertsHandle]) -> int:
        """Remove all experts except the ones of these handles. Returns the bytes stored before."""
        num_bytes = sum(experts.nbytes for experts in self._arrays.values())
        self._arrays = {handle_number: self._arrays[handle_number] for handle_number in self._local_numbers(handles)}
        return num_bytes

    def read_span(self, handle_number: int, first_token: int, end_token: int) -> NDArray[np.int16]:
        """Return the experts [tokens, layers, top_k] of a span of tokens. `handle_number` is that of the completion's
        handle.

        The last token never went through the model. No later token depends on its experts, so any are valid.
        """
        if handle_number not in self._arrays:
            raise KeyError(f"rank {self._rank} does not hold routed experts number {handle_number}")
        experts = self._arrays[handle_number]
        return experts[np.minimum(np.arange(first_token, end_token), len(experts) - 1)]

    def save(self, folder: Path) -> None:
        """Write the stored experts into a checkpoint's folder, one file per sampling rank. Raises DiskFullError."""
        for sampling_rank in {handle_number % _MAX_RANKS for handle_number in self._arrays}:
            experts_by_name = {
                str(handle_number): experts
                for handle_number, experts in self._arrays.items()
                if handle_number % _MAX_RANKS == sampling_rank
            }
            with raise_disk_full_errors(folder, sum(experts.nbytes for experts in experts_by_name.values())):
                _file(folder, sampling_rank).write_bytes(save(experts_by_name))

    def load(self, folder: Path, handles: Iterable[ExpertsHandle]) -> None:
        """Load this rank's share of these experts from a checkpoint's folder. Raises DataError if one is missing."""
        handle_numbers = self._local_numbers(handles)
        for sampling_rank in {handle_number % _MAX_RANKS for handle_number in handle_numbers}:
            file = _file(folder, sampling_rank)
            experts_by_name = load_file(file) if file.exists() else {}
            self._arrays |= {
                int(name): experts for name, experts in experts_by_name.items() if int(name) in handle_numbers
            }
        if missing_numbers := handle_numbers - self._arrays.keys():
            raise DataError(
                f"{folder}: lacks the routed experts of {len(missing_numbers)} trajectories waiting for training; "
                "remove this checkpoint and resume from an older one"
            )
        # New numbers must not repeat the numbers of loaded experts.
        self._num_issued = 1 + max((handle_number // _MAX_RANKS for handle_number in self._arrays), default=-1)

    def _local_numbers(self, handles: Iterable[ExpertsHandle]) -> set[int]:
        return {handle.number for handle in handles if handle.rank % self._world_size == self._rank}


def _file(folder: Path, sampler: int) -> Path:
    return folder / f"routed_experts_{sampler:05d}.safetensors"


class ExpertExchange:
    """Sends routed experts from the ranks that store them to the ranks that train their tokens.

    Building it is a collective. `layers`: numbers of this rank's layers, from 0; only their experts are fetched.
    """

    def __init__(self, stored: StoredExperts, layers: Sequence[int], top_k: int) -> None:
        self._stored, self.layers, self._top_k = stored, tuple(layers), top_k
        self._layers_by_rank = signed.gather(list(layers), purpose="layers")

    def fetch(self, runs: NDArray[np.int64]) -> NDArray[np.int16]:
        """Fetch the experts of runs of tokens: [tokens of all runs, own layers, top_k]. A collective over the world.

        `runs` [runs, 4] lists storing rank, number, first token and end.
        """
        empty = np.zeros((0, len(self.layers), self._top_k), np.int16)
        # After a resume with fewer ranks, a rank also has the experts of ranks that no longer exist.
        return fetch_values(runs[:, 1:], runs[:, 0] % dist.get_world_size(), self._read_span, empty)

    def _read_span(self, rank: int, handle_number: int, first_token: int, end_token: int) -> NDArray[np.int16]:
        return self._stored.read_span(handle_number, first_token, end_token)[:, self._layers_by_rank[rank]]


class RankTokens:
    """The tokens of a packed row in this rank's MoE layers."""

    def __init__(self, batch: TokenBatch, padded_lengths: NDArray[np.int64], row_indices: NDArray[np.int64]) -> None:
        """Find the tokens of this rank.

        `padded_lengths` is [sequences]. `row_indices` [own tokens]: indices in the padded row; -1 is padding.
        """
        assert batch.experts is not None
        sequence_starts = np.cumsum(padded_lengths) - padded_lengths
        sequence = np.repeat(np.arange(len(padded_lengths)), padded_lengths)[row_indices]
        token = row_indices - sequence_starts[sequence]
        has_experts = batch.experts[sequence, 1] != NO_EXPERTS.number
        self.is_token = (row_indices >= 0) & (token < batch.lengths[sequence]) & has_experts
        """[own tokens]: False on padding, and in sequences with `NO_EXPERTS`."""
        sequence, token = sequence[self.is_token], token[self.is_token]
        self.runs = token_runs(batch.experts, sequence, token)
        """[runs, 4]: storing rank, number, first token and end of the runs to fetch, in the rank's order."""


class RouteFeed(RowFeed):
    """Feed that makes the routers use the experts chosen by the engine for a row's tokens."""

    def __init__(self, exchange: ExpertExchange, shard: ModelShard) -> None:
        self._exchange, self._shard = exchange, shard
        self._layers = exchange.layers

    def fetch(
        self, rows: Sequence[TokenBatch], batches: Sequence[Microbatch]
    ) -> Sequence[tuple[torch.Tensor, Sequence[ExpertCounts | None]] | None]:
        """Fetch the experts of this rank's tokens and layers: int16 [tokens, layers, top_k] for each row.

        Also counts tokens per expert for layers that need counts. With experts, this is a collective over the world,
        then over the expert-parallel ranks.
        """
        if rows[0].experts is None:
            return [None] * len(rows)
        shard = self._shard
        rank_part = parallel_state.get_tensor_model_parallel_rank() % shard.token_parts
        own_tokens = []
        for row, batch in zip(rows, batches, strict=True):
            row_indices = np.split(batch.represented_tokens(), shard.token_parts)[rank_part]
            own_tokens.append(RankTokens(row, batch.padded_lengths, row_indices))
        routes = fetch_routes(self._exchange, own_tokens)
        return list(zip(routes, self._count_tokens(routes), strict=True))

    def _count_tokens(self, routes: Sequence[torch.Tensor]) -> Sequence[Sequence[ExpertCounts | None]]:
        shard = self._shard
        if not takes_known_counts(shard.config):
            return [[None] * len(self._layers)] * len(routes)
        group: Any = parallel_state.get_expert_tensor_and_model_parallel_group()
        return count_by_expert(routes, shard.shape.num_experts, shard.parallel.ep, group)

    def apply(self, chunk: torch.nn.Module, values: tuple[torch.Tensor, Sequence[ExpertCounts | None]] | None) -> None:
        if values is None:
            stop_replay(chunk)
            return
        experts, counts = values
        replay_routes(chunk, experts.to(self._shard.device).long(), self._layers, counts)


def make_route_feed(stored: StoredExperts, shard: ModelShard) -> RouteFeed:
    """A collective over the world."""
    return RouteFeed(ExpertExchange(stored, expert_layers(shard.chunks), shard.shape.top_k), shard)


def fetch_routes(exchange: ExpertExchange, rows: Sequence[RankTokens]) -> list[torch.Tensor]:
    """Fetch the experts of each row's tokens, int16 [own tokens, own layers, top_k]. A collective over the world.

    Padding, and sequences with `NO_EXPERTS`, are routed to the first top_k experts. Raises DataError if a token's route
    names an expert twice.
    """
    experts_of_tokens = exchange.fetch(np.concatenate([row.runs for row in rows]))
    _refuse_repeated_experts(experts_of_tokens, exchange.layers)
    ends = np.cumsum([row.is_token.sum() for row in rows])
    routes = []
    for row, experts in zip(rows, np.split(experts_of_tokens, ends[:-1]), strict=True):
        row_experts = np.empty((len(row.is_token), *experts.shape[1:]), np.int16)
        # Megatron's router replay needs experts for every position of a row, padding included.
        row_experts[:] = np.arange(experts.shape[-1])
        row_experts[row.is_token] = experts
        routes.append(torch.from_numpy(row_experts))
    return routes


def _refuse_repeated_experts(routes: NDArray[np.int16], layers: Sequence[int]) -> None:
    """Raise DataError if the route of a token, in `routes` [tokens, layers, top_k], names an expert twice.

    Megatron would send the token once, and `count_by_expert` would count two, so buffers would have wrong sizes.
    `layers`: numbers of the layers, from 0.
    """
    # Compared pair by pair: for 8 experts per token, this takes 0.4 of the time of sorting.
    choices = np.ascontiguousarray(np.moveaxis(routes, -1, 0))
    for first_choice, second_choice in combinations(choices, 2):
        if (is_equal := first_choice == second_choice).any():
            token, layer = np.argwhere(is_equal)[0]
            raise DataError(
                f"router replay: the engine's route of a token names expert {first_choice[token, layer]} twice, in "
                f"layer {layers[layer]} of the model (from 0); set trainer.router_replay=false"
            )


def count_by_expert(
    routes: Sequence[torch.Tensor], num_experts: int, ep: int, group: dist.ProcessGroup
) -> list[list[ExpertCounts]]:
    """Count the tokens of each expert. The result is indexed by row, then by this rank's layer.

    `routes` has one int16 tensor [own tokens, own layers, top_k] per row. A collective of `group`, the ep * etp ranks
    sharing the experts, from host to host.
    """
    num_rows, num_layers = len(routes), routes[0].shape[1]
    sent_counts = torch.empty(num_rows, num_layers, num_experts, dtype=torch.int64)
    first_expert_of_layer = torch.arange(num_layers)[:, None] * num_experts
    for row, counts in zip(routes, sent_counts, strict=True):
        flat_experts = (row + first_expert_of_layer).ravel()
        counts.copy_(torch.bincount(flat_experts, minlength=num_layers * num_experts).view_as(counts))
    # Megatron orders these ranks by ep, then etp. Ranks that split experts own the same experts. So the counts have the
    # axes [rows, layers, ep, etp, experts of a rank].
    group_size = group.size()
    counts_by_owner = sent_counts.view(num_rows, num_layers, ep, 1, num_experts // ep).expand(
        -1, -1, -1, group_size // ep, -1
    )
    counts_for_ranks = counts_by_owner.permute(2, 3, 0, 1, 4).contiguous()
    received_counts = torch.empty_like(counts_for_ranks)
    # gloo sends these host tensors. NCCL would connect every pair of these ranks, at up to 0.4 GiB of GPU memory each.
    # A pipeline stage may have no layer with experts.
    if num_layers:
        dist.all_to_all_single(received_counts, counts_for_ranks, group=group)
    counts_by_row = received_counts.view(group_size, num_rows, num_layers, num_experts // ep)
    counts_by_row = counts_by_row.permute(1, 2, 0, 3).contiguous()
    return [
        [ExpertCounts(*layer) for layer in zip(*row, strict=True)]
        for row in zip(sent_counts, counts_by_row, strict=True)
    ]
