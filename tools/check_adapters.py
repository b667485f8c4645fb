"""Two steps of GRPO with an environment of each foreign library, and a table of how they went.

    python tools/check_adapters.py [--only gem --only openenv] [--keep runs/check_adapters]

Makes a virtual environment for each library with uv (the package registry must be reachable), and runs a tiny student
with random weights on one CPU rank. Exits with 1 where a run fails or an attempt ended with an error.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
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
    """An environment to check: packages of a virtual environment, settings, files beside the run, overrides."""

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


def installed(adapter: Adapter, folder: Path) -> str:
    """The interpreter that has the packages; its environment is made where it is missing."""
    if not adapter.packages:
        return sys.executable
    python = folder / "bin/python"
    if not python.exists():
        uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or "uv"
        subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, str(folder)], check=True)
        command = [uv, "pip", "install", "--quiet", "--python", str(python), *adapter.packages]
        subprocess.run(command, check=True)
    return str(python)


def version_of(python: str, package: str) -> str:
    command = [python, "-c", f"from importlib.metadata import version; print(version({package!r}))"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def trained(name: str, settings: dict[str, Any], folder: Path, overrides: Sequence[str]) -> list[dict[str, float]]:
    """The metrics of a run. Raises SystemExit with its words where it fails."""
    command = [
        sys.executable, "-m", "megarl", "train", str(ROOT / "launch/recipes/tiny_rl.yaml"), "--restart",
        f"name={name}", "runs_folder=runs", "model.path=model", "data.train=environment:1000",
        "data.validation.heldout=environment:4", "data.max_prompt_tokens=640", f"rollout.environment={name}",
        f"rollout.environment_kwargs={json.dumps(settings)}", "rollout.max_turns=3",
        "rollout.sampling.max_new_tokens=8", f"train.steps={STEPS}", "train.prompts_per_step=4",
        "train.samples_per_prompt=4", "optimizer.warmup_steps=0", "cluster.ranks_per_node=1", "trainer.tp=1",
        "rollout.tp=1", *ADAPTERS[name].overrides, *overrides,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-4000:]}")
    lines = (folder / "runs" / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def check(name: str, work: Path, keep: Path, overrides: Sequence[str]) -> bool:
    """Run an adapter and print its line. Whether all attempts ended without an error."""
    adapter = ADAPTERS[name]
    start = time.perf_counter()
    python = installed(adapter, keep / name)
    installing = time.perf_counter() - start
    for file, text in adapter.files.items():
        (work / file).write_text(text)
    start = time.perf_counter()
    steps = [step for step in trained(name, adapter.settings(python), work, overrides) if "reward/mean" in step]
    seconds = time.perf_counter() - start
    version = version_of(python, adapter.packages[0] if adapter.packages else "reasoning-gym")
    errors = max(step["rollout/ended/error"] for step in steps)
    last = steps[-1]
    print(
        f"{name:14} {version:9} {installing:9.1f} {seconds:7.1f} {last['time/rollout_seconds']:9.1f} "
        f"{last['rollout/turns/mean']:6.2f} {last['reward/mean']:7.3f} {last['reward/std']:7.3f} "
        f"{last['logprob_gap/max']:9.1e} {errors:7.2f}",
        flush=True,
    )
    return errors == 0 and len(steps) == STEPS


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=ADAPTERS, help="check this adapter; repeatable")
    parser.add_argument("--keep", type=Path, help="folder for the virtual environments, kept for the next time")
    parser.add_argument("overrides", nargs="*", help="overrides of the recipe")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="check_adapters_") as folder:
        work = Path(folder)
        keep = options.keep.resolve() if options.keep else work / "environments"
        keep.mkdir(parents=True, exist_ok=True)
        model = ["tools/make_tiny_model.py", "--out", str(work / "model"), "--num-layers", "2"]
        subprocess.run([sys.executable, *model], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        print(
            f"{'adapter':14} {'version':9} {'install s':>9} {'run s':>7} {'rollout s':>9} {'turns':>6} {'reward':>7} "
            f"{'std':>7} {'gap':>9} {'errors':>7}"
        )
        passed = [check(name, work, keep, options.overrides) for name in options.only or ADAPTERS]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
