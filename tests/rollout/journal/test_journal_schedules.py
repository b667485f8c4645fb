"""Over any kills, resumes, restarts and aborts: the journal counts each token that is known exactly once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.rollout.attempt_engine import AttemptEngine
from megarl.rollout.journal.journal import AttemptJournal, AttemptLog
from megarl.rollout.journal.state import account_tokens
from megarl.rollout.recording import RecordedCall
from megarl.rollout.requests.engine_requests import join_parts, num_sampled
from megarl.rollout.stitch import ModelCall, stitch
from megarl.types import Completion, Problem, Request, Reward, SamplingSettings, Trajectory

PROBLEM = Problem(3, ({"role": "user", "content": "Add."},), (5, 6), "7")
SAMPLING = SamplingSettings(100)


class NumberedPool:
    """Samples tokens that are all different: 1,000, 1,001 and so on. A test ends each request.

    `known` are the tokens of answers, of reported aborts, and of checkpoints.
    """

    seconds_paused = 0.0
    num_begun_tokens = 0

    def __init__(self, draw: random.Random) -> None:
        self.version, self.known, self.is_killed = 1, set[int](), False
        self.open: dict[str, tuple[list[Completion], asyncio.Future[Completion]]] = {}
        self._draw, self._num_sampled = draw, 0

    async def generate(
        self, request: Request, *, parts: list[Completion], on_abort: Callable[[int], None], **_: Any
    ) -> Completion:
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self.open[request.request_id] = parts, future
        try:
            last = await future
        except asyncio.CancelledError:
            if not self.is_killed:
                on_abort(self._note_known([*parts, self._sample()]))
            raise
        finally:
            del self.open[request.request_id]
        self._note_known([*parts, last])
        return join_parts([*parts, last])

    def pause(self, request_id: str) -> None:
        """Sample tokens that a checkpoint may have."""
        self.open[request_id][0].append(self._sample())

    def finish(self, request_id: str) -> None:
        self.open[request_id][1].set_result(self._sample())

    def refuse(self, request_id: str) -> None:
        """Refuse to continue a completion after a pause, or to begin it."""
        nothing = np.zeros(0, np.int32)
        refused = Completion("r", nothing, nothing.astype(np.float32), "error", nothing, error="refused")
        self.open[request_id][1].set_result(refused)

    def note_checkpoint(self, calls: list[RecordedCall]) -> None:
        for call in calls:
            self._note_known(call.parts)

    def _note_known(self, parts: list[Completion]) -> int:
        self.known |= {token for part in parts for token in part.token_ids.tolist()}
        return num_sampled(parts)

    def _sample(self) -> Completion:
        first = 1000 + self._num_sampled
        num_tokens = self._draw.randint(1, 3)
        self._num_sampled += num_tokens
        token_ids, versions = np.arange(first, first + num_tokens), np.full(num_tokens, self.version, np.int32)
        return Completion("r", token_ids, np.full(num_tokens, -1, np.float32), "stop", versions)


@dataclass
class Checkpoint:
    """What a checkpoint has: the next step, the calls of an attempt in flight, and an ended one that waits."""

    step: int
    attempt: int
    calls: list[RecordedCall] = field(default_factory=list)
    waiting: Trajectory | None = None

    def copy(self) -> Checkpoint:
        return replace(self, calls=[replace(call, parts=list(call.parts)) for call in self.calls])


class KilledError(Exception):
    pass


class DroppedError(Exception):
    pass


class Drivers:
    """Drivers of one run, each killed at a random moment. They make one attempt after the other."""

    def __init__(self, folder: Path, seed: int, damaged_share: float) -> None:
        """`damaged_share`: how often a start finds its newest checkpoint damaged, and goes on from an older one."""
        self.draw, self.file, self.damaged_share = random.Random(seed), folder / "attempts.journal", damaged_share
        self.pool = NumberedPool(self.draw)
        self.checkpoints = [Checkpoint(1, 0)]
        self.num_requests = 0
        self.trained: dict[int, set[int]] = {}
        self.journal: Any = None
        self.tasks: list[asyncio.Task[Completion]] = []

    async def live(self) -> None:
        """Go on from a checkpoint until a kill."""
        while len(self.checkpoints) > 1 and self.draw.random() < self.damaged_share:
            del self.checkpoints[-1]
        self.now = self.checkpoints[-1].copy()
        self.trained = {step: tokens for step, tokens in self.trained.items() if step < self.now.step}
        max_staleness = self.draw.randint(0, 2)
        self.journal = AttemptJournal(
            self.file,
            self.now.step,
            lambda *_: PROBLEM,
            max_staleness=max_staleness,
            saved_steps=[checkpoint.step - 1 for checkpoint in self.checkpoints],
        )
        self.pool.version, self.pool.is_killed, self.tasks = self.now.step, False, []
        settings = self.draw.choice(["s", "s", "s", "other"])
        try:
            while True:
                if self.now.waiting is None:
                    self.now.waiting = await self.attempt_or_drop(settings)
                self.maybe_kill()
                self.train()
        except KilledError:
            self.pool.is_killed = True
            for task in self.tasks:
                task.cancel()
            await asyncio.gather(*self.tasks, return_exceptions=True)
        self.journal._thread.submit(int).result()
        content = self.file.read_bytes()
        self.journal.close()
        # A kill loses the records that no flush has written.
        self.file.write_bytes(content)

    def maybe_kill(self) -> None:
        if self.draw.random() < 0.1:
            raise KilledError

    def train(self) -> None:
        """Make a step, which may train the attempt that has ended."""
        waiting, ending = self.now.waiting, self.draw.choice(["trained", "trained", "filtered", "waits"])
        if waiting is None:
            ending = "dropped"
        trained, live = [], set[str]()
        if waiting is not None and ending == "trained":
            trained = [(waiting.journaled_as, waiting.num_sampled)]
            token_ids = [segment.token_ids[segment.loss_mask].tolist() for segment in waiting.segments]
            self.trained[self.now.step] = {token for of_segment in token_ids for token in of_segment}
            assert sum(map(len, token_ids)) == len(self.trained[self.now.step])
        if waiting is not None and ending == "waits":
            live = {waiting.journaled_as}
        self.journal.settle(self.now.step, trained, live)
        self.maybe_kill()
        has_ended = ending != "waits"
        self.now = Checkpoint(self.now.step + 1, self.now.attempt + has_ended, [], None if has_ended else waiting)
        self.pool.version = self.now.step
        self.save()

    def save(self) -> None:
        """Save a checkpoint, and remove the oldest of more than four."""
        self.checkpoints = [*self.checkpoints, self.now.copy()][-4:]

    async def attempt_or_drop(self, settings: str) -> Trajectory | None:
        try:
            return await self.attempt(settings)
        except DroppedError:
            return None

    async def attempt(self, settings: str) -> Trajectory:
        log = self.journal.begin(f"a {self.now.attempt}", settings)
        if log.ended is not None:
            return log.ended
        calls = self.now.calls
        self.pool.note_checkpoint(calls)
        log.merge_into(calls)
        pool: Any = self.pool
        engine = AttemptEngine(pool, calls, log=log)
        answers: list[ModelCall] = []
        prompt = [1, 2, 3]
        for turn in range(4):
            # A program that is no function of its answers asks for something else now and then.
            prompt = [*prompt, turn, 0 if self.draw.random() < 0.8 else self.draw.randrange(1, 3)]
            if self.draw.random() < 0.3:
                await self.abort(engine, prompt)
            if self.draw.random() < 0.1:
                await self.ask(engine, [*prompt, 3], is_refused=True)
            completion = await self.ask(engine, prompt)
            answers.append(ModelCall(np.array(prompt, np.int32), completion))
            prompt = [*prompt, *completion.token_ids.tolist()]
            if self.draw.random() < 0.05:
                # Too old for the staleness bound, with a call under way.
                _, task = await self.begin(engine, [*prompt, turn + 1, 0])
                engine.close()
                log.drop()
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                raise DroppedError
            if self.draw.random() < 0.1:
                engine.begin_again()
                return await self.attempt_again(engine, log)
        return await self.end(log, answers)

    async def attempt_again(self, engine: AttemptEngine, log: AttemptLog) -> Trajectory:
        """Make the calls of a program that began again because its container was lost."""
        prompt = [1, 2, 3, 0, 0]
        completion = await self.ask(engine, prompt)
        return await self.end(log, [ModelCall(np.array(prompt, np.int32), completion)])

    async def end(self, log: AttemptLog, answers: list[ModelCall]) -> Trajectory:
        texts = tuple("t" for _ in answers)
        trajectory = Trajectory("command", PROBLEM, 0, 0, stitch(answers), Reward(1.0, True, None), texts=texts)
        self.now.calls = []
        return await log.end(trajectory)

    async def begin(self, engine: AttemptEngine, prompt: list[int]) -> tuple[str, asyncio.Task[Completion]]:
        self.num_requests += 1
        name = f"r{self.num_requests}"
        request = Request(name, np.array(prompt, np.int32), SAMPLING, 1)
        task = asyncio.create_task(engine.generate(request))
        self.tasks.append(task)
        while not task.done() and name not in self.pool.open:
            await asyncio.sleep(0.0001)
        while name in self.pool.open and self.draw.random() < 0.4:
            self.pool.pause(name)
            self.maybe_save()
            self.maybe_kill()
        return name, task

    async def ask(self, engine: AttemptEngine, prompt: list[int], *, is_refused: bool = False) -> Completion:
        name, task = await self.begin(engine, prompt)
        if name in self.pool.open:
            end = self.pool.refuse if is_refused else self.pool.finish
            end(name)
        completion = await task
        assert (completion.finish_reason == "error") is is_refused
        self.maybe_save()
        self.maybe_kill()
        return completion

    async def abort(self, engine: AttemptEngine, prompt: list[int]) -> None:
        _, task = await self.begin(engine, prompt)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self.maybe_save()
        self.maybe_kill()

    def maybe_save(self) -> None:
        """Take a checkpoint after a step that trains other attempts."""
        if self.draw.random() < 0.15:
            self.journal.settle(self.now.step, [], set())
            self.now.step += 1
            self.pool.version = self.now.step
            self.save()


@pytest.mark.parametrize("seed", range(40))
async def test_each_known_token_is_counted_once(seed: int, tmp_path: Path) -> None:
    """Half of the runs go on from an older checkpoint now and then."""
    drivers = Drivers(tmp_path, seed, damaged_share=0.3 * (seed % 2))
    for number in range(12):
        await drivers.live()
        account = account_tokens(tmp_path)
        assert account is not None and account.faults == [], number
        assert account.sampled == len(drivers.pool.known), number
        assert account.trained == {step: len(tokens) for step, tokens in drivers.trained.items()} | {
            step: 0 for step in account.trained if step not in drivers.trained
        }
        assert account.num_trained == len(set().union(*drivers.trained.values())), "no token is trained twice"
