"""Manifests of folders: size and sha256 of every file, written with the folder and checked before use.

The formats have no checksums of their own. Without a manifest, a changed weight would load unnoticed.
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

from megarl.files.atomic import raise_storage_errors, replace_folder, replace_text, sync
from megarl.files.model_folder import max_values_of
from megarl.files.strict_json import loads
from megarl.types import ConfigError, DataError

MANIFEST = "manifest.json"

# Files are copied in blocks of 4 MiB: large enough for full disk speed, without a whole file in memory.
_BLOCK_BYTES = 1 << 22
# Far below the usual limit of 1024 open files of a process.
_MAX_OPEN_FILES = 256


class ManifestWriter:
    """Writes files into a folder, and hashes every byte for the folder's manifest."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sizes: dict[str, int] = {}
        self._hash_of_file: dict[str, Any] = {}
        self._hasher = ThreadPoolExecutor(1)
        self._open_files: dict[str, IO[bytes]] = {}

    def append(self, name: str, data: bytes | memoryview) -> int:
        """Append data to a file; create it if missing. Returns the data's offset in bytes."""
        start = self.sizes.setdefault(name, 0)
        # Hashing uses the CPU and writing waits for the disk: run both at once. sha256 releases the GIL.
        hash_update = self._hasher.submit(self._hash_of_file.setdefault(name, hashlib.sha256()).update, data)
        self._file(name).write(data)
        hash_update.result()
        self.sizes[name] = start + len(data)
        return start

    def _file(self, name: str) -> IO[bytes]:
        """Return the open file `name`. Opening a file for each write would be many times slower."""
        if name not in self._open_files:
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if len(self._open_files) == _MAX_OPEN_FILES:
                self._open_files.pop(next(iter(self._open_files))).close()
            self._open_files[name] = path.open("ab")
        return self._open_files[name]

    def stream(self, name: str) -> IO[bytes]:
        return cast(IO[bytes], _Stream(self, name))

    def copy(self, source: Path, name: str) -> None:
        # An empty file must be in the manifest too.
        self.append(name, b"")
        with source.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                self.append(name, block)

    @property
    def files(self) -> dict[str, dict[str, Any]]:
        """Size and sha256 of each file written so far."""
        return {
            name: {"size": size, "sha256": self._hash_of_file[name].hexdigest()} for name, size in self.sizes.items()
        }

    def close(self, layout: Mapping[str, Any]) -> None:
        """Write the manifest: name, size and sha256 of each file in the folder."""
        self.release()
        write_manifest(self.folder, self.files, layout)

    def release(self, *, durable: bool = False) -> None:
        """Close all files. `durable`: write them to the disk first (fsync)."""
        self._hasher.shutdown()
        while self._open_files:
            with self._open_files.popitem()[1] as file:
                if durable:
                    file.flush()
                    os.fsync(file.fileno())


class _Stream:
    """File object that writes through `ManifestWriter`, with the methods that torch.save needs."""

    def __init__(self, manifest: ManifestWriter, name: str) -> None:
        self._manifest, self._name = manifest, name

    def write(self, data: bytes | memoryview) -> int:
        self._manifest.append(self._name, data)
        return len(data)

    def tell(self) -> int:
        return self._manifest.sizes.get(self._name, 0)

    def flush(self) -> None: ...


def write_manifest(folder: Path, files: Mapping[str, Mapping[str, Any]], layout: Mapping[str, Any]) -> None:
    manifest = {
        "files": dict(sorted(files.items())),
        "versions": {package: version(package) for package in ("megarl", "torch", "megatron-core", "safetensors")},
        "layout": dict(layout),
    }
    replace_text(folder / MANIFEST, json.dumps(manifest, indent=2) + "\n")


def complete_manifest(folder: Path, files: Mapping[str, Mapping[str, Any]], layout: Mapping[str, Any]) -> None:
    """Write a folder's manifest. The ranks have hashed and synced `files`; all further files are hashed now."""
    unhashed_paths = [path for path in folder.iterdir() if path.name not in files]
    for path in unhashed_paths:
        sync(path)
    write_manifest(folder, {**files, **{path.name: file_record(path) for path in unhashed_paths}}, layout)


@contextmanager
def new_folder(folder: Path) -> Iterator[ManifestWriter]:
    """Create a folder. It appears at the end of this context, and only without an error.

    Raises ConfigError if the folder exists and is not empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder}: exists already. Choose another --out, or remove it.")
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
    """Compare the sizes of a folder's files with its manifest. Returns each file's sha256; empty without a manifest.

    Raises DataError for a missing file or a wrong size, StorageError for an unreadable file.
    """
    path = folder / MANIFEST
    try:
        with raise_storage_errors(path):
            if not path.exists():
                return {}
            content = path.read_bytes()
        files = loads(content, max_values_of(MANIFEST))["files"]
        expected = {name: (entry["size"], entry["sha256"]) for name, entry in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: cannot be read ({error}). Copy the folder again.") from None
    for name, (size, _) in expected.items():
        # A manifest comes with a downloaded folder. It must not make megarl read other files.
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise DataError(f"{path}: {name!r} is not a file of this folder. Copy the folder again.")
        with raise_storage_errors(folder / name):
            actual_size = (folder / name).stat().st_size if (folder / name).is_file() else None
        if actual_size is None:
            raise DataError(f"{folder / name}: not found, although {MANIFEST} lists it. Copy the folder again.")
        if actual_size != size:
            raise DataError(
                f"{folder / name}: {actual_size} bytes where {MANIFEST} says {size}. Copy the folder again."
            )
    return {name: sha256 for name, (_, sha256) in expected.items()}


def check_hashes(folder: Path, expected: Mapping[str, str]) -> None:
    """Read every file and compare its sha256 with the expected one.

    Raises DataError naming the first file that differs, StorageError for an unreadable file.
    """
    with raise_storage_errors(folder), ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        hashes = pool.map(lambda name: file_record(folder / name)["sha256"], expected)
        for (name, sha256), actual in zip(expected.items(), hashes, strict=True):
            if actual != sha256:
                raise DataError(
                    f"{folder / name}: its sha256 is {actual}, {MANIFEST} says {sha256}. Copy the folder again."
                )


def canonical_sha256(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def file_record(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "size": file.tell()}
