"""vLLM and megarl on the stand-in: imports, an engine with CUDA graphs, a whole step of GRPO."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.platform import transformer_engine
from megarl.platform.cuda_extensions import MODULES, import_faults_of
from megarl.processes.process_tree import cpu_seconds_below
from tests.guards.test_gpu_environment import WITHOUT_DRIVER
from tests.standin_gpu import engine

# Seconds of a wall clock, for a run that hangs: on a busy machine a run takes ten times as long as on a quiet one.
pytestmark = [pytest.mark.standin_gpu, pytest.mark.timeout(3600)]
ROOT = Path(__file__).resolve().parents[2]
# launch/setup.sh leaves it out where its extension was not built, which takes an hour on two cores.
HAS_ENGINE = transformer_engine.is_installed()


def test_every_module_of_the_gpu_path_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Some keep folders for temporary files that outlive them.
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    modules = [name for name in WITHOUT_DRIVER if HAS_ENGINE or "transformer_engine" not in name]
    modules += [name for package in MODULES.values() for name in package]
    assert import_faults_of(tuple(modules)) == {}


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model(family="qwen3", num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64)


@pytest.mark.parametrize("runner", ["0", "1"], ids=["older runner", "newer runner"])
def test_an_engine_generates_sleeps_and_wakes(model: Path, tmp_path: Path, runner: str) -> None:
    """Log-probs are those of transformers on the CPU, before a sleep and after it, with CUDA graphs for each step."""
    from transformers import AutoModelForCausalLM

    file = tmp_path / "generated.json"
    command = [sys.executable, str(Path(engine.__file__)), str(model), str(file)]
    environment = {**os.environ, "VLLM_USE_V2_MODEL_RUNNER": runner, "VLLM_NO_USAGE_STATS": "1"}
    environment["TMPDIR"] = str(tmp_path)
    if runner == "1":
        # Its warm-up drops an output while another stream still copies it (vLLM 0.30), which a strict run refuses.
        environment.pop("STANDIN_GPU_STRICT", None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert file.exists(), done.stdout[-4000:] + done.stderr[-8000:]
    found = json.loads(file.read_text())
    assert found["again"] == found["first"]
    assert found["replays"] >= 2 * (engine.NEW_TOKENS - 1)
    assert found["freed"] > 8 << 20
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for prompt, answer in zip(engine.PROMPTS, found["first"], strict=True):
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + answer["tokens"]])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(answer["tokens"])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(answer["logprobs"]), expected, rtol=0, atol=5e-2)
        # The greedy token is the reference's best up to the rounding of bfloat16.
        assert (logits.log_softmax(-1).max(-1).values - expected).max() < 5e-2


REWARD = """
from megarl.types import Reward


def share_of_digits(completion_text, answer, correct_score):
    share = sum(c.isdigit() for c in completion_text) / max(1, len(completion_text))
    return Reward(share, True, share > 0.1)
"""
"""A model with random weights solves no problem, but its answers differ in their digits: gradients are not zero."""


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """`start(setting, ...)` begins a short run of GRPO, tmp_path/runs/run, with verified reshards.

    It has the devices of the tests, or as many H200 as `num_devices` says.
    """
    sums = [
        {"messages": [{"role": "user", "content": f"{n} + {n + 7} ="}], "gt_answer": str(2 * n + 7)} for n in range(64)
    ]
    data, heldout = tmp_path / "sums.jsonl", tmp_path / "heldout.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in sums))
    (tmp_path / "digits.py").write_text(REWARD)
    # Each run evaluates at its start and its end.
    heldout.write_text(json.dumps(sums[0]) + "\n")
    # The newer model runner's warm-up cannot be strict, see above.
    environment = {name: value for name, value in os.environ.items() if name != "STANDIN_GPU_STRICT"}

    def begin(*settings: str, num_devices: int = 0) -> subprocess.Popen[str]:
        tool = str(ROOT / "tools/standin_gpu/run.py")
        devices = (sys.executable, tool, sys.prefix, "--count", str(num_devices), "--") if num_devices else ()
        command = [
            *devices, sys.executable, "-m", "megarl", "train", str(ROOT / "launch/recipes/quickstart.yaml"),
            f"model.path={model}", f"runs_folder={tmp_path / 'runs'}", "name=run", f"data.train={data}",
            f"data.validation.heldout={heldout}", "model.dtype=bfloat16", "train.steps=1", "train.prompts_per_step=4",
            "train.samples_per_prompt=4", "rollout.sampling.max_new_tokens=8", "rollout.max_concurrent_requests=16",
            "rollout.vllm.enforce_eager=true", "evaluation.every_steps=0", "weights.verify_every=1",
            f"reward.functions=[{tmp_path / 'digits.py'}:share_of_digits]", *settings,
        ]  # fmt: skip
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=environment
        )

    return begin


def finished(run: subprocess.Popen[str], cpu_seconds: float = 400) -> str:
    """Wait for the end of a run. Returns its output. A run that takes more CPU time is ended.

    A run that waits for nothing is ended by its own limits, or by pytest's.
    """
    while True:
        try:
            output, _ = run.communicate(timeout=5)
            break
        except subprocess.TimeoutExpired:
            if cpu_seconds_below(run.pid) > cpu_seconds:
                run.terminate()
                output, _ = run.communicate(timeout=600)
                raise AssertionError(f"the run took more than {cpu_seconds:g} CPU s:\n{output[-9000:]}") from None
    assert run.returncode == 0, output[-9000:]
    return output


def steps(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the metrics of a run's training steps so far, by number."""
    file = folder / "runs/run/metrics.jsonl"
    # The last line may be incomplete while the run writes it.
    lines = (
        [json.loads(line) for line in file.read_text().splitlines(True) if line.endswith("\n")] if file.exists() else []
    )
    return {line["step"]: line for line in lines if "logprob_gap/mean" in line}


