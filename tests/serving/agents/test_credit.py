"""Attempts of an agent with sub-agents, summaries and a rewound history: what their reward trains."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from megarl.config.sections.rollout import AgentConfig
from megarl.rewards.scoring.calling import Sample
from megarl.rewards.scoring.reward_process import Scored
from megarl.rollout.attempt import Budget, Task
from megarl.rollout.attempt_engine import AttemptEngine
from megarl.serving.agent.agent_program import AgentProgram
from megarl.serving.agent.agent_runner import AgentRunner
from megarl.serving.agent.containers import Containers
from megarl.serving.dialects.chat import Chat
from megarl.serving.dialects.messages import Messages
from megarl.serving.dialects.responses import Responses
from megarl.types import Archive, Caller, Problem, Reward, SamplingSettings, Trajectory
from tests.serving.scripted_pool import CONTEXT_TOKENS, Scripted, scripted_endpoint

pytestmark = pytest.mark.anyio
PROBLEM = Problem(3, ({"role": "user", "content": "Add."},), (5, 6), "7")


class Harness:
    """An agent with three sub-agents, two summaries, a title and a branch that it gives up: 13 answers."""

    def __init__(self, **given: Any) -> None:
        self.given = given
        self.ids: list[str] = []

    async def run(self, problem: Mapping[str, Any], base_url: str, api_key: str) -> float | None:
        async with aiohttp.ClientSession() as http:

            async def ask(messages: list[Any], added: str, **headers: str) -> list[Any]:
                messages = [*messages, {"role": "user", "content": added}]
                named = {f"x-megarl-{name}": value for name, value in headers.items()}
                async with http.post(f"{base_url}/chat/completions", json={"messages": messages}, headers=named) as got:
                    answer = await got.json()
                self.ids.append(answer["id"])
                return [*messages, answer["choices"][0]["message"]]

            async def work(agent: str) -> None:
                # Three agents begin with equal requests.
                first = await ask([], "Add 2 and 3.", agent=agent, parent="main")
                await ask(first, "Check it.", agent=agent, parent="main")

            await ask([], "A title, please.", kind="title")
            main = await ask([], "Begin.")
            await asyncio.gather(*(work(agent) for agent in ("a", "b", "c")))
            await ask(main, "Try this.")
            main = await ask(main, "Try that.")
            for _ in range(2):
                summary = await ask(main, "Summarise.", kind="compaction")
                main = await ask([], f"So far: {summary[-1]['content']}")
            if self.given:
                given = {
                    name: {self.ids[place]: reward for place, reward in value.items()}
                    if isinstance(value, dict)
                    else value
                    for name, value in self.given.items()
                }
                secret = base_url.split("/")[-2]
                await http.post(f"{base_url.partition('/s/')[0]}/sessions/{secret}/reward", data=json.dumps(given))
        return None if self.given else 0.5


async def attempt(s: Scripted, harness: Harness | None = None, **config: Any) -> Trajectory:
    async def score(sample: Sample) -> Scored:
        return Scored(Reward(9.0, True, None))

    agent = AgentConfig(**config)
    made = harness or Harness()
    containers = Containers(agent, s.endpoint.address)
    runner = AgentRunner(agent, s.endpoint, s.sessions, containers, asyncio.Semaphore(1), lambda: made)
    program = AgentProgram(runner, score)
    pool: Any = s.pool
    task = Task("command", PROBLEM, 0, 0, "seed", SamplingSettings(200))
    return await program.attempt(task, Budget(CONTEXT_TOKENS, max_turns=50), AttemptEngine(pool))


def turns_of(trajectory: Trajectory) -> list[list[int]]:
    return [sorted(set(segment.turns[segment.loss_mask].tolist())) for segment in trajectory.segments]


async def test_all_sequences_of_an_attempt_share_its_reward() -> None:
    async with scripted_endpoint() as s:
        done = await attempt(s)
        sampled = sum(len(completion.token_ids) for completion in s.pool.completions)
    assert done.failure is None and done.reward == Reward(0.5, True, None)
    # Title, main sequence, three sub-agents, the branch given up, and each summary's new root.
    turns = turns_of(done)
    assert sorted(turn for of_segment in turns for turn in of_segment) == list(range(len(done.texts))) == [*range(14)]
    assert len(turns) == 8 and done.num_sampled == sampled and done.metrics["untrained_tokens"] == 0
    record: Any = done.record()
    assert [turn["agent"] for turn in record["turns"]].count("b") == 2
    assert {(turn["agent"], turn["parent"]) for turn in record["turns"]} == {
        ("main", None), *((agent, "main") for agent in "abc")
    }  # fmt: skip
    assert [turn["kind"] for turn in record["turns"]].count("compaction") == 2
    assert {turn["segment"] for turn in record["turns"]} == set(range(8))
    # A checkpoint has the callers too.
    archive = Archive()
    loaded = Trajectory.from_json(json.loads(json.dumps(done.to_json(archive, ""))), archive, "", lambda *_: PROBLEM)
    assert loaded.callers == done.callers and loaded.callers[0] == Caller(kind="title")


async def test_agents_with_equal_requests_have_an_answer_each() -> None:
    async with scripted_endpoint() as s:
        done = await attempt(s)
    assert done.metrics["joined_retries"] == 0 and len(s.pool.completions) == 14


async def test_the_final_segment_alone_is_trained() -> None:
    async with scripted_endpoint() as s:
        done = await attempt(s, credit="final_segment")
        last = s.pool.completions[-1]
    assert turns_of(done) == [[13]] and done.num_sampled == len(last.token_ids)
    assert done.metrics["untrained_tokens"] == sum(len(c.token_ids) for c in s.pool.completions) - done.num_sampled
    assert len(done.texts) == 14 and done.reward is not None and done.reward.score == 0.5


async def test_the_final_segment_has_all_answers_that_it_continues() -> None:
    """The last answer is that of the branch that was not given up, and its sub-agents end later."""

    class Branching(Harness):
        async def run(self, problem: Mapping[str, Any], base_url: str, api_key: str) -> float | None:
            async with aiohttp.ClientSession() as http:

                async def ask(texts: list[Any], added: str, **headers: str) -> list[Any]:
                    messages = [*texts, {"role": "user", "content": added}]
                    named = {f"x-megarl-{name}": value for name, value in headers.items()}
                    async with http.post(
                        f"{base_url}/chat/completions", json={"messages": messages}, headers=named
                    ) as got:
                        return [*messages, (await got.json())["choices"][0]["message"]]

                main = await ask([], "Begin.")
                await ask(main, "Try this.")
                await ask(await ask(main, "Try that."), "Go on.")
                await ask([], "Tidy up.", agent="janitor")
            return 1.0

    async with scripted_endpoint() as s:
        done = await attempt(s, Branching(), credit="final_segment")
    assert turns_of(done) == [[0, 2, 3]]


@pytest.mark.parametrize(
    ("credit", "sequences"),
    [
        pytest.param("attempt", [["A1", "A2"], ["A3", "A4"], ["A5"], ["B1", "B2"]], id="attempt"),
        pytest.param("final_segment", [["A5"]], id="final_segment"),
    ],
)
async def test_the_guide_s_drawing_is_what_is_trained(credit: str, sequences: list[list[str]]) -> None:
    drawing = (Path(__file__).parents[3] / "megarl/environments/README.md").read_text().partition("```text\nmain")[2]
    labels = re.findall(r"-> ([AB]\d)", drawing.partition("```")[0])
    assert sorted(labels) == ["A1", "A2", "A3", "A4", "A5", "B1", "B2"]

    class Drawn(Harness):
        async def run(self, problem: Mapping[str, Any], base_url: str, api_key: str) -> float | None:
            async with aiohttp.ClientSession() as http:

                async def ask(texts: list[Any], added: str, agent: str = "") -> list[Any]:
                    messages = [*texts, {"role": "user", "content": added}]
                    headers = {"x-megarl-agent": agent}
                    url = f"{base_url}/chat/completions"
                    async with http.post(url, json={"messages": messages}, headers=headers) as got:
                        return [*messages, (await got.json())["choices"][0]["message"]]

                first = await ask([], "Begin")
                await ask(first, "Try this")
                fourth = await ask(await ask(first, "Try that"), "Summarise")
                await ask(await ask([], "Task", "b"), "Check", "b")
                await ask([], f"So far: {fourth[-1]['content']}")
            return 1.0

    made = ["A1", "A2", "A3", "A4", "B1", "B2", "A5"]
    async with scripted_endpoint() as s:
        done = await attempt(s, Drawn(), credit=credit)
    assert sorted([made[turn] for turn in turns] for turns in turns_of(done)) == sequences


async def test_kinds_of_requests_are_left_out() -> None:
    async with scripted_endpoint() as s:
        done = await attempt(s, untrained_kinds=("title", "compaction"))
        title = s.pool.completions[0]
    assert 0 not in [turn for turns in turns_of(done) for turn in turns]
    summaries = [number for number, caller in enumerate(done.callers) if caller.kind == "compaction"]
    untrained = len(title.token_ids) + sum(len(s.pool.completions[number].token_ids) for number in summaries)
    assert done.metrics["untrained_tokens"] == untrained > 0


async def test_answers_have_the_rewards_that_the_agent_gives_them() -> None:
    async with scripted_endpoint() as s:
        done = await attempt(s, Harness(reward=0.25, turn_rewards={1: 1.0, 13: -0.5}), credit="by_turn")
    assert done.turn_rewards == ((1, 1.0), (13, -0.5)) and done.reward is not None and done.reward.score == 0.75


@pytest.mark.parametrize(
    ("given", "credit", "text"),
    [
        pytest.param({"turn_rewards": {1: 1.0}}, "attempt", "rollout.agent.credit is attempt", id="another credit"),
        pytest.param({"turn_rewards": {1: "x"}}, "by_turn", "= 'x'", id="no number"),
        pytest.param({"turn_rewards": [1.0]}, "by_turn", "turn_rewards = [1.0]", id="no object"),
    ],
)
async def test_rewards_of_turns_that_cannot_be_honoured_end_the_attempt(given: Any, credit: str, text: str) -> None:
    async with scripted_endpoint() as s:
        done = await attempt(s, Harness(reward=0.25, **given), credit=credit)
    assert done.reward is None and done.failure is not None and done.failure.startswith("ValueError: turn_rewards")
    assert text in done.failure


LONG = Caller("a" * 128, "main", "t")
CLAUDE, CODEX = Messages(), Responses()


@pytest.mark.parametrize(
    ("dialect", "headers", "caller"),
    [
        pytest.param(Chat(), {}, Caller(), id="none"),
        pytest.param(Chat(), {"x-megarl-agent": "a" * 500, "x-megarl-kind": "t\x00"}, LONG, id="long"),
        pytest.param(Chat(), {"x-claude-code-agent-id": "a", "thread-id": "b"}, Caller(), id="other clients"),
        pytest.param(CLAUDE, {"x-claude-code-session-id": "s"}, Caller(), id="main of Claude Code"),
        pytest.param(CLAUDE, {"x-claude-code-agent-id": "a"}, Caller("a", "main"), id="agent of Claude Code"),
        pytest.param(
            CLAUDE, {"x-claude-code-agent-id": "b", "x-claude-code-parent-agent-id": "a"}, Caller("b", "a"), id="nested"
        ),
        pytest.param(CODEX, {"thread-id": "t"}, Caller(), id="main of Codex"),
        pytest.param(CODEX, {"thread-id": "u", "x-codex-parent-thread-id": "t"}, Caller("u", "t"), id="agent of Codex"),
        pytest.param(
            CODEX, {"x-codex-turn-metadata": '{"request_kind": "compaction"}'}, Caller(kind="compaction"), id="kind"
        ),
        pytest.param(CODEX, {"x-codex-turn-metadata": "[" * 4000}, Caller(), id="metadata nested without end"),
        pytest.param(CODEX, {"x-codex-turn-metadata": '{"request_kind": 3}'}, Caller(), id="kind is a number"),
    ],
)  # fmt: skip
def test_a_request_names_its_agent(dialect: Any, headers: dict[str, str], caller: Caller) -> None:
    assert dialect.caller(headers) == caller
