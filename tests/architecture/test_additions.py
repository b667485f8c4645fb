"""Additions touch the files that CONTRIBUTING names and no others: each is made in a copy of the package, and used."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.package_copy import copy_package
from tools.make_dataset import make_dataset

ROOT = Path(__file__).resolve().parents[2]
NEW_FILES = {
    "a model family": '''"""Toy: Qwen3 under another name."""

from __future__ import annotations

from megarl.families.pages import qwen3
from megarl.families.family import Family

FAMILY = Family("ToyForCausalLM", qwen3.FAMILY.read, qwen3.rules)
''',
    "an environment": '''"""A single turn that earns its length."""

from __future__ import annotations

from megarl.environments import Start, Step


class Toy:
    async def reset(self, problem, seed):
        return Start(problem.messages)

    async def step(self, turn):
        return Step(reward=float(len(turn.text)), done=True)

    async def close(self): ...
''',
    "a reward": '''"""The share of digits in a completion."""

from __future__ import annotations

from megarl.types import Reward


def toy(completion_text: str, answer: str, *, correct_score: float) -> Reward:
    share = sum(character.isdigit() for character in completion_text) / max(1, len(completion_text))
    return Reward(score=correct_score * share, format_valid=True, answer_correct=share > 0.5)
''',
    "a tracker": '''"""Steps as lines of a file."""

from __future__ import annotations


class Toy:
    def __init__(self, folder, resumed_step):
        self.file = folder / "toy.txt"

    def log(self, step, scalars):
        self.file.write_text(f"{step} {dict(scalars)}")

    def samples(self, step, records): ...

    def sync(self): ...

    def close(self): ...
''',
}
FUNCTIONS = {
    "a policy loss": '''def toy(
    policy_logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, slope: float = 2.0
) -> LossAndMetrics:
    """The policy gradient's loss, `slope` times."""
    return -slope * advantages * policy_logprobs, {}


''',
    "an advantage estimator": '''def toy(rewards: Tensor, groups: Tensor) -> Tensor:
    """The rewards themselves, float [samples]."""
    return rewards


''',
}
LINES = {
    "FAMILIES": ("toy", "toy.FAMILY"),
    "POLICY_LOSSES": ("toy", "toy"),
    "ADVANTAGES": ("toy", "toy"),
    "ENVIRONMENTS": ("toy", '"megarl.environments.toy:Toy"'),
    "REWARDS": ("toy", '"megarl.rewards.functions.toy:toy"'),
    "TRACKERS": ("toy", '"megarl.tracking.trackers.toy:Toy"'),
}
USE = """
import json
from pathlib import Path

import torch

from megarl.algorithms.advantages import ADVANTAGES
from megarl.algorithms.policy_losses import POLICY_LOSSES
from megarl.environments import find_environment
from megarl.families.model_tensors import hf_tensors
from megarl.families.shape import read_model_shape
from megarl.rewards import resolve
from megarl.tracking.trackers import start

shape = read_model_shape("model")
loss, _ = POLICY_LOSSES["toy"](torch.tensor([-3.0]), torch.tensor([-2.0]), torch.tensor([5.0]), slope=7.0)
tracker = start("toy", Path("."), 0)
tracker.log(11, {"x": 13.0})
print(json.dumps({
    "family": shape.family,
    "tensors": len(hf_tensors(shape)),
    "loss": loss.tolist(),
    "advantages": ADVANTAGES["toy"](torch.tensor([2.0, 3.0]), torch.tensor([0, 0])).tolist(),
    "environment": find_environment("toy").__name__,
    "reward": resolve("toy")("1a2b", "7", correct_score=10.0).score,
    "tracked": Path("toy.txt").read_text(),
}))
"""


def table() -> dict[str, tuple[str, str, str]]:
    """CONTRIBUTING's table: addition -> file to write, name of the table, file of the table."""
    text = (ROOT / ".github/CONTRIBUTING.md").read_text(encoding="utf-8")
    found = {}
    for what, where, line in re.findall(r"^\| (an? [^|]+?) \| ([^|]+) \| ([^|]+) \|$", text, re.MULTILINE):
        (file,) = re.findall(r"`(megarl/[^`]+)`", where)
        (name,) = re.findall(r"`([A-Z_]+)` in", line)
        others = re.findall(r"in `(megarl/[^`]+)`", line)
        found[what] = file, name, others[0] if others else file
    return found


def hashes(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def add(copy: Path, what: str, file: str, name: str, table_file: str) -> None:
    path = copy / file.replace("NAME", "toy")
    listed = copy / table_file
    if what in NEW_FILES:
        assert not path.exists()
        path.write_text(NEW_FILES[what])
    text = listed.read_text()
    head = re.search(rf"^{name}(: [^=]+)? = \{{\n", text, re.MULTILINE)
    assert head is not None
    key, value = LINES[name]
    function = FUNCTIONS.get(what, "")
    text = text[: head.start()] + function + head[0] + f'    "{key}": {value},\n' + text[head.end() :]
    if what == "a model family":
        text = text.replace(
            "from megarl.families.pages import (\n", "from megarl.families.pages import (\n    toy,\n", 1
        )
    listed.write_text(text)


@pytest.mark.end_to_end
def test_additions_touch_what_contributing_says(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    copy = tmp_path / "copy"
    copy_package(copy)
    before = hashes(copy)
    additions = table()
    assert set(additions) == {*NEW_FILES, *FUNCTIONS}
    for what, (file, name, table_file) in additions.items():
        add(copy, what, file, name, table_file)
    after = hashes(copy)
    said = {file.replace("NAME", "toy") for one, _, other in additions.values() for file in (one, other)}
    assert {name for name in after if after[name] != before.get(name)} == said

    shutil.copytree(tiny_model(), tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    config |= {"architectures": ["ToyForCausalLM"], "model_type": "toy"}
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    make_dataset(tmp_path / "data", sft=8, train=32, heldout=8)
    recipe = {
        "name": "toy",
        "loop": "rl",
        "model": {"path": "model", "dtype": "float32"},
        "data": {"train": "data/train.jsonl", "max_prompt_tokens": 96},
        "rollout": {"environment": "toy"},
        "reward": {"functions": ["toy"]},
        "algorithm": {"advantage": "toy", "policy_loss": "toy", "policy_loss_kwargs": {"slope": 7.0}},
        "trackers": ["tensorboard", "toy"],
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    environment = os.environ | {"PYTHONPATH": str(copy)}

    def python(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "toy (rl)" in python("-m", "megarl", "train", "recipe.yaml", "--dry-run")
    assert json.loads(python("-c", USE)) == {
        "family": "toy",
        "tensors": len(_tensors(tiny_model())),
        "loss": [105.0],
        "advantages": [2.0, 3.0],
        "environment": "Toy",
        "reward": 5.0,
        "tracked": "11 {'x': 13.0}",
    }


FIELD = '''    toy: Annotated[PositiveInt, OnlyIf(RL, SEPARATE)] = 7
    """Number of toys of an engine."""
