"""A driver of agents' attempts with a real endpoint, buffer, journal and containers on two nodes, which a test kills.

Each line `[FOLDER, STEPS, PORT]` of standard input starts a driver, which continues from the newest checkpoint in the
folder. SIGUSR1 ends and restarts its endpoint. The programs outlive the driver.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import traceback
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np

from megarl.config import Recipe
from megarl.rewards.scoring.calling import Sample
from megarl.rewards.scoring.reward_process import Scored
from megarl.rollout.buffer import GroupBuffer
from megarl.rollout.buffer_policy import BufferPolicy
from megarl.rollout.groups import GroupSampler
from megarl.rollout.journal.journal import AttemptJournal
from megarl.rollout.source import Source
from megarl.rollout.state import RLState, flatten, problem_lookup
from megarl.serving.agent.agent_program import AgentProgram
from megarl.serving.agent.agent_runner import AgentRunner
from megarl.serving.agent.containers import Containers
from megarl.serving.endpoint import Endpoint
from megarl.types import Completion, Problem, Request, Reward
from tests.cluster.spawned import spawned_nodes
from tests.serving.scripted_pool import CONTEXT_TOKENS, ScriptedPool, scripted_endpoint

HARNESS = Path(__file__).with_name("harness.py")
SLOW_SECONDS = 0.3
"""Time of one in ten answers, so that some clients go away before them."""
OUTLIVE_SECONDS = 90.0
"""More than the start of the next driver takes on a machine with other work."""
AGENT: dict[str, Any] = {
    "command": [sys.executable, "-S", "-E", str(HARNESS)],
    "sandbox": "sandbox",
    "nodes": "all",
    "max_processes": 20,
    "disk_gib": 0.01,
    "outlive_seconds": OUTLIVE_SECONDS,
}
PROMPTS, SAMPLES = 5, 2
PROBLEMS = [Problem(n, ({"role": "user", "content": f"Add {n}."},), (5, 6), "7", source="command") for n in range(40)]


class Pool(ScriptedPool):
    """Its log-probs are never drawn twice, so they name an answer. Each is written to a file when it is sampled, and
    the tokens of each aborted call too.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._file = os.open(folder / "sampled", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    async def generate(self, request: Request, **more: Any) -> Completion:
        self.seconds = SLOW_SECONDS if random.random() < 0.1 else 0.002
        completion = await super().generate(request, **more)
        completion.rollout_logprobs[:] = -(np.frombuffer(os.urandom(4 * len(completion.token_ids)), np.uint32) / 2**32)
        os.write(self._file, f"{name_of(completion.rollout_logprobs)} {len(completion.token_ids)}\n".encode())
        return completion

    def record_abort(self, num_tokens: int) -> None:
        os.write(self._file, f"aborted-{os.urandom(8).hex()} {num_tokens}\n".encode())


def name_of(logprobs: Any) -> str:
    return hashlib.sha256(logprobs.tobytes()).hexdigest()


async def restart_endpoint(endpoint: Endpoint) -> None:
    """End the endpoint's server with all its connections, and start it again at its port."""
    assert endpoint._server is not None
    await endpoint._server.close()
    await endpoint.start()
    endpoint.accept()


async def drive(folder: Path, steps: int, port: int) -> None:
    """Train steps without a trainer: take groups, settle them in the journal, save the state."""
    recipe = Recipe.model_validate(
        {
            "name": "r", "loop": "rl", "model": {"path": "m"}, "data": {"train": "t"},
            "rollout": {
                "environment": "command",
                "agent": AGENT | {"folders": [str(folder), str(HARNESS.parent)]},
                "endpoint": {"port": port},
            },
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

    async with (
        spawned_nodes(2, 1, folder) as nodes,
        scripted_endpoint(Pool(folder), is_held=True, port=port) as s,
        AsyncExitStack() as stack,
    ):
        pool: Any = s.pool
        unused: Any = None
        config = recipe.rollout.agent
        containers = Containers(config, s.endpoint.address, agents=lambda: nodes.agents)
        await containers.start()
        stack.push_async_callback(containers.close)
        runner = AgentRunner(config, s.endpoint, s.sessions, containers, asyncio.Semaphore(20))
        program = AgentProgram(runner, score)
        program.expect(journal.expected_keys)
        restarts: set[asyncio.Task[None]] = set()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, lambda: restarts.add(asyncio.create_task(restart_endpoint(s.endpoint))))
        # The test kills only a driver that can be signalled.
        (folder / "agents").write_text(json.dumps([process.pid for process in nodes.processes]))
        (folder / "ready").touch()
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
            with (folder / "attempts").open("a") as file:
                for t in done:
                    failure = None if t.failure is None else t.failure[:200]
                    outlived = t.metrics.get("outlived_driver", 0.0)
                    facts = {"step": step, "restarts": t.restarts, "failure": failure, "outlived": outlived}
                    file.write(json.dumps(facts) + "\n")
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


def start_drivers() -> None:
    """Fork a driver for each line of input, so that the imports are made once. Print its process, and its exit code."""
    for line in sys.stdin:
        folder, steps, port = json.loads(line)
        child = os.fork()
        if not child:
            os.setsid()
            try:
                asyncio.run(drive(Path(folder), steps, port))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    start_drivers()
