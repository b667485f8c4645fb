"""Copies of the training state in host memory: each rank holds its own part and that of a rank on another node.

A lost node then costs the steps since the last copy, not those since the last checkpoint. Restoring is a plan of copies
between ranks, like a reshard. So the new ranks may have other parallel sizes, and no rank receives an element that it
holds.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.groups import signed
from megarl.groups.backends import HOST_ONLY
from megarl.platform import background, device
from megarl.reshard.boxes import Box, Layout, Piece, contiguous_strides
from megarl.reshard.plan import RankTopology, make_plan
from megarl.reshard.state_holders import partners
from megarl.reshard.transport import Transport
from megarl.training.state.checkpoint import Model, common_state, restore_common_state
from megarl.training.state.parts import StatePart, state_parts
from megarl.types import DataError

_MESSAGE_BYTES = 1 << 28
"""Bytes of one message to a partner. gloo counts bytes in 32 bits on some platforms."""
_BUCKET_BYTES = 1 << 28
"""Maximum bytes that a rank sends and receives at once in a restore."""

Layouts = Mapping[str, Layout]
"""Layout of a copy: its pieces by the name of their dtype, such as `float32`."""


@dataclass(frozen=True, slots=True)
class StateCopy:
    """Copy of one rank's part of the training state after a step.

    `origin` is the rank that had the state, of `num_ranks`. `blocks` are flat uint8 tensors in host memory, by dtype.
    `common` are values other than tensors: step counts, random numbers. `checksum` is the CRC-32 of all blocks.
    """

    step: int
    origin: int
    num_ranks: int
    layouts: Layouts
    blocks: Mapping[str, Tensor]
    common: Mapping[str, Any]
    checksum: int = 0

    @property
    def num_bytes(self) -> int:
        return sum(block.nbytes for block in self.blocks.values())


@dataclass(slots=True)
class StateCopies:
    """Copies held by this rank: of its own state and of its partner's, after one or two steps."""

    complete_copies: dict[tuple[int, int], StateCopy] = field(default_factory=dict)
    """Complete copies by (step, rank that had the state)."""

    def steps(self) -> dict[int, tuple[int, list[int]]]:
        """Return the copied steps, each with the number of ranks at that time and the ranks whose copies are here."""
        ranks_of_steps: dict[int, tuple[int, list[int]]] = {}
        for (step, origin), copy in self.complete_copies.items():
            ranks_of_steps.setdefault(step, (copy.num_ranks, []))[1].append(origin)
        return ranks_of_steps

    def drop_damaged(self) -> list[str]:
        """Drop the copies whose bytes changed since they were made, and return a sentence about each."""
        damages = []
        for key, copy in list(self.complete_copies.items()):
            if (checksum := _checksum(copy.blocks)) != copy.checksum:
                damages.append(_damage_text(copy, checksum))
                del self.complete_copies[key]
        return damages

    def keep_only(self, step: int | None) -> None:
        """Drop the copies of all steps but this one; None: of all steps. Later steps are trained again."""
        self.complete_copies = {key: copy for key, copy in self.complete_copies.items() if copy.step == step}

    def keep_newest(self) -> list[StateCopy]:
        """Drop the copies of all steps but the newest, and return them."""
        newest = max((step for step, _ in self.complete_copies), default=0)
        dropped = [copy for copy in self.complete_copies.values() if copy.step < newest]
        self.complete_copies = {key: copy for key, copy in self.complete_copies.items() if copy.step == newest}
        return dropped


