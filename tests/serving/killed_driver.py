"""A driver of agents' attempts with a real endpoint, buffer and journal, which a test kills at any moment.

`python -m tests.serving.killed_driver FOLDER STEPS` continues from the newest checkpoint in the folder.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from megarl.config import Recipe
from megarl.config.sections.rollout import AgentConfig
from megarl.rewards.scoring.calling import Sample
from megarl.rewards.scoring.reward_process import Scored
from megarl.rollout.buffer import GroupBuffer
from megarl.rollout.buffer_policy import BufferPolicy
from megarl.rollout.groups import GroupSampler
from megarl.rollout.journal.journal import AttemptJournal
from megarl.rollout.source import Source
from megarl.rollout.state import RLState, flatten, problem_lookup
from megarl.serving.agents import AgentProgram
from megarl.serving.containers import Containers
from megarl.types import Completion, Problem, Request, Reward
from tests.serving.scripted_pool import CONTEXT_TOKENS, ScriptedPool, scripted_endpoint

PROMPTS, SAMPLES = 5, 2
PROBLEMS = [Problem(n, ({"role": "user", "content": f"Add {n}."},), (5, 6), "7", source="command") for n in range(40)]


class Pool(ScriptedPool):
    """Its log-probs are never drawn twice, so they name an answer. Each is written to a file when it is sampled."""

    def __init__(self, folder: Path) -> None:
        super().__init__(seconds=0.002)
        self._file = os.open(folder / "sampled", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    async def generate(self, request: Request, **more: Any) -> Completion:
        completion = await super().generate(request, **more)
        completion.rollout_logprobs[:] = -(np.frombuffer(os.urandom(4 * len(completion.token_ids)), np.uint32) / 2**32)
        os.write(self._file, f"{name_of(completion.rollout_logprobs)} {len(completion.token_ids)}\n".encode())
        return completion


def name_of(logprobs: Any) -> str:
    return hashlib.sha256(logprobs.tobytes()).hexdigest()


class Harness:
    """An agent of a random dialect, with sub-agents, summaries and rewound histories. One in ten dies in a call."""

    async def run(self, problem: Mapping[str, Any], base_url: str, api_key: str) -> float | None:
        draw = random.Random()
        dialect = draw.choice(("chat/completions", "messages", "responses"))
        dies_after = draw.choice([draw.randrange(8), *[99] * 9])
        num_calls = 0
        async with aiohttp.ClientSession() as http:

            async def ask(messages: list[Any], added: str, agent: str = "") -> list[Any]:
                nonlocal num_calls
                num_calls += 1
                if num_calls > dies_after:
                    raise RuntimeError("killed")
                messages = [*messages, {"role": "user", "content": added}]
                field = "input" if dialect == "responses" else "messages"
                body = {field: messages, "max_tokens": 100, "stream": False}
                if dialect == "responses":
                    body = {"input": messages, "store": False}
                headers = {"x-megarl-agent": agent, "x-megarl-parent": "main"} if agent else {}
                async with http.post(f"{base_url}/{dialect}", json=body, headers=headers) as response:
                    answer = await response.json()
                if dialect == "messages":
                    return [*messages, {"role": "assistant", "content": answer["content"]}]
                if dialect == "responses":
                    return [*messages, *answer["output"]]
                return [*messages, answer["choices"][0]["message"]]

            main = await ask([], problem["messages"][0]["content"])
            if draw.random() < 0.5:
                await asyncio.gather(*(ask([], "Check it.", f"a{n}") for n in range(2)))
            await ask(main, f"Look at {draw.random()}.")
            main = await ask(main, "Go on.")
            if draw.random() < 0.5:
                main = await ask([], "So far: nothing.")
            await ask(main, "End.")
        return draw.random()


async def drive(folder: Path, steps: int) -> None:
    """Train steps without a trainer: take groups, settle them in the journal, save the state."""
    recipe = Recipe.model_validate(
        {
            "name": "r", "loop": "rl", "model": {"path": "m"}, "data": {"train": "t"},
            "rollout": {"environment": "command", "agent": {"command": ["sh"]}},
            "train": {"steps": steps, "prompts_per_step": PROMPTS, "samples_per_prompt": SAMPLES},
        }
    )  # fmt: skip
    saved = max((int(path.name) for path in folder.glob("[0-9]*")), default=0)
    state, problems = RLState(recipe.algorithm), {"command": PROBLEMS}
    trained: list[list[Any]] = []
    if saved:
        state.load(folder / str(saved), problem_lookup(problems))
        trained = json.loads((folder / str(saved) / "trained.json").read_text())
    journal = AttemptJournal(folder / "attempts.journal", saved + 1, problem_lookup(problems))

    async def score(sample: Sample) -> Scored:
        return Scored(Reward(0.0, True, None))

    async with scripted_endpoint(Pool(folder)) as s:
        pool: Any = s.pool
        unused: Any = None
        config = AgentConfig()
        containers = Containers(config, s.endpoint.address)
        program = AgentProgram(config, s.endpoint, s.sessions, score, containers, asyncio.Semaphore(20), Harness)
        sampler = GroupSampler(
            pool, unused, score, "command", None, CONTEXT_TOKENS - 2000, max_turns=50, agent=program.attempt
        )
        sources = [Source("command", 1.0, recipe, sampler, PROBLEMS)]
        buffer = GroupBuffer(recipe, sources, state, BufferPolicy.from_recipe(recipe), journal)
        for step in range(saved + 1, steps + 1):
            pool.version = step
            done = flatten(await buffer.take(PROMPTS, step))
            counts = [(t.journaled_as, t.num_sampled if t.reward is not None else 0) for t in done]
            journal.settle(step, counts, state.journaled_names)
            for t in done:
                logprobs = [
                    s.rollout_logprobs[s.turns == turn] for s in t.segments for turn in range(s.turns.max() + 1)
                ]
                trained += [[step, name_of(p), len(p)] for p in logprobs if len(p) and t.reward is not None]
            partial = folder / "partial"
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            state.save(partial)
            (partial / "trained.json").write_text(json.dumps(trained))
            # Every third step has a checkpoint, so that kills undo steps too.
            if step % 3 == 0 or step == steps:
                partial.rename(folder / str(step))
    journal.close()


if __name__ == "__main__":
    asyncio.run(drive(Path(sys.argv[1]), int(sys.argv[2])))
