"""Collecting groups: which are kept, what waits, where it ends, and that a resumed run goes on alike."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from megarl.config import AlgorithmConfig, Recipe
from megarl.data.token_batch import TokenBatch
from megarl.rollout.attempt import Task
from megarl.rollout.buffer import GroupBuffer
from megarl.rollout.buffer_policy import passes_filter
from megarl.rollout.source import Source
from megarl.rollout.state import TIMES, Group, RLState, flatten
from megarl.rollout.stitch import ModelCall, stitch
from megarl.types import (
    Completion,
    ConfigError,
    ExpertsHandle,
    MegarlError,
    Problem,
    RetainedSets,
    Reward,
    Segment,
    Trajectory,
)

PROBLEMS = [Problem(index, (), (index, 5), f"{index}", source="single_turn") for index in range(10)]
SAMPLES = 4


@dataclass
class Students:
    """Answer as `right` says of each problem: so many of four samples; a routed expert is asked for where one is."""

    right: dict[int, int]
    seeds: list[str] = field(default_factory=list)
    is_judged: bool = True

    @property
    def pool(self) -> Students:
        return self

    async def wait_until_drained(self) -> None:
        pass

    def is_abandoned(self) -> bool:
        return False

    def task(self, problem: Problem, group: int, number: int, seed: str, sampling: Any, *, prefix: str = "") -> Task:
        return Task("students", problem, group, number, seed, sampling)

    async def attempt(self, task: Task, pool: object, before_score: object) -> Trajectory:
        problem, number, seed = task.problem, task.number, task.seed
        if not self.seeds or self.seeds[-1] != seed:
            self.seeds.append(seed)
        return replace(
            self.one(problem, task.group, number, f"{seed} {problem.index} {number}"),
            environment=problem.source,
            temperature=task.sampling.temperature,
        )

    def one(self, problem: Problem, group: int, number: int, name: str) -> Trajectory:
        is_right = number < self.right[problem.index]
        segments = stitch([ModelCall(np.array(problem.prompt_token_ids, np.int32), self.completion(name))])
        reward = Reward(10.0 * is_right, True, is_right if self.is_judged else None)
        return Trajectory(
            "single_turn", problem, group, number, segments, reward, texts=("text",), messages=((*problem.messages,),)
        )

    def completion(self, name: str) -> Completion:
        random = np.random.default_rng(sum(name.encode()))
        size = int(random.integers(1, 6))
        logprobs = -random.random(size, dtype=np.float32)
        routed = ExpertsHandle(int(random.integers(0, 8)), int(random.integers(0, 99)) << 20)
        counts = random.integers(0, 5, size).astype(np.int32)
        kept = RetainedSets(counts, random.integers(0, 99, counts.sum()).astype(np.int32)) if counts.any() else None
        versions = np.full(size, 3, np.int32)
        return Completion(name, random.integers(0, 99, size), logprobs, "stop", versions, routed, kept)


@dataclass
class Collected:
    """A buffer and the state it draws into."""

    buffer: GroupBuffer
    state: RLState
    students: Students

    def take(self) -> list[Group]:
        return asyncio.run(self.buffer.take(3, weight_version=3))

    def take_with_logprobs(self, trainer: Trainer) -> list[Group]:
        wants_entropies = self.buffer._recipe.algorithm.entropy_top_share is not None
        forward = trainer.forward_with_entropies if wants_entropies else trainer.forward
        return asyncio.run(self.buffer.add_old_logprobs(self.take(), forward))

    def load(self, folder: Path) -> int:
        return self.buffer.load(folder)


def filtered(dynamic_sampling: tuple[float, float], metric: Any = None) -> AlgorithmConfig:
    return AlgorithmConfig(dynamic_sampling=dynamic_sampling, dynamic_sampling_metric=metric)


def collection(
    right: dict[int, int], *, updates: int = 1, epochs: int = 1, data: dict[str, Any] | None = None, **algorithm: Any
) -> Collected:
    train = {
        "prompts_per_step": 3, "samples_per_prompt": SAMPLES, "updates_per_step": updates, "epochs_per_step": epochs,
    }  # fmt: skip
    recipe = Recipe.model_validate(
        {
            "name": "r", "loop": "rl", "model": {"path": "m"}, "data": {"train": "t", "shuffle": False, **(data or {})},
            "train": train, "algorithm": algorithm, "seed": 7,
        }
    )  # fmt: skip
    students, state = Students(right), RLState(recipe.algorithm)
    return Collected(GroupBuffer(recipe, sources_of(recipe, students), state), state, students)


def sources_of(recipe: Recipe, students: Students) -> list[Source]:
    """A source for each of the recipe's, all with the same problems but for their source."""
    return [
        Source(of.name, of.weight, of.recipe, cast(Any, students), [replace(p, source=of.name) for p in PROBLEMS])
        for of in recipe.sources
    ]


