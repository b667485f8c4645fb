"""`megarl service` on real ranks, with a program of the real SDK: it trains, saves, samples and resumes."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import numpy as np
import pytest

from megarl.types import RunFolderLockedError
from tests.service.served import check_sampling, run_program
from tools.make_dataset import make_dataset

pytestmark = pytest.mark.end_to_end

RECIPE = """
name: served
loop: rl
model: {{path: {model}, dtype: float32}}
data: {{train: data/train.jsonl, max_prompt_tokens: 48}}
cluster: {{ranks_per_node: {num_ranks}}}
trainer: {{{trainer}max_tokens_per_microbatch: 512}}
lora: {{rank: 8}}
rollout: {{{placement}, kv_cache_gib: 0.02, sampling: {{max_new_tokens: 16}}}}
train: {{steps: 1, prompts_per_step: 2, samples_per_prompt: 2}}
"""


SIZES = {
    "colocated": (1, "", "placement: colocated"),
    "separate": (2, "", "placement: separate, ranks: 1"),
    "dp 2": (2, "", "placement: colocated"),
    "tp 2": (2, "tp: 2, ", "tp: 2, placement: colocated"),
}
"""Number of ranks, fields of `trainer` and of `rollout`, by name."""
# Adapters leave the vocabulary's embeddings as they are. With small ones, no adapter can prefer a half of the tokens.
LEARNER = {"initializer_range": 0.2, "num_layers": 2}


@pytest.fixture(params=["colocated", pytest.param("separate", marks=pytest.mark.long)])
def server(
    request: pytest.FixtureRequest, tmp_path: Path, tiny_model: Callable[..., Path]
) -> Iterator[subprocess.Popen[str]]:
    make_dataset(tmp_path / "data", sft=8, train=32, heldout=8)
    num_ranks, trainer, placement = SIZES[request.param]
    model = tiny_model() if request.param in ("colocated", "separate") else tiny_model(**LEARNER)
    recipe = RECIPE.format(model=model, placement=placement, num_ranks=num_ranks, trainer=trainer)
    (tmp_path / "recipe.yaml").write_text(recipe)
    command = [sys.executable, "-m", "megarl", "service", "recipe.yaml", "--port", "0"]
    if request.param in ("colocated", "separate"):
        # Room for one model and three copies of weights: the program's second model moves the first one to disk.
        command += ["--host-memory-gib", "0.0015"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=-1, stderr=subprocess.STDOUT, text=True)
    yield process
    process.kill()
    process.wait()


def read_url(output: IO[str] | None) -> str:
    """Return the address that a service prints once it accepts requests."""
    assert output is not None
    printed = ""
    for line in output:
        printed += line
        if address := re.search(r"http://127\.0\.0\.1:\d+", line):
            return address[0]
    raise AssertionError(printed)


def test_a_program_trains_saves_samples_and_resumes(
    server: subprocess.Popen[str], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    url = read_url(server.stdout)
    results = asyncio.run(run_program(url, "supervised", str(tiny_model())))
    assert results["losses"][-1] < 0.9 * results["losses"][0], results["losses"]
    assert results["tokens"] == results["again"], "a seed decides the samples of a version"
    # Log-probs of the engine's weights, of the trainer, and of a model resumed from its checkpoint.
    assert np.allclose(results["scores"][1:], results["forward"][0], atol=1e-4)
    assert results["forward"][0] == results["forward"][1]
    assert any((tmp_path / "runs/served/service/idle").iterdir()), "a model moved to disk, and came back with its bits"
    folder = str(tiny_model())
    check_sampling(asyncio.run(run_program(url, "sampling", folder, SDK_TOKENIZER=folder)))
    # A second service of the folder would delete the models of the first.
    second = subprocess.run(server.args, cwd=tmp_path, capture_output=True, text=True)
    assert second.returncode == RunFolderLockedError.exit_code, second.stderr
    server.send_signal(signal.SIGTERM)
    assert server.wait(60) == 75


def test_a_damaged_checkpoint_fails_the_requests_for_it_alone(
    server: subprocess.Popen[str], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "runs/served/service/checkpoints"
    results = asyncio.run(run_program(read_url(server.stdout), "damaged", str(tiny_model()), SDK_FOLDER=str(folder)))
    assert list(results["errors"]) == results["labels"], results["errors"]
    for name, text in results["errors"].items():
        assert f"/weights/{name}: its files are damaged" in text and str(folder) not in text, text
    # The SDK repeats a request with a status of the server's faults for five minutes, and the program has four.
    assert results["forward"][0] == results["forward"][1], "the model and its good checkpoint are as they were"


@pytest.mark.long
@pytest.mark.parametrize("server", ["dp 2", "tp 2"], indirect=True)
def test_loops_learn_on_two_ranks(server: subprocess.Popen[str], tiny_model: Callable[..., Path]) -> None:
    url = read_url(server.stdout)
    supervised = asyncio.run(run_program(url, "supervised", str(tiny_model(**LEARNER)), SDK_RATE="0.01"))
    assert supervised["losses"][-1] < 0.9 * supervised["losses"][0], supervised["losses"]
    reinforced = asyncio.run(run_program(url, "reinforce", str(tiny_model(**LEARNER)), SDK_STEPS="24", SDK_RATE="0.01"))
    # A step has 24 samples of 8 tokens, so its reward is noisy: 0.04 is its deviation.
    rewards = reinforced["rewards"]
    assert np.mean(rewards[-8:]) > np.mean(rewards[:8]) + 0.1, rewards
    # Log-probs of the engine against the trainer's, in nats.
    assert reinforced["gap"] < 1e-4
    server.send_signal(signal.SIGTERM)
    assert server.wait(60) == 75
