"""The benchmarks of a GPU run for real on a CPU, in miniature; numbers of a tiny model meet no target.

That of the reshard has its test in test_bench_reshard.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.distributed

BENCH = Path(__file__).resolve().parents[3] / "tools" / "bench"
SMALL = ("--device", "cpu", "--shape", "small")


def run(script: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCH / script), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def lines_of(script: str, *options: str) -> list[dict[str, Any]]:
    done = run(script, *SMALL, *options)
    assert done.returncode == 0, done.stderr + done.stdout
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def metrics_of(lines: list[dict[str, Any]]) -> set[str]:
    return {line["metric"] for line in lines if "metric" in line}


@pytest.mark.long
def test_a_train_step() -> None:
    lines = lines_of("train_step_gpu.py", "--tokens", "512", "--row", "128", "--rounds", "1")
    assert metrics_of(lines) == {
        "gemm", "train_step", "train_step_peak_memory", "logprob_gap", "train_step_speedup",
    }  # fmt: skip
    assert next(line for line in lines if line.get("metric") == "logprob_gap")["value"] < 1e-3
    assert [line["warms_up"] for line in lines if "train_step_seconds" in line] == [True, False]


@pytest.mark.long
def test_a_train_step_of_no_budget_says_what_it_left_out() -> None:
    lines = lines_of("train_step_gpu.py", "--tokens", "512", "--row", "128", "--budget-seconds", "0")
    # One round each, which warms up, is no result.
    assert metrics_of(lines) == {"train_step_peak_memory"}
    flagged = {line["warm_up_of"]: line for line in lines if "warm_up_of" in line}
    assert flagged.keys() == {"gemm", "train_step"}
    assert all(line["value"] > 0 and line["met"] is line["target"] is None for line in flagged.values())
    [left_out] = [line["left_out"] for line in lines if "left_out" in line]
    assert left_out == ["logprob_gap", "train_step_speedup"]


@pytest.mark.long
def test_the_driver_samples_what_a_bare_engine_does() -> None:
    sizes = ["--attempts", "8", "--slots", "4", "--new-tokens", "8", "--mean-tokens", "6", "--repeats", "1"]
    lines = lines_of("rollout_gpu.py", "--turns", "2", *sizes)
    assert metrics_of(lines) == {
        f"rollout_2_turns_{name}" for name in ("speed", "tokens_per_second", "engine_idle", "equal_completions")
    }
    # On a CPU rounding does not depend on what is decoded together.
    assert next(line for line in lines if line.get("metric") == "rollout_2_turns_equal_completions")["value"] == 1


@pytest.mark.long
def test_whole_steps_by_phase() -> None:
    sizes = ["--prompts", "2", "--samples", "2", "--new-tokens", "8", "--mean-tokens", "6", "--row", "512"]
    lines = lines_of("grpo_gpu.py", "--steps", "2", "--slots", "4", *sizes, "weights.bucket_mib=1")
    steps = [line for line in lines if "step" in line]
    assert [step["step"] for step in steps] == [1, 2]
    assert steps[1]["phases"].keys() >= {"rollout", "logprobs", "train", "reshard"}
    assert sum(steps[1]["phases"].values()) <= steps[1]["step_seconds"]
    assert steps[1]["parts"].keys() >= {"reshard_total_seconds", "ranks_idle"} and steps[1]["steps_ahead"] is not None
    assert steps[1]["gemm_tflops"] > 0 and steps[1]["of_gemm"] > 0
    assert all(phase["measured_gib"] > 0 and phase["predicted_gib"] > 0 for phase in steps[1]["memory"].values())
    assert metrics_of(lines) >= {
        "grpo_step_seconds", "grpo_tokens_per_second", "grpo_idle", "grpo_train_seconds", "grpo_train_memory",
        "grpo_of_gemm", "grpo_gemm_tflops", "grpo_steps_ahead",
    }  # fmt: skip


def test_a_single_step_is_a_warm_up() -> None:
    step = {"memory": {}, "phases": {"train": 2.0}, **dict.fromkeys(("step_seconds", "tokens_per_second"), 3.0)}
    code = f"""
import json
from tools.bench import grpo_gpu
step = {{**dict.fromkeys(grpo_gpu.MEDIANS), **json.loads({json.dumps(json.dumps(step))})}}
facts = {{"machine": {{}}, "versions": {{}}}}
for steps in ([step], [step, step]):
    print(json.dumps([line.get("warm_up_of", line.get("metric")) for line in grpo_gpu.last_lines(steps, facts)]))
    print(json.dumps(["metric" in line for line in grpo_gpu.last_lines(steps, facts)]))
slow = {{**step, "step_seconds": 5.1}}
for steps in ([step, step, step], [slow, step, step]):
    lines = grpo_gpu.last_lines(steps, facts)
    print(json.dumps([(line["value"], line["met"]) for line in lines if line["metric"] == "grpo_first_step"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    names, alone, same, after, even, uneven = map(json.loads, done.stdout.splitlines())
    assert even == [[1.0, True]] and uneven == [[1.7, False]]
    assert names == same and "grpo_step_seconds" in names and "grpo_train_seconds" in names
    assert not any(alone) and all(after)


@pytest.mark.long
def test_a_run_that_fails_is_told_with_its_output() -> None:
    done = run("grpo_gpu.py", *SMALL, "--new-tokens", "8", "trainer.pp=2")
    [failed] = [line for line in map(json.loads, done.stdout.splitlines()) if "failed" in line]
    assert done.returncode == failed["failed"] == 2 and "trainer.pp = 2" in failed["output"]


@pytest.mark.long
@pytest.mark.skipif("__import__('torch').cuda.is_available()", reason="there is a GPU")
@pytest.mark.parametrize("script", ["train_step_gpu.py", "rollout_gpu.py", "grpo_gpu.py"])
def test_no_gpu_is_one_line_and_status_2(script: str) -> None:
    done = run(script)
    assert done.returncode == 2 and len((done.stdout + done.stderr).splitlines()) == 1
    assert "CUDA" in done.stdout + done.stderr


def test_the_budget_leaves_out_rounds_that_would_not_fit() -> None:
    code = """
import time
from tools.bench.parts import budget
now = 0.0
time.monotonic = lambda: now
allowed = budget.Budget(10.0)
rounds = []
for number in allowed.rounds(9):
    rounds.append(number)
    now += 4.0
print(rounds, allowed.seconds_left, allowed.leaves_out(["more"], 3.0), allowed.leaves_out(["less"], 1.0))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    told, values = done.stdout.splitlines()
    assert json.loads(told)["left_out"] == ["more"] and values == "[0, 1] 2.0 True False"
