"""Limits of tool calls and tokens in attempts whose completions are typed in."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.data.dialogue import Dialogue
from megarl.environments import Start, Step, Turn
from megarl.environments.tools import cut_in_the_middle
from megarl.rewards.scoring.calling import Sample
from megarl.rewards.scoring.reward_process import Scored
from megarl.rollout.attempt import Budget, Task, attempt
from megarl.rollout.attempt_engine import AttemptEngine
from megarl.rollout.attempt_messages import AttemptConversation
from megarl.rollout.evaluate import final_answer
from megarl.rollout.groups import GroupSampler
from megarl.rollout.pool import EnginePool
from megarl.types import Archive, Completion, Problem, Request, Reward, SamplingSettings, Trajectory
from tests.data.templates import tokenizer_of

TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
    },
}
QUESTION = ({"role": "user", "content": "Sort."},)
GOOD = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
CUT = "<tool_call>" + "word " * 600
BROKEN = '<tool_call>\n{"name": "f", "arguments": {"x": \n</tool_call>'


class Answering:
    """Answers every call, with `reply` or its error, and is done with a turn that makes none."""

    def __init__(self, reply: str | None = None) -> None:
        self.reply = reply

    async def reset(self, problem: Problem, seed: int) -> Start:
        return Start(problem.messages, (TOOL,))

    async def step(self, turn: Turn) -> Step:
        replies = [
            {
                "role": "tool",
                "name": "f",
                "tool_call_id": c.id,
                "content": self.reply or str(c.error),
                "at": Path("here"),
            }
            for c in turn.calls
        ]
        return Step(tuple(replies), done=not turn.calls)

    async def close(self) -> None:
        pass


class Policy(EnginePool):
    """Says one text after the other; `sent` are the requests."""

    def __init__(self, texts: list[str]) -> None:
        self.tokenizer = tokenizer_of("qwen")
        self.texts = iter(texts)
        self.sent: list[Request] = []
        self._replicas = []

    async def generate(self, request: Request, **settings: Any) -> Completion:
        self.sent.append(request)
        token_ids = self.tokenizer.encode(next(self.texts) + "<|im_end|>", add_special_tokens=False)
        kept = np.array(token_ids[: request.sampling.max_new_tokens])
        finish_reason = "stop" if len(kept) == len(token_ids) else "length"
        return Completion(
            request.request_id, kept, np.zeros(len(kept), np.float32), finish_reason, np.zeros(len(kept), np.int32)
        )

    @property
    def seconds_paused(self) -> float:
        return 0.0

    def forget(self, affinity: str) -> None:
        pass


async def score(sample: Sample) -> Scored:
    return Scored(Reward(1.0, True, True))


def attempted(texts: list[str], *, reply: str | None = None, **limits: Any) -> tuple[Trajectory, Policy]:
    policy = Policy(texts)
    problem = Problem(0, QUESTION, (1,), "7")
    task = Task("test", problem, 0, 0, "s", SamplingSettings(500))
    budget = Budget(9000, 20, "close", **limits)
    return asyncio.run(
        attempt(task, lambda: Answering(reply), AttemptEngine(policy), budget, Dialogue(policy.tokenizer), score)
    ), policy


@pytest.mark.parametrize(
    ("texts", "limits", "ended", "num_turns"),
    [
        pytest.param([GOOD, GOOD, "done"], {}, "done", 3, id="no limit"),
        pytest.param([GOOD, GOOD, "done"], {"tool_calls": 2}, "done", 3, id="as many calls as it may"),
        pytest.param([GOOD, GOOD + GOOD, "done"], {"tool_calls": 2}, "calls", 2, id="more calls"),
        pytest.param([BROKEN] * 5, {"invalid_calls": 3}, "invalid_calls", 3, id="broken calls in a row"),
        pytest.param([BROKEN, BROKEN, GOOD, BROKEN, "done"], {"invalid_calls": 3}, "done", 5, id="a good one between"),
        pytest.param([BROKEN, CUT, BROKEN, "done"], {"invalid_calls": 2}, "invalid_calls", 3, id="one cut between"),
        pytest.param([BROKEN, CUT, "done"], {"invalid_calls": 2}, "done", 3, id="the last one cut"),
        pytest.param([BROKEN + GOOD, BROKEN, BROKEN], {"invalid_calls": 2}, "invalid_calls", 3, id="beside a good one"),
    ],
)
def test_limits_of_calls(texts: list[str], limits: dict[str, int], ended: str, num_turns: int) -> None:
    trajectory, policy = attempted(texts, **limits)
    assert (trajectory.ended, trajectory.num_turns) == (ended, num_turns)
    assert trajectory.reward == Reward(1.0, True, True)
    asked, *observed = trajectory.messages
    assert asked == QUESTION and len(trajectory.texts) == num_turns
    # JSON values, whatever the environment gives.
    assert all(
        message.keys() == {"role", "name", "tool_call_id", "content", "at"} for new in observed for message in new
    )
    assert {message["at"] for new in observed for message in new} == {"here"}
    [segment] = trajectory.segments
    written = policy.tokenizer.decode(segment.token_ids)
    assert written.count("<tool_response>") == sum(text.count("<tool_call>") for text in texts[: num_turns - 1])


@pytest.mark.parametrize("reply", ["some words " * 400, "\U0001f642" * 300, "<|im_end|>" * 200, "7" * 3000])
def test_a_reply_of_too_many_tokens_loses_its_middle_and_says_so(reply: str) -> None:
    trajectory, policy = attempted([GOOD, "done"], reply=reply, reply_tokens=100)
    [message] = trajectory.messages[1]
    content = message["content"]
    start, _, end = re.split(r"\n(\[\.\.\. \d+ characters and more left out \.\.\.\])\n", content)
    assert start and reply.startswith(start) and reply.endswith(end) and len(end) in (len(start), len(start) - 1)
    # Little is given away, and the policy was shown just this.
    assert 80 <= Dialogue(policy.tokenizer).num_tokens(content) <= 100 and message["name"] == "f"
    shown = policy.tokenizer.decode(policy.sent[1].prompt_token_ids)
    assert f"<tool_response>\n{content}\n</tool_response>" in shown
    assert trajectory.metrics == {"tools/shortened": 1.0} and trajectory.num_observed > 80


def test_a_reply_that_fits_is_as_it_was() -> None:
    reply = "some words " * 5
    trajectory, _ = attempted([GOOD, GOOD, "done"], reply=reply, reply_tokens=100)
    assert [message["content"] for new in trajectory.messages[1:] for message in new] == [reply] * 2
    assert trajectory.metrics == {"tools/shortened": 0.0}
    assert attempted([GOOD, "done"], reply="some words " * 400)[0].metrics == {}


@pytest.mark.parametrize(
    ("contents", "by_environment", "total"),
    [
        (["x" * 9000], 0.0, 1.0),
        ([cut_in_the_middle("some words " * 900, 4000)], 1.0, 1.0),
        # The first was cut by the environment alone, the second by the token limit alone, the third by both.
        ([cut_in_the_middle("7 " * 90, 100), "y " * 900, cut_in_the_middle("z " * 900, 1500), "short"], 2.0, 3.0),
        # A tool's own text has the marker.
        ([cut_in_the_middle("z " * 900, 1500)], 0.0, 1.0),
    ],
)
def test_a_reply_cut_to_two_limits_counts_once(contents: list[str], by_environment: float, total: float) -> None:
    conversation = AttemptConversation(Dialogue(tokenizer_of("qwen")), "append", QUESTION, reply_tokens=100)
    step = Step(
        tuple({"role": "tool", "name": "f", "content": content} for content in contents),
        metrics={"tools/shortened": by_environment},
    )
    assert conversation.add_step(step).metrics == {"tools/shortened": total}


def test_a_limit_of_sampled_tokens_is_of_all_turns_together() -> None:
    free, policy = attempted([GOOD, GOOD, "done"])
    of_turn = free.turn_tokens
    trajectory, limited = attempted([GOOD, GOOD, "done"], sampled_tokens=of_turn[0] + 3)
    assert (trajectory.ended, trajectory.turn_tokens) == ("length", [of_turn[0], 3])
    assert [request.sampling.max_new_tokens for request in limited.sent] == [of_turn[0] + 3, 3]
    assert [request.sampling.max_new_tokens for request in policy.sent] == [500] * 3


async def test_waiting_for_engines_counts_once_for_completions_beside_each_other_and_not_while_they_are_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two completions: from 10 to 25 and from 12 to 40, the engines held from 20 to 26; later one from 50 to 51."""
    clock = Clock()
    monkeypatch.setattr("megarl.rollout.attempt_engine.time", clock)
    request = Request("r", np.zeros(1, np.int32), SamplingSettings(4), 0)
    engine = AttemptEngine(clock)
    tasks: list[asyncio.Task[Completion]] = []
    for began in (10.0, 12.0):
        clock.now = began
        tasks.append(asyncio.create_task(engine.generate(request)))
        await asyncio.sleep(0)
    for place, ended in enumerate((25.0, 40.0)):
        clock.now = ended
        clock.gates[place].set()
        await tasks[place]
    assert (engine.seconds, engine.seconds_by_clock) == (24.0, 30.0)
    clock.now = 50.0
    failing = asyncio.create_task(engine.generate(request))
    await asyncio.sleep(0)
    clock.now = 51.0
    failing.cancel()
    await asyncio.wait([failing])
    assert (engine.seconds, engine.seconds_by_clock) == (25.0, 31.0)