def step(collected: Collected) -> tuple[list[int], list[int], dict[str, float]]:
    """Problems that are trained on and that were sampled, group by group; metrics but those of time."""
    groups, buffer = collected.take(), collected.buffer
    assert [[t.group for t in group] for group in groups] == [[number] * SAMPLES for number in range(3)]
    sampled = [t.problem.index for t in buffer.sampled[::SAMPLES]]
    metrics = buffer.metrics()
    assert metrics.pop("time/rollout_late_rewards_seconds") >= 0
    return [group[0].problem.index for group in groups], sampled, metrics


def test_without_a_filter_a_step_is_a_batch_of_the_data() -> None:
    collected = collection(dict.fromkeys(range(10), 0))
    first, second = step(collected), step(collected)
    assert first == ([0, 1, 2], [0, 1, 2], {"data/epoch": 0.3})
    assert second == ([3, 4, 5], [3, 4, 5], {"data/epoch": 0.6})
    assert collected.students.seeds == ["7 1", "7 2"]


@dataclass
class Attempts(Students):
    """Students that note the name from which an attempt's random numbers are drawn, in the order of their starts."""

    names: list[str] = field(default_factory=list)

    async def attempt(self, task: Task, pool: object, before_score: object) -> Trajectory:
        # Of the sampling seed; that of the environment's start has the word reset in addition (`attempt`).
        self.names.append(f"{task.seed} | {task.problem.index} | {task.number}")
        return await super().attempt(task, pool, before_score)


def run_of(count: int, prompts: int, *, is_mixed: bool, is_filtered: bool) -> Collected:
    """A run over `count` problems, in a mixture of this source and a larger one with the same numbers."""
    algorithm = {"dynamic_sampling": (0.0, 1.0), "oversampling": 1.5, "max_attempts": 50} if is_filtered else {}
    sections: dict[str, Any] = {"data": {"train": "t"}}
    if is_mixed:
        sections = {"mixture": {"large": {"data": {"train": "t"}}, "small": {"weight": 2, "data": {"train": "t"}}}}
    recipe = Recipe.model_validate(
        {
            "name": "r", "loop": "rl", "model": {"path": "m"}, "algorithm": algorithm, **sections,
            "train": {"prompts_per_step": prompts, "samples_per_prompt": 2},
        }
    )  # fmt: skip
    attempts, state = Attempts({index: 1 + index % 2 for index in range(10)}), RLState(recipe.algorithm)
    sources = [
        replace(source, problems=source.problems[: 10 if source.name == "large" else count])
        for source in sources_of(recipe, attempts)
    ]
    return Collected(GroupBuffer(recipe, sources, state), state, attempts)


