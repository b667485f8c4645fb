"""Runs with a faulty rank and with a poisoned batch: the node is recorded, the weights go back to a checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.recovery.test_bit_flips import flip_in_copy, versions
from tests.forked_command import MEGARL
from tests.logged_steps import logged_steps

pytestmark = pytest.mark.end_to_end

RECIPE = """
name: unstable
loop: sft
model: {{path: {model}, dtype: float32}}
data: {{train: train.jsonl, shuffle: false}}
cluster: {{ranks_per_node: 2}}
trainer: {{dp: 2, max_tokens_per_microbatch: 256}}
optimizer: {{learning_rate: 1e-2}}
train:
  {{steps: 8, prompts_per_step: 2, on_spike: rollback, spike_loss_factor: 1.15, spike_factor: 1e9, spike_window: 2}}
checkpoint: {{every_steps: 3, asynchronous: false}}
weights: {{check_every: 1, canary_every: 7}}
"""
DISTURBED = """
    if torch.distributed.get_rank() == 1:
        calls = []
        def disturb(module, inputs, output):
            calls.append(1)
            return (output[0] * (1 + len(calls) * 1e-3), *output[1:])
        model.chunks[0].decoder.layers[0].mlp.linear_fc1.register_forward_hook(disturb, prepend=True)
"""
"""Statements that let a layer of rank 1 compute another result in each pass."""


@pytest.mark.long
def test_a_spike_rolls_back_and_a_faulty_rank_ends_the_run(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    """Step 5 trains on other conversations; before step 7 rank 1 computes its canary in two ways."""
    usual, other = "yes yes yes yes yes yes", "Q7#zp Vx!k 93%w ~Lj&2 bN)e"
    turns = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": usual}]
    lines = [turns] * 8 + [[turns[0], {"role": "assistant", "content": other}]] * 2 + [turns] * 10
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"messages": line}) + "\n" for line in lines))
    model = tiny_model(hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=2, intermediate_size=48)
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(model=model))
    flip_in_copy(tmp_path, "training/canary.py", "    first, second = ", DISTURBED)

    command = [*MEGARL, "train", "recipe.yaml"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "MEGARL_BAD_NODES_FILE": str(tmp_path / "bad")},
    )
    assert done.returncode == 76, done.stdout + done.stderr
    run = tmp_path / "runs/unstable"
    steps = [step for step in logged_steps(run) if step["step"]]
    assert [step["train/spikes"] for step in steps] == [0, 0, 0, 0, 1, 0], [step["train/loss"] for step in steps]
    assert [step["train/rollbacks"] for step in steps] == [0, 0, 0, 0, 1, 1]
    assert all(step["train/update_skipped"] == step["train/spikes"] for step in steps)
    assert "Rollback 1 of at most 3: weights and optimizer are those of step 3 again" in " ".join(done.stdout.split())
    checksums = {line["step"]: line["checksum"] for line in versions(tmp_path, "unstable")}
    assert checksums[5] == checksums[3] != checksums[4]
    # Steps 4 and 6 train the weights and the optimizer state of step 3 on equal conversations.
    assert checksums[6] == checksums[4] and len(set(checksums.values())) == 5
    driver = json.loads((run / "checkpoints/step_000006/driver.json").read_text())
    assert driver["spikes"]["rollbacks"] == 1 and len(driver["spikes"]["losses"]) == 2

    status = json.loads((run / "status.json").read_text())
    assert (status["step"], status["rank"], status["exit_code"], len(status["bad_nodes"])) == (6, 1, 76, 1)
    place = f"trainer rank 1 on {status['bad_nodes'][0]}"
    assert f"before the updates of step 7, {place} computed two different results" in status["cause"]
    assert "first at decoder.layers.0.mlp.linear_fc1" in status["cause"]
    assert (tmp_path / "bad").read_text() == f"{status['bad_nodes'][0]}\n"
