"""Whole GRPO steps on one GPU by `megarl train`: seconds by phase and part, share of a product, idle share, memory.

    python tools/bench/grpo_gpu.py [--shape qwen3-1.7b]
    python tools/bench/grpo_gpu.py --shape qwen3-8b [section.field=value ...]

A model of random weights at a known shape is made on the spot. Its completions end at all lengths, by stop tokens that
it samples once in `--mean-tokens`. The reward is the parity of their length. Adam trains it; the 8B model, for whose
moments the GPU is too small, is trained by LoRA. Recomputation and offload are the planner's defaults. Overrides of the
recipe win.

A line is printed for each step as soon as it is in metrics.jsonl: phases and their parts, steps begun ahead, the GPU's
busy share and clock by nvidia-smi, products of matrices on the rank before the step, measured and planned memory. In
the end come the values of all steps but the first, which warms up, with their medians. The run is stopped when
`--steps` are made or `--budget-seconds` are used up. Ends with status 2 where no CUDA is.
`--device cpu --shape small --steps 2 --prompts 2 --samples 2 --new-tokens 16` shows that all parts work.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import yaml

from tools.bench.parts.budget import Budget, add_budget
from tools.bench.parts.device_parts import refuse_missing_cuda
from tools.bench.parts.report import machine, metric_line, print_line, versions, warm_up_line
from tools.bench.parts.shapes import SHAPES, config_of, stop_tokens, write_model

BENCH = Path(__file__).resolve().parent
ROOT = BENCH.parents[1]
PROMPT_TOKENS = 256
END_SECONDS = 20.0
"""Longest time that a run may take to end when it is asked to; the budget has room for it."""
MOST_STEPS = 10_000
PHASE = re.compile(r"time/[a-z]+_seconds")
PART = re.compile(r"time/\w+")
"""All times of a step. Those that are no phases are parts of one, such as time/reshard_wire_seconds, or shares."""
LINE_OF = {
    "step_seconds": "time/step_seconds",
    "mfu": "perf/mfu",
    "tflops": "perf/tflops_per_rank",
    "tokens_per_second": "perf/tokens_per_second_per_rank",
    "train_tokens_per_second": "perf/train_tokens_per_second_per_rank",
    "rollout_tokens_per_second": "perf/rollout_tokens_per_second_per_rank",
    "idle": "time/ranks_idle",
    "completion_tokens": "rollout/completion_tokens/mean",
    "logprob_gap": "logprob_gap/mean",
    "steps_ahead": "perf/steps_ahead",
    "preemptions": "perf/preemptions",
    "gemm_tflops": "bench/gemm_tflops",
    "gpu_busy": "bench/gpu_busy",
    "sm_clock_mhz": "bench/sm_clock_mhz",
    "lowest_sm_clock_mhz": "bench/lowest_sm_clock_mhz",
}
"""Fields of a step's line, by the metrics of the run; null where the run has none, such as a CPU's MFU."""
MEDIANS = {
    "step_seconds": "s", "mfu": "of the device's peak", "tokens_per_second": "tokens/s",
    "train_tokens_per_second": "tokens/s", "rollout_tokens_per_second": "tokens/s", "idle": "share of time",
    "of_gemm": "of GEMM", "gemm_tflops": "TFLOP/s", "gpu_busy": "share of time", "steps_ahead": "steps",
}  # fmt: skip
"""Units of the last lines' metrics."""


