"""Feeds give forward passes data beyond a row's tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state

from megarl.data.token_batch import TokenBatch
from megarl.models.experts.balance import RowTokens, routers_of
from megarl.models.policy import PolicyModel, RowSettings
from megarl.training.rows.microbatch import Microbatch


class RowFeed:
    """Gives one kind of data to a model's forward passes: fetched before Megatron's schedule, set before each pass."""

    def fetch(self, rows: Sequence[TokenBatch], batches: Sequence[Microbatch]) -> Sequence[Any]:
        """Return this rank's data of each row; `batches` are the rows as tensors. May be a collective.

        It runs before the schedule, because pipeline stages enter forward passes at different times.
        """
        raise NotImplementedError

    def apply(self, chunk: torch.nn.Module, values: Any) -> None:
        """Set one row's data, a value from `fetch`, for the chunk's next forward pass."""
        raise NotImplementedError

    def release(self) -> None:
        """Free device memory that only these passes needed."""


class SamplingFeed(RowFeed):
    """Gives each pass the temperature at which the engine sampled, and the sets of tokens from which it sampled."""

    def fetch(self, rows: Sequence[TokenBatch], batches: Sequence[Microbatch]) -> Sequence[RowSettings]:
        return [RowSettings(batch.temperature, batch.support) for batch in batches]

    def apply(self, chunk: torch.nn.Module, values: RowSettings) -> None:
        assert isinstance(chunk, PolicyModel)
        chunk.row_settings = values


class RouterTokensFeed(RowFeed):
    """Feed that gives routers the sequence of each token, for balancing losses and noise.

    `num_parts`: tensor-parallel ranks that share a row's tokens.
    """

    def __init__(self, num_parts: int) -> None:
        self._num_parts = num_parts

    def fetch(self, rows: Sequence[TokenBatch], batches: Sequence[Microbatch]) -> Sequence[RowTokens]:
        part = parallel_state.get_tensor_model_parallel_rank() % self._num_parts
        return [batch.make_row_tokens(self._num_parts, part) for batch in batches]

    def apply(self, chunk: torch.nn.Module, values: RowTokens) -> None:
        for router in routers_of(chunk):
            router.next_row = values


def build_feeds(chunks: Sequence[torch.nn.Module], num_parts: int) -> Iterator[RowFeed]:
    """Yield the feeds that these chunks need. `num_parts`: tensor-parallel ranks that share a row's tokens."""
    if routers_of(*chunks):
        yield RouterTokensFeed(num_parts)
    if isinstance(chunks[0], PolicyModel):
        yield SamplingFeed()