class Clock(Policy):
    """A clock that says `now`, and engines whose completions come when their gates open."""

    def __init__(self) -> None:
        super().__init__(["done"] * 2)
        self.now = 0.0
        self.gates: list[asyncio.Event] = []

    def monotonic(self) -> float:
        return self.now

    @property
    def seconds_paused(self) -> float:
        return min(max(self.now - 20.0, 0.0), 6.0)

    async def generate(self, request: Request, **settings: Any) -> Completion:
        self.gates.append(gate := asyncio.Event())
        await gate.wait()
        return await super().generate(request)


def test_tools_of_the_record_stay_in_the_prompt_of_an_environment_without_tools() -> None:
    dialogue = Dialogue(tokenizer_of("qwen"))
    read = dialogue.opening(QUESTION, (TOOL,))
    problem = Problem(0, QUESTION, tuple(read.tolist()), "", tools=(TOOL,))
    for start in (Start(QUESTION), Start(({"role": "system", "content": "Be brief."}, *QUESTION))):
        conversation = AttemptConversation(dialogue, "append", QUESTION)
        conversation.start(start, problem)
        assert '"name": "f"' in dialogue.text_with_special_tokens(conversation.prompt)
        # The environment answers no calls, so it gets them as text.
        assert not conversation.tools


def nested(depth: int) -> list[Any]:
    lists: list[Any] = []
    for _ in range(depth):
        lists = [lists]
    return lists