def recipe_of(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the run's recipe. Model, data and reward are files of `folder`."""
    is_gpu = options.device == "cuda"
    longest = PROMPT_TOKENS + options.new_tokens
    stops = stop_tokens(config_of(options.shape)["vocab_size"], options.mean_tokens)
    recipe: dict[str, Any] = {
        "name": "grpo_gpu",
        "loop": "rl",
        "runs_folder": str(folder / "runs"),
        "trackers": [],
        "samples_every_steps": MOST_STEPS,
        "model": {"path": str(folder / "model"), "dtype": "bfloat16" if is_gpu else "float32"},
        "data": {"train": str(folder / "train.jsonl"), "max_prompt_tokens": PROMPT_TOKENS},
        "cluster": {"ranks_per_node": 1},
        "trainer": {"max_tokens_per_microbatch": max(longest, options.row)},
        "optimizer": {"learning_rate": 1e-6},
        "rollout": {
            "kv_cache_gib": 24.0 if is_gpu else 0.25,
            "max_concurrent_requests": options.slots,
            "sampling": {"max_new_tokens": options.new_tokens, "stop_token_ids": stops},
        },
        "reward": {"functions": [f"{folder / 'parity.py'}:parity"]},
        "train": {
            "steps": MOST_STEPS,
            "prompts_per_step": options.prompts,
            "samples_per_prompt": options.samples,
        },
        "weights": {"verify_every": 0},
    }
    if options.shape == "qwen3-8b":
        recipe["lora"] = {"rank": 32}
        recipe["optimizer"]["learning_rate"] = 1e-5
    return recipe


def write_model_aside(folder: Path, shape: str, dtype: torch.dtype) -> None:
    """Write a model in another process. This process would keep GPU memory that the run needs."""
    writing = get_context("spawn").Process(target=write_model, args=(folder, shape), kwargs={"dtype": dtype})
    writing.start()
    writing.join()
    if writing.exitcode:
        raise SystemExit(f"the model could not be written: exit code {writing.exitcode}")


def write_inputs(options: argparse.Namespace, folder: Path) -> Path:
    """Write problems, reward, recipe, and the model if it is missing. Returns the recipe's path."""
    started = time.monotonic()
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    if not (folder / "model/model.safetensors.index.json").exists():
        write_model_aside(folder / "model", options.shape, dtype)
    print_line({"model_seconds": round(time.monotonic() - started, 1), "shape": options.shape})
    with (folder / "train.jsonl").open("w", encoding="utf-8") as file:
        for index in range(max(64, options.prompts)):
            question = {"role": "user", "content": f"What is {index} times {index + 7}?"}
            file.write(json.dumps({"messages": [question], "gt_answer": str(index * (index + 7))}) + "\n")
    (folder / "parity.py").write_text("def parity(num_tokens):\n    return float(num_tokens % 2)\n")
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(recipe_of(options, folder)))
    return recipe


def step_line(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the printed line of a step, from its line of metrics.jsonl."""
    phases = {
        name.removeprefix("time/").removesuffix("_seconds"): round(value, 3)
        for name, value in row.items()
        if PHASE.fullmatch(name) and name != "time/step_seconds"
    }
    planned = {name: value for name, value in row.items() if name.startswith("memory/") and "_predicted_" in name}
    memory = {
        name.removeprefix("memory/").removesuffix("_predicted_gib"): {
            "measured_gib": round(row[name.replace("_predicted", "")], 3),
            "predicted_gib": round(value, 3),
        }
        for name, value in planned.items()
    }
    values = {name: row.get(metric) for name, metric in LINE_OF.items()}
    # The products before the step are no part of it.
    values["step_seconds"] = row["time/step_seconds"] - row.get("bench/own_seconds", 0.0)
    values["of_gemm"] = values["tflops"] / values["gemm_tflops"] if values["tflops"] and values["gemm_tflops"] else None
    parts = {
        name.removeprefix("time/"): round(value, 4)
        for name, value in row.items()
        if PART.fullmatch(name) and not PHASE.fullmatch(name)
    }
    return {"step": row["step"], **values, "phases": phases, "parts": parts, "memory": memory}


FIRST_STEP_TARGET = "<= 1.5"
"""Target of the first step's seconds, as a multiple of the third's: page-locking must be done by then."""


def last_lines(steps: Sequence[Mapping[str, Any]], fields: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield lines with medians over all steps except the first, which warms up. A single step is marked as a warm-up.

    From three steps on, the first one is compared with the third.
    """
    warm, make = (steps[1:], metric_line) if len(steps) > 1 else (steps, warm_up_line)

    def line(metric: str, values: Sequence[float | None], unit: str, against: str) -> Iterator[dict[str, Any]]:
        if known_values := [value for value in values if value is not None]:
            yield make(f"grpo_{metric}", known_values, unit, target=None, against=against, steps=len(warm), **fields)

    for metric, unit in MEDIANS.items():
        yield from line(metric, [step[metric] for step in warm], unit, "steps as megarl train logs them")
    for phase in dict.fromkeys(name for step in warm for name in step["phases"]):
        seconds = [step["phases"].get(phase, 0.0) for step in warm]
        yield from line(f"{phase}_seconds", seconds, "s", "the step's phases")
    for phase in warm[-1]["memory"]:
        shares = [
            step["memory"][phase]["measured_gib"] / step["memory"][phase]["predicted_gib"]
            for step in warm
            if phase in step["memory"]
        ]
        yield from line(f"{phase}_memory", shares, "measured / predicted", "megarl plan")
    if len(steps) > 2:
        ratio = steps[0]["step_seconds"] / steps[2]["step_seconds"]
        yield metric_line(
            "grpo_first_step", [ratio], "of the third step", target=FIRST_STEP_TARGET, against="the same run", **fields
        )


def gemm_width(shape: str) -> int:
    """Return the width of the products that a step is compared with."""
    return 256 if shape == "small" else 8192


class Training:
    """A run of `megarl train` in a process group of its own. `width` is that of the products before each step."""

    def __init__(self, recipe: Path, overrides: Sequence[str], device: str, folder: Path, *, width: int) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        if device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        self._metrics = folder / "runs/grpo_gpu/metrics.jsonl"
        self._output = folder / "output.txt"
        with self._output.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, str(BENCH / "measured/measured_run.py"), str(width), "train", str(recipe), *overrides],
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=environment,
                start_new_session=True,
            )

    def steps(self, num_steps: int, budget: Budget) -> Iterator[dict[str, Any]]:
        """Yield the lines of metrics.jsonl as they are written, until step `num_steps` or the end of run or budget.

        The first line, of step 0, belongs to the start.
        """
        last = -1
        while last < num_steps:
            is_running = self.is_running
            text = self._metrics.read_text(encoding="utf-8") if self._metrics.exists() else ""
            rows = text[: text.rfind("\n") + 1].splitlines()
            for row in rows[last + 1 : num_steps + 1]:
                yield json.loads(row)
                last += 1
            if not is_running or budget.seconds_left < END_SECONDS:
                return
            time.sleep(0.1)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def end(self) -> int:
        """Ask the run to end without saving, then kill it. Returns its exit status."""
        # The second signal ends the run at once. Sent too early, it would count as a repetition of the first.
        for seconds in (2.5, END_SECONDS / 2):
            if self.is_running:
                self._process.terminate()
                try:
                    self._process.wait(seconds)
                except subprocess.TimeoutExpired:
                    continue
        if self.is_running:
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()

    def last_output(self) -> str:
        return "\n".join(self._output.read_text(errors="replace").splitlines()[-20:])


