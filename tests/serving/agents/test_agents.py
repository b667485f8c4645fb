"""Programs of the user's that make the attempts: what they are given, how they are judged, and how they end."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.cluster.calls.worker_group import WorkerGroup
from megarl.config.parallel import ParallelConfig
from megarl.config.sections.rollout import AgentConfig, EndpointConfig
from megarl.data.chat import load_tokenizer
from megarl.data.sources.harbor import read_task
from megarl.rewards.scoring.calling import Sample
from megarl.rewards.scoring.reward_process import Scored
from megarl.rollout.attempt import Budget, Task
from megarl.rollout.attempt_engine import AttemptEngine
from megarl.rollout.journal.state import account_tokens
from megarl.rollout.pool import EnginePool
from megarl.sandbox.containers.container import ContainerError
from megarl.serving.agent.agent_program import AgentProgram
from megarl.serving.agent.agent_runner import AgentRunner, _run_verifier
from megarl.serving.agent.containers import Containers
from megarl.serving.agent.harbor import HarborTask
from megarl.serving.codec import Codec
from megarl.serving.endpoint import Endpoint
from megarl.serving.sessions import Sessions
from megarl.types import Problem, Reward, SamplingSettings, Trajectory
from tests.child_processes import is_alive
from tests.logged_steps import logged_steps
from tests.rewards.pools import wait_until
from tests.rollout.engines import CONTEXT_TOKENS
from tools.runs import run_megarl

SAMPLING = SamplingSettings(24, temperature=1.0)
ASKING = """
import json, os, sys, urllib.request
told = json.loads(sys.stdin.readline())
def ask(messages):
    body = json.dumps({"model": "any", "messages": messages}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
answer = ask(told["messages"])
"""


async def by_length(sample: Sample) -> Scored:
    assert sample.prompt_messages == ({"role": "user", "content": "Add."},)
    return Scored(Reward(float(len(sample.completion_text)), True, False))


MakeAttempt = Callable[..., Awaitable[Trajectory]]


@pytest.fixture
def attempt(group: WorkerGroup, tool_model: Path) -> MakeAttempt:
    """`await attempt(command, seconds)` makes the trajectory of a program."""

    async def make(
        *command: str,
        seconds: float = 60.0,
        environment: tuple[str, ...] = (),
        record: dict[str, Any] | None = None,
        **fields: Any,
    ) -> Trajectory:
        codec = Codec(load_tokenizer(tool_model), CONTEXT_TOKENS)
        pool = EnginePool(group, ParallelConfig(1, 1, 1, 1), max_running=8)
        sessions = Sessions(codec)
        endpoint = Endpoint(sessions, EndpointConfig(), model="policy")
        await endpoint.start()
        config = AgentConfig(command=command, timeout_seconds=seconds, environment=environment, **fields)
        containers = Containers(config, endpoint.address)
        await containers.start()
        program = AgentProgram(AgentRunner(config, endpoint, sessions, containers, asyncio.Semaphore(1)), by_length)
        problem = Problem(3, ({"role": "user", "content": "Add."},), (5, 6), "7", record or {"level": 2})
        try:
            task = Task("command", problem, 1, 2, "seed", SAMPLING)
            return await program.attempt(task, Budget(CONTEXT_TOKENS, max_turns=4), AttemptEngine(pool))
        finally:
            await containers.close()
            await endpoint.close()
            codec.close()
            await pool.wait_until_drained()

    return make


async def test_a_program_is_told_the_problem_and_its_calls_are_the_trajectory(attempt: MakeAttempt) -> None:
    checks = 'assert (told["answer"], told["record"], told["index"], told["number"]) == ("7", {"level": 2}, 3, 2)\n'
    checks += 'assert told["seed"] == "seed 3 2"\n'
    again = 'ask([*told["messages"], {"role": "assistant", "content": answer}, {"role": "user", "content": "On."}])\n'
    found = await attempt(sys.executable, "-c", ASKING + checks + again + 'print("so"); print(0.25)')
    assert found.failure is None and found.reward == Reward(0.25, True, None)
    assert (found.environment, found.group, found.number, found.num_turns) == ("command", 1, 2, 2)
    [segment] = found.segments
    assert found.num_sampled == int(segment.loss_mask.sum()) > 1 and found.metrics["forks"] == 0
    assert found.num_observed > 0 and found.engine_seconds > 0 and found.environment_seconds > 0
    assert [[message["content"] for message in new] for new in found.messages] == [["Add."], ["On."]]
    # The same seed draws the same; a rewritten history is a sequence of its own.
    rewritten = again.replace("answer}", '"No."}')
    other = await attempt(sys.executable, "-c", ASKING + rewritten + 'print(json.dumps({"reward": 0}))')
    assert len(other.segments) == 2 and other.metrics["forks"] == 1 and other.reward == Reward(0.0, True, False)
    assert [[message["content"] for message in new] for new in other.messages] == [["Add."], ["Add.", "No.", "On."]]
    first = segment.token_ids[segment.turns == 0].tolist()
    assert other.segments[0].token_ids[other.segments[0].turns == 0].tolist() == first


async def test_a_last_line_nested_beyond_recursion_is_no_reward(attempt: MakeAttempt) -> None:
    found = await attempt(sys.executable, "-c", ASKING + 'print("[" * 100_000)')
    assert found.failure is None and found.reward == Reward(float(len(found.text)), True, False)


async def test_a_program_gets_the_variables_that_are_named_and_no_others(
    attempt: MakeAttempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("SEARCH_KEY", "named")
    seen = 'names = sorted(set(os.environ) - {"LC_CTYPE", "PWD", "SHLVL", "_"}); print(names, file=sys.stderr); exit(3)'
    found = await attempt(sys.executable, "-c", f"import os, sys; {seen}", environment=("SEARCH_KEY",))
    assert found.failure is not None
    assert "SEARCH_KEY" in found.failure and "OPENAI_API_KEY" in found.failure and "PATH" in found.failure
    assert "WANDB_API_KEY" not in found.failure and "HF_HUB_OFFLINE" not in found.failure


async def test_without_a_reward_of_its_own_the_last_completion_is_scored(attempt: MakeAttempt) -> None:
    found = await attempt(sys.executable, "-c", ASKING + 'print("done")')
    assert found.reward == Reward(float(len(found.text)), True, False)


@pytest.mark.parametrize(
    ("command", "failure"),
    [
        pytest.param(("sh", "-c", "echo no such file >&2; exit 3"), "ExitCode: the program ended with 3: no such file"),
        pytest.param(("sh", "-c", "echo NaN"), "ValueError: the program's reward is nan, not a finite number"),
        pytest.param(
            ("sh", "-c", f"echo 1{'0' * 400}"),
            f"ValueError: the program's reward is 1{'0' * 79}, not a finite number",
        ),
        pytest.param(
            ("sh", "-c", """echo '{"reward": 0, "reward": 1}'"""),
            """ValueError: the last line of the program's output: the key "reward" occurs twice""",
        ),
        pytest.param(("/no/such/program",), "OSError: /no/such/program: No such file or directory"),
    ],
    ids=["exit code", "no number", "beyond all floats", "two rewards", "no program"],
)
async def test_a_program_that_fails_is_an_error_of_its_attempt(
    command: tuple[str, ...], failure: str, attempt: MakeAttempt
) -> None:
    found = await attempt(*command)
    assert (found.ended, found.failure, found.reward, found.num_turns) == ("error", failure, None, 0)


