"""Updates of a dense model by one trainer: row lengths, log-prob chunks, FP8, a profile. Items of `gpu_quarter.py`.

Random weights, rows packed from long-tailed lengths, the clipped policy loss, Adam, no recomputation. Each round is a
round of products and then an update, so that an update is compared with products of the same moment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from megarl.data.packing import pack
from tools.bench.measured.traces import summary_of
from tools.bench.measured.trainer_settings import set_chunk_tokens
from tools.bench.parts.budget import Budget
from tools.bench.parts.device_parts import Gemm, release, seconds_of
from tools.bench.parts.shapes import config_of
from tools.bench.quarter.item_lines import ItemLines, LeftOutError, Options, options_of
from tools.bench.train_step_gpu import build_engine, flops, folder_of, join_world_alone, lengths_of, make_batch

KEEPS_LOGITS = "keeps_logits"
"""Attribute of a model chunk that follows trainer.keep_logits. The trainer reads it in each pass."""


class Updates:
    """A trainer, and the lines of its updates."""

    def __init__(self, options: Options, lines: ItemLines, fp8: str = "none") -> None:
        self._size, self._lines, self._is_gpu = options.size, lines, options.device == "cuda"
        self._config = config_of(options.size.update_shape)
        self._row, _ = options.size.update_rows
        with folder_of(self._config) as folder:
            dtype = "bfloat16" if self._is_gpu else "float32"
            self.engine = build_engine(folder, self._row, dtype, adam=True, recompute="none", fp8=fp8)
        self._chunk_tokens = self.engine.chunks[0].logprob_chunk_tokens
        self._gemm = Gemm(options.size.gemm_width)

    def batches(self, row: int) -> tuple[list[int], list[Any]]:
        """Return the lengths of an update's sequences, and the sequences in rows of `row` tokens."""
        lengths = lengths_of(self._size.update_tokens, row)
        batch = make_batch(lengths, self._config["vocab_size"])
        (rows,) = pack(lengths, max_tokens=row, num_ranks=1)
        return lengths, [batch.select(indices) for indices in rows]

    def measure(self, row: int | None = None, *, chunk_tokens: int | None = None, **fields: Any) -> None:
        """Write the lines of updates in rows of `row` tokens (default: the short ones).

        Without `chunk_tokens` the head makes as many products as the recipe's own chunk leads to.
        """
        row = row or self._row
        set_chunk_tokens(self.engine, chunk_tokens or self._chunk_tokens * row // self._row)
        lengths, batches = self.batches(row)
        self.engine.update(batches)
        if self._is_gpu:
            torch.cuda.reset_peak_memory_stats()
        products, seconds = [], []
        for _ in range(self._size.rounds):
            products += self._gemm.tflops(1)
            seconds.append(seconds_of(lambda: self.engine.update(batches)))
        work = flops(self._config, lengths) / 1e12
        shares = [work / round_seconds / product for round_seconds, product in zip(seconds, products, strict=True)]
        fields |= {"tokens": sum(lengths), "row": row, "rows": len(batches), "shape": self._size.update_shape}
        fields["chunk_tokens"] = self.engine.chunks[0].logprob_chunk_tokens
        write = self._lines.write
        write("update", shares, "of GEMM", against="products before each update", **fields)
        write("update_tflops", [work / round_seconds for round_seconds in seconds], "TFLOP/s", **fields)
        write("gemm", products, "TFLOP/s", width=self._size.gemm_width)
        write("update_seconds", seconds, "s", **fields)
        if self._is_gpu:
            peak = torch.cuda.max_memory_allocated() / 2**30
            write("update_peak_memory", [peak], "GiB", against="model, gradients and optimizer included", **fields)

    def profile(self, work: Path) -> None:
        """Write the summary of one profiled update."""
        from megarl.platform.torch_profile import TorchProfile

        _, batches = self.batches(self._row)
        set_chunk_tokens(self.engine, self._chunk_tokens)
        self.engine.update(batches)
        profile = TorchProfile(["torch"])
        profile.start()
        seconds = seconds_of(lambda: self.engine.update(batches))
        [name] = profile.stop(work, 0)
        summary = summary_of(work / name)
        shares = [] if summary["gpu_busy_share"] is None else [summary["gpu_busy_share"]]
        if shares:
            self._lines.write("update_gpu_busy", shares, "share of time", against="a profiled update")
        self._lines.write("update_profiled_seconds", [seconds], "s", profile=summary)

    def close(self) -> None:
        """Forget the trainer and its process groups, so that another one can be built."""
        from megatron.core import parallel_state

        del self.engine, self._gemm
        parallel_state.destroy_model_parallel()
        if self._is_gpu:
            release()


def measure_kept_logits(updates: Updates) -> None:
    """Measure updates that keep a row's logits from the forward to the backward pass.

    Raises LeftOutError if the model has no such setting (trainer.keep_logits).
    """
    chunks: Any = updates.engine.chunks
    if not hasattr(chunks[0], KEEPS_LOGITS):
        raise LeftOutError("this version has no trainer.keep_logits")
    earlier = getattr(chunks[0], KEEPS_LOGITS)
    try:
        keep_logits(chunks, True)
        updates.measure(keep_logits=True)
    finally:
        keep_logits(chunks, earlier)


def keep_logits(chunks: Sequence[Any], is_on: bool) -> None:
    """Let the chunks of a model keep the logits of their rows, or compute them twice."""
    for chunk in chunks:
        setattr(chunk, KEEPS_LOGITS, is_on)


def bfloat16_items(options: Options, updates: Updates) -> dict[str, Callable[[], None]]:
    """Return the measurements of one trainer, by item."""
    short, long = options.size.update_rows
    return {
        "update_short_rows": lambda: updates.measure(short),
        "update_long_rows": lambda: updates.measure(long),
        "update_larger_chunks": lambda: updates.measure(chunk_tokens=-(-short // 2)),
        "update_kept_logits": lambda: measure_kept_logits(updates),
        "update_profile": lambda: updates.profile(options.work / "profiles"),
    }


def run(options: Options, lines: ItemLines) -> None:
    """Measure the items in turn, first those of the bfloat16 trainer."""
    if names := [name for name in options.items if name != "update_fp8"]:
        updates = Updates(options, lines)
        for name in names:
            if lines.wants(name):
                with lines.measuring(name):
                    bfloat16_items(options, updates)[name]()
        updates.close()
    if lines.wants("update_fp8"):
        with lines.measuring("update_fp8"):
            updates = Updates(options, lines, fp8="blockwise")
            updates.measure(fp8="blockwise")
            updates.close()


def main() -> None:
    options = options_of(__doc__)
    folder = join_world_alone()
    try:
        run(options, ItemLines(options.items, Budget(options.budget_seconds)))
    finally:
        folder.remove()


if __name__ == "__main__":
    main()
