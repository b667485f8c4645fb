#!/usr/bin/env python3
"""Answer the queries of nvidia-smi from the properties of the stand-in's run: `-L`, `--query-gpu=` and `--id=`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

NO_DEVICE = 6
"""Exit code of nvidia-smi where a device of --id is not found."""


def uuid(number: int) -> str:
    """Return the UUID of a device: that of uuid_of in source/devices.cpp."""
    return f"GPU-7374616e-6469-6e5f-6770-7500000000{number:02x}"


def option(name: str) -> str | None:
    return next((part.split("=", 1)[1] for part in sys.argv[1:] if part.startswith(f"--{name}=")), None)


def choose_devices(asked: str | None, count: int) -> list[int]:
    """Return the numbers of the devices in a list like "0,GPU-7374...". Without a list, return all of them."""
    if asked is None:
        return list(range(count))
    by_name = {name: number for number in range(count) for name in (str(number), uuid(number))}
    unknown = [name for name in asked.split(",") if name not in by_name]
    if unknown:
        print("No devices were found")
        sys.exit(NO_DEVICE)
    return [by_name[name] for name in asked.split(",")]


def main() -> None:
    state = os.environ.get("STANDIN_GPU_STATE")
    if state is None:
        sys.exit("nvidia-smi: no stand-in runs: start the program with tools/standin_gpu/run.py")
    lines = (Path(state) / "properties").read_text().splitlines()
    properties = dict(line.split("=", 1) for line in lines)
    numbers = choose_devices(option("id"), int(properties["count"]))
    query, shape = option("query-gpu"), option("format") or ""
    if query is None:
        for number in numbers:
            print(f"GPU {number}: {properties['name']} (UUID: {uuid(number)})")
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
        device_values = {**values, "index": str(number), "uuid": uuid(number)}
        print(", ".join(device_values.get(name, "[N/A]") for name in names))


if __name__ == "__main__":
    main()
