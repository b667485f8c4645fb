"""Make a bundle of everything that a GPU host without a network lacks to run megarl.

    python tools/offline_bundle.py --arch sm_90 --torch 2.11 --python 3.12 --out DIR

Run it where the package registry can be reached; no GPU is needed. The host is taken to have CPython, torch and what
torch's wheel brings (`TORCH_BRINGS`). `--host-has` names further packages of the host, which are left out: a file such
as the output of `pip freeze`, or names.

DIR then holds parts of at most `--part-mib`, a list of their checksums, and `unpack.py`. Copy the whole folder. On the
host run `python3 DIR/unpack.py SITE`, then `. SITE/env.sh` in each shell, and start megarl from your clone.

Versions are those of `launch/requirements-gpu-PYTHON.txt`, except torch. vLLM 0.30.0 is built for torch 2.13, but its
extensions use torch's stable interface: it has run with torch 2.11 on an H200. Transformer Engine's extension fits one
torch only. A wheel of it is taken from the folder that `launch/setup.sh` uses (MEGARL_WHEELS). With
`--transformer-engine source` the bundle holds its source: `bash SITE/build_engine.sh` builds it on the host, which
needs CUDA's toolkit there.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import io
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import urllib.request
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from tools.fat_binaries import FatBinaryError, blank_other_architectures
from tools.offline_unpack import MANIFEST, sha256

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120")
"""Architectures that vLLM and Transformer Engine have code for. sm_90 was measured."""
ALL_ARCHITECTURES = "all"
[OWN_TORCH] = [pin.removeprefix("torch==") for pin in PROJECT["project"]["dependencies"] if pin.startswith("torch==")]
TORCHES = {version.rpartition(".")[0]: version for version in ("2.11.0", OWN_TORCH)}
"""The torches of hosts: 2.11 ran vLLM 0.30.0 on an H200, the other one is megarl's own pin."""
PYTHONS = tuple(sorted(path.stem.rpartition("-")[2] for path in ROOT.glob("launch/requirements-gpu-[0-9]*.txt")))
PLATFORM = "x86_64-manylinux_2_31"
"""Hosts have glibc 2.31 or newer: no older one runs llguidance's wheel, which vLLM needs."""
PART_MIB = 58
TORCH_BRINGS = (
    "torch", "triton", "cuda-bindings", "cuda-pathfinder", "cuda-toolkit", "nvidia-cublas", "nvidia-cuda-cupti",
    "nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "nvidia-cudnn-cu13", "nvidia-cufft", "nvidia-cufile",
    "nvidia-curand", "nvidia-cusolver", "nvidia-cusparse", "nvidia-cusparselt-cu13", "nvidia-nccl-cu13",
    "nvidia-nvjitlink", "nvidia-nvshmem-cu13", "nvidia-nvtx",
)  # fmt: skip
"""Packages that come with a CUDA build of torch and must fit it. Small pure Python ones are bundled all the same."""
LEFT_OUT: Mapping[str, str] = {
    "transformer-engine-cu12": "the core for CUDA 12; the one for CUDA 13 is bundled",
    "transformer-engine-torch": "built for the host's torch, see --transformer-engine",
    "flashinfer-python": "compiles and downloads kernels at run time; env.sh switches vLLM's sampler to torch",
    "quack-kernels": "kernels in CUTLASS's Python language, which is left out",
    "nvidia-cutlass-dsl": "compiles kernels at run time for sm_100 and newer",
    "tilelang": "compiles kernels at run time",
    "tokenspeed-mla": "kernels for sm_100",
    "humming-kernels": "compiles kernels at run time",
    "nvidia-cuda-nvcc": "the compiler of FlashInfer",
    "nvidia-cuda-crt": "the compiler of FlashInfer",
    "nvidia-nvvm": "the compiler of FlashInfer",
    "nvidia-cudnn-frontend": "used by FlashInfer",
    "torchvision": "must fit the host's torch; images need it",
    "torchaudio": "must fit the host's torch; audio needs it",
    "torchcodec": "must fit the host's torch; video needs it",
    "pynvvideocodec": "decodes video",
    "opencv-python-headless": "reads images and video",
}
"""Packages of the GPU environment that no bundle holds, and why."""
ADDED: Sequence[str] = PROJECT["dependency-groups"]["engine-imports"]
"""Packages that Transformer Engine imports without declaring them."""
BUILT_WITH: Sequence[str] = PROJECT["dependency-groups"]["engine-build"]
"""Packages that build Transformer Engine's extension."""
BUILD_ENGINE = """\
#!/usr/bin/env bash
# Builds Transformer Engine's extension for the torch of `python3` and adds it to this folder. Takes minutes.
# Needs CUDA's toolkit of torch's version in CUDA_HOME (default: /usr/local/cuda), a C++ compiler and pip.
set -euo pipefail
site="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
. "$site/env.sh"
nvidia="$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia"
export CUDA_HOME="${CUDA_HOME:-/usr/local/cuda}"
export PATH="$CUDA_HOME/bin:$PATH" MAX_JOBS="${MAX_JOBS:-$(nproc)}"
export CPATH="$nvidia/cudnn/include:$nvidia/nccl/include:$nvidia/cu13/include/cccl${CPATH:+:$CPATH}"
NVTE_PYTORCH_FORCE_BUILD=TRUE NVTE_NO_LOCAL_VERSION=1 python3 -m pip install --no-index --no-deps \\
    --no-build-isolation --target "$site" "$site"/engine-source/*.tar.gz
python3 -c 'import transformer_engine.pytorch'
"""
LEFT_OUT_FILES: Mapping[str, str] = {
    "vllm/vllm-rs": "vLLM's server in Rust; megarl does not start it",
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so": "FlashAttention 2; sm_90 runs FlashAttention 3",
}
"""Files that a bundle for sm_90 leaves out, and why."""
ENVIRONMENT = """\
# Source this file: . DIR/env.sh. Packages of this folder then come before those of Python's own.
megarl_site="$(cd "$(dirname "${BASH_SOURCE[0]:-$0}")" && pwd)"
export PYTHONPATH="$megarl_site${PYTHONPATH:+:$PYTHONPATH}" PATH="$megarl_site/bin:$PATH"
# FlashInfer is not in the bundle.
export VLLM_USE_FLASHINFER_SAMPLER=0
# Nothing is to be fetched or sent.
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
unset megarl_site
"""


