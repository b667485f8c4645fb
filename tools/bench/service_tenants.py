"""Throughput of several tenants of a training service together, paired with the same tenants one after the other.

    python tools/bench/service_tenants.py --tenants 8 --rounds 3

One service with real ranks: a trainer, and engines on a rank of their own (`--placement colocated`: on the trainer's).
Each tenant runs the loop of reinforcement learning: publish its adapters, sample, train, step. The tenants are tasks of
this process and call the service's trainer as its desk does, so the wire and the clients' time are left out. Training
data is fixed in advance, so that all log-probs and gradient norms of training must have the same bits in both ways;
this is checked first, and that the engine sampled from each tenant's own adapters. Both ways take turns, after a round
that warms up. Prints one JSON object a line; exits with 1 if a limit is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megarl.cluster.calls.deadlines import run_deadlines
from megarl.cluster.launchers.run_nodes import start_ranks
from megarl.service.command import Service, construct_workers, make_trainer, prepare
from megarl.service.messages.datums import make_batch
from megarl.service.messages.requests import AdamSettings
from megarl.service.messages.wire import Datum
from megarl.service.queueing.turns import TENANT
from megarl.service.ranks.rank_trainer import RankTrainer
from megarl.types import SamplingSettings
from tools.bench.parts.report import machine, metric_line, print_line, versions
from tools.make_dataset import make_dataset
from tools.make_tiny_model import make_tiny_model

TARGET = 1.5
"""How much faster eight tenants together must be on separate ranks, than one after the other."""
RECIPE = """
name: tenants
loop: rl
model: {{path: {model}, dtype: float32}}
data: {{train: data/train.jsonl, max_prompt_tokens: 64}}
cluster: {{ranks_per_node: {num_ranks}}}
trainer: {{max_tokens_per_microbatch: 1024}}
lora: {{rank: 8}}
rollout: {{{placement}, kv_cache_gib: 0.1, sampling: {{max_new_tokens: {tokens}}}}}
train: {{steps: 1, prompts_per_step: 2, samples_per_prompt: 2}}
"""


class Outcome(NamedTuple):
    """What one tenant's loop computed: log-probs and losses [2, tokens] and the gradient norm of each step.

    `gap` is the largest difference between engine and trainer in the log-probs of its last sample, in nats.
    """

    logprobs: list[np.ndarray]
    norms: list[float]
    gap: float


async def run_tenant(trainer: RankTrainer, number: int, name: str, options: argparse.Namespace) -> Outcome:
    """Run the loop of tenant `number` on a new model `name`."""
    TENANT.set(f"tenant {number}")
    random = np.random.default_rng(number)
    vocab_size = trainer.served.vocab_size
    sampling = SamplingSettings(max_new_tokens=options.new_tokens, temperature=1.0, top_p=1.0, top_k=0)
    await trainer.create_model(name, seed=number)
    logprobs, norms, versions_used = [], [], []
    version, prompt, samples = "", np.zeros(0, np.int32), []
    for step in range(options.steps):
        version = f"{name} {step}"
        await trainer.publish(name, version)
        versions_used.append(version)
        prompt = random.integers(1, vocab_size, 16).astype(np.int32)
        samples = await trainer.sample(version, prompt, sampling, range(step, step + options.samples))
        length = 16 + options.new_tokens
        datums = [
            Datum(
                random.integers(1, vocab_size, length),
                {
                    "target_tokens": random.integers(1, vocab_size, length),
                    "logprobs": random.normal(-6, 0.5, length).astype(np.float32),
                    "advantages": random.normal(0, 1, length).astype(np.float32),
                },
            )
            for _ in range(options.samples)
        ]
        batch = make_batch(datums, "importance_sampling", vocab_size=vocab_size, max_tokens=trainer.served.row_tokens)
        logprobs.append(await trainer.forward_backward(name, batch, "importance_sampling", {}, is_forward_only=False))
        adam = AdamSettings(learning_rate=1e-3, grad_clip_norm=1.0)
        norms.append((await trainer.optim_step(name, adam))["grad_norm:mean"])
    tokens = np.concatenate([prompt, samples[0].token_ids.astype(np.int32)])
    scores, _ = await trainer.score(version, tokens, num_top_tokens=0)
    gap = float(np.abs(scores[len(prompt) :] - samples[0].logprobs).max())
    await trainer.forget(models=[name], versions=versions_used)
    return Outcome(logprobs, norms, gap)


async def measure(service: Service, options: argparse.Namespace, log_folder: Path) -> bool:
    """Print the lines. Returns whether all limits are met."""
    recipe = service.recipe
    ranks = await start_ranks(recipe.cluster, log_folder, service.parallel.replica_sizes, trainer=service.parallel)
    try:
        ranks.set_deadlines(lambda: run_deadlines(recipe.cluster))
        await construct_workers(ranks, service)
        trainer = make_trainer(ranks, service, log_folder, print)
        await trainer.start()
        ratios: list[float] = []
        seconds: dict[str, list[float]] = {"together": [], "one after the other": []}
        for number in range(options.rounds + 1):
            began = time.perf_counter()
            alone = [await run_tenant(trainer, i, f"{number} alone {i}", options) for i in range(options.tenants)]
            middle = time.perf_counter()
            loops = (run_tenant(trainer, i, f"{number} together {i}", options) for i in range(options.tenants))
            together = await asyncio.gather(*map(asyncio.create_task, loops))
            end = time.perf_counter()
            check(alone, together)
            # The first round compiles and fills caches.
            if number:
                seconds["one after the other"].append(middle - began)
                seconds["together"].append(end - middle)
                ratios.append((middle - began) / (end - middle))
    finally:
        await ranks.close()
    settings = {name: getattr(options, name) for name in ("tenants", "steps", "samples", "new_tokens", "placement")}
    common: dict[str, Any] = {"machine": machine(), "versions": versions("torch", "vllm", "megatron-core")}
    for name, values in seconds.items():
        print_line(metric_line(f"seconds {name}", values, "s", target=None, against="", **common, **settings))
    target = f">= {TARGET}" if options.placement == "separate" else None
    line = metric_line(
        "tenants together",
        ratios,
        "x",
        target=target,
        against="the same loops one after the other",
        **common,
        **settings,
    )
    print_line(line)
    return line["met"] is not False


def check(alone: list[Outcome], together: list[Outcome]) -> None:
    """Raise AssertionError unless both ways train with equal bits, and each tenant samples with its own adapter."""
    for number, (one, other) in enumerate(zip(alone, together, strict=True)):
        assert one.norms == other.norms, f"tenant {number}: gradient norms differ: {one.norms} and {other.norms}"
        assert all(map(np.array_equal, one.logprobs, other.logprobs)), f"tenant {number}: log-probs differ"
        assert max(one.gap, other.gap) < 1e-3, f"tenant {number}: engine and trainer differ by {one.gap}, {other.gap}"
    assert len({tuple(outcome.norms) for outcome in alone}) == len(alone), "tenants train alike"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tenants", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--placement", choices=["separate", "colocated"], default="separate")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tiny_model(folder / "model", family="qwen3", num_layers=4, hidden_size=128)
        make_dataset(folder / "data", sft=8, train=32, heldout=8)
        is_separate = options.placement == "separate"
        placement = f"placement: {options.placement}" + ", ranks: 1" * is_separate
        text = RECIPE.format(
            model=folder / "model",
            num_ranks=1 + is_separate,
            placement=placement,
            tokens=options.new_tokens,
        ).replace("data/train", f"{folder}/data/train")
        (folder / "recipe.yaml").write_text(text)
        overrides = [f"runs_folder={folder}/runs"]
        service = prepare(folder / "recipe.yaml", overrides, host="127.0.0.1", port=0, engine_slots=options.slots)
        logs = folder / "logs"
        logs.mkdir()
        return 0 if asyncio.run(measure(service, options, logs)) else 1


if __name__ == "__main__":
    sys.exit(main())
