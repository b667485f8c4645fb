"""A real Slurm of two nodes on this machine: one recipe under srun as alone, and again after signals."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megarl.config import Recipe
from megarl.recipe import load
from megarl.slurm import render
from megarl.types import ConfigError
from megarl.workers.nodes import faults

ROOT = Path(__file__).resolve().parents[2]
LOCAL_CLUSTER = Path(__file__).with_name("slurm_local.sh")
SBATCH = ROOT / "launch/slurm/train.sbatch"
needs_slurm = pytest.mark.skipif(
    shutil.which("sbatch", path=f"{os.environ['PATH']}:/usr/sbin") is None,
    reason="needs Slurm and munge: apt-get install --no-install-recommends slurm-wlm munge",
)
pytestmark = pytest.mark.timeout(1800)

RECIPE = """
name: job
loop: rl
model: {{path: {model}, dtype: float32}}
data: {{train: data/train.jsonl, max_prompt_tokens: 96}}
cluster: {{nodes: 2, ranks_per_node: 2}}
trainer: {{tp: 2, pp: 2, max_tokens_per_microbatch: 512}}
optimizer: {{learning_rate: 2e-3}}
rollout: {{tp: 2, kv_cache_gib: 0.25, sampling: {{max_new_tokens: 12}}}}
reward: {{functions: ["letters:share_of_digits"]}}
train: {{steps: {steps}, prompts_per_step: 4, samples_per_prompt: 4}}
"""
REWARD = """
from megarl.types import Reward


def share_of_digits(completion, answer, correct_score):
    return Reward(sum(c.isdigit() for c in completion) / max(1, len(completion)), True, False)