@dataclasses.dataclass(frozen=True)
class Host:
    """The host that a bundle is for. `packages` maps the names of its packages to versions, None where unknown."""

    architecture: str
    torch: str
    python: str
    packages: Mapping[str, str | None]


@dataclasses.dataclass(frozen=True)
class Row:
    """A package of a bundle, with its bytes. `packed` is exact to about 1 MiB: the compressor reads ahead."""

    package: str
    version: str
    unpacked: int
    blanked: int
    packed: int


def normalise(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def read_host_packages(values: Sequence[str], python: str) -> dict[str, str | None]:
    """Return the packages that `--host-has` names. Raises SystemExit for what is neither a package nor a file."""
    packages: dict[str, str | None] = {}
    needed_packages = {normalise(line.split("==")[0]) for line in _lock_lines(python)}
    for value in values:
        if Path(value).is_file():
            for number, line in enumerate(Path(value).read_text(encoding="utf-8").splitlines(), 1):
                if not line.strip() or line.startswith(("#", "-")):
                    continue
                packages.update([_read_package(line, f"--host-has {value}:{number}")])
            continue
        for text in filter(None, value.split(",")):
            name, version = _read_package(text, "--host-has")
            if name not in needed_packages:
                near = difflib.get_close_matches(name, needed_packages, 1)
                advice = (
                    f"did you mean {near[0]}?" if near else "name a file or packages of launch/requirements-gpu-*.txt"
                )
                raise SystemExit(
                    f"--host-has = {text}: neither a file nor a package that megarl's GPU host needs; {advice}"
                )
            packages[name] = version
    return packages


def _read_package(text: str, place: str) -> tuple[str, str | None]:
    """Return name and version of a line such as `numpy==2.3.5`, `numpy` or `numpy @ file:///wheels/...`."""
    match = re.fullmatch(r"\s*([A-Za-z0-9][\w.-]*)\s*(?:(?:==|\s)\s*([\w.!+-]+)|@.*)?\s*", text)
    if match is None:
        raise SystemExit(f"{place} = {text!r}: not a package; write NAME or NAME==VERSION, as pip freeze does")
    return normalise(match[1]), match[2]


def _lock_lines(python: str) -> list[str]:
    lock = ROOT / f"launch/requirements-gpu-{python}.txt"
    return [line for line in lock.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]


def resolve(host: Host, added: Collection[str] = ADDED) -> list[str]:
    """Return `NAME==VERSION` of each package that the host lacks: megarl's GPU environment and added packages.

    Raises SystemExit if a version of the host's does not fit the others.
    """
    absent = {*TORCH_BRINGS, *LEFT_OUT, *(name for name, version in host.packages.items() if version is None)}
    versions = {name: version for name, version in host.packages.items() if version and name not in absent}
    locked = [line for line in _lock_lines(host.python) if normalise(line.split("==")[0]) not in {*absent, *versions}]
    with tempfile.TemporaryDirectory() as folder:
        files = {
            "excludes": sorted(absent),
            "constraints": [*locked, *(f"{name}=={version}" for name, version in versions.items())],
            "added": [name for name in added if name not in absent],
        }
        for name, lines in files.items():
            Path(folder, name).write_text("\n".join(lines) + "\n", encoding="utf-8")
        options = ["--quiet", "--no-header", "--no-annotate", "--extra", "gpu"]
        options += ["--python-version", host.python, "--python-platform", PLATFORM]
        options += ["--excludes", f"{folder}/excludes", "--constraints", f"{folder}/constraints"]
        output = _run_uv(
            ["pip", "compile", *options, "pyproject.toml", f"{folder}/added"],
            remedy="leave the package out of --host-has: the bundle's own then comes first on the host",
        )
    return [line for line in output.split() if normalise(line.split("==")[0]) not in host.packages]


def _run_uv(arguments: Sequence[str], *, remedy: str) -> str:
    program = Path(sys.executable).parent / "uv"
    if not program.exists():
        raise SystemExit(f"{program}: missing; run this tool with the Python that launch/setup.sh made")
    done = subprocess.run([program, *arguments], cwd=ROOT, text=True, capture_output=True)
    if done.returncode:
        raise SystemExit(f"uv {arguments[0]} {arguments[1]} failed; {remedy}\n{done.stderr.strip()}")
    return done.stdout


def find_engine_wheel(wheels: Path, host: Host) -> Path:
    """Return the wheel with Transformer Engine's extension for the host's torch. Raises SystemExit without one."""
    [version] = [line.split("==")[1] for line in _lock_lines(host.python) if line.startswith("transformer-engine==")]
    tag = "cp" + host.python.replace(".", "")
    name = f"transformer_engine_torch-{version}-{tag}-*.whl"
    for folder in (f"torch-{host.torch}-x86_64", f"torch-{host.torch}+*-x86_64"):
        for wheel in sorted(wheels.glob(f"{folder}/{name}")):
            return wheel
    raise SystemExit(
        f"--transformer-engine = wheel: {wheels} has no torch-{host.torch}*-x86_64/{name}; build it beside a GPU build "
        "of this torch as launch/setup.sh does, name another folder with MEGARL_WHEELS, build it on the host: "
        "--transformer-engine source, or leave Transformer Engine out: --transformer-engine none"
    )


def fetch_engine_source(folder: Path, host: Host) -> Path:
    """Download the source of Transformer Engine's extension, compare its checksum, and return the archive.

    pip and uv would build its metadata, which needs a GPU build of torch. Raises SystemExit.
    """
    [version] = [line.split("==")[1] for line in _lock_lines(host.python) if line.startswith("transformer-engine==")]
    name = "transformer-engine-torch"
    config, request = folder / "uv.toml", folder / "request"
    config.write_text(f'[[dependency-metadata]]\nname = "{name}"\nversion = "{version}"\nrequires-dist = []\n')
    request.write_text(f"{name}=={version}\n")
    options = ["--quiet", "--config-file", str(config), "--no-deps", "--format", "pylock.toml"]
    remedy = "check that the package registry can be reached"
    lock = _run_uv(["pip", "compile", *options, "--python-version", host.python, str(request)], remedy=remedy)
    [package] = tomllib.loads(lock)["packages"]
    archive = folder / f"transformer_engine_torch-{version}.tar.gz"
    try:
        with urllib.request.urlopen(package["sdist"]["url"]) as response:
            archive.write_bytes(response.read())
    except OSError as error:
        raise SystemExit(f"--transformer-engine = source: {error}; {remedy}") from error
    if sha256(archive) != package["sdist"]["hashes"]["sha256"]:
        raise SystemExit(f"--transformer-engine = source: {archive.name} arrived damaged; run this again")
    return archive


def add_engine_source(site: Path, archive: Path) -> None:
    """Put the source of the extension into the bundle, with the script that builds it on the host."""
    (site / "engine-source").mkdir()
    shutil.copy(archive, site / "engine-source")
    (site / "build_engine.sh").write_text(BUILD_ENGINE, encoding="utf-8")


def install(requirements: Collection[str | Path], site: Path, python: str) -> None:
    """Put the files of wheels into a folder. Raises SystemExit if one cannot be had."""
    site.mkdir(parents=True, exist_ok=True)
    # Files are changed afterwards: links would reach into uv's cache.
    options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--link-mode", "copy", "--target", str(site)]
    options += ["--python", sys.executable, "--python-version", python, "--python-platform", PLATFORM]
    _run_uv(
        ["pip", "install", *options, *map(str, requirements)],
        remedy="check that the package registry can be reached",
    )
    for program in site.glob("bin/*"):
        # A script names the interpreter of this machine.
        if program.read_bytes().startswith(b"#!"):
            program.unlink()
    # uv's own, not the packages'.
    (site / ".lock").unlink(missing_ok=True)


def leave_out_files(site: Path, host: Host) -> list[str]:
    """Remove files that the host never loads, and return their names: extensions for other Pythons, LEFT_OUT_FILES."""
    tag = "cpython-" + host.python.replace(".", "")
    names = [path.relative_to(site).as_posix() for path in site.rglob("*.cpython-*.so") if f".{tag}-" not in path.name]
    if host.architecture == "sm_90":
        names += [name for name in LEFT_OUT_FILES if (site / name).exists()]
    for name in names:
        (site / name).unlink()
    return sorted(names)


def blank(site: Path, architecture: str) -> dict[str, int]:
    """Blank code of other architectures in all files. Return the bytes by file name, for files that were changed.

    Raises SystemExit for a library with an unknown layout.
    """
    if architecture == ALL_ARCHITECTURES:
        return {}
    number = int(architecture.removeprefix("sm_"))
    counts = {}
    for path in sorted(path for path in site.rglob("*") if path.is_file() and not path.is_symlink()):
        try:
            count = blank_other_architectures(path, number)
        except FatBinaryError as error:
            raise SystemExit(
                f"--arch = {architecture}: {error}; keep the code of all: --arch {ALL_ARCHITECTURES}"
            ) from error
        if count:
            counts[path.relative_to(site).as_posix()] = count
    return counts


def pack(site: Path, out: Path, part_bytes: int, blanked: Mapping[str, int], preset: int = 9) -> list[Row]:
    """Write a folder's files as an archive in parts. Return what each package takes."""
    rows = []
    parts = PartWriter(out, part_bytes)
    with (
        lzma.open(cast(IO[bytes], parts), "wb", preset=preset) as compressed,
        tarfile.open(fileobj=compressed, mode="w|", format=tarfile.PAX_FORMAT) as archive,
    ):
        for package, version, names in _files_by_package(site):
            start = parts.written
            for name in names:
                _add_file(archive, site / name, name)
            sizes = sum((site / name).stat().st_size for name in names)
            rows.append(Row(package, version, sizes, sum(blanked.get(n, 0) for n in names), parts.written - start))
    return rows


class PartWriter(io.RawIOBase):
    """A file for writing that is split into files of a fixed size: part-00, part-01 and so on."""

    def __init__(self, folder: Path, part_bytes: int) -> None:
        self._folder = folder
        self._part_bytes = part_bytes
        self.written = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Buffer) -> int:
        rest = memoryview(data)
        while rest:
            number, offset = divmod(self.written, self._part_bytes)
            block = rest[: self._part_bytes - offset]
            with open(self._folder / f"part-{number:02d}", "ab") as file:
                file.write(block)
            self.written += len(block)
            rest = rest[len(block) :]
        return len(memoryview(data))


