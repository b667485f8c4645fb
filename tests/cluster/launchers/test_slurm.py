"""A real Slurm of four nodes on this machine: one recipe under srun and on Ray as alone, and again after signals."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from megarl.cli import main
from megarl.cluster.agents.topology import NodeKind
from megarl.cluster.launchers import srun
from megarl.cluster.launchers.sbatch import check_options, render
from megarl.config import Recipe
from megarl.config.recipe import load
from megarl.files.private_folder import PrivateFolder
from megarl.rollout.journal.state import account_tokens
from megarl.types import ConfigError
from tests.child_processes import processes_writing_to
from tests.cluster.local_slurm import MEGARL, ROOT, Cluster
from tests.cluster.losing import scenes
from tests.logged_steps import logged_steps
from tests.self_tests.test_leftovers import end_pytest
from tests.service.served import run_program
from tests.serving.tool_model import make_tool_model
from tools.make_dataset import make_dataset

_skip_without_slurm = pytest.mark.skipif(
    shutil.which("sbatch", path=f"{os.environ['PATH']}:/usr/sbin") is None,
    reason="needs Slurm and munge: apt-get install --no-install-recommends slurm-wlm munge",
)
pytestmark = pytest.mark.timeout(7200)


def needs_slurm(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test of the tier `cluster` that is left out on a machine without Slurm."""
    return pytest.mark.cluster(pytest.mark.slurm(_skip_without_slurm(test)))


RECIPE = """
name: job
loop: rl
model: {{path: {model}, dtype: float32}}
data: {{train: data/train.jsonl, max_prompt_tokens: 96}}
cluster: {{nodes: 2, ranks_per_node: 1}}
trainer: {{tp: 2, max_tokens_per_microbatch: 512}}
optimizer: {{learning_rate: 2e-3}}
rollout: {{tp: 2, kv_cache_gib: 0.02, sampling: {{max_new_tokens: 12}}}}
reward: {{functions: ["letters:share_of_digits"], num_workers: 4}}
train: {{steps: 8, prompts_per_step: 4, samples_per_prompt: 4}}
"""
SERVICE = """
name: served
loop: rl
model: {{path: {model}, dtype: float32}}
data: {{train: data/train.jsonl, max_prompt_tokens: 48}}
cluster: {{nodes: 2, ranks_per_node: 1}}
trainer: {{max_tokens_per_microbatch: 512}}
lora: {{rank: 8}}
rollout: {{kv_cache_gib: 0.02, sampling: {{max_new_tokens: 16}}}}
train: {{steps: 1, prompts_per_step: 2, samples_per_prompt: 2}}
"""
ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+")
REWARD = """
import time
from pathlib import Path
from types import SimpleNamespace

from megarl.types import Reward


def share_of_digits(completion_text, answer, correct_score):
    try:
        time.sleep(float(Path("pace").read_text()))
    except OSError:
        pass  # full speed
    return Reward(sum(c.isdigit() for c in completion_text) / max(1, len(completion_text)), True, False)
"""
WIDE = ("cluster.nodes=4", "cluster.ranks_per_node=1", "trainer.tp=1", "rollout.tp=1")


@pytest.fixture(scope="module")
def whole_cluster(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path]) -> Iterator[Cluster]:
    """Four nodes."""
    folder = tmp_path_factory.mktemp("slurm")
    make_dataset(folder / "data", sft=8, train=64, heldout=8)
    (folder / "letters.py").write_text(REWARD)
    shutil.copytree(tiny_model(num_layers=2), folder / "model")
    (folder / "recipe.yaml").write_text(RECIPE.format(model=folder / "model"))
    made = Cluster(folder, 4)
    try:
        made.local("up", "4")
        yield made
    finally:
        made.stop()
        PrivateFolder().remove()  # as the next run does for those of ranks that were killed


@pytest.fixture
def cluster(whole_cluster: Cluster) -> Iterator[Cluster]:
    """Every test finds four idle nodes and no job, whatever became of the one before it."""
    yield whole_cluster
    whole_cluster.reset()


@pytest.fixture(scope="module")
def alone(whole_cluster: Cluster) -> bytes:
    """The weights of the run without Slurm."""
    whole_cluster.train_alone("name=alone", "cluster.nodes=1", "cluster.ranks_per_node=2")
    return whole_cluster.weights("alone")


@needs_slurm
def test_no_job_of_a_test_outlives_it(cluster: Cluster) -> None:
    """One that runs, one that queues itself again when it is ended, one that waits for both, one that is held."""
    requeue = "trap 'scontrol requeue $SLURM_JOB_ID' TERM; touch started_$SLURM_JOB_ID; while :; do sleep 0.1; done"
    again = cluster.run("sbatch", "--parsable", "--requeue", "--output=/dev/null", f"--wrap={requeue}").strip()
    plain = cluster.run("sbatch", "--parsable", "--output=/dev/null", "--wrap=sleep 600").strip()
    cluster.run("sbatch", f"--dependency=afterok:{again}", "--output=/dev/null", "--wrap=sleep 600")
    cluster.run("sbatch", "--hold", "--output=/dev/null", "--wrap=sleep 600")
    cluster.until(again, (cluster.folder / f"started_{again}").exists)
    cluster.until(plain, lambda: cluster.state(plain) == "RUNNING")
    cluster.reset()
    assert cluster.run("squeue", "--noheader") == ""
    assert cluster.run("sinfo", "--noheader", "--partition=low", "--states=idle", "--format=%D").split() == ["4"]


