"""Unpack the bundle in this folder into a new one.

    python3 unpack.py DIR [--manifest-sha256 HEX]

Needs Python 3.8 or newer and nothing but its standard library. Checksums of all parts are compared before any is read.
Files are written into DIR alone, under their own names; other entries of an archive are refused. DIR appears once it is
complete. `--manifest-sha256` is the number that was printed where the bundle was made: it shows that the list of
checksums is the one that was made there.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import os
import shutil
import sys
import tarfile
from pathlib import Path, PurePosixPath
from typing import Any

MANIFEST = "manifest.json"
BLOCK = 1 << 20


class BundleError(Exception):
    """The bundle or the folder does not allow to unpack it. The text names what, and a remedy."""


class JoinedParts(io.RawIOBase):
    """Reads files one after the other, as if they were one."""

    def __init__(self, paths: list[Path]) -> None:
        self._paths = iter(paths)
        self._file: io.BufferedReader | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        # Nothing is asked for, so 0 bytes are not the end of a file.
        if not len(buffer):
            return 0
        while True:
            if self._file is None:
                path = next(self._paths, None)
                if path is None:
                    return 0
                self._file = open(path, "rb")  # noqa: SIM115
            count = self._file.readinto(buffer)
            if count:
                return count
            self._file.close()
            self._file = None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        super().close()


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(BLOCK), b""):
            digest.update(block)
    return digest.hexdigest()


def read_manifest(bundle: Path, expected: str | None) -> dict[str, Any]:
    """Return the manifest. Raises BundleError if it is missing, damaged or not the expected one."""
    path = bundle / MANIFEST
    if not path.is_file():
        raise BundleError(f"{path}: missing; copy the whole folder of the bundle")
    if expected is not None and sha256(path) != expected.lower():
        raise BundleError(f"{path}: its SHA-256 is {sha256(path)}, not {expected}; copy the bundle again")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        for part in manifest["parts"]:
            # A part is a file of this folder, never one elsewhere.
            if PurePosixPath(part["name"]).name != part["name"] or not part["name"].startswith("part-"):
                raise BundleError(f"{path}: parts: {part['name']!r} is not the name of a part; copy the bundle again")
    except (ValueError, KeyError, TypeError) as error:
        raise BundleError(f"{path}: damaged ({error!r}); copy it again") from error
    return manifest


def check_parts(bundle: Path, parts: list[dict[str, Any]]) -> list[Path]:
    """Return the parts' paths. Raises BundleError for the first that is missing or damaged."""
    paths = []
    for part in parts:
        path = bundle / part["name"]
        if not path.is_file():
            raise BundleError(f"{path}: missing; copy it from where the bundle was made")
        if path.stat().st_size != part["bytes"]:
            raise BundleError(f"{path}: {path.stat().st_size} bytes instead of {part['bytes']}; copy it again")
        if sha256(path) != part["sha256"]:
            raise BundleError(f"{path}: damaged (another SHA-256 than in {MANIFEST}); copy it again")
        paths.append(path)
    return paths


def check_folder(folder: Path, size: int) -> None:
    """Raise BundleError unless the folder is new or empty, with room for so many bytes."""
    if os.path.lexists(folder) and (folder.is_symlink() or not folder.is_dir() or any(folder.iterdir())):
        raise BundleError(f"{folder}: exists already; name a new folder")
    parent = folder.parent
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if free < size:
        raise BundleError(
            f"{folder}: {free >> 20} MiB are free, {size >> 20} MiB needed; name a folder on another disk"
        )


def safe_path(folder: Path, member: tarfile.TarInfo) -> Path:
    """Return where a member is written. Raises BundleError for anything but a file or folder below `folder`."""
    name = PurePosixPath(member.name)
    if name.is_absolute() or ".." in name.parts or not (member.isreg() or member.isdir()):
        raise BundleError(
            f"{member.name!r}: not a file or folder within the bundle; nothing is unpacked, do not use it"
        )
    return folder.joinpath(*name.parts)


def extract(parts: list[Path], folder: Path, size: int) -> int:
    """Write the archive's files into a new folder, and return their number.

    Raises BundleError for entries that are not files or folders, or if they take more than `size` bytes.
    """
    written = number = 0
    joined = io.BufferedReader(JoinedParts(parts), BLOCK)
    with joined, tarfile.open(fileobj=joined, mode="r|xz") as archive:
        for member in archive:
            path = safe_path(folder, member)
            if member.isdir():
                path.mkdir(parents=True, exist_ok=True)
                continue
            written += member.size
            if written > size:
                raise BundleError(f"{member.name!r}: more than the {size} bytes of {MANIFEST}; do not use this bundle")
            source = archive.extractfile(member)
            assert source is not None
            path.parent.mkdir(parents=True, exist_ok=True)
            # "x": an archive that names a file twice is refused.
            with source, open(path, "xb") as target:
                shutil.copyfileobj(source, target, BLOCK)
            path.chmod(0o755 if member.mode & 0o100 else 0o644)
            number += 1
    return number


def unpack(bundle: Path, folder: Path, manifest: dict[str, Any]) -> int:
    """Unpack a bundle into a folder, and return the number of files. Raises BundleError, and then leaves no folder."""
    if importlib.util.find_spec("lzma") is None:
        raise BundleError("this Python lacks the module lzma; unpack with another Python 3")
    size = manifest["unpacked_bytes"]
    check_folder(folder, size)
    parts = check_parts(bundle, manifest["parts"])
    folder.parent.mkdir(parents=True, exist_ok=True)
    incomplete = folder.parent / f".{folder.name}.incomplete-{os.getpid()}"
    incomplete.mkdir()
    try:
        number = extract(parts, incomplete, size)
        os.rename(incomplete, folder)
    except (tarfile.TarError, EOFError, FileExistsError) as error:
        raise BundleError(f"{bundle}: the archive cannot be read ({error}); make the bundle again") from error
    finally:
        shutil.rmtree(incomplete, ignore_errors=True)
    return number


def differences(manifest: dict[str, Any]) -> list[str]:
    """Return what this interpreter differs in from the host that the bundle was made for."""
    lines = []
    python = ".".join(map(str, sys.version_info[:2]))
    if python != manifest["python"]:
        lines.append(f"this is Python {python}, the bundle is for Python {manifest['python']}")
    try:
        torch = importlib.metadata.version("torch").split("+")[0]
    except importlib.metadata.PackageNotFoundError:
        torch = None
    if torch != manifest["torch"]:
        lines.append(f"this Python has torch {torch or 'not at all'}, the bundle is for torch {manifest['torch']}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="DIR", type=Path, help="the folder to make")
    parser.add_argument("--manifest-sha256", metavar="HEX", help="checksum of manifest.json, as printed by the maker")
    options = parser.parse_args()
    bundle = Path(__file__).resolve().parent
    folder = Path(os.path.abspath(options.folder))
    try:
        manifest = read_manifest(bundle, options.manifest_sha256)
        number = unpack(bundle, folder, manifest)
    except BundleError as error:
        print(f"unpack.py: {error}", file=sys.stderr)
        return 1
    for line in differences(manifest):
        print(f"unpack.py: warning: {line}", file=sys.stderr)
    print(f"{number} files in {folder}. In each shell: . {folder}/env.sh")
    if (script := folder / "build_engine.sh").exists():
        print(f"Once, for Transformer Engine's extension, on a machine with CUDA's toolkit: bash {script}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