@pytest.mark.parametrize("is_filtered", [False, True], ids=["", "filtered"])
@pytest.mark.parametrize("is_mixed", [False, True], ids=["", "mixed"])
@pytest.mark.parametrize(("count", "prompts"), [(1, 4), (3, 7), (5, 4)])
def test_no_two_attempts_of_a_run_draw_the_same_random_numbers(
    count: int, prompts: int, is_mixed: bool, is_filtered: bool, tmp_path: Path
) -> None:
    """Data smaller than a step, ends of epochs, small sources; a resumed or forked run goes on with the same names."""

    def take(run: Collected) -> list[tuple[str, int, list[int]]]:
        groups = asyncio.run(run.buffer.take(prompts, weight_version=3))
        return [(t.problem.source, t.problem.index, t.segments[0].token_ids.tolist()) for t in flatten(groups)]

    def make() -> Collected:
        return run_of(count, prompts, is_mixed=is_mixed, is_filtered=is_filtered)

    if is_filtered and count == 1:
        count = 2  # a single problem that the filter refuses would starve the run
    whole = make()
    for _ in range(4):
        take(whole)
    names = cast(Attempts, whole.students).names
    assert len(set(names)) == len(names)
    whole.state.save(tmp_path)
    num_before = len(names)
    expected = [take(whole) for _ in range(3)]
    assert len(set(names)) == len(names)
    resumed = make()
    resumed.load(tmp_path)
    assert take(resumed) == expected[0]
    take(resumed)
    # A step that a signal ends is drawn again, with the same names.
    resumed.state.forget_step()
    assert [take(resumed) for _ in range(2)] == expected[1:]
    again = cast(Attempts, resumed.students).names
    assert set(again) == set(names[num_before:])


def measured(attempts: int, kept: float, epoch: float) -> dict[str, float]:
    return {"rollout/prompt_batches": attempts, "rollout/groups_passing_filter": kept, "data/epoch": epoch}


MIXED = {0: 4, 1: 1, 2: 0, 3: 2, 4: 4, 5: 3, 6: 1, 7: 1, 8: 1, 9: 0}


def test_groups_that_teach_nothing_are_replaced_and_what_is_left_over_waits() -> None:
    collected = collection(MIXED, dynamic_sampling=(0.0, 1.0))
    assert step(collected) == ([1, 3, 5], [0, 1, 2, 3, 4, 5], measured(2, 0.5, 0.6))
    assert step(collected) == ([6, 7, 8], [6, 7, 8], measured(1, 1.0, 0.9))
    assert step(collected)[0] == [1, 3, 5]  # of the next epoch

    collected = collection(MIXED, dynamic_sampling=(0.0, 1.0), oversampling=3.0)
    assert step(collected) == ([1, 3, 5], list(range(9)), measured(1, 6 / 9, 0.9))
    assert step(collected) == ([6, 7, 8], [], measured(0, 0.0, 0.9))


async def test_a_synchronous_step_waits_until_the_engines_are_idle() -> None:
    """An agent may end its attempt while a request of its own still runs."""
    collected = collection(MIXED)
    asked, drained = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        asked.set()
        await drained.wait()

    collected.students.wait_until_drained = wait  # type: ignore[method-assign]
    take = asyncio.create_task(collected.buffer.take(3, weight_version=3))
    await asyncio.wait({take, asyncio.create_task(asked.wait())}, return_when=asyncio.FIRST_COMPLETED)
    assert not take.done()
    drained.set()
    assert len(await take) == 3


@pytest.mark.parametrize(("right", "is_taught"), [(0, False), (1, False), (2, True), (3, False), (4, False)])
def test_the_bounds_are_excluded(right: int, is_taught: bool) -> None:
    group = [Students({0: right}).one(PROBLEMS[0], 0, number, f"{number}") for number in range(SAMPLES)]
    assert passes_filter(group, filtered((0.25, 0.75))) == is_taught


def test_attempts_that_were_not_scored_do_not_count_as_wrong() -> None:
    group = [Students({0: 2}).one(PROBLEMS[0], 0, number, f"{number}") for number in range(SAMPLES)]
    right = [t for t in group if t.reward is not None and t.reward.answer_correct]
    unscored = [replace(t, reward=None) for t in group if t not in right]
    assert right and not passes_filter([*right, *unscored], filtered((0.0, 1.0)))
    assert not passes_filter(unscored, filtered((-1.0, 1.0)))


@pytest.mark.parametrize(
    ("scores", "metric", "low", "passes"),
    [
        ((0.2, 0.7, 0.9, 0.4), None, 0.0, True),
        ((0.5, 0.5, 0.5, 0.5), None, 0.0, False),
        ((0.5, 0.5, 0.5, 0.6), None, 0.2, False),
        ((3.0, -8.0, 0.5, 0.6), "reward", 10.0, True),
    ],
)
def test_continuous_rewards_pass_by_their_spread(
    scores: tuple[float, ...], metric: str | None, low: float, passes: bool
) -> None:
    made = [Students({0: 2}).one(PROBLEMS[0], 0, number, f"{number}") for number in range(SAMPLES)]
    group = [replace(t, reward=Reward(score, True, None)) for t, score in zip(made, scores, strict=True)]
    assert passes_filter(group, filtered((low, 1.0), metric)) == passes


