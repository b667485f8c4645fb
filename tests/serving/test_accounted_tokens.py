"""The engine's count of sampled tokens, and the account of an attempt's journal, agree: also for aborted calls."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import aiohttp
import numpy as np
import pytest

from megarl.config.sections.rollout import AgentConfig
from megarl.rewards.scoring.results import verdict_by_value
from megarl.rollout.attempt import Budget, Task
from megarl.rollout.attempt_engine import AttemptEngine
from megarl.rollout.journal.journal import AttemptJournal, AttemptLog
from megarl.rollout.journal.state import account_tokens
from megarl.rollout.pool import EnginePool
from megarl.rollout.recording import RecordedCall
from megarl.rollout.requests.engine_requests import join_parts, num_sampled
from megarl.rollout.stitch import stitch
from megarl.serving.agent.agent_program import AgentProgram
from megarl.serving.agent.agent_runner import AgentRunner
from megarl.serving.agent.containers import Containers
from megarl.serving.refusal import RequestError
from megarl.serving.session import Session
from megarl.serving.session_sampler import Limits, SessionSampler
from megarl.terminal import FirstOfEachKind
from megarl.types import Completion, Problem, Request, Reward, StorageError, Trajectory
from tests.rollout.engines import CONTEXT_TOKENS
from tests.serving.scripted_pool import ScriptedPool, scripted_endpoint
from tests.serving.served import ONE, SAMPLING, Served
from tests.serving.tool_model import LOOP

PROBLEM = Problem(0, ({"role": "user", "content": "q"},), (5, 6), "7", source="command")
LONG: dict[str, Any] = {"model": "policy", "max_tokens": 200}


class Attempt:
    """One attempt's session, with its calls as a checkpoint has them."""

    def __init__(self, s: Served, pool: EnginePool, log: AttemptLog, calls: list[RecordedCall]) -> None:
        log.merge_into(calls)
        self.served, self.pool, self.log, self.calls = s, pool, log, calls
        self.engine = AttemptEngine(pool, calls, log=log)
        limits = Limits(CONTEXT_TOKENS, 40, 60.0)
        self.session: Session = s.sessions.open(
            "t", "s", SAMPLING, limits, self.engine, log, num_aborted=log.num_aborted
        )

    async def open_or_reopen(self) -> None:
        """Let the program outlive its driver, or go on with the program of the last one."""
        if self.log.reopened is None:
            self.log.open_session(self.session.name, self.session.secret, "driver", "container")
            return
        # The last driver was another process.
        self.served.sessions._ended_secrets.pop(self.log.reopened.key, None)
        await self.served.sessions.reopen(self.session, self.log.reopened)

    @property
    def is_count_exact(self) -> bool:
        """Whether the session has as many sampled tokens as its try in the journal."""
        return self.session._sampler.num_sampled == self.log._try.num_sampled

    async def ask(self, prompt: str, **fields: Any) -> Any:
        async with self.served.client(self.session) as client:
            return await client.completions.create(prompt=prompt, **(LONG | fields))

    async def begin(self, prompt: str, **fields: Any) -> asyncio.Task[Any]:
        """Return a request whose completion has at least one token in the engine."""
        before = self.pool.load().num_sampled_tokens
        asking = asyncio.create_task(self.ask(prompt, **fields))
        while not self.session.num_under_way:
            await asyncio.sleep(0.01)
        # A pause makes the engine report the tokens so far, and does not end the call.
        while self.pool.load().num_sampled_tokens == before:
            await self.pool.pause()
            self.pool.resume()
            await asyncio.sleep(0.01)
        return asking

    async def abort(self, asking: asyncio.Task[Any]) -> None:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        while self.session.num_under_way:
            await asyncio.sleep(0.01)
        await self.pool.wait_until_drained()

    async def end(self) -> Trajectory:
        await self.served.sessions.end(self.session)
        calls = [answer.call for answer in self.session.answers]
        texts = tuple("t" for _ in calls)
        reward = Reward(1.0, True, verdict_by_value(1.0))
        return await self.log.end(Trajectory("command", PROBLEM, 0, 0, stitch(calls), reward, texts=texts))


