"""Partial rollouts: which groups a step takes, what becomes of the others, and what a checkpoint has of them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.cluster.calls.worker_group import WorkerGroup
from megarl.config import Recipe, SamplingConfig
from megarl.config.parallel import ParallelConfig
from megarl.data.chat import encode_rendered, load_tokenizer, render
from megarl.data.dialogue import Dialogue
from megarl.environments import Environment, Start, Step, Turn
from megarl.environments.single_turn import SingleTurn
from megarl.rewards.scoring.calling import Sample
from megarl.rewards.scoring.reward_process import Scored
from megarl.rollout.attempt_engine import AttemptEngine
from megarl.rollout.buffer import GroupBuffer
from megarl.rollout.buffer_policy import BufferPolicy
from megarl.rollout.groups import GroupSampler
from megarl.rollout.pool import EnginePool
from megarl.rollout.recording import RecordedCall, StartedGroup
from megarl.rollout.source import Source
from megarl.rollout.state import ARRAYS, STATE, TIMES, Group, RLState, problem_lookup
from megarl.types import Completion, ExpertsHandle, Problem, Request, RetainedSets, Reward, SamplingSettings, Trajectory
from tests.child_processes import is_alive
from tests.rewards.pools import pool_of, wait_until
from tests.rollout.engines import engines

ONE = ParallelConfig(1, 1, 1, 1)
SAMPLING = SamplingSettings(120, 1.0, stop=("e", "a", "t"))
"""Lengths differ by far: each token may be the one that ends a completion."""


@pytest.fixture(scope="module")
def model_path(tiny_model: Callable[..., Path]) -> str:
    return str(tiny_model(family="qwen3_moe", num_layers=2, initializer_range=0.1))


@pytest.fixture(scope="module")
async def group(model_path: str, distributed_tier: None) -> AsyncIterator[WorkerGroup]:
    """One engine, which tells what top-p kept."""
    async with engines(model_path, 1, top_k=5) as made:
        yield made


def problem_of(tokenizer: Any, index: int) -> Problem:
    messages = ({"role": "user", "content": f"Problem {index}."},)
    prompt = encode_rendered(tokenizer, render(tokenizer, messages, generation_prompt=True))
    return Problem(index, messages, tuple(prompt), f"{index}")


async def by_length(sample: Sample) -> Scored:
    return Scored(Reward(float(len(sample.completion_text)), True, False))


@dataclass(slots=True)
class Run:
    """The rollout of a run without a trainer: a step's groups, then other weights, as after its reshard."""

    group: WorkerGroup
    sampler: GroupSampler
    problems: Sequence[Problem]
    recipe: Recipe
    state: RLState
    buffer: GroupBuffer
    version: int

    @classmethod
    async def begin(
        cls,
        group: WorkerGroup,
        model_path: str,
        make_environment: Callable[[], Environment] = SingleTurn,
        *,
        score: Callable[[Sample], Awaitable[Scored]] = by_length,
        sampling: SamplingSettings = SAMPLING,
        is_abandoned: Callable[[], bool] = lambda: False,
        **rollout: Any,
    ) -> Run:
        tokenizer = load_tokenizer(model_path)
        problems = [replace(problem_of(tokenizer, index), source="test") for index in range(30)]
        fields = {name: value for name, value in asdict(sampling).items() if name in SamplingConfig.model_fields}
        recipe = Recipe.model_validate(
            {
                "name": "r", "loop": "rl", "model": {"path": "m"}, "data": {"train": "t", "shuffle": False},
                "train": {"prompts_per_step": 3, "samples_per_prompt": 2}, "seed": 7,
                "algorithm": {"oversampling": 2.0, "importance_sampling": "tis"},
                "rollout": {"stragglers": "park", "sampling": fields, **rollout},
            }
        )  # fmt: skip
        sampler = GroupSampler(
            pool=EnginePool(group, ONE, max_running=32, budget_seconds=0.0),
            dialogue=Dialogue(tokenizer),
            score=score,
            environment="test",
            make_environment=make_environment,
            max_prompt_tokens=100,
            max_turns=3,
            truncated_turn="close",
            is_abandoned=is_abandoned,
        )
        state = RLState(recipe.algorithm)
        buffer = GroupBuffer(
            recipe, [Source("test", 1.0, recipe, sampler, problems)], state, BufferPolicy.from_recipe(recipe)
        )
        asked = Request("version", np.array([7, 11], np.int32), SamplingSettings(1, 1.0), 0)
        version = int((await sampler.pool.generate(asked)).weight_versions[0])
        run = cls(group, sampler, problems, recipe, state, buffer, version)
        await run.reshard()
        return run

    async def step(self) -> list[Group]:
        """The groups of a step; afterwards the engines are held and have nothing."""
        groups = await self.buffer.take(3, self.version)
        await self.sampler.pool.pause()
        assert await self.group.call("unfinished") == [0]
        return groups

    async def reshard(self) -> None:
        self.version += 1
        await self.group.call("update", scale_of(self.version))
        self.sampler.pool.resume()

    async def resume(self, folder: Path) -> None:
        """Go on from a checkpoint, in place of what is under way; it has all of that."""
        self.state.save(folder / "before")
        loaded = RLState(self.recipe.algorithm)
        loaded.load(folder / "before", problem_lookup({"test": self.problems}))
        await self.buffer.aclose()
        loaded.save(folder / "after")
        for name in (STATE, ARRAYS, TIMES):
            assert (folder / "before" / name).read_bytes() == (folder / "after" / name).read_bytes()
        source = Source("test", 1.0, self.recipe, self.sampler, self.problems)
        self.buffer = GroupBuffer(self.recipe, [source], loaded, BufferPolicy.from_recipe(self.recipe))
        self.state = loaded