def test_the_metric_may_be_chosen_against_the_verdicts() -> None:
    made = [Students({0: 2}).one(PROBLEMS[0], 0, number, f"{number}") for number in range(SAMPLES)]
    all_right = [replace(t, reward=Reward(number, True, True)) for number, t in enumerate(made)]
    assert not passes_filter(all_right, filtered((0.0, 1.0)))
    assert passes_filter(all_right, filtered((0.0, 1.0), "reward"))


@pytest.mark.parametrize(
    ("field", "algorithm", "data"),
    [
        ("algorithm.dynamic_sampling_metric", {"dynamic_sampling": (0, 1), "dynamic_sampling_metric": "accuracy"}, {}),
        ("algorithm.dynamic_sampling = [0.2, 0.8]", {"dynamic_sampling": (0.2, 0.8)}, {}),
        ("algorithm.advantage = pass_at_k", {"advantage": "pass_at_k"}, {}),
        ("data.curriculum.band", {}, {"curriculum": {"band": [0.1, 0.9]}}),
    ],
)
def test_what_needs_verdicts_ends_a_run_at_the_first_group_without(
    field: str, algorithm: dict[str, Any], data: dict[str, Any]
) -> None:
    collected = collection(MIXED, data=data, **algorithm)
    collected.students.is_judged = False
    with pytest.raises(MegarlError, match="judges_answer") as caught:
        collected.take()
    assert field in str(caught.value)


def test_advice_fits_the_metric() -> None:
    collected = collection(
        dict.fromkeys(range(10), 4), dynamic_sampling=(0, 1), dynamic_sampling_metric="reward", max_attempts=1
    )
    with pytest.raises(MegarlError, match="rewards differ") as caught:
        collected.take()
    assert "in 3 of the last 3" in str(caught.value) and "of another difficulty" not in str(caught.value)


def test_a_step_that_nothing_fills_ends_the_run() -> None:
    collected = collection(MIXED | {1: 0, 3: 4, 5: 0, 6: 4, 7: 0}, dynamic_sampling=(0.0, 1.0), max_attempts=3)
    with pytest.raises(MegarlError, match=r"9 prompts gave 1 of 3 groups .* Use problems of another"):
        collected.take()


def test_a_resumed_run_goes_on_alike(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "dynamic_sampling": (0.0, 1.0),
        "oversampling": 2.0,
        "kl_coefficient": 0.5,
        "kl_target": 1.0,
    }
    first = collection(MIXED, **settings)
    first.take()
    first.state.kl_coefficient = 0.125
    first.state.save(tmp_path)
    second = collection(MIXED, **settings)
    second.load(tmp_path)
    assert second.state.kl_coefficient == 0.125 and second.state.drawn == first.state.drawn
    constant = collection(MIXED, kl_coefficient=0.25)
    constant.load(tmp_path)
    assert constant.state.kl_coefficient == 0.25, "a constant coefficient is the recipe's"
    for _ in range(3):
        assert plain(first.take()) == plain(second.take())


def mixed() -> Collected:
    curriculum = {"band": [0.3, 0.8], "outside": 0.2, "memory": 0.0}
    recipe = Recipe.model_validate(
        {
            "name": "r", "loop": "rl", "model": {"path": "m"},
            "train": {"prompts_per_step": 3, "samples_per_prompt": SAMPLES},
            "mixture": {
                "often": {"weight": 3, "data": {"train": "t", "shuffle": False}},
                "rarely": {
                    "data": {"train": "t", "curriculum": curriculum}, "rollout": {"sampling": {"temperature": 0.5}},
                },
            },
        }
    )  # fmt: skip
    students, state = Students(MIXED), RLState(recipe.algorithm)
    return Collected(GroupBuffer(recipe, sources_of(recipe, students), state), state, students)


