"""Blank the machine code of other GPU architectures in shared libraries.

nvcc stores a translation unit's code in a container (a "fat binary") with an entry for each architecture. A section of
the library holds all containers. The driver chooses an entry of a container by the headers alone, and reads no other.
Blanking writes zeros over the code of entries that the driver of one architecture never chooses. Headers and offsets
stay, so the choice stays the same, and compression removes the zeros. The chosen code is not touched.

The layout was read in libraries of CUDA 12.8 to 13.0. Anything that does not fit it is an error, not a guess.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

SECTIONS = (".nv_fatbin", "__nv_relfatbin")
_ELF_64_LITTLE = b"\x7fELF\x02\x01"
# Type of a section that takes no bytes in the file.
_NO_CONTENT = 8
_MAGIC = 0xBA55ED50
# Magic number, version, size of this header, size of the entries.
_CONTAINER = struct.Struct("<IHHQ")
# Kind, version, size of this header, size of the padded code, 12 bytes unused here, architecture, 8 unused, flags.
_ENTRY = struct.Struct("<HHIQ12xI8xQ")
_KINDS: dict[int, Literal["ptx", "cubin"]] = {1: "ptx", 2: "cubin"}
# Code for one architecture alone (sm_90a), and for a family such as sm_100 and sm_103 (sm_100f).
_ALONE, _FAMILY = 1 << 20, 1 << 21


class FatBinaryError(ValueError):
    """A section's content is not laid out as this module knows it."""


@dataclass(frozen=True)
class Code:
    """An entry of a container: code for an architecture, as machine code or as PTX that the driver compiles.

    `kind` is None for kinds unknown here. `number` is 90 for sm_90. `reach` says on which other architectures it runs.
    """

    kind: Literal["ptx", "cubin"] | None
    number: int
    reach: Literal["upwards", "family", "alone"]
    offset: int
    size: int

    def runs_on(self, architecture: int) -> bool:
        if self.reach == "alone":
            return self.number == architecture
        is_same_generation = self.number // 10 == architecture // 10
        return self.number <= architecture and (is_same_generation or (self.kind == "ptx" and self.reach == "upwards"))


def choose(container: Sequence[Code], architecture: int) -> list[Code]:
    """Return the entries that a driver may choose for an architecture, and those of unknown kinds.

    A driver prefers machine code for exactly this architecture. Next is machine code for an older one of the same
    generation, then the newest PTX.
    """
    machine_code = [code for code in container if code.kind == "cubin" and code.runs_on(architecture)]
    exact = [code for code in machine_code if code.number == architecture]
    ptx = [code for code in container if code.kind == "ptx" and code.runs_on(architecture)]
    newest_ptx = [code for code in ptx if code.number == max(newer.number for newer in ptx)]
    unknown = [code for code in container if code.kind is None]
    return unknown + (exact or machine_code or newest_ptx)


def read_containers(library: mmap.mmap | bytes, name: str) -> list[list[Code]]:
    """Return the containers of a library's sections. Files of other formats have none.

    `name` appears in errors. Raises FatBinaryError.
    """
    if library[: len(_ELF_64_LITTLE)] != _ELF_64_LITTLE:
        return []
    try:
        sections = list(_find_sections(library))
        return [container for start, end in sections for container in _read_section(library, start, end)]
    # An offset of 2**63 or more is no index.
    except (struct.error, OverflowError, _LayoutError) as error:
        raise FatBinaryError(f"{name}: a section with GPU code cannot be read ({error})") from error


def blank_other_architectures(path: Path, architecture: int) -> int:
    """Write zeros over code that a driver of this architecture never chooses. Return the number of bytes.

    Raises FatBinaryError, and then leaves the file as it was.
    """
    with open(path, "r+b") as file:
        # An empty file cannot be mapped.
        if file.read(len(_ELF_64_LITTLE)) != _ELF_64_LITTLE:
            return 0
        with mmap.mmap(file.fileno(), 0) as library:
            unused = [
                code
                for container in read_containers(library, str(path))
                for code in container
                if code not in choose(container, architecture)
            ]
            for code in unused:
                library[code.offset : code.offset + code.size] = bytes(code.size)
    return sum(code.size for code in unused)


class _LayoutError(ValueError):
    """Names what did not fit, and where."""


def _find_sections(library: mmap.mmap | bytes) -> Iterator[tuple[int, int]]:
    """Yield start and end of each section with GPU code."""
    (table,) = struct.unpack_from("<Q", library, 40)
    header_size, count, names_index = struct.unpack_from("<HHH", library, 58)
    # Name, type, flags, address, offset, size.
    headers = [struct.unpack_from("<IIQQQQ", library, table + index * header_size) for index in range(count)]
    if not headers:
        return
    if names_index >= count:
        raise _LayoutError(f"section {names_index} of {count} is to hold the names")
    names = headers[names_index][4]
    section_names = [name.encode() + b"\0" for name in SECTIONS]
    for name, kind, _, _, offset, size in headers:
        begin = names + name
        if kind == _NO_CONTENT or not any(library[begin : begin + len(text)] == text for text in section_names):
            continue
        if offset + size > len(library):
            raise _LayoutError(f"a section ends at byte {offset + size}, the file at {len(library)}")
        yield offset, offset + size


def _read_section(library: mmap.mmap | bytes, start: int, end: int) -> Iterator[list[Code]]:
    position = start
    while position < end:
        # Containers begin at multiples of 8 bytes.
        if library[position : position + 8] == bytes(8):
            position += 8
            continue
        magic, _, header_size, size = _CONTAINER.unpack_from(library, position)
        if magic != _MAGIC or header_size < _CONTAINER.size:
            raise _LayoutError(f"no container begins at byte {position}")
        first, position = position + header_size, position + header_size + size
        if position > end:
            raise _LayoutError(f"the container before byte {position} ends after its section")
        yield list(_read_entries(library, first, position))


def _read_entries(library: mmap.mmap | bytes, start: int, end: int) -> Iterator[Code]:
    position = start
    while position < end:
        kind, _, header_size, size, number, flags = _ENTRY.unpack_from(library, position)
        offset = position + header_size
        if header_size < _ENTRY.size or offset + size > end:
            raise _LayoutError(f"the entry at byte {position} does not end within its container")
        reach = "alone" if flags & _ALONE else "family" if flags & _FAMILY else "upwards"
        yield Code(_KINDS.get(kind), number, reach, offset, size)
        position = offset + size
