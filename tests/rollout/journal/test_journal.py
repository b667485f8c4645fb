"""The journal of agents' attempts: what a start finds in it, what it refuses, and what it counts."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import threading
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from megarl.config.parallel import ParallelConfig
from megarl.rollout.attempt_engine import AttemptEngine
from megarl.rollout.journal.journal import AttemptJournal, AttemptLog
from megarl.rollout.journal.lines import encode_line, read_lines
from megarl.rollout.journal.state import account_tokens
from megarl.rollout.journal.token_account import TokenAccount
from megarl.rollout.pool import EnginePool
from megarl.rollout.recording import RecordedCall, StartedGroup
from megarl.rollout.requests.engine_requests import join_parts, num_sampled
from megarl.rollout.stitch import ModelCall, stitch
from megarl.types import (
    Archive,
    Completion,
    DataError,
    ExpertsHandle,
    Problem,
    Request,
    Reward,
    SamplingSettings,
    StorageError,
    Trajectory,
)

pytestmark = pytest.mark.anyio
PROBLEM = Problem(3, ({"role": "user", "content": "Add."},), (5, 6), "7")
SAMPLING = SamplingSettings(8)


class Pool:
    """Samples two tokens, those that follow the prompt's length, with the current weight version."""

    seconds_paused = 0.0

    def __init__(self, version: int = 1) -> None:
        self.version, self.num_sampled = version, 0

    async def generate(self, request: Request, **_: Any) -> Completion:
        self.num_sampled += 2
        first = len(request.prompt_token_ids)
        token_ids, versions = np.array([first, first + 1], np.int64), np.full(2, self.version, np.int32)
        return Completion(request.request_id, token_ids, np.array([-0.5, -1.5], np.float32), "stop", versions)


def opened(run: Path, version: int, **more: Any) -> AttemptJournal:
    return AttemptJournal(run / "attempts.journal", version, lambda *_: PROBLEM, **more)


async def play(log: AttemptLog, pool: Any, *prompts: list[int]) -> list[ModelCall]:
    """Sample an answer to each prompt, or repeat it."""
    calls: list[RecordedCall] = []
    log.merge_into(calls)
    engine = AttemptEngine(pool, calls, log=log)
    done = []
    for number, prompt in enumerate(prompts):
        request = Request(f"r{number}", np.array(prompt, np.int32), SAMPLING, 1)
        done.append(ModelCall(request.prompt_token_ids, await engine.generate(request)))
    return done


def ended(calls: list[ModelCall], reward: float | None = 1.0) -> Trajectory:
    texts = tuple("t" for _ in calls)
    given = None if reward is None else Reward(reward, True, None)
    return Trajectory("command", PROBLEM, 0, 0, stitch(calls), given, texts=texts)


FIRST, SECOND = [1, 2, 3], [1, 2, 3, 3, 4, 9]


async def test_a_start_uses_what_ended_and_repeats_what_did_not(tmp_path: Path) -> None:
    journal, pool = opened(tmp_path, 1), Pool()
    whole, half = journal.begin("a 0", "s"), journal.begin("a 1", "s")
    trajectory = await whole.end(ended(await play(whole, pool, FIRST, SECOND)))
    await play(half, pool, FIRST, SECOND)
    # Killed: the file is what there is.
    again, later = opened(tmp_path, 1), Pool()
    found = again.begin("a 0", "s")
    assert found.ended is not None and found.ended.reward == trajectory.reward
    [before], [after] = trajectory.segments, found.ended.segments
    for name in ("token_ids", "loss_mask", "rollout_logprobs", "weight_versions", "turns"):
        assert getattr(before, name).tolist() == getattr(after, name).tolist()
        assert getattr(before, name).dtype == getattr(after, name).dtype
    log = again.begin("a 1", "s")
    # The second prompt is another one: the rest is sampled, and one answer is lost.
    done = await log.end(ended(await play(log, later, FIRST, [*SECOND, 7])))
    assert log.ended is None and later.num_sampled == 2
    again.settle(1, [(found.ended.journaled_as, 4), (done.journaled_as, 4)], set())
    account = account_tokens(tmp_path)
    assert account == TokenAccount(sampled=10, trained={1: 8}, untrained={1: 0}, lost=2)
    again.close()