@pytest.mark.parametrize("outlives", [False, True], ids=["restarted", "outlives"])
@pytest.mark.parametrize("is_killed", [False, True], ids=["stopped", "killed"])
async def test_aborted_calls_are_accounted_for_before_and_after_a_resume(
    is_killed: bool, outlives: bool, served: Any, tmp_path: Path
) -> None:
    """One attempt ends with aborted calls. Another has a call under way when its driver stops, or is killed.

    Its program starts again with the next driver, or goes on. It repeats the call.
    """
    file = tmp_path / "attempts.journal"
    async with served() as s:
        journal = AttemptJournal(file, 1, lambda *_: PROBLEM)
        whole = Attempt(s, s.pool, journal.begin("a 0", "s"), [])
        await whole.ask("One")
        for is_streamed in (True, False):
            await whole.abort(await whole.begin(f"Two{LOOP}", stream=is_streamed))
        unanswered = await whole.begin(f"Three{LOOP}")
        trajectory = await whole.end()
        await asyncio.gather(unanswered, return_exceptions=True)
        sampled = s.pool.load().num_sampled_tokens
        assert whole.session.counts["untrained_tokens"] == sampled - trajectory.num_sampled > 0
        journal.settle(1, [(trajectory.journaled_as, trajectory.num_sampled)], set())
        account = account_tokens(tmp_path)
        assert account is not None and account.faults == [] and account.waiting == 0
        assert account.sampled == sampled and account.num_untrained == whole.session.counts["untrained_tokens"]

        half = Attempt(s, s.pool, journal.begin("a 1", "s"), [])
        if outlives:
            await half.open_or_reopen()
        await half.ask("One")
        await half.abort(await half.begin(f"Two{LOOP}"))
        going = await half.begin(f"Three{LOOP}")
        # As a checkpoint has them.
        calls = [replace(call, parts=list(call.parts)) for call in half.calls]
        assert [call.is_done for call in calls] == [True, False] and num_sampled(calls[1].parts) > 0
        if is_killed:
            await s.pool.pause()
            calls[1].parts = list(half.calls[1].parts)
            journal.close()
        half.engine.close()
        await half.abort(going)
        s.pool.resume()
        await s.pool.wait_until_drained()
        await s.sessions.end(half.session)
        if not is_killed:
            journal.close()

        journal, pool = (
            AttemptJournal(file, 2, lambda *_: PROBLEM),
            EnginePool(s.group, ONE, max_running=4, budget_seconds=0.05),
        )
        again = Attempt(s, pool, journal.begin("a 1", "s"), calls)
        assert (again.log.reopened is not None) == outlives and again.log.num_aborted > 0
        if outlives:
            await again.open_or_reopen()
        else:
            await again.ask("One")
        assert again.is_count_exact
        await again.ask(f"Three{LOOP}")
        assert again.is_count_exact and not again.engine.is_restarted
        await again.abort(await again.begin(f"Four{LOOP}"))
        trajectory = await again.end()
        assert again.is_count_exact
        assert again.session.counts["untrained_tokens"] == again.log._try.num_sampled - trajectory.num_sampled
        journal.settle(2, [(trajectory.journaled_as, trajectory.num_sampled)], set())
        journal.close()
        # A start writes the file anew.
        AttemptJournal(file, 3, lambda *_: PROBLEM).close()
        account = account_tokens(tmp_path)
        assert account is not None and account.faults == [] and account.waiting == 0
        assert account.sampled == s.pool.load().num_sampled_tokens + pool.load().num_sampled_tokens
        assert account.sampled == account.num_trained + account.num_untrained + account.lost
        assert account.num_trained == trajectory.num_sampled + account.trained[1]
        # Tokens of aborted calls stay with the try that goes on.
        assert account.untrained[2] > 0 and (account.lost == 0) == outlives


