"""The texts of the stand-in's seeded faults: each is in the file that the fault names, on any machine."""

from __future__ import annotations

from pathlib import Path

import pytest

import megarl
from tests.standin_gpu.gpu_paths import PATHS
from tests.standin_gpu.seeded_faults import FAULTS, PROGRAM, seeded_text


@pytest.mark.parametrize("name", FAULTS)
def test_a_seeds_text_and_line_occur_once(name: str) -> None:
    """A seed whose text moved would test nothing until the weekly run on the stand-in."""
    fault = FAULTS[name]
    assert fault.path in PATHS
    package = Path(megarl.__file__).parents[1]
    changed = seeded_text(PROGRAM.parent if fault.file == PROGRAM.name else package, fault)
    # A seed that cannot be imported fails the run by another error.
    compile(changed, fault.file, "exec")
    unchanged = (PROGRAM.parent if fault.named_file == PROGRAM.name else package) / fault.named_file
    text = changed if fault.named_file == fault.file else unchanged.read_text()
    lines = [line for line in text.splitlines() if fault.named_line in line]
    assert len(lines) == 1, f"{fault.named_file} has {len(lines)} lines `{fault.named_line}`"
