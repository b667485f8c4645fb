"""With trainer.exact, every sampled token has the same log-prob in trainer and engine, bit by bit, in every layout.

Each row is a run of GRPO on CPU ranks in bfloat16, from a random model, with updates and reshards between its steps.
Temperature, top-p, top-k and min-p are in effect. The row without trainer.exact shows the usual difference. It passes
if some tokens differ, so that the comparison is known to see a difference.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from megarl.config import AlgorithmConfig
from megarl.data.token_batch import TokenBatch
from megarl.rollout.step.rl_batch import assign_token_weights
from megarl.types import TrainingSequence
from tests.rank_pool import RankPool
from tools.checks import invariance
from tools.family_models import ONE_RANK
from tools.make_dataset import make_dataset
from tools.make_tiny_model import make_tiny_model
from tools.make_tool_data import make_tool_data
from tools.runs import DIGITS_REWARD, read_metrics, train

DURATION = {"small": "4 minutes (five runs)", "full": "50 minutes on a busy CPU without AVX-512 (35 runs of 4 steps)"}
SMALL = {
    "only": ["usual", "tp2 pp2 -> tp4", "tools", "experts, tp2 etp2 -> tp1", "lora, experts, dp2 ep2"],
    "steps": 2,
    "pairs": 2,
}

RECIPE = """
name: exact
loop: rl
model: {path: models/small, dtype: bfloat16}
data: {train: data/train.jsonl, max_prompt_tokens: 96}
trainer: {max_tokens_per_microbatch: 512}
optimizer: {learning_rate: 1e-3}
rollout: {kv_cache_gib: 0.25, sampling: {max_new_tokens: 24, temperature: 0.7, top_p: 0.9, top_k: 50, min_p: 0.01}}
reward: {functions: ["exact_reward:digits"]}
algorithm: {kl_coefficient: 0.1}
train: {prompts_per_step: 6, samples_per_prompt: 4}
"""
MOST_TIME = 1.15
"""Largest accepted ratio of an update's time with trainer.exact to that without."""
MODELS: dict[str, dict[str, Any]] = {
    "small": dict(hidden_size=128, num_layers=4, num_heads=4, num_kv_heads=2),
    "llama": dict(family="llama", hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=4),
    "experts": dict(
        family="qwen3_moe", hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=2, experts_per_token=4
    ),
    # The inner dimensions at which one row's product differs from that of many rows.
    "wide": dict(hidden_size=1024, num_layers=2, num_heads=16, num_kv_heads=8, head_dim=64, intermediate_size=3072),
}
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
TOOLS = (
    "rollout.environment=calculator", "data.train=tools/train.jsonl", "data.max_prompt_tokens=256",
    "model.path=models/tools", "rollout.sampling.max_new_tokens=64",
)  # fmt: skip
PACED = (
    "rollout.placement=separate", "rollout.ranks=1", "rollout.max_staleness=1", "algorithm.importance_sampling=tis",
    "rollout.max_concurrent_requests=4", "weights.overlap=false",
)  # fmt: skip
PARKED = ("rollout.stragglers=park", "algorithm.oversampling=1.5", "algorithm.importance_sampling=tis")
EXPERTS = "model.path=models/experts"
LORA = ("lora.rank=8", "lora.alpha=32")
CASES: dict[str, tuple[int, Sequence[str], dict[str, str]]] = {
    "usual": (1, ["trainer.exact=false"], {}),
    "one rank": (1, [], {}),
    "dp2": (2, [], {}),
    "dp2 -> tp2": (2, ["rollout.tp=2"], {}),
    "tp2 -> tp1": (2, ["trainer.tp=2"], {}),
    "tp2 -> tp2": (2, ["trainer.tp=2", "rollout.tp=2"], {}),
    "tp4 -> tp2": (4, ["trainer.tp=4", "rollout.tp=2"], {}),
    "tp2 without sp -> tp2": (2, ["trainer.tp=2", "rollout.tp=2", "trainer.sequence_parallel=false"], {}),
    "pp2": (2, ["trainer.pp=2"], {}),
    "pp2 vpp2": (2, ["trainer.pp=2", "trainer.vpp=2"], {}),
    "cp2 -> tp2": (2, ["trainer.cp=2", "rollout.tp=2"], {}),
    "tp2 pp2 -> tp4": (4, ["trainer.tp=2", "trainer.pp=2", "rollout.tp=4"], {}),
    "cp2 pp2 -> tp2": (4, ["trainer.cp=2", "trainer.pp=2", "rollout.tp=2"], {}),
    "recompute full": (1, ["trainer.recompute=full"], {}),
    "old log-probs of the engine": (1, ["algorithm.old_logprobs=rollout"], {}),
    "greedy prefixes": (1, ["rollout.sampling.temperature=1.0", "rollout.sampling.top_p=1.0"], {}),
    "llama": (2, ["model.path=models/llama", "rollout.tp=2"], {}),
    "wide": (1, ["model.path=models/wide", "rollout.sampling.max_new_tokens=160"], {}),
    "wide, one request": (1, ["model.path=models/wide", "rollout.max_concurrent_requests=1"], {}),
    "wide, avx2": (1, ["model.path=models/wide"], AVX2),
    "engines ahead": (2, PACED, {}),
    "parked": (1, PARKED, {}),
    "tools": (1, TOOLS, {}),
    "experts, dp2": (2, [EXPERTS], {}),
    "experts, tp2 -> tp2": (2, [EXPERTS, "trainer.tp=2", "rollout.tp=2"], {}),
    "experts, tp2 etp2 -> tp1": (2, [EXPERTS, "trainer.tp=2", "trainer.etp=2"], {}),
    "experts, ep2": (2, [EXPERTS, "trainer.ep=2"], {}),
    "experts, ep2 -> ep2": (
        2,
        [EXPERTS, "trainer.ep=2", "rollout.tp=2", "rollout.vllm.enable_expert_parallel=true"],
        {},
    ),
    "experts, pp2": (2, [EXPERTS, "trainer.pp=2"], {}),
    "experts, cp2": (2, [EXPERTS, "trainer.cp=2"], {}),
    "experts, tp2 ep2 etp2 -> tp4": (4, [EXPERTS, "trainer.tp=2", "trainer.ep=2", "trainer.etp=2", "rollout.tp=4"], {}),
    "lora": (1, LORA, {}),
    "lora, tp2 -> tp2": (2, [*LORA, "trainer.tp=2", "rollout.tp=2"], {}),
    "lora, experts, dp2 ep2": (2, [EXPERTS, *LORA, "trainer.ep=2"], {}),
    "lora, experts, tp2 etp2 -> tp2": (2, [EXPERTS, *LORA, "trainer.tp=2", "trainer.etp=2", "rollout.tp=2"], {}),
}
"""Ranks, overrides and environment variables by name."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=4, help="updates of each run")
    parser.add_argument("--only", action="append", choices=list(CASES), help="cases to run; default: all")
    parser.add_argument("--pairs", type=int, default=6, help="timed updates with and without trainer.exact; 0: none")


def make_inputs(folder: Path) -> None:
    """Write models, data, reward and recipe into a folder."""
    for name, sizes in MODELS.items():
        make_tiny_model(folder / "models" / name, initializer_range=0.08 if name != "wide" else 0.03, **sizes)
    make_tiny_model(folder / "models/tools", num_layers=2, initializer_range=0.08, tool_words=True)
    make_dataset(folder / "data", sft=8, train=64, heldout=8)
    make_tool_data(folder / "tools", sft=8, train=32, heldout=8)
    (folder / "exact_reward.py").write_text(DIGITS_REWARD)
    (folder / "recipe.yaml").write_text(RECIPE)


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        make_inputs(folder)
        for number, name in enumerate(options.only or CASES):
            ranks, overrides, environment = CASES[name]
            with patch.dict(os.environ, environment):
                train(
                    "recipe.yaml", f"name=run_{number}", f"train.steps={options.steps}", "trainer.exact=true",
                    f"cluster.ranks_per_node={ranks}", *overrides, folder=folder,
                )  # fmt: skip
            steps = [step for step in read_metrics(folder / f"runs/run_{number}") if "logprob_gap/max" in step]
            gap = max(step["logprob_gap/max"] for step in steps)
            equal = min(step["logprob_gap/bit_equal"] for step in steps)
            is_equal = gap == 0.0 and equal == 1.0
            compared = min(step["logprob_gap/measured"] for step in steps)
            yield {
                "case": name,
                "steps": len(steps),
                "largest gap": gap,
                "bit-equal": equal,
                "compared": compared,
                # A column of the last row: the table takes its columns from the first one.
                "time": "-",
                "met": len(steps) == options.steps and is_equal == (name != "usual") and compared > 0,
            }
        if options.pairs:
            yield from update_times(folder / "models/wide", options.pairs)


def update_times(model: Path, pairs: int) -> Iterator[dict[str, Any]]:
    """Yield a row with the processor time of updates with trainer.exact over that of usual ones, in pairs."""
    with RankPool(1) as pool:
        [seconds] = pool.run(timed_updates, str(model), pairs)
    ratio = statistics.median(exact / usual for exact, usual in seconds)
    yield {
        "case": "time of an update",
        "steps": pairs,
        "time": ratio,
        "met": ratio <= MOST_TIME,
    }


def timed_updates(folder: str, pairs: int) -> list[tuple[float, float]]:
    """Return seconds of processor time of updates with and without trainer.exact, in turns, after one of each."""
    # Imported on the rank: the check's own process needs no torch.
    from megarl.training.objective import supervised_loss

    engines = []
    for is_exact in (True, False):
        recipe = invariance.recipe_of(Path(folder), {"exact": is_exact, "max_tokens_per_microbatch": 2048})
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"dtype": "bfloat16"})})
        engine, _, _ = invariance.build(recipe, ONE_RANK, False)
        engine.role = replace(engine.role, objective=supervised_loss)
        engines.append(engine)
    random = np.random.default_rng(0)
    lengths = random.integers(100, 400, 8)
    batch = TokenBatch.from_sequences(
        [TrainingSequence(random.integers(1, 400, length), np.arange(length) > 0) for length in lengths]
    )
    assign_token_weights(batch, AlgorithmConfig(aggregation="token_mean"), int(max(lengths)))

    def measure(engine: Any) -> float:
        started = time.process_time()
        engine.update([batch])
        return time.process_time() - started

    measured = [(measure(engines[0]), measure(engines[1])) for _ in range(pairs + 1)]
    return measured[1:]
