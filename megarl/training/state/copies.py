"""Copies of the training state in host memory: after the loss of a node, a run continues from the last copy instead of
the last checkpoint.

Each rank has a copy of its own part, and of a partner's on another node. The copies are memory files that the node's
agent process holds open, so they outlive the ranks. A restore is a plan of copies between ranks: the new ranks may have
other parallel sizes, and no rank receives an element that it has.
"""

from __future__ import annotations

import hashlib
import hmac
import pickle
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.groups import rendezvous, signed
from megarl.groups.backends import HOST_ONLY
from megarl.platform import background, device
from megarl.platform.memory.memory_file import MemoryFile
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

DESCRIPTION = "description"
"""Name of the part that describes a copy. Other parts are named by their dtypes."""
_SIGNATURE_BYTES = hashlib.sha256().digest_size

Layouts = Mapping[str, Layout]
"""Layout of a copy: pieces by the name of their dtype, such as `float32`."""


FileFields = Mapping[str, Any]
"""Path, size in bytes and CRC-32 checksum of a memory file, as JSON values `path`, `size` and `checksum`."""


@dataclass(frozen=True, slots=True)
class StateCopy:
    """Copy of one rank's part of the training state after a step.

    `origin` is the rank, of `num_ranks`, with this part. `files` have flat blocks [bytes] by dtype. `common` are values
    other than tensors: step counts, random numbers.
    """

    step: int
    origin: int
    num_ranks: int
    layouts: Layouts
    files: Mapping[str, MemoryFile]
    common: Mapping[str, Any]

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files.values())

    def name_of(self, part: str) -> str:
        return f"{self.step}/{self.origin}/{self.num_ranks}/{part}"

    def describe(self) -> bytes:
        """Return all values except the blocks as bytes, signed with the run's key."""
        return _sign((self.step, self.origin, self.num_ranks, self.layouts, self.common))


def open_copies(files: Mapping[str, FileFields]) -> list[StateCopy]:
    """Open copies held by an agent, from their files by name (see `StateCopy.name_of`).

    Raises OSError if the agent has ended, and DataError for a file that this run did not write.
    """
    files_by_copy: dict[str, dict[str, MemoryFile]] = {}
    for name, fields in files.items():
        copy_name, _, part = name.rpartition("/")
        files_by_copy.setdefault(copy_name, {})[part] = MemoryFile.open(fields["path"], fields["size"])
    copies = []
    for files_by_part in files_by_copy.values():
        step, origin, num_ranks, layouts, common = _read_signed(files_by_part.pop(DESCRIPTION).tensor.numpy().tobytes())
        copies.append(StateCopy(step, origin, num_ranks, layouts, files_by_part, common))
    return copies