async def test_answers_of_later_weights_and_undone_steps_are_lost(tmp_path: Path) -> None:
    journal = opened(tmp_path, 1)
    for step in (1, 2, 3):
        log = journal.begin(f"a {step}", "s")
        done = await log.end(ended(await play(log, Pool(step), FIRST)))
        journal.settle(step, [(done.journaled_as, 2)], set())
    assert account_tokens(tmp_path) == TokenAccount(6, {1: 2, 2: 2, 3: 2}, {1: 0, 2: 0, 3: 0})
    # The newest checkpoint is of step 1: step 2 is made again by weights that there are, step 3 is not.
    again = opened(tmp_path, 2)
    assert again.begin("a 2", "s").ended is not None and again.begin("a 3", "s").ended is None
    account = account_tokens(tmp_path)
    assert account is not None and (account.trained, account.lost, account.waiting) == ({1: 2}, 2, 2)


async def test_a_container_whose_answers_are_of_lost_weights_is_an_orphan(tmp_path: Path) -> None:
    """Its program has read answers that a resumed run samples anew. One without such answers goes on."""
    journal = opened(tmp_path, 1)
    for attempt, version in (("goes on", 1), ("too new", 3), ("ended", 3)):
        log = journal.begin(attempt, "s")
        log.open_session(attempt, f"key of {attempt}", "node", f"container of {attempt}")
        log.record_request("r0", {"number": 1, "messages": []})
        calls = await play(log, Pool(version), FIRST)
        if attempt == "ended":
            await log.end(ended(calls))
    journal.close()
    journal = opened(tmp_path, 2)
    assert journal.orphaned_containers == [("node", "container of too new")]
    assert journal.expected_keys == ["key of goes on"]
    journal.close()


async def test_answers_with_other_settings_are_not_used(tmp_path: Path) -> None:
    journal = opened(tmp_path, 1)
    log = journal.begin("a", "hot")
    await log.end(ended(await play(log, Pool(), FIRST)))
    again = opened(tmp_path, 1).begin("a", "cold")
    assert again.ended is None and again.calls == []


class RoutingPool(Pool):
    async def generate(self, request: Request, **more: Any) -> Completion:
        return replace(await super().generate(request, **more), routed_experts=ExpertsHandle(0, 1))


async def test_answers_with_routed_experts_are_sampled_again(tmp_path: Path) -> None:
    """The experts of a token stay on its rank, which a kill ends too."""
    journal = opened(tmp_path, 1)
    log = journal.begin("a", "s")
    await log.end(ended(await play(log, RoutingPool(), FIRST)))
    opened(tmp_path, 1)
    # This start reads what the one before wrote.
    again = opened(tmp_path, 1)
    pool, log = RoutingPool(), again.begin("a", "s")
    assert log.ended is None and log.calls == []
    await play(log, pool, FIRST)
    assert pool.num_sampled == 2
    account = account_tokens(tmp_path)
    assert account is not None and (account.sampled, account.lost, account.waiting) == (4, 2, 2)


async def test_dropped_and_failed_attempts_are_untrained(tmp_path: Path) -> None:
    journal = opened(tmp_path, 1)
    failed, dropped, filtered, waiting = (journal.begin(f"a {n}", "s") for n in range(4))
    done = await failed.end(ended(await play(failed, Pool(), FIRST), None))
    await play(dropped, Pool(), FIRST)
    dropped.drop()
    assert (await dropped.end(done)).journaled_as == done.journaled_as
    with pytest.raises(asyncio.CancelledError):
        await play(dropped, Pool(), FIRST)
    await filtered.end(ended(await play(filtered, Pool(), FIRST)))
    kept = await waiting.end(ended(await play(waiting, Pool(), FIRST)))
    journal.settle(1, [(done.journaled_as, 0)], {kept.journaled_as})
    account = account_tokens(tmp_path)
    # The dropped attempt sampled another answer after its end, and did not get it.
    assert account == TokenAccount(10, {1: 0}, {1: 2}, dropped=6, waiting=2)


