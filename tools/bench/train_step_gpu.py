"""Train steps of Qwen3-4B and 8B on one GPU: speed, memory, log-probs, against a GEMM and transformers.

    python tools/bench/train_step_gpu.py [--shape qwen3-4b] [--tokens 131072]

Random weights, rows of at most 16k tokens packed from long-tailed lengths, the clipped policy loss. A step of the 4B
model keeps Adam's moments; the 8B model takes plain gradient descent, whose state fits beside it. Causal attention is
counted once. In the same run: the speed of an 8192-wide GEMM, and transformers on the same packed rows. Before timing,
the log-probs of both are compared. Lines are printed as they are measured; what `--budget-seconds` do not allow is left
out, and where they allow no round but the one that warms up, its line says `warm_up_of` in place of `metric`. Ends with
status 2 where no CUDA is.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tools.bench.parts import report
from tools.bench.parts.budget import Budget, add_budget
from tools.bench.parts.device_parts import Gemm, Timed, device, refuse_missing_cuda, release, time_rounds
from tools.bench.parts.shapes import SHAPES, config_of

if TYPE_CHECKING:
    from megarl.files.private_folder import PrivateFolder

MFU_TARGET, PEER_TARGET, LOGPROB_TARGET, GAP_LIMIT = 0.60, 1.2, 0.80, 0.05


def lengths_of(num_tokens: int, row: int) -> list[int]:
    """Return log-normal lengths, none longer than a row. Their median is 3,072 tokens for rows of 16,384."""
    random = np.random.default_rng(0)
    lengths: list[int] = []
    while sum(lengths) < num_tokens:
        lengths.append(int(np.clip(random.lognormal(np.log(row * 3 / 16), 0.9), 16, row)))
    return lengths


def make_batch(lengths: Sequence[int], vocab_size: int) -> Any:
    from megarl.config import AlgorithmConfig
    from megarl.data.token_batch import TokenBatch
    from megarl.rollout.step.rl_batch import assign_token_weights
    from megarl.types import TrainingSequence

    random = np.random.default_rng(1)
    batch = TokenBatch.from_sequences(
        [
            TrainingSequence(
                token_ids=random.integers(1, vocab_size, n),
                loss_mask=np.arange(n) > n // 8,
                advantages=random.normal(size=n).astype(np.float32),
            )
            for n in lengths
        ]
    )
    assign_token_weights(batch, AlgorithmConfig())
    return batch


def flops(config: dict[str, Any], lengths: Sequence[int]) -> float:
    """Return the operations of forward and backward. Causal attention counts once (arXiv:2205.05198, section 4.3)."""
    heads, width = config["num_attention_heads"] * config["head_dim"], config["hidden_size"]
    groups = config["num_key_value_heads"] * config["head_dim"]
    layer = width * (2 * heads + 2 * groups) + 3 * width * config["intermediate_size"]
    weights = config["num_hidden_layers"] * layer + config["vocab_size"] * width
    attention = config["num_hidden_layers"] * heads * sum(n * n for n in lengths) * 2
    return 3 * (2 * weights * sum(lengths) + attention)


def build_engine(folder: Path, row: int, dtype: str, adam: bool, recompute: str, fp8: str = "none") -> Any:
    from megarl.config import Recipe
    from megarl.config.parallel import ParallelConfig
    from megarl.families.shape import read_model_shape
    from megarl.training.training_engine import TrainingEngine

    recipe = Recipe.model_validate(
        {
            "name": "bench", "loop": "rl", "model": {"path": str(folder), "dtype": dtype}, "data": {"train": "unused"},
            "trainer": {
                "max_tokens_per_microbatch": row, "recompute": recompute, "distributed_optimizer": adam, "fp8": fp8,
            },
            "optimizer": {"name": "adam" if adam else "sgd"},
        }
    )  # fmt: skip

    def load(parameters: Any) -> None:
        torch.manual_seed(0)
        for name, parameter in parameters.items():
            if "norm" not in name:
                torch.nn.init.normal_(parameter, std=0.02)

    return TrainingEngine(recipe, ParallelConfig(1, 1, 1, 1), read_model_shape(folder), load)


def export(engine: Any) -> dict[str, torch.Tensor]:
    """Return the trainer's weights under their Hugging Face names."""
    from megarl.families.shape import padded_vocab_size
    from megarl.reshard.layouts.megatron import megatron_layouts

    layouts = megatron_layouts(
        engine.shape, engine.parallel, padded_vocab_size=padded_vocab_size(engine.shape.vocab_size, 1),
        transformer_engine=engine.chunks[0].qkv_format == "thd",
    )  # fmt: skip
    tensors: dict[str, torch.Tensor] = {}
    for piece in layouts[0]:
        flat = engine.parameters[piece.storage].detach().reshape(-1)
        view = flat.as_strided(piece.box.shape, piece.strides, flat.storage_offset() + piece.offset)
        tensor = tensors.setdefault(piece.box.name, view.new_empty([s.stop for s in engine_slices(engine, piece)]))
        tensor[tuple(slice(a, b) for a, b in zip(piece.box.start, piece.box.stop, strict=True))] = view
    return tensors


