"""The driver and its engine on one GPU compared with a bare vLLM of the same settings: sampled tokens a second.

    python tools/bench/rollout_gpu.py [--shape qwen3-8b] [--attempts 512] [--turns 1 --turns 4]

A model of random weights at a known shape; completions end at all lengths, by stop tokens that it samples once in
`--mean-tokens`. Attempts of one turn and of four, by the driver of a run and an engine on a rank of its own; in turns
with them, on the same engine, a loop that gives vLLM the same prompts with the same seeds, each next one in the moment
the one before has ended. On a GPU rounding depends on what is decoded together: tokens may differ, so speeds are
compared and not times, and the share of equal completions is printed. A line is printed for each round. Ends with
status 2 where no CUDA is. `--device cpu --shape small --attempts 12 --slots 4 --new-tokens 12` shows that all parts
work.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.data.chat import load_tokenizer
from megarl.platform import device
from megarl.types import SamplingSettings
from tools.bench.parts.budget import Budget, add_budget
from tools.bench.parts.device_parts import refuse_missing_cuda
from tools.bench.parts.driven_engine import Bench, EngineSettings
from tools.bench.parts.report import machine, metric_line, print_line, versions
from tools.bench.parts.shapes import SHAPES, config_of, stop_tokens, write_model
from tools.local_group import LocalGroup

PROMPT_TOKENS = 256
LEAST = {1: 0.97, 4: 0.90}
"""Least speed of the driver in the bare loop's, by turns; of other numbers of turns that of four."""


async def measure(bench: Bench, num_turns: int, repeats: int, budget: Budget, fields: dict[str, Any]) -> None:
    """Print the lines of attempts with `num_turns` turns."""
    values: dict[str, list[float]] = {"driven": [], "bare": [], "idle": [], "equal": []}
    async for pair in bench.pairs(num_turns, budget.rounds(repeats)):
        driven_tokens, bare_tokens = pair.driven_tokens, pair.bare_tokens
        values["driven"].append(sum(map(len, driven_tokens)) / pair.driven.seconds)
        values["bare"].append(sum(map(len, bare_tokens)) / pair.bare.seconds)
        values["idle"].append(pair.driven.idle)
        values["equal"].append(
            min(_equal_share(pair.first_tokens, driven_tokens), _equal_share(pair.first_tokens, bare_tokens))
        )
        print_line(
            {"turns": num_turns, "round": pair.number, **{name: round(of[-1], 4) for name, of in values.items()}}
        )
    name = f"rollout_{num_turns}_turns"
    against = "a loop around the same engine"
    ratios = [
        driven_speed / bare_speed for driven_speed, bare_speed in zip(values["driven"], values["bare"], strict=True)
    ]
    least = LEAST.get(num_turns, LEAST[4])
    print_line(metric_line(f"{name}_speed", ratios, "of bare", target=f">= {least}", against=against, **fields))
    for metric, kind, unit in (
        ("tokens_per_second", "driven", "tokens/s"),
        ("engine_idle", "idle", "share of time"),
        ("equal_completions", "equal", "share"),
    ):
        print_line(metric_line(f"{name}_{metric}", values[kind], unit, target=None, against=against, **fields))


def _equal_share(completions: Sequence[Sequence[int]], other_completions: Sequence[Sequence[int]]) -> float:
    """Return the share of completions that are equal, token by token."""
    return len(
        {tuple(completion) for completion in completions} & {tuple(completion) for completion in other_completions}
    ) / max(len({*map(tuple, completions)}), 1)


async def run(options: argparse.Namespace, budget: Budget) -> None:
    """Print all lines that the budget allows."""
    is_gpu, vocab_size = options.device == "cuda", config_of(options.shape)["vocab_size"]
    fields: dict[str, Any] = {
        "machine": machine(), "versions": versions("vllm"), "shape": options.shape, "attempts": options.attempts,
        "slots": options.slots, "new_tokens": options.new_tokens, "mean_tokens": options.mean_tokens,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        write_model(model, options.shape, dtype=None)
        settings = EngineSettings(
            str(model),
            options.slots,
            # A turn brings its completion, and an observation of a few tokens.
            PROMPT_TOKENS + max(options.turns) * (options.new_tokens + 64),
            options.kv_cache_gib,
            "bfloat16" if is_gpu else "float32",
            {"enforce_eager": options.eager} if is_gpu else {},
        )
        started = time.monotonic()
        group = await LocalGroup(1).start(
            "tools.bench.parts.driven_engine:MeasuredEngine",
            {"settings": settings},
            log_folder=Path(folder, "logs"),
            environment=device.rank_environment(1) | ({} if is_gpu else {"CUDA_VISIBLE_DEVICES": ""}),
        )
        try:
            print_line({"engine_start_seconds": round(time.monotonic() - started, 1), **fields})
            stops = tuple(stop_tokens(vocab_size, options.mean_tokens))
            sampling = SamplingSettings(options.new_tokens, stop_token_ids=stops)
            tokenizer = load_tokenizer(model)
            bench = Bench(group, tokenizer, settings, num_attempts=options.attempts, sampling=sampling)
            for num_turns in options.turns:
                if not budget.leaves_out([f"rollout_{num_turns}_turns"]):
                    await measure(bench, num_turns, options.repeats, budget, fields)
        finally:
            await group.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-1.7b")
    parser.add_argument("--turns", type=int, nargs="+", default=(1, 4))
    parser.add_argument("--attempts", type=int, default=512)
    parser.add_argument("--slots", type=int, default=256, help="requests that the engine runs at once")
    parser.add_argument("--new-tokens", type=int, default=2048, help="limit of a turn")
    parser.add_argument("--mean-tokens", type=int, default=512, help="of a turn, about")
    parser.add_argument("--kv-cache-gib", type=float, default=None, help="left out: 24 on a GPU, 0.25 on a CPU")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    add_budget(parser)
    options = parser.parse_args()
    refuse_missing_cuda(options.device, "--device cpu")
    if options.kv_cache_gib is None:
        options.kv_cache_gib = 24.0 if options.device == "cuda" else 0.25
    asyncio.run(run(options, Budget(options.budget_seconds)))


if __name__ == "__main__":
    main()