async def test_a_token_is_not_trained_twice_unnoticed(tmp_path: Path) -> None:
    journal = opened(tmp_path, 1)
    log, unended = journal.begin("a", "s"), journal.begin("b", "s")
    done = await log.end(ended(await play(log, Pool(), FIRST)))
    await play(unended, Pool(), FIRST)
    journal.settle(1, [(done.journaled_as, 2), (unended.name, 2)], set())
    journal.settle(2, [(done.journaled_as, 2)], set())
    account = account_tokens(tmp_path)
    assert account is not None and len(account.faults) == 2
    assert account.faults[0].startswith("step 1:") and account.faults[1].startswith("step 2:")


async def test_an_answer_is_on_the_disk_before_its_agent_has_it(tmp_path: Path) -> None:
    journal = opened(tmp_path, 1)
    log = journal.begin("a", "s")
    [call] = await play(log, Pool(), FIRST)
    [record] = [values for _, values in read_lines(tmp_path / "attempts.journal") if values["kind"] == "sampled"]
    assert (record["try"], record["call"], record["base"]) == (log.name, 0, None)
    assert (tmp_path / "attempts.journal").stat().st_mode & 0o777 == 0o600
    assert len(call.completion.token_ids) == 2


async def test_writes_at_the_same_time_share_flushes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = opened(tmp_path, 1)
    flushes: list[bytes] = []
    write = journal._write

    def write_and_count(content: bytes, *, is_flushed: bool = True) -> None:
        flushes.extend([content] * is_flushed)
        write(content, is_flushed=is_flushed)

    monkeypatch.setattr(journal, "_write", write_and_count)
    logs = [journal.begin(f"a {n}", "s") for n in range(50)]
    await asyncio.gather(*(play(log, Pool(), FIRST) for log in logs))
    assert len(flushes) < 10 and account_tokens(tmp_path) == TokenAccount(sampled=100, waiting=100)


async def test_a_last_record_cut_short_is_left_out(tmp_path: Path) -> None:
    journal = opened(tmp_path, 1)
    await play(journal.begin("a", "s"), Pool(), FIRST, SECOND)
    file = tmp_path / "attempts.journal"
    file.write_bytes(file.read_bytes()[:-5])
    # The answer without a record may have any number of tokens.
    assert account_tokens(tmp_path) == TokenAccount(sampled=2, waiting=2, unreported_calls=1)
    assert len(opened(tmp_path, 1).begin("a", "s").calls) == 1


def change(**changed: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda record: record | changed


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        pytest.param("sampled", change(tokens="!"), id="not base64"),
        pytest.param("sampled", change(tokens=""), id="fewer tokens than log-probs"),
        pytest.param("sampled", change(logprobs="AACAfwAAgH8="), id="infinite log-probs"),
        pytest.param("sampled", change(new="/////w=="), id="a negative token"),
        pytest.param("sampled", change(prompt="0" * 32), id="another prompt"),
        pytest.param("sampled", change(base=7), id="no such answer"),
        pytest.param("sampled", change(call=-1), id="a negative number"),
        pytest.param("sampled", change(**{"try": "none"}), id="no such try"),
        pytest.param("sampled", change(finish="abort"), id="no end"),
        pytest.param("sampled", change(sets=["AQAAAA==", ""]), id="sets of other tokens"),
        pytest.param("ended", change(arrays="AAAA"), id="arrays that are not compressed"),
        pytest.param("ended", change(trajectory={}), id="an empty trajectory"),
        pytest.param("ended", lambda record: record | {"kind": "none"}, id="unknown kind"),
        pytest.param("began", lambda record: {"kind": "began"}, id="fields that lack"),
        pytest.param("start", change(version=1.5), id="half a version"),
    ],
)  # fmt: skip
async def test_a_damaged_journal_is_refused_by_its_line(kind: str, change: Any, tmp_path: Path) -> None:
    journal, file = opened(tmp_path, 1), tmp_path / "attempts.journal"
    log = journal.begin("a", "s")
    await log.end(ended(await play(log, Pool(), FIRST, SECOND)))
    records = [values for _, values in read_lines(file)]
    changed = [change(values) if values["kind"] == kind else values for values in records]
    file.write_bytes(b"".join(map(encode_line, changed)))
    with pytest.raises(DataError) as caught:
        opened(tmp_path, 1).begin("a", "s")
    assert str(caught.value).startswith(f"{file}:") and "remove it" in str(caught.value)


