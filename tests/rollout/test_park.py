"""Requests that are parked over an update of the weights: what is kept, what is asked again, what comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from transformers import AutoTokenizer

from megarl.cluster.worker_group import WorkerGroup
from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.data.chat import encode, load_tokenizer, render
from megarl.data.dialogue import Dialogue
from megarl.environments.single_turn import SingleTurn
from megarl.rewards.calling import Sample
from megarl.rewards.worker import Scored
from megarl.rollout.groups import GroupSampler
from megarl.rollout.partial import PartialBuffer
from megarl.rollout.parts import joined, rest_of
from megarl.rollout.pool import EnginePool
from megarl.rollout.state import Group, RLState
from megarl.types import Completion, KeptSets, Problem, Request, Reward, SamplingSettings, Trajectory
from tests.rollout.engines import engines

ONE = ParallelConfig(1, 1, 1, 1)
SAMPLING = SamplingSettings(120, 1.0, stop=("e", "a", "t"))
"""Lengths differ by far: each token may be the one that ends a completion."""


@pytest.fixture(scope="module")
def model_path(tiny_model: Callable[..., Path]) -> str:
    return str(tiny_model(family="qwen3_moe", num_layers=2, initializer_range=0.1))


@pytest.fixture(scope="module")
def group(model_path: str, runner: asyncio.Runner) -> Iterator[WorkerGroup]:
    """One engine."""
    context = engines(model_path, 1)
    yield runner.run(context.__aenter__())
    runner.run(context.__aexit__(None, None, None))


class HeldAfter:
    """Ranks of which a pool is held once they have made so many steps, one in each call.

    `sent` are the requests of each call, `parked` is set when the pool is at rest.
    """

    def __init__(self, group: WorkerGroup, steps: Sequence[int]) -> None:
        self._group, self._left, self._count = group, list(steps), 0
        self.sent: list[Request] = []
        self.parked = asyncio.Event()
        self.pool = EnginePool(self, ONE, max_running=32, budget_seconds=0.0)  # type: ignore[arg-type]
        self._holding: asyncio.Task[None] | None = None

    async def ask(self, ranks: Any, method: str, per_rank: Any, *args: Any, budget_seconds: float) -> list[Any]:
        (new, aborts), *_ = per_rank
        self.sent += new
        answers = await self._group.ask(ranks, method, per_rank, *args, budget_seconds=budget_seconds)
        self._count += not aborts
        if self._left and self._count == self._left[0]:
            del self._left[0]
            self._holding = asyncio.create_task(self._hold())
        return answers

    async def _hold(self) -> None:
        await self.pool.hold()
        self.parked.set()


def request(name: str, prompt: Sequence[int], tokens: int, seed: int = 0, stop: tuple[str, ...] = ()) -> Request:
    return Request(name, np.array(prompt, np.int32), SamplingSettings(tokens, 1.0, stop=stop), seed)


async def updated(group: WorkerGroup, scale: float) -> None:
    await group.call("update", scale)


async def whole(group: WorkerGroup, asked: Sequence[Request]) -> dict[str, Completion]:
    """The completions of requests whose tokens all come."""
    pool = EnginePool(group, ONE, max_running=32)
    found = await asyncio.gather(*map(pool.generate, asked))
    return {completion.request_id: completion for completion in found}


async def scored(group: WorkerGroup, asked: Request, completion: Completion) -> NDArray[np.float32]:
    """Log-probs of a completion under the engines' weights."""
    tokens = [*asked.prompt_token_ids.tolist(), *completion.token_ids.tolist()]
    return (await group.call("logprobs", tokens))[0][len(asked.prompt_token_ids) :]


async def asked_of(group: WorkerGroup, tokens: int, count: int) -> list[Request]:
    """Requests all of whose tokens come under the first weights."""
    found = [request(f"{seed}", (7, 11, 13 + seed % 3), tokens, seed) for seed in range(40)]
    lengths = await whole(group, found)
    chosen = [one for one in found if len(lengths[one.request_id].token_ids) == tokens]
    assert len(chosen) >= count
    return chosen[:count]