def scale_of(version: int) -> float:
    """How the weights of a version are scaled."""
    return 1.0 - 0.01 * (version % 5)


async def mismatches(group: WorkerGroup, trajectories: Sequence[Trajectory]) -> list[float]:
    """By how much recorded log-probs exceed those under the weights that each token's version names."""
    found: list[float] = []
    versions = sorted({int(v) for t in trajectories for v in versions_of(t)})
    for version in versions:
        await group.call("update", scale_of(version))
        for trajectory in trajectories:
            [segment] = trajectory.segments
            of_version = segment.weight_versions == version
            if of_version.any():
                [logprobs] = await group.call("logprobs", segment.token_ids.tolist())
                found += (segment.rollout_logprobs - logprobs)[of_version].tolist()
    return found


async def mismatch(group: WorkerGroup, trajectories: Sequence[Trajectory]) -> float:
    """How far recorded log-probs are from those under the weights that each token's version names."""
    return max(map(abs, await mismatches(group, trajectories)))


def versions_of(trajectory: Trajectory) -> list[int]:
    [segment] = trajectory.segments
    return segment.weight_versions[segment.loss_mask].tolist()


def draws(groups: Sequence[Group]) -> list[int]:
    return [group[0].problem.index for group in groups]


async def test_a_step_takes_the_first_groups_and_each_is_given_out_once_within_its_bound(
    group: WorkerGroup, model_path: str, tmp_path: Path
) -> None:
    run = await Run.begin(group, model_path)
    given: list[tuple[int, Trajectory]] = []
    num_retained = 0.0
    for number in range(5):
        groups = await run.step()
        assert [[t.group for t in one] for one in groups] == [[n] * 2 for n in range(3)]
        given += [(run.version, trajectory) for one in groups for trajectory in one]
        metrics = run.buffer.metrics()
        num_retained += metrics["staleness/old_tokens"]
        assert len(run.state.started) == metrics["rollout/in_flight"]
        assert len(run.state.started) + len(run.state.waiting) == 3
        if number == 3:
            assert run.state.started and run.state.drawn == 15
            (tmp_path / "before").mkdir()
            (tmp_path / "after").mkdir()
            experts = run.state.waiting_experts
            await run.resume(tmp_path)
            assert run.state.waiting_experts == experts
        await run.reshard()
    await run.buffer.aclose()
    used = {(t.problem.index, t.number) for _, t in given}
    left = {*run.state.started, *(one[0].group for one in run.state.waiting)}
    assert len(used) == len(given) == 30 and {index for index, _ in used} | left == set(range(run.state.drawn))
    ages = [version - trajectory.oldest_version for version, trajectory in given]
    assert max(ages) == 1 and num_retained > 0
    assert max(len(set(versions_of(t))) for _, t in given) == 2
    assert not any(t.restarts for _, t in given)
    assert await mismatch(group, [trajectory for _, trajectory in given]) <= 1e-5


