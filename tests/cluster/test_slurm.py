"""A real Slurm of four nodes on this machine: one recipe under srun and on Ray as alone, and again after signals."""

from __future__ import annotations

import json
import os
import re
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

ROOT = Path(__file__).resolve().parents[2]
LOCAL_CLUSTER = Path(__file__).with_name("slurm_local.sh")
MEGARL = str(ROOT / ".venv/bin/megarl")
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
reward: {{functions: ["letters:share_of_digits"], num_workers: 4}}
train: {{steps: 16, prompts_per_step: 4, samples_per_prompt: 4}}
"""
REWARD = """
import time
from pathlib import Path

from megarl.types import Reward


def share_of_digits(completion, answer, correct_score):
    try:
        time.sleep(float(Path("pace").read_text()))
    except OSError:
        pass  # full speed
    return Reward(sum(c.isdigit() for c in completion) / max(1, len(completion)), True, False)
"""
WIDE = ("cluster.nodes=4", "cluster.ranks_per_node=1", "trainer.tp=1", "rollout.tp=1")


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
    """Four nodes, and a folder with a recipe that all of them see."""

    folder: Path
    environment: dict[str, str]

    def run(self, *command: str, check: bool = True, **environment: str) -> str:
        settings: dict[str, Any] = {"cwd": self.folder, "env": self.environment | environment, "timeout": 900}
        done = subprocess.run(command, capture_output=True, text=True, **settings)
        assert done.returncode == 0 or not check, done.stdout + done.stderr
        return done.stdout + done.stderr

    def local(self, *command: str, **environment: str) -> None:
        self.run("bash", str(LOCAL_CLUSTER), *command, **environment)

    def restart(self, **environment: str) -> None:
        self.local("down")
        self.local("up", "4", **environment)

    def submit(
        self, *arguments: str, nodes: int = 2, per_node: int = 2, script: str = "train", options: tuple[str, ...] = ()
    ) -> str:
        sizes = (f"--nodes={nodes}", f"--ntasks-per-node={per_node}", f"--gpus-per-node={per_node}")
        path = str(ROOT / f"launch/slurm/{script}.sbatch")
        command = ("sbatch", "--parsable", *sizes, "--output=job_%j.log", *options, path, "recipe.yaml", *arguments)
        return self.run(*command).strip()

    def pace(self, seconds: float) -> None:
        """How long each completion's score takes, four at a time; 0 for full speed."""
        path, new = self.folder / "pace", self.folder / "new_pace"
        if seconds:
            new.write_text(str(seconds))
            new.replace(path)
        else:
            path.unlink(missing_ok=True)

    def state(self, job: str) -> str:
        return self.run("scontrol", "show", "job", job).split("JobState=")[1].split()[0]

    def log(self, job: str) -> str:
        """What the job wrote, or why it did not start."""
        path = self.folder / f"job_{job}.log"
        return path.read_text() if path.exists() else self.run("scontrol", "show", "job", job)

    def status(self, name: str) -> dict[str, Any]:
        try:
            return json.loads((self.folder / "runs" / name / "status.json").read_text())
        except (OSError, ValueError):
            return {"state": "absent", "step": 0, "exit_code": None}

    def until(self, job: str, reached: Callable[[], bool], seconds: float = 300) -> None:
        started = time.monotonic()
        while not reached():
            assert time.monotonic() - started < seconds, self.log(job)
            time.sleep(0.05)

    def until_step(self, job: str, name: str, step: int) -> None:
        def is_there() -> bool:
            status = self.status(name)
            return status["state"] == "running" and status["step"] >= step

        self.until(job, is_there)

    def until_ended(self, job: str, name: str, exit_code: int) -> dict[str, Any]:
        """How a start of the run ended, once it has."""
        ended = ("stopped", "failed", "done")
        self.until(job, lambda: self.status(name)["state"] in ended)
        status = self.status(name)
        assert status["exit_code"] == exit_code, (status, self.log(job))
        return status

    def weights(self, name: str) -> bytes:
        return (self.folder / "runs" / name / "hf/model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path], tool: Callable[[str], ModuleType]
) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("slurm")
    tool("make_dataset").make_dataset(folder / "data", sft=8, train=64, heldout=8)
    (folder / "letters.py").write_text(REWARD)
    shutil.copytree(tiny_model(num_layers=2), folder / "model")
    (folder / "recipe.yaml").write_text(RECIPE.format(model=folder / "model"))
    state = folder / "state"
    environment = {
        **os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin", "MEGARL_SLURM_DIR": str(state),
        "MEGARL_SLURM_PORT": str(free_ports(5)), "SLURM_CONF": str(state / "slurm.conf"), "MEGARL_HOME": str(ROOT),
        "MEGARL_SLURM_GRACE": "60", "MEGARL_SLURM_TOPOLOGY": "tree",
    }  # fmt: skip
    made = Cluster(folder, environment)
    made.local("up", "4")
    try:
        yield made
    finally:
        made.local("down")


