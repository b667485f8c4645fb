"""Experts that an engine chose: every rank gets those of its own tokens and layers, and no other's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megarl.config.parallel import ParallelConfig
from megarl.data.packing import pack
from megarl.data.prefixes import digests
from megarl.data.token_batch import TokenBatch
from megarl.training.routed_experts import ExpertExchange, RankTokens, StoredExperts, fetch_routes
from megarl.types import NO_EXPERTS, DataError, ExpertsHandle, TrainingSequence
from tests.rank_pool import RankPool

LENGTHS = [5, 9, 14, 2, 11, 7, 8, 1, 16, 4, 13, 6]
NUM_LAYERS, TOP_K = 4, 3
HOLDERS = [2, 0, 3, 3, 1, 0, 2, 1, 0, 0, 3, 2]
"""The rank that sampled each sequence, modulo the ranks that there are."""
UNROUTED = 4
"""A sequence of an attempt that failed before its first model call. It is routed like padding."""


def experts_of(sequence: int, num_tokens: int) -> np.ndarray:
    """Numbers [tokens, layers, top_k] that name sequence, token, layer and place."""
    token, layer, place = np.ogrid[:num_tokens, :NUM_LAYERS, :TOP_K]
    return (sequence * 2003 + token * 101 + layer * 7 + place) % 30011


def replayed(sequence: int, length: int) -> np.ndarray:
    """Return the experts of each token of a sequence. The last token never went through the engine's model."""
    went_through = experts_of(sequence, max(1, length - 1))
    return went_through[np.minimum(np.arange(length), len(went_through) - 1)]


def fetch_values(parallel: ParallelConfig, layers: list[list[int]], sequence_parallel: bool) -> list[tuple[Any, Any]]:
    """This rank's experts of its rows, as fetched and as they should be."""
    from megarl.training.rows.packed_rows import pack_row

    rank, at = dist.get_rank(), parallel.coordinates(dist.get_rank())
    held = StoredExperts(rank, parallel.world_size)
    mine = {
        s: held.store(experts_of(s, max(1, length - 1)))
        for s, length in enumerate(LENGTHS)
        if HOLDERS[s] % parallel.world_size == rank
    }
    gathered: list[Any] = [None] * parallel.world_size
    dist.all_gather_object(gathered, mine)
    handles = {s: handle for part in gathered for s, handle in part.items()}
    batch = TokenBatch.from_sequences([TrainingSequence(np.arange(n), np.ones(n, bool)) for n in LENGTHS])
    experts = np.array([handles[s] for s in range(len(LENGTHS))])
    experts[UNROUTED] = NO_EXPERTS
    batch = replace(batch, experts=experts)
    parts = parallel.tp if sequence_parallel else 1
    packed = pack(
        LENGTHS,
        max_tokens=32,
        num_ranks=parallel.dp,
        multiple=parallel.sequence_multiple,
        rows_multiple=parallel.rows_multiple,
    )[at.dp]
    own, expected = [], []
    for row in packed:
        made = pack_row(
            batch.select(row), multiple=parts, qkv_format="packed", device=torch.device("cpu"),
            cp=parallel.cp, cp_rank=at.cp,
        )  # fmt: skip
        assert made.row.local is not None
        places = np.split(made.row.local.numpy(), parts)[at.tp % parts]
        own.append(RankTokens(batch.select(row), made.padded_lengths, places))
        whole = np.tile(np.arange(TOP_K), (made.padded_lengths.sum(), NUM_LAYERS, 1))
        for start, s in zip(made.padded_lengths.cumsum() - made.padded_lengths, row, strict=True):
            if s != UNROUTED:
                whole[start : start + LENGTHS[s]] = replayed(s, LENGTHS[s])
        expected.append(whole[places][:, layers[at.pp]])
    exchange = ExpertExchange(held, layers[at.pp], TOP_K)
    routes = fetch_routes(exchange, own)
    # Once more: nothing is used up.
    again = fetch_routes(exchange, own)
    assert all(torch.equal(one, other) for one, other in zip(routes, again, strict=True))
    return [(found.numpy(), wanted) for found, wanted in zip(routes, expected, strict=True)]