async def test_a_program_out_of_time_is_killed_with_what_it_started(attempt: MakeAttempt, tmp_path: Path) -> None:
    written = [tmp_path / "child", tmp_path / "own"]
    script = f"sleep 600 & echo $! > {written[0]}; echo $$ > {written[1]}; sleep 600"
    # A busy machine may not start the program within the first of these.
    for seconds in (1.0, 8.0, 64.0):
        started = time.monotonic()
        found = await attempt("sh", "-c", script, seconds=seconds)
        assert found.failure == f"TimeoutError: the program did not end within {seconds:g} s"
        assert time.monotonic() - started < seconds + 60
        if all(file.exists() and file.read_text().endswith("\n") for file in written):
            break
    processes = [int(file.read_text()) for file in written]
    # The signal is sent by now; a busy machine takes a while to end them.
    wait_until(lambda: not any(map(is_alive, processes)), seconds=60)


RECIPE = """
name: agents
loop: rl
model: {model}
data: {data}
cluster: {{ranks_per_node: 1}}
trainer: {{max_tokens_per_microbatch: 512}}
optimizer: {{learning_rate: 1e-3}}
rollout:
  kv_cache_gib: 0.05
  sampling: {{max_new_tokens: 24}}
  environment: command
  max_turns: 4
  agent: {{command: {command}, timeout_seconds: 300}}
  endpoint: {{hold_seconds: 300}}
train: {{steps: 2, prompts_per_step: 2, samples_per_prompt: 2}}
samples_every_steps: 1
"""