def test_a_completion_goes_on_under_new_weights_and_each_token_tells_its_own(
    group: WorkerGroup, runner: asyncio.Runner
) -> None:
    async def drive() -> None:
        await updated(group, 1.0)
        asked = await asked_of(group, 48, 3)
        plain = await whole(group, asked)
        ranks = HeldAfter(group, [12])
        generating = [asyncio.create_task(ranks.pool.generate(one)) for one in asked]
        await ranks.parked.wait()
        assert await group.call("unfinished") == [0]
        assert not any(task.done() for task in generating)
        scores = [await scored(group, one, plain[one.request_id]) for one in asked]
        version = int(plain[asked[0].request_id].weight_versions[0])
        await updated(group, 0.97)
        ranks.pool.release()
        found = await asyncio.gather(*generating)
        again = ranks.sent[3:]
        assert [one.sampling.max_new_tokens for one in again] == [36] * 3 and [one.num_kept for one in again] == [
            12
        ] * 3
        assert not {one.seed for one in again} & {one.seed for one in asked}
        differs = 0
        for one, old, completion in zip(asked, scores, found, strict=True):
            assert completion.request_id == one.request_id
            num_new = len(completion.token_ids) - 12
            assert completion.weight_versions.tolist() == [version] * 12 + [version + 1] * num_new
            assert completion.token_ids[:12].tolist() == plain[one.request_id].token_ids[:12].tolist()
            np.testing.assert_allclose(completion.rollout_logprobs[:12], old[:12], atol=1e-5, rtol=0)
            new = await scored(group, one, completion)
            np.testing.assert_allclose(completion.rollout_logprobs[12:], new[12:], atol=1e-5, rtol=0)
            differs += np.abs(new[:12] - old[:12]).max() > 1e-3
            [experts] = await group.call("experts", completion.routed_experts.number)
            assert len(experts) == len(one.prompt_token_ids) + len(completion.token_ids) - 1
        assert differs == 3

    runner.run(drive())


def test_a_completion_parked_twice_asks_for_what_is_left_and_no_more(
    group: WorkerGroup, runner: asyncio.Runner
) -> None:
    async def drive() -> None:
        await updated(group, 1.0)
        [asked] = await asked_of(group, 24, 1)
        ranks = HeldAfter(group, [10, 15, 19])
        generating = asyncio.create_task(ranks.pool.generate(asked))
        for _ in range(3):
            await ranks.parked.wait()
            ranks.parked.clear()
            ranks.pool.release()
        found = await generating
        assert [one.sampling.max_new_tokens for one in ranks.sent] == [24, 14, 9, 5]
        assert len({one.seed for one in ranks.sent}) == 4
        assert found.finish_reason == ("length" if len(found.token_ids) == 24 else "stop")
        np.testing.assert_allclose(found.rollout_logprobs, await scored(group, asked, found), atol=1e-5, rtol=0)

    runner.run(drive())


def test_a_request_that_is_parked_before_its_first_token_is_sampled_as_if_it_was_not(
    group: WorkerGroup, runner: asyncio.Runner
) -> None:
    async def drive() -> None:
        await updated(group, 1.0)
        asked = await asked_of(group, 8, 4)
        pool = EnginePool(group, ONE, max_running=2)
        await pool.hold()
        generating = [asyncio.create_task(pool.generate(one)) for one in asked]
        await asyncio.sleep(0)
        assert await group.call("unfinished") == [0]
        await pool.hold()
        cancelled = generating.pop()
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        pool.release()
        found = await asyncio.gather(*generating)
        plain = await whole(group, asked[:3])
        assert [one.token_ids.tolist() for one in found] == [
            plain[one.request_id].token_ids.tolist() for one in asked[:3]
        ]

    runner.run(drive())


