"""GRPO compared with TRL's GRPOTrainer: samples a second, generation and update together, and the course of the reward.

    pip install --no-deps --target PEER trl accelerate datasets dill xxhash multiprocess pyarrow pandas python-dateutil
    python tools/bench/grpo_vs_trl.py --model MODEL --data train.jsonl --peer PEER --new-tokens 32 --seeds 0 1

The same model folder, prompts, reward, learning rate, group size and steps for both, on this machine's CPU, in turns,
each run in processes of its own. megarl runs each of `--layouts` on two ranks, and the fastest one counts; TRL runs as
one process with all cores, its only layout here. A step's time is the median without the first two. With several seeds
the rewards' course is compared too: the share of our steps within the band of TRL's seeds, widened by its own width.
Prints one JSON object a line. `long_tail_model.py` makes a model for the case with a long tail.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tools.bench.parts.report import machine, metric_line, print_line, versions

ROOT = Path(__file__).resolve().parents[2]
LEAST = {32: 1.5, 256: 4.0}
LAYOUTS = {
    "dp 2": ["trainer.tp=1", "rollout.tp=1"],
    "tp 2": ["trainer.tp=2", "rollout.tp=2"],
    "tp 2, engines tp 1": ["trainer.tp=2", "rollout.tp=1"],
}
"""Overrides of the recipe by layout of the two ranks."""


def train_with_megarl(options: argparse.Namespace, seed: int, folder: Path, layout: str) -> dict[str, list[float]]:
    """Train with megarl in this layout. Returns seconds, rewards and tokens of each step."""
    run = f"grpo_{options.new_tokens}_{seed}_{[*LAYOUTS].index(layout)}"
    overrides = [
        f"name={run}", f"runs_folder={folder}", f"seed={seed}", f"model.path={options.model}",
        f"data.train={options.data}", f"data.validation.heldout={options.data}", "evaluation.max_problems=1",
        f"rollout.sampling.max_new_tokens={options.new_tokens}",
        f"train.steps={options.steps}", f"train.prompts_per_step={options.prompts}",
        f"train.samples_per_prompt={options.samples}", f"optimizer.learning_rate={options.learning_rate}",
        f"optimizer.min_learning_rate={options.learning_rate}", "optimizer.warmup_steps=0",
        "samples_every_steps=1000", *LAYOUTS[layout], *options.override,
    ]  # fmt: skip
    command = [sys.executable, "-m", "megarl", "train", str(ROOT / "launch/recipes/tiny_rl.yaml"), *overrides]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder)
    lines = [json.loads(line) for line in (folder / run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "reward/mean" in line]
    return {
        "seconds": [line["time/step_seconds"] for line in steps],
        "rewards": [line["reward/mean"] for line in steps],
        "tokens": [line["rollout/completion_tokens/mean"] for line in steps],
    }


def run_trl_process(options: argparse.Namespace, seed: int) -> dict[str, list[float]]:
    """Train with TRL, in a process that sees its packages. Returns the same values."""
    command = [sys.executable, __file__, *sys.argv[1:], "--trl-seed", str(seed)]
    environment = {**os.environ, "PYTHONPATH": f"{options.peer}:{ROOT}", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def train_with_trl(options: argparse.Namespace, seed: int) -> dict[str, list[float]]:
    # TRL and what it needs stand in --peer alone.
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    from megarl.rewards.functions.marked_answers import boxed

    records = [json.loads(line) for line in Path(options.data).read_text().splitlines()]
    prompts = {"prompt": [[r["messages"]] for r in records], "gold": [r["gt_answer"] for r in records]}
    curves: dict[str, list[float]] = {"seconds": [], "rewards": [], "tokens": []}

    def reward(completions: list[Any], gold: list[str], **_: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        return [boxed(text, answer, correct_score=1.0).score for text, answer in zip(texts, gold, strict=True)]

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            curves["seconds"].append(time.perf_counter() - self.started)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "reward" in logs:
                curves["rewards"].append(logs["reward"])
                curves["tokens"].append(logs["completions/mean_length"])

    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder, per_device_train_batch_size=options.prompts * options.samples,
            num_generations=options.samples, max_completion_length=options.new_tokens, max_steps=options.steps,
            learning_rate=options.learning_rate, lr_scheduler_type="constant", beta=0.0, temperature=1.0,
            epsilon_high=0.2, loss_type="dapo", max_grad_norm=1.0, use_cpu=True, bf16=False, seed=seed,
            gradient_checkpointing=False, report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True,
            adam_beta2=0.95, weight_decay=0.0,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(options.model, dtype="float32"),
            processing_class=AutoTokenizer.from_pretrained(options.model, padding_side="left"),
            reward_funcs=reward,
            args=settings,
            # Named, since the fingerprint that it would compute needs matching releases of two pickling libraries.
            train_dataset=Dataset(InMemoryTable.from_pydict(prompts), fingerprint="prompts"),
            callbacks=[Clock()],
        )
        trainer.train()
    return curves


def median_seconds(run: dict[str, list[float]]) -> float:
    return statistics.median(run["seconds"][2:])


def share_within_band(run: list[float], band: list[list[float]]) -> float:
    """Return the share of steps with a reward inside the band of other runs, widened by its own width on both sides."""
    inside = []
    for reward, peer_rewards in zip(run, zip(*band, strict=True), strict=True):
        low, high = min(peer_rewards), max(peer_rewards)
        width = max(high - low, 0.02)
        inside.append(low - width <= reward <= high + width)
    return statistics.mean(inside)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder that both start from")
    parser.add_argument("--data", type=Path, required=True, help="JSONL of problems")
    parser.add_argument("--peer", type=Path, required=True, help="folder that TRL was installed into")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=[*LAYOUTS], help="of megarl's two ranks")
    parser.add_argument("--override", action="append", default=[], help="of megarl's recipe; repeatable")
    parser.add_argument("--trl-seed", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.model, options.data = options.model.resolve(), options.data.resolve()
    if options.trl_seed is not None:
        print(json.dumps(train_with_trl(options, options.trl_seed)))
        return
    by_layout: dict[str, list[dict[str, list[float]]]] = {layout: [] for layout in options.layouts}
    peer = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in options.seeds:
            for layout, runs in by_layout.items():
                runs.append(train_with_megarl(options, seed, Path(folder), layout))
            peer.append(run_trl_process(options, seed))
    per_step = options.prompts * options.samples
    per_layout = {
        layout: round(per_step / statistics.median(median_seconds(run) for run in runs), 1)
        for layout, runs in by_layout.items()
    }
    best = max(per_layout, key=per_layout.__getitem__)
    mine = by_layout[best]
    rates = [[per_step / median_seconds(run) for run in runs] for runs in (mine, peer)]
    shared = {
        "machine": machine(), "versions": versions("trl", "vllm", "megatron-core"),
        "case": f"{options.prompts} prompts x {options.samples}, {options.new_tokens} new tokens, {options.override}",
        "layout": best, "samples_per_second_by_layout": per_layout,
        "mean_tokens": [round(statistics.mean(run["tokens"]), 1) for run in (mine[0], peer[0])],
    }  # fmt: skip
    least = LEAST.get(options.new_tokens)
    print_line(
        metric_line(
            "grpo_vs_trl", [a / b for a, b in zip(*rates, strict=True)], "times the samples a second",
            target=f">= {least}" if least else None, against=f"TRL, {statistics.median(rates[1]):.0f} a second",
            ours=round(statistics.median(rates[0])), **shared,
        )
    )  # fmt: skip
    if len(options.seeds) > 1:
        shares = [share_within_band(run["rewards"], [peer_run["rewards"] for peer_run in peer]) for run in mine]
        print_line(
            metric_line(
                "grpo_reward_within_trl", shares, "share of steps", target=None, against="the band of TRL's seeds",
                ours=[run["rewards"] for run in mine], theirs=[run["rewards"] for run in peer], **shared,
            )
        )  # fmt: skip


if __name__ == "__main__":
    main()