@pytest.mark.end_to_end
def test_an_agent_program_with_tools_trains(tool_model: Path, tmp_path: Path) -> None:
    problems = [{"messages": [{"role": "user", "content": f"Add {n}."}], "gt_answer": f"{n}"} for n in range(4)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    recipe = RECIPE.format(
        model=json.dumps({"path": str(tool_model), "dtype": "float32"}),
        data=json.dumps({"train": str(tmp_path / "train.jsonl"), "max_prompt_tokens": 200}),
        command=json.dumps([sys.executable, str(Path(__file__).parent / "agent.py")]),
    )
    (tmp_path / "recipe.yaml").write_text(recipe)
    done = run_megarl("train", "recipe.yaml", folder=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    [run] = (tmp_path / "runs").iterdir()
    steps = logged_steps(run)
    steps = [step for step in steps if "rollout/turns/mean" in step]
    assert len(steps) == 2
    for step in steps:
        assert step["environment/model_calls"] >= 1 and step["rollout/ended/error"] == 0
        assert step["logprob_gap/max"] < 1e-4 and step["environment/forks"] == 0
    assert "endpoint at http://127.0.0.1:" in done.stdout + done.stderr
    shown = run_megarl("samples", run, "--account")
    assert "tokens of agents' attempts" in shown.stdout
    account = account_tokens(run)
    assert account is not None and account.faults == [] and account.num_trained > 0
    assert account.sampled == account.num_trained + account.num_untrained and not account.lost + account.waiting


async def test_a_program_in_a_sandbox_is_recorded_like_any_other(attempt: MakeAttempt, tmp_path: Path) -> None:
    program = tmp_path / "agent.py"
    program.write_text(ASKING + "print(os.getcwd(), sorted(os.environ), file=sys.stderr); print(0.25)")
    plain = await attempt(sys.executable, "-c", ASKING + "print(0.25)")
    boxed = await attempt(sys.executable, str(program), sandbox="sandbox", folders=(str(tmp_path),))
    assert boxed.failure is None and boxed.reward == plain.reward == Reward(0.25, True, None)
    assert boxed.segments[0].token_ids.tolist() == plain.segments[0].token_ids.tolist()
    for metric in ("container_start_seconds", "model_seconds", "tool_seconds", "live_containers"):
        assert boxed.metrics[metric] > 0, metric
    assert boxed.metrics["leaked_containers"] == 0
    failed = await attempt("sh", "-c", "echo $HOME $OPENAI_BASE_URL >&2; exit 3", sandbox="sandbox")
    assert failed.failure is not None and "/home/agent http://127.0.0.1:11811/s/" in failed.failure
    flooded = await attempt("sh", "-c", "yes", sandbox="sandbox", output_mib=1)
    assert flooded.failure == "OutputLimit: the program printed more than 1048576 bytes"
    absent = await attempt("true", sandbox="sandbox", folders=("/no/such/folder",))
    assert absent.failure is not None and absent.failure.startswith("ContainerError: the container does not start")


REPEATING = """
while True:
    try:
        ask(told["messages"])
    except Exception:
        pass
"""


@pytest.mark.parametrize("after", ["print(1.0)", "import time\ntime.sleep(600)"], ids=["it ends", "it goes on"])
async def test_an_attempt_ends_at_its_limit_of_sampled_tokens(attempt: MakeAttempt, after: str) -> None:
    refused = """
import urllib.error
try:
    while True:
        ask(told["messages"])
except urllib.error.HTTPError as error:
    assert (error.code, json.load(error)["error"]["code"]) == (400, "sampled_tokens")
"""
    found = await attempt(sys.executable, "-c", ASKING + refused + after, sampled_tokens=3)
    assert found.failure is not None and found.failure.startswith("TokenLimit: this session has sampled 3 tokens")
    assert found.reward is None and found.ended == "error" and found.metrics["refused_calls"] == 1
    # The last answer is cut at the limit.
    assert found.num_sampled == 3


async def test_a_program_that_repeats_refused_calls_is_ended(attempt: MakeAttempt) -> None:
    found = await attempt(sys.executable, "-c", ASKING + REPEATING)
    assert found.failure == "RefusedCalls: the program went on after 100 calls had been refused"


HARBOR_AGENT = """
import os, subprocess, time
assert not os.path.exists("/tests") and "harbor" not in told["record"]
open("answer.txt", "w").write(answer)
open("/logs", "w").write("no folder")
subprocess.Popen(["sh", "-c", "while true; do echo 0 > /logs/verifier/reward.txt; done 2> /dev/null"])
print(77)
"""
GRADER = """
grep -q . answer.txt && echo graded && pwd
[ "$(ls /proc | grep -c '^[0-9]')" -lt 8 ] && printf REWARD
"""


@pytest.fixture
def harbor_task(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """`harbor_task(test, toml)` is the record of a task with this verifier."""

    def make(test: str, toml: str = "") -> dict[str, Any]:
        folder = tmp_path / "task"
        (folder / "tests").mkdir(parents=True, exist_ok=True)
        (folder / "tests/test.sh").write_text(test)
        (folder / "instruction.md").write_text("Add.")
        (folder / "task.toml").write_text(toml)
        return read_task(folder / "task.toml")

    return make


@pytest.mark.parametrize(
    ("written", "reward", "failure"),
    [
        ("0.5 > /logs/verifier/reward.txt", 0.5, None),
        ("'{\"accuracy\": 1}' > /logs/verifier/reward.json", 1.0, None),
        ('\'{"reward": 0, "other": 1}\' > /logs/verifier/reward.json; exit 1', 0.0, None),
        ('\'{"reward": 0, "reward": 1}\' > /logs/verifier/reward.json', None, 'the key "reward" occurs twice'),
        ('\'{"one": 0, "other": 1}\' > /logs/verifier/reward.json', None, "the reward is None"),
        ("nan > /logs/verifier/reward.txt", None, "the reward is nan"),
        ("none > /logs/verifier/reward.txt", None, "could not convert"),
        ("tests are broken", None, "neither reward.json nor reward.txt in /logs/verifier: graded /workspace"),
        ("x; sleep 600", None, "the tests did not end within 3 s"),
        ("x; yes", None, "OutputLimit"),
    ],
    ids=[
        "a text",
        "one number",
        "a failed test",
        "a key twice",
        "two numbers",
        "not a number",
        "no number",
        "none",
        "late",
        "flood",
    ],
)
async def test_the_verifier_of_a_task_is_its_reward_and_a_failed_one_gives_none(
    written: str,
    reward: float | None,
    failure: str | None,
    attempt: MakeAttempt,
    harbor_task: Callable[..., dict[str, Any]],
) -> None:
    record = harbor_task(GRADER.replace("REWARD", written), "[verifier]\ntimeout_sec = 3\n")
    command = sys.executable, "-c", ASKING + HARBOR_AGENT
    found = await attempt(*command, record=record, sandbox="sandbox", output_mib=1)
    if failure is None:
        assert found.failure is None and found.reward is not None and found.reward.score == reward
    else:
        assert found.failure is not None and found.failure.startswith("VerifierError: ") and failure in found.failure
        assert found.reward is None
    assert found.metrics["verifier_seconds"] > 0 and found.num_sampled > 0


def test_a_container_lost_in_the_verifier_is_a_loss(harbor_task: Callable[..., dict[str, Any]]) -> None:
    """The attempt begins again then. Another failure of the verifier ends it."""

    class Ending:
        def __init__(self, failure: str) -> None:
            self.failure = failure

        async def put(self, *_: Any) -> None:
            raise ContainerError(self.failure)

    task = HarborTask(harbor_task("")["harbor"])
    for failure, expected in (("ContainerLost: it ended", ""), ("OSError: no room", "VerifierError: ")):
        container: Any = Ending(failure)
        assert asyncio.run(_run_verifier(task, container)) == (None, f"{expected}{failure}")


LIMITED_GRADER = """
nproc > /logs/verifier/reward.txt
df --output=size -B 1 /workspace | tail -n 1 > /workspace/size
[ "$(cat /workspace/size)" -eq 8388608 ] || rm /logs/verifier/reward.txt
"""


async def test_the_limits_of_a_task_hold_in_its_container(
    attempt: MakeAttempt, harbor_task: Callable[..., dict[str, Any]]
) -> None:
    record = harbor_task(LIMITED_GRADER, "[environment]\ncpus = 0.5\nmemory_mb = 100\nstorage_mb = 8\n")
    limits: dict[str, Any] = {"record": record, "sandbox": "sandbox", "memory_gib": 9, "disk_gib": 2}
    found = await attempt(sys.executable, "-c", ASKING, **limits)
    assert found.failure is None and found.reward is not None and found.reward.score == 1.0
    large = await attempt(
        sys.executable, "-c", ASKING + "import time\nfull = b'1' * (200 << 20)\ntime.sleep(600)", **limits
    )
    assert large.failure is not None and large.failure.startswith("MemoryLimit: ") and "100 are" in large.failure
    # The limit of time is the task's too.
    record = harbor_task("", "[agent]\ntimeout_sec = 2\n")
    late = await attempt("sleep", "600", record=record, sandbox="sandbox")
    assert late.failure == "TimeoutError: the program did not end within 2 s"


TASK_AGENT = """
open("answer.txt", "w").write(answer)
"""


@pytest.mark.end_to_end
def test_tasks_with_verifiers_train_in_sandboxes(tool_model: Path, tmp_path: Path) -> None:
    for number in range(3):
        folder = tmp_path / f"tasks/add-{number}"
        (folder / "tests").mkdir(parents=True)
        (folder / "instruction.md").write_text(f"Add {number}.")
        (folder / "task.toml").write_text("[verifier]\ntimeout_sec = 60\n")
        # The reward is the number of different bytes, so that attempts at a task differ.
        (folder / "tests/test.sh").write_text("fold -w 1 answer.txt | sort -u | wc -l > /logs/verifier/reward.txt\n")
    (tmp_path / "harness").mkdir()
    (tmp_path / "harness/run.py").write_text(ASKING + TASK_AGENT)
    recipe = RECIPE.format(
        model=json.dumps({"path": str(tool_model), "dtype": "float32"}),
        data=json.dumps({"train": str(tmp_path / "tasks"), "max_prompt_tokens": 200}),
        command=json.dumps([sys.executable, str(tmp_path / "harness/run.py")]),
    )
    (tmp_path / "recipe.yaml").write_text(recipe)
    fields = "rollout.agent.sandbox=sandbox", f"rollout.agent.folders=[{tmp_path}/harness]", "rollout.agent.nodes=all"
    done = run_megarl("train", "recipe.yaml", *fields, folder=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    [run] = (tmp_path / "runs").iterdir()
    steps = [step for step in logged_steps(run) if "rollout/turns/mean" in step]
    assert len(steps) == 2
    for step in steps:
        assert step["rollout/ended/error"] == 0 and step["environment/leaked_containers"] == 0
        assert step["environment/verifier_seconds"] > 0 and step["environment/live_containers"] > 0
        assert step["logprob_gap/max"] < 1e-4 and step["reward/mean"] > 1


WAITING_AGENT = """
import json, os, sys, time
from pathlib import Path
from openai import OpenAI
told, client = json.loads(sys.stdin.readline()), OpenAI()
messages = told["messages"]
def ask():
    message = client.chat.completions.create(model="any", messages=messages).choices[0].message
    messages.extend([message.model_dump(exclude_none=True), {"role": "user", "content": "Go on."}])
ask()
(Path(sys.argv[1]) / f"begun-{told['index']}-{told['number']}-{os.getpid()}").touch()
while not (Path(sys.argv[1]) / "go").exists():
    time.sleep(0.1)
ask()
print(1.0)
"""


@pytest.mark.end_to_end
@pytest.mark.long
def test_programs_go_on_with_the_resumed_run(tool_model: Path, tmp_path: Path) -> None:
    """The driver is killed between two calls of OpenAI's client. The second ones wait until the run is resumed."""
    problem = {"messages": [{"role": "user", "content": "Add."}], "gt_answer": "7"}
    (tmp_path / "train.jsonl").write_text(json.dumps(problem) + "\n")
    (tmp_path / "agent.py").write_text(WAITING_AGENT)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    recipe = RECIPE.format(
        model=json.dumps({"path": str(tool_model), "dtype": "float32"}),
        data=json.dumps({"train": str(tmp_path / "train.jsonl"), "max_prompt_tokens": 200}),
        command=json.dumps([sys.executable, str(tmp_path / "agent.py"), str(tmp_path)]),
    )
    (tmp_path / "recipe.yaml").write_text(recipe)
    fields = (
        "train.steps=1", "train.prompts_per_step=1", "train.samples_per_prompt=3", f"rollout.endpoint.port={port}",
        "rollout.agent.outlive_seconds=600", "--resume",
    )  # fmt: skip
    # Not `MEGARL`: the kill must reach the driver itself.
    command = [sys.executable, "-m", "megarl", "train", "recipe.yaml", *fields]
    with (tmp_path / "log").open("w") as log, subprocess.Popen(command, cwd=tmp_path, stderr=log, stdout=log) as driver:
        wait_until(lambda: driver.poll() is not None or len(list(tmp_path.glob("begun-*"))) == 3, seconds=900)
        assert driver.poll() is None, (tmp_path / "log").read_text()[-3000:]
        driver.kill()
    (tmp_path / "go").touch()
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    [run] = (tmp_path / "runs").iterdir()
    [step] = [step for step in logged_steps(run) if "rollout/turns/mean" in step]
    assert step["environment/outlived_driver"] == 1.0 and step["environment/model_calls"] == 2.0
    assert step["environment/forks"] == 0 and step["rollout/ended/error"] == 0 and step["logprob_gap/max"] < 1e-4
    # No program began twice.
    assert len(list(tmp_path.glob("begun-*"))) == 3
    account = account_tokens(run)
    assert account is not None and account.faults == []
    assert account.sampled == account.num_trained + account.num_untrained and not account.lost + account.waiting
