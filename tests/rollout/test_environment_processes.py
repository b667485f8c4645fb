"""Environments in processes: whatever they do there ends their own attempt at most."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from megarl.config.sections.rollout import BudgetConfig
from megarl.data.dialogue import Dialogue
from megarl.environments import num_processes
from megarl.environments.environment_pool import EnvironmentPool, process_settings
from megarl.processes.process_tree import descendants
from megarl.rollout.groups import GroupSampler
from megarl.types import ConfigError, Problem, SamplingSettings, Trajectory
from tests.rollout.test_attempt_messages import QUESTION, Policy, score

ENVIRONMENTS = '''
import ctypes, os, signal, subprocess, time
import numpy as np
from megarl.environments import EnvironmentUnavailableError, Start, Step
from megarl.environments.tools import ToolEnvironment, tool

class Acts:
    """Does what the problem's answer says."""

    def __init__(self, *, folder="."):
        self.folder = folder

    def reset(self, problem, seed):
        self.act = problem.answer
        if self.act == "begin":
            return "at once"
        return Start(problem.messages)

    def step(self, turn):
        if self.act == "raise":
            raise KeyError("x")
        if self.act == "hang":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            subprocess.Popen(["sleep", "600"], start_new_session=True)
            while True:
                time.sleep(1)
        if self.act == "fill":
            self.taken = [bytearray(1 << 28) for _ in range(8)]
        if self.act.startswith("killed once ") and not os.path.exists(mark := self.act.removeprefix("killed once ")):
            open(mark, "x").close()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.act == "die":
            os._exit(3)
        if self.act == "crash":
            ctypes.string_at(0)
        if self.act == "exit":
            raise SystemExit(3)
        if self.act == "away":
            raise EnvironmentUnavailableError("no server")
        if self.act == "text":
            return "done"
        if self.act == "object":
            return Step(({"role": "user", "content": object()},))
        if self.act == "state":
            return Step(state=3)
        if self.act == "nan":
            return Step(reward=float("nan"))
        if self.act == "long":
            return Step(({"role": "user", "content": "x" * (20 << 20)},))
        return Step(reward=np.float32(len(turn.text)), done=True, metrics={"pid": float(os.getpid())})

    def close(self):
        pass

class Tools(ToolEnvironment):
    @tool
    def f(self, x: int) -> int:
        """f of x."""
        while x == 1:
            time.sleep(1)
        return x

class Coroutines:
    async def reset(self, problem, seed):
        return Start(problem.messages, state="begin", role="first")

    async def step(self, turn):
        return Step(reward=1.0, done=True, metrics={"pid": float(os.getpid())})

    async def close(self):
        pass

def interact(messages):
    return []