class StateCopier:
    """Makes copies of this rank's state, and exchanges them with partners during the next step.

    Building it is a collective over the trainer's world. `topology` maps the ranks to nodes.
    """

    def __init__(self, topology: RankTopology) -> None:
        """Create the group for exchanges with partners. A collective."""
        self._rank, self._partners = dist.get_rank(), partners(topology)
        has_partners = self._partners != list(range(len(topology)))
        # A separate group, because a thread sends its messages at any time of the training step.
        group = dist.new_group(backend=HOST_ONLY, group_desc="state copies") if has_partners else None
        assert not isinstance(group, int)
        self._group = group
        self._layouts: dict[int, Layouts] = {}
        self._newest_copies: dict[int, StateCopy] = {}
        """Copies of the newest complete step in this rank's memory, by origin."""
        self._reusable_files: dict[int, Mapping[str, MemoryFile]] = {}
        """Files of the step before, by origin. The next copies overwrite them."""
        self._exchange: Future[dict[str, FileFields]] | None = None
        self._copies_in_exchange: list[StateCopy] = []
        self._complete_files: dict[str, FileFields] | None = None
        """Files of the newest complete copies; None while an exchange runs."""
        self._descriptions: list[MemoryFile] = []
        """Files with descriptions of the newest copies, needed until the agent has opened them."""

    def begin_copies(self, step: int, models: Mapping[str, Model], layout: str, **driver: Any) -> int:
        """Copy the state after a step to host memory, and start sending it to this rank's partner. A collective.

        `restore_from_copies` returns the values `driver`. Returns the bytes of the copy. Call `finish_copies` before
        the next copy; until then the copies of the step before stay.
        """
        parts = [part for part in state_parts(models) if part.is_main]
        layouts, files = _copy_parts(parts, self._reusable_files.get(self._rank))
        common = common_state(models, layout) | {"driver": driver}
        own_copy = StateCopy(step, self._rank, len(self._partners), layouts, files, common)
        # Layouts are long and rarely change, so only changed layouts are sent. A reference model whose weights change
        # for the first time adds parts.
        changed_layouts = None if self._layouts.get(self._rank) == layouts else layouts
        states = signed.gather((common, changed_layouts), purpose="values and layouts of state copies")
        common_by_origin = [values for values, _ in states]
        self._layouts |= {
            origin: new_layouts for origin, (_, new_layouts) in enumerate(states) if new_layouts is not None
        }
        partner_copies = [
            StateCopy(
                step,
                origin,
                own_copy.num_ranks,
                self._layouts[origin],
                _files_for(self._layouts[origin], self._reusable_files.get(origin)),
                values,
            )
            for origin, values in enumerate(common_by_origin)
            if self._partners[origin] == self._rank and origin != self._rank
        ]
        self._reusable_files, self._complete_files = {}, None
        self._copies_in_exchange = [own_copy, *partner_copies]
        self._exchange = background.begin(lambda: self._exchange_copies(own_copy, partner_copies))
        return own_copy.num_bytes

    def finish_copies(self, *, wait: bool) -> dict[str, FileFields] | None:
        """Return the files of this rank's complete copies by name; None if they are not complete.

        `wait` blocks until they are. This rank's agent must open the files before the next `begin_copies`. Raises the
        error that ended the exchange, such as the loss of a partner.
        """
        if self._exchange is not None and (wait or self._exchange.done()):
            exchange, self._exchange = self._exchange, None
            self._complete_files = background.finish(exchange)
            self._reusable_files = {origin: copy.files for origin, copy in self._newest_copies.items()}
            self._newest_copies = {copy.origin: copy for copy in self._copies_in_exchange}
        # None until this rank's copies are complete; the driver asks again.
        return self._complete_files

    def _exchange_copies(self, own_copy: StateCopy, partner_copies: Sequence[StateCopy]) -> dict[str, FileFields]:
        """Send the own copy and receive the partners'. Returns the files of all of them by name.

        Raises DataError if bytes changed on the way.
        """
        checksums = torch.tensor([_checksum(own_copy.files[dtype]) for dtype in sorted(own_copy.files)])
        partner_checksums = [torch.zeros(len(copy.files), dtype=torch.int64) for copy in partner_copies]
        transfers: list[dist.Work | None] = []
        if self._group is not None:
            for message in (checksums, *_messages(own_copy.files)):
                transfers.append(dist.isend(message, self._partners[self._rank], group=self._group))
            for copy_checksums, copy in zip(partner_checksums, partner_copies, strict=True):
                for message in (copy_checksums, *_messages(copy.files)):
                    transfers.append(dist.irecv(message, copy.origin, group=self._group))
        for transfer in transfers:
            assert transfer is not None
            transfer.wait()
        # Check the received files. Describe all files for the agent that opens them.
        fields: dict[str, FileFields] = {}
        self._descriptions = []
        for copy, copy_checksums in zip((own_copy, *partner_copies), (checksums, *partner_checksums), strict=True):
            for dtype, checksum in zip(sorted(copy.files), copy_checksums.tolist(), strict=True):
                if copy is not own_copy:
                    _refuse_changed_bytes(copy, dtype, checksum)
                fields[copy.name_of(dtype)] = _file_fields(copy.files[dtype], checksum)
            description = _make_file(copy.describe())
            self._descriptions.append(description)
            fields[copy.name_of(DESCRIPTION)] = _file_fields(description, _checksum(description))
        return fields


