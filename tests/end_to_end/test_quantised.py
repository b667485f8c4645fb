"""A run whose engine has FP8 weights: verified at each step, its gap measured and corrected."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.train_command import train
from tools.make_dataset import make_dataset

pytestmark = pytest.mark.end_to_end

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
def test_an_fp8_engine_is_verified_and_its_mismatch_corrected(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    make_dataset(tmp_path / "data", sft=8, train=32, heldout=8)
    model = tiny_model(num_layers=2, hidden_size=192, num_heads=4, num_kv_heads=2, head_dim=64)
    said = train(
        tmp_path,
        str(ROOT / "launch/recipes/quickstart.yaml"),
        f"model.path={model}", "model.dtype=bfloat16", "name=fp8", "data.train=data/train.jsonl",
        "data.validation.heldout=data/heldout.jsonl", "train.steps=2", "train.prompts_per_step=4",
        "train.samples_per_prompt=4", "weights.verify_every=1", "rollout.quantization=fp8",
        "algorithm.importance_sampling=tis",
    )  # fmt: skip
    assert "full tensors" not in said
    lines = [json.loads(line) for line in (tmp_path / "runs/fp8/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "logprob_gap/mean" in line]
    assert len(steps) == 2
    for step in steps:
        # bfloat16 alone makes less than a third of it.
        assert 3e-3 < step["logprob_gap/mean"] < 5e-2
        assert 0.9 < step["logprob_gap/ess"] < 1 and 0.9 < step["importance/mean"] < 1.1
        assert step["time/reshard_quantise_seconds"] > 0 and step["time/reshard_verify_seconds"] > 0
