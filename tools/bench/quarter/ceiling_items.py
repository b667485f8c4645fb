"""The ceilings of a device, as an item of `tools/gpu_quarter.py`: products, copies, page-locking."""

from __future__ import annotations

import torch

from tools.bench.parts.budget import Budget
from tools.bench.parts.device_parts import (
    Gemm,
    copy_rates,
    explain_missing_fp8,
    fp8_gemm_tflops,
    host_copy_rates,
    page_locking_seconds,
)
from tools.bench.quarter.item_lines import ItemLines, Options, options_of


def measure(options: Options, lines: ItemLines) -> None:
    """Write the lines of all ceilings that the device has."""
    size, is_gpu = options.size, options.device == "cuda"
    width, rounds = size.gemm_width, size.rounds
    lines.write("gemm", Gemm(width).tflops(rounds), "TFLOP/s", width=width, dtype="bfloat16")
    lines.write("copy", copy_rates(size.copy_bytes, rounds), "GB/s read and written", bytes=size.copy_bytes)
    if not is_gpu:
        return
    for name, rates in host_copy_rates(size.host_bytes, rounds).items():
        lines.write(name, rates, "GB/s", bytes=size.host_bytes)
    seconds = page_locking_seconds(size.host_bytes, rounds)
    lines.write("page_locking", seconds, "s per GB", bytes=size.host_bytes)
    if reason := explain_missing_fp8(torch.cuda.get_device_capability()):
        lines.write_line({"left_out": ["fp8_gemm"], "why": reason})
    else:
        lines.write("fp8_gemm", fp8_gemm_tflops(width, rounds), "TFLOP/s", width=width, dtype="float8_e4m3")


def main() -> None:
    options = options_of(__doc__)
    lines = ItemLines(options.items, Budget(options.budget_seconds))
    if lines.wants("ceilings"):
        with lines.measuring("ceilings"):
            measure(options, lines)


if __name__ == "__main__":
    main()