ALL = [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("parallel", "layers", "sequence_parallel"),
    [
        pytest.param(ParallelConfig(1, 1, 1, 1), ALL, False, id="one rank"),
        pytest.param(ParallelConfig(1, 1, 2, 1), ALL, False, id="dp2"),
        pytest.param(ParallelConfig(1, 1, 2, 1, ep=2), ALL, False, id="dp2 ep2"),
        pytest.param(ParallelConfig(2, 1, 2, 1, ep=2), ALL, True, id="tp2 dp2 ep2"),
        pytest.param(ParallelConfig(2, 1, 1, 1), ALL, False, id="tp2 without sequence parallelism"),
        pytest.param(ParallelConfig(1, 2, 2, 1), [[0, 1], [2, 3]], False, id="pp2 dp2"),
        pytest.param(ParallelConfig(1, 2, 2, 1), [[], [0, 1, 2, 3]], False, id="pp2 dp2, dense first stage"),
        pytest.param(ParallelConfig(1, 2, 2, 1, vpp=2), [[0, 2], [1, 3]], False, id="pp2 vpp2 dp2"),
        pytest.param(ParallelConfig(1, 1, 2, 1, cp=2), ALL, False, id="cp2 dp2"),
        pytest.param(ParallelConfig(2, 1, 1, 1, cp=2), ALL, True, id="tp2 cp2"),
        pytest.param(ParallelConfig(2, 2, 1, 1, rank_permutation=(2, 2)), [[0, 1], [2, 3]], True, id="tp2 pp2"),
    ],
)
def test_ranks_get_the_experts_of_their_tokens_and_layers(
    ranks: RankPool, parallel: ParallelConfig, layers: list[list[int]], sequence_parallel: bool
) -> None:
    results = ranks.run(fetch_values, parallel, layers, sequence_parallel, world_size=parallel.world_size)
    for rows in results:
        assert rows
        for found, expected in rows:
            assert found.dtype == np.int16 and np.array_equal(found, expected)


def test_held_experts_survive_a_checkpoint_in_a_world_of_another_size(tmp_path: Path) -> None:
    first = [StoredExperts(rank, 4) for rank in range(4)]
    handles = [first[holder].store(experts_of(s, 3)) for s, holder in enumerate(HOLDERS)]
    assert len(set(handles)) == len(handles)
    waiting = handles[::2]
    for held in first:
        held.save(tmp_path)
    for world_size, folder, previous in ((2, tmp_path / "two", tmp_path), (4, tmp_path / "four", tmp_path / "two")):
        # From four ranks to two, and back.
        folder.mkdir()
        ranks = [StoredExperts(rank, world_size) for rank in range(world_size)]
        for held in ranks:
            held.load(previous, waiting)
            held.save(folder)
        for s, handle in list(enumerate(handles))[::2]:
            found = ranks[handle.rank % world_size].read_span(handle.number, 0, 4)
            assert np.array_equal(found, replayed(s, 4))
        with pytest.raises(KeyError):
            ranks[handles[1].rank % world_size].read_span(handles[1].number, 0, 1)
        # What is sampled now is never taken for what waits.
        assert not {held.store(experts_of(0, 1)) for held in ranks} & set(waiting)
    with pytest.raises(DataError, match="lacks the routed experts of 1 trajectories"):
        ranks[0].load(tmp_path, [ExpertsHandle(0, 999 << 20)])