class StateCopier:
    """Makes copies of this rank's state and exchanges them with partners during the next step.

    The constructor is a collective over the trainer's world. `topology` places the ranks on nodes.
    """

    def __init__(self, copies: StateCopies, topology: RankTopology) -> None:
        self.copies, self._rank = copies, dist.get_rank()
        self._partners = partners(topology)
        # A group of its own: its messages run in a thread, at any time between those of the training step.
        group = dist.new_group(backend=HOST_ONLY, group_desc="state copies") if len(topology) > 1 else None
        assert not isinstance(group, int)
        self._group = group
        self._layouts: dict[int, Layouts] = {}
        self._exchange: Future[list[StateCopy]] | None = None

    def begin(self, step: int, models: Mapping[str, Model], layout: str, **driver: Any) -> int:
        """Copy the state after a step to host memory, and start sending it to this rank's partner. A collective.

        `driver` are further values, returned by `restore`. Returns the bytes of the copy. Call `finish` before the next
        one; until then the copies of the step before stay.
        """
        spare = {copy.origin: copy.blocks for copy in self.copies.keep_newest()}
        parts = [part for part in state_parts(models) if part.is_main]
        layouts, blocks = _copy_parts(parts, spare.get(self._rank))
        common = common_state(models, layout) | {"driver": driver}
        own_copy = StateCopy(step, self._rank, len(self._partners), layouts, blocks, common)
        # Parts mostly stay where they are. A reference model that moves for the first time adds parts.
        changed = None if self._layouts.get(self._rank) == layouts else layouts
        states = signed.gather((common, changed), purpose="values and layouts of state copies")
        everyone = [values for values, _ in states]
        self._layouts |= {origin: new for origin, (_, new) in enumerate(states) if new is not None}
        expected = [
            StateCopy(
                step,
                origin,
                own_copy.num_ranks,
                self._layouts[origin],
                _blocks_for(self._layouts[origin], spare.get(origin)),
                values,
            )
            for origin, values in enumerate(everyone)
            if self._partners[origin] == self._rank and origin != self._rank
        ]
        self._exchange = background.begin(lambda: self._run(own_copy, expected))
        return own_copy.num_bytes

    def finish(self, *, wait: bool) -> bool:
        """Return whether this rank's copies are complete. `wait` blocks until they are.

        Raises the error that ended the exchange, such as the loss of a partner.
        """
        if self._exchange is None:
            return True
        if not wait and not self._exchange.done():
            return False
        exchange, self._exchange = self._exchange, None
        for copy in background.finish(exchange):
            self.copies.complete_copies[copy.step, copy.origin] = copy
        return True

    def _run(self, own_copy: StateCopy, expected: Sequence[StateCopy]) -> list[StateCopy]:
        """Exchange copies with the partners. Returns the complete ones, with their checksums."""
        checksum = torch.tensor([_checksum(own_copy.blocks)])
        theirs = [torch.zeros(1, dtype=torch.int64) for _ in expected]
        works: list[dist.Work | None] = []
        if self._group is not None:
            for message in (checksum, *_messages(own_copy.blocks)):
                works.append(dist.isend(message, self._partners[self._rank], group=self._group))
            for number, copy in zip(theirs, expected, strict=True):
                for message in (number, *_messages(copy.blocks)):
                    works.append(dist.irecv(message, copy.origin, group=self._group))
        for work in works:
            assert work is not None
            work.wait()
        received = [replace(copy, checksum=int(number)) for number, copy in zip(theirs, expected, strict=True)]
        for copy in received:
            _check(copy)
        return [replace(own_copy, checksum=int(checksum)), *received]


def hand_over(copies: StateCopies, step: int, moves: Sequence[tuple[int, int, int]]) -> None:
    """Send copies of a step to other ranks of the torch world. A collective.

    Each move is (rank that had the state, sender, receiver). Raises DataError if the bytes of a copy changed on the
    way.
    """
    rank = dist.get_rank()
    # Descriptions alone: the blocks travel as tensors.
    descriptions = {
        copy.origin: replace(copy, blocks={}) for copy in copies.complete_copies.values() if copy.step == step
    }
    everyone = signed.gather(descriptions, purpose="handed over copies")
    for origin, sender, receiver in moves:
        if rank == sender:
            for message in _messages(copies.complete_copies[step, origin].blocks):
                dist.send(message, receiver)
        elif rank == receiver:
            description = everyone[sender][origin]
            blocks = _blocks_for(description.layouts)
            for message in _messages(blocks):
                dist.recv(message, sender)
            copies.complete_copies[step, origin] = replace(description, blocks=blocks)
            _check(copies.complete_copies[step, origin])


def restore(
    copies: StateCopies, step: int, models: Mapping[str, Model], layout: str, topology: RankTopology
) -> tuple[dict[str, Any], int]:
    """Load the state after a step from the copies of all ranks into the models. A collective over the trainer's world.

    Returns the driver's values, and the bytes received from other ranks. Each element comes from the nearest rank that
    holds it. Random numbers are restored if `layout`, the words for the parallel sizes, is that of the copies.
    `StateCopies.drop_damaged` must have checked the copies.
    """
    step_copies = [copy for (of_step, _), copy in copies.complete_copies.items() if of_step == step]
    common = {copy.origin: copy.common for copy in step_copies}
    own_sources = {
        (dtype, copy.origin): pieces for copy in step_copies for dtype, pieces in copy.layouts.items() if pieces
    }
    described = signed.gather((common, own_sources))
    everyone = {origin: values for common_values, _ in described for origin, values in common_values.items()}
    sources = [pieces_of_rank for _, pieces_of_rank in described]
    # Before the tensors: it says which frozen models belong to the state.
    with restore_common_state(models, everyone, layout) as saved:
        parts = list(state_parts(saved))
        destinations = signed.gather(_live_layouts(parts))
        dtypes = sorted({dtype for layouts in destinations for dtype in layouts})
        received = sum(_move(dtype, sources, destinations, step_copies, parts, topology) for dtype in dtypes)
    return everyone[min(everyone)]["driver"], received


