"""Faults seeded into copies of megarl's modules and of gpu_paths.py: each error names the file and the line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.standin_gpu.gpu_paths import PATHS
from tests.standin_gpu.seeded_faults import FAULTS, PROGRAM, seeded_copy

pytestmark = [pytest.mark.standin_gpu, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of all runs, by the name of the fault, or of the path without a fault."""
    made = {name: seeded_copy(tmp_path_factory.mktemp("faults"), FAULTS.get(name)) for name in (*PATHS, *FAULTS)}
    command = [sys.executable, str(PROGRAM)]
    command += [f"{FAULTS[name].path if name in FAULTS else name}={folder}" for name, folder in made.items()]
    # Libraries keep temporary files, which a rank that ends without destructors leaves.
    variables = {"TMPDIR": str(tmp_path_factory.mktemp("temporary"))}
    variables |= {"OMP_NUM_THREADS": "1", "STANDIN_GPU_WAIT_SECONDS": "5"}
    subprocess.run(command, check=True, env={**os.environ, **variables})
    return made


def outcome(folder: Path) -> tuple[list[int], str]:
    """Return the exit codes of both ranks, and all that they wrote."""
    output = "".join((folder / f"rank_{rank}.log").read_text() for rank in range(2))
    return json.loads((folder / "codes.json").read_text()), output


@pytest.mark.parametrize("path", PATHS)
def test_a_path_without_a_fault_ends_well(folders: dict[str, Path], path: str) -> None:
    codes, output = outcome(folders[path])
    assert codes == [0, 0], output


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_with_file_and_line(folders: dict[str, Path], name: str) -> None:
    fault = FAULTS[name]
    codes, output = outcome(folders[name])
    # An early read ends the process by a signal.
    assert any(codes), output
    assert re.search(fault.error, output), output
    file = folders[name] / fault.named_file
    [line] = [number for number, text in enumerate(file.read_text().splitlines(), 1) if fault.named_line in text]
    assert f"{file}:{line}" in output or f'"{file}", line {line}' in output, output