def test_experts_of_what_was_trained_are_forgotten() -> None:
    held = StoredExperts(1, 2)
    first, second = held.store(experts_of(0, 10)), held.store(experts_of(1, 5))
    assert held.retain([second, ExpertsHandle(0, 0)]) == 15 * NUM_LAYERS * TOP_K * 2
    assert held.read_span(second.number, 0, 1).shape == (1, NUM_LAYERS, TOP_K)
    with pytest.raises(KeyError):
        held.read_span(first.number, 0, 1)
    assert held.retain([]) == 5 * NUM_LAYERS * TOP_K * 2 and held.retain([]) == 0


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_expert_that_a_route_names_twice_is_refused(ranks: RankPool, world_size: int) -> None:
    for text in ranks.run(fetch_repeated, world_size=world_size):
        assert text.startswith("router replay: the engine's route of a token names expert 7 twice, in layer 2 of")
        assert "set trainer.router_replay=false" in text


def fetch_repeated() -> str:
    """Fetch the route of one sequence; its fourth token has expert 7 twice in the third layer. Returns the error."""
    from megarl.training.rows.packed_rows import pack_row

    held = StoredExperts(dist.get_rank(), dist.get_world_size())
    experts = experts_of(0, 8)
    experts[3, 2] = 7, 3, 7
    batch = TokenBatch.from_sequences([TrainingSequence(np.arange(9), np.ones(9, bool))])
    batch.experts = np.array([held.store(experts)])
    row = pack_row(batch, multiple=1, qkv_format="packed", device=torch.device("cpu"), cp=1, cp_rank=0)
    own = [RankTokens(batch, row.padded_lengths, np.arange(9))]
    # The first two layers have sound routes.
    assert len(fetch_routes(ExpertExchange(held, [0, 1], TOP_K), own)) == 1
    try:
        fetch_routes(ExpertExchange(held, [1, 2], TOP_K), own)
    except DataError as error:
        return str(error)
    return "no error"


def fetch_for_trees(parallel: ParallelConfig) -> bool:
    """Whether this rank's stored tokens get the experts of every token that they stand for."""
    from megarl.training.rows.choice import make_microbatch

    rank, at = dist.get_rank(), parallel.coordinates(dist.get_rank())
    held = StoredExperts(rank, parallel.world_size)
    # Three answers to one prompt of 9 tokens. For the last one the engine chose other experts from token 6 on.
    tokens = [np.append(np.arange(9), [20 + answer, 30, 31]) for answer in range(3)]
    chosen = [experts_of(0, 12), experts_of(0, 12), np.concatenate([experts_of(0, 6), experts_of(1, 12)[6:]])]
    handles = [held.store(experts[:11]) for experts in chosen]
    batch = TokenBatch.from_sequences([TrainingSequence(ids, np.ones(12, bool)) for ids in tokens])
    batch.experts = np.array(handles)
    batch.expert_digests = np.concatenate([np.append(digests(experts[:11]), np.uint32(0)) for experts in chosen])
    batch.shares_prefixes = True
    row = make_microbatch(
        batch, multiple=parallel.tp, qkv_format="packed", device=torch.device("cpu"), cp=parallel.cp, cp_rank=at.cp
    )
    tree = row.row.tree
    assert tree is not None and len(tree.positions) - parallel.world_size < 9 + 3 + 3 + 6 <= len(tree.positions)
    places = np.split(row.represented_tokens(), parallel.tp)[at.tp]
    [found] = fetch_routes(
        ExpertExchange(held, range(NUM_LAYERS), TOP_K), [RankTokens(batch, row.padded_lengths, places)]
    )
    wanted = np.concatenate([experts[np.minimum(np.arange(12), 10)] for experts in chosen])
    first = at.tp * len(places)
    assert row.row.local is not None
    for token, stored in zip(row.row.local.tolist(), tree.stored_of.tolist(), strict=True):
        if 0 <= stored - first < len(places):
            assert np.array_equal(found[stored - first], wanted[token])
    return True


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param(ParallelConfig(1, 1, 1, 1), id="one rank"),
        pytest.param(ParallelConfig(2, 1, 1, 1, cp=2), id="tp2 cp2"),
    ],
)
def test_stored_tokens_get_the_experts_of_all_their_sequences(ranks: RankPool, parallel: ParallelConfig) -> None:
    assert all(ranks.run(fetch_for_trees, parallel, world_size=parallel.world_size))
