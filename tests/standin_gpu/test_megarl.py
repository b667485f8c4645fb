"""vLLM and megarl on the stand-in: imports, an engine with CUDA graphs, a whole step of GRPO."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megarl.platform import transformer_engine
from megarl.platform.cuda_extensions import MODULES, faults_of
from tests.guards.test_gpu_environment import WITHOUT_DRIVER
from tests.standin_gpu import engine

pytestmark = [pytest.mark.standin_gpu, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[2]
# launch/setup.sh leaves it out where its extension was not built, which takes an hour on two cores.
HAS_ENGINE = transformer_engine.is_installed()


def test_every_module_of_the_gpu_path_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Some keep folders for temporary files that outlive them.
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    modules = [name for name in WITHOUT_DRIVER if HAS_ENGINE or "transformer_engine" not in name]
    modules += [name for package in MODULES.values() for name in package]
    assert faults_of(tuple(modules)) == {}


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


def test_megarl_trains_on_one_device(model: Path, tmp_path: Path) -> None:
    """One step of GRPO: rollout, sleep, training, reshard with verification, export; log-probs of both sides agree."""
    sums = [
        {"messages": [{"role": "user", "content": f"{n} + {n + 7} ="}], "gt_answer": str(2 * n + 7)} for n in range(64)
    ]
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in sums))
    command = [
        sys.executable, "-m", "megarl", "train", str(ROOT / "launch/recipes/quickstart.yaml"), f"model.path={model}",
        f"runs_folder={tmp_path / 'runs'}", "name=run", f"data.train={data}", f"data.validation.heldout={data}",
        "model.dtype=bfloat16", "cluster.ranks_per_node=1", "train.steps=1", "train.prompts_per_step=4",
        "train.samples_per_prompt=4", "rollout.sampling.max_new_tokens=8", "rollout.max_concurrent_requests=16",
        "rollout.vllm.enforce_eager=true", "evaluation.every_steps=0", "weights.verify_every=1",
    ]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if name != "STANDIN_GPU_STRICT"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    lines = [json.loads(line) for line in (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()]
    [gap] = [line["logprob_gap/mean"] for line in lines if "logprob_gap/mean" in line]
    assert 0 < gap < 5e-3
    assert (tmp_path / "runs/run/hf/model.safetensors").exists()
