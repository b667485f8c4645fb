"""Coordinates against Megatron's own rank generator, and deals against hand-written ranks."""

from __future__ import annotations

from itertools import product

import pytest

from megarl.config.parallel import RANK_ORDERS, ParallelConfig


@pytest.mark.parametrize("order", [*RANK_ORDERS, "tp-cp-dp-ep-pp"])
def test_coordinates_are_megatrons(order: str) -> None:
    from megatron.core.parallel_state import RankGenerator

    for tp, cp, dp, pp, etp, ep in product((1, 2), (1, 2), (1, 3), (1, 2), (1, 2), (1, 2, 3)):
        if tp * cp * dp % (etp * ep):
            continue
        parallel = ParallelConfig(tp=tp, pp=pp, dp=dp, rollout_tp=1, cp=cp, ep=ep, etp=etp, order=order)
        dense = RankGenerator(tp, 1, dp, pp, cp, order)
        expert = RankGenerator(etp, ep, parallel.world_size // (etp * ep * pp), pp, 1, order)
        axes = [(dense, axis, axis) for axis in ("tp", "cp", "dp", "pp")]
        axes += [(expert, "tp", "etp"), (expert, "ep", "ep"), (expert, "dp", "edp")]
        for generator, axis, field in axes:
            for group in generator.get_ranks(axis):
                assert [getattr(parallel.coordinates(rank), field) for rank in group] == list(range(len(group)))
        for rank in range(parallel.world_size):
            at = parallel.coordinates(rank)
            assert parallel.rank(at.tp, at.dp, at.pp, at.cp) == rank


@pytest.mark.parametrize(
    ("parallel", "tp_of_rank"),
    [
        pytest.param(
            ParallelConfig(4, 1, 1, 2, rank_permutation=(2, 2)), [0, 2, 1, 3], id="halves of an engine hold quarters"
        ),
        pytest.param(
            ParallelConfig(2, 1, 2, 4, rank_permutation=(2, 2)), [0, 0, 1, 1], id="quarters of an engine share halves"
        ),
        pytest.param(ParallelConfig(8, 1, 1, 2, rank_permutation=(4, 2)), [0, 4, 1, 5, 2, 6, 3, 7], id="eighths"),
    ],
)
def test_a_deal_spreads_neighbours(parallel: ParallelConfig, tp_of_rank: list[int]) -> None:
    assert [parallel.coordinates(rank).tp for rank in range(parallel.world_size)] == tp_of_rank
    assert [parallel.part(rank) for rank in parallel.rank_of_part] == list(range(parallel.world_size))
    for rank in range(parallel.world_size):
        at = parallel.coordinates(rank)
        assert parallel.rank(at.tp, at.dp, at.pp) == rank


@pytest.mark.parametrize(
    ("layers", "sizes", "chunks"),
    [
        (94, {"pp": 1}, (94,)),
        (94, {"pp": 2}, (47, 47)),
        (94, {"pp": 4}, (23, 24, 24, 23)),
        (95, {"pp": 4}, (24, 24, 24, 23)),
        (5, {"pp": 2, "vpp": 2}, (1, 2, 1, 1)),
        (7, {"pp": 2, "vpp": 2}, (2, 2, 2, 1)),
        (3, {"pp": 2}, (2, 1)),
    ],
)
def test_layers_are_spread_over_chunks(layers: int, sizes: dict[str, int], chunks: tuple[int, ...]) -> None:
    parallel = ParallelConfig(**({"tp": 1, "pp": 1, "dp": 1, "rollout_tp": 1} | sizes))
    assert parallel.layers_by_chunk(layers) == chunks
    on_stages = [len(parallel.layers_on_stage(layers, stage)) for stage in range(parallel.pp)]
    assert on_stages == [sum(chunks[stage :: parallel.pp]) for stage in range(parallel.pp)]
