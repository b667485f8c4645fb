"""Time of an update and of a log-prob pass with shared prefixes computed once, paired with separate sequences.

    python tools/bench/prefixes.py --repeats 5

One rank in one process, with the driver's packing. Both ways take turns. Cases: a group of answers to one prompt; as
many tokens with nothing to share; an agent of four turns with forks. A last pair is an update alone, whose own forward
pass gives the old log-probs (algorithm.old_logprobs: trainer), and one after a pass for them. `cpu` is the processor
time of all threads, which other programs on the machine change least. Prints one JSON object a line; exits with 1 if a
limit is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.data.token_batch import TokenBatch
from megarl.types import TrainingSequence
from tools.bench.parts.report import machine, metric_line, print_line, versions

TARGETS = {"group": ">= 4.0", "nothing shared": ">= 0.98"}
"""How much faster each case must be; a batch that shares nothing may take 2 % longer."""


class OneRank:
    """The rank of this process, called like a group of ranks."""

    world_size = 1

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    async def scatter(self, method: str, per_rank: Sequence[Any], *args: Any) -> list[Any]:
        return [getattr(self._engine, method.partition(".")[2])(per_rank[0], *args)]


def batch_of(sequences: Sequence[np.ndarray], num_trained: Sequence[int]) -> TokenBatch:
    """Return a batch of sequences. `num_trained` counts the trained tokens at the end of each."""
    training_sequences = []
    for ids, trained in zip(sequences, num_trained, strict=True):
        values = np.full(len(ids), 0.01, np.float32)
        mask = np.arange(len(ids)) >= len(ids) - trained
        training_sequences.append(TrainingSequence(ids, mask, token_weights=values * mask, advantages=values))
    return TokenBatch.from_sequences(training_sequences)


def cases(prompt: int, answer: int, group: int, vocab_size: int) -> dict[str, TokenBatch]:
    """Return batches by name: answers to one prompt, sequences that share nothing, and an agent's forked histories."""
    random = np.random.default_rng(0)

    def draw(count: int) -> np.ndarray:
        return random.integers(1, vocab_size, count)

    question = draw(prompt)
    answers = [np.concatenate([question, draw(answer)]) for _ in range(group)]
    apart = [draw(prompt + answer) for _ in range(group)]
    # Four turns; after each, two other continuations of two turns at most.
    turn = answer * 2
    history, forks = draw(prompt), []
    for number in range(4):
        forks += [np.concatenate([history, draw(turn * min(2, 4 - number))]) for _ in range(2)]
        history = np.concatenate([history, draw(turn)])
    agent = [history, *forks]
    trained = [len(sequence) - prompt for sequence in agent]
    return {
        "group": batch_of(answers, [answer] * group),
        "nothing shared": batch_of(apart, [answer] * group),
        "agent": batch_of(agent, trained),
    }


