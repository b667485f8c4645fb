"""Train one recipe with engines on the trainer's ranks and with engines on ranks of their own, and compare bit by bit.

    python tools/check_placement.py [--only "pp2 -> tp1 x 2"] [--steps 5]

In float32, with old log-probs by the trainer and no importance sampling, `rollout.placement` changes nothing of what is
learned: the exported weights are equal in every bit, and a reshard to ranks of their own moves what engines hold and no
byte more. Two ranks train, two more sample. The separate run is ended a step early and resumed. Exits with 1 where
weights differ, a run fails or more is moved.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from check_same_weights import REWARD, hashes  # noqa: E402

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


class Compared(NamedTuple):
    """What a layout's two runs came to."""

    layout: str
    num_differing: int
    """Hashes of exported weights that differ; -1 where there are none."""
    ratio: float
    """Bytes that engines received in a reshard over the least possible."""
    seconds: tuple[float, float]
    """A step of the colocated run and of the separate one, the last."""


def make_inputs(folder: Path) -> None:
    """Models, data and reward in `folder`."""
    for family in dict.fromkeys(family for family, _ in LAYOUTS.values()):
        flags = ["--out", str(folder / family), "--family", family, "--num-layers", "2", "--initializer-range", "0.08"]
        _run([sys.executable, str(ROOT / "tools/make_tiny_model.py"), *flags], folder)
        (folder / f"{family}.yaml").write_text(RECIPE.format(model=family))
    flags = ["--out", str(folder / "data"), "--train", "64", "--heldout", "8", "--sft", "8"]
    _run([sys.executable, str(ROOT / "tools/make_dataset.py"), *flags], folder)
    (folder / "share_of_digits.py").write_text(REWARD)


def compare(folder: Path, name: str, steps: int) -> Compared:
    """Train one layout in both placements, in a folder of `make_inputs`, where the runs stay.

    Raises RuntimeError where a run fails.
    """
    family, sizes = LAYOUTS[name]
    found: dict[str, dict[str, str]] = {}
    logged: dict[str, dict[str, Any]] = {}
    for placement, settings in (("colocated", {"cluster.ranks_per_node": 2}), ("separate", SEPARATE)):
        run = f"{placement}_{len(list(folder.glob('runs/*')))}"
        overrides = [f"{field}={value}" for field, value in {"name": run, **sizes, **settings}.items()]
        train = [sys.executable, "-m", "megarl", "train", f"{family}.yaml", *overrides]
        if placement == "separate":
            _run([*train, f"train.steps={steps - 1}"], folder)
            _run([*train, f"train.steps={steps}", "--resume"], folder)
        else:
            _run([*train, f"train.steps={steps}"], folder)
        found[placement] = hashes(folder / "runs" / run)
        logged[placement] = json.loads((folder / "runs" / run / "metrics.jsonl").read_text().splitlines()[-1])
    planned = json.loads(_run([sys.executable, "-m", "megarl", "plan", f"{family}.yaml", "--json", *overrides], folder))
    least = planned["reshard"]["lower_bound_bytes"]["mean"] * planned["num_ranks"]
    weights = [file for file in found["colocated"] if file != "completions"]
    return Compared(
        name,
        sum(found["colocated"][file] != found["separate"].get(file) for file in weights) if weights else -1,
        logged["separate"]["reshard/received_bytes"] / least,
        (logged["colocated"]["time/step_seconds"], logged["separate"]["time/step_seconds"]),
    )


def _run(command: Sequence[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=LAYOUTS, help="compare this layout; repeatable")
    parser.add_argument("--steps", type=int, default=5, help="steps of each run")
    options = parser.parse_args(arguments)
    is_good = True
    print(f"{'trainer -> engines':20} {'weights':>10} {'moved / least':>14} {'step, colocated':>16} {'separate':>9}")
    with tempfile.TemporaryDirectory(prefix="megarl-placement-") as scratch:
        make_inputs(Path(scratch))
        for name in options.only or LAYOUTS:
            began = time.monotonic()
            done = compare(Path(scratch), name, options.steps)
            verdict = "bit-equal" if done.num_differing == 0 else "DIFFER"
            print(
                f"{name:20} {verdict:>10} {done.ratio:14.2f} {done.seconds[0]:14.2f} s {done.seconds[1]:7.2f} s"
                f"   (both runs {time.monotonic() - began:.0f} s)",
                flush=True,
            )
            is_good &= done.num_differing == 0 and abs(done.ratio - 1) < 0.005
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