def _files_by_package(site: Path) -> Iterator[tuple[str, str, list[str]]]:
    """Yield name, version and files of each package, then the files of none."""
    rest = {path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file()}
    packages: list[Distribution] = sorted(distributions(path=[str(site)]), key=lambda package: normalise(package.name))
    for package in packages:
        names = sorted({file.as_posix() for file in package.files or ()} & rest)
        rest -= {*names}
        yield normalise(package.name), package.version, names
    yield "other files", "", sorted(rest)


def _add_file(archive: tarfile.TarFile, path: Path, name: str) -> None:
    """Add a file to an archive without what differs from one making of a bundle to the next."""
    entry = tarfile.TarInfo(name)
    entry.size = path.stat().st_size
    entry.mode = 0o755 if os.access(path, os.X_OK) else 0o644
    with open(path, "rb") as file:
        archive.addfile(entry, file)


def write_manifest(
    out: Path, host: Host, rows: Sequence[Row], blanked: Mapping[str, int], left_out_files: Sequence[str]
) -> Path:
    """Write what the bundle holds and the checksums of its parts."""
    parts = [
        {"name": path.name, "bytes": path.stat().st_size, "sha256": sha256(path)} for path in sorted(out.glob("part-*"))
    ]
    manifest = {
        "architecture": host.architecture,
        "torch": host.torch,
        "python": host.python,
        "parts": parts,
        "unpacked_bytes": sum(row.unpacked for row in rows),
        "packages": [dataclasses.asdict(row) for row in rows],
        "blanked_bytes": blanked,
        "left_out_files": left_out_files,
        "host_packages": host.packages,
    }
    path = out / MANIFEST
    path.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    shutil.copyfile(ROOT / "tools/offline_unpack.py", out / "unpack.py")
    return path


