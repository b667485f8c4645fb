"""The quickstart's task with engines on ranks of their own: what staleness costs in accuracy and gains in speed.

    python tools/check_staleness.py [--staleness 0 1 2 4] [--seeds 0 1 2] [--steps 40] [--json results.jsonl]

The quickstart's student is made once, then GRPO trains it for as many steps at each bound of staleness, with the
decoupled correction (algorithm.importance_sampling tis, the trainer's log-probs as the proximal policy) and without
(none). One rank trains, another samples. Prints a line for each bound and correction: held-out accuracy over the seeds
(mean, least, most) and samples a second without evaluations. Exits with 1 where one step off is outside of what the
seeds make of staleness 0, by the corrected runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from check_learning import ROOT, START, accuracies, make_start, megarl

RECIPE = ROOT / "launch/recipes/quickstart.yaml"
SEPARATE = (
    "cluster.ranks_per_node=2", "trainer.tp=1", "rollout.tp=1", "rollout.placement=separate", "rollout.ranks=1",
)  # fmt: skip
CORRECTIONS = ("tis", "none")


def samples_per_second(run: Path) -> float:
    """Of a run's steps but the first, evaluations left out."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [row for row in rows if row["step"] > 1]
    seconds = sum(row["time/step_seconds"] - row.get("time/evaluation_seconds", 0.0) for row in steps)
    return len(steps) / seconds


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Accuracies of the seeds and speed, by bound and correction."""
    per_step = options.prompts * options.samples
    for staleness, correction in product(options.staleness, CORRECTIONS):
        found: list[float] = []
        speeds: list[float] = []
        for seed in options.seeds:
            name = f"staleness_{staleness}_{correction}_{seed}"
            run = options.work / "runs" / name
            if not (run / "hf").is_dir():
                status, said = megarl(
                    options.work, RECIPE, f"name={name}", f"seed={seed}", *SEPARATE, f"train.steps={options.steps}",
                    f"rollout.max_staleness={staleness}", f"algorithm.importance_sampling={correction}",
                    f"train.prompts_per_step={options.prompts}", f"train.samples_per_prompt={options.samples}",
                )  # fmt: skip
                if status:
                    raise SystemExit(said[-3000:])
            found.append(accuracies(run)[-1])
            speeds.append(per_step * samples_per_second(run))
        yield {
            "staleness": staleness, "correction": correction, "accuracies": found,
            "samples_per_second": mean(speeds),
        }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    if not (options.work / "runs" / START / "hf").is_dir():
        make_start(options.work, START)
    lines: list[dict[str, Any]] = []
    print(f"{'staleness':>9} {'correction':>10} {'mean':>7} {'least':>7} {'most':>7} {'samples/s':>10}")
    for line in measured(options):
        lines.append(line)
        found = line["accuracies"]
        print(
            f"{line['staleness']:9} {line['correction']:>10} {mean(found):7.3f} {min(found):7.3f} {max(found):7.3f} "
            f"{line['samples_per_second']:10.1f}",
            flush=True,
        )
    if options.json:
        options.json.write_text("".join(json.dumps(line) + "\n" for line in lines))
    corrected = {line["staleness"]: line["accuracies"] for line in lines if line["correction"] == "tis"}
    if not {0, 1} <= corrected.keys():
        return 0
    is_within = mean(corrected[1]) >= min(corrected[0])
    print(f"one step off is {'within' if is_within else 'below'} the seeds of staleness 0")
    return 0 if is_within else 1


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--work", type=Path, default=Path("runs/check_staleness"), help="folder; done runs are kept")
    parser.add_argument("--json", type=Path, help="write one JSON object a line here")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