def test_a_stop_string_that_a_park_cuts_in_two_ends_the_completion(
    group: WorkerGroup, runner: asyncio.Runner, model_path: str
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_path)

    async def parked_at_10(asked: Sequence[Request]) -> list[Completion]:
        ranks = HeldAfter(group, [10])
        generating = [asyncio.create_task(ranks.pool.generate(one)) for one in asked]
        await ranks.parked.wait()
        ranks.pool.release()
        return await asyncio.gather(*generating)

    def text_over_the_park(completion: Completion) -> str | None:
        texts = [tokenizer.decode(completion.token_ids[:n], skip_special_tokens=True) for n in range(9, 12)]
        text = texts[2][len(texts[0]) :]
        is_cut = len(texts[0]) < len(texts[1]) < len(texts[2]) and "\ufffd" not in text
        return text if is_cut and texts[2].index(text) == len(texts[0]) else None

    async def drive() -> None:
        await updated(group, 1.0)
        asked = [request(f"{seed}", (7, 11, 13 + seed % 3), 24, seed) for seed in range(32)]
        found = [completion for completion in await parked_at_10(asked) if len(completion.token_ids) > 12]
        stopped = []
        for completion in found:
            if stop := text_over_the_park(completion):
                seed = int(completion.request_id)
                stopped.append((request(f"{seed}", (7, 11, 13 + seed % 3), 24, seed, (stop,)), completion))
        assert stopped
        for (one, plain), completion in zip(stopped, await parked_at_10([one for one, _ in stopped]), strict=True):
            assert completion.request_id == one.request_id and completion.finish_reason == "stop"
            assert completion.token_ids.tolist() == plain.token_ids[:11].tolist()

    runner.run(drive())


def test_nothing_left_to_ask_for_is_length() -> None:
    asked = request("r", (1, 2), 3)
    parts = [
        Completion("r", np.array(ids), np.full(len(ids), -0.5, np.float32), "abort", np.full(len(ids), v, np.int32))
        for ids, v in (([5, 6], 1), ([7], 2))
    ]
    assert rest_of(asked, []) is asked
    rest = rest_of(asked, parts[:1])
    assert (rest.prompt_token_ids.tolist(), rest.sampling.max_new_tokens, rest.num_kept) == ([1, 2, 5, 6], 1, 2)
    assert rest.prompt_token_ids.dtype == np.int32 and rest.seed != asked.seed
    completion = joined(parts)
    assert completion.kept_sets is None
    assert completion.token_ids.tolist() == [5, 6, 7] and completion.weight_versions.tolist() == [1, 1, 2]
    kept = KeptSets(np.array([2], np.int32), np.array([7, 9], np.int32))
    sets = joined([parts[0], replace(parts[1], kept_sets=kept)]).kept_sets
    assert sets is not None and (sets.counts.tolist(), sets.token_ids.tolist()) == ([0, 0, 2], [7, 9])


@dataclass(slots=True)
class Run:
    """The rollout of a run without a trainer: a step's groups, then other weights, as after its reshard."""

    group: WorkerGroup
    sampler: GroupSampler
    problems: Sequence[Problem]
    recipe: Recipe
    state: RLState
    buffer: PartialBuffer
    version: int

    @classmethod
    def begin(
        cls, group: WorkerGroup, tokenizer: Any, version: int, *, stop: Sequence[bool] = (), **rollout: Any
    ) -> Run:
        problems = [problem_of(tokenizer, index) for index in range(30)]
        recipe = Recipe.model_validate(
            {
                "name": "r", "loop": "rl", "model": {"path": "m"}, "data": {"train": "t", "shuffle": False},
                "train": {"prompts_per_step": 3, "samples_per_prompt": 2}, "seed": 7,
                "algorithm": {"oversampling": 2.0, "importance_sampling": "tis"},
                "rollout": {"stragglers": "park", **rollout},
            }
        )  # fmt: skip
        asked = iter(stop)
        sampler = GroupSampler(
            pool=EnginePool(group, ONE, max_running=32, budget_seconds=0.0),
            dialogue=Dialogue(tokenizer),
            score=by_length,
            environment="single_turn",
            make_environment=SingleTurn,
            max_prompt_tokens=100,
            is_abandoned=lambda: next(asked, False),
        )
        state = RLState(recipe.algorithm, has_stragglers=True)
        buffer = PartialBuffer(recipe, problems, sampler, SAMPLING, state)
        return cls(group, sampler, problems, recipe, state, buffer, version)

    async def step(self) -> list[Group]:
        """The groups of a step; afterwards the engines are held."""
        groups = await self.buffer.take(3, self.version)
        await self.sampler.pool.hold()
        return groups

    async def reshard(self) -> None:
        self.version += 1
        await updated(self.group, scale_of(self.version))
        self.sampler.pool.release()


