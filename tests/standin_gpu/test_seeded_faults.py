"""Ten faults seeded into copies of megarl's modules and of gpu_paths.py: each error names the file and the line."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.package_copy import copy_package
from tests.standin_gpu.gpu_paths import PATHS

pytestmark = [pytest.mark.standin_gpu, pytest.mark.timeout(600)]
PROGRAM = Path(__file__).with_name("gpu_paths.py")


class Fault(NamedTuple):
    """A change of one file, and the error that it causes."""

    path: str
    """Function of gpu_paths.py that runs."""
    file: str
    """Changed file: gpu_paths.py, or a file of the package."""
    right: str
    wrong: str
    """Replacement of the only occurrence of `right`."""
    error: str
    """Pattern of the error of one of the ranks."""
    named_file: str
    named_line: str
    """Part of the line that the error must name, within the changed copy of that file."""


STAGING, TRANSPORT, VERIFY = (f"megarl/reshard/{name}.py" for name in ("staging", "transport", "verify"))
LOGPROBS = "megarl/models/logprobs.py"
FAULTS = {
    "wrong device index": Fault(
        "logprobs",
        LOGPROBS,
        "torch.zeros(2, len(blocks), len(targets), dtype=wide, device=hidden.device)",
        'torch.zeros(2, len(blocks), len(targets), dtype=wide, device="cuda:0")',
        r"found at least two devices, cuda:1 and cuda:0! \(stand-in, aten::cat",
        LOGPROBS,
        "sums = torch.stack([target_logit",
    ),
    "sleep before the last use": Fault(
        "reshard",
        "gpu_paths.py",
        "    for step in steps:\n",
        "    for step in [*steps[:2], *steps[3:], steps[2]]:\n",
        r"illegal memory access .* lies in memory that is freed or asleep",
        VERIFY,
        "total = total * _RADIX + (part.to(torch.int64) * multipliers).sum()",
    ),
    "missing wait": Fault(
        "reshard",
        STAGING,
        "cross_world.wait(self._travelling.popleft(), self._group, is_on_host=self._slots[0].is_cpu)",
        "self._travelling.popleft()",
        r"missing wait: aten::_foreach_copy_ at .*/megarl/reshard/transport\.py:\d+ .* reads .*, which ncclRecv at ",
        STAGING,
        "work = dist.all_to_all_single(incoming, outgoing, received, sent",
    ),
    "swapped collectives": Fault(
        "reshard",
        "gpu_paths.py",
        "    for step in steps:\n",
        "    for step in reversed(steps[:3]) if rank else steps:\n",
        r"calls ncclRecv of \d+ \w+ at .*, rank \d calls ncclSend of \d+ \w+ at ",
        VERIFY,
        "work = dist.all_to_all_single(",
    ),
    "CPU and CUDA mixed": Fault(
        "reshard",
        VERIFY,
        "torch.arange(1, 2 * _CHUNK, 2, device=device)",
        "torch.arange(1, 2 * _CHUNK, 2)",
        r"two devices, cuda:\d and cpu! \(stand-in, aten::mul",
        VERIFY,
        "total = total * _RADIX + (part.to(torch.int64) * multipliers).sum()",
    ),
    "host memory given to NCCL": Fault(
        "engine_all_reduce",
        "gpu_paths.py",
        'torch.empty(SHAPE, device="cuda"), stream=',
        "torch.empty(SHAPE), stream=",
        r"ncclAllReduce with memory of the host",
        "gpu_paths.py",
        "total = communicator.all_reduce(",
    ),
    "launch on another device's stream": Fault(
        "engine_all_reduce",
        "gpu_paths.py",
        "stream=torch.cuda.current_stream()",
        "stream=torch.cuda.Stream(1 - rank)",
        r"ncclAllReduce of a communicator on device \d on a stream of device \d",
        "gpu_paths.py",
        "total = communicator.all_reduce(",
    ),
    "use of freed memory": Fault(
        "reshard",
        STAGING,
        '"""Return at once: no peer reads a private slot."""',
        "[slot.untyped_storage().resize_(0) for slot in self._slots]",
        r"illegal memory access .* uses \d+ bytes of a storage of 0",
        TRANSPORT,
        "torch._foreach_copy_(destinations, sources)",
    ),
    "synchronisation in a capture": Fault(
        "logprobs",
        LOGPROBS,
        "support.counts.long(), output_size=len(self._columns))",
        "support.counts.long())",
        r"synchronisation of the captured stream while a stream is captured|stream is captur",
        LOGPROBS,
        "self._tokens = tokens.repeat_interleave(",
    ),
    "collectives of different lengths": Fault(
        "logprobs",
        LOGPROBS,
        "all_reduce(sums, group, dist.ReduceOp.SUM)",
        "all_reduce(sums[: 3 - dist.get_rank(group)], group, dist.ReduceOp.SUM)",
        r"rank \d calls ncclAllReduce of \d+ float64, reduction 0 at .*, rank \d calls ncclAllReduce of \d+ float64",
        LOGPROBS,
        "dist.all_reduce(x, operation, group=group)",
    ),
}


def seeded_copy(folder: Path, fault: Fault | None) -> Path:
    """Copy the package and gpu_paths.py into the folder, and make the fault's change there."""
    copy_package(folder)
    shutil.copy(PROGRAM, folder)
    if fault is not None:
        text = (folder / fault.file).read_text()
        assert text.count(fault.right) == 1, f"{fault.file} has no longer one line `{fault.right}`"
        (folder / fault.file).write_text(text.replace(fault.right, fault.wrong))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of all runs, by the name of the fault, or of the path without a fault."""
    made = {name: seeded_copy(tmp_path_factory.mktemp("faults"), FAULTS.get(name)) for name in (*PATHS, *FAULTS)}
    command = [sys.executable, str(PROGRAM)]
    command += [f"{FAULTS[name].path if name in FAULTS else name}={folder}" for name, folder in made.items()]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1", "STANDIN_GPU_WAIT_SECONDS": "5"})
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
    assert 1 in codes, output
    assert re.search(fault.error, output), output
    file = folders[name] / fault.named_file
    [line] = [number for number, text in enumerate(file.read_text().splitlines(), 1) if fault.named_line in text]
    assert f"{file}:{line}" in output or f'"{file}", line {line}' in output, output
