"""Convert a random model of a few gigabytes both ways, alternating with `cp` and `sha256sum` of the same files.

    python tools/bench/convert.py --gigabytes 4 --rounds 3

Prints one JSON object a line: how the rate of each direction compares with copying and hashing, process start and
imports included, and the most memory that the process had resident. The first conversions, which are not timed, are
verified tensor by tensor.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import report

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
"""Qwen3-4B; the number of layers follows from the bytes asked for."""

LAYER_BYTES = 2 * (2560 * 128 * (32 + 2 * 8 + 32) + 3 * 2560 * 9728)
RATE_TARGET, MEMORY_TARGET = ">= 0.5", "< 1.5e9"


def make_model(folder: Path, gigabytes: float) -> None:
    """Write a model folder of random bits, in files of a gigabyte."""
    import numpy as np
    import torch

    from megarl.checkpoint.safetensors import file_header, index_text, pack_files
    from megarl.families.model_tensors import hf_tensors
    from megarl.families.shape import read_model_shape

    folder.mkdir()
    layers = max(2, round((gigabytes * 1e9 - 4 * 2560 * 151936) / LAYER_BYTES) // 2 * 2)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
    forms = {name: (shape, torch.bfloat16) for name, shape in hf_tensors(read_model_shape(folder)).items()}
    files = pack_files(forms, 1_000_000_000)
    random = np.random.default_rng(0)
    for name, tensors in files.items():
        with (folder / name).open("wb") as file:
            file.write(file_header(tensors))
            for shape, _ in tensors.values():
                file.write(random.bytes(2 * int(np.prod(shape))))
    (folder / "model.safetensors.index.json").write_text(index_text(files, 0))


def run(*command: str | Path) -> tuple[float, int]:
    """Seconds and most resident bytes of a process that must end well."""
    start = time.perf_counter()
    process = subprocess.Popen([*map(str, command)], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{command[0]} failed with status {status}")
    return time.perf_counter() - start, usage.ru_maxrss * 1024


def copy_and_hash(source: Path, target: Path) -> float:
    copied, _ = run("cp", "-r", source, target)
    hashed, _ = run("sha256sum", *sorted(target.glob("*.safetensors")))
    return copied + hashed


def measure(work: Path, gigabytes: float, rounds: int, tp: int, pp: int) -> list[dict[str, Any]]:
    hf, megatron, back, copy = (work / name for name in ("hf", "megatron", "back", "copy"))
    run(sys.executable, __file__, "--make", hf, "--gigabytes", str(gigabytes))
    model_bytes = sum(path.stat().st_size for path in hf.glob("*.safetensors"))
    there = [sys.executable, "-m", "megarl", "convert", "to-megatron", "--hf", hf, "--out", megatron]
    there += ["--tp", str(tp), "--pp", str(pp)]
    again = [sys.executable, "-m", "megarl", "convert", "to-hf", "--megatron", megatron, "--out", back]
    seconds: dict[str, list[float]] = {"to_megatron": [], "to_hf": []}
    peaks: dict[str, list[int]] = {"to_megatron": [], "to_hf": []}
    copies: list[float] = []
    for index in range(rounds + 1):
        verify = ["--verify"] if index == 0 else []
        # Each writes over what it wrote the round before: freed memory is dear or cheap by how long it has been free.
        shutil.rmtree(copy, ignore_errors=True)
        copied = copy_and_hash(hf, copy)
        shutil.rmtree(megatron, ignore_errors=True)
        measured = {"to_megatron": run(*there, *verify)}
        shutil.rmtree(back, ignore_errors=True)
        measured["to_hf"] = run(*again, *verify)
        if index:
            copies.append(copied)
            for name, (took, peak) in measured.items():
                seconds[name].append(took)
                peaks[name].append(peak)
    against = f"cp + sha256sum of the same files, {statistics.median(copies):.1f} s"
    case = f"{model_bytes / 1e9:.2f} GB, tp {tp} pp {pp}"
    base = {"machine": report.machine(), "versions": report.versions("megatron-core", "safetensors"), "case": case}
    lines: list[dict[str, Any]] = []
    for name, took in seconds.items():
        ratios = [copied / own for copied, own in zip(copies, took, strict=True)]
        rate = round(model_bytes / statistics.median(took))
        lines += [
            report.metric_line(
                f"convert_{name}_rate", ratios, "of cp + sha256sum", target=RATE_TARGET, against=against,
                bytes_per_second=rate, **base,
            ),
            # The most of all rounds is what must fit.
            report.metric_line(
                f"convert_{name}_peak", [max(peaks[name])], "bytes resident", target=MEMORY_TARGET,
                against=f"{model_bytes} bytes of weights", peaks=sorted(peaks[name]), **base,
            ),
        ]  # fmt: skip
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="disk to measure on; left out: the temporary folder's")
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        make_model(options.make, options.gigabytes)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as work:
        for line in measure(Path(work), options.gigabytes, options.rounds, options.tp, options.pp):
            report.print_line(line)


if __name__ == "__main__":
    main()