def test_sources_are_drawn_by_weight_each_in_its_own_order_and_with_its_own_sampling() -> None:
    collected = mixed()
    taken = [t for _ in range(12) for group in collected.take() for t in group[:1]]
    by_source = {name: [t for t in taken if t.problem.source == name] for name in ("often", "rarely")}
    assert (len(by_source["often"]), len(by_source["rarely"])) == (27, 9)
    for end in range(1, 37):
        assert abs(sum(t.problem.source == "often" for t in taken[:end]) - 0.75 * end) <= 1
    assert [t.problem.index for t in by_source["often"]] == [number % 10 for number in range(27)]
    assert {(t.environment, t.temperature) for t in taken} == {("often", 1.0), ("rarely", 0.5)}
    assert set(collected.students.seeds) >= {"0 1 often", "0 12 often"}


def test_a_mixture_with_a_curriculum_goes_on_alike_after_a_resume_and_a_step_that_is_forgotten(tmp_path: Path) -> None:
    first = mixed()
    for _ in range(40):
        first.take()
    first.state.save(tmp_path)
    second = mixed()
    second.load(tmp_path)
    assert second.state.positions == first.state.positions
    expected = [plain(first.take()) for _ in range(3)]
    assert [plain(second.take()) for _ in range(2)] == expected[:2]
    second.take()
    second.state.forget_step()
    assert plain(second.take()) == expected[2]
    metrics = second.buffer.metrics()
    # Of ten problems one has a solve rate of 2/4, one of 3/4; all have been tried.
    assert metrics["environment/rarely/curriculum/known"] == 1.0
    assert metrics["environment/rarely/curriculum/in_band"] == pytest.approx(0.2)
    assert metrics["environment/rarely/curriculum/skipped"] > 0


def test_a_source_that_is_gone_while_its_samples_wait_is_named(tmp_path: Path) -> None:
    first = collection(MIXED, dynamic_sampling=(0.0, 1.0), oversampling=3.0)
    first.take()
    first.state.save(tmp_path)
    second = mixed()
    with pytest.raises(ConfigError, match=r"mixture\.single_turn: the checkpoint has samples for problem"):
        second.load(tmp_path)


def test_groups_of_several_attempts_are_told_apart() -> None:
    collected = collection(MIXED, dynamic_sampling=(0.0, 1.0))
    collected.take()
    assert [t.group for t in collected.buffer.sampled] == [group for group in range(6) for _ in range(SAMPLES)]


def test_answers_that_wait_survive_in_every_bit(tmp_path: Path) -> None:
    first = collection(MIXED, dynamic_sampling=(0.0, 1.0), oversampling=3.0)
    first.take_with_logprobs(Trainer())
    assert len(first.state.waiting) == 3
    waiting = first.state.waiting
    metrics = {"tools/f/calls": 2.0, "tools/f/seconds": 0.5, "engine_seconds": 3.0}
    waiting[1][2] = replace(waiting[1][2], metrics=metrics, engine_seconds=0.1, environment_seconds=0.7)
    first.state.save(tmp_path)
    second = collection(MIXED, dynamic_sampling=(0.0, 1.0), oversampling=3.0)
    assert second.load(tmp_path) == 0
    assert plain(second.state.waiting) == plain(waiting)


def test_what_the_clock_said_is_in_a_file_of_its_own(tmp_path: Path) -> None:
    saved = []
    for seconds in (0.25, 0.75):
        collected = collection(MIXED, dynamic_sampling=(0.0, 1.0), oversampling=3.0)
        collected.take()
        timed = {"engine_seconds": seconds, "environment_seconds": seconds, "metrics": {"tools/f/seconds": seconds}}
        collected.state.waiting = [[replace(t, **timed) for t in group] for group in collected.state.waiting]
        collected.state.save(tmp_path)
        saved.append({path.name: path.read_bytes() for path in tmp_path.iterdir()})
    assert {name for name in saved[0] if saved[0][name] != saved[1][name]} == {TIMES}


