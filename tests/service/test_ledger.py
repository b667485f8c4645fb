"""The ledger under shuffled, repeated and lost requests: each runs once, in order, and nobody waits for ever."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megarl.service.queueing.ledger import PATIENCE_SECONDS, READ_SECONDS, Ledger, Reply, json_reply
from megarl.service.refusals import BusyError, NotFoundError, UserError


def note(runs: list[int], number: int) -> Any:
    async def work() -> Reply:
        await asyncio.sleep(0)
        runs.append(number)
        return json_reply(number=number)

    return work


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    order=st.integers(1, 9).flatmap(lambda count: st.permutations(range(1, count + 1))),
    repeats=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), max_size=12),
    lost=st.sets(st.integers(0, 30), max_size=8),
    refused=st.sets(st.integers(1, 9), max_size=4),
    saves=st.sets(st.integers(1, 9), max_size=3),
)
async def test_every_request_runs_once_in_order(
    order: list[int], repeats: list[tuple[int, int]], lost: set[int], refused: set[int], saves: set[int]
) -> None:
    """Requests arrive in any order, some twice. A lost reply is followed by the same request again.

    Refused requests take their numbers: the later ones run at once, and their repetitions get the same refusal. The
    next step learns of those that belong to training.
    """
    arrivals = list(order)
    for place, number in repeats:
        if number in order:
            arrivals.insert(place, number)
    ledger = Ledger(report=lambda text: pytest.fail(text))
    runs: list[int] = []
    skips: list[str] = []
    ledger.open_model("m", "owner", skips.append)
    promises: dict[int, str] = {}
    for place, number in enumerate(arrivals):
        for _ in range(2 if place in lost else 1):
            if number in refused:
                promise = ledger.fail_in_turn(
                    "m", number, UserError(f"refused {number}"), is_training=number not in saves
                )
            else:
                promise = ledger.submit("m", number, b"%d" % number, note(runs, number))
            assert promises.setdefault(number, promise.request_id) == promise.request_id
        await asyncio.sleep(0)
    for number, request_id in promises.items():
        for _ in range(2):
            reply = await ledger.wait_for(ledger.find(request_id, "owner"), 5.0)
            if number in refused:
                assert reply == json_reply(error=f"refused {number}", category="user")
            else:
                assert reply == json_reply(number=number)
    assert runs == sorted(set(order) - refused)
    assert skips == [
        f"request {number} was refused: refused {number}" for number in sorted(refused & set(order) - saves)
    ]
    await ledger.close()


async def test_only_the_missing_number_is_waited_for() -> None:
    """A custom loss reserves numbers that it sends only after it has the first results."""
    ledger, runs = Ledger(report=print), []
    ledger.open_model("m", "owner", print)
    second = ledger.submit("m", 2, b"", note(runs, 2))
    assert await ledger.wait_for(second, 0.01) is None and runs == []
    first = ledger.submit("m", 1, b"", note(runs, 1))
    assert await ledger.wait_for(first, 5.0) and await ledger.wait_for(second, 5.0)
    assert runs == [1, 2]
    await ledger.close()


@pytest.mark.parametrize("number", [1, 0, -3, 10**9])
async def test_a_number_that_cannot_be_used_fails_its_promise_only(number: int) -> None:
    ledger, runs = Ledger(report=print), []
    ledger.open_model("m", "owner", print)
    first = ledger.submit("m", 1, b"body", note(runs, 1))
    wrong = ledger.submit("m", number, b"another body", note(runs, 99))
    reply = await ledger.wait_for(wrong, 5.0)
    assert wrong.is_failed and reply is not None and b'"category": "user"' in reply.body
    after = ledger.submit("m", 2, b"", note(runs, 2))
    assert await ledger.wait_for(first, 5.0) and await ledger.wait_for(after, 5.0)
    assert runs == [1, 2]
    await ledger.close()


async def test_a_refusal_and_a_good_copy_of_one_request_get_the_first_promise() -> None:
    """A copy of a request may be cut, or arrive too slowly, before or after another copy that is complete."""
    ledger, runs = Ledger(report=print), []
    ledger.open_model("m", "owner", print)
    good = ledger.submit("m", 1, b"body", note(runs, 1))
    assert ledger.fail_in_turn("m", 1, UserError("came late"), is_training=True) is good
    refused = ledger.fail_in_turn("m", 2, UserError("came late"), is_training=True)
    assert ledger.submit("m", 2, b"body", note(runs, 2)) is refused
    assert await ledger.wait_for(good, 5.0) == json_reply(number=1)
    assert await ledger.wait_for(refused, 5.0) == json_reply(error="came late", category="user")
    assert runs == [1]
    assert ledger.fail_in_turn("m", -1, UserError("came late"), is_training=True).is_failed
    await ledger.close()


async def test_a_request_of_a_busy_service_is_repeated_and_then_uses_its_number() -> None:
    """SDK 0.38 repeats a request with status 429 for five minutes. Then it goes on with the next number."""
    now = [0.0]
    ledger, runs = Ledger(report=print, clock=lambda: now[0]), []
    ledger.open_model("m", "owner", print)
    numbers = (3, 1, 2)
    for now[0] in (0.0, PATIENCE_SECONDS):
        for number in numbers:
            with pytest.raises(BusyError):
                ledger.fail_in_turn("m", number, BusyError("busy"), is_training=True)
    # One of them has room at last, and waits for the others.
    ran = ledger.submit("m", 3, b"", note(runs, 3))
    now[0] = PATIENCE_SECONDS + 1
    refused = [ledger.fail_in_turn("m", number, BusyError("busy"), is_training=True) for number in numbers]
    assert refused[0] is ran, "the promise of an earlier copy stays"
    for promise in refused[1:]:
        assert await ledger.wait_for(promise, 5.0) == json_reply(error="busy", category="user")
    assert await ledger.wait_for(ran, 5.0) == json_reply(number=3) and runs == [3]
    # The next number has its own patience.
    with pytest.raises(BusyError):
        ledger.fail_in_turn("m", 4, BusyError("busy"), is_training=True)
    await ledger.close()


async def test_errors_are_sorted_by_who_can_mend_them() -> None:
    reports: list[str] = []
    ledger = Ledger(report=reports.append)

    async def refuse() -> Reply:
        raise UserError("rank = 7")

    async def crash() -> Reply:
        raise RuntimeError("secret of another client")

    refused = ledger.submit_unordered("a", "owner", b"", refuse)
    crashed = ledger.submit_unordered("b", "owner", b"", crash)
    texts = [reply.body.decode() for p in (refused, crashed) if (reply := await ledger.wait_for(p, 5.0))]
    assert '"category": "user"' in texts[0] and "rank = 7" in texts[0]
    assert '"category": "server"' in texts[1] and "secret" not in texts[1]
    assert len(reports) == 1 and "secret" in reports[0]
    await ledger.close()


async def test_the_end_of_a_session_is_the_reason_for_its_running_request() -> None:
    ledger = Ledger(report=print)
    ledger.open_model("m", "owner", print)
    promise = ledger.submit("m", 1, b"", asyncio.Event().wait)  # type: ignore[arg-type]
    await asyncio.sleep(0.01)
    ledger.close_model("m")
    await asyncio.sleep(0.01)
    reply = await ledger.wait_for(promise, 5.0)
    assert reply is not None and '"category": "user"' in reply.body.decode() and "session" in reply.body.decode()
    await ledger.close()


async def test_results_stay_until_long_after_they_were_read() -> None:
    now = [0.0]
    ledger, runs = Ledger(report=print, clock=lambda: now[0]), []
    ledger.open_model("m", "owner", print)
    read = ledger.submit("m", 1, b"", note(runs, 1))
    unread = ledger.submit("m", 2, b"", note(runs, 2))
    await ledger.wait_for(read, 5.0)
    await asyncio.sleep(0.01)
    now[0] = READ_SECONDS - 1
    ledger.expire_results()
    assert ledger.find(read.request_id, "owner") is read
    now[0] = READ_SECONDS + 1
    ledger.expire_results()
    with pytest.raises(NotFoundError):
        ledger.find(read.request_id, "owner")
    assert ledger.find(unread.request_id, "owner") is unread
    # A very late repetition runs nothing.
    assert ledger.submit("m", 1, b"", note(runs, 1)).is_failed and runs == [1, 2]
    with pytest.raises(NotFoundError):
        ledger.find(unread.request_id, "stranger")
    await ledger.close()
