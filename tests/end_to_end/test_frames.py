"""From `megarl train` to the formula of the loss: as few functions as CONTRIBUTING lists, found in a run."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.algorithms.policy_losses import POLICY_LOSSES
from megarl.config import AlgorithmConfig
from tools.make_dataset import make_dataset

pytestmark = pytest.mark.end_to_end

ROOT = Path(__file__).resolve().parents[2]
PROBE = ROOT / "tests/probes/frames.py"
MOST_FRAMES, MOST_FILES = 12, 9
RECIPE = """
name: frames
loop: rl
model: {{path: {model}, dtype: float32}}
data: {{train: data/train.jsonl, max_prompt_tokens: 96}}
cluster: {{ranks_per_node: 1}}
trainer: {{max_tokens_per_microbatch: 512}}
rollout: {{kv_cache_gib: 0.02, sampling: {{max_new_tokens: 8}}}}
algorithm: {{policy_loss: "own_loss.py:loss"}}
train: {{steps: 1, prompts_per_step: 2, samples_per_prompt: 2}}
"""
LOSS = """
import importlib.util
import sys
from pathlib import Path

spec = importlib.util.spec_from_file_location("frames", "{probe}")
frames = importlib.util.module_from_spec(spec)
spec.loader.exec_module(frames)
FOLDER = Path("{folder}")


def loss(policy_logprobs, old_logprobs, advantages):
    outer = [frame.f_code for frame in frames.stack(sys._getframe())]
    functions = frames.own_functions(outer)
    # The check before a start calls it on toy tensors, without a rank.
    if not any(file == "megarl/algorithms/trial.py" for _, file in functions):
        frames.write(FOLDER / "rank.json", functions)
        frames.wait_for(FOLDER / "driver.json")
    return -advantages * policy_logprobs, {{}}
"""


def listed() -> list[tuple[str, str]]:
    """The functions and files of CONTRIBUTING's table."""
    text = (ROOT / ".github/CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| (\d+) \| `([\w.]+)` \| `([\w/.]+)` \|", text, re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == list(range(1, len(rows) + 1))
    return [(function, file) for _, function, file in rows]


def test_the_functions_between_command_and_loss_are_those_listed(
    tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    make_dataset(tmp_path / "data", sft=8, train=32, heldout=8)
    (tmp_path / "own_loss.py").write_text(LOSS.format(probe=PROBE, folder=tmp_path))
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(model=tiny_model()))
    command = [sys.executable, str(PROBE), str(tmp_path), "train", "recipe.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    driver, rank = (json.loads((tmp_path / f"{side}.json").read_text()) for side in ("driver", "rank"))
    # The run's own loss stands where the default one would.
    formula = POLICY_LOSSES[AlgorithmConfig().policy_loss]
    home = Path(inspect.getfile(formula)).relative_to(ROOT)
    found = [tuple(frame) for frame in [*driver, *rank, (formula.__qualname__, str(home))]]
    assert found == listed()
    assert len(found) <= MOST_FRAMES and len({file for _, file in found}) <= MOST_FILES