class Talk(SingleTurn):
    """Three turns."""

    async def step(self, turn: Turn) -> Step:
        return Step(done=True) if turn.number == 2 else Step(({"role": "user", "content": "Go on."},))


def goes_on_in_a_later_turn(trajectory: Trajectory) -> bool:
    """Whether a turn after the first was begun under one version and ended under another."""
    [segment] = trajectory.segments
    return any(len({*segment.weight_versions[segment.turns == turn].tolist()}) == 2 for turn in (1, 2))


TOP_P = 0.8


@pytest.mark.parametrize("top_p", [1.0, TOP_P])
async def test_attempts_of_several_turns_go_on_over_reshards_and_a_resume(
    group: WorkerGroup, model_path: str, tmp_path: Path, top_p: float
) -> None:
    sampling = SamplingSettings(40, 1.0, top_p=top_p, stop=("e", "a"))
    run = await Run.begin(group, model_path, Talk, sampling=sampling)
    given: list[Trajectory] = []
    resumed: set[int] = set()
    while not resumed & {t.problem.index for t in given} or not any(goes_on_in_a_later_turn(t) for t in given):
        given += [trajectory for one in await run.step() for trajectory in one]
        # Which attempts are under way depends on the machine's pace: not every step leaves one in a later turn.
        in_later_turns = {n for n, g in run.state.started.items() if any(len(c) > 1 for c in g.calls.values())}
        if in_later_turns and not resumed:
            (tmp_path / "before").mkdir()
            (tmp_path / "after").mkdir()
            await run.resume(tmp_path)
            resumed = in_later_turns
        await run.reshard()
        assert len(given) < 60
    await run.buffer.aclose()
    assert len({(t.problem.index, t.number) for t in given}) == len(given) and not any(t.restarts for t in given)
    assert all(t.ended in ("done", "length") for t in given)
    assert all(versions_of(t) == sorted(versions_of(t)) for t in given)
    if top_p == 1.0:
        assert await mismatch(group, given) <= 1e-5
        return
    for trajectory in given:
        assert_in_retained_sets(trajectory)
    # What was sampled from had TOP_P of all at least, under the weights of each token.
    found = await mismatches(group, given)
    assert min(found) >= -1e-5 and 0.01 < max(found) <= -math.log(TOP_P) + 1e-5


def assert_in_retained_sets(trajectory: Trajectory) -> None:
    """Each token that was sampled, and no other, has a set, and is in it."""
    [segment] = trajectory.segments
    sets = segment.retained_sets
    assert sets is not None and ((sets.counts > 0) == segment.loss_mask).all()
    of_tokens = np.split(sets.token_ids, np.cumsum(sets.counts)[:-1])
    pairs = zip(segment.token_ids[segment.loss_mask], [kept for kept in of_tokens if len(kept)], strict=True)
    assert all(token in kept for token, kept in pairs)