class LatePool(ScriptedPool):
    """Its requests never end, and `reports` has their callbacks for aborted tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.reports: list[Any] = []
        self.forgotten: list[str] = []

    async def generate(self, request: Request, *, on_abort: Any = None, **_: Any) -> Completion:
        self.reports.append(on_abort)
        await asyncio.Event().wait()
        raise AssertionError

    def forget(self, affinity: str) -> None:
        self.forgotten.append(affinity)


async def test_tokens_before_a_refusal_count_for_the_session() -> None:
    """An engine refuses to continue a completion that has two tokens from before a pause."""

    async def refuse(request: Request, **_: Any) -> Completion:
        values = np.zeros(2, np.float32)
        return Completion(request.request_id, np.array([1, 2]), values, "error", values.astype(np.int32))

    pool: Any = Mock(generate=refuse)
    counts = Counter[str]()
    sampler = SessionSampler("s", Limits(CONTEXT_TOKENS, 40, 60.0), pool, counts)
    with pytest.raises(RequestError):
        await sampler.sample("t", 1, np.array([5, 6], np.int32), SAMPLING)
    assert sampler.num_sampled == 2 and counts == {"refused_calls": 1}


async def test_a_session_ends_although_the_client_that_ends_it_disconnects() -> None:
    """The endpoint cancels the request of a client that posts a reward and leaves."""
    pool = LatePool()
    async with scripted_endpoint(pool) as s:
        session = s.open()
        session.complete("The", SAMPLING, b"1", is_retry=False)
        while not pool.reports:
            await asyncio.sleep(0)
        posting = asyncio.create_task(s.sessions.end(session, 1.0))
        await asyncio.sleep(0)
        posting.cancel()
        attempt = asyncio.create_task(s.sessions.end(session))
        await asyncio.wait({posting, attempt}, timeout=0.1)
        assert posting.cancelled() and not attempt.done()
        [report] = pool.reports
        report(7)
        await attempt
        assert session.reward == 1.0 and session.counts["untrained_tokens"] == 7
        assert pool.forgotten == [session.name]


async def test_calls_that_no_engine_reports_are_named_and_late_reports_are_accounted_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two attempts end without the tokens of an aborted call. The engine reports one before their step, one after."""
    monkeypatch.setattr("megarl.serving.session_sampler.REPORT_SECONDS", 0.0)
    pool: Any = LatePool()
    journal = AttemptJournal(tmp_path / "attempts.journal", 1, lambda *_: PROBLEM)
    notices: list[str] = []
    trajectories = []
    async with scripted_endpoint(pool) as s:
        s.sessions.notices = FirstOfEachKind(notices.append)
        for number in range(2):
            log = journal.begin(f"a {number}", "s")
            limits = Limits(CONTEXT_TOKENS, 40, 60.0)
            session = s.sessions.open("t", "s", SAMPLING, limits, AttemptEngine(pool, log=log), log)
            session.complete("The", SAMPLING, b"1", is_retry=False)
            while len(pool.reports) <= number:
                await asyncio.sleep(0)
            await s.sessions.end(session)
            assert session.counts["unreported_calls"] == 1 and session.counts["untrained_tokens"] == 0
            trajectories.append(await log.end(Trajectory("command", PROBLEM, 0, 0, (), None)))
    [notice] = notices
    assert "environment/unreported_calls" in notice and "1 aborted calls" in notice
    pool.reports[0](7)
    journal.settle(1, [(trajectory.journaled_as, 0) for trajectory in trajectories], set())
    pool.reports[1](5)
    journal.close()
    # A start writes the file anew.
    AttemptJournal(tmp_path / "attempts.journal", 2, lambda *_: PROBLEM).close()
    account = account_tokens(tmp_path)
    assert account is not None and account.faults == [] and account.waiting == 0
    assert account.sampled == account.num_untrained == 12