def keep_logs(folder: Path, target: Path) -> None:
    """Copy the run's output, logs and metrics, but no weights."""
    weights = shutil.ignore_patterns("checkpoints", "hf", "*.safetensors")
    target.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(folder / "output.txt", target / "output.txt")
    # Absent where the run ended before it had a folder.
    if (folder / "runs").is_dir():
        shutil.copytree(folder / "runs", target / "runs", ignore=weights, symlinks=True, dirs_exist_ok=True)


def run(options: argparse.Namespace, budget: Budget) -> int:
    """Print all lines that the budget allows. Returns the exit status."""
    fields: dict[str, Any] = {
        "machine": machine(), "versions": versions("vllm", "megatron-core", "transformer-engine"),
        "shape": options.shape, "overrides": options.overrides,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = write_inputs(options, folder)
        started = time.monotonic()
        training = Training(recipe, options.overrides, options.device, folder, width=gemm_width(options.shape))
        try:
            steps = []
            for row in training.steps(options.steps, budget):
                if row["step"] == 0:
                    print_line({"seconds_to_the_first_step": round(time.monotonic() - started, 1)})
                    continue
                steps.append(step_line(row))
                print_line(steps[-1])
            is_cut = budget.seconds_left < END_SECONDS
            has_failed = not training.is_running
        finally:
            status = training.end()
            if options.keep_logs is not None:
                keep_logs(folder, options.keep_logs)
        for line in last_lines(steps, fields) if steps else ():
            print_line(line)
        if has_failed:
            print_line({"failed": status, "output": training.last_output()})
            return status or 1
        if is_cut:
            print_line({"left_out": ["further steps"], "why": f"--budget-seconds {budget.seconds:g} is used up"})
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-1.7b")
    parser.add_argument("--steps", type=int, default=12, help="steps, the first of which warms up")
    parser.add_argument("--prompts", type=int, default=32, help="prompts of a step")
    parser.add_argument("--samples", type=int, default=8, help="samples of a prompt")
    parser.add_argument("--new-tokens", type=int, default=2048)
    parser.add_argument("--mean-tokens", type=int, default=512, help="of a completion, about")
    parser.add_argument("--row", type=int, default=16384, help="tokens of a packed row")
    parser.add_argument("--slots", type=int, default=256, help="requests that the engine runs at once")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--keep-logs", type=Path, metavar="DIR", help="copy the run's logs and metrics there")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value", help="of the recipe")
    add_budget(parser)
    options = parser.parse_args()
    refuse_missing_cuda(options.device, "--device cpu")
    return run(options, Budget(options.budget_seconds))


if __name__ == "__main__":
    sys.exit(main())