def test_segments_of_a_trajectory_that_waits_survive_and_get_their_own_old_logprobs(tmp_path: Path) -> None:
    collected = collection(MIXED, dynamic_sampling=(0.0, 1.0), oversampling=3.0)
    collected.take()
    forked = stitch(
        [ModelCall(np.array(prompt, np.int32), collected.students.completion("c")) for prompt in ([1], [2])]
    )
    assert len(forked) == 2
    collected.state.waiting[0][1] = replace(
        collected.state.waiting[0][1], segments=forked, metrics={"tools/truncated": 1.0}
    )
    asyncio.run(collected.buffer.add_old_logprobs([], Trainer().forward))
    waiting = collected.state.waiting
    for one in waiting[0][1].segments:
        expected = np.where(one.loss_mask, 1 + one.token_ids / 1000, 0).astype(np.float32)
        assert one.old_logprobs is not None and one.old_logprobs.tolist() == expected.tolist()
    collected.state.save(tmp_path)
    second = collection(MIXED, dynamic_sampling=(0.0, 1.0), oversampling=3.0)
    assert second.load(tmp_path) == 0 and len(second.state.waiting[0][1].segments) == 2
    # A checkpoint of an earlier version has an old name of this metric.
    waiting[0][1] = replace(waiting[0][1], metrics={"tools/shortened": 1.0})
    assert plain(second.state.waiting) == plain(waiting)
    assert second.state.waiting_experts == collected.state.waiting_experts


@dataclass
class Trainer:
    """Log-probs that name the weights: those of version v are v and the token's id, as a fraction."""

    version: int = 1
    num_asked: list[int] = field(default_factory=list)

    async def forward(self, batch: TokenBatch) -> np.ndarray:
        self.num_asked.append(batch.num_sequences)
        return (self.version + batch.token_ids / 1000).astype(np.float32)

    async def forward_with_entropies(self, batch: TokenBatch) -> np.ndarray:
        logprobs = await self.forward(batch)
        return np.stack([logprobs, 10 + logprobs])


def old_logprobs(trajectories: Sequence[Trajectory]) -> list[Any]:
    """The version that the old log-probs of each group name, None where it has none."""
    found = []
    for trajectory in trajectories:
        [segment] = trajectory.segments
        if (old := segment.old_logprobs) is not None:
            sampled = segment.loss_mask
            fraction = (segment.token_ids / 1000)[sampled].tolist()
            assert (old - old.astype(int))[sampled].tolist() == pytest.approx(fraction, abs=1e-6)
            assert not old[~sampled].any()
        found.append(old if old is None else int(old[segment.loss_mask][0]))
    return found[::SAMPLES]


FILTERED: dict[str, Any] = {"dynamic_sampling": (0.0, 1.0), "oversampling": 2.0}
ALL_MIXED = dict.fromkeys(range(10), 1)


@pytest.mark.parametrize(
    ("settings", "trained", "num_asked"),
    [
        # Six groups are drawn for every other step, three of which wait: only theirs are asked for.
        pytest.param({}, [[None] * 3, [1] * 3, [None] * 3, [3] * 3], [12, 12], id="one update"),
        # The first of three updates gives those of its own group.
        pytest.param({"updates": 3}, [[None, 1, 1], [1] * 3, [None, 3, 3], [3] * 3], [20, 20], id="several updates"),
        pytest.param({"epochs": 2}, [[1] * 3, [1] * 3, [3] * 3, [3] * 3], [24, 24], id="several passes"),
        pytest.param(
            {"importance_sampling": "icepop"},
            [[None] * 3, [1] * 3, [None] * 3, [3] * 3],
            [12, 12],
            id="corrected in the update",
        ),
        pytest.param(
            {"kl_coefficient": 0.1, "kl_placement": "reward"},
            [[1] * 3, [1] * 3, [3] * 3, [3] * 3],
            [24, 24],
            id="kl before",
        ),
        pytest.param(
            {"kl_coefficient": 0.1}, [[None] * 3, [1] * 3, [None] * 3, [3] * 3], [12, 12], id="kl in the loss"
        ),
        pytest.param({"old_logprobs": "rollout"}, [[None] * 3] * 4, [], id="of the engine"),
    ],
)
def test_the_weights_that_sampled_give_the_old_logprobs(
    settings: dict[str, Any], trained: list[Any], num_asked: list[int], tmp_path: Path
) -> None:
    trainer, collected = Trainer(), collection(ALL_MIXED, **FILTERED, **settings)
    found = []
    for _ in range(4):
        kept = flatten(collected.take_with_logprobs(trainer))
        assert [t.group for t in kept] == [group for group in range(3) for _ in range(SAMPLES)]
        found.append(old_logprobs(kept))
        collected.state.save(tmp_path)
        collected = collection(ALL_MIXED, **FILTERED, **settings)
        assert collected.load(tmp_path) == 0
        trainer.version += 1
    assert found == trained and trainer.num_asked == num_asked


