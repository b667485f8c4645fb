"""Calls to some of the ranks: side by side where they share none, in order where they do, one end for all."""

import asyncio
import os
import random
import signal

import pytest

from megarl.cluster.calls.deadlines import Deadlines
from megarl.cluster.calls.rank_errors import RankFailedError
from megarl.types import PeerLostError
from tests.child_processes import is_alive
from tests.cluster.started import started

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("worker_module", "nothing_left")]

PATIENCE_SECONDS = 60.0
"""A call that waits for one which never comes fails after so long."""


async def test_answers_come_in_the_order_of_the_ranks_asked():
    async with started(3, kwargs={"scale": 7}) as group:
        assert await group.ask([2, 0], "product", [5, 3]) == [(2, 105), (0, 21)]
        assert await group.ask([1], "product", [2]) == [(1, 28)]
        assert await group.call("product", 1) == [(0, 7), (1, 14), (2, 21)]


@pytest.mark.parametrize(
    "ranks, num_arguments",
    [
        pytest.param([], 0, id="none"),
        pytest.param([0, 0], 2, id="twice"),
        pytest.param([2], 1, id="too high"),
        pytest.param([-1], 1, id="negative"),
        pytest.param([0, 1], 1, id="too few arguments"),
    ],
)
async def test_ranks_that_cannot_be_asked_are_refused_before_anything_is_sent(ranks, num_arguments):
    async with started() as group:
        with pytest.raises(ValueError, match="call of product needs"):
            await group.ask(ranks, "product", [1] * num_arguments)
        assert await group.call("product", 1) == [(0, 1), (1, 2)]


async def test_calls_to_disjoint_ranks_run_at_the_same_time(tmp_path):
    """Each of two calls ends only after the other has begun."""
    here, there = str(tmp_path / "here"), str(tmp_path / "there")

    async with started(3) as group:
        group.deadlines = Deadlines.for_all_methods(PATIENCE_SECONDS)
        both = group.ask([0, 2], "meet", [(here, there)] * 2), group.ask([1], "meet", [(there, here)])
        assert await asyncio.gather(*both) == [[None, None], [None]]


async def test_a_call_of_the_whole_world_waits_for_those_before_it_and_those_after_wait_for_it(tmp_path):
    go = tmp_path / "go"

    async with started() as group:
        group.deadlines = Deadlines.for_all_methods(PATIENCE_SECONDS)
        first = asyncio.create_task(group.ask([0], "wait_for", [str(go)]))
        await asyncio.sleep(0)
        world = asyncio.create_task(group.call("hear", "world"))
        await asyncio.sleep(0)
        last = asyncio.create_task(group.ask([1], "hear", ["last"]))
        await asyncio.sleep(0.2)  # rank 1 is idle, and would have answered by now
        assert not first.done() and not world.done() and not last.done()
        go.touch()
        assert await last == [["world", "last"]]
        assert first.done() and world.result() == [["world"], ["world"]]


async def test_every_rank_hears_its_calls_in_the_order_in_which_they_were_made():
    rng = random.Random(0)

    async with started(3) as group:
        asked = [rng.sample(range(3), rng.choice((1, 1, 2, 3))) for _ in range(80)]
        calls = [group.ask(ranks, "hear", [number] * len(ranks)) for number, ranks in enumerate(asked)]
        await asyncio.gather(*calls)
        expected = [[number for number, ranks in enumerate(asked) if rank in ranks] for rank in range(3)]
        assert await group.call("hear", "end") == [[*numbers, "end"] for numbers in expected]


async def test_a_failure_ends_all_calls_that_are_under_way_with_its_cause():
    async with started(3) as group:
        other = asyncio.create_task(group.ask([0, 2], "sleep", [60, 60]))
        await asyncio.sleep(0.1)
        with pytest.raises(RankFailedError) as caught:
            await group.ask([1], "fail_on", [1], "raise")
        assert (caught.value.rank, str(caught.value)) == (
            1,
            "rank 1 of 3 raised ValueError during `fail_on`: seven is not even",
        )
        for later in (other, group.call("product", 1), group.ask([0], "product", [1])):
            with pytest.raises(RankFailedError) as again:
                await later
            assert again.value is caught.value


async def test_the_earliest_failure_of_all_calls_is_the_cause():
    async with started(3) as group:
        await group.call("join_gloo")
        # The ranks meet in one collective; that of the second call breaks it, that of the first only hears of it.
        calls = (
            group.ask([0, 2], "broken_collective", [1, 1], "late"),
            group.ask([1], "broken_collective", [1], "late"),
        )
        errors = await asyncio.gather(*calls, return_exceptions=True)
        assert errors[0] is errors[1]
        assert str(errors[0]) == "rank 1 of 3 raised ValueError during `broken_collective`: the cause"


async def test_a_call_that_is_cancelled_while_it_waits_harms_nothing(tmp_path):
    go = tmp_path / "go"

    async with started() as group:
        group.deadlines = Deadlines.for_all_methods(PATIENCE_SECONDS)
        first = asyncio.create_task(group.ask([0], "wait_for", [str(go)]))
        waiting = [asyncio.create_task(group.ask([1, 0], "hear", [word] * 2)) for word in ("a", "b", "c")]
        await asyncio.sleep(0.05)
        waiting[1].cancel()
        await asyncio.wait([waiting[1]])
        assert waiting[1].cancelled()
        go.touch()
        assert await first == [None]
        assert await waiting[2] == [["a", "c"], ["a", "c"]]
        assert await group.call("hear", "d") == [["a", "c", "d"]] * 2


async def test_a_call_that_is_cancelled_half_way_ends_the_group_and_the_other_calls():
    async with started() as group:
        pids = await group.call("pid")
        other = asyncio.create_task(group.ask([0], "sleep", [60]))
        abandoned = asyncio.create_task(group.ask([1], "sleep", [60]))
        await asyncio.sleep(0.1)
        abandoned.cancel()
        with pytest.raises(PeerLostError, match="call of `sleep` on the ranks was interrupted"):
            await other
        await asyncio.wait([abandoned])
        assert abandoned.cancelled()
        assert not any(map(is_alive, pids))
        with pytest.raises(PeerLostError, match="call of `sleep` on the ranks was interrupted"):
            await group.ask([0], "product", [1])


async def test_close_ends_all_calls_that_are_under_way_or_wait():
    async with started() as group:
        calls = [asyncio.create_task(group.ask([rank], "sleep", [60])) for rank in (0, 1, 1)]
        await asyncio.sleep(0.1)
        await group.close()
        for call in calls:
            with pytest.raises(PeerLostError, match="closed"):
                await call


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_a_signal_to_a_rank_is_reported_with_its_next_answer(number):
    async with started() as group:
        heard = []
        group.on_stop_signal = heard.append
        os.kill((await group.call("pid"))[1], number)
        await group.ask([0], "product", [1])
        assert heard == []
        while not heard:
            await group.ask([1], "product", [1])
        assert heard == [signal.Signals(number).name]
