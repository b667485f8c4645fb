"""The list of `tools/gpu_quarter.py`: what to measure on a GPU in a quarter of an hour, in the order of its value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TOOLS = Path(__file__).resolve().parents[2]
TESTS = TOOLS.parent / "tests/gpu"


@dataclass(frozen=True)
class Program:
    """A program that measures items one after the other, with one start of what they share.

    `start_seconds` are the usual ones until its first item can begin, by size. A program without `reports` is a
    command for one item: it succeeds with exit code 0. On a CPU it also gets the arguments `on_cpu`.
    """

    name: str
    command: Sequence[str]
    start_seconds: dict[str, float]
    reports: bool = True
    on_cpu: Sequence[str] = ()


@dataclass(frozen=True)
class Item:
    """An item of the list: what it settles, the seconds that it usually takes by size, and its limit.

    `needs_gpu` is the reason why a CPU cannot measure it; empty: a CPU can.
    """

    name: str
    program: Program
    settles: str
    seconds: dict[str, float]
    needs_gpu: str = ""

    def limit(self, size: str) -> float:
        """Return the seconds after which the item is ended: twice the usual ones, on a busy CPU ten minutes."""
        return 600.0 if size == "tiny" else 20.0 + 2 * self.seconds[size]


def script(name: str, *, h200: float, tiny: float) -> Program:
    """Return a program of tools/bench/quarter that reports its items. `h200` and `tiny` are seconds of its start."""
    return Program(name, [str(TOOLS / f"bench/quarter/{name}.py")], {"h200": h200, "tiny": tiny})


def command(name: str, *arguments: str, on_cpu: Sequence[str] = ()) -> Program:
    """Return the program of one item: a command of this interpreter."""
    return Program(name, arguments, {"h200": 0.0, "tiny": 0.0}, reports=False, on_cpu=on_cpu)


def gpu_tests(name: str, selection: str, settles: str, needs_gpu: str, seconds: float) -> Item:
    """Return the item of those GPU tests that pytest's expression `selection` selects."""
    program = command(name, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", str(TESTS), "-k", selection)
    return Item(name, program, settles, {"h200": seconds, "tiny": seconds}, needs_gpu)


CEILINGS = script("ceiling_items", h200=8, tiny=10)
UPDATES = script("update_items", h200=25, tiny=30)
RUN = script("run_items", h200=120, tiny=90)
FP8_ENGINE = script("engine_items", h200=85, tiny=60)
STARTS = script("start_items", h200=5, tiny=20)

ITEMS = (
    Item("ceilings", CEILINGS, "all ceilings: products, copies, page-locking", {"h200": 15, "tiny": 5}),
    gpu_tests(
        "fp8_training_test", "training_in_fp8", "the first training in FP8", "trains in FP8 by Transformer Engine", 30
    ),
    Item("update_short_rows", UPDATES, "4B updates at 0.60 of a product", {"h200": 18, "tiny": 10}),
    Item("update_long_rows", UPDATES, "the same in longer rows", {"h200": 18, "tiny": 10}),
    Item("update_larger_chunks", UPDATES, "the gain of larger log-prob chunks", {"h200": 18, "tiny": 10}),
    Item("update_kept_logits", UPDATES, "the gain of a kept row of logits", {"h200": 18, "tiny": 10}),
    Item("update_profile", UPDATES, "where an update's time goes", {"h200": 10, "tiny": 10}),
    Item("update_fp8", UPDATES, "the gain of FP8", {"h200": 25, "tiny": 10}, "trains in FP8 by Transformer Engine"),
    Item("whole_steps", RUN, "the whole step, and the terms of the memory plan", {"h200": 100, "tiny": 60}),
    Item("profiled_rollouts", RUN, "whether the host or the GPU bounds decoding", {"h200": 40, "tiny": 20}),
    # 60 s for vllm.LLM to start, and twelve rounds of 69,000 tokens at the 16,800 tokens/s that were measured.
    Item("driver_and_vllm", RUN, "the driver's speed against vllm.LLM", {"h200": 110, "tiny": 60}),
    Item("fp8_engine", FP8_ENGINE, "the gain of FP8 weights and cache", {"h200": 25, "tiny": 20}),
    Item("rank_starts", STARTS, "a rank's start in a recovery", {"h200": 90, "tiny": 120}),
    gpu_tests("prefix_trees", "tree", "attention over trees of prefixes", "compiles kernels of the GPU", 30),
    Item(
        "exact_operators",
        command("exact_operators", str(TOOLS / "check.py"), "exact_operators", "--size", "small"),
        "operators of trainer and engine are equal with trainer.exact",
        {"h200": 40, "tiny": 60},
    ),
    gpu_tests("kernel_tests", "varlen or logprobs", "the kernels' numbers", "compares kernels of the GPU", 40),
    gpu_tests("memory_tests", "lent_memory or segments", "memory that is freed and comes back", "frees its memory", 25),
    gpu_tests(
        "transformer_engine_test", "transformer_engine", "gradients added in place", "runs Transformer Engine", 25
    ),
    gpu_tests("fp8_weight_tests", "fp8_weights", "FP8 weights after a reshard", "runs FP8 kernels of the GPU", 120),
    gpu_tests("colocated_tests", "colocated", "sleep, wake, reshard, export", "puts an engine to sleep", 150),
    Item(
        "resharding",
        command(
            "resharding", str(TOOLS / "bench/reshard_gpu.py"), "--layers", "16", "--budget-seconds", "40",
            on_cpu=("--device", "cpu", "--small"),
        ),
        "the copy of weights against a plain copy",
        {"h200": 40, "tiny": 10},
    ),
)  # fmt: skip
"""All items in the order of their value. An item of a program continues where the one before it ended."""
