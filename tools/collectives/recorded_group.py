"""A process group that records its calls and exchanges nothing, like torch's fake process group.

torch's own fake group knows no meta device, and a recorder outside of it does not see batches, waits and options. This
one sees them. It answers as if all ranks had this rank's values, where values are known at all.
"""

# torch calls these methods by position, and its stubs name their parameters in several styles.
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.distributed import ProcessGroup
from torch.testing._internal.distributed.fake_pg import FakeStore

from tools.collectives.programs import EVERY_OTHER, MESSAGES, Call, Group, Program

_BACKEND = "recorded_gloo_nccl"
"""Name of the backend. megarl exchanges host objects through the host if the name of a group's backend contains gloo,
and a group on GPUs is `cpu:gloo,cuda:nccl`."""


_STAGES = "PIPELINE_MODEL_PARALLEL_GROUP"
"""Name that Megatron gives to groups of pipeline stages."""


class Recorder:
    """The calls of one rank, in their order, and all process groups of its world."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.groups: list[Group] = [Group("WORLD", tuple(range(world_size)))]
        """All groups of the world, in the order of their creation; also those without this rank."""
        self._interned: dict[Call, Call] = {}
        self._calls: list[Call] = []
        self._steps: list[int] = []
        self._batch: _Batch | None = None

    def program(self) -> Program:
        """Return all calls."""
        return Program(self._calls, self._steps)

    def add_group(self, name: str, ranks: Sequence[int]) -> int:
        """Record a new group. Returns its number."""
        self.groups.append(Group(name, tuple(ranks)))
        number = len(self.groups) - 1
        if name == _STAGES:
            self.groups.append(Group("WORLD, between stages", tuple(ranks)))
        return number

    def end_of_message(self, number: int, peer: int) -> tuple[int, int, int]:
        """Return, for a message on a group, the group that is recorded, and the places of this rank and the peer in it.

        Megatron-Core 0.16.1 sends one direction between two virtual stages on the world, so that both directions
        overlap. torch gives each pair of a single message a communicator of its own, so the other ranks take no part.
        The message is recorded on a group of the pipeline's ranks. Ranks of all replicas then make the same call.
        """
        ranks = self.groups[number].ranks
        if number == 0:
            for place, group in enumerate(self.groups[:-1]):
                if group.name == _STAGES and self.rank in group.ranks and ranks[peer] in group.ranks:
                    return place + 1, group.ranks.index(self.rank), group.ranks.index(ranks[peer])
        return number, ranks.index(self.rank), peer

    def start(self, call: Call) -> RecordedWork:
        """Record the start of a call. A message within a batch belongs to the batch's call."""
        call = self._interned.setdefault(call, call)
        if call.is_message and self._batch is not None:
            return self._batch.add(call)
        self._calls.append(call)
        self._steps.append(len(self._calls) - 1)
        return RecordedWork(self, len(self._calls) - 1)

    def wait(self, index: int) -> None:
        self._steps.append(~index)

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Context in which messages are one call, as in `torch.distributed.batch_isend_irecv`."""
        self._batch = batch = _Batch(self)
        try:
            yield
        finally:
            self._batch = None
        batch.start()


class RecordedWork(Work):
    """The handle of a recorded call. A wait is recorded once: further ones return at once."""

    def __init__(self, recorder: Recorder, index: int) -> None:
        super().__init__()
        self._recorder, self.index, self._is_waited_for = recorder, index, False
        self.batch: RecordedWork | None = None
        """The handle of the batch with this message."""

    def wait(self, timeout: Any = None) -> bool:
        if self.batch is not None:
            return self.batch.wait()
        if not self._is_waited_for:
            self._is_waited_for = True
            self._recorder.wait(self.index)
        return True

    def is_completed(self) -> bool:
        return self._is_waited_for if self.batch is None else self.batch.is_completed()


class _Batch:
    """Messages that are started together."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._messages: list[Call] = []
        self._works: list[RecordedWork] = []

    def add(self, call: Call) -> RecordedWork:
        self._messages.append(call)
        self._works.append(RecordedWork(self._recorder, -1))
        return self._works[-1]

    def start(self) -> None:
        """Record the batch as one call, which all handles of its messages stand for."""
        if not self._messages:
            return
        first = self._messages[0]
        joined = first._replace(
            sends=tuple(part for message in self._messages for part in message.sends),
            receives=tuple(part for message in self._messages for part in message.receives),
            lane=None,
        )
        handle = self._recorder.start(joined)
        for work in self._works:
            work.batch = handle


