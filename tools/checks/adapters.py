"""Each adapter of a foreign environment library trains: two steps of GRPO, no attempt ends with an error.

Makes a virtual environment for each library (the package registry must be reachable), and runs a tiny student
with random weights on one CPU rank. A row per library; it fails if the run is short or an attempt ended with an error.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.make_tiny_model import make_tiny_model
from tools.runs import make_environment, read_metrics, train

DURATION = {
    "small": "20 s (reasoning-gym, without a virtual environment)",
    "full": "minutes: four runs of two steps, and downloads (not timed)",
}
SMALL = {"only": ["reasoning_gym"]}
STEPS = 2

OPENENV_SERVER = '''
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Say(Action):
    message: str


class Heard(Observation):
    text: str


class Letters(Environment):
    """Two turns; a text of an even length earns a half."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.turns = 0

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.turns = 0
        return Heard(text=f"Say a text of an even length. {seed}")

    def step(self, action, timeout_s=None, **kwargs):
        self.turns += 1
        return Heard(text="Another.", reward=0.5 * (len(action.message) % 2 == 0), done=self.turns == 2)

    @property
    def state(self):
        return State(episode_id="letters", step_count=self.turns)


app = create_app(Letters, Say, Heard, env_name="letters", max_concurrent_envs=8)
'''

VERIFIERS_TASKSET = """
import verifiers.v1 as vf

__all__ = ["LettersTaskset"]


class LettersData(vf.TaskData):
    rest: int


class LettersTask(vf.Task[LettersData]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or "") % 2 == self.data.rest)


class LettersConfig(vf.TasksetConfig):
    num_tasks: int = 50


class LettersTaskset(vf.Taskset[LettersTask, LettersConfig]):
    def load(self):
        for number in range(self.config.num_tasks):
            data = LettersData(prompt=f"Say {number}.", rest=number % 2)
            yield LettersTask(data, self.config.task)
"""


@dataclass(frozen=True)
class Adapter:
    """An environment to check: packages of a virtual environment, settings, files of the run's folder, overrides."""

    packages: tuple[str, ...]
    settings: Callable[[str], dict[str, Any]]
    """`rollout.environment_kwargs`, for the interpreter that has the packages."""
    files: dict[str, str]
    overrides: tuple[str, ...] = ("rollout.truncated_turn=close",)


ADAPTERS = {
    "reasoning_gym": Adapter(
        (), lambda python: {"task": "chain_sum", "config": {"max_terms": 2, "max_digits": 1}, "answer": "text"}, {}
    ),
    "gem": Adapter(("gem-llm",), lambda python: {"name": "game:GuessTheNumber-v0-easy", "python": python}, {}),
    "openenv": Adapter(
        ("openenv",),
        lambda python: {
            "command": [python, "-m", "uvicorn", "letters_server:app", "--port", "{port}", "--log-level", "warning"]
        },
        {"letters_server.py": OPENENV_SERVER},
    ),
    "verifiers": Adapter(
        ("verifiers", "uv"),
        lambda python: {"taskset": "letters", "python": python},
        {"letters.py": VERIFIERS_TASKSET},
        (),
    ),
}


def version_of(python: str, package: str) -> str:
    command = [python, "-c", f"from importlib.metadata import version; print(version({package!r}))"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def check_adapter(name: str, folder: Path, environments: Path, overrides: list[str]) -> dict[str, Any]:
    """Run one adapter in a folder with a model. Returns its row."""
    adapter = ADAPTERS[name]
    started = time.perf_counter()
    python = str(make_environment(environments / name, adapter.packages)) if adapter.packages else sys.executable
    install_seconds = time.perf_counter() - started
    for file, text in adapter.files.items():
        (folder / file).write_text(text)
    seconds = train(
        "launch/recipes/tiny_rl.yaml", "--restart", f"name={name}", "runs_folder=runs", "model.path=model",
        "data.train=environment:1000", "data.validation.heldout=environment:4", "data.max_prompt_tokens=640",
        f"rollout.environment={name}", f"rollout.environment_kwargs={json.dumps(adapter.settings(python))}",
        "rollout.max_turns=3", "rollout.sampling.max_new_tokens=8", f"train.steps={STEPS}", "train.prompts_per_step=4",
        "train.samples_per_prompt=4", "optimizer.warmup_steps=0", "cluster.ranks_per_node=1", "trainer.tp=1",
        "rollout.tp=1", *adapter.overrides, *overrides, folder=folder,
    )  # fmt: skip
    steps = [step for step in read_metrics(folder / "runs" / name) if "reward/mean" in step]
    errors = max(step["rollout/ended/error"] for step in steps)
    return {
        "adapter": name,
        "version": version_of(python, adapter.packages[0] if adapter.packages else "reasoning-gym"),
        "install_seconds": install_seconds,
        "seconds": seconds,
        "rollout_seconds": steps[-1]["time/rollout_seconds"],
        "turns": steps[-1]["rollout/turns/mean"],
        "reward": steps[-1]["reward/mean"],
        "reward_std": steps[-1]["reward/std"],
        "logprob_gap": steps[-1]["logprob_gap/max"],
        "errors": errors,
        "met": errors == 0 and len(steps) == STEPS,
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", action="append", choices=ADAPTERS, help="check this adapter; repeatable")
    parser.add_argument("--keep", type=Path, help="folder for the virtual environments, kept for the next time")
    parser.add_argument("overrides", nargs="*", help="overrides of the recipe")


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="check_adapters_") as name:
        folder = Path(name)
        environments = options.keep.resolve() if options.keep else folder / "environments"
        make_tiny_model(folder / "model", num_layers=2)
        for adapter in options.only or ADAPTERS:
            yield check_adapter(adapter, folder, environments, options.overrides)
