"""Attempts at problems, by real engines: a two-turn game, one turn, and what goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, ClassVar

import numpy as np
import pytest

from megarl.cluster.calls.worker_group import WorkerGroup
from megarl.config import Recipe, SamplingConfig
from megarl.config.parallel import ParallelConfig
from megarl.config.sections.rollout import BudgetConfig
from megarl.data.chat import encode_rendered, render
from megarl.data.dialogue import Dialogue
from megarl.environments import Environment, EnvironmentUnavailableError, Start, Step, Turn
from megarl.environments.single_turn import SingleTurn
from megarl.rewards.scoring.calling import Sample
from megarl.rewards.scoring.reward_process import Scored
from megarl.rollout.attempt import Score
from megarl.rollout.buffer import GroupBuffer
from megarl.rollout.groups import GroupSampler
from megarl.rollout.pool import AbandonedError, EnginePool
from megarl.rollout.source import Source
from megarl.rollout.state import RLState, flatten
from megarl.rollout.step.step_metrics import rollout_metrics
from megarl.rollout.stitch import stitch
from megarl.terminal import FirstOfEachKind
from megarl.types import Problem, Reward, SamplingSettings, Segment, Trajectory

TWO = ParallelConfig(1, 1, 2, 1)
SAMPLING = SamplingSettings(24, temperature=1.0)
SEEDS = [1256873213, 949102091, 568212934, 1095929703, 619324796, 1578343595]


class LongestWord:
    """A game of two turns: say words, then longer ones; the reward is for each word more."""

    closed = 0

    async def reset(self, problem: Problem, seed: int) -> Start:
        self.seed = seed
        return Start((*problem.messages, {"role": "user", "content": "Say a few words."}))

    async def step(self, turn: Turn) -> Step:
        longest = max(map(len, re.findall(r"\w+", turn.text)), default=0)
        metrics = {"longest": float(longest)}
        if turn.number == 0:
            self.goal = longest
            return Step(({"role": "user", "content": f"Longer than {longest}!"},), reward=0.5, metrics=metrics)
        return Step(reward=float(longest > self.goal), done=True, answer_correct=longest > self.goal, metrics=metrics)

    async def close(self) -> None:
        type(self).closed += 1


class Faulty(LongestWord):
    """Raises at its second step."""

    async def step(self, turn: Turn) -> Step:
        if turn.number:
            raise KeyError("no such word")
        return await super().step(turn)


class NotFinite(LongestWord):
    async def step(self, turn: Turn) -> Step:
        return Step(reward=float("nan"))


class NoMessages(LongestWord):
    async def step(self, turn: Turn) -> Any:
        return Step(("On!",))  # type: ignore[arg-type]


class NotMeasured(LongestWord):
    async def step(self, turn: Turn) -> Step:
        return Step(metrics={"x": float("inf")}, done=True)


class Leaving(LongestWord):
    async def step(self, turn: Turn) -> Step:
        raise SystemExit(3)


class Unavailable(LongestWord):
    async def step(self, turn: Turn) -> Step:
        raise EnvironmentUnavailableError("no answer")


class NotClosing(LongestWord):
    async def step(self, turn: Turn) -> Step:
        return Step(done=True)

    async def close(self) -> None:
        await super().close()
        raise OSError("gone")


class LeavingAtItsClose(NotClosing):
    async def close(self) -> None:
        await LongestWord.close(self)
        raise SystemExit(3)


class Deaf(LongestWord):
    """At problem 2 it waits for ever, whoever cancels it."""

    waiting: ClassVar[list[asyncio.Event]] = []

    async def reset(self, problem: Problem, seed: int) -> Start:
        self.is_deaf = problem.index == 2
        return await super().reset(problem, seed)

    async def step(self, turn: Turn) -> Step:
        event = asyncio.Event()
        self.waiting.append(event)
        while self.is_deaf and not event.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await event.wait()
        return await super().step(turn)


class SlowThenAway(LongestWord):
    """The first attempt at a problem finds no server at its second turn."""

    begun: ClassVar[Counter[tuple[int, int]]] = Counter()

    async def reset(self, problem: Problem, seed: int) -> Start:
        self.problem = problem.index, seed
        self.begun[self.problem] += 1
        return await super().reset(problem, seed)

    async def step(self, turn: Turn) -> Step:
        if turn.number == 1 and self.begun[self.problem] == 1:
            raise EnvironmentUnavailableError("no answer")
        return await super().step(turn)


class LongAtTwo(LongestWord):
    async def reset(self, problem: Problem, seed: int) -> Start:
        if problem.index == 2:
            return Start(({"role": "user", "content": "word " * 200},))
        return await super().reset(problem, seed)


class Endless(LongestWord):
    async def step(self, turn: Turn) -> Step:
        return Step(({"role": "user", "content": "On!"},))


class NoStart(LongestWord):
    async def reset(self, problem: Problem, seed: int) -> Any:
        return problem.messages


class TooLong(LongestWord):
    async def reset(self, problem: Problem, seed: int) -> Start:
        return Start(({"role": "user", "content": "word " * 1000},))


class Writing(LongestWord):
    """Changes all that it was given, and all that it returned."""

    async def reset(self, problem: Problem, seed: int) -> Start:
        seen = len(problem.record["words"]), len(problem.answer), problem.messages[0]["content"]
        self.message = {"role": "user", "content": f"Seen: {seen}"}
        problem.record["words"].append("more")  # type: ignore[attr-defined]
        problem.answer.append("more")
        problem.messages[0]["content"] = "changed"  # type: ignore[index]
        self.metrics = {"turns": 0.0}
        return Start((self.message,))

    async def step(self, turn: Turn) -> Step:
        self.message["content"] = f"Turn {turn.number}"
        self.metrics["turns"] += 1
        return Step((self.message,), reward=0.0, done=turn.number == 1, metrics=self.metrics)


@pytest.fixture(scope="module")
def problems(tokenizer: Any) -> list[Problem]:
    found = []
    for index in (7, 2, 11):
        messages = ({"role": "user", "content": f"Problem {index}."},)
        prompt = encode_rendered(tokenizer, render(tokenizer, messages, generation_prompt=True))
        found.append(Problem(index, messages, tuple(prompt), f"{index}"))
    return found


async def by_length(sample: Sample) -> Scored:
    return Scored(Reward(float(len(sample.completion_text)), True, False))


@pytest.fixture
async def sampler(group: WorkerGroup, tokenizer: Any) -> Callable[..., GroupSampler]:
    # Forget the requests of earlier tests.
    await group.call("seen")

    def make(
        environment: Callable[[], Environment], max_prompt_tokens: int = 150, score: Score = by_length, **more: Any
    ) -> GroupSampler:
        return GroupSampler(
            pool=EnginePool(group, TWO, max_running=8),
            dialogue=Dialogue(tokenizer),
            score=score,
            environment="game",
            make_environment=environment,
            max_prompt_tokens=max_prompt_tokens,
            **more,
        )

    return make


def runs(mask: np.ndarray) -> list[tuple[bool, int]]:
    """Lengths of the stretches of equal values."""
    ends = [*np.flatnonzero(np.diff(mask)) + 1, len(mask)]
    return [(bool(mask[start]), end - start) for start, end in zip([0, *ends], ends, strict=False)]


def only(trajectory: Trajectory) -> Segment:
    [segment] = trajectory.segments
    return segment


async def test_cases_3_and_4_a_game_of_two_turns_is_one_segment_of_what_the_engine_read_and_sampled(
    sampler: Callable[..., GroupSampler], group: WorkerGroup, problems: Any, tokenizer: Any
) -> None:
    closed = LongestWord.closed
    game = sampler(LongestWord, max_turns=4, truncated_turn="close")
    found = await game.sample(problems, SAMPLING, samples_per_prompt=4, seed="s")
    assert LongestWord.closed == closed + 12
    assert [(t.group, t.number, t.problem.index) for t in found] == [
        (group, number, index) for group, index in enumerate((7, 2, 11)) for number in range(4)
    ]
    sent = {name: prompt for of_rank in await group.call("seen") for name, prompt, _ in of_rank}
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    num_cut = 0
    for trajectory in found:
        segment = only(trajectory)
        tokens = segment.token_ids.tolist()
        assert trajectory.ended in ("done", "length") and trajectory.num_turns == 2
        stretches = runs(segment.loss_mask)
        assert [is_sampled for is_sampled, _ in stretches] == [False, True, False, True]
        first, second = (sent[f"{trajectory.group}.{trajectory.number}.{turn}"] for turn in (0, 1))
        assert trajectory.num_observed == stretches[2][1]
        assert trajectory.engine_seconds > trajectory.environment_seconds > 0
        start = len(first) + stretches[1][1]
        assert tokens[: len(first)] == first and tokens[: len(second)] == second
        # One end of the turn at the border, sampled or, where the turn was cut, added and not trained.
        border = tokens[len(first) : len(second)]
        is_cut = tokens[start - 1] != end
        num_cut += is_cut
        longest = trajectory.metrics["longest"]
        observed = tokenizer.decode(tokens[start : len(second)])
        after = "<|im_end|>\n" if is_cut else "\n"
        goal = int(re.findall(r"Longer than (\d+)!", observed)[0])
        expected = f"{after}<|im_start|>user\nLonger than {goal}!<|im_end|>\n<|im_start|>assistant\n"
        assert observed == expected and border.count(end) == 2
        (_, half), (_, won) = trajectory.turn_rewards
        assert trajectory.reward == Reward(0.5 + won, True, won > 0) and half == 0.5
        assert (longest - goal > goal) == (won > 0)
        assert trajectory.text.count("\n\n") >= 1 and not segment.rollout_logprobs[~segment.loss_mask].any()
    assert 0 < num_cut < 12


async def test_the_next_turn_draws_anew_and_every_engine_and_order_alike(
    sampler: Callable[..., GroupSampler], group: WorkerGroup, problems: Any
) -> None:
    async def sampled(problems: list[Problem]) -> dict[int, list[int]]:
        game = sampler(LongestWord, max_turns=2, truncated_turn="close")
        found = await game.sample(problems, SAMPLING, seed="s")
        return {t.problem.index: only(t).token_ids.tolist() for t in found}

    expected = await sampled(problems)
    seeds = [seed for of_rank in await group.call("seen") for _, _, seed in of_rank]
    assert len(set(seeds)) == 6 and all(0 <= seed < 2**31 for seed in seeds)
    assert await sampled(problems[::-1]) == expected
    # The model is flat: with the seed of the turn before, the draws would be the same.
    game = sampler(LongestWord, max_turns=2, truncated_turn="close")
    for trajectory in await game.sample(problems, SAMPLING, seed="t"):
        segment = only(trajectory)
        first, second = (segment.token_ids[segment.turns == turn].tolist() for turn in (0, 1))
        assert first[:5] != second[:5]
        assert only(trajectory).token_ids.tolist() != expected[trajectory.problem.index]


async def test_one_turn_is_the_problem_s_prompt_and_one_completion(
    sampler: Callable[..., GroupSampler], group: WorkerGroup, problems: Any
) -> None:
    single = sampler(SingleTurn)
    found = await single.sample(problems, SAMPLING, samples_per_prompt=2, seed="7 1")
    sent = {name: seed for of_rank in await group.call("seen") for name, _, seed in of_rank}
    # Of sha256 of ("7 1", problem, sample), as runs have drawn since single turns were all there was.
    assert [sent[f"{g}.{n}.0"] for g in range(3) for n in range(2)] == SEEDS
    for trajectory in found:
        segment = only(trajectory)
        num_prompt = len(trajectory.problem.prompt_token_ids)
        assert segment.token_ids[:num_prompt].tolist() == list(trajectory.problem.prompt_token_ids)
        assert runs(segment.loss_mask) == [(False, num_prompt), (True, len(segment) - num_prompt)]
        assert trajectory.reward == Reward(float(len(trajectory.text)), True, False)
        assert trajectory.ended == ("length" if trajectory.num_sampled == 24 else "done")


def buffer_of(sampler: GroupSampler, problems: Sequence[Problem], on_sampled: Any) -> GroupBuffer:
    """A synchronous buffer: two samples of each of these problems a step."""
    fields = {name: value for name, value in asdict(SAMPLING).items() if name in SamplingConfig.model_fields}
    recipe = Recipe.model_validate(
        {
            "name": "r", "loop": "rl", "model": {"path": "m"}, "data": {"train": "t", "shuffle": False}, "seed": 7,
            "train": {"prompts_per_step": len(problems), "samples_per_prompt": 2}, "rollout": {"sampling": fields},
        }
    )  # fmt: skip
    own = [replace(problem, source="test") for problem in problems]
    sources = [Source("test", 1.0, recipe, sampler, own)]
    return GroupBuffer(recipe, sources, RLState(recipe.algorithm), on_sampled=on_sampled)


async def test_engines_rest_while_only_rewards_are_awaited(
    sampler: Callable[..., GroupSampler], group: WorkerGroup, problems: Any
) -> None:
    resting, num_scored = asyncio.Event(), 0

    async def score(sample: Sample) -> Scored:
        nonlocal num_scored
        # If they rested after the rewards alone, this would wait for ever.
        await resting.wait()
        num_scored += 1
        return await by_length(sample)

    single = sampler(SingleTurn, score=score)

    async def rest() -> None:
        assert num_scored == 0
        await single.pool.pause()
        assert await group.call("unfinished") == [0, 0]
        resting.set()

    buffer = buffer_of(single, problems, rest)
    found = flatten(await buffer.take(len(problems), 1))
    assert num_scored == 6 and all(trajectory.reward is not None for trajectory in found)
    assert buffer.metrics()["time/rollout_late_rewards_seconds"] > 0
    plain = await sampler(SingleTurn).sample(problems, SAMPLING, samples_per_prompt=2, seed="7 1")
    assert [only(one).token_ids.tolist() for one in plain] == [only(one).token_ids.tolist() for one in found]


async def test_engines_do_not_rest_where_the_run_is_to_stop_before_all_is_sampled(
    sampler: Callable[..., GroupSampler], problems: Any
) -> None:
    class Hanging(SingleTurn):
        async def step(self, turn: Turn) -> Step:
            await asyncio.Event().wait()
            raise AssertionError

    rests: list[None] = []

    async def rest() -> None:
        rests.append(None)

    buffer = buffer_of(sampler(Hanging, is_abandoned=lambda: True), problems[:1], rest)
    with pytest.raises(AbandonedError):
        await buffer.take(1, 1)
    assert not rests


async def test_reward_functions_see_the_conversation_up_to_the_last_turn(
    sampler: Callable[..., GroupSampler], problems: Any
) -> None:
    seen: list[Sample] = []

    async def look(sample: Sample) -> Scored:
        seen.append(sample)
        return await by_length(sample)

    made = sampler(Endless, score=look, max_turns=2, truncated_turn="close")
    [trajectory] = await made.sample(problems[:1], SAMPLING, seed="s")
    [sample] = seen
    first, last = trajectory.text[: -len(sample.completion_text)], sample.completion_text
    assert trajectory.text.endswith(last) and first.endswith("\n\n")
    assert sample.prompt_messages == (
        *problems[0].messages,
        {"role": "user", "content": "Say a few words."},
        {"role": "assistant", "content": first.removesuffix("\n\n")},
        {"role": "user", "content": "On!"},
    )
    segment = only(trajectory)
    num_last = int((segment.turns == 1).sum())
    assert (sample.turn, sample.num_tokens, sample.answer, sample.record) == (2, num_last, "7", problems[0].record)
    assert sample.finish_reason == ("length" if num_last == SAMPLING.max_new_tokens else "stop")


async def test_a_completion_that_is_left_out_has_no_reward(sampler: Callable[..., GroupSampler], problems: Any) -> None:
    async def fail(sample: Sample) -> Scored:
        return Scored(Reward(0.0, False, None), "parse_error", "no verdict", is_left_out=True)

    [trajectory] = await sampler(SingleTurn, score=fail).sample(problems[:1], SAMPLING, seed="s")
    assert trajectory.reward is None and trajectory.failure == "parse_error" and trajectory.num_sampled


async def test_what_an_environment_writes_reaches_no_other_attempt_or_turn(
    sampler: Callable[..., GroupSampler], problems: Any, tokenizer: Any
) -> None:
    problem = replace(problems[0], messages=({"role": "user", "content": "Problem."},), answer=["7"])
    problem = replace(problem, record={"words": ["one"]})
    game = sampler(Writing, max_turns=2, truncated_turn="close", history="render")
    found = await game.sample([problem], SAMPLING, samples_per_prompt=2, seed="s")
    assert (problem.record, problem.answer, problem.messages[0]["content"]) == ({"words": ["one"]}, ["7"], "Problem.")
    for trajectory in found:
        # Of two turns the environment counted one, then two.
        assert trajectory.metrics["turns"] == 3.0
        prompts = tokenizer.decode(trajectory.segments[-1].token_ids)
        assert "Seen: (1, 1, 'Problem.')" in prompts and "Turn 0" in prompts and "Turn 1" not in prompts


@pytest.mark.parametrize(
    ("environment", "settings", "ended"),
    [
        pytest.param(LongestWord, {"truncated_turn": "end"}, "length", id="a turn that is cut ends it"),
        pytest.param(Endless, {"truncated_turn": "close", "max_turns": 2}, "turns", id="turns are spent"),
        pytest.param(
            Endless, {"truncated_turn": "close", "max_prompt_tokens": 20}, "length", id="the context is spent"
        ),
    ],
)
async def test_an_attempt_ends_with_its_budget(
    environment: Any,
    settings: dict[str, Any],
    ended: str,
    sampler: Callable[..., GroupSampler],
    problems: Any,
) -> None:
    made = sampler(environment, **{"max_turns": 40} | settings)
    short = replace(SAMPLING, max_new_tokens=40 if "max_prompt_tokens" in settings else 3)
    found = await made.sample(problems, short, samples_per_prompt=2, seed="s")
    assert ended in {t.ended for t in found} <= {ended, "done"}
    for trajectory in found:
        assert trajectory.num_turns <= made.max_turns
        assert len(only(trajectory)) <= made.max_prompt_tokens + short.max_new_tokens
        assert trajectory.reward is not None


@pytest.mark.parametrize(
    ("environment", "kind", "num_turns"),
    [
        pytest.param(Faulty, "KeyError", 2, id="raises"),
        pytest.param(NoStart, "TypeError", 0, id="begins with no Start"),
        pytest.param(NotFinite, "ValueError", 1, id="reward is no number"),
        pytest.param(TooLong, "Refused", 0, id="the engine refuses"),
        pytest.param(NoMessages, "TypeError", 1, id="messages are none"),
        pytest.param(NotMeasured, "ValueError", 1, id="a metric is no number"),
        pytest.param(Leaving, "SystemExit", 1, id="leaves the process"),
        pytest.param(Unavailable, "EnvironmentUnavailableError", 1, id="cannot be had"),
        pytest.param(NotClosing, "OSError", 1, id="does not close"),
        pytest.param(LeavingAtItsClose, "SystemExit", 1, id="leaves the process at its close"),
    ],
)
async def test_an_error_ends_its_attempt_alone_and_is_reported_once(
    environment: Any,
    kind: str,
    num_turns: int,
    sampler: Callable[..., GroupSampler],
    problems: Any,
) -> None:
    notices: list[str] = []
    closed = environment.closed
    notify_once = FirstOfEachKind(notices.append).tell
    made = sampler(environment, 2000, max_turns=4, truncated_turn="close", notify_once=notify_once)
    found = await made.sample(problems, SAMPLING, seed="s")
    assert environment.closed == closed + 3
    for trajectory in found:
        assert trajectory.ended == "error" and trajectory.reward is None and trajectory.num_turns == num_turns
        assert trajectory.failure is not None and trajectory.failure.startswith(f"{kind}: ")
    [text] = notices
    assert f"rollout/errors/{kind}" in text


@pytest.mark.parametrize("limit", ["step_seconds", "seconds"])
async def test_case_n8_an_environment_that_ignores_its_end_is_left_and_the_others_are_as_without_it(
    limit: str, sampler: Callable[..., GroupSampler], problems: Any
) -> None:
    free = await sampler(LongestWord, max_turns=4, truncated_turn="close").sample(problems, SAMPLING, seed="s")
    made = sampler(Deaf, max_turns=4, truncated_turn="close", budget=BudgetConfig.model_validate({limit: 3.0}))
    began = time.monotonic()
    found = await made.sample(problems, SAMPLING, seed="s")
    assert time.monotonic() - began < 60
    first, deaf, last = found
    assert [only(t).token_ids.tolist() for t in (first, last)] == [
        only(free[place]).token_ids.tolist() for place in (0, 2)
    ]
    assert deaf.num_turns == 1 and only(deaf).token_ids.tolist() == only(free[1]).token_ids[: len(only(deaf))].tolist()
    if limit == "seconds":
        assert (deaf.ended, deaf.failure) == ("seconds", None) and deaf.reward is not None
    else:
        assert deaf.ended == "error" and deaf.reward is None and str(deaf.failure).startswith("Timeout: ")
        assert rollout_metrics(found)["rollout/errors/Timeout"] == 1
    for event in Deaf.waiting:
        event.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    Deaf.waiting.clear()


async def test_an_attempt_whose_environment_could_not_be_had_is_begun_anew_and_draws_alike(
    sampler: Callable[..., GroupSampler], problems: Any
) -> None:
    free = await sampler(LongestWord, max_turns=4, truncated_turn="close").sample(problems, SAMPLING, seed="s")
    SlowThenAway.begun.clear()
    made = sampler(SlowThenAway, max_turns=4, truncated_turn="close", budget=BudgetConfig(attempts=2))
    found = await made.sample(problems, SAMPLING, seed="s")
    assert [only(t).token_ids.tolist() for t in found] == [only(t).token_ids.tolist() for t in free]
    assert [t.restarts for t in found] == [1, 1, 1] and rollout_metrics(found)["rollout/restarted"] == 3
    assert [t.reward for t in found] == [t.reward for t in free]


async def test_case_n1_a_prompt_that_does_not_fit_ends_its_attempt_and_no_other(
    sampler: Callable[..., GroupSampler], problems: Any
) -> None:
    free, found = [
        await sampler(kind, max_turns=4, truncated_turn="close").sample(problems, SAMPLING, seed="s")
        for kind in (LongestWord, LongAtTwo)
    ]
    assert [t.ended for t in found] == [free[0].ended, "length", free[2].ended] and found[1].num_sampled == 0
    for place in (0, 2):
        assert only(found[place]).token_ids.tolist() == only(free[place]).token_ids.tolist()


async def test_a_history_that_the_template_rewrites_is_rendered_and_forks(
    sampler: Callable[..., GroupSampler], group: WorkerGroup, problems: Any, tokenizer: Any
) -> None:
    """Of two templates one shows no earlier answer; the other writes them as they are, so nothing is rendered anew."""
    forgetful = copy.deepcopy(tokenizer)
    forgetful.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + (m.content if m.role == 'user' else '...') "
        "+ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    settings: dict[str, Any] = {"max_turns": 2, "truncated_turn": "close"}
    appended = await sampler(LongestWord, **settings).sample(problems, SAMPLING, seed="s")
    kept = await sampler(LongestWord, history="render", **settings).sample(problems, SAMPLING, seed="s")
    assert [only(t).token_ids.tolist() for t in kept] == [only(t).token_ids.tolist() for t in appended]
    made = replace(sampler(LongestWord, history="render", **settings), dialogue=Dialogue(forgetful))
    await group.call("seen")
    found = await made.sample(problems, SAMPLING, seed="s")
    sent = {name: prompt for of_rank in await group.call("seen") for name, prompt, _ in of_rank}
    for place, trajectory in enumerate(found):
        first, second = trajectory.segments
        prompt = sent[f"{place}.0.1"]
        assert second.token_ids[: len(prompt)].tolist() == prompt and not second.loss_mask[: len(prompt)].any()
        assert "<|im_start|>assistant\n...<|im_end|>\n<|im_start|>user\nLonger than" in tokenizer.decode(prompt)
        assert first.token_ids.tolist() == only(appended[place]).token_ids[: len(first)].tolist()
        assert trajectory.num_sampled == int(first.loss_mask.sum() + second.loss_mask.sum())
    assert rollout_metrics(found)["rollout/forks"] == 3


def test_case_5_sampled_ids_stay_as_they_are_whatever_their_text_would_be_encoded_to(tokenizer: Any) -> None:
    """`Th` and `e` are sampled apart, and the tokenizer would join them."""
    from megarl.rollout.stitch import ModelCall
    from megarl.types import Completion

    dialogue = Dialogue(tokenizer)
    opening = dialogue.opening([{"role": "user", "content": "Say."}])
    word = tokenizer.encode(" number", add_special_tokens=False)
    letters = [i for letter in " number" for i in tokenizer.encode(letter, add_special_tokens=False)]
    assert letters != word and dialogue.text(np.array(letters)) == " number"
    completion = Completion(
        "r", np.array(letters), np.zeros(len(letters), np.float32), "stop", np.zeros(len(letters), np.int32)
    )
    call = ModelCall(opening, completion)
    held = call.token_ids.astype(np.int32)
    observation = dialogue.observation(held, [{"role": "user", "content": "<|im_end|> is text."}])
    following = ModelCall(np.concatenate([held, observation]), completion)
    assert following.prompt_token_ids[: len(held)].tolist() == [*opening.tolist(), *letters]
    [segment] = stitch([call, following])
    assert int(segment.loss_mask.sum()) == 2 * len(letters)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert observation.tolist().count(end) == 2, "of the turn and of the observation, none of the content"