class RecordedGroup(ProcessGroup):
    """A process group that records its calls with a `Recorder`. All tensors [*any] are left or filled in place."""

    def __init__(self, recorder: Recorder, number: int) -> None:
        ranks = recorder.groups[number].ranks
        # The stubs of torch 2.13 lack this form of the constructor, which its own Python groups use.
        super().__init__(ranks.index(recorder.rank), len(ranks))  # pyright: ignore[reportCallIssue]
        self._recorder, self._number = recorder, number

    def new_group(self, ranks: list[int], *, group_desc: str | None = None, **_: Any) -> RecordedGroup | None:
        """Return a group of these ranks, None on other ranks. `torch.distributed.new_group` calls it on the world."""
        number = self._recorder.add_group(group_desc or "GROUP", ranks)
        return RecordedGroup(self._recorder, number) if self._recorder.rank in ranks else None

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        return _BACKEND

    def _start(
        self, operation: str, tensor: Tensor, size: int, group: int | None = None, **details: Any
    ) -> RecordedWork:
        return self._recorder.start(
            Call(
                operation,
                self._number if group is None else group,
                tensor.device.type == "cpu",
                str(tensor.dtype).removeprefix("torch."),
                size,
                place=_calling_place(),
                **details,
            )
        )

    def allreduce(self, tensors: Any, opts: Any = None) -> RecordedWork:
        [tensor] = tensors if isinstance(tensors, list) else [tensors]
        return self._start("all_reduce", tensor, tensor.numel(), setting=_reduction(opts))

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> RecordedWork:
        numel = sum(tensor.numel() for tensor in tensors)
        return self._start("all_reduce", tensors[0], numel, setting=_reduction(opts))

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> RecordedWork:
        return self._start("broadcast", tensors[0], tensors[0].numel(), setting=f"from {opts.rootRank}")

    def reduce(self, tensors: Sequence[Tensor], opts: Any = None) -> RecordedWork:
        setting = f"{_reduction(opts)} to {opts.rootRank}"
        return self._start("reduce", tensors[0], tensors[0].numel(), setting=setting)

    def barrier(self, opts: Any = None) -> RecordedWork:
        return self._start("barrier", torch.empty(0), 0)

    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> RecordedWork:
        for output in outputs[0]:
            if output.shape == inputs[0].shape:
                _fill(output, inputs[0])
        # NCCL takes parts of unequal sizes; then members agree on the sizes of all.
        sizes = [output.numel() for output in outputs[0]]
        if len(set(sizes)) > 1:
            return self._start("all_gather", inputs[0], sum(sizes), setting=f"sizes {sizes}")
        return self._start("all_gather", inputs[0], inputs[0].numel())

    def all_gather_single(self, output: Tensor, part: Tensor, opts: Any = None) -> RecordedWork:
        for block in output.view(-1).split(part.numel()) if part.numel() else ():
            _fill(block, part.reshape(-1))
        return self._start("all_gather", part, part.numel())

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], parts: Sequence[Tensor], opts: Any = None
    ) -> RecordedWork:
        return self._start("all_gather", parts[0], sum(part.numel() for part in parts))

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> RecordedWork:
        sizes = [tensor.numel() for tensor in inputs[0]]
        if len(set(sizes)) > 1:
            setting = f"{_reduction(opts)} sizes {sizes}"
            return self._start("reduce_scatter", outputs[0], sum(sizes), setting=setting)
        return self._start("reduce_scatter", outputs[0], outputs[0].numel(), setting=_reduction(opts))

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> RecordedWork:
        return self._start("reduce_scatter", output, output.numel(), setting=_reduction(opts))

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], wholes: Sequence[Tensor], opts: Any = None
    ) -> RecordedWork:
        numel = sum(output.numel() for output in outputs)
        return self._start("reduce_scatter", outputs[0], numel, setting=_reduction(opts))

    def all_to_all_single(
        self, output: Tensor, source: Tensor, received: Any, sent: Any, opts: Any = None
    ) -> RecordedWork:
        rank, size = self.rank(), self.size()
        if len(sent) == 0:
            # Blocks of equal size: all ranks send this rank the block that it sends to itself.
            sends, receives = [source.numel() // size] * size, [output.numel() // size] * size
            blocks = output.view(-1).split(receives)
            mine = source.reshape(-1).split(sends)[rank]
            for block in blocks:
                _fill(block, mine)
        else:
            width_sent = source.numel() // source.shape[0] if source.numel() else 0
            width_received = output.numel() // output.shape[0] if output.numel() else 0
            rows_sent, rows_received = [int(n) for n in sent], [int(n) for n in received]
            if sum(rows_sent) != source.shape[0] or sum(rows_received) != output.shape[0]:
                raise AssertionError(
                    f"all_to_all_single: {rows_sent} rows to send of {source.shape[0]}, {rows_received} to receive of "
                    f"{output.shape[0]}"
                )
            # Only what a rank sends to itself is known. The rest is zero: on the host, a number of rows to follow.
            parts, arrived = source.split(rows_sent), output.split(rows_received)
            if rows_sent[rank] == rows_received[rank]:
                for place, block in enumerate(arrived):
                    _fill(block, parts[rank] if place == rank else None)
            sends = [n * width_sent for n in rows_sent]
            receives = [n * width_received for n in rows_received]
        return self._start("all_to_all", source, 0, sends=self._to_others(sends), receives=self._to_others(receives))

    def _to_others(self, sizes: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Return the sizes [members] by peer, without this rank's own and without zeros.

        Ranks of other data-parallel replicas then make the same call.
        """
        sizes_of_peers = {size for peer, size in enumerate(sizes) if peer != self.rank()}
        if len(sizes_of_peers) == 1:
            [size] = sizes_of_peers
            return ((EVERY_OTHER, size),) if size else ()
        return tuple((peer, size) for peer, size in enumerate(sizes) if size and peer != self.rank())

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> RecordedWork:
        sends, receives = ([tensor.numel() for tensor in tensors] for tensors in (inputs, outputs))
        return self._start("all_to_all", inputs[0], 0, sends=self._to_others(sends), receives=self._to_others(receives))

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int = 0) -> RecordedWork:
        return self._message(tensors[0], peer, is_send=True)

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int = 0) -> RecordedWork:
        return self._message(tensors[0], peer, is_send=False)

    def _message(self, tensor: Tensor, peer: int, *, is_send: bool) -> RecordedWork:
        group, own_rank, peer = self._recorder.end_of_message(self._number, peer)
        end = ((peer, tensor.numel()),)
        return self._start(
            MESSAGES,
            tensor,
            0,
            group,
            sends=end if is_send else (),
            receives=() if is_send else end,
            lane=(min(own_rank, peer), max(own_rank, peer)),
        )


def _fill(block: Tensor, values: Tensor | None) -> None:
    """Copy values [*shape] into a received block, zeros for None, if it is small or on the host."""
    if block.numel() == 0 or (block.device.type != "cpu" and block.numel() > _MOST_ELEMENTS):
        return
    with torch.no_grad():
        if values is None:
            block.detach().zero_()
        else:
            block.detach().copy_(values.detach())


_MOST_ELEMENTS = 1 << 20
"""Largest block on the imagined device that is filled with values. Larger ones have none."""


_REDUCTIONS = ("SUM", "AVG", "MAX", "MIN", "PRODUCT", "BAND", "BOR", "BXOR")


def _reduction(opts: Any) -> str:
    """Return the name of the reduction in a call's options."""
    return next(name for name in _REDUCTIONS if opts.reduceOp == getattr(dist.ReduceOp, name))


_PACKAGES = Path(torch.__file__).parents[1]
_WRAPPERS = (
    str(_PACKAGES / "torch/"),
    str(_PACKAGES / "typing_extensions.py"),
    sysconfig.get_path("stdlib") + "/contextlib.py",
    str(Path(__file__).parent),
)
"""Beginnings of the paths of code that only passes calls on."""
_ROOTS = (f"{_PACKAGES}/", f"{Path(__file__).parents[2]}/")


@cache
def _format_place(file: str, line: int) -> str:
    for root in _ROOTS:
        file = file.removeprefix(root)
    return f"{file}:{line}"


def _calling_place() -> str:
    """Return file and line of the nearest caller outside torch and this package."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_WRAPPERS):
        frame = frame.f_back
    return "" if frame is None else _format_place(frame.f_code.co_filename, frame.f_lineno)


@contextmanager
def recorded_world(recorder: Recorder) -> Iterator[None]:
    """Context with an initialised `torch.distributed`, whose world and groups record their calls."""

    def make_world(*_: Any) -> RecordedGroup:
        return RecordedGroup(recorder, 0)

    dist.Backend.register_backend(_BACKEND, make_world, devices=["cpu", "cuda"])
    world_size = len(recorder.groups[0].ranks)
    dist.init_process_group(_BACKEND, store=FakeStore(), rank=recorder.rank, world_size=world_size)
    batched = dist.batch_isend_irecv

    def batch(operations: Any) -> Any:
        with recorder.batch():
            return batched(operations)

    # torch batches messages inside its own groups, where a recorder outside does not see it.
    dist.batch_isend_irecv = batch
    try:
        yield
    finally:
        dist.batch_isend_irecv = batched
        dist.destroy_process_group()