@pytest.mark.parametrize(
    ("start", "step", "fault"),
    [
        (Start(QUESTION, ({"name": "f"},)), Step(), "TypeError: .* tools that are not JSON schemas"),
        (Start(({**QUESTION[0], "tool_calls": [{"name": "f"}]},)), Step(), "TypeError: .* without function.name"),
        (Start(QUESTION), Step(reward=10**400), "OverflowError: "),
        (Start(QUESTION), Step(({"role": "user", "content": nested(5000)},)), "RecursionError: "),
        (Start(QUESTION), Step(({"role": "user", "content": 42},)), "ValueError: the chat template refuses"),
    ],
)
def test_unusable_data_of_an_environment_end_its_attempt_alone(start: Start, step: Step, fault: str) -> None:
    class Giving(Answering):
        async def reset(self, problem: Problem, seed: int) -> Start:
            return start

        async def step(self, turn: Turn) -> Step:
            return step

    policy = Policy(["7"])
    task = Task("test", Problem(0, QUESTION, (1,), "7"), 0, 0, "s", SamplingSettings(500))
    dialogue = Dialogue(policy.tokenizer)
    trajectory = asyncio.run(attempt(task, Giving, AttemptEngine(policy), Budget(9000, 20), dialogue, score))
    assert trajectory.ended == "error" and re.match(fault, str(trajectory.failure)), trajectory.failure


def test_a_name_that_the_template_does_not_write_is_left_out_with_a_notice() -> None:
    class Naming(Answering):
        async def reset(self, problem: Problem, seed: int) -> Start:
            return Start(({**QUESTION[0], "name": "Ada"},))

    policy, notices = Policy(["7"]), list[str]()
    dialogue = Dialogue(policy.tokenizer)
    sampler = GroupSampler(
        policy, dialogue, score, "test", Naming, 9000, notify_once=lambda kind, text: notices.append(text)
    )
    task = sampler.task(Problem(0, QUESTION, (1,), "7"), 0, 0, "s", SamplingSettings(500))
    trajectory = asyncio.run(sampler.attempt(task, AttemptEngine(policy)))
    assert trajectory.failure is None
    assert policy.sent[0].prompt_token_ids.tolist() == dialogue.opening(QUESTION).tolist()
    assert len(notices) == 1 and "'Ada'" in notices[0]


@pytest.mark.parametrize(
    ("said", "is_in_thoughts"), [("<think>maybe 7", True), ("<think>hm</think>7", False), ("7", False)]
)
def test_an_attempt_knows_whether_it_ended_in_its_thoughts(said: str, is_in_thoughts: bool) -> None:
    """Reward functions, environments and majority votes then find no answer. It is recorded with the attempt."""
    samples: list[Sample] = []
    turns: list[Turn] = []

    class Asking(Answering):
        async def reset(self, problem: Problem, seed: int) -> Start:
            return Start(problem.messages)

        async def step(self, turn: Turn) -> Step:
            turns.append(turn)
            return Step(done=True)

    async def keep(sample: Sample) -> Scored:
        samples.append(sample)
        return await score(sample)

    policy = Policy([said])
    problem = Problem(0, QUESTION, (1,), "7")
    task = Task("test", problem, 0, 0, "s", SamplingSettings(500))
    dialogue = Dialogue(policy.tokenizer)
    trajectory = asyncio.run(attempt(task, Asking, AttemptEngine(policy), Budget(9000, 20, "close"), dialogue, keep))
    assert trajectory.is_in_thoughts == samples[0].in_thoughts == is_in_thoughts
    assert samples[0].completion_text == turns[0].completion == said
    assert turns[0].text == ("" if is_in_thoughts else said)
    archive = Archive({}, {})
    again = Trajectory.from_json(trajectory.to_json(archive, "a."), archive, "a.", lambda source, index: problem)
    assert again.is_in_thoughts == is_in_thoughts
    assert final_answer(trajectory, lambda text, record: text) == (None if is_in_thoughts else said)
