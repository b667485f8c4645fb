"""Faults to seed into copies of megarl's modules and of gpu_paths.py, each with the error that the stand-in reports.

test_seeded_faults.py runs them on the stand-in. tests/guards/test_seeded_texts.py finds their texts on any machine.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

from tests.package_copy import copy_package

PROGRAM = Path(__file__).with_name("gpu_paths.py")
HOST_WAITS = Path(__file__).parents[1] / "host_waits.py"


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


STAGING, TRANSPORT, VERIFY, FINGERPRINT = (
    f"megarl/reshard/{name}.py" for name in ("staging", "transport", "checks/verify", "checks/fingerprint")
)
LOGPROBS, OFFLOAD = "megarl/models/logprobs.py", "megarl/training/host/offload.py"
FAULTS = {
    "wrong device index": Fault(
        "logprobs",
        LOGPROBS,
        "torch.zeros(2, len(blocks), len(targets), dtype=wide_dtype, device=hidden.device)",
        'torch.zeros(2, len(blocks), len(targets), dtype=wide_dtype, device="cuda:0")',
        r"found at least two devices, cuda:1 and cuda:0! \(stand-in, aten::cat",
        LOGPROBS,
        "sums = torch.stack(",
    ),
    "sleep before the last use": Fault(
        "reshard",
        "gpu_paths.py",
        "    for step in steps:\n",
        "    for step in [*steps[:2], *steps[3:], steps[2]]:\n",
        r"illegal memory access .* lies in memory that is freed or asleep",
        FINGERPRINT,
        "products = torch.mul(words, columns, out=",
    ),
    "missing wait": Fault(
        "reshard",
        STAGING,
        "cross_world.wait(self._in_flight.popleft(), self._group, is_on_host=self._slots[0].is_cpu)",
        "self._in_flight.popleft()",
        r"missing wait: aten::_foreach_copy_ at .*/megarl/reshard/transport\.py:\d+ .* reads .*, which ncclRecv at ",
        STAGING,
        "work = dist.all_to_all_single(incoming, outgoing, received, sent",
    ),
    "swapped collectives": Fault(
        "reshard",
        "gpu_paths.py",
        "    for step in steps:\n",
        "    for step in reversed(steps[:3]) if rank else steps:\n",
        r"calls ncclRecv of \d+ \w+ at .*, rank \d calls ncclAllReduce of \d+ int64, reduction \d at ",
        VERIFY,
        "work = dist.all_reduce(",
    ),
    "CPU and CUDA mixed": Fault(
        "reshard",
        FINGERPRINT,
        "columns = _random_numbers(first_word, words.shape[1], -1, block.device)",
        'columns = _random_numbers(first_word, words.shape[1], -1, torch.device("cpu"))',
        r"two devices, cuda:\d and cpu! \(stand-in, aten::mul",
        FINGERPRINT,
        "products = torch.mul(words, columns, out=",
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
        '"""Do nothing: no peer reads a private slot."""',
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
    "early read of a checkpoint block": Fault(
        "checkpoint_blocks",
        OFFLOAD,
        "    if pin:\n        torch.cuda.synchronize()\n    return copies",
        "    return [copy.clone() for copy in copies]",
        r"early read: the host reads pinned memory at \w+, which a copy at .*offload\.py:\d+ on stream \d+ writes",
        OFFLOAD,
        "copy.copy_(tensor, non_blocking=pin)",
    ),
    "early read of an asynchronous copy": Fault(
        "checkpoint_blocks",
        "gpu_paths.py",
        "    torch.cuda.current_stream().synchronize()\n",
        "",
        r"early read: the host reads pinned memory at \w+, which a copy at .*gpu_paths\.py:\d+ on stream \d+ writes",
        "gpu_paths.py",
        '.to("cpu", non_blocking=True)',
    ),
    "groups in another order": Fault(
        "two_groups",
        "gpu_paths.py",
        "(*groups, *groups):",
        "(*groups, *groups[:: 1 - 2 * rank]):",
        r"ranks use groups in another order: rank (\d) waits in ncclAllReduce of 2 float32, reduction 0 at .* in "
        r"(first|second), group \d+; rank (?!\1)\d waits in ncclAllReduce of 2 .* in (?!\2)(first|second), group \d+",
        "gpu_paths.py",
        "        dist.all_reduce(ones, group=group)",
    ),
    "gloo on memory of a device": Fault(
        "gathered_parameters",
        "gpu_paths.py",
        'backend="cpu:gloo,cuda:nccl", group_desc="shards"',
        'backend="gloo", group_desc="shards"',
        r"gloo gets memory of a device \(stand-in: c10d::\w+ of shards, group \d+ with memory of device \d",
        "gpu_paths.py",
        "with dist._coalescing_manager(group):",
    ),
    "host waits for a copy to the CPU": Fault(
        "microbatches",
        LOGPROBS,
        "all_reduce(sums, group, dist.ReduceOp.SUM)",
        'all_reduce(sums.to("cpu").cuda(), group, dist.ReduceOp.SUM)',
        r"the host waits for the device \(to\) in models/logprobs\.py",
        LOGPROBS,
        'all_reduce(sums.to("cpu").cuda()',
    ),
    "host waits for a stream": Fault(
        "microbatches",
        LOGPROBS,
        "all_reduce(sums, group, dist.ReduceOp.SUM)",
        "torch.cuda.current_stream().synchronize() or all_reduce(sums, group, dist.ReduceOp.SUM)",
        r"the host waits for the device \(stream\) in models/logprobs\.py",
        LOGPROBS,
        "torch.cuda.current_stream().synchronize() or",
    ),
    "host waits for an event": Fault(
        "microbatches",
        LOGPROBS,
        "all_reduce(sums, group, dist.ReduceOp.SUM)",
        "torch.cuda.current_stream().record_event().synchronize() or all_reduce(sums, group, dist.ReduceOp.SUM)",
        r"the host waits for the device \(event\) in models/logprobs\.py",
        LOGPROBS,
        "record_event().synchronize() or",
    ),
    "host waits for a pageable copy": Fault(
        "microbatches",
        "gpu_paths.py",
        "torch.arange(0, 72, 12).pin_memory()",
        "torch.arange(0, 72, 12)",
        r"the host waits for the device \(to\) in .*gpu_paths\.py:microbatches",
        "gpu_paths.py",
        'targets.to("cuda", non_blocking=True)',
    ),
}


def seeded_text(root: Path, fault: Fault) -> str:
    """Return the text of the fault's file below `root`, with its change. Raises AssertionError where the text moved."""
    text = (root / fault.file).read_text()
    assert text.count(fault.right) == 1, f"{fault.file} has no longer exactly one text `{fault.right}`"
    return text.replace(fault.right, fault.wrong)


def seeded_copy(folder: Path, fault: Fault | None) -> Path:
    """Copy the package and gpu_paths.py into the folder, and make the fault's change there."""
    copy_package(folder)
    shutil.copy(PROGRAM, folder)
    shutil.copy(HOST_WAITS, folder)
    if fault is not None:
        (folder / fault.file).write_text(seeded_text(folder, fault))
    return folder