@pytest.mark.long
@needs_slurm
def test_a_program_continues_from_its_checkpoint_in_the_next_job_of_a_service(cluster: Cluster) -> None:
    """Each job serves on two nodes. The step after the load is that after the save, bit for bit."""
    (cluster.folder / "service.yaml").write_text(SERVICE.format(model=cluster.folder / "model"))
    results: list[dict[str, Any]] = []
    for _ in range(2):
        job = cluster.submit("--port", "0", script="service", recipe="service.yaml")
        cluster.until(job, lambda job=job: bool(ADDRESS.search(cluster.log(job))))
        [url] = set(ADDRESS.findall(cluster.log(job)))
        path = {"SDK_PATH": results[0]["path"]} if results else {}
        results.append(asyncio.run(run_program(url, "resumed", str(cluster.folder / "model"), **path)))
        cluster.run("scancel", "--signal=TERM", "--batch", job)
        assert cluster.until_over(job) == "FAILED" and "megarl ended with 75" in cluster.log(job)
    saved, loaded = results
    assert loaded == saved and len(saved["logprobs"]) == 7


@pytest.mark.long
@needs_slurm
def test_a_job_that_is_stopped_is_queued_again_and_ends_as_a_run_alone(cluster: Cluster, alone: bytes) -> None:
    """By its time limit, with the signal asked for, and by a job that preempts it and only ends its steps."""
    cluster.pace(0.5)
    job = cluster.submit(options=("--time=600", "--signal=B:USR1@3600"))

    def preempt() -> None:
        cluster.run("sbatch", "--partition=high", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")

    def stopped_by(asked: str, ask: Callable[[], object]) -> int:
        """The step at which the run saved."""
        seen = cluster.log(job).count(f"{asked}: saving")
        first = cluster.status("job")["step"]
        # How long the signal takes is Slurm's affair: the run must not get to its end meanwhile.
        cluster.pace(4)
        ask()
        cluster.until(job, lambda: cluster.log(job).count(f"{asked}: saving") > seen)
        cluster.pace(0)
        status = cluster.until_ended(job, "job", 75)
        cluster.pace(0.5)
        assert asked in status["cause"], (status, cluster.log(job))
        assert first <= status["step"] < 8
        return status["step"]

    def limit(minutes: int) -> None:
        cluster.run("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}")

    cluster.until_step(job, "job", 1)
    # However long the start took, the limit is now less than the hour away ahead of which the signal is due.
    step = stopped_by("SIGUSR1", lambda: limit(59))
    limit(600)
    # Without preempt_send_user_signal a preemption only ends the steps.
    cluster.configure("enable_configless")
    cluster.until_step(job, "job", step + 1)
    stopped_by("SIGTERM", preempt)
    cluster.pace(0)
    state = cluster.until_over(job)
    log = cluster.log(job)
    assert state == "COMPLETED" and len(re.findall(f"job {job}, start [0-9]+: 2 nodes", log)) >= 3, log
    assert cluster.until_ended(job, "job", 0)["step"] == 8
    assert cluster.weights("job") == alone
    attempts = cluster.folder / "runs/job/logs"
    assert all((attempts / f"attempt_{n}/rank_0001.log").exists() for n in (1, 2, 3))
    assert (attempts / "latest").resolve().name == max(p.name for p in attempts.glob("attempt_*"))


@pytest.mark.long
@needs_slurm
def test_a_lost_rank_and_a_lost_node_cost_the_steps_since_the_checkpoint(cluster: Cluster, alone: bytes) -> None:
    """On two nodes under two switches; the batch script is on the other one."""
    # Slurm 22.05 loses count of the GPUs of a job that it queues again while a node is down.
    cluster.pace(1)
    job = cluster.submit("name=lost", "checkpoint.every_steps=1", options=("--gpus-per-node=0", "--nodelist=n1,n4"))
    cluster.until_step(job, "lost", 2)
    assert "ranks on n1, n4" in cluster.log(job)
    os.kill(_rank_process(1, cluster), signal.SIGKILL)
    status = cluster.until_ended(job, "lost", 76)
    assert "rank 1 of 2 on node n4" in status["cause"] and status["rank"] == 1, status
    cluster.until_step(job, "lost", status["step"] + 1)
    cluster.kill_node("n4")
    status = cluster.until_ended(job, "lost", 76)
    assert "rank 1 of 2 on node n4" in status["cause"], status
    cluster.pace(0)
    # The script has queued the job again by itself; Slurm would take minutes to give the node up.
    cluster.until(job, lambda: cluster.log(job).count("megarl ended with 76") == 2)
    cluster.run("scontrol", "update", "NodeName=n4", "State=DOWN", "Reason=lost")
    cluster.until(job, lambda: cluster.state(job) == "PENDING")
    cluster.local("start-node", "n4")
    state = cluster.until_over(job)
    assert state == "COMPLETED" and cluster.status("lost")["exit_code"] == 0, cluster.log(job)
    assert cluster.weights("lost") == alone


@pytest.mark.long
@needs_slurm
def test_a_lost_rank_and_a_dead_node_are_replaced_within_the_job(cluster: Cluster, alone: bytes) -> None:
    """The rank on its node, and the node by a spare one. The job, its driver and its other nodes go on."""
    cluster.pace(1)
    recovery = ("name=spared", "cluster.recover=restart", "cluster.spare_nodes=1", "checkpoint.replicate=1")
    # Slurm 22.05 loses count of the GPUs of a job while a node is down.
    options = ("--gpus-per-node=0", "--nodelist=n1,n2,n3", "--no-kill", "--export=ALL,MEGARL_SPARE_NODES=1")
    job = cluster.submit(*recovery, nodes=3, options=options)
    cluster.until_step(job, "spared", 2)
    stays, dies = _nodes_of_ranks(cluster, job)
    first, lost = (_rank_process(rank, cluster) for rank in (0, 1))
    os.kill(lost, signal.SIGKILL)
    cluster.until(job, lambda: "fault/recoveries" in _metrics(cluster, "spared"))
    step = cluster.status("spared")["step"]
    cluster.until_step(job, "spared", step + 1)
    cluster.kill_node(dies)
    cluster.until(job, lambda: _metrics(cluster, "spared").count('"fault/recoveries":') == 2)
    assert _rank_process(0, cluster) != first
    cluster.pace(0)
    cluster.until_ended(job, "spared", 0)
    # The job is over once all its nodes have answered.
    cluster.local("start-node", dies)
    assert cluster.until_over(job) == "COMPLETED"
    log = cluster.log(job)
    assert log.count("and the lost are replaced") == 2 and ", start 1: " not in log, log
    [spare] = {"n1", "n2", "n3"} - {stays, dies}
    assert _nodes_of_ranks(cluster, job) == [stays, spare]
    assert cluster.weights("spared") == alone


@pytest.mark.long
@needs_slurm
def test_the_engines_of_a_dead_node_move_to_a_spare_one(cluster: Cluster) -> None:
    """A trainer rank and an engine on one node, two engines on the other. The first two go on meanwhile."""
    cluster.pace(1)
    separate = ("trainer.tp=1", "rollout.tp=1", "rollout.placement=separate", "rollout.ranks=3")
    separate += ("cluster.ranks_per_node=2", "algorithm.old_logprobs=trainer", "train.steps=20")
    recovery = ("name=moved", "cluster.recover=restart", "cluster.spare_nodes=1", "checkpoint.replicate=1")
    options = ("--gpus-per-node=0", "--nodelist=n1,n2,n3", "--no-kill", "--export=ALL,MEGARL_SPARE_NODES=1")
    job = cluster.submit(*separate, *recovery, nodes=3, per_node=2, options=options)
    cluster.until_step(job, "moved", 1)
    stays, dies = _nodes_of_ranks(cluster, job)
    [spare] = {"n1", "n2", "n3"} - {stays, dies}
    processes = [_rank_process(rank, cluster) for rank in range(4)]
    assert [_node_of_process(process) for process in processes] == [stays, stays, dies, dies]
    cluster.kill_node(dies)
    cluster.until(job, lambda: cluster.log(job).count("has started again in") == 2)
    moved = [_rank_process(rank, cluster) for rank in range(4)]
    assert moved[:2] == processes[:2]
    assert [_node_of_process(process) for process in moved] == [stays, stays, spare, spare]
    step = cluster.status("moved")["step"]
    cluster.until_step(job, "moved", step + 2)
    cluster.pace(0)
    cluster.until_ended(job, "moved", 0)
    cluster.local("start-node", dies)
    assert cluster.until_over(job) == "COMPLETED"
    steps = logged_steps(cluster.folder / "runs/moved")
    replicas = [int(step["rollout/replicas"]) for step in steps if step["step"]]
    assert len(replicas) == 20 and replicas[0] == replicas[-1] == 3, replicas


@pytest.mark.long
@needs_slurm
def test_a_run_within_a_job_goes_on_without_a_lost_rank_and_grows_back(cluster: Cluster) -> None:
    """The run grows back on the node of the lost rank."""
    cluster.pace(1)
    sizes = ("trainer.tp=1", "rollout.tp=1", "train.steps=20")
    job = cluster.submit("name=smaller", "cluster.recover=shrink", "checkpoint.replicate=1", *sizes)
    cluster.until_step(job, "smaller", 1)
    os.kill(_rank_process(1, cluster), signal.SIGKILL)
    cluster.until(job, lambda: "resize from " in cluster.log(job))
    cluster.pace(0)
    cluster.until_ended(job, "smaller", 0)
    assert cluster.until_over(job) == "COMPLETED"
    log, steps = cluster.log(job), logged_steps(cluster.folder / "runs/smaller")
    assert "the run continues on 1 of them" in log and "there are nodes for 2 ranks again" in log, log
    assert [step["step"] for step in steps] == list(range(21))
    recovered = [step for step in steps if "fault/recovery_seconds" in step]
    assert len(recovered) == 2 and recovered[1]["fault/restored_bytes"] > 0
    machine = json.loads((cluster.folder / "runs/smaller/logs/latest/attempt.json").read_text())["machine"]
    assert machine["ranks"].count("1 on ") == 2, machine


def _nodes_of_ranks(cluster: Cluster, job: str) -> list[str]:
    """Return the nodes that the run has named last. The nodes of one switch come first."""
    return re.findall(r"^ranks on (.*)$", cluster.log(job), re.MULTILINE)[-1].split(", ")


def _metrics(cluster: Cluster, name: str) -> str:
    return (cluster.folder / f"runs/{name}/metrics.jsonl").read_text()


def _rank_process(rank: int, cluster: Cluster) -> int:
    [found] = processes_writing_to(cluster.folder, f"rank_{rank:04d}.log", command="fork_server")
    return found


def _node_of_process(process: int) -> str:
    """Return the node whose agent started a rank. The nodes are programs of this machine, which name themselves."""
    variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    [node] = [value for value in variables if value.startswith(b"SLURMD_NODENAME=")]
    return node.decode().partition("=")[2]


@pytest.mark.long
@needs_slurm
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give one node other mounts than the rest")
def test_a_node_without_the_model_ends_the_job_at_once(cluster: Cluster) -> None:
    model = cluster.folder / "model"
    cluster.kill_node("n4")
    mounts = f"mount -t tmpfs none {model} && exec slurmd -f $SLURM_CONF -N n4"
    cluster.run("unshare", "--mount", "bash", "-c", mounts)
    # Longer than the test would wait.
    job = cluster.submit("name=bare", "cluster.start_timeout_seconds=3600", options=("--nodelist=n3,n4",))
    assert cluster.until_over(job) == "FAILED"
    status = cluster.until_ended(job, "bare", 2)
    assert f"node n4: {model} does not exist or cannot be read" in status["cause"]


@pytest.mark.long
@needs_slurm
def test_a_job_with_a_ray_cluster_of_its_own_ends_as_a_run_alone(cluster: Cluster, alone: bytes) -> None:
    pytest.importorskip("ray", reason="needs Ray: launch/setup.sh ray")
    if " " in sys.prefix:
        pytest.skip("Ray 2.60 starts no node from an environment with a blank in its path; ray.sbatch refuses it")
    # Another cluster's job may have had the same number.
    others = set(Path("/tmp").glob("ray-*"))
    cluster.pace(0.5)
    job = cluster.submit("name=on_ray", script="ray")
    cluster.until_step(job, "on_ray", 2)
    folders = set(Path("/tmp").glob(f"ray-{job}-*")) - others
    assert folders and all(folder.stat().st_mode & 0o777 == 0o700 for folder in folders)
    cluster.run("scancel", "--signal=TERM", "--batch", job)
    assert "TERM" in cluster.until_ended(job, "on_ray", 75)["cause"]
    cluster.pace(0)
    cluster.until_over(job)
    assert cluster.until_ended(job, "on_ray", 0)["step"] == 8
    assert cluster.weights("on_ray") == alone
    assert not any(folder.exists() for folder in folders)
    assert not set(Path("/tmp").glob(f"ray-{job}-*")) - others


@pytest.mark.long
@needs_slurm
def test_engines_in_job_steps_of_their_own_learn_what_they_do_alone(cluster: Cluster) -> None:
    """In a heterogeneous job: one node for the trainers, and two of another kind with an engine each."""
    separate = ("trainer.tp=1", "rollout.tp=1", "rollout.placement=separate", "train.steps=2", "cluster.nodes=1")
    separate += ("algorithm.old_logprobs=trainer",)
    kinds = ("cluster.ranks_per_node=2", "cluster.groups.engines={nodes: 2, ranks_per_node: 1}")
    submit = (MEGARL, "slurm", "submit", "recipe.yaml", "name=separate", *separate, *kinds)
    job = cluster.run(*submit, "--sbatch=--output=job_%j.log").split()[-1]
    cluster.train_alone("name=separate_alone", *separate, "rollout.ranks=2", "cluster.ranks_per_node=4")
    cluster.until_ended(job, "separate", 0)
    assert cluster.weights("separate") == cluster.weights("separate_alone")
    machine = json.loads((cluster.folder / "runs/separate/logs/latest/attempt.json").read_text())["machine"]
    # Nodes of Slurm's choice.
    assert re.fullmatch(r"2 on n\d, 1 on n\d, 1 on n\d", machine["ranks"]), machine


@needs_slurm
@pytest.mark.parametrize("scene", scenes("start_again"))
def test_a_rank_of_a_job_that_is_lost_is_named_and_the_others_go_on(cluster: Cluster, scene: str) -> None:
    allocation = ("salloc", "--quiet", "--nodes=2", "--ntasks-per-node=2")
    cluster.run(*allocation, sys.executable, "-m", "tests.cluster.losing", scene, scene, PYTHONPATH=str(ROOT))


def read_report(output: str) -> dict[str, Any]:
    """The first line of a program's output. After it srun reports no killed agents."""
    line, notices = output.split("\n", 1)
    assert "error" not in notices and "aborted" not in notices, notices
    report: dict[str, Any] = json.loads(line)
    return report


@needs_slurm
@pytest.mark.parametrize("number", [4, pytest.param(64, marks=pytest.mark.long)])
def test_containers_of_attempts_start_on_all_nodes_of_a_job(cluster: Cluster, number: int) -> None:
    allocation = ("salloc", "--quiet", "--nodes=2", "--ntasks-per-node=1")
    program = (sys.executable, "-m", "tests.cluster.containers_on_nodes", str(number))
    report = read_report(cluster.run(*allocation, *program, PYTHONPATH=str(ROOT)))
    print(report)
    assert len(report["nodes"]) == 2 and report["num_living"] == number
    assert report["answers"] == {"got hello": number} and report["left"] == 0


AGENT_RECIPE = """
name: agents
loop: rl
model: {{path: {model}, dtype: float32}}
data: {{train: problems.jsonl, max_prompt_tokens: 200}}
cluster: {{nodes: 2, ranks_per_node: 1}}
trainer: {{max_tokens_per_microbatch: 512}}
optimizer: {{learning_rate: 1e-3}}
rollout:
  kv_cache_gib: 0.05
  sampling: {{max_new_tokens: 24}}
  environment: command
  max_turns: 4
  agent: {{command: {command}, timeout_seconds: 3000, sandbox: sandbox, memory_gib: 0.05, disk_gib: 0.05}}
train: {{steps: 2, prompts_per_step: 8, samples_per_prompt: 8}}
"""
AGENT = """
import json, os, sys, urllib.request
problem = json.loads(sys.stdin.readline())
body = json.dumps({"model": "policy", "messages": problem["messages"]}).encode()
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
text = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"] or ""
print(float(len(set(text))))
"""


@pytest.mark.long
@needs_slurm
def test_attempts_in_containers_on_two_nodes_of_a_job_train(cluster: Cluster, tiny_model: Callable[..., Path]) -> None:
    """The guide's batch command trains two steps of 64 attempts, several of them in containers at the same time.

    `test_containers.py` shows that containers are spread over both nodes.
    """
    folder = cluster.folder
    model = make_tool_model(tiny_model(num_layers=1, tie_word_embeddings=False, vocab_size=512), folder / "tool_model")
    problems = [{"messages": [{"role": "user", "content": f"Add {n}."}], "gt_answer": f"{n}"} for n in range(16)]
    (folder / "problems.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    (folder / "harness").mkdir()
    (folder / "harness/run.py").write_text(AGENT)
    command = json.dumps([sys.executable, str(folder / "harness/run.py")])
    (folder / "agents.yaml").write_text(AGENT_RECIPE.format(model=model, command=command))
    cluster.environment["AGENT_TOKEN"] = "0123456789abcdef" * 2
    job = cluster.submit(
        "cluster.nodes=2", "rollout.agent.nodes=all", "rollout.agent.max_processes=64",
        "rollout.endpoint.host=0.0.0.0", "rollout.endpoint.token=${oc.env:AGENT_TOKEN}",
        f"rollout.agent.folders=[{folder}/harness]", recipe="agents.yaml",
    )  # fmt: skip
    cluster.patience = max(cluster.patience, 3000.0)
    assert cluster.until_over(job) == "COMPLETED", cluster.log(job)
    steps = [step for step in logged_steps(folder / "runs/agents") if "rollout/turns/mean" in step]
    assert len(steps) == 2
    for step in steps:
        assert step["rollout/ended/error"] == 0 and step["environment/leaked_containers"] == 0
        assert step["logprob_gap/max"] < 1e-4 and step["environment/live_containers"] > 1
    account = account_tokens(folder / "runs/agents")
    assert account is not None and account.faults == [] and account.num_trained > 0
    assert account.sampled == account.num_trained + account.num_untrained and not account.lost + account.waiting


@pytest.mark.long
@needs_slurm
def test_the_doctor_sees_all_nodes_in_the_order_of_their_switches(cluster: Cluster) -> None:
    allocation = ("salloc", "--quiet", "--nodes=4", "--ntasks-per-node=1")
    recipe = ("recipe.yaml", *WIDE, "cluster.launcher=slurm")
    report = read_report(cluster.run(*allocation, MEGARL, "doctor", *recipe, "--json"))
    assert report["nodes"] == ["n1", "n3", "n2", "n4"] and report["notices"][0].startswith("links: across nodes ")
    assert {nodes for nodes, *_ in report["findings"]} == {"all"}


@needs_slurm
@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ended_by_a_signal_pytest_leaves_no_cluster(number: signal.Signals) -> None:
    has_ray = find_spec("ray") is not None
    held = {"HOLD_SLURM": "1"} | ({"HOLD_RAY": "1"} if has_ray else {})
    # The names of sockets have a limit: tmp_path is too long for Slurm's and Ray's.
    with tempfile.TemporaryDirectory(prefix="m", dir=os.environ["PYTEST_DEBUG_TEMPROOT"]) as folder:
        commands = " ".join(end_pytest(number, Path(folder), **held))
    for name in ("munged", "slurmctld", "slurmd", *(["raylet"] if has_ray else [])):
        assert name in commands


@pytest.mark.long
@needs_slurm
@pytest.mark.parametrize("launcher", ["slurm", pytest.param("ray", marks=pytest.mark.long)])
def test_jobs_are_accepted_before_they_wait(cluster: Cluster, launcher: str) -> None:
    recipe = ("recipe.yaml", f"cluster.launcher={launcher}")
    (cluster.folder / "script").write_text(cluster.run(MEGARL, "slurm", "render", *recipe))
    cluster.run("sbatch", "--test-only", "script")
    submit = (MEGARL, "slurm", "submit", *recipe, "name=queued", "--sbatch=--hold", "--sbatch=--parsable")
    cluster.run(*submit)
    job = cluster.run(*submit)  # Slurm drops the dependency of a first one as soon as it looks at it
    assert cluster.state(job.strip()) == "PENDING"
    shown = cluster.run("scontrol", "show", "job", job.strip())
    assert "JobName=queued" in shown and "NumNodes=2" in shown and "Dependency=singleton" in shown
    refused = cluster.run(MEGARL, "slurm", "submit", *recipe, "--sbatch=--nodes=5", check=False)
    assert "sbatch refuses the job" in refused


@needs_slurm
def test_a_job_avoids_the_nodes_that_it_found_faulty(cluster: Cluster) -> None:
    """Two starts end with 76 and name their node; each further one is on a node not named so far."""
    (cluster.folder / "faulty.sbatch").write_text(
        "#!/usr/bin/env bash\n"
        '. "$MEGARL_HOME/launch/slurm/job.sh"\n'
        "code=0\n"
        'if [ "${SLURM_RESTART_COUNT:-0}" -lt 2 ]; then\n'
        '    code=76 && echo "$SLURM_JOB_NODELIST" >"$MEGARL_BAD_NODES_FILE"\n'
        "fi\n"
        "end_job\n"
    )
    options = ("--parsable", "--nodes=1", "--requeue", "--open-mode=append", "--output=job_%j.log")
    job = cluster.run("sbatch", *options, "faulty.sbatch", "recipe.yaml").strip()
    assert cluster.until_over(job) == "COMPLETED"
    nodes = re.findall(r"start [0-9]+: 1 nodes, (n\d)$", cluster.log(job), re.MULTILINE)
    assert len(nodes) == len(set(nodes)) == 3, cluster.log(job)
    shown = cluster.run("scontrol", "show", "job", job)
    assert f"ExcNodeList={','.join(sorted(nodes[:2]))} " in shown.replace("\n", " "), shown


def test_a_script_excludes_the_run_s_faulty_nodes(tmp_path: Path) -> None:
    recipe = load(ROOT / "launch/recipes/qwen3_32b_grpo.yaml", [f"runs_folder={tmp_path}"])
    assert "--exclude" not in render(recipe, arguments=["recipe.yaml"])
    run = tmp_path / recipe.name
    run.mkdir()
    (run / "status.json").write_text('{"state": "failed", "step": 3, "bad_nodes": ["gpu7", "gpu12"]}')
    lines = render(recipe, arguments=["recipe.yaml"]).splitlines()
    assert "#SBATCH --exclude=gpu7,gpu12" in lines and "#SBATCH --requeue" in lines


def test_a_script_says_what_the_recipe_says() -> None:
    recipe = load(ROOT / "launch/recipes/qwen3_32b_grpo.yaml")
    lines = render(recipe, arguments=["my recipe.yaml", "train.steps=3"]).splitlines()
    for line in ("--job-name=qwen3_32b_grpo", "--nodes=2", "--ntasks-per-node=8", "--gpus-per-node=8", "--mem=0"):
        assert f"#SBATCH {line}" in lines
    assert lines[lines.index(f"MEGARL_HOME={shlex.quote(str(ROOT))}") + 1] == "set -- 'my recipe.yaml' train.steps=3"
    on_cpu = render(load(ROOT / "launch/recipes/qwen3_32b_grpo.yaml", ["cluster.device=cpu"]), arguments=[])
    assert "--ntasks-per-node=8" in on_cpu and "gpus-per-node" not in on_cpu
    comments = [line for line in lines if line.startswith("# ")]
    assert comments[0] == "# The job of run qwen3_32b_grpo, written by megarl slurm: recipe, nodes and ranks are set."
    assert not any("sbatch --nodes" in line for line in comments)


def test_a_script_sets_the_number_of_spare_nodes_whatever_the_submitting_shell_has() -> None:
    spared = ["cluster.recover=restart", "cluster.spare_nodes=1"]
    for overrides, expected in ((spared, 1), ([], 0)):
        script = render(load(ROOT / "launch/recipes/qwen3_32b_grpo.yaml", overrides), arguments=[])
        assert re.findall("^MEGARL_SPARE_NODES=(.*)$", script, re.MULTILINE) == [str(expected)]


def test_options_of_the_command_stand_in_the_printed_script(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """sbatch takes the last of equal options, so they come after the recipe's, and before the engines' component."""
    recipe = load(ROOT / "launch/recipes/qwen3_32b_grpo.yaml")
    lines = render(recipe, arguments=[], options=["--output=my log", "--partition=gpu"]).splitlines()
    options = [line for line in lines if line.startswith("#SBATCH ")]
    assert options[-3:] == ["#SBATCH --output=megarl-%j.log", "#SBATCH '--output=my log'", "#SBATCH --partition=gpu"]
    with pytest.raises(ConfigError, match=r"--sbatch='--comment=a\\nb': has a control character"):
        render(recipe, arguments=[], options=["--comment=a\nb"])
    monkeypatch.setattr(sys, "argv", ["megarl", "slurm", "render", "qwen3_32b_grpo", "--sbatch=--partition=gpu"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code and "#SBATCH --partition=gpu\n" in capfd.readouterr().out


@pytest.mark.parametrize(
    "options",
    [
        ["--export=HF_TOKEN=geheim"],
        ["--hold", "--export=ALL,A=1,WANDB_API_KEY=geheim"],
        ["--export", "HF_TOKEN=geheim"],
        ["--token", "geheim"],
        ["--comment=hf_" + "aBcDeFgHiJ" * 3 + "geheim"],
        ["--mail-user=https://user:geheim@example.org"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("verb", ["render", "submit"])
def test_a_secret_in_an_option_of_the_command_is_refused_first(
    verb: str, options: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [f"--sbatch={option}" for option in options]
    monkeypatch.setattr(sys, "argv", ["megarl", "slurm", verb, "qwen3_32b_grpo", *given])
    with pytest.raises(SystemExit) as ended:
        main()
    shown = "".join(capfd.readouterr())
    assert ended.value.code == ConfigError.exit_code
    assert "error: --sbatch=<hidden>: a secret must not stand" in shown and "geheim" not in shown


def test_variables_of_the_submitting_shell_are_no_secrets() -> None:
    check_options(["--export=ALL", "--export=HF_TOKEN", "--export=ALL,HF_TOKEN", "--export", "NONE", "--comment=a=b"])


def test_a_job_with_engines_on_nodes_of_their_own_kind_has_two_components() -> None:
    engines = "{nodes: 4, ranks_per_node: 4, sbatch_options: [--partition=small]}"
    given = ("rollout.placement=separate", "rollout.tp=4", f"cluster.groups.engines={engines}")
    recipe = load(ROOT / "launch/recipes/qwen3_32b_grpo.yaml", given)
    own, component = "\n".join(render(recipe, arguments=["recipe.yaml"]).splitlines()).split("#SBATCH hetjob\n")
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=8\n#SBATCH --gpus-per-node=8\n" in own
    sizes, _, rest = component.partition("MEGARL_HOME=")
    assert sizes.splitlines() == [
        f"#SBATCH {option}"
        for option in (
            "--nodes=4",
            "--ntasks-per-node=4",
            "--gpus-per-node=4",
            "--job-name=qwen3_32b_grpo-engines",
            "--exclusive",
            "--mem=0",
            "--partition=small",
        )
    ]
    assert "train " in rest and "#SBATCH" not in rest
    with pytest.raises(ConfigError, match=r"cluster.groups.engines: a Ray cluster inside a Slurm job has nodes of one"):
        render(
            load(ROOT / "launch/recipes/qwen3_32b_grpo.yaml", (*given, "cluster.launcher=ray")),
            arguments=["recipe.yaml"],
        )


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck: apt-get install shellcheck")
def test_the_scripts_are_sound_shell() -> None:
    scripts = [*(ROOT / "launch").rglob("*.sh"), *(ROOT / "launch/slurm").glob("*.sbatch")]
    done = subprocess.run(["shellcheck", "-x", *map(str, scripts)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_outside_a_job_the_launcher_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megarl.preflight.sizes import check_machines

    fields = {"name": "n", "loop": "rl", "model": {"path": "m"}, "data": {"train": "t"}}
    recipe = Recipe.model_validate(fields | {"cluster": {"launcher": "slurm", "nodes": 2, "ranks_per_node": 4}})
    for name in ("SLURM_JOB_NUM_NODES", "SLURM_NTASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    assert "this is no Slurm job" in next(iter(check_machines(recipe)))
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "3")
    assert "cluster.launcher = slurm: this job has no program srun on its PATH" in next(iter(check_machines(recipe)))
    (tmp_path / "srun").touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert "cluster.nodes = 2: the job has 3 nodes, not 2; set cluster.nodes=3" in next(iter(check_machines(recipe)))
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "8")
    assert "cluster.ranks_per_node = 4: the job has 8 tasks a node" in next(iter(check_machines(recipe)))
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "4")
    assert list(check_machines(recipe)) == []
    kinds = {"launcher": "slurm", "nodes": 2, "ranks_per_node": 4, "groups": {"engines": {"nodes": 3}}}
    recipe = Recipe.model_validate(fields | {"cluster": kinds, "rollout": {"placement": "separate"}})
    (told,) = check_machines(recipe)
    assert "cluster.groups.engines: the job has one kind of nodes, not components of 2 and 3" in told
    for name, value in (("HET_SIZE", "2"), ("JOB_NUM_NODES_HET_GROUP_0", "2"), ("JOB_NUM_NODES_HET_GROUP_1", "4")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    (told,) = check_machines(recipe)
    assert "the job has components of 2, 4 nodes, not components of 2 and 3" in told
    monkeypatch.setenv("SLURM_JOB_NUM_NODES_HET_GROUP_1", "3")
    assert list(check_machines(recipe)) == []


async def test_further_agents_start_on_nodes_that_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = srun.SrunNodes(NodeKind(0, 2, 1), {}, ())
    agents: list[Any] = [SimpleNamespace(node="n1", is_lost=False), SimpleNamespace(node="n2", is_lost=True)]
    nodes.agents = agents
    started: list[Sequence[str]] = []
    monkeypatch.setattr(nodes, "_list_job_nodes", AsyncMock(return_value=["n1", "n2", "n3", "n4", "n5"]))
    monkeypatch.setattr(nodes, "_is_answering", AsyncMock(side_effect=lambda name: name != "n3"))
    monkeypatch.setattr(nodes, "_start_step", lambda names, address, key: started.append(names))
    assert await nodes.launch_further(2, ("host", 1), b"") == 2
    assert started == [["n2"], ["n4"]]
    with pytest.raises(ConfigError, match=r"cluster\.nodes: 5 nodes are needed, but only 4 start agents"):
        await nodes.launch_further(4, ("host", 1), b"")
    assert len(started) == 2


async def test_a_node_that_does_not_answer_keeps_no_job_step(monkeypatch: pytest.MonkeyPatch) -> None:
    async def wait_for_end() -> int:
        return await asyncio.get_running_loop().create_future()

    trial = Mock(wait_for_end=wait_for_end)
    monkeypatch.setattr(srun, "LaunchedProgram", lambda command, **_: trial)
    monkeypatch.setattr(srun, "_ANSWER_SECONDS", 0.0)
    assert not await srun.SrunNodes(NodeKind(0, 2, 1), {}, ())._is_answering("n1")
    trial.kill.assert_called_once_with()


@pytest.mark.parametrize("ends_alone", [True, False])
async def test_only_agents_that_do_not_end_by_themselves_are_killed(
    monkeypatch: pytest.MonkeyPatch, ends_alone: bool
) -> None:
    has_ended = asyncio.Event()
    step = Mock(wait_for_end=has_ended.wait)
    step.signal.side_effect = lambda _: has_ended.set()
    nodes = srun.SrunNodes(NodeKind(0, 2, 1), {}, ())
    nodes._steps.append(step)
    monkeypatch.setattr(srun, "_EXIT_SECONDS", 600.0 if ends_alone else 0.0)
    ending = asyncio.create_task(nodes.end_agents())
    await asyncio.sleep(0)
    if ends_alone:
        step.signal.assert_not_called()
        has_ended.set()
    await ending
    # The last signal finds no process if the agents have ended.
    step.signal.assert_called_once_with(signal.SIGTERM)


async def test_a_cancelled_end_kills_agents_too() -> None:
    has_ended = asyncio.Event()
    step = Mock(wait_for_end=has_ended.wait)
    nodes = srun.SrunNodes(NodeKind(0, 2, 1), {}, ())
    nodes._steps.append(step)
    ending = asyncio.create_task(nodes.end_agents())
    await asyncio.sleep(0)
    step.signal.assert_not_called()
    ending.cancel()
    await asyncio.wait({ending})
    assert ending.cancelled()
    step.signal.assert_called_once_with(signal.SIGTERM)
    has_ended.set()


def test_without_slurm_s_commands_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from megarl.cluster.launchers import sbatch

    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="sbatch: not found"):
        sbatch.submit("#!/bin/sh\n", [])
    # Before anything else is read.
    monkeypatch.setattr(sys, "argv", ["megarl", "slurm", "submit", "missing.yaml"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
