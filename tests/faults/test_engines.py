"""Faults of colocated engines: the watchdog of a call ends the run, and names the rank that samples no more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.broken_runs import BrokenRuns

pytestmark = [pytest.mark.end_to_end, pytest.mark.fault_runs]

RECIPE = """
name: run
loop: rl
model: {{path: {model}, dtype: float32}}
data: {{train: data/train.jsonl, max_prompt_tokens: 96}}
cluster: {{ranks_per_node: 2, preflight: false, verb_timeout_seconds: 5, collective_timeout_seconds: 60}}
trainer: {{max_tokens_per_microbatch: 1024}}
optimizer: {{learning_rate: 1e-3}}
rollout: {{kv_cache_gib: 0.02, sampling: {{max_new_tokens: 8}}}}
reward: {{functions: [gsm8k]}}
train: {{steps: 8, prompts_per_step: 2, samples_per_prompt: 2}}
checkpoint: {{every_steps: 2}}
"""


def test_row_24_a_stopped_engine(broken_runs: BrokenRuns, tiny_model: Callable[..., Path]) -> None:
    (broken_runs.folder / "recipe.yaml").write_text(RECIPE.format(model=tiny_model(num_layers=2)))
    end = broken_runs.train(fault="sample:1:5:stop")
    assert end.exit_code == 76 and end.left == [], end.output
    assert (end.status["state"], end.status["rank"]) == ("failed", 1)
    assert "did not answer `advance` within" in end.status["cause"], end.status
    limit = float(end.status["cause"].partition("within ")[2].partition(" s")[0])
    assert limit <= end.seconds < limit + 30.0
    report = next((broken_runs.run / "logs/latest/").glob("hang_*.txt")).read_text()
    assert "first silent rank: 1\n" in report and ": T (stopped)" in report
    end = broken_runs.train("--resume")
    assert end.status["state"] == "done" and end.status["step"] == 8, end.output