async def test_a_line_with_a_wrong_checksum_is_refused_unless_it_is_the_last(tmp_path: Path) -> None:
    journal, file = opened(tmp_path, 1), tmp_path / "attempts.journal"
    await play(journal.begin("a", "s"), Pool(), FIRST, SECOND)
    lines = file.read_bytes().splitlines(keepends=True)
    for number in range(len(lines)):
        broken = lines[number].replace(b'"kind"', b'"kinD"')
        file.write_bytes(b"".join([*lines[:number], broken, *lines[number + 1 :]]))
        with pytest.raises(DataError, match=f":{number + 1}:"):
            account_tokens(tmp_path)


async def test_arrays_that_unpack_without_end_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.rollout.journal.journal._MAX_ARRAYS", 1000)
    journal = opened(tmp_path, 1)
    log = journal.begin("a", "s")
    calls = await play(log, Pool(), list(range(1, 400)))
    await log.end(ended(calls))
    with pytest.raises(DataError, match="too large"):
        opened(tmp_path, 1).begin("a", "s")


async def test_a_full_disk_ends_the_attempt(tmp_path: Path, no_file_may_grow: Any) -> None:
    journal = opened(tmp_path, 1)
    log = journal.begin("a", "s")
    with no_file_may_grow(), pytest.raises(Exception, match=r"attempts\.journal"):
        await play(log, Pool(), FIRST)
    with pytest.raises(Exception, match=r"attempts\.journal"):
        await log.end(Trajectory("command", PROBLEM, 0, 0, (), None))