def restore_from_copies(
    step_copies: Sequence[StateCopy], models: Mapping[str, Model], layout: str, topology: RankTopology
) -> tuple[dict[str, Any], int]:
    """Load the state after a step from the copies of all ranks into the models.

    A collective over the trainer's world. `step_copies` are the copies on this rank's node. Each element comes from the
    nearest rank with it. Random numbers are restored if `layout`, the parallel sizes in words, is that of the copies.
    Returns the driver's values, and the bytes received from other nodes.
    """
    origins_of_ranks = signed.gather([copy.origin for copy in step_copies])
    # Each copy is described once: the descriptions of a thousand ranks are long.
    describing_ranks = {
        origin: rank for rank, origins in reversed(list(enumerate(origins_of_ranks))) for origin in origins
    }
    descriptions_of_rank = {
        copy.origin: (copy.common, copy.layouts)
        for copy in step_copies
        if describing_ranks[copy.origin] == dist.get_rank()
    }
    description_of_origin: dict[int, tuple[Mapping[str, Any], Layouts]] = {}
    for descriptions in signed.gather(descriptions_of_rank):
        description_of_origin |= descriptions
    common_by_origin = {origin: common for origin, (common, _) in description_of_origin.items()}
    sources = [
        {
            (dtype, origin): pieces
            for origin in origins
            for dtype, pieces in description_of_origin[origin][1].items()
            if pieces
        }
        for origins in origins_of_ranks
    ]
    # Enter this context before listing the tensors, because it selects the frozen models of the state.
    with restore_common_state(models, common_by_origin, layout) as saved_models:
        parts = list(state_parts(saved_models))
        destinations = signed.gather(_live_layouts(parts))
        dtypes = sorted({dtype for layouts in destinations for dtype in layouts})
        received_bytes = sum(
            _restore_dtype(dtype, sources, destinations, step_copies, parts, topology) for dtype in dtypes
        )
    return common_by_origin[min(common_by_origin)]["driver"], received_bytes


