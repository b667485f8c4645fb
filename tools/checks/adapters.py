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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.make_tiny_model import make_tiny_model
from tools.runs import make_environment, read_metrics, train

DURATION = {
    "small": "20 s (reasoning-gym, without a virtual environment)",
    "full": "350 s of CPU time: five runs of two steps, and downloads; Harbor needs python3.12",
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

HARBOR_AGENT = '''
import asyncio, json, os, urllib.request
from harbor.agents.agent_auth_resolution import ModelConnectionSpec, ProviderAccess
from harbor.agents.base import BaseAgent
from harbor.agents.capabilities import AgentCapabilities
from harbor.models.model_api_format import ModelApiFormat


class LettersAgent(BaseAgent):
    """Asks once, writes the answer to a file of the environment, and keeps a trajectory."""

    capabilities = AgentCapabilities(base_url=True)
    MODEL_CONNECTION = ModelConnectionSpec(
        agent_provider_access=ProviderAccess(api_key_candidate_names=["OPENAI_API_KEY"]),
        supported_api_formats=[ModelApiFormat.OPENAI_CHAT_COMPLETIONS],
    )

    @staticmethod
    def name():
        return "letters"

    def version(self):
        return "1"

    async def setup(self, environment):
        pass

    async def run(self, instruction, environment, context):
        messages = [{"role": "user", "content": instruction}]
        request = urllib.request.Request(
            f"{self._base_url}/chat/completions",
            json.dumps({"model": "policy", "messages": messages}).encode(),
            {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
        )
        answer = await asyncio.to_thread(lambda: json.load(urllib.request.urlopen(request)))
        message = answer["choices"][0]["message"]
        (self.logs_dir / "trajectory.json").write_text(json.dumps([*messages, message]))
        answer_file = self.logs_dir / "answer.txt"
        answer_file.write_text(message["content"] or "")
        await environment.upload_file(answer_file, "/workspace/answer.txt")
'''

HARBOR_ENVIRONMENT = '''
import asyncio, os, shutil, tempfile
from pathlib import Path
from harbor.environments.base import BaseEnvironment, ExecResult


class FolderEnvironment(BaseEnvironment):
    """A temporary folder instead of a container. It isolates nothing, and needs no daemon."""

    @staticmethod
    def type():
        return "folder"

    def _validate_definition(self):
        pass

    async def start(self, force_build):
        self.root = tempfile.mkdtemp()
        for folder in ("logs/agent", "logs/verifier", "logs/artifacts", "tests", "workspace"):
            os.makedirs(f"{self.root}/{folder}")

    async def stop(self, delete):
        shutil.rmtree(self.root)

    def place(self, path):
        return Path(self.root, str(path).lstrip("/"))

    async def upload_file(self, source_path, target_path):
        shutil.copy(source_path, self.place(target_path))

    async def upload_dir(self, source_dir, target_dir):
        shutil.copytree(source_dir, self.place(target_dir), dirs_exist_ok=True)

    async def download_file(self, source_path, target_path):
        shutil.copy(self.place(source_path), target_path)

    async def download_dir(self, source_dir, target_dir):
        shutil.copytree(self.place(source_dir), target_dir, dirs_exist_ok=True)

    async def exec(self, command, cwd=None, env=None, timeout_sec=None, user=None):
        for folder in ("/logs", "/tests", "/workspace"):
            command = command.replace(folder, self.root + folder)
        pipe, variables = asyncio.subprocess.PIPE, {**os.environ, **(env or {})}
        process = await asyncio.create_subprocess_exec(
            "sh", "-c", command, stdout=pipe, stderr=pipe, cwd=self.place("workspace"), env=variables
        )
        out, errors = await asyncio.wait_for(process.communicate(), timeout_sec)
        return ExecResult(stdout=out.decode(), stderr=errors.decode(), return_code=process.returncode)
'''

HARBOR_TEST = """#!/bin/sh
# A text of an even length earns a half.
cd "$(dirname "$0")/.."
if [ $(( $(wc -m < workspace/answer.txt) % 2 )) = 0 ]; then echo 0.5; else echo 0; fi > logs/verifier/reward.txt
"""


@dataclass(frozen=True)
class Adapter:
    """An environment to check: packages of a virtual environment, settings, files of the run's folder, overrides."""

    packages: tuple[str, ...]
    settings: Callable[[str], dict[str, Any]]
    """`rollout.environment_kwargs`, for the interpreter that has the packages."""
    files: dict[str, str]
    overrides: tuple[str, ...] = ("rollout.truncated_turn=close",)
    interpreter: str = sys.executable
    """Python of the virtual environment. A library may need another version than megarl."""


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
    "harbor": Adapter(
        ("harbor==0.26.0",),
        lambda python: {
            "tasks": "tasks",
            "agent": "letters_agent:LettersAgent",
            "environment": "folder_environment:FolderEnvironment",
            "trials": "trials",
            "python": python,
        },
        {"letters_agent.py": HARBOR_AGENT, "folder_environment.py": HARBOR_ENVIRONMENT}
        | {
            f"tasks/letters-{number}/{file}": text
            for number in range(3)
            for file, text in {
                "task.toml": 'version = "1.0"\n[agent]\ntimeout_sec = 300\n[verifier]\ntimeout_sec = 300\n',
                "instruction.md": f"Say a text of an even length. {number}\n",
                "environment/Dockerfile": "FROM scratch\n",
                "tests/test.sh": HARBOR_TEST,
            }.items()
        },
        (),
        "python3.12",
    ),
}


def refuse_missing_interpreters(names: Sequence[str]) -> None:
    """End the check before its first run if the Python that a library needs does not start.

    Another library's run takes minutes. A command can be there and fail, as a version manager's does without a version.
    """
    for name in names:
        interpreter = ADAPTERS[name].interpreter
        try:
            is_working = subprocess.run([interpreter, "--version"], capture_output=True).returncode == 0
        except OSError:
            is_working = False
        if not is_working:
            raise SystemExit(
                f"{name}: {interpreter} does not start. Install it, or choose other libraries with --only "
                f"({', '.join(ADAPTERS)})"
            )


def version_of(python: str, package: str) -> str:
    command = [python, "-c", f"from importlib.metadata import version; print(version({package!r}))"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def check_adapter(name: str, folder: Path, environments: Path, overrides: list[str]) -> dict[str, Any]:
    """Run one adapter in a folder with a model. Returns its row."""
    adapter = ADAPTERS[name]
    started = time.perf_counter()
    python = sys.executable
    if adapter.packages:
        python = str(make_environment(environments / name, adapter.packages, interpreter=adapter.interpreter))
    install_seconds = time.perf_counter() - started
    for file, text in adapter.files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
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
        "version": version_of(python, adapter.packages[0].partition("==")[0] if adapter.packages else "reasoning-gym"),
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
    names = options.only or list(ADAPTERS)
    refuse_missing_interpreters(names)
    with tempfile.TemporaryDirectory(prefix="check_adapters_") as temporary_folder:
        folder = Path(temporary_folder)
        environments = options.keep.resolve() if options.keep else folder / "environments"
        make_tiny_model(folder / "model", num_layers=2)
        for name in names:
            yield check_adapter(name, folder, environments, options.overrides)
