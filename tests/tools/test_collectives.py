"""The comparison and the execution of ranks' calls, on programs written by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tools.collectives.agreement import mismatches
from tools.collectives.links import link_bytes
from tools.collectives.programs import MESSAGES, Call, Group, Job, Program, RankProgram
from tools.collectives.symmetry import reduce_job
from tools.collectives.waits import _Execution, deadlocks

PAIRS = [Group("FIRST", (0, 1)), Group("SECOND", (0, 1)), Group("ALL", (0, 1, 2))]


def reduce(group: int = 0, size: int = 8, setting: str = "SUM", dtype: str = "float32") -> Call:
    return Call("all_reduce", group, False, dtype, size, setting, place=f"code.py:{group}")


def send(peer: int, size: int = 4, group: int = 0, own: int = 0, dtype: str = "float32") -> Call:
    return Call(MESSAGES, group, False, dtype, sends=((peer, size),), lane=(min(own, peer), max(own, peer)))


def receive(peer: int, size: int = 4, group: int = 0, own: int = 1, dtype: str = "float32") -> Call:
    return Call(MESSAGES, group, False, dtype, receives=((peer, size),), lane=(min(own, peer), max(own, peer)))


def batch(sends: Sequence[tuple[int, int]], receives: Sequence[tuple[int, int]], group: int = 0) -> Call:
    return Call(MESSAGES, group, False, "float32", sends=tuple(sends), receives=tuple(receives))


def job(*calls: Sequence[Call], groups: Sequence[Group] = PAIRS) -> Job:
    return Job.of_programs(groups, [Program.blocking(list(own)) for own in calls])


def test_equal_calls_match_and_end() -> None:
    found = job([reduce(), reduce(1), reduce(2)], [reduce(), reduce(1), reduce(2)], [reduce(2)])
    assert [*mismatches(found), *deadlocks(found)] == []


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (reduce(size=9), "rank 1 has all_reduce SUM float32 of 9 elements at code.py:0"),
        (reduce(dtype="bfloat16"), "all_reduce SUM bfloat16"),
        (reduce(setting="MAX"), "all_reduce MAX float32"),
        (Call("all_gather", 0, False, "float32", 8), "all_gather float32 of 8"),
    ],
    ids=["size", "dtype", "reduction", "operation"],
)
def test_a_call_that_differs_is_named(call: Call, named: str) -> None:
    [text] = mismatches(job([reduce(), reduce()], [reduce(), call], []))
    assert "collective 1 differs" in text and named in text and "FIRST [0, 1]" in text


def test_the_rank_that_skips_a_collective_is_named() -> None:
    groups = [Group("ALL", (0, 1, 2))]
    calls = [reduce(size=size) for size in (1, 2, 3)]
    skipping = job(calls, [calls[0], calls[2]], calls, groups=groups)
    [text] = mismatches(skipping)
    assert "collective 1 differs: rank 1 has all_reduce SUM float32 of 3 elements" in text
    assert "the others have all_reduce SUM float32 of 2 elements" in text
    # Rank 1 ends a call early. The others wait for it in their last call.
    [waits] = deadlocks(skipping)
    assert "rank 0 waits in call 2" in waits and "rank 1 has ended after 2 calls" in waits


def test_two_groups_in_another_order_are_named() -> None:
    swapped = job([reduce(0), reduce(1)], [reduce(1), reduce(0)], [])
    # Each group for itself has the same calls.
    assert list(mismatches(swapped)) == []
    [text] = deadlocks(swapped)
    assert "wait for each other" in text
    reduction = "waits in call 0, all_reduce SUM float32 of 8 elements at code.py"
    assert f"rank 0 {reduction}:0, on FIRST [0, 1] for rank 1" in text
    assert f"rank 1 {reduction}:1, on SECOND [0, 1] for rank 0" in text


def test_a_cycle_over_three_ranks_is_followed() -> None:
    groups = [Group("A", (0, 1)), Group("B", (1, 2)), Group("C", (0, 2))]
    [text] = deadlocks(job([reduce(0), reduce(2)], [reduce(1), reduce(0)], [reduce(2), reduce(1)], groups=groups))
    assert [f"rank {rank} waits" in text for rank in range(3)] == [True] * 3


def test_calls_started_ahead_do_not_block() -> None:
    """Both ranks start the other's group first, and wait afterwards."""
    first, second = reduce(0), reduce(1)
    programs = [Program([first, second], [0, 1, ~0, ~1]), Program([second, first], [0, 1, ~0, ~1])]
    assert deadlocks(Job.of_programs(PAIRS[:2], programs)) == []


def test_calls_of_one_communicator_run_in_their_order() -> None:
    """A collective of a pair waits behind the message before it on the same communicator."""
    batched = batch([(1, 4)], [])
    programs = [
        Program([batched, reduce(0)], [0, 1, ~1]),
        Program([reduce(0), batch([], [(0, 4)])], [0, ~0, 1, ~1]),
    ]
    [text] = deadlocks(Job.of_programs(PAIRS[:1], programs))
    assert "rank 0 waits in call 1" in text and "queued after call 0" in text


def test_sends_in_both_directions_need_a_batch() -> None:
    exchanged = job([batch([(1, 4)], [(1, 6)])], [batch([(0, 6)], [(0, 4)])], [])
    assert [*mismatches(exchanged), *deadlocks(exchanged)] == []
    alone = job([send(1), receive(1, own=0)], [send(0, own=1), receive(0)], [])
    assert list(mismatches(alone)) == []
    assert "wait for each other" in deadlocks(alone)[0]