def _restore_dtype(
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
    element_dtype = getattr(torch, dtype)
    plan = make_plan(
        [
            tuple(piece for (dtype_name, _), pieces in layouts.items() if dtype_name == dtype for piece in pieces)
            for layouts in sources
        ],
        [layouts.get(dtype, ()) for layouts in destinations],
        itemsize=element_dtype.itemsize,
        bucket_bytes=_BUCKET_BYTES,
        topology=topology,
    )
    copied_tensors = {
        _copy_storage(copy.origin): copy.files[dtype].tensor.view(element_dtype)
        for copy in step_copies
        if dtype in copy.files
    }
    live_tensors = {_live_storage(part): part.values for part in parts if _dtype(part) == dtype}
    report = Transport(plan.for_rank(dist.get_rank()), copied_tensors, live_tensors, dtype=element_dtype).reshard()
    return report.num_bytes["received"]


def _copy_parts(
    parts: Sequence[StatePart], reusable_files: Mapping[str, MemoryFile] | None
) -> tuple[Layouts, dict[str, MemoryFile]]:
    """Copy the values of the parts to host memory: one file with a flat block per dtype. Returns layouts and files.

    Files of `reusable_files` with the right size are overwritten.
    """
    storage, is_on_gpu = _copy_storage(dist.get_rank()), device.current().type == "cuda"
    offsets_by_dtype: dict[str, list[tuple[StatePart, int]]] = {}
    layouts: dict[str, Layout] = {}
    for dtype in sorted({_dtype(part) for part in parts}):
        parts_of_dtype = [part for part in parts if _dtype(part) == dtype]
        part_ends = list(accumulate((part.values.numel() for part in parts_of_dtype), initial=0))
        offsets_by_dtype[dtype] = list(zip(parts_of_dtype, part_ends[:-1], strict=True))
        layouts[dtype] = tuple(_piece(part, storage, offset=offset) for part, offset in offsets_by_dtype[dtype])
    files = _files_for(layouts, reusable_files)
    for dtype, file in files.items():
        flat_values = file.tensor.view(getattr(torch, dtype))
        for part, offset in offsets_by_dtype[dtype]:
            values = part.values.reshape(-1)
            flat_values[offset : offset + values.numel()].copy_(values, non_blocking=is_on_gpu)
    if is_on_gpu:
        torch.cuda.synchronize()
    return layouts, files


def _files_for(layouts: Layouts, reusable_files: Mapping[str, MemoryFile] | None = None) -> dict[str, MemoryFile]:
    """Return a file per dtype of a copy with these layouts: from `reusable_files` if its size fits, else a new one."""
    files = {}
    for dtype, pieces in layouts.items():
        num_bytes = sum(piece.box.numel for piece in pieces) * getattr(torch, dtype).itemsize
        # Page-locking is slow, so reuse files.
        file = (reusable_files or {}).get(dtype)
        files[dtype] = file if file is not None and file.num_bytes == num_bytes else MemoryFile.create(num_bytes)
    return files


def _make_file(data: bytes) -> MemoryFile:
    file = MemoryFile.create(len(data))
    file.tensor.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return file


def _file_fields(file: MemoryFile, checksum: int) -> FileFields:
    return {"path": file.path, "size": file.num_bytes, "checksum": checksum}


def _messages(files: Mapping[str, MemoryFile]) -> list[Tensor]:
    """Cut the blocks [bytes] into messages, in an equal order for sender and receiver."""
    return [part for dtype in sorted(files) for part in files[dtype].tensor.split(_MESSAGE_BYTES)]


def _checksum(file: MemoryFile) -> int:
    return zlib.crc32(file.tensor.numpy().data)


def _refuse_changed_bytes(copy: StateCopy, dtype: str, expected_checksum: int) -> None:
    if (checksum := _checksum(copy.files[dtype])) != expected_checksum:
        raise DataError(
            f"the copy of rank {copy.origin}'s state after step {copy.step} has the checksum {checksum:08x}, expected "
            f"{expected_checksum:08x}: memory or transport is faulty"
        )


def _sign(value: Any) -> bytes:
    data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return _signature(data) + data


def _read_signed(data: bytes) -> Any:
    """Return a value written by `_sign`. Raises DataError, and unpickles nothing, if the signature is wrong."""
    if not hmac.compare_digest(data[:_SIGNATURE_BYTES], _signature(data[_SIGNATURE_BYTES:])):
        raise DataError("a copy of the training state in memory was not written by this run")
    return pickle.loads(data[_SIGNATURE_BYTES:])


def _signature(data: bytes) -> bytes:
    return hmac.digest(rendezvous.derived_key("descriptions of state copies"), data, hashlib.sha256)


def _live_layouts(parts: Sequence[StatePart]) -> dict[str, Layout]:
    """Return the layout of the live parts by dtype. Each part is a storage of its own, so it begins at offset 0."""
    pieces_by_dtype: dict[str, list[Piece]] = {}
    for part in parts:
        pieces_by_dtype.setdefault(_dtype(part), []).append(_piece(part, _live_storage(part), offset=0))
    return {dtype: tuple(pieces) for dtype, pieces in pieces_by_dtype.items()}


def _piece(part: StatePart, storage: str, *, offset: int) -> Piece:
    """Return the place of a part: `offset` elements after the start of `storage`."""
    # Scalars, such as a temperature, have no index range; they count as tensors of one element.
    start, shape = part.start or (0,), tuple(part.values.shape) or (1,)
    box = Box(part.name, start, tuple(first + size for first, size in zip(start, shape, strict=True)))
    return Piece(box, storage, offset, contiguous_strides(shape))


def _live_storage(part: StatePart) -> str:
    return f"{part.name}@{part.start}"


def _copy_storage(origin: int) -> str:
    return f"copy of rank {origin}"


def _dtype(part: StatePart) -> str:
    return str(part.values.dtype).removeprefix("torch.")