"""


def free_ports(count: int) -> int:
    """The first of so many free ports in a row."""
    for first in range(17000, 30000, count + 1):
        with suppress(OSError):
            taken = [socket.create_server(("127.0.0.1", first + i)) for i in range(count)]
            for one in taken:
                one.close()
            return first
    raise AssertionError("no ports")


@dataclass(frozen=True)
class Cluster:
    """Two nodes, and a folder with a recipe that all of them see."""

    folder: Path
    environment: dict[str, str]

    def run(self, *command: str, check: bool = True) -> str:
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0 or not check, done.stdout + done.stderr
        return done.stdout + done.stderr

    def submit(self, *arguments: str) -> str:
        options = ("--parsable", "--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2", "--output=job.log")
        return self.run("sbatch", *options, str(SBATCH), *arguments).strip()

    def state(self, job: str) -> str:
        return self.run("scontrol", "show", "job", job).split("JobState=")[1].split()[0]

    def status(self, name: str) -> dict[str, Any]:
        try:
            return json.loads((self.folder / "runs" / name / "status.json").read_text())
        except (OSError, ValueError):
            return {"state": "absent", "step": 0}

    def until(self, reached: Callable[[], bool], seconds: float = 300) -> None:
        started = time.monotonic()
        while not reached():
            assert time.monotonic() - started < seconds, (self.folder / "job.log").read_text()
            time.sleep(0.05)

    def is_at(self, name: str, step: int) -> bool:
        status = self.status(name)
        return status["state"] == "running" and status["step"] >= step

    def weights(self, name: str) -> bytes:
        return (self.folder / "runs" / name / "hf/model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path], tool: Callable[[str], ModuleType]
) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("slurm")
    tool("make_dataset").make_dataset(folder / "data", sft=8, train=64, heldout=8)
    (folder / "letters.py").write_text(REWARD)
    (folder / "recipe.yaml").write_text(RECIPE.format(model=tiny_model(num_layers=2), steps=6))
    state = folder / "state"
    environment = {
        **os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin", "MEGARL_SLURM_DIR": str(state),
        "MEGARL_SLURM_PORT": str(free_ports(3)), "SLURM_CONF": str(state / "slurm.conf"),
        "MEGARL_VENV": str(ROOT / ".venv"),
    }  # fmt: skip
    made = Cluster(folder, environment)
    made.run("bash", str(LOCAL_CLUSTER), "up", "2")
    try:
        yield made
    finally:
        made.run("bash", str(LOCAL_CLUSTER), "down", check=False)


@pytest.fixture(scope="module")
def alone(cluster: Cluster) -> bytes:
    """The weights of the run without Slurm."""
    megarl = str(ROOT / ".venv/bin/megarl")
    cluster.run(megarl, "train", "recipe.yaml", "name=alone", "cluster.nodes=1", "cluster.ranks_per_node=4")
    return cluster.weights("alone")


@needs_slurm
def test_a_job_that_is_asked_to_stop_is_queued_again_and_ends_as_a_run_alone(cluster: Cluster, alone: bytes) -> None:
    """First by what a time limit sends to the batch script, then by what a preemption sends to the ranks."""
    job = cluster.submit("recipe.yaml")
    for restart, signal in enumerate((("--signal=USR1", "--batch"), ("--signal=TERM",))):
        step = 1 + 2 * restart
        cluster.until(
            lambda step=step: cluster.status("job")["state"] == "running" and cluster.status("job")["step"] >= step
        )
        cluster.run("scancel", *signal, job)
        cluster.until(lambda: cluster.status("job")["state"] == "stopped", 60)
        assert cluster.status("job")["exit_code"] == 75, cluster.status("job")
        cluster.until(lambda: cluster.status("job")["state"] != "stopped", 120)
    cluster.until(lambda: cluster.state(job) in ("COMPLETED", "FAILED"), 300)
    log = (cluster.folder / "job.log").read_text()
    assert cluster.state(job) == "COMPLETED" and f"job {job}, start 2: 2 nodes" in log, log
    assert cluster.status("job") | {"resumed_step": 0} == {
        "state": "done", "step": 6, "cause": None, "exit_code": 0, "resumed_step": 0,
    }  # fmt: skip
    assert cluster.weights("job") == alone
    assert not list((cluster.folder / "runs/job/logs").glob(".key*"))


@needs_slurm
def test_a_rank_that_dies_ends_the_job_with_its_node(cluster: Cluster) -> None:
    job = cluster.submit("recipe.yaml", "name=lost", "train.steps=500")
    cluster.until(lambda: cluster.is_at("lost", 1))
    processes = [process for process in Path("/proc").glob("[0-9]*") if _is_task(process, rank=3)]
    victims = [int(process.name) for process in processes]
    assert len(victims) == 1
    os.kill(victims[0], 9)
    cluster.until(lambda: cluster.state(job) == "FAILED", 60)
    status = cluster.status("lost")
    assert status["exit_code"] == 76 and "of 4 on node n" in status["cause"], status


@needs_slurm
def test_jobs_are_accepted_before_they_wait(cluster: Cluster) -> None:
    megarl = str(ROOT / ".venv/bin/megarl")
    (cluster.folder / "script").write_text(cluster.run(megarl, "slurm", "render", "recipe.yaml", "cluster.nodes=2"))
    cluster.run("sbatch", "--test-only", "script")
    job = cluster.run(megarl, "slurm", "submit", "recipe.yaml", "name=queued", "--sbatch=--hold", "--sbatch=--parsable")
    assert cluster.state(job.strip()) == "PENDING"
    shown = cluster.run("scontrol", "show", "job", job.strip())
    assert "JobName=queued" in shown and "NumNodes=2" in shown and "Dependency=singleton" in shown
    cluster.run("scancel", job.strip())
    refused = cluster.run(megarl, "slurm", "submit", "recipe.yaml", "cluster.nodes=3", check=False)
    assert "sbatch refuses the job" in refused


def _is_task(process: Path, rank: int) -> bool:
    command = _read(process / "cmdline").split(b"\0")
    number = b"\0SLURM_PROCID=%d\0" % rank
    return b"python" in command[0] and b"megarl.workers.srun_group" in command and number in _read(process / "environ")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_a_script_says_what_the_recipe_says() -> None:
    recipe = load(ROOT / "launch/recipes/qwen3_32b_grpo.yaml")
    lines = render(recipe, ["my recipe.yaml", "train.steps=3"]).splitlines()
    for line in ("--job-name=qwen3_32b_grpo", "--nodes=2", "--ntasks-per-node=8", "--gpus-per-node=8"):
        assert f"#SBATCH {line}" in lines
    assert lines[lines.index("set -uo pipefail") + 1] == "set -- 'my recipe.yaml' train.steps=3"


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck: apt-get install shellcheck")
def test_the_scripts_are_sound_shell() -> None:
    scripts = [*(ROOT / "launch").rglob("*.sh"), SBATCH]
    done = subprocess.run(["shellcheck", *map(str, scripts)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_outside_a_job_the_launcher_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megarl.preflight.sizes import machines

    fields = {"name": "n", "loop": "rl", "model": {"path": "m"}, "data": {"train": "t"}}
    recipe = Recipe.model_validate(fields | {"cluster": {"launcher": "slurm", "nodes": 2, "ranks_per_node": 4}})
    for name in ("SLURM_JOB_NUM_NODES", "SLURM_NTASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    assert "this is no Slurm job" in next(iter(machines(recipe)))
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "3")
    assert "cluster.nodes = 2: the job has 3; set cluster.nodes=3" in next(iter(machines(recipe)))
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "8")
    assert "cluster.ranks_per_node = 4: the job has 8 tasks a node" in next(iter(machines(recipe)))
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "4")
    assert list(machines(recipe)) == []


GOOD = {"unread": [], "is_writable": True, "free_bytes": 1 << 40, "gpus": ["H200, 570"] * 8, "time": 1000.0}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        pytest.param({}, None, id="sound"),
        pytest.param({"unread": ["/models/q"]}, "node n2: /models/q is not there or cannot be read", id="model"),
        pytest.param({"is_writable": False}, "node n2: /runs/a cannot be written", id="run folder"),
        pytest.param({"free_bytes": 1 << 20}, "node n2: /runs/a has 1 MiB left", id="disk"),
        pytest.param({"gpus": ["H200, 570"] * 7}, "node n2: shows 7 GPUs, the run needs 8", id="a GPU is gone"),
        pytest.param({"gpus": ["H200, 560"] * 8}, "different GPUs or drivers: H200, 560, H200, 570", id="drivers"),
        pytest.param({"time": 1100.0}, "node n2: its clock is +100 s off", id="clock"),
    ],
)
def test_a_bad_node_is_named(changed: dict[str, Any], told: str | None) -> None:
    reports = {"n1": GOOD, "n2": GOOD | changed, "n3": GOOD}
    found = list(faults(reports, "/runs/a", 8))
    assert found == [] if told is None else len(found) == 1 and told in found[0]


def test_without_slurm_s_commands_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from megarl import slurm

    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="sbatch: not found"):
        slurm.submit("#!/bin/sh\n", [])