@pytest.mark.parametrize(
    ("there", "named"),
    [
        ([receive(0, 5)], "message 0 from rank 0 to rank 1: sent 4 float32, received 5 float32"),
        ([receive(0, dtype="bfloat16")], "received 4 bfloat16"),
        ([], "received nothing"),
    ],
    ids=["size", "dtype", "missing"],
)
def test_a_message_that_does_not_fit_is_named(there: list[Call], named: str) -> None:
    [text] = mismatches(job([send(1)], there, []))
    assert named in text


def test_an_exchange_with_unequal_parts_is_named() -> None:
    def exchange(sends: tuple[tuple[int, int], ...], receives: tuple[tuple[int, int], ...]) -> Call:
        return Call("all_to_all", 0, False, "float32", sends=sends, receives=receives)

    [text] = mismatches(job([exchange(((1, 5),), ((1, 7),))], [exchange(((0, 6),), ((0, 5),))], []))
    assert "rank 1 sends 6 elements to rank 0, which receives 7" in text


def test_ranks_share_a_program_with_groups_of_their_own() -> None:
    groups = [Group("TP", (0, 1)), Group("TP", (2, 3)), Group("DP", (0, 2)), Group("DP", (1, 3))]
    programs = [Program.blocking([reduce(0), reduce(2)]), Program.blocking([reduce(0), reduce(3)])]
    ranks = [RankProgram(0), RankProgram(1), RankProgram(0, {0: 1}), RankProgram(1, {0: 1})]
    whole = Job(groups, programs, ranks)
    assert whole.num_calls == 8
    assert [*mismatches(whole), *deadlocks(whole)] == []
    orders = [Program.blocking([reduce(0), reduce(2)]), Program.blocking([reduce(2), reduce(0)])]
    ranks = [RankProgram(0), RankProgram(1, {2: 3}), RankProgram(1, {0: 1}), RankProgram(0, {0: 1, 2: 3})]
    [text] = deadlocks(Job(groups, orders, ranks))
    assert "these wait for each other" in text and [f"rank {rank} waits" in text for rank in range(4)] == [True] * 4


def replicated(size: int, calls: Sequence[str]) -> Job:
    """A grid of two stages and `size` replicas. A rank makes calls on its replica, its stage, or all ranks."""
    groups = [Group("ALL", tuple(range(2 * size)))]
    groups += [Group("PIPELINE", (rank, size + rank)) for rank in range(size)]
    groups += [Group("STAGE", tuple(range(stage * size, stage * size + size))) for stage in range(2)]
    programs = []
    for stage in range(2):
        message = [send(1, group=1, own=0), receive(0, group=1, own=1)][stage]
        kinds = {"all": reduce(0), "stage": reduce(1 + size + stage), "sum": reduce(1), "message": message}
        kinds["message"] = message if stage == 0 else message._replace(group=1)
        programs.append(Program.blocking([kinds[call] for call in calls]))
    ranks = [
        RankProgram(rank // size, {1: 1 + rank % size, 1 + size + rank // size: 1 + size + rank // size})
        for rank in range(2 * size)
    ]
    return Job(groups, programs, ranks)


def test_one_rank_of_each_stage_stands_for_all_replicas() -> None:
    whole = replicated(16, ["message", "stage", "sum", "all", "message"])
    few = reduce_job(whole)
    assert len(whole.ranks) == 32 and len(few.ranks) == 2
    assert _Execution(whole).run() == _Execution(few).run() == []
    assert [group.ranks for group in few.groups] == [(0, 1), (0, 1), (0,), (1,)]


@pytest.mark.parametrize("seed", range(200))
def test_ranks_that_stand_for_others_end_if_all_end(seed: int) -> None:
    """Random programs of four stages, of which some ranks deviate. Reduced or not, the result is the same."""
    chosen = random.Random(seed)
    job = replicated(4, chosen.choices(["message", "stage", "sum", "all"], k=6))
    programs, ranks = list(job.programs), list(job.ranks)
    for rank in chosen.sample(range(8), chosen.choice([0, 1, 2, 8])):
        own = programs[ranks[rank].program]
        calls = list(own.calls)
        here, there = chosen.sample(range(6), 2)
        calls[here], calls[there] = calls[there], calls[here]
        programs.append(Program.blocking(calls))
        ranks[rank] = RankProgram(len(programs) - 1, ranks[rank].groups)
    changed = Job(job.groups, programs, ranks)
    assert bool(_Execution(changed).run()) == bool(_Execution(reduce_job(changed)).run()) == bool(deadlocks(changed))


def test_bytes_are_counted_by_link() -> None:
    groups = [Group("NODE", (0, 1)), Group("RAIL", (0, 2)), Group("ALL", (0, 1, 2, 3)), Group("ACROSS", (0, 3))]
    sent, received = batch([(1, 10)], [], 3), batch([], [(0, 10)], 3)
    found = job([reduce(0, 100), sent], [reduce(0, 100)], [], [received], groups=groups)
    # A ring of two passes 2 * 1/2 of the 400 bytes over each of its two links.
    assert link_bytes(found, 2) == {"node": 800.0, "rail": 0.0, "switch": 40.0}
    gathered = Call("all_gather", 2, False, "bfloat16", 50)
    # Four ranks on two nodes: two links within nodes, two rails; three parts of 100 bytes over each.
    assert link_bytes(job(*[[gathered]] * 4, groups=groups), 2) == {"node": 600.0, "rail": 600.0, "switch": 0.0}