def assert_trained(folder: Path, num_steps: int, largest_gap: float = 5e-3) -> None:
    """Log-probs of both sides agree at each step, and the model was exported."""
    found = steps(folder)
    assert sorted(found) == list(range(1, num_steps + 1))
    assert all(0 < step["logprob_gap/mean"] < largest_gap for step in found.values())
    assert all(step["train/grad_norm"] > 0 for step in found.values())
    assert all(step["time/reshard_verify_seconds"] > 0 for step in found.values())
    assert (folder / "runs/run/hf/model.safetensors").exists()


LAYOUTS = {
    "one device": ("cluster.ranks_per_node=1",),
    "dp 2": ("cluster.ranks_per_node=2",),
    # vLLM's custom all-reduce has kernels of its own, and they are not imitated.
    "tp 2": (
        "cluster.ranks_per_node=2", "trainer.tp=2", "rollout.tp=2", "rollout.vllm.disable_custom_all_reduce=true",
    ),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_megarl_trains(start: Callable[..., subprocess.Popen[str]], tmp_path: Path, layout: str) -> None:
    """One step of GRPO: rollout, sleep, training, reshard with verification, export."""
    finished(start(*LAYOUTS[layout]))
    assert_trained(tmp_path, 1)


def test_megarl_trains_on_four_devices(start: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    """Two data-parallel ranks of tp 2, and two engines of tp 2."""
    settings = (
        "cluster.ranks_per_node=4", "trainer.tp=2", "rollout.tp=2", "rollout.vllm.disable_custom_all_reduce=true",
    )  # fmt: skip
    finished(start(*settings, num_devices=4), cpu_seconds=800)
    assert_trained(tmp_path, 1)


def test_megarl_trains_with_engines_in_fp8(start: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    """Weights are quantised in each reshard."""
    settings = ("rollout.quantization=fp8", "rollout.vllm.linear_backend=triton", "cluster.ranks_per_node=1")
    finished(start(*settings))
    assert_trained(tmp_path, 1, largest_gap=5e-2)
    # Weights and activations of eight bits: in sixteen the difference is about 1e-3.
    assert steps(tmp_path)[1]["logprob_gap/mean"] > 5e-3


def test_a_killed_run_with_separate_engines_goes_on(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    """Trainer and engine on a device each. After a kill in step 3 the checkpoint of step 2 leads to the same step 3."""
    settings = (
        "cluster.ranks_per_node=2", "rollout.placement=separate", "rollout.ranks=1", "train.steps=3",
        "checkpoint.every_steps=2", "checkpoint.asynchronous=false",
    )  # fmt: skip
    run = start(*settings)
    try:
        while 3 not in steps(tmp_path):
            assert run.poll() is None, run.communicate()[0][-9000:]
            time.sleep(0.01)
        before = steps(tmp_path)[3]
    finally:
        run.kill()
        run.communicate()
    output = finished(start(*settings, "--resume"))
    assert "step_000002" in output
    assert_trained(tmp_path, 3)
    after = steps(tmp_path)[3]
    for name in ("train/loss", "train/grad_norm", "logprob_gap/mean", "reshard/sent_bytes"):
        assert after[name] == before[name] != 0, name