async def test_recorded_calls_are_repeated_until_an_attempt_asks_for_something_else(group: WorkerGroup) -> None:
    def request(name: str, *prompt: int) -> Request:
        return Request(name, np.array(prompt, np.int32), SamplingSettings(4, 1.0), 0)

    engines = EnginePool(group, ONE, max_running=4)
    calls: list[RecordedCall] = []
    first = AttemptEngine(engines, calls)
    found = [await first.generate(request("a.0", 7)), await first.generate(request("a.1", 7, 8))]
    await first.generate(request("a.2", 7, 9))
    again = AttemptEngine(engines, calls)
    # In another order, as from concurrent calls of an agent, and under another name.
    assert await again.generate(request("b.0", 7, 8)) is found[1]
    assert await again.generate(request("b.1", 7)) is found[0] and not again.is_restarted
    await again.generate(request("b.2", 7))
    assert again.is_restarted and [call.prompt_token_ids.tolist() for call in calls] == [[7], [7, 8], [7]]
    again.close()
    with pytest.raises(asyncio.CancelledError):
        await again.generate(request("b.3", 7))


def test_a_checkpoint_has_what_is_parked_as_it_was(tmp_path: Path) -> None:
    problem = Problem(0, (), (1, 2), "7")
    started = StartedGroup(3, problem)
    for number, ids in enumerate(([5, 6], [7])):
        completion = Completion(
            f"draw 3.1.{number}",
            np.array(ids),
            np.full(len(ids), -0.5, np.float32),
            "abort" if number else "stop",
            np.full(len(ids), 4 + number, np.int32),
            ExpertsHandle(number, 9),
            RetainedSets(np.array([2] * len(ids), np.int32), np.array([8, *ids] * len(ids), np.int32)[: 2 * len(ids)]),
            expert_digests=np.arange(2, dtype=np.uint32) + number,
        )
        call = RecordedCall(np.array([1, 2, *[5, 6][:number]], np.int32), [completion], is_done=not number)
        started.calls.setdefault(1, []).append(call)
    config = Recipe.model_validate(
        {"name": "r", "loop": "rl", "model": {"path": "m"}, "data": {"train": "t"}}
    ).algorithm
    state = RLState(config)
    state.started[3], state.drawn = started, 4
    for name in ("once", "twice"):
        (tmp_path / name).mkdir()
        state.save(tmp_path / name)
        state = RLState(config)
        state.load(tmp_path / name, problem_lookup({problem.source: [problem]}))
    assert all(
        (tmp_path / "once" / n).read_bytes() == (tmp_path / "twice" / n).read_bytes() for n in (STATE, ARRAYS, TIMES)
    )
    assert (state.started[3].oldest_version(9), state.started[3].num_sampled) == (4, 3)
    assert state.waiting_experts == [ExpertsHandle(0, 9), ExpertsHandle(1, 9)]
    [_, parked] = state.started[3].calls[1]
    kept = parked.parts[0].retained_sets
    assert not parked.is_done and kept is not None and kept.token_ids.tolist() == [8, 7]
    digests = parked.parts[0].expert_digests
    assert digests is not None and digests.dtype == np.uint32 and digests.tolist() == [1, 2]


class Slow(SingleTurn):
    """Two turns of problem 0, with a wait for a gate between them."""

    def __init__(self, gate: asyncio.Event) -> None:
        self._gate = gate

    async def reset(self, problem: Problem, seed: int) -> Start:
        self._is_slow = problem.index == 0
        return await super().reset(problem, seed)

    async def step(self, turn: Turn) -> Step:
        if not self._is_slow or turn.number:
            return Step(done=True)
        await self._gate.wait()
        return Step(({"role": "user", "content": "Go on."},))


async def test_a_group_that_may_grow_no_older_is_waited_for(group: WorkerGroup, model_path: str) -> None:
    gate = asyncio.Event()

    def is_abandoned() -> bool:
        """Asked while a step waits: the gate opens once it does so for the slow group alone."""
        if run.version > first and len(run.state.waiting) >= 3:
            gate.set()
        return False

    run = await Run.begin(group, model_path, lambda: Slow(gate), is_abandoned=is_abandoned)
    first = run.version
    assert 0 not in draws(await run.step()) and run.buffer.metrics()["staleness/waited_seconds"] == 0
    await run.reshard()
    groups = await run.step()
    metrics = run.buffer.metrics()
    assert draws(groups)[0] == 0 and metrics["staleness/waited_seconds"] > 0 and metrics["staleness/dropped"] == 0
    for trajectory in groups[0]:
        assert {first, first + 1} == set(versions_of(trajectory))
    await run.buffer.aclose()
    run.sampler.pool.resume()


