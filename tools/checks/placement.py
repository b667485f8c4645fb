"""Engines on ranks of their own change nothing of what is learned: weights are bit-equal to those of colocated runs.

In float32, with old log-probs by the trainer and no importance sampling, the exported weights are equal in every bit,
and a reshard to other ranks moves the bytes that engines hold and no more. Two ranks train, two more sample. The
separate run is ended a step early and resumed. A row per layout; it fails if weights differ or more is moved.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tools.checks.same_weights import hashes
from tools.make_dataset import make_dataset
from tools.make_tiny_model import make_tiny_model
from tools.runs import DIGITS_REWARD, output_end, read_metrics, run_megarl, train

DURATION = {"small": "60 s (one layout, two steps)", "full": "minutes: three layouts of five steps (not timed)"}
SMALL = {"only": ["pp2 -> tp1 x 2"], "steps": 2}
LAYOUTS: dict[str, tuple[str, Mapping[str, int]]] = {
    "tp2 -> tp2": ("llama", {"trainer.tp": 2, "rollout.tp": 2}),
    "pp2 -> tp1 x 2": ("llama", {"trainer.pp": 2, "rollout.tp": 1}),
    "ep2 -> tp2": ("qwen3_moe", {"trainer.ep": 2, "rollout.tp": 2}),
}
"""Family of the model and parallel sizes, by name."""
RECIPE = """
name: run
loop: rl
model: {{path: {model}, dtype: float32}}
data: {{train: data/train.jsonl, validation: {{heldout: data/heldout.jsonl}}, max_prompt_tokens: 96}}
trainer: {{max_tokens_per_microbatch: 512}}
optimizer: {{learning_rate: 1e-3}}
rollout: {{kv_cache_gib: 0.25, sampling: {{max_new_tokens: 16}}}}
reward: {{functions: ["share_of_digits:digits"]}}
algorithm: {{old_logprobs: trainer}}
weights: {{verify_every: 1}}
train: {{prompts_per_step: 4, samples_per_prompt: 4, updates_per_step: 2, profile_steps: [1]}}
checkpoint: {{every_steps: 1}}
evaluation: {{every_steps: 1, at_start: false}}
"""
SEPARATE = {"rollout.placement": "separate", "rollout.ranks": 2, "cluster.ranks_per_node": 4}


def make_inputs(folder: Path) -> None:
    """Write models, data, recipes and reward."""
    for family in dict.fromkeys(family for family, _ in LAYOUTS.values()):
        make_tiny_model(folder / family, family=family, num_layers=2, initializer_range=0.08)
        (folder / f"{family}.yaml").write_text(RECIPE.format(model=family))
    make_dataset(folder / "data", train=64, heldout=8, sft=8)
    (folder / "share_of_digits.py").write_text(DIGITS_REWARD)


def compare(folder: Path, name: str, steps: int) -> dict[str, Any]:
    """Train one layout in both placements, in a folder of `make_inputs`, where the runs stay. Returns its row."""
    started = time.monotonic()
    family, sizes = LAYOUTS[name]
    found: dict[str, dict[str, str]] = {}
    logged: dict[str, dict[str, Any]] = {}
    recipe, overrides = f"{family}.yaml", []
    for placement, settings in (("colocated", {"cluster.ranks_per_node": 2}), ("separate", SEPARATE)):
        run_name = f"{placement}_{len(list(folder.glob('runs/*')))}"
        overrides = [f"{field}={value}" for field, value in {"name": run_name, **sizes, **settings}.items()]
        if placement == "separate":
            train(recipe, *overrides, f"train.steps={steps - 1}", folder=folder)
            train(recipe, *overrides, f"train.steps={steps}", "--resume", folder=folder)
        else:
            train(recipe, *overrides, f"train.steps={steps}", folder=folder)
        found[placement] = hashes(folder / "runs" / run_name)
        logged[placement] = read_metrics(folder / "runs" / run_name)[-1]
    done = run_megarl("plan", recipe, "--json", *overrides, folder=folder)
    if done.returncode:
        raise SystemExit(output_end(done))
    planned = json.loads(done.stdout)
    least = planned["reshard"]["lower_bound_bytes"]["mean"] * planned["num_ranks"]
    weights = [file for file in found["colocated"] if file != "completions"]
    num_differing = sum(found["colocated"][file] != found["separate"].get(file) for file in weights)
    ratio = logged["separate"]["reshard/received_bytes"] / least
    return {
        "layout": name,
        "files": len(weights),
        "differing": num_differing,
        "moved_over_least": ratio,
        "colocated_step_seconds": logged["colocated"]["time/step_seconds"],
        "separate_step_seconds": logged["separate"]["time/step_seconds"],
        "seconds": round(time.monotonic() - started),
        "met": len(weights) > 0 and num_differing == 0 and abs(ratio - 1) < 0.005,
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", action="append", choices=LAYOUTS, help="compare this layout; repeatable")
    parser.add_argument("--steps", type=int, default=5, help="steps of each run")


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="megarl-placement-") as scratch:
        make_inputs(Path(scratch))
        for name in options.only or LAYOUTS:
            yield compare(Path(scratch), name, options.steps)
