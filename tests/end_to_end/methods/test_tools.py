"""A policy with a calculator, from demonstrations with calls to steps of GRPO over what it calls."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.recorded_metrics import unknown_metrics
from tests.logged_steps import logged_steps
from tools.make_tiny_model import make_tiny_model
from tools.make_tool_data import make_tool_data
from tools.runs import run_megarl

pytestmark = pytest.mark.end_to_end

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.long
def test_a_policy_learns_calls_from_demonstrations_and_makes_them_in_grpo(tmp_path: Path) -> None:
    data = make_tool_data(tmp_path / "data", sft=64, train=8, heldout=4, called=1.0)
    make_tiny_model(tmp_path / "model", num_layers=2, initializer_range=0.08, tool_words=True)
    one_rank = [
        "cluster.ranks_per_node=1", "trainer.tp=1", "rollout.tp=1", f"runs_folder={tmp_path}/runs",
        f"data.validation.heldout={data}/heldout.jsonl",
    ]  # fmt: skip

    def train(recipe: str, *overrides: str) -> list[dict[str, float]]:
        done = run_megarl("train", f"launch/recipes/{recipe}.yaml", *one_rank, *overrides)
        assert done.returncode == 0, done.stdout + done.stderr
        return logged_steps(tmp_path / f"runs/{recipe}")

    sft = train(
        "tiny_tools_sft", f"model.path={tmp_path}/model", f"data.train={data}/sft.jsonl", "train.steps=60",
        "train.prompts_per_step=32",
    )  # fmt: skip
    assert sft[-1]["train/loss"] < 0.7 * sft[0].get("train/loss", sft[1]["train/loss"])
    steps = train(
        "tiny_tools", f"model.path={tmp_path}/runs/tiny_tools_sft/hf", f"data.train={data}/train.jsonl",
        "train.steps=2", "train.prompts_per_step=4", "train.samples_per_prompt=4", "optimizer.warmup_steps=1",
    )  # fmt: skip
    trained = [step for step in steps if "tools/calculator/calls" in step]
    assert len(trained) == 2
    for step in trained:
        # Most attempts call the tool and go on after its reply.
        assert step["tools/calculator/calls"] > 0.5 and step["rollout/turns/mean"] > 1.5
        assert step["logprob_gap/max"] < 1e-4
    assert unknown_metrics(tmp_path / "runs/tiny_tools") == set()
    (samples, *_) = sorted((tmp_path / "runs/tiny_tools/samples").glob("*.jsonl"))
    assert "<tool_call>" in samples.read_text()