def engine_slices(engine: Any, piece: Any) -> list[slice]:
    from megarl.families.model_tensors import hf_tensors

    return [slice(0, n) for n in hf_tensors(engine.shape)[piece.box.name]]


class Peer:
    """transformers on packed rows: flash attention if it is installed, else SDPA with a mask of blocks."""

    def __init__(self, config: dict[str, Any], weights: dict[str, torch.Tensor], adam: bool) -> None:
        import importlib.util

        from transformers import AutoModelForCausalLM, Qwen3Config

        self.kind = "flash_attention_2" if importlib.util.find_spec("flash_attn") else "sdpa"
        with torch.device(device()):
            self.model = AutoModelForCausalLM.from_config(
                Qwen3Config(**config), attn_implementation=self.kind, dtype=next(iter(weights.values())).dtype
            )
        missing = self.model.load_state_dict(weights, strict=False).missing_keys
        assert all(name == "lm_head.weight" and config["tie_word_embeddings"] for name in missing), missing
        self.model.tie_weights()
        self.model.gradient_checkpointing_enable()
        parameters = self.model.parameters()
        self.optimizer = torch.optim.AdamW(parameters) if adam else torch.optim.SGD(parameters, lr=1e-6)

    def logprobs(self, row: Any) -> torch.Tensor:
        ids = torch.from_numpy(row.token_ids)[None].to(device())
        positions = np.concatenate([np.arange(length) for length in row.lengths])
        positions = torch.from_numpy(positions)[None].to(device())
        logits = self.model(input_ids=ids, position_ids=positions, use_cache=False).logits[0, :-1].float()
        return logits.log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)

    def step(self, rows: Sequence[Any]) -> None:
        self.model.train()
        for row in rows:
            weights = (row.per_token["token_weights"] * row.per_token["advantages"])[1:]
            (-self.logprobs(row) * torch.from_numpy(weights).to(device())).sum().backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def gemm_flops_per_second(budget: Budget) -> tuple[list[float], bool]:
    """Return the operations a second of each round, and whether the only round is the warm-up."""
    gemm = Gemm(8192 if torch.cuda.is_available() else 512)
    rounds = time_rounds(gemm.multiply, budget)
    return [gemm.flops / t for t in rounds.seconds], rounds.is_warm_up


