"""Spans of attempts by real engines: their turns, tools and rewards, as OpenTelemetry's own exporter has them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from megarl.cluster.worker_group import WorkerGroup
from megarl.config.parallel import ParallelConfig
from megarl.data.chat import encode, render
from megarl.data.dialogue import Dialogue
from megarl.environments import Environment, Start, Step, Turn
from megarl.environments.single_turn import SingleTurn
from megarl.rewards.scoring.calling import Sample
from megarl.rewards.scoring.reward_process import Scored
from megarl.rollout.attempt_spans import AttemptSpan
from megarl.rollout.groups import GroupSampler
from megarl.rollout.pool import EnginePool
from megarl.types import Problem, Reward, SamplingSettings, Trajectory

TWO = ParallelConfig(1, 1, 2, 1)
SAMPLING = SamplingSettings(12, temperature=1.0)


class Lookup:
    """Answers the first turn as a tool does, and ends with the second."""

    async def reset(self, problem: Problem, seed: int) -> Start:
        return Start(problem.messages)

    async def step(self, turn: Turn) -> Step:
        await asyncio.sleep(0.02)
        reply = {"role": "tool", "name": "lookup", "content": "nothing"}
        return Step((reply,)) if turn.number == 0 else Step(reward=2.0, done=True, metrics={"looked_up": 1.0})

    async def close(self) -> None:
        pass


class Broken(Lookup):
    async def step(self, turn: Turn) -> Step:
        raise KeyError("no such word")


async def always(sample: Sample) -> Scored:
    await asyncio.sleep(0.02)
    return Scored(Reward(0.5, True, True))


@pytest.fixture
def attempted(
    group: WorkerGroup, runner: asyncio.Runner, tokenizer: Any
) -> Callable[..., tuple[Trajectory, dict[str, list[ReadableSpan]]]]:
    """`attempted(environment)`: the trajectory of one attempt, and its spans by name."""

    def run(environment: Callable[[], Environment]) -> tuple[Trajectory, dict[str, list[ReadableSpan]]]:
        exporter, provider = InMemorySpanExporter(), TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        tracer = provider.get_tracer("test")
        sampler = GroupSampler(
            pool=EnginePool(group, TWO, max_running=8),
            dialogue=Dialogue(tokenizer),
            score=always,
            environment="game",
            make_environment=environment,
            max_prompt_tokens=100,
            max_turns=2,
            truncated_turn="close",
            begin_span=lambda task, pool: AttemptSpan(tracer, task, pool),
        )
        messages = ({"role": "user", "content": "Problem 7."},)
        problem = Problem(
            7, messages, tuple(encode(tokenizer, render(tokenizer, messages, generation_prompt=True))), "7"
        )
        [trajectory] = runner.run(sampler.sample([problem], SAMPLING, seed="s"))
        found: dict[str, list[ReadableSpan]] = {}
        for span in exporter.get_finished_spans():
            found.setdefault(span.name, []).append(span)
        return trajectory, found

    return run


def test_an_attempt_has_its_turns_and_tools_within(attempted: Callable[..., Any]) -> None:
    trajectory, spans = attempted(Lookup)
    [attempt] = spans["attempt"]
    assert attempt.attributes["megarl.environment"] == "game" and attempt.attributes["megarl.problem"] == 7
    assert attempt.attributes["megarl.purpose"] == "training" and attempt.attributes["megarl.turns"] == 2
    assert attempt.attributes["megarl.reward"] == 2.0 and attempt.attributes["megarl.ended"] == trajectory.ended
    assert attempt.attributes["megarl.sampled_tokens"] == trajectory.num_sampled
    assert attempt.attributes["megarl.metrics.looked_up"] == 1.0
    assert attempt.status.is_ok or attempt.status.status_code.name == "UNSET"
    chats, [tool] = spans["chat"], spans["execute_tool"]
    assert [span.attributes["megarl.turn"] for span in chats] == [0, 1]
    assert sum(span.attributes["gen_ai.usage.output_tokens"] for span in chats) == trajectory.num_sampled
    assert tool.attributes["megarl.tools"] == ("lookup",) and tool.end_time - tool.start_time >= 20e6
    # All within the attempt, in their order, and none of them overlap.
    inside = [chats[0], tool, chats[1]]
    assert all(span.parent.span_id == attempt.context.span_id for span in inside)
    times = [time for span in inside for time in (span.start_time, span.end_time)]
    assert times == sorted(times) and attempt.start_time <= times[0] and times[-1] <= attempt.end_time
    assert "reward" not in spans, "the environment gave the reward"


def test_reward_functions_have_a_span(attempted: Callable[..., Any]) -> None:
    _, spans = attempted(SingleTurn)
    assert {name: len(found) for name, found in spans.items()} == {"attempt": 1, "chat": 1, "reward": 1}
    [reward], [attempt] = spans["reward"], spans["attempt"]
    assert reward.end_time - reward.start_time >= 20e6 and attempt.attributes["megarl.reward"] == 0.5
    assert attempt.attributes["megarl.answer_correct"] is True


def test_a_failed_attempt_is_an_error(attempted: Callable[..., Any]) -> None:
    trajectory, spans = attempted(Broken)
    [attempt] = spans["attempt"]
    assert attempt.status.status_code.name == "ERROR" and attempt.status.description == trajectory.failure
    assert "no such word" in attempt.attributes["megarl.failure"] and "megarl.reward" not in attempt.attributes