@pytest.fixture(scope="module")
def alone(cluster: Cluster) -> bytes:
    """The weights of the run without Slurm."""
    cluster.run(MEGARL, "train", "recipe.yaml", "name=alone", "cluster.nodes=1", "cluster.ranks_per_node=4")
    return cluster.weights("alone")


@needs_slurm
def test_a_job_that_is_stopped_is_queued_again_and_ends_as_a_run_alone(cluster: Cluster, alone: bytes) -> None:
    """By its time limit, by a job that preempts it with the signal asked for, and by one that only ends its steps."""
    cluster.pace(2)
    job = cluster.submit(options=("--time=2", "--signal=B:USR1@60"))

    def preempt() -> None:
        cluster.run("sbatch", "--partition=high", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")

    assert "USR1" in cluster.until_ended(job, "job", 75)["cause"]
    step = cluster.status("job")["step"]
    assert 1 <= step < 10
    cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    for parameters, signal in (("preempt_send_user_signal", "USR1"), ("enable_configless", "TERM")):
        cluster.local("conf", "4", MEGARL_SLURM_PARAMETERS=parameters)
        cluster.until_step(job, "job", step + 1)
        preempt()
        status = cluster.until_ended(job, "job", 75)
        assert signal in status["cause"], (status, cluster.log(job))
        assert status["step"] > step
        step = status["step"]
    cluster.pace(0)
    cluster.until(job, lambda: cluster.state(job) in ("COMPLETED", "FAILED"))
    log = cluster.log(job)
    assert cluster.state(job) == "COMPLETED" and len(re.findall(f"job {job}, start [0-9]+: 2 nodes", log)) >= 4, log
    assert cluster.until_ended(job, "job", 0)["step"] == 16
    assert cluster.weights("job") == alone
    attempts = cluster.folder / "runs/job/logs"
    assert all((attempts / f"attempt_{n}/rank_0003.log").exists() for n in (1, 2, 3, 4))
    assert (attempts / "latest").resolve().name == max(p.name for p in attempts.glob("attempt_*"))


@needs_slurm
def test_a_lost_rank_and_a_lost_node_cost_the_steps_since_the_checkpoint(cluster: Cluster) -> None:
    """On four nodes, whose ranks follow their switches."""
    more = (*WIDE, "checkpoint.every_steps=1")
    cluster.run(MEGARL, "train", "recipe.yaml", "name=alone4", *more, "cluster.nodes=1", "cluster.ranks_per_node=4")
    # Slurm 22.05 loses count of the GPUs of a job that it queues again while a node is down.
    cluster.pace(1)
    job = cluster.submit("name=lost", *more, nodes=4, per_node=1, options=("--gpus-per-node=0",))
    cluster.until_step(job, "lost", 2)
    assert "ranks on n1, n3, n2, n4" in cluster.log(job)
    victims = [int(p.name) for p in Path("/proc").glob("[0-9]*") if _is_rank(p, 2)]
    assert len(victims) == 1
    os.kill(victims[0], 9)
    status = cluster.until_ended(job, "lost", 76)
    assert "rank 2 of 4 on node n2" in status["cause"] and status["rank"] == 2, status
    cluster.until_step(job, "lost", status["step"] + 1)
    cluster.local("kill-node", "n4")
    status = cluster.until_ended(job, "lost", 76)
    assert "rank 3 of 4 on node n4" in status["cause"], status
    cluster.pace(0)
    cluster.until(job, lambda: cluster.state(job) == "PENDING")
    cluster.local("start-node", "n4")
    cluster.until(job, lambda: cluster.state(job) in ("COMPLETED", "FAILED"))
    assert cluster.status("lost")["exit_code"] == 0, cluster.log(job)
    assert cluster.weights("lost") == cluster.weights("alone4")
    cluster.restart()


@needs_slurm
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give one node other mounts than the rest")
def test_a_node_without_the_model_ends_the_job_at_once(cluster: Cluster) -> None:
    model = cluster.folder / "model"
    cluster.local("kill-node", "n4")
    mounts = f"mount -t tmpfs none {model} && exec slurmd -f $SLURM_CONF -N n4"
    cluster.run("unshare", "--mount", "bash", "-c", mounts)
    try:
        job = cluster.submit("name=bare", options=("--nodelist=n3,n4",))
        cluster.until(job, lambda: cluster.state(job) != "PENDING", 60)
        started = time.monotonic()
        cluster.until(job, lambda: cluster.state(job) == "FAILED", 60)
        assert time.monotonic() - started < 30
        status = cluster.until_ended(job, "bare", 2)
        assert f"node n4: {model} is not there or cannot be read" in status["cause"]
    finally:
        cluster.local("kill-node", "n4")
        cluster.local("start-node", "n4")


@needs_slurm
def test_a_job_with_a_ray_cluster_of_its_own_ends_as_a_run_alone(cluster: Cluster, alone: bytes) -> None:
    pytest.importorskip("ray", reason="needs Ray: launch/setup.sh ray")
    cluster.pace(0.5)
    job = cluster.submit("name=on_ray", script="ray")
    cluster.until_step(job, "on_ray", 2)
    assert Path(f"/tmp/ray-{job}-0").exists()
    cluster.run("scancel", "--signal=TERM", "--batch", job)
    assert "TERM" in cluster.until_ended(job, "on_ray", 75)["cause"]
    cluster.pace(0)
    cluster.until(job, lambda: cluster.state(job) in ("COMPLETED", "FAILED"))
    assert cluster.until_ended(job, "on_ray", 0)["step"] == 16
    assert cluster.weights("on_ray") == alone
    assert not list(Path("/tmp").glob(f"ray-{job}-*"))


@needs_slurm
def test_the_doctor_sees_all_nodes_in_the_order_of_their_switches(cluster: Cluster) -> None:
    allocation = ("salloc", "--quiet", "--nodes=4", "--ntasks-per-node=1")
    recipe = ("recipe.yaml", *WIDE, "cluster.launcher=slurm")
    told = json.loads(cluster.run(*allocation, MEGARL, "doctor", *recipe, "--json"))
    assert told["nodes"] == ["n1", "n3", "n2", "n4"] and told["notices"][0].startswith("links: across nodes ")
    assert {nodes for nodes, *_ in told["findings"]} == {"all"}


@needs_slurm
@pytest.mark.parametrize("launcher", ["slurm", "ray"])
def test_jobs_are_accepted_before_they_wait(cluster: Cluster, launcher: str) -> None:
    recipe = ("recipe.yaml", f"cluster.launcher={launcher}")
    (cluster.folder / "script").write_text(cluster.run(MEGARL, "slurm", "render", *recipe))
    cluster.run("sbatch", "--test-only", "script")
    job = cluster.run(MEGARL, "slurm", "submit", *recipe, "name=queued", "--sbatch=--hold", "--sbatch=--parsable")
    assert cluster.state(job.strip()) == "PENDING"
    shown = cluster.run("scontrol", "show", "job", job.strip())
    assert "JobName=queued" in shown and "NumNodes=2" in shown and "Dependency=singleton" in shown
    cluster.run("scancel", job.strip())
    refused = cluster.run(MEGARL, "slurm", "submit", *recipe, "cluster.nodes=5", check=False)
    assert "sbatch refuses the job" in refused


def _is_rank(process: Path, rank: int) -> bool:
    """Whether the process is a task of srun whose log is this rank's."""
    command = _read(process / "cmdline").split(b"\0")
    if b"python" not in command[0] or b"megarl.workers.srun_group" not in command:
        return False
    with suppress(OSError):
        return (process / "fd/1").readlink().name == f"rank_{rank:04d}.log"
    return False


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
    assert lines[lines.index(f"MEGARL_HOME={ROOT}") + 1] == "set -- 'my recipe.yaml' train.steps=3"


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck: apt-get install shellcheck")
def test_the_scripts_are_sound_shell() -> None:
    scripts = [*(ROOT / "launch").rglob("*.sh"), *(ROOT / "launch/slurm").glob("*.sbatch")]
    done = subprocess.run(["shellcheck", "-x", *map(str, scripts)], cwd=ROOT, capture_output=True, text=True)
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


def test_without_slurm_s_commands_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from megarl import slurm

    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="sbatch: not found"):
        slurm.submit("#!/bin/sh\n", [])
