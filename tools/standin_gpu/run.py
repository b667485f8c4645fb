"""Run a program on the stand-in: `run.py FOLDER [--devices h200] [--count 2] [--strict] -- PROGRAM ARGUMENTS`.

FOLDER is what build.py made. `--devices` names a file of `devices/`, or any JSON file with the same fields. `--strict`
adds the checks between streams.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FIELDS: dict[str, type] = {
    "name": str, "count": int, "memory_bytes": int, "driver_version": str, "compute_capability": str,
    "multiprocessors": int, "l2_cache_bytes": int,
}  # fmt: skip
# As many as the libraries' tables hold (kMaxDevices in source/include/standin.h).
MOST_DEVICES = 16


class PropertyError(Exception):
    """A sentence for the user."""


def read_devices(name: str, count: int | None = None) -> dict[str, Any]:
    """Return the checked properties of a file of `devices/`, or of a JSON file's path. Raises PropertyError."""
    file = Path(name) if name.endswith(".json") else HERE / "devices" / f"{name}.json"
    if not file.is_file():
        names = ", ".join(sorted(path.stem for path in (HERE / "devices").glob("*.json")))
        raise PropertyError(f"devices = {name}: no such file; choose one of {names}, or a path that ends in .json")
    try:
        properties = json.loads(file.read_text())
    except ValueError as error:
        raise PropertyError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(properties, dict) or set(properties) != set(FIELDS):
        raise PropertyError(f"{file}: its fields must be {', '.join(FIELDS)}")
    if count is not None:
        properties["count"] = count
    for field, kind in FIELDS.items():
        value = properties[field]
        if type(value) is not kind or (kind is int and value < 1) or (kind is str and not value.isprintable()):
            meaning = "a whole number from 1 on" if kind is int else "a line of text"
            raise PropertyError(f"{file}: {field} = {value!r}: give {meaning}")
    if properties["count"] > MOST_DEVICES:
        raise PropertyError(f"count = {properties['count']}: the stand-in has at most {MOST_DEVICES} devices")
    if not re.fullmatch(r"\d+\.\d", properties["compute_capability"]):
        raise PropertyError(f"{file}: compute_capability = {properties['compute_capability']}: write it as 9.0")
    return properties


def environment_variables(folder: Path, state: Path, is_strict: bool = False) -> dict[str, str]:
    """Return the variables for programs of the built folder, of a run whose files are in `state`."""
    libraries = f"{folder}/standin_gpu/libraries"
    earlier = os.environ.get("LD_LIBRARY_PATH")
    return {
        **os.environ,
        "STANDIN_GPU_STATE": str(state),
        "LD_LIBRARY_PATH": f"{libraries}:{earlier}" if earlier else libraries,
        "PATH": f"{folder}/bin:{os.environ['PATH']}",
        # No compiler's output runs here: Triton interprets its kernels, torch.compile and FlashInfer's samplers are
        # left out.
        "TRITON_INTERPRET": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        # A host loop that leaves its memory ends in a signal: Python then prints its stack.
        "PYTHONFAULTHANDLER": "1",
        **({"STANDIN_GPU_STRICT": "1"} if is_strict else {}),
    }


def run(folder: Path, properties: dict[str, Any], program: list[str], is_strict: bool = False) -> int:
    """Run the program and return its exit code. All its processes share the devices' memory limit."""
    # Shared memory where there is some: counters and NCCL's messages are files.
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    state = Path(tempfile.mkdtemp(prefix="standin_gpu-", dir=place))
    try:
        lines = [f"{field}={value}" for field, value in properties.items()]
        (state / "properties").write_text("\n".join(lines) + "\n")
        return subprocess.run(program, env=environment_variables(folder, state, is_strict)).returncode
    finally:
        shutil.rmtree(state, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--devices", default="h200")
    parser.add_argument("--count", type=int)
    parser.add_argument("--strict", action="store_true")
    # argparse would take the options of the program as its own.
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    program = sys.argv[end + 1 :]
    arguments = parser.parse_args(sys.argv[1:end])
    folder = arguments.folder.resolve()
    if not (folder / "standin_gpu/libraries").is_dir():
        sys.exit(f"{folder} is not a built stand-in: run tools/standin_gpu/build.py first")
    if not program:
        sys.exit("no program: name one after --")
    try:
        properties = read_devices(arguments.devices, arguments.count)
    except PropertyError as error:
        sys.exit(f"tools/standin_gpu/run.py: {error}")
    sys.exit(run(folder, properties, program, arguments.strict))


if __name__ == "__main__":
    main()
