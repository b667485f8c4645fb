"""One rank's training step on an imagined device: megarl's trainer, Megatron's schedule and optimizer, unchanged."""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.data.token_batch import TokenBatch
from megarl.families.shape import ModelShape, padded_vocab_size
from megarl.models.experts.replay import expert_layers
from megarl.reshard.layouts.megatron import check_shapes, megatron_layouts, parameter_shapes
from megarl.training.routed_experts import ExpertExchange, RouteFeed
from megarl.training.training_engine import TrainingEngine
from megarl.types import TrainingSequence
from tools.collectives.imagined_device import imagined_device
from tools.collectives.programs import Group, Program
from tools.collectives.recorded_group import Recorder, recorded_world

_MOST_TOKENS = 2048
"""Longest sequence of a row. Attention masks of longer ones take seconds on the host."""


@dataclass(frozen=True, slots=True)
class Trace:
    """The calls of one rank, all groups of its world, and the CPU seconds of the tracing."""

    rank: int
    program: Program
    groups: Sequence[Group]
    cpu_seconds: float


@dataclass(frozen=True, slots=True)
class Work:
    """The step to trace: recipe, layout, model, and number of rows of each data-parallel replica."""

    recipe: Recipe
    parallel: ParallelConfig
    shape: ModelShape
    num_rows: int

    def rows(self, rank: int) -> list[TokenBatch]:
        """Return the rows of a rank's replica. Rows differ in their numbers of tokens.

        All parts of all ranks have equally many tokens for each expert, if the router chooses places in turn.
        """
        parallel, router = self.parallel, self.shape.router
        turn = router.num_experts // math.gcd(router.num_experts, router.top_k) if router else 1
        unit = math.lcm(2 * parallel.cp, parallel.cp * parallel.tp) * turn
        max_tokens = self.recipe.trainer.max_tokens_per_microbatch
        return [self._row(unit, max_tokens, number, rank) for number in range(self.num_rows)]

    def _row(self, unit: int, max_tokens: int, number: int, rank: int) -> TokenBatch:
        longest = max(unit, min(_MOST_TOKENS, max_tokens) // unit * unit)
        lengths = [longest] * max(1, max_tokens // longest - 1)
        # The last sequence differs from row to row.
        lengths.append(unit * (1 + number % max(1, longest // unit)))
        batch = TokenBatch.from_sequences([self._sequence(length) for length in lengths])
        if self.recipe.trainer.router_replay:
            batch.experts = np.array([[rank, place] for place in range(len(lengths))], np.int64)
        return batch

    def _sequence(self, length: int) -> TrainingSequence:
        values = np.zeros(length, np.float32)
        recipe = self.recipe
        rl_values: dict[str, Any] = {}
        if recipe.loop == "rl":
            rl_values = {"advantages": values, "rollout_logprobs": values}
            if recipe.algorithm.old_logprobs == "trainer":
                rl_values["old_logprobs"] = values
            if recipe.has_reference:
                rl_values["reference_logprobs"] = values
        return TrainingSequence(
            np.arange(length) % self.shape.vocab_size,
            np.arange(length) > 0,
            token_weights=values,
            temperature=recipe.rollout.sampling.temperature if recipe.loop == "rl" else 1.0,
            **rl_values,
        )


class _BalancedExperts:
    """Routed experts as an engine would have stored them. The tokens of a sequence take all experts in turn."""

    def __init__(self, shape: ModelShape) -> None:
        assert shape.router is not None
        self._num_experts, self._top_k, self._num_layers = shape.num_experts, shape.top_k, shape.num_layers

    def read_span(self, number: int, first: int, end: int) -> NDArray[np.int16]:
        """Return the experts of a span of tokens: [end - first, layers, top_k]."""
        experts = np.arange(first * self._top_k, end * self._top_k) % self._num_experts
        shape = (end - first, self._num_layers, self._top_k)
        return np.broadcast_to(experts.astype(np.int16).reshape(-1, 1, self._top_k), shape)


class _KnownLayers(ExpertExchange):
    """Megarl's exchange of routed experts, without the first exchange of layer numbers: this rank asks itself only."""

    def __init__(self, stored: Any, layers: Sequence[int], top_k: int, world_size: int) -> None:
        self._stored, self.layers, self._top_k = stored, tuple(layers), top_k
        self._layers_by_rank = [list(layers)] * world_size


def trace(work: Work, rank: int) -> Trace:
    """Run log-probs and one update on one rank of the trainer, and return its calls. For a process of its own."""
    started = time.process_time()
    torch.set_num_threads(1)
    parallel, shape, recipe = work.parallel, work.shape, work.recipe
    recorder = Recorder(rank, parallel.world_size)

    def check_weights(tensors: Mapping[str, Tensor]) -> None:
        padded = padded_vocab_size(shape.vocab_size, parallel.tp)
        layouts = megatron_layouts(shape, parallel, padded_vocab_size=padded)
        check_shapes(parameter_shapes(layouts, parallel.coordinates(rank)), tensors)

    with recorded_world(recorder), imagined_device():
        # Without a GPU Megatron makes parameters in host memory.
        with torch.device("meta"):
            engine = TrainingEngine(recipe, parallel, shape, check_weights)
        if recipe.trainer.router_replay:
            stored = _BalancedExperts(shape)
            exchange = _KnownLayers(stored, expert_layers(engine.chunks), shape.top_k, parallel.world_size)
            engine.feeds.append(RouteFeed(exchange, engine))
        rows = work.rows(rank)
        if recipe.is_on_policy:
            engine.forward(rows)
        engine.update(rows)
    return Trace(rank, recorder.program(), recorder.groups, time.process_time() - started)


_inherited_work: list[Work] = []
"""Work of forked processes. They inherit it, so that nothing is pickled."""


def _trace_inherited(rank: int) -> Trace:
    return trace(_inherited_work[-1], rank)


def trace_ranks(work: Work, ranks: Sequence[int], num_processes: int) -> Iterator[Trace]:
    """Yield the traces of ranks as they end, from `num_processes` processes at a time.

    Megatron has one set of groups per process, so each rank has a process of its own.
    """
    # A thread pool of torch would not survive a fork.
    torch.set_num_threads(1)
    _inherited_work.append(work)
    try:
        with multiprocessing.get_context("fork").Pool(num_processes, maxtasksperchild=1) as pool:
            yield from pool.imap_unordered(_trace_inherited, ranks, chunksize=1)
    finally:
        _inherited_work.pop()
