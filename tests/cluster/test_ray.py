"""A real Ray cluster of three nodes on this machine: one recipe there as alone."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

ray = pytest.importorskip("ray", reason="needs Ray: launch/setup.sh ray")
pytestmark = [pytest.mark.timeout(1200), pytest.mark.filterwarnings("ignore")]

ROOT = Path(__file__).resolve().parents[2]
RECIPE = """
name: placed
loop: rl
model: {{path: {model}, dtype: float32}}
data: {{train: data/train.jsonl, max_prompt_tokens: 96}}
cluster: {{launcher: ray, ray_address: "{address}", nodes: 2, ranks_per_node: 2}}
trainer: {{tp: 2, pp: 2, max_tokens_per_microbatch: 512}}
optimizer: {{learning_rate: 2e-3}}
rollout: {{tp: 2, kv_cache_gib: 0.25, sampling: {{max_new_tokens: 12}}}}
reward: {{functions: ["letters:share_of_digits"]}}
train: {{steps: 3, prompts_per_step: 4, samples_per_prompt: 4}}
"""
REWARD = """
from megarl.types import Reward


def share_of_digits(completion, answer, correct_score):
    return Reward(sum(c.isdigit() for c in completion) / max(1, len(completion)), True, False)
"""


@pytest.fixture(scope="module")
def folder(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path], tool: Callable[[str], ModuleType]
) -> Iterator[Path]:
    """A folder with a recipe, beside a cluster of a head and two nodes with room for two ranks each."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    folder = tmp_path_factory.mktemp("ray")
    tool("make_dataset").make_dataset(folder / "data", sft=8, train=64, heldout=8)
    (folder / "letters.py").write_text(REWARD)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=2)
        recipe = RECIPE.format(model=tiny_model(num_layers=2), address=cluster.address)
        (folder / "recipe.yaml").write_text(recipe)
        yield folder
    finally:
        cluster.shutdown()


def train(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / ".venv/bin/megarl"), "train", "recipe.yaml", *overrides]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)


def test_a_run_on_ray_is_the_run_alone(folder: Path) -> None:
    for overrides in ((), ("name=alone", "cluster.launcher=local", "cluster.nodes=1", "cluster.ranks_per_node=4")):
        done = train(folder, *overrides)
        assert done.returncode == 0, done.stdout + done.stderr
    weights = [(folder / "runs" / name / "hf/model.safetensors").read_bytes() for name in ("placed", "alone")]
    assert weights[0] == weights[1]
    assert sorted(path.name for path in (folder / "runs/placed/logs/latest").iterdir()) == [
        f"rank_000{i}.log" for i in range(4)
    ]


def test_too_small_a_cluster_says_what_it_has(folder: Path) -> None:
    done = train(folder, "name=large", "cluster.nodes=4", "trainer.tp=4")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "needs 4 nodes with 2 CPUs each, the Ray cluster has nodes with [2, 2, 0]" in done.stderr
    assert json.loads((folder / "runs/large/status.json").read_text())["exit_code"] == 2
