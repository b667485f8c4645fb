#!/usr/bin/env python3
"""Answer the queries of nvidia-smi from the properties of the stand-in's run: `-L` and `--query-gpu=`."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> None:
    state = os.environ.get("STANDIN_GPU_STATE")
    if state is None:
        sys.exit("nvidia-smi: no stand-in runs: start the program with tools/standin_gpu/run.py")
    lines = (Path(state) / "properties").read_text().splitlines()
    properties = dict(line.split("=", 1) for line in lines)
    numbers = range(int(properties["count"]))
    query = next((part.split("=", 1)[1] for part in sys.argv[1:] if part.startswith("--query-gpu=")), None)
    shape = next((part.split("=", 1)[1] for part in sys.argv[1:] if part.startswith("--format=")), "")
    if query is None:
        for number in numbers:
            print(f"GPU {number}: {properties['name']} (UUID: GPU-7374616e-6469-6e5f-6770-7500000000{number:02x})")
        return
    unit = "" if "nounits" in shape else " MiB"
    values = {
        "name": properties["name"],
        "driver_version": properties["driver_version"],
        "memory.total": f"{int(properties['memory_bytes']) >> 20}{unit}",
        "compute_cap": properties["compute_capability"],
    }
    names = [name.strip() for name in query.split(",")]
    if "noheader" not in shape:
        print(", ".join(names))
    for number in numbers:
        print(", ".join(str(number) if name == "index" else values.get(name, "[N/A]") for name in names))


if __name__ == "__main__":
    main()