async def test_a_group_that_grew_too_old_is_dropped_and_another_prompt_drawn(
    group: WorkerGroup, model_path: str
) -> None:
    run = await Run.begin(group, model_path, lambda: Slow(asyncio.Event()), on_stale="drop")
    dropped, given = [], []
    for _ in range(3):
        given += draws(await run.step())
        metrics = run.buffer.metrics()
        dropped.append(metrics["staleness/dropped"])
        assert 0 not in given and len(run.state.started) + len(run.state.waiting) == 3
        await run.reshard()
    assert dropped[:2] == [0, 0] and dropped[2] >= 1 and 0 not in run.state.started
    assert len(set(given)) == 9 and run.state.drawn == 12 + sum(dropped)
    await run.buffer.aclose()


JUDGE = """
import os, time
from pathlib import Path

def judge(completion_text, answer):
    if answer == "4":
        with open({path!r}, "a") as file:
            file.write(f"{{os.getpid()}} ")
        time.sleep(600)
    return 1.0
"""


class Deaf(SingleTurn):
    """Problem 3 does not heed that it is cancelled, problem 1 has no reward that is a number."""

    def __init__(self, gate: asyncio.Event) -> None:
        self._gate = gate

    async def reset(self, problem: Problem, seed: int) -> Start:
        self._index = problem.index
        return await super().reset(problem, seed)

    async def step(self, turn: Turn) -> Step:
        while self._index == 3 and not self._gate.is_set():
            with suppress(asyncio.CancelledError):
                await self._gate.wait()
        return Step(done=True, reward=float("nan") if self._index == 1 else None)


async def test_case_n8_a_surplus_that_hangs_is_given_up_at_once(
    group: WorkerGroup, model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A judge sleeps, an environment ignores its cancellation, another gives NaN: the step begins all the same."""
    (tmp_path / "judges.py").write_text(JUDGE.format(path=str(tmp_path / "pids")))
    monkeypatch.chdir(tmp_path)

    def pids() -> list[int]:
        path = tmp_path / "pids"
        return [int(pid) for pid in path.read_text().split()] if path.exists() else []

    gate = asyncio.Event()
    with pool_of("judges.py:judge", num_workers=3, wall_timeout_seconds=600.0) as judges:

        async def score(sample: Sample) -> Scored:
            """The others are judged once two judges sleep."""
            while sample.answer != "4" and len(pids()) < 2:
                await asyncio.sleep(0.01)
            return await judges.score(sample)

        run = await Run.begin(group, model_path, lambda: Deaf(gate), score=score, stragglers="abort")
        try:
            # Seven processes import the judge meanwhile, on cores shared with other tests.
            async with asyncio.timeout(120.0):
                groups = await run.step()
        except TimeoutError:
            # The environment ignores its cancellation: it would hold the end of the tests up.
            gate.set()
            done = {draw: sorted(group.finished) for draw, group in run.state.started.items()}
            raise AssertionError(
                f"no step in 120 s: judges {pids()} sleep, attempts {done} ended, {len(run.state.waiting)} groups wait"
            ) from None
        assert set(draws(groups)) <= {0, 1, 2, 5}
        assert run.buffer.metrics()["rollout/aborted"] == 3 and not run.state.started and not run.state.waiting
        without = [t for one in groups for t in one if t.reward is None]
        assert {t.problem.index for t in without} <= {1} and all("nan" in (t.failure or "") for t in without)
        await asyncio.to_thread(wait_until, lambda: not any(map(is_alive, pids())))
        await run.reshard()
        fresh = await run.step()
        assert all(set(versions_of(t)) == {run.version} for one in fresh for t in one)
        run.sampler.pool.resume()
        gate.set()
        await run.buffer.aclose()