def test_without_a_filter_nothing_is_asked_of_the_trainer() -> None:
    trainer, collected = Trainer(), collection(ALL_MIXED)
    assert old_logprobs(flatten(collected.take_with_logprobs(trainer))) == [None] * 3
    assert trainer.num_asked == []


def entropies(trajectories: Sequence[Trajectory]) -> list[Any]:
    """The version that the entropies of each group name, None where it has none."""
    segments = [segment for trajectory in trajectories for segment in trajectory.segments]
    return [None if s.entropies is None else int(s.entropies[s.loss_mask][0]) - 10 for s in segments][::SAMPLES]


def test_the_weights_that_sampled_give_the_entropies(tmp_path: Path) -> None:
    trainer = Trainer()
    settings: dict[str, Any] = {**FILTERED, "entropy_top_share": 0.2}
    collected = collection(ALL_MIXED, **settings)
    found = []
    for _ in range(4):
        kept = flatten(collected.take_with_logprobs(trainer))
        # One update trains on fresh groups: their ratio starts at its own pass, as ever.
        found.append((old_logprobs(kept), entropies(kept)))
        collected.state.save(tmp_path)
        collected = collection(ALL_MIXED, **settings)
        assert collected.load(tmp_path) == 0
        trainer.version += 1
    assert found == [([None] * 3, [1] * 3), ([1] * 3, [1] * 3), ([None] * 3, [3] * 3), ([3] * 3, [3] * 3)]
    assert trainer.num_asked == [24, 24]


def test_groups_that_waited_without_entropies_get_those_of_now(tmp_path: Path) -> None:
    trainer, first = Trainer(), collection(ALL_MIXED, **FILTERED)
    first.take_with_logprobs(trainer)
    first.state.save(tmp_path)
    second = collection(ALL_MIXED, **FILTERED, entropy_top_share=0.2)
    assert second.load(tmp_path) == 0
    trainer.version = 2
    kept = flatten(second.take_with_logprobs(trainer))
    assert (old_logprobs(kept), entropies(kept)) == ([1] * 3, [2] * 3)


def test_a_step_that_is_forgotten_leaves_what_waited() -> None:
    trainer, collected = Trainer(), collection(ALL_MIXED, **FILTERED)
    collected.take_with_logprobs(trainer)
    before = plain(collected.state.waiting)
    collected.take_with_logprobs(trainer)
    collected.state.forget_step()
    assert plain(collected.state.waiting) == before and len(before) == 3


def test_answers_that_waited_for_an_engine_s_ratio_are_told_when_the_trainer_s_is_asked_for(tmp_path: Path) -> None:
    first = collection(ALL_MIXED, **FILTERED, old_logprobs="rollout")
    first.take()
    first.state.save(tmp_path)
    second = collection(ALL_MIXED, **FILTERED)
    assert second.load(tmp_path) == 3 * SAMPLES
    for trajectory in (t for group in second.state.waiting for t in group):
        [segment] = trajectory.segments
        assert segment.old_logprobs is not None
        assert segment.old_logprobs.tolist() == segment.rollout_logprobs.tolist()


def plain(value: Any) -> Any:
    """The same with arrays as lists."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.tolist()
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    if isinstance(value, Segment | RetainedSets):
        return [plain(getattr(value, part.name)) for part in fields(value)]
    if isinstance(value, Trajectory):
        return [plain(getattr(value, part.name)) for part in fields(Trajectory) if part.name != "group"]
    return value