def make_bundle(
    host: Host,
    requirements: Collection[str | Path],
    out: Path,
    *,
    engine_source: Path | None = None,
    part_mib: float = PART_MIB,
    preset: int = 9,
) -> list[Row]:
    """Make a bundle of packages in the new folder `out`, and return what each takes. Raises SystemExit."""
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        site = Path(folder, "site")
        install(requirements, site, host.python)
        left_out_files = leave_out_files(site, host)
        blanked = blank(site, host.architecture)
        (site / "env.sh").write_text(ENVIRONMENT, encoding="utf-8")
        if engine_source is not None:
            add_engine_source(site, engine_source)
        out.mkdir()
        rows = pack(site, out, round(part_mib * 2**20), blanked, preset)
    write_manifest(out, host, rows, blanked, left_out_files)
    return rows


def table(rows: Sequence[Row], count: int = 14) -> str:
    """Return the packages that take most, the rest and the sum, in MiB."""
    ranked = sorted(rows, key=lambda row: -row.packed)
    rest = ranked[count:]
    table_rows = [
        (f"{row.package} {row.version}".strip(), row.unpacked, row.blanked, row.packed) for row in ranked[:count]
    ]
    for title, group in ((f"{len(rest)} others", rest), ("all", rows)):
        table_rows.append(
            (title, sum(r.unpacked for r in group), sum(r.blanked for r in group), sum(r.packed for r in group))
        )
    lines = [f"{'MiB':40}{'unpacked':>10}{'blanked':>10}{'packed':>10}"]
    return "\n".join(
        lines + [f"{title:40}" + "".join(f"{n / 2**20:10.1f}" for n in sizes) for title, *sizes in table_rows]
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", required=True, choices=(*ARCHITECTURES, ALL_ARCHITECTURES), help="the host's GPUs")
    parser.add_argument("--torch", required=True, help=f"the host's torch: {' or '.join(TORCHES)}")
    parser.add_argument("--python", required=True, choices=PYTHONS, help="the host's Python")
    parser.add_argument("--out", required=True, type=Path, help="a new folder")
    parser.add_argument("--host-has", action="append", default=[], metavar="FILE|NAMES", help="further packages it has")
    parser.add_argument(
        "--transformer-engine",
        choices=("wheel", "source", "none"),
        default="wheel",
        help="with its built extension, its source, or not at all",
    )
    parser.add_argument("--part-mib", type=float, default=PART_MIB, help="largest part (default: %(default)s)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    host = Host(
        options.arch, read_torch(options.torch), options.python, read_host_packages(options.host_has, options.python)
    )
    if not 0 < options.part_mib < 2**20:
        raise SystemExit(f"--part-mib = {options.part_mib}: not a size in MiB; name one above 0, such as {PART_MIB}")
    out = Path(os.path.abspath(options.out))
    if os.path.lexists(out):
        raise SystemExit(f"--out = {out}: exists already; name a new folder")
    if not out.parent.is_dir():
        raise SystemExit(f"--out = {out}: {out.parent} is not a folder; make it first")

    with tempfile.TemporaryDirectory() as folder:
        engine_source = None
        if options.transformer_engine == "wheel":
            requirements = [str(find_engine_wheel(wheel_folder(), host)), *resolve(host)]
        elif options.transformer_engine == "source":
            engine_source = fetch_engine_source(Path(folder), host)
            requirements = resolve(host, [*ADDED, *BUILT_WITH])
        else:
            # The core alone could not be imported, which megarl reports as a broken installation.
            requirements = [line for line in resolve(host, ()) if not line.startswith("transformer-engine")]
        rows = make_bundle(host, requirements, out, engine_source=engine_source, part_mib=options.part_mib)

    print(table(rows))
    for name, reason in LEFT_OUT.items():
        print(f"not bundled: {name}: {reason}")
    for part in sorted(out.glob("part-*")):
        print(f"{part} {part.stat().st_size / 2**20:.1f} MiB")
    print(f"On the host: python3 unpack.py SITE --manifest-sha256 {sha256(out / MANIFEST)}")
    return 0


def read_torch(text: str) -> str:
    """Return a full version, for example 2.11.0 for `2.11`. Raises SystemExit for a torch that nothing here fits."""
    version = text.split("+")[0]
    for short, full in TORCHES.items():
        if version in (short, full):
            return full
    raise SystemExit(
        f"--torch = {text}: vLLM and Transformer Engine were not tried with it; install {' or '.join(TORCHES)} there"
    )


def wheel_folder() -> Path:
    """Return the folder in which launch/setup.sh keeps built wheels."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("MEGARL_WHEELS") or Path(cache, "megarl/wheels"))


if __name__ == "__main__":
    sys.exit(main())
