"""DPO from the command line: two ranks, held-out pairs, a checkpoint, the exported model; and no engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.tracking.draws import account
from tests.end_to_end.recorded_metrics import metrics, unknown_metrics
from tests.end_to_end.train_command import train
from tools.make_dataset import make_dataset

pytestmark = pytest.mark.end_to_end

RECIPE = """
name: pairs
loop: preference
model: {{path: {model}, dtype: float32}}
data: {{train: data/pairs.jsonl, validation: {{heldout: data/heldout_pairs.jsonl}}}}
cluster: {{ranks_per_node: 2}}
trainer: {{tp: 2, max_tokens_per_microbatch: 512}}
optimizer: {{learning_rate: 2e-3}}
train: {{steps: 6, prompts_per_step: 16}}
checkpoint: {{every_steps: 3}}
"""


@pytest.mark.long
def test_judged_answers_are_learned(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    make_dataset(tmp_path / "data", sft=8, train=64, heldout=16)
    recipe = RECIPE.format(model=tiny_model()).replace("pairs.jsonl", "judged.jsonl")
    (tmp_path / "recipe.yaml").write_text(recipe)
    train(tmp_path, "recipe.yaml", "preference.loss=kto")
    first, *steps = metrics(tmp_path / "runs/pairs")
    assert first["val/heldout/accuracy"] == 0.5 and steps[0]["train/loss"] == pytest.approx(0.5)
    assert steps[0]["kl/reference"] == 0 and steps[0]["preference/accuracy"] == 0
    assert steps[-1]["preference/chosen"] > steps[-1]["preference/rejected"]
    assert steps[-1]["val/heldout/accuracy"] > 0.6
    assert unknown_metrics(tmp_path / "runs/pairs") == set()


@pytest.mark.long
def test_a_reference_that_moves_is_the_policy_again_also_after_a_resume(
    tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    make_dataset(tmp_path / "data", sft=8, train=64, heldout=16)
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(model=tiny_model()))
    train(tmp_path, "recipe.yaml", "algorithm.reference_update_steps=3", "train.steps=3")
    train(tmp_path, "recipe.yaml", "algorithm.reference_update_steps=3", "train.steps=4", "--resume")
    steps = metrics(tmp_path / "runs/pairs")[1:]
    assert [step["kl/reference_moved"] for step in steps] == [0, 0, 1, 0]
    assert [step["preference/margin"] == 0 for step in steps] == [True, False, False, True]
    assert steps[2]["train/loss"] < 0.69 and steps[3]["train/loss"] == pytest.approx(0.6931472, abs=1e-5)
    ledger = account(tmp_path / "runs/pairs")
    assert (ledger.faults, ledger.last_step) == ([], 4)
    assert sum(epoch.draws.total() for epoch in ledger.epochs) == sum(epoch.endings["used"] for epoch in ledger.epochs)


@pytest.mark.parametrize("loss", ["dpo", "simpo"])
def test_pairs_are_learned(tmp_path: Path, tiny_model: Callable[..., Path], loss: str) -> None:
    make_dataset(tmp_path / "data", sft=8, train=64, heldout=16)
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(model=tiny_model()))
    assert "pairs" in train(tmp_path, "recipe.yaml", f"preference.loss={loss}")
    first, *steps = metrics(tmp_path / "runs/pairs")
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    if loss == "dpo":
        # Before its first update the policy is the reference: nothing is won, nothing lost.
        assert first["val/heldout/accuracy"] == 0.5 and steps[0]["preference/margin"] == 0
        # The reference's pass in an evaluation is the evaluation's time alone.
        assert "time/evaluation_seconds" in first and "time/logprobs_seconds" not in first
        assert steps[0]["train/loss"] == pytest.approx(0.6931472, abs=1e-5)
    assert steps[-1]["preference/margin"] > steps[0]["preference/margin"]
    assert steps[-1]["train/loss"] < steps[0]["train/loss"]
    assert steps[-1]["val/heldout/accuracy"] > 0.6
    assert (tmp_path / "runs/pairs/hf/model.safetensors").exists()
    assert (tmp_path / "runs/pairs/checkpoints/step_000006/manifest.json").exists()