def _move(
    dtype: str,
    sources: Sequence[Mapping[tuple[str, int], Layout]],
    destinations: Sequence[Layouts],
    step_copies: Sequence[StateCopy],
    parts: Sequence[StatePart],
    topology: RankTopology,
) -> int:
    """Copy all parts of one dtype from the copies of all ranks into the live tensors. A collective.

    Returns the bytes received from other ranks.
    """
    element = getattr(torch, dtype)
    plan = make_plan(
        [tuple(p for (kind, _), pieces in layouts.items() if kind == dtype for p in pieces) for layouts in sources],
        [layouts.get(dtype, ()) for layouts in destinations],
        itemsize=element.itemsize,
        bucket_bytes=_BUCKET_BYTES,
        topology=topology,
    )
    blocks = {_storage(copy.origin): copy.blocks[dtype].view(element) for copy in step_copies if dtype in copy.blocks}
    live = {_place(part): part.values for part in parts if _dtype(part) == dtype}
    report = Transport(plan.for_rank(dist.get_rank()), blocks, live, dtype=element).reshard()
    return report.num_bytes["received"]


def _copy_parts(parts: Sequence[StatePart], spare: Mapping[str, Tensor] | None) -> tuple[Layouts, dict[str, Tensor]]:
    """Return the layouts of the parts, and host copies of their values: one flat uint8 block [bytes] per dtype.

    Blocks of `spare` are overwritten and used where they have the right size.
    """
    origin, is_on_gpu = _storage(dist.get_rank()), device.current().type == "cuda"
    placed: dict[str, list[tuple[StatePart, int]]] = {}
    layouts: dict[str, Layout] = {}
    for dtype in sorted({_dtype(part) for part in parts}):
        parts_of_dtype = [part for part in parts if _dtype(part) == dtype]
        ends = list(accumulate((part.values.numel() for part in parts_of_dtype), initial=0))
        placed[dtype] = list(zip(parts_of_dtype, ends[:-1], strict=True))
        layouts[dtype] = tuple(_piece(part, origin, offset) for part, offset in placed[dtype])
    blocks = _blocks_for(layouts, spare)
    for dtype, block in blocks.items():
        flat = block.view(getattr(torch, dtype))
        for part, offset in placed[dtype]:
            values = part.values.reshape(-1)
            flat[offset : offset + values.numel()].copy_(values, non_blocking=is_on_gpu)
    if is_on_gpu:
        torch.cuda.synchronize()
    return layouts, blocks


def _blocks_for(layouts: Layouts, spare: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return blocks [bytes] for a copy with these layouts: those of `spare` with the right size, else new ones."""
    blocks = {}
    for dtype, pieces in layouts.items():
        num_bytes = sum(piece.box.numel for piece in pieces) * getattr(torch, dtype).itemsize
        # Page-locked memory makes copies from a GPU fast. Allocating it is slow, so blocks are used again.
        block = (spare or {}).get(dtype)
        has_size = block is not None and block.nbytes == num_bytes
        pin = device.current().type == "cuda"
        blocks[dtype] = block if has_size else torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pin)
    return blocks


def _messages(blocks: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the blocks [bytes] cut into messages, in an order that sender and receiver share."""
    return [part for dtype in sorted(blocks) for part in blocks[dtype].split(_MESSAGE_BYTES)]


def _checksum(blocks: Mapping[str, Tensor]) -> int:
    checksum = 0
    for dtype in sorted(blocks):
        checksum = zlib.crc32(blocks[dtype].numpy().data, checksum)
    return checksum


def _check(copy: StateCopy) -> None:
    if (checksum := _checksum(copy.blocks)) != copy.checksum:
        raise DataError(_damage_text(copy, checksum))


def _damage_text(copy: StateCopy, checksum: int) -> str:
    return (
        f"the copy of rank {copy.origin}'s state after step {copy.step} has the checksum {checksum:08x}, expected "
        f"{copy.checksum:08x}: its memory or its transport is faulty"
    )


def _live_layouts(parts: Sequence[StatePart]) -> dict[str, Layout]:
    pieces_by_dtype: dict[str, list[Piece]] = {}
    for part in parts:
        pieces_by_dtype.setdefault(_dtype(part), []).append(_piece(part, _place(part), 0))
    return {dtype: tuple(pieces) for dtype, pieces in pieces_by_dtype.items()}


def _piece(part: StatePart, storage: str, offset: int) -> Piece:
    # Scalars, such as a temperature, have no index range; they count as tensors of one element.
    start, shape = part.start or (0,), tuple(part.values.shape) or (1,)
    box = Box(part.name, start, tuple(a + n for a, n in zip(start, shape, strict=True)))
    return Piece(box, storage, offset, contiguous_strides(shape))


def _place(part: StatePart) -> str:
    """Return the name of a live part's storage, unique on this rank."""
    return f"{part.name}@{part.start}"


def _storage(origin: int) -> str:
    return f"copy of rank {origin}"


def _dtype(part: StatePart) -> str:
    return str(part.values.dtype).removeprefix("torch.")
