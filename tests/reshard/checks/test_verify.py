"""On which device checksums are compared and exchanged, seen with fake CUDA tensors on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megarl.groups import cancelled, cross_world, rendezvous
from megarl.groups.peer_errors import PeerGoneError
from megarl.groups.rendezvous import Meeting, Rendezvous
from megarl.platform import device
from megarl.reshard import transport
from megarl.reshard.boxes import Box, Layout, Piece, dense_piece
from megarl.reshard.checks import fingerprint
from megarl.reshard.checks.verify import LedgerComparison, common_pieces
from megarl.reshard.plan import make_plan
from megarl.reshard.transport import Transport
from megarl.types import MegarlError

CUDA = torch.device("cuda", 0)
SHAPE = (6, 4)


class ExchangedDevices(TorchDispatchMode):
    """Notes the devices of every tensor that is handed to an exchange between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[set[torch.device]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "alltoall" in str(func) or "allreduce" in str(func):
            self.seen.append({value.device for value in tree_leaves(args) if isinstance(value, torch.Tensor)})
        return func(*args, **(kwargs or {}))


def forget_numbers() -> None:
    """Clear the caches of fingerprints: tensors of one fake mode cannot be mixed with those of another."""
    fingerprint._random_numbers.cache_clear()
    fingerprint._row_numbers.cache_clear()


@pytest.fixture
def cuda_world(cuda_factories: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A world of two ranks whose tensors are fake and lie on a GPU."""
    monkeypatch.setattr(device, "current", lambda: CUDA)
    monkeypatch.setattr(transport, "is_one_machine", lambda *_: False)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    forget_numbers()
    with FakeTensorMode():
        yield
    forget_numbers()
    dist.destroy_process_group()


def held(*names: str) -> Layout:
    return tuple(dense_piece(name, SHAPE, name, 0) for name in names)


PLANS: Mapping[str, tuple[list[Layout], list[Layout]]] = {
    "all local": ([held("a"), held("a")], [held("a"), held("a")]),
    "all remote": ([held("a"), held("b")], [held("b"), held("a")]),
    "mixed": ([held("a"), held("b")], [held("a", "b"), held("b", "a")]),
    "sends only": ([held("a"), ()], [(), held("a")]),
    "no part": ([held("a"), ()], [held("a"), ()]),
}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", PLANS)
def test_checksums_stay_on_the_gpu(cuda_world: None, name: str, rank: int) -> None:
    sources, destinations = PLANS[name]
    plan = make_plan(sources, destinations, itemsize=2, bucket_bytes=1 << 20)
    here, there = (
        {piece.storage: torch.zeros(SHAPE, dtype=torch.bfloat16, device=CUDA) for piece in side[rank]}
        for side in (sources, destinations)
    )
    comparison = LedgerComparison(plan, rank, here, there, dtype=torch.bfloat16)
    values = comparison.engine.compute()
    assert len(values) == len(destinations[rank]) and {value.device for value in values.values()} <= {CUDA}
    # A fake tensor has no values, so the comparison ends where it first reads one. A rank without pieces reads none: it
    # ends at the exchange of faults, which needs a run.
    with ExchangedDevices() as exchanges, suppress(DataDependentOutputException, RuntimeError):
        comparison.verify(values)
    # Every rank takes part, also one without copies, and all through the backend for CUDA tensors.
    assert exchanges.seen[:1] == [{CUDA}]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", PLANS)
def test_a_plan_binds_to_tensors_on_the_gpu(cuda_world: None, name: str, rank: int) -> None:
    sources, destinations = PLANS[name]
    plan = make_plan(sources, destinations, itemsize=2, bucket_bytes=1 << 20).for_rank(rank)
    here, there = (
        {piece.storage: torch.zeros(SHAPE, dtype=torch.bfloat16, device=CUDA) for piece in side[rank]}
        for side in (sources, destinations)
    )
    bound = Transport(plan, here, there, dtype=torch.bfloat16)
    assert {view.device for bucket in bound._buckets for view in views(bucket)} <= {CUDA}


def views(bucket: Any) -> Iterator[torch.Tensor]:
    for copies in (bucket.local, bucket.pack, bucket.unpack):
        for pairs in (copies.tensors, copies.small, copies.on_cpu):
            yield from (tensor for pair in pairs for tensor in pair)


def test_rows_exchanged_on_the_way_are_found() -> None:
    """Each row has the bits of its source, in another place of the tensor."""
    plan = make_plan([held("a")], [held("a")], itemsize=4, bucket_bytes=1 << 20)
    source = torch.arange(24.0).view(SHAPE)
    destination = source.clone()
    comparison = LedgerComparison(plan, 0, {"a": source}, {"a": destination}, dtype=torch.float32)
    comparison.verify(comparison.engine.compute())
    destination.copy_(source.flip(0))
    with pytest.raises(MegarlError, match="the engine's parameter a does not hold the trainer's a"):
        comparison.verify(comparison.engine.compute())


def test_a_rank_that_waits_for_checksums_is_freed_when_its_group_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank joins the group, but never compares."""
    monkeypatch.setattr(rendezvous._ProcessState, "rendezvous", None)
    address = Rendezvous(key=bytes(32), world="test", file=str(tmp_path / "store"))
    rendezvous.set_rendezvous(address)
    with ThreadPoolExecutor() as pool:
        joining = [
            pool.submit(cross_world.join_group, Meeting(address, "verified", first, 2, 60.0), 0, 20.0)
            for first in range(2)
        ]
        group, other = (joined.result() for joined in joining)
    plan = make_plan([held("a")] * 2, [held("a")] * 2, itemsize=4, bucket_bytes=1 << 20)
    tensors = {"a": torch.zeros(SHAPE)}
    comparison = LedgerComparison(plan, 0, tensors, tensors, dtype=torch.float32, group=group)
    cancelled.cancel("verified", "rank 1 ended")
    with pytest.raises(PeerGoneError, match="rank 1 ended"):
        comparison.verify(comparison.engine.compute())
    for left in (group, other):
        cross_world.leave_group(left)


def test_boxes_in_common_are_cut_from_both_ends() -> None:
    """The trainer has two halves by rows, the engine two halves by columns: the four quarters are compared."""
    rows = [(stored((0, 0), (3, 4)),), (stored((3, 0), (6, 4)),)]
    columns = [(stored((0, 0), (6, 2)),), (stored((0, 2), (6, 4)),)]
    plan = make_plan(rows, columns, itemsize=4, bucket_bytes=1 << 20)
    sources, destinations, num_boxes = common_pieces(plan, 1)
    assert num_boxes == 4
    boxes = {(cut.box.start, cut.box.stop, cut.offset) for cut in sources.values()}
    assert boxes == {((3, 0), (6, 2), 0), ((3, 2), (6, 4), 2)}
    boxes = {(cut.box.start, cut.box.stop, cut.offset) for cut in destinations.values()}
    assert boxes == {((0, 2), (3, 4), 0), ((3, 2), (6, 4), 6)}
    assert sources.keys() & destinations.keys() == {number for number, cut in sources.items() if cut.offset == 2}


def stored(start: tuple[int, int], stop: tuple[int, int]) -> Piece:
    return Piece(Box("a", start, stop), "a", 0, (stop[1] - start[1], 1))