async def test_nothing_is_written_after_a_write_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record after a gap could not be read, and the run could not be resumed."""
    journal, file = opened(tmp_path, 1), tmp_path / "attempts.journal"
    log = journal.begin("a", "s")
    log.open_session("session", "key", "driver", "container")
    await play(log, Pool(), FIRST)
    content, errors, write = file.read_bytes(), [OSError(errno.ENOSPC, "full")], os.write

    def fail_once(descriptor: int, data: bytes) -> int:
        if descriptor == journal._descriptor and errors:
            raise errors.pop()
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", fail_once)
    may_write = threading.Event()
    journal._thread.submit(may_write.wait)
    log.record_received("r0", 1)
    ending = asyncio.create_task(log.end(Trajectory("command", PROBLEM, 0, 0, (), None)))
    # The end waits for the thread, behind the write that fails.
    await asyncio.sleep(0.1)
    may_write.set()
    with pytest.raises(Exception, match=r"attempts\.journal"):
        await ending
    assert file.read_bytes() == content


class PausedEngine:
    """An engine that has sampled two tokens of each request when it is paused, and never reports after that."""

    def __init__(self) -> None:
        self.is_hung = False

    async def ask(self, ranks: Any, method: str, per_rank: Any, *_: Any, **__: Any) -> list[list[Completion]]:
        _, aborts = per_rank[0]
        if self.is_hung:
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        token_ids, logprobs = np.array([7, 8], np.int64), np.array([-0.5, -1.5], np.float32)
        return [[Completion(name, token_ids, logprobs, "abort", np.ones(2, np.int32)) for name in aborts]]


async def test_a_full_disk_stops_no_report_of_an_aborted_call(tmp_path: Path, no_file_may_grow: Any) -> None:
    """The sessions wait for the reports, and the pool reports all of its aborted calls in one loop."""
    ranks, journal = PausedEngine(), opened(tmp_path, 1)
    pool = EnginePool(ranks, ParallelConfig(1, 1, 1, 1), max_running=4)
    reports: list[int] = []
    calls = []
    for number in range(2):
        engine = AttemptEngine(pool, log=journal.begin(f"a {number}", "s"))
        request = Request(f"r{number}", np.array(FIRST, np.int32), SAMPLING, 1)
        calls.append(asyncio.create_task(engine.generate(request, on_abort=reports.append)))
    while pool.load().num_running < 2:
        await asyncio.sleep(0)
    await pool.pause()
    ranks.is_hung = True
    pool.resume()
    while pool.load().num_running < 2:
        await asyncio.sleep(0)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert reports == []
    with no_file_may_grow():
        with pytest.raises(StorageError, match=r"attempts\.journal"):
            await journal.write({"kind": "dropped", "tries": []})
        pool.fail(RuntimeError("the engines are lost"))
    assert reports == [2, 2]
    with pytest.raises(StorageError, match=r"attempts\.journal"):
        journal.check_storage()
    for replica in pool._replicas:
        assert replica.pump is not None
        replica.pump.cancel()


class ContinuingPool(Pool):
    """Adds two tokens to those that a request has from a checkpoint."""

    async def generate(self, request: Request, *, parts: list[Completion], **more: Any) -> Completion:
        return join_parts([*parts, await super().generate(request, **more)])


async def abort_one_of_two_equal_calls(journal: AttemptJournal) -> list[RecordedCall]:
    """Make two calls with one prompt, pause after two tokens of each, abort one, and take a checkpoint."""
    pool = EnginePool(PausedEngine(), ParallelConfig(1, 1, 1, 1), max_running=4)
    engine = AttemptEngine(pool, recorded := [], log=journal.begin("a", "s"))
    tasks = [
        asyncio.create_task(engine.generate(Request(f"r{number}", np.array(FIRST, np.int32), SAMPLING, 1)))
        for number in range(2)
    ]
    while pool.load().num_running < 2:
        await asyncio.sleep(0)
    await pool.pause()
    aborted, going = tasks
    aborted.cancel()
    await asyncio.gather(aborted, return_exceptions=True)
    archive, group = Archive(), StartedGroup(0, PROBLEM, calls={0: recorded})
    values = json.loads(json.dumps(group.to_json(archive)))
    going.cancel()
    return StartedGroup.from_json(values, archive, lambda *_: PROBLEM).calls[0]


def resumed(journal: AttemptJournal, pool: Any, calls: list[RecordedCall]) -> AttemptEngine:
    """The attempt's engine of a driver that starts from a checkpoint with these calls."""
    log = journal.begin("a", "s")
    calls = [replace(call, parts=[*call.parts]) for call in calls]
    log.merge_into(calls)
    return AttemptEngine(pool, calls, log=log)


async def test_calls_with_equal_prompts_are_counted_each(tmp_path: Path) -> None:
    """One is aborted before a checkpoint, and the driver is killed while the other goes on."""
    journal = opened(tmp_path, 1)
    calls = await abort_one_of_two_equal_calls(journal)
    [begun] = calls
    assert num_sampled(begun.parts) == 2 and account_of(journal).sampled == 2
    # Killed: nothing more is written.
    journal.close()
    journal, pool = opened(tmp_path, 1), ContinuingPool()
    engine = resumed(journal, pool, calls)
    answer = await engine.generate(Request("r", np.array(FIRST, np.int32), SAMPLING, 1))
    assert len(answer.token_ids) == 4 and pool.num_sampled == 2
    account = account_of(journal)
    assert (account.sampled, account.lost, account.waiting, account.faults) == (6, 2, 4, [])