'''
EXPECTED = {
    "raise": ("KeyError: 'x'", 0),
    "state": ("TypeError: the environment's step returned a state that is not a text: 3", 0),
    "begin": ("TypeError: the environment's reset returned 'at once'; return a megarl.environments.Start", 0),
    "fill": ("MemoryError: ", 1),
    "die": ("EnvironmentProcessError: the environment's process ended with exit code 3", 2),
    "crash": ("EnvironmentProcessError: the environment's process was killed by SIGSEGV", 2),
    "exit": ("SystemExit: 3", 0),
    "away": ("EnvironmentUnavailableError: no server", 0),
    "text": ("TypeError: the environment's step returned 'done'; return a megarl.environments.Step", 0),
    "object": ("TypeError: its answer is not JSON: Object of type object is not JSON serializable", 0),
    "nan": ("ValueError: the environment's step returned a reward that is not a finite number: nan", 0),
    "long": ("EnvironmentProcessError: the environment's process sent a message of ", 2),
}
"""What an environment does: the attempt's failure, and how many processes were killed for it."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "acts_of_a_test.py"
    path.write_text(ENVIRONMENTS)
    return path


def attempts(name: str, acts: list[str], texts: list[str], **budget: Any) -> tuple[list[Trajectory], list[int]]:
    """An attempt for each act, its policy's completions the texts; and the processes at the end, then gone."""
    others = set(descendants(os.getpid()))
    processes = EnvironmentPool(process_settings(name, {}, 0.5), num_processes=2)
    problems = [Problem(number, QUESTION, (1,), act) for number, act in enumerate(acts)]
    policy = Policy(texts * 2 * len(acts))
    sampler = GroupSampler(
        pool=policy, dialogue=Dialogue(policy.tokenizer), score=score, environment=name, make_environment=None,
        max_prompt_tokens=9000, max_turns=4, budget=BudgetConfig(**budget), environment_pool=processes,
    )  # fmt: skip
    try:
        found = asyncio.run(sampler.sample(problems, SamplingSettings(500)))
        running = list({*descendants(os.getpid())} - others)
    finally:
        processes.close()
    assert not set(running) & set(descendants(os.getpid()))
    return found, running


def test_what_an_environment_does_in_its_process_ends_its_own_attempt_at_most(file: Path) -> None:
    acts = [act for bad in EXPECTED for act in (bad, "fine")]
    # Long enough for a process to start and to end on a machine with more work than cores.
    found, _ = attempts(f"{file}:Acts", acts, ["sorted"], step_seconds=60.0, attempts=2)
    pids = set()
    for act, trajectory in zip(acts, found, strict=True):
        killed = trajectory.metrics["process_killed"]
        if act == "fine":
            assert (trajectory.ended, killed) == ("done", 0) and trajectory.reward is not None, trajectory.failure
            assert trajectory.reward.score == len("sorted")
            pids.add(trajectory.metrics["pid"])
            continue
        failure, num_killed = EXPECTED[act]
        assert trajectory.ended == "error" and trajectory.reward is None
        assert str(trajectory.failure).startswith(failure) and killed == num_killed, (act, trajectory.failure, killed)
        assert trajectory.restarts == (act in ("away", "die", "crash", "long")) and trajectory.num_turns == (
            act != "begin"
        )
    num_kills = sum(num_killed for _, num_killed in EXPECTED.values())
    assert len(pids) <= 2 + num_kills < len(acts), "processes serve one attempt after the other"


def test_an_environment_that_hangs_ends_its_own_attempt_alone(file: Path) -> None:
    late, fine = attempts(f"{file}:Acts", ["hang", "fine"], ["sorted"], step_seconds=6.0, attempts=2)[0]
    assert (late.ended, late.reward, late.metrics["process_killed"], late.restarts) == ("error", None, 1, 0)
    assert late.failure == "Timeout: the environment's answer took longer than 6 seconds" and late.num_turns == 1
    assert (fine.ended, fine.metrics["process_killed"]) == ("done", 0) and fine.reward is not None
    assert fine.reward.score == len("sorted")


def test_an_attempt_begins_once_more_where_its_process_is_killed_from_outside(file: Path, tmp_path: Path) -> None:
    [trajectory], _ = attempts(f"{file}:Acts", [f"killed once {tmp_path / 'mark'}"], ["sorted"])
    assert (trajectory.ended, trajectory.restarts, trajectory.metrics["process_killed"]) == ("done", 1, 1)


def test_a_tool_that_hangs_is_answered_and_its_process_replaced(file: Path) -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"x": %d}}\n</tool_call>'
    processes = EnvironmentPool(process_settings(f"{file}:Tools", {"tool_seconds": 0.5}, 0.5), num_processes=1)

    async def play(x: int) -> tuple[str, int]:
        from megarl.environments import Turn
        from megarl.types import ToolCall

        async with processes.reserve_process() as seat:
            environment = seat.environment()
            await environment.reset(Problem(0, QUESTION, (1,), ""), 0)
            step = await environment.step(Turn(0, call % x, "stop", calls=(ToolCall("c", "f", {"x": x}),)))
            await environment.close()
            return step.messages[0]["content"], seat.num_killed

    async def both() -> list[tuple[str, int]]:
        return [await play(1), await play(2)]

    try:
        assert asyncio.run(both()) == [("error: the tool took longer than 0.5 seconds", 1), ("2", 0)]
    finally:
        processes.close()


def test_coroutines_may_run_in_processes_too(file: Path) -> None:
    [trajectory], _ = attempts(f"{file}:Coroutines", [""], ["sorted"])
    assert trajectory.ended == "done" and trajectory.metrics["pid"] != os.getpid()
    assert trajectory.turn_states == ("begin",) and trajectory.role == "first"


def test_an_environment_runs_in_processes_where_it_may_block(file: Path) -> None:
    number = {name: num_processes(f"{file}:{name}", None) for name in ("Acts", "Tools", "interact", "Coroutines")}
    assert number.pop("Coroutines") == 0 and all(4 <= found <= 64 for found in number.values())
    assert num_processes("calculator", None) == 0 and num_processes("calculator", 3) == 3
    assert num_processes(f"{file}:Tools", 0) == 0
    with pytest.raises(ConfigError, match=r"rollout\.environment_processes = 0: a method of .* is not `async def`"):
        num_processes(f"{file}:Acts", 0)