async def test_a_session_ends_although_its_journal_cannot_be_written(tmp_path: Path, no_file_may_grow: Any) -> None:
    """Its call is aborted after the disk is full, and the engine reports the tokens."""
    pool: Any = LatePool()
    journal = AttemptJournal(tmp_path / "attempts.journal", 1, lambda *_: PROBLEM)
    log = journal.begin("a 0", "s")
    async with scripted_endpoint(pool) as s:
        limits = Limits(CONTEXT_TOKENS, 40, 60.0)
        session = s.sessions.open("t", "s", SAMPLING, limits, AttemptEngine(pool, log=log), log)
        session.complete("The", SAMPLING, b"1", is_retry=False)
        while not pool.reports:
            await asyncio.sleep(0)
        with no_file_may_grow():
            with pytest.raises(StorageError):
                await journal.write({"kind": "dropped", "tries": []})
            ending = asyncio.create_task(s.sessions.end(session))
            await asyncio.sleep(0)
            [report] = pool.reports
            report(7)
            await ending
    assert session.counts["untrained_tokens"] == 7
    with pytest.raises(StorageError, match=r"attempts\.journal"):
        log.check_storage()


class Persistent:
    """An agent that repeats a failed call without end."""

    async def run(self, problem: Any, base_url: str, api_key: str) -> None:
        async with aiohttp.ClientSession() as http:
            while True:
                async with http.post(f"{base_url}/completions", json=LONG | {"prompt": "One"}) as answer:
                    await answer.read()


async def test_a_journal_that_cannot_be_written_ends_the_attempt(tmp_path: Path, no_file_may_grow: Any) -> None:
    journal = AttemptJournal(tmp_path / "attempts.journal", 1, lambda *_: PROBLEM)
    async with scripted_endpoint() as s:
        config = AgentConfig(timeout_seconds=1e6)
        containers = Containers(config, s.endpoint.address)
        pool: Any = s.pool
        unused: Any = None
        runner = AgentRunner(config, s.endpoint, s.sessions, containers, asyncio.Semaphore(1), lambda: Persistent())
        program = AgentProgram(runner, unused)
        engine = AttemptEngine(pool, log=journal.begin("a 0", "s"))
        task = Task("command", PROBLEM, 0, 0, "seed", SAMPLING)
        with no_file_may_grow(), pytest.raises(StorageError, match=r"attempts\.journal"):
            await program.attempt(task, Budget(CONTEXT_TOKENS, max_turns=4), engine)
        assert s.sessions.num_open == 0


class RemainderPool:
    """Samples all tokens that a request may have, after those that it has from a checkpoint."""

    seconds_paused = 0.0

    async def generate(
        self,
        request: Request,
        *,
        parts: list[Completion],
        on_begun: Callable[[int], None] | None = None,
        **_: Any,
    ) -> Completion:
        if on_begun is not None and parts:
            on_begun(num_sampled(parts))
        return join_parts([*parts, completion_of(request.sampling.max_new_tokens - num_sampled(parts))])


def completion_of(num_tokens: int) -> Completion:
    tokens, versions = np.arange(num_tokens, dtype=np.int64), np.ones(num_tokens, np.int32)
    return Completion("r", tokens, np.zeros(num_tokens, np.float32), "length", versions)


async def test_a_call_that_goes_on_has_the_limit_of_its_beginning(tmp_path: Path) -> None:
    """Of ten tokens it had six in a checkpoint. If the program asks for something else, these are lost."""
    first, other = np.array([1, 2], np.int32), np.array([1, 3], np.int32)
    limits = Limits(CONTEXT_TOKENS, 40, 60.0, sampled_tokens=10)
    for prompt, num_in_all in ((first, 10), (other, 16)):
        journal = AttemptJournal(tmp_path / f"{num_in_all}.journal", 1, lambda *_: PROBLEM)
        log = journal.begin("a", "s")
        log.merge_into(calls := [RecordedCall(first, [completion_of(6)])])
        pool: Any = RemainderPool()
        engine = AttemptEngine(pool, calls, log=log)
        sampler = SessionSampler("s", limits, engine, Counter(), num_aborted=log.num_aborted)
        assert sampler.num_sampled == 6 and sampler.num_tokens_left == 10
        call = await sampler.sample("t", 1, prompt, SAMPLING)
        assert len(call.completion.token_ids) == 10 and sampler.num_tokens_left == 0
        assert sampler.num_sampled == log._try.num_sampled == num_in_all
        journal.close()
