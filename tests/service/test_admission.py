"""Admission by waiting tokens: the SDK waits and repeats what is refused, and everything runs in the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import ClientSession

from megarl.service.queueing.admission import BODY_BYTES, Admission, QueueLimits
from megarl.service.queueing.ledger import PATIENCE_SECONDS, Ledger, Reply, json_reply
from megarl.service.refusals import BusyError
from tests.service.fake_trainer import FakeTrainer
from tests.service.served import run_program, serving
from tests.service.test_access import Client, make_model


def test_accounts_have_limits_of_their_own_and_one_together() -> None:
    admission = Admission(QueueLimits(tokens=100, tokens_per_key=60))
    admission.check_tokens("large", 1000)
    admission.add("large", tokens=90, num_bytes=0)
    with pytest.raises(BusyError, match="90 tokens"):
        admission.check_tokens("large", 1)
    # Nothing of the second account waits, so others cannot keep it out.
    admission.check_tokens("second", 50)
    admission.add("second", tokens=50, num_bytes=0)
    with pytest.raises(BusyError, match="all keys"):
        admission.check_tokens("second", 5)
    admission.remove("large", tokens=90, num_bytes=0)
    admission.check_tokens("second", 5)
    with pytest.raises(BusyError, match="this key"):
        admission.check_tokens("second", 11)


async def test_the_number_that_others_wait_for_is_always_accepted() -> None:
    """Otherwise requests that wait for a refused one would keep the limit reached for ever."""

    async def work() -> Reply:
        return json_reply()

    now = 0.0
    ledger = Ledger(report=pytest.fail, clock=lambda: now, limits=QueueLimits(tokens=100, tokens_per_key=100))
    ledger.open_model("m", "owner", print)
    # The SDK sends the first chunk of a call after it has the promises of the others.
    promises = [ledger.submit("m", number, b"", work, tokens=50) for number in (2, 3, 4, 1)]
    with pytest.raises(BusyError):
        ledger.submit("m", 5, b"", work, tokens=50)
    promises.append(ledger.submit("m", 6, b"", work, tokens=50))
    now = PATIENCE_SECONDS + 1
    promises.append(ledger.submit("m", 5, b"", work, tokens=50))
    with pytest.raises(BusyError):
        ledger.submit("m", 7, b"", work, tokens=50)
    for promise in promises:
        assert await ledger.wait_for(promise, 5.0) is not None
    # Their tokens are free again, and the refused number too.
    assert await ledger.wait_for(ledger.submit("m", 7, b"", work, tokens=50), 5.0) is not None
    await ledger.close()


async def test_waiting_bodies_have_a_limit_of_bytes() -> None:
    """Bodies before a missing number wait in memory. One without room fails in its turn, and the next step too."""

    async def work() -> Reply:
        return json_reply()

    skipped: list[str] = []
    ledger = Ledger(report=pytest.fail, limits=QueueLimits(bytes_per_key=100))
    ledger.open_model("m", "owner", skipped.append)
    BODY_BYTES.set(40)
    promises = [ledger.submit("m", number, b"", work, is_training=True) for number in (2, 3, 4)]
    # A save fails alone.
    promises.append(ledger.submit("m", 5, b"", work))
    with pytest.raises(BusyError, match="the limit is"):
        ledger.submit_unordered("sample", "owner", b"", work)
    # Another key has room.
    assert await ledger.wait_for(ledger.submit_unordered("other", "second", b"", work), 5.0) is not None
    # The others wait for this one, so it is accepted.
    promises.append(ledger.submit("m", 1, b"", work))
    replies = [await ledger.wait_for(promise, 5.0) for promise in promises]
    assert [promise.is_failed for promise in promises] == [False, False, True, True, False]
    assert replies[2] is not None and b"Send smaller calls" in replies[2].body
    assert skipped == ["request 4 was too large to wait"]
    # All bytes are free again.
    BODY_BYTES.set(100)
    assert await ledger.wait_for(ledger.submit("m", 6, b"", work), 5.0) is not None
    await ledger.close()


def test_bodies_are_read_up_to_a_limit_at_a_time() -> None:
    admission = Admission(QueueLimits(bytes_per_key=100))
    # One body is always read.
    with (
        admission.count_while_reading("large", 150),
        admission.count_while_reading("second", 60),
        pytest.raises(BusyError),
        admission.count_while_reading("large", 10),
    ):
        raise AssertionError
    with admission.count_while_reading("large", 60), admission.count_while_reading("large", 40):
        pass


async def test_a_body_without_room_uses_its_number_after_the_patience_of_its_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The SDK raises after five minutes, and goes on with the next number."""
    monkeypatch.setattr("megarl.service.http.routes._SMALL_BYTES", 1 << 10)
    limits = QueueLimits(bytes_per_key=1 << 10)
    async with serving(FakeTrainer(), tmp_path, limits=limits) as url, ClientSession() as http:
        client = Client(http, url, "tml-a")
        _, model_id = await make_model(client)
        body = {"model_id": model_id, "seq_id": 1, "path": "saved", "further": "x" * (1 << 12)}
        is_read = asyncio.Event()

        async def send() -> AsyncIterator[bytes]:
            """Occupy all of the account's bytes."""
            yield b"{"
            await is_read.wait()
            yield b"}"

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(client.post("create_session", raw=send()))
            status = 0
            while status != 429:
                status, reply = await client.post("save_weights", body)
                # The other body may not have arrived.
                body["seq_id"] += status == 200
            assert "is sending" in reply["error"]
            monkeypatch.setattr("megarl.service.queueing.ledger.PATIENCE_SECONDS", -1.0)
            refusal = await client.result("save_weights", body)
            is_read.set()
        assert "is sending" in refusal["error"] and refusal["category"] == "user"
        step_body = {"model_id": model_id, "seq_id": body["seq_id"] + 1, "adam_params": {}}
        step = await client.result("optim_step", step_body)
        assert "metrics" in step


def test_the_sdk_repeats_refused_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls of three chunks: together they exceed the limit, and all count."""
    trainer = FakeTrainer()
    trainer.seconds = 0.5
    refusals: list[BusyError] = []
    check = Admission.check_tokens

    def noted(admission: Admission, owner: str, tokens: int) -> None:
        try:
            check(admission, owner, tokens)
        except BusyError as error:
            refusals.append(error)
            raise

    monkeypatch.setattr(Admission, "check_tokens", noted)

    async def run() -> tuple[float, float]:
        losses = []
        for limits in (None, QueueLimits(tokens=10_000, tokens_per_key=10_000)):
            async with serving(trainer, tmp_path, limits=limits) as url:
                losses.append((await run_program(url, "chunks", SDK_CALLS="2"))["loss"])
        return losses[0], losses[1]

    free, limited = asyncio.run(run())
    assert free == pytest.approx(limited)
    assert [name for name, _ in trainer.calls].count("forward_backward") == 12
    assert refusals, "nothing was refused"