async def test_a_call_of_a_checkpoint_is_counted_once_by_all_drivers(tmp_path: Path) -> None:
    """Four drivers start from one checkpoint. The second answers its call. All are killed."""
    journal = opened(tmp_path, 1)
    calls = await abort_one_of_two_equal_calls(journal)
    journal.close()
    journal, pool = opened(tmp_path, 1), ContinuingPool()
    await resumed(journal, pool, calls).generate(Request("r", np.array(FIRST, np.int32), SAMPLING, 1))
    assert account_of(journal).sampled == 6
    for _ in range(2):
        journal.close()
        journal, pool = opened(tmp_path, 1), ContinuingPool()
        engine = resumed(journal, pool, calls)
        assert account_of(journal).sampled == 6
    # The answer is lost with the second driver's try, which the third one's replaced.
    await engine.generate(Request("r", np.array(FIRST, np.int32), SAMPLING, 1))
    account = account_of(journal)
    assert pool.num_sampled == 2 and (account.sampled, account.lost, account.waiting) == (8, 6, 2)


def account_of(journal: AttemptJournal) -> TokenAccount:
    """Return the journal's account, which its file confirms."""
    journal._thread.submit(int).result()
    assert account_tokens(journal._file.parent) == journal.account()
    return journal.account()


async def test_a_record_that_nobody_waits_for_is_not_lost_silently(tmp_path: Path, no_file_may_grow: Any) -> None:
    journal = opened(tmp_path, 1)
    log = journal.begin("a", "s")
    await play(log, Pool(), FIRST)
    with no_file_may_grow():
        log.record_abort(log.name, RecordedCall(np.array(SECOND, np.int32)), 3)
        with pytest.raises(StorageError, match=r"attempts\.journal"):
            journal.close()


def test_a_line_is_json_with_its_checksum() -> None:
    line = encode_line({"kind": "start", "version": 1})
    checksum, _, content = line.rstrip(b"\n").partition(b" ")
    assert int(checksum, 16) == zlib.crc32(content) and json.loads(content) == {"kind": "start", "version": 1}


async def test_a_start_before_the_newest_answers_is_counted(tmp_path: Path) -> None:
    """Only a file that another program wrote has such a start after its answers."""
    journal = opened(tmp_path, 1)
    await play(journal.begin("a", "s"), Pool(version=2), FIRST)
    journal.close()
    with (tmp_path / "attempts.journal").open("ab") as file:
        file.write(encode_line({"kind": "start", "version": 1}))
    assert account_tokens(tmp_path) == TokenAccount(sampled=2, lost=2)


class RefusingPool(Pool):
    """Samples a part of each completion. After a pause it refuses to continue a prompt of more than three tokens."""

    async def generate(self, request: Request, *, parts: list[Completion], **_: Any) -> Completion:
        answer = await super().generate(request)
        if len(request.prompt_token_ids) == len(FIRST):
            return answer
        parts.append(answer)
        nothing = np.zeros(0, np.int64)
        last = Completion(request.request_id, nothing, nothing.astype(np.float32), "error", nothing.astype(np.int32))
        return join_parts([*parts, last])


@pytest.mark.parametrize("is_in_checkpoint", [True, False])
async def test_a_refused_call_is_repeated(is_in_checkpoint: bool, tmp_path: Path) -> None:
    """Otherwise its prompt is unknown to the new try, which samples all later answers again."""
    journal, calls = opened(tmp_path, 1), list[RecordedCall]()
    prompts = [np.array(prompt, np.int32) for prompt in (SECOND, FIRST)]

    async def ask(log: AttemptLog, pool: Pool) -> AttemptEngine:
        log.merge_into(calls)
        engine: Any = AttemptEngine(cast("EnginePool", pool), calls, log=log)
        for number, prompt in enumerate(prompts):
            await engine.generate(Request(f"r{number}", prompt, SAMPLING, 1))
        return engine

    await ask(journal.begin("a", "s"), RefusingPool())
    assert journal.account() == TokenAccount(sampled=4, waiting=4)
    for _ in range(2):
        if not is_in_checkpoint:
            calls.clear()
        journal.close()
        journal, pool = opened(tmp_path, 1), RefusingPool()
        engine = await ask(journal.begin("a", "s"), pool)
        assert pool.num_sampled == 0 and not engine.is_restarted
        assert [call.is_refused for call in calls] == [True, False]
        # The tokens of the refused call stay with the earlier try.
        assert account_of(journal) == TokenAccount(sampled=4, waiting=2, lost=2)
    journal.close()
