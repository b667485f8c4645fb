"""Folders whose files are known by size and sha256: written with a manifest, checked against it.

`torch_dist` checkpoints and model folders carry no checksums of their own: a changed weight would load unseen.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from megarl.checkpoint.safetensors import replace_folder
from megarl.files.atomic import replace_text, storage_faults_named
from megarl.types import ConfigError, DataError

MANIFEST = "manifest.json"

_BLOCK_BYTES = 1 << 22
_MOST_OPEN = 256


class ManifestWriter:
    """A folder being written: every byte goes through here and is hashed on its way."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sizes: dict[str, int] = {}
        self._hashes: dict[str, Any] = {}
        self._hasher = ThreadPoolExecutor(1)
        self._open: dict[str, IO[bytes]] = {}

    def append(self, name: str, data: bytes | memoryview) -> int:
        """Add to the end of a file, which this makes if need be; returns where the data begins."""
        start = self.sizes.setdefault(name, 0)
        # Disk and hash take turns at waiting: do both at once.
        hashed = self._hasher.submit(self._hashes.setdefault(name, hashlib.sha256()).update, data)
        self._file(name).write(data)
        hashed.result()
        self.sizes[name] = start + len(data)
        return start

    def _file(self, name: str) -> IO[bytes]:
        """The open file; opening and closing it around each write would make a file system's work many times longer."""
        if name not in self._open:
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if len(self._open) == _MOST_OPEN:
                self._open.pop(next(iter(self._open))).close()
            self._open[name] = path.open("ab")
        return self._open[name]

    def stream(self, name: str) -> IO[bytes]:
        """The end of a file, for a writer that wants an open one."""
        return cast(IO[bytes], _Stream(self, name))

    def copy(self, source: Path, name: str) -> None:
        """Take a file over byte for byte."""
        self.append(name, b"")
        with source.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                self.append(name, block)

    @property
    def files(self) -> dict[str, dict[str, Any]]:
        """Size and sha256 of each file."""
        return {name: {"size": size, "sha256": self._hashes[name].hexdigest()} for name, size in self.sizes.items()}

    def close(self, layout: Mapping[str, Any]) -> None:
        """Write the manifest; see `write_manifest`."""
        self.release()
        write_manifest(self.folder, self.files, layout)

    def release(self, *, durable: bool = False) -> None:
        """Close all files, after the disk has them if `durable`."""
        self._hasher.shutdown()
        while self._open:
            with self._open.popitem()[1] as file:
                if durable:
                    file.flush()
                    os.fsync(file.fileno())


class _Stream:
    def __init__(self, manifest: ManifestWriter, name: str) -> None:
        self._manifest, self._name = manifest, name

    def write(self, data: bytes | memoryview) -> int:
        self._manifest.append(self._name, data)
        return len(data)

    def tell(self) -> int:
        return self._manifest.sizes.get(self._name, 0)

    def flush(self) -> None: ...


def write_manifest(folder: Path, files: Mapping[str, Mapping[str, Any]], layout: Mapping[str, Any]) -> None:
    """Write files with size and sha256, versions, and what the caller says of the layout."""
    manifest = {
        "files": dict(sorted(files.items())),
        "versions": {package: version(package) for package in ("megarl", "torch", "megatron-core", "safetensors")},
        "layout": dict(layout),
    }
    replace_text(folder / MANIFEST, json.dumps(manifest, indent=2) + "\n")


@contextmanager
def new_folder(folder: Path) -> Iterator[ManifestWriter]:
    """A folder that appears when the body has ended well, and else not at all. Raises ConfigError if it is there."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder}: is there already. Choose another --out, or remove it.")
    partial = folder.absolute().with_name(f".{folder.absolute().name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    manifest = ManifestWriter(partial)
    try:
        yield manifest
        replace_folder(partial, folder.absolute())
    finally:
        manifest.release()
        shutil.rmtree(partial, ignore_errors=True)


def check_sizes(folder: Path) -> dict[str, str]:
    """The sha256 that a folder's manifest gives for each file, none without one.

    Raises DataError for a file that is missing or of another size, StorageError for one that cannot be looked at.
    """
    path = folder / MANIFEST
    try:
        with storage_faults_named(path):
            if not path.exists():
                return {}
            content = path.read_bytes()
        files = json.loads(content)["files"]
        expected = {name: (entry["size"], entry["sha256"]) for name, entry in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: cannot be read ({error}). Copy the folder again.") from None
    for name, (size, _) in expected.items():
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise DataError(f"{path}: {name!r} is no file of this folder.")
        with storage_faults_named(folder / name):
            found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found is None:
            raise DataError(f"{folder / name}: not found, but in {MANIFEST}. Copy the folder again.")
        if found != size:
            raise DataError(f"{folder / name}: {found} bytes where {MANIFEST} says {size}. Copy the folder again.")
    return {name: sha256 for name, (_, sha256) in expected.items()}


def check_hashes(folder: Path, expected: Mapping[str, str]) -> None:
    """Read every file.

    Raises DataError naming the first whose contents are not those of the manifest, StorageError for one that cannot be
    read.
    """
    with storage_faults_named(folder), ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        found = pool.map(lambda name: file_record(folder / name)["sha256"], expected)
        for (name, sha256), actual in zip(expected.items(), found, strict=True):
            if actual != sha256:
                raise DataError(
                    f"{folder / name}: its sha256 is {actual}, {MANIFEST} says {sha256}. Copy the folder again."
                )


def canonical_sha256(value: Mapping[str, Any]) -> str:
    """The sha256 of a JSON object, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def file_record(path: Path) -> dict[str, Any]:
    """Size and sha256 of a file, read anew."""
    with path.open("rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "size": file.tell()}