def measure_logprobs(
    config: dict[str, Any],
    num_tokens: int,
    ceiling: float,
    line: Callable[..., None],
    budget: Budget,
    is_warm_up: bool,
) -> None:
    """Print lines about forward and backward of log-probs alone. `is_warm_up`: only a warm-up gave the `ceiling`."""
    from megarl.models.logprobs import vocab_parallel_logprobs

    hidden = torch.randn(num_tokens, config["hidden_size"], device=device(), dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(config["vocab_size"], config["hidden_size"], device=device(), dtype=torch.bfloat16) * 0.02
    weight.requires_grad_()
    targets = torch.randint(config["vocab_size"], (num_tokens,), device=device())

    def run() -> None:
        logprobs, _ = vocab_parallel_logprobs(
            hidden, weight, targets, first_token_id=0, group=None, temperature=1.0, chunk_tokens=1024
        )
        logprobs.sum().backward()
        hidden.grad = weight.grad = None

    run()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work = 6 * num_tokens * config["vocab_size"] * config["hidden_size"]
    rounds = time_rounds(run, budget)
    shares = [work / t / ceiling for t in rounds.seconds]
    target, against = f">= {LOGPROB_TARGET}", "8192-wide GEMM of this run"
    line("logprobs_forward_backward", shares, "of GEMM", target, against, is_warm_up or rounds.is_warm_up)
    extra = torch.cuda.max_memory_allocated() - before
    naive = 12.0 * num_tokens * config["vocab_size"]
    line("logprobs_memory", [extra / naive], "of naive", "<= 0.05", f"{naive:.0f} bytes of logits and gradients")


@contextmanager
def folder_of(config: dict[str, Any]) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        yield Path(folder)


def own_steps(
    config: dict[str, Any],
    batches: list[Any],
    options: argparse.Namespace,
    dtype: str,
    adam: bool,
    budget: Budget,
) -> tuple[Any, dict[str, torch.Tensor], Timed, int]:
    """Return log-probs and weights before the first step, the seconds of steps, and their peak bytes."""
    with folder_of(config) as folder:
        engine = build_engine(folder, options.row, dtype, adam, options.recompute)
    logprobs = engine.forward(batches[:1])
    weights = {key: value.cpu() for key, value in export(engine).items()}
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    rounds = time_rounds(lambda: engine.update(batches), budget, options.rounds, "train_step")
    return logprobs, weights, rounds, torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def measure(
    name: str, options: argparse.Namespace, budget: Budget, machine: dict[str, Any], versions: dict[str, str]
) -> bool:
    """All lines of one shape that the budget allows; False if the log-probs of both differ."""
    from megarl.data.packing import pack

    config, adam = config_of(name), name != "qwen3-8b"
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    case = f"{name}, {options.tokens} tokens in rows of {options.row}, {dtype}, recompute {options.recompute}"

    def line(
        metric: str, values: Sequence[float], unit: str, target: str | None, against: str, is_warm_up: bool = False
    ) -> None:
        # A small product on a busy CPU reaches less than 0.001 TFLOP/s.
        shared: dict[str, Any] = {"machine": machine, "versions": versions, "case": case, "digits": 6}
        make = report.warm_up_line if is_warm_up else report.metric_line
        report.print_line(make(metric, values, unit, target=target, against=against, **shared))

    ceilings, is_warm_up = gemm_flops_per_second(budget)
    ceiling = sorted(ceilings)[len(ceilings) // 2]
    line("gemm", [c / 1e12 for c in ceilings], "TFLOP/s", None, "the ceiling of this run", is_warm_up)
    lengths = lengths_of(options.tokens, options.row)
    batch = make_batch(lengths, config["vocab_size"])
    (rows,) = pack(lengths, max_tokens=options.row, num_ranks=1)
    batches = [batch.select(indices) for indices in rows]
    policy_logprobs, weights, rounds, peak = own_steps(config, batches, options, dtype, adam, budget)
    shares = [flops(config, lengths) / t / ceiling for t in rounds.seconds]
    is_flagged = is_warm_up or rounds.is_warm_up
    line("train_step", shares, "of GEMM", f">= {MFU_TARGET}", "8192-wide GEMM of this run", is_flagged)
    line("train_step_peak_memory", [peak / 2**30], "GiB", None, "all of the step, optimizer included")
    release()
    if torch.cuda.is_available() and not budget.leaves_out(["logprobs_forward_backward", "logprobs_memory"]):
        measure_logprobs(config, 2 * options.row, ceiling, line, budget, is_warm_up)
        release()
    if budget.leaves_out(["logprob_gap", "train_step_speedup"], 2 * max(rounds.seconds)):
        return True
    peer = Peer(config, {key: value.to(device()) for key, value in weights.items()}, adam)
    with torch.no_grad():
        logprobs = peer.logprobs(batches[0]).cpu().numpy()
    within = np.concatenate([np.arange(length) > 0 for length in batches[0].lengths])[1:]
    gap = float(np.abs(policy_logprobs[0][1:] - logprobs)[within].mean())
    line("logprob_gap", [gap], "nats, mean", f"<= {GAP_LIMIT}", f"transformers, {peer.kind}")
    if gap > GAP_LIMIT:
        return False
    theirs = time_rounds(partial(peer.step, batches), budget, min(3, options.rounds), "transformers_step")
    fastest, is_flagged = min(theirs.seconds), rounds.is_warm_up or theirs.is_warm_up
    against = f"transformers packed, {peer.kind}, checkpointing"
    line("train_step_speedup", [fastest / t for t in rounds.seconds], "times", f">= {PEER_TARGET}", against, is_flagged)
    del peer
    release()
    return True


def join_world_alone() -> PrivateFolder:
    """Let this process be the only rank of a torch world. Returns the folder to remove in the end."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    from megarl.files.private_folder import PrivateFolder
    from megarl.groups import rendezvous, world
    from megarl.platform import libraries

    libraries.prepare_megatron()
    folder = PrivateFolder()
    rendezvous.set_rendezvous(rendezvous.Rendezvous(b"a benchmark has no secrets", file=str(folder.path / "store")))
    world.initialize(600)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", choices=SHAPES, help="repeatable; left out: 4B and 8B")
    parser.add_argument("--tokens", type=int, default=131072, help="tokens of one step")
    parser.add_argument("--row", type=int, default=16384, help="tokens of one packed row")
    parser.add_argument("--rounds", type=int, default=5, help="steps that are timed, after one that warms up")
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="full")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: show that all parts work")
    add_budget(parser)
    options = parser.parse_args()
    budget = Budget(options.budget_seconds)
    refuse_missing_cuda(options.device, "--device cpu --shape small --tokens 4096 --row 512")
    folder = join_world_alone()
    machine, versions = report.machine(), report.versions("megatron-core", "transformer-engine", "transformers")
    sound = True
    for index, name in enumerate(options.shape or ("qwen3-4b", "qwen3-8b")):
        if index and budget.leaves_out([name]):
            break
        sound &= measure(name, options, budget, machine, versions)
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
    folder.remove()
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