def measure(options: argparse.Namespace, folder: Path) -> bool:
    """Print the lines of all cases. Returns whether every limit is met."""
    import torch
    import torch.distributed as dist

    from megarl.checkpoint import safetensors
    from megarl.cluster.rank_model import RankModel
    from megarl.cluster.row_packing import RowPacking
    from megarl.cluster.shared_prefixes import SharedPrefixes
    from megarl.families.shape import padded_vocab_size, read_model_shape
    from megarl.reshard.layouts.megatron import megatron_layouts
    from megarl.training.training_engine import TrainingEngine

    torch.set_num_threads(options.threads)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    shape, parallel = read_model_shape(str(folder)), ParallelConfig(tp=1, pp=1, dp=1, rollout_tp=1)
    recipe = Recipe.model_validate(
        {
            "name": "prefixes", "loop": "rl", "model": {"path": str(folder), "dtype": "float32"},
            "data": {"train": "unused"}, "optimizer": {"learning_rate": 1e-6},
            "algorithm": {"old_logprobs": "trainer"},
        }
    )  # fmt: skip
    pieces = megatron_layouts(shape, parallel, padded_vocab_size=padded_vocab_size(shape.vocab_size, 1))[0]
    engine = TrainingEngine(recipe, parallel, shape, lambda tensors: safetensors.load(str(folder), pieces, tensors))
    rank: Any = OneRank(engine)
    auto = RankModel(rank, parallel, 1 << 20, shape=shape, packing=SharedPrefixes())
    ways = {"off": replace(auto, packing=RowPacking()), "auto": auto}
    is_met = True
    batches = cases(options.prompt, options.answer, options.group, shape.vocab_size)
    for way, model in ways.items():
        measure_old_logprobs(model, way, batches["group"], options.repeats)
    for name, batch in batches.items():
        for verb in ("update", "forward"):
            seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
            flops = {}
            for repeat in range(options.repeats + 1):
                for way, model in ways.items():
                    model.work.take()
                    before = time.perf_counter(), time.process_time()
                    asyncio.run(getattr(model, verb)(batch))
                    spent = time.perf_counter() - before[0], time.process_time() - before[1]
                    flops[way] = model.work.flops
                    # The first call of each way allocates memory, and counts for nothing.
                    if repeat:
                        seconds[way].append(spent)
            for index, clock in enumerate(("wall", "cpu")):
                pairs = [off[index] / on[index] for off, on in zip(seconds["off"], seconds["auto"], strict=True)]
                line = metric_line(
                    f"{verb}_{name.replace(' ', '_')}_{clock}",
                    pairs,
                    "times faster than off",
                    target=TARGETS.get(name) if clock == "cpu" else None,
                    against=f"off: {statistics.median(times[index] for times in seconds['off']):.3f} s",
                    machine=machine(),
                    versions=versions(),
                    fewer_flops=round(flops["off"] / flops["auto"], 3),
                )
                is_met &= line["met"] is not False
                print_line(line)
    dist.destroy_process_group()
    return is_met


def measure_old_logprobs(model: Any, way: str, batch: TokenBatch, repeats: int) -> None:
    """Print how much faster an update is without an earlier forward pass for the old log-probs."""

    async def one_pass() -> None:
        await model.update(batch)

    async def two_passes() -> None:
        per_token = {**batch.per_token, "old_logprobs": await model.forward(batch)}
        await model.update(replace(batch, per_token=per_token))

    wall, cpu = [], []
    for repeat in range(repeats + 1):
        spent = []
        for run in (two_passes, one_pass):
            before = time.perf_counter(), time.process_time()
            asyncio.run(run())
            spent.append((time.perf_counter() - before[0], time.process_time() - before[1]))
        # The first pair allocates memory, and counts for nothing.
        if repeat:
            wall.append(spent[0][0] / spent[1][0])
            cpu.append(spent[0][1] / spent[1][1])
    for clock, pairs in (("wall", wall), ("cpu", cpu)):
        print_line(
            metric_line(
                f"old_logprobs_of_the_update_{clock}", pairs, "times faster than with a pass of its own", target=None,
                against=f"share_prefixes: {way}", machine=machine(), versions=versions(),
            )
        )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of the prompt")
    parser.add_argument("--answer", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--group", type=int, default=8, help="answers to a prompt")
    parser.add_argument("--hidden", type=int, default=512, help="hidden size of the model")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5, help="measured pairs")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    from tools.make_tiny_model import make_tiny_model

    with tempfile.TemporaryDirectory() as work:
        folder = make_tiny_model(
            Path(work) / "model", family="qwen3", num_layers=options.layers, hidden_size=options.hidden,
            intermediate_size=3 * options.hidden, num_heads=options.hidden // 64, num_kv_heads=options.hidden // 128,
            vocab_size=8192, tie_word_embeddings=True,
        )  # fmt: skip
        return 0 if measure(options, folder) else 1


if __name__ == "__main__":
    sys.exit(main())