'''
ROWS = {
    '    "verl": (\n': '        ("actor_rollout_ref.rollout.toys", "rollout.toy"),\n',
    "    OTHERS: (\n": '        ("n_toys", "rollout.toy"),\n',
}
FIELD_USE = """
import json, sys
from pathlib import Path

from megarl.config.hints.migration import migration_page
from megarl.config.recipe import load, read, to_yaml

small = Path("recipe.yaml")
separate = ["rollout.placement=separate", "rollout.ranks=1"]
print(json.dumps({
    "default": load(small, separate).rollout.toy,
    "shown": [line.strip() for line in to_yaml(load(small, separate), True).splitlines() if "toy" in line],
    "hidden": [line for line in to_yaml(load(small)).splitlines() if "toy" in line],
    "idle": read(small, ["rollout.toy=3"]).problems,
    "foreign": [read(small, [f"{name}=3"]).problems for name in sys.argv[1:]],
    "page": [line for line in migration_page().splitlines() if "toy" in line],
    "torch": "torch" in sys.modules,
}))
"""


def insert(file: Path, before: str, line: str, *, after: bool = False) -> None:
    text = file.read_text()
    assert text.count(before) == 1
    file.write_text(text.replace(before, before + line if after else line + before))


def test_a_recipe_field_with_a_condition_and_a_foreign_name_is_a_field_and_a_row(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy_package(copy)
    before = hashes(copy)
    insert(copy / "megarl/config/sections/rollout.py", "    max_concurrent_requests: ", FIELD)
    for program, row in ROWS.items():
        insert(copy / "megarl/config/hints/foreign.py", program, row, after=True)
    after = hashes(copy)
    changed = {name for name in after if after[name] != before.get(name)}
    assert changed == {"megarl/config/sections/rollout.py", "megarl/config/hints/foreign.py"}

    (tmp_path / "recipe.yaml").write_text("{name: one, loop: rl, model: {path: m}, data: {train: t}}")
    command = [sys.executable, "-c", FIELD_USE, "x.n_toys", "actor_rollout_ref.rollout.toys"]
    environment = os.environ | {"PYTHONPATH": str(copy)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    [idle] = found.pop("idle")
    assert idle.startswith("rollout.toy = 3: does nothing under rollout.placement=colocated; leave it out, or set ")
    assert idle.endswith("Number of toys of an engine.")
    assert [problem.partition("; ")[2] for [problem] in found.pop("foreign")] == ["here it is rollout.toy"] * 2
    overrides = "rollout.placement=separate rollout.ranks=4 cluster.ranks_per_node=8 rollout.toy=7"
    assert found == {
        "default": 7,
        "shown": ["# Number of toys of an engine.", "toy: 7"],
        "hidden": [],
        "page": [f"| `actor_rollout_ref.rollout.toys` | `{overrides}` | |"],
        "torch": False,
    }


def _tensors(model: Path) -> set[str]:
    from safetensors import safe_open

    with safe_open(model / "model.safetensors", "numpy") as stored:
        return set(stored.keys())
