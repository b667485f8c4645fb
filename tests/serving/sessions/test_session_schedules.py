"""Whatever clients, engines and the end of a session do, and when: its tokens and the journal's are those sampled."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from megarl.rollout.attempt_engine import AttemptEngine
from megarl.rollout.journal.journal import AttemptJournal
from megarl.rollout.journal.state import account_tokens
from megarl.rollout.stitch import stitch
from megarl.serving.codec import Codec
from megarl.serving.refusal import RequestError
from megarl.serving.session import Session
from megarl.serving.session_sampler import Limits
from megarl.serving.sessions import Sessions
from megarl.types import Problem, Reward, SamplingSettings, Trajectory
from tests.rollout.played_engines import PlayedPool
from tests.serving.scripted_pool import CONTEXT_TOKENS, ScriptedPool

PROBLEM = Problem(0, ({"role": "user", "content": "q"},), (5, 6), "7", source="command")
SAMPLING = SamplingSettings(6)


class Schedule(PlayedPool):
    """Sessions of some attempts. Clients ask, repeat requests, continue answers, and leave at any moment."""

    def __init__(self, seed: int, folder: Path, codec: Codec) -> None:
        super().__init__(seed)
        self.journal = AttemptJournal(folder / "attempts.journal", 1, lambda *_: PROBLEM)
        self.sessions = Sessions(codec)
        self.clients: list[asyncio.Task[None]] = []
        self.texts = ["The", "One"]
        self.ends: list[asyncio.Task[None]] = []
        self.opened: list[tuple[Session, Any]] = []
        for number in range(3):
            log = self.journal.begin(f"a {number}", "s")
            pool: Any = AttemptEngine(self.pool, log=log)
            limits = Limits(CONTEXT_TOKENS, 1000, 1000.0)
            self.opened.append((self.sessions.open("t", f"{number}", SAMPLING, limits, pool, log), log))

    async def run(self, num_events: int) -> None:
        events = [self.ask, self.leave, self.answer, self.lose, self.pause, self.resume, self.end]
        for _ in range(num_events):
            self.draw.choices(events, [5, 2, 6, 0.3, 1, 2, 0.2])[0]()
            for _ in range(self.draw.choice([0, 0, 1, 2, 5])):
                await asyncio.sleep(0)
            if self.draw.random() < 0.3:
                # Codec and journal work in threads.
                await asyncio.sleep(0.001)
        self.ends += [asyncio.create_task(self.sessions.end(session)) for session, _ in self.opened]
        while not all(task.done() for task in [*self.ends, *self.clients]) or self.pausing is not None:
            self.answer()
            self.resume()
            await asyncio.sleep(0.001)
        await asyncio.gather(*self.ends)
        await asyncio.gather(*self.clients, return_exceptions=True)

    def ask(self) -> None:
        session, _ = self.draw.choice(self.opened)
        text, is_retry = self.draw.choice(self.texts), self.draw.random() < 0.3
        self.clients.append(asyncio.create_task(self.request(session, text, is_retry=is_retry)))

    async def request(self, session: Session, text: str, *, is_retry: bool) -> None:
        """Make one request, as the endpoint does."""
        try:
            call = session.complete(text, SAMPLING, text.encode(), is_retry=is_retry)
            with session.count_waiting(call):
                answer = await session.wait_for_answer(call, 1000.0)
                assert answer is not None
                session.remember(call)
                # The answer is being written.
                await asyncio.sleep(0)
                session.record_delivery(call)
                if self.draw.random() < 0.2:
                    session.withdraw_delivery(call)
                    raise ConnectionResetError
                self.texts.append(text + answer.text)
        except (RequestError, ConnectionResetError):
            return

    def leave(self) -> None:
        running = [client for client in self.clients if not client.done()]
        if running:
            self.draw.choice(running).cancel()

    def end(self) -> None:
        session, _ = self.draw.choice(self.opened)
        self.ends.append(asyncio.create_task(self.sessions.end(session)))


@pytest.mark.parametrize("seed", range(30))
async def test_a_session_and_its_journal_count_what_was_sampled(seed: int, tmp_path: Path) -> None:
    codec = Codec(ScriptedPool().tokenizer, CONTEXT_TOKENS)
    schedule = Schedule(seed, tmp_path, codec)
    await schedule.run(200)
    trained = []
    for session, log in schedule.opened:
        answers = session.answers
        num_delivered = sum(answer.num_sampled_tokens for answer in answers)
        assert session._sampler.num_sampled == log._try.num_sampled
        assert session.counts["untrained_tokens"] == log._try.num_sampled - num_delivered
        segments = stitch([answer.call for answer in answers]) if answers else ()
        texts = tuple("t" for _ in answers)
        trajectory = await log.end(Trajectory("command", PROBLEM, 0, 0, segments, Reward(1.0, True, True), texts=texts))
        assert trajectory.num_sampled == num_delivered
        trained.append((trajectory.journaled_as, num_delivered))
    schedule.journal.settle(1, trained, set())
    schedule.journal.close()
    codec.close()
    account = account_tokens(tmp_path)
    assert account is not None and account.faults == [] and account.waiting == 0
    assert account.sampled == schedule.engines.num_sampled - schedule.engines.num_unknown
    num_unreported = sum(session.counts["unreported_calls"] for session, _ in schedule.opened)
    assert account.unreported_calls == num_unreported and (num_unreported or not schedule.engines.num_unknown)