def scale_of(version: int) -> float:
    """How the weights of a version are scaled."""
    return 1.0 - 0.01 * (version % 5)


async def gap(group: WorkerGroup, trajectories: Sequence[Trajectory]) -> float:
    """How far recorded log-probs are from those under the weights that each token's version names."""
    found: list[float] = []
    versions = sorted({int(v) for t in trajectories for v in t.segments[0].weight_versions if v >= 0})
    for version in versions:
        await updated(group, scale_of(version))
        for trajectory in trajectories:
            [segment] = trajectory.segments
            of_version = segment.weight_versions == version
            if of_version.any():
                [logprobs] = await group.call("logprobs", segment.token_ids.tolist())
                found.append(float(np.abs(logprobs - segment.rollout_logprobs)[of_version].max()))
    return max(found)


def problem_of(tokenizer: Any, index: int) -> Problem:
    messages = ({"role": "user", "content": f"Problem {index}."},)
    return Problem(index, messages, tuple(encode(tokenizer, render(tokenizer, messages, generation_prompt=True))), "7")


async def by_length(sample: Sample) -> Scored:
    return Scored(Reward(float(len(sample.completion_text)), True, False))


async def version_of(group: WorkerGroup) -> int:
    """The engines' weight version."""
    pool = EnginePool(group, ONE, max_running=1)
    return int((await pool.generate(request("version", (7, 11), 1))).weight_versions[0])


def names(groups: Sequence[Group]) -> list[int]:
    return [group[0].problem.index for group in groups]


def test_a_step_takes_the_first_groups_and_each_is_given_out_once_within_its_bound(
    group: WorkerGroup, runner: asyncio.Runner, model_path: str, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(model_path)

    async def drive() -> None:
        version = await version_of(group) + 1
        await updated(group, scale_of(version))
        run = Run.begin(group, tokenizer, version)
        given: list[tuple[int, Trajectory]] = []
        num_kept = 0.0
        for number in range(5):
            groups = await run.step()
            assert [[t.group for t in one] for one in groups] == [[n] * 2 for n in range(3)]
            given += [(run.version, trajectory) for one in groups for trajectory in one]
            metrics = run.buffer.metrics()
            num_kept += metrics["partial/kept_tokens"]
            assert len(run.state.started) == metrics["rollout/in_flight"]
            assert len(run.state.started) + len(run.state.waiting) == 3
            assert await group.call("unfinished") == [0]
            if number == 3:
                run.state.save(tmp_path)
                before = RLState(run.recipe.algorithm, has_stragglers=True)
                before.load(tmp_path, run.problems)
                assert before.drawn == run.state.drawn == 15
                assert before.waiting_experts == run.state.waiting_experts
                await run.buffer.close()
                run.buffer = PartialBuffer(run.recipe, run.problems, run.sampler, SAMPLING, before)
                kept = {draw: (one.num_kept, len(one.finished)) for draw, one in run.state.started.items()}
                assert {draw: (one.num_kept, len(one.finished)) for draw, one in before.started.items()} == kept
                run.state = before
            await run.reshard()
        await run.buffer.close()
        used = {(t.problem.index, t.number) for _, t in given}
        left = {*run.state.started, *(one[0].group for one in run.state.waiting)}
        assert len(used) == len(given) == 30 and {index for index, _ in used} | left == set(range(run.state.drawn))
        ages = [version - trajectory.oldest_version for version, trajectory in given]
        assert max(ages) == 1 and num_kept > 0
        spans = [len(set(t.segments[0].weight_versions[t.segments[0].loss_mask].tolist())) for _, t in given]
        assert max(spans) == 2
        assert await gap(group, [trajectory for _, trajectory in given]) <= 1e-5

    runner.run(drive())
