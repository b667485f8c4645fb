"""tools/offline_bundle.py: a bundle of one wheel, from its making to its unpacking; what is refused on both sides.

The wheel's library is made here: an ELF file with the section that nvcc writes, and code of two architectures in it.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tools import offline_bundle, offline_unpack
from tools.fat_binaries import Code, choose

PTX, CUBIN = 1, 2
ALONE, FAMILY = 1 << 20, 1 << 21
HOST = offline_bundle.Host("sm_90", "2.11.0", "3.12", {})
PART_BYTES = 10_240
LIBRARY = "tiny_kernels/kernels.so"


def entry(kind: int, number: int, code: bytes, flags: int = 0) -> bytes:
    """Return an entry of a container: nvcc's header of 64 bytes, then the code."""
    return struct.pack("<HHIQIIHHIIIQQQ", kind, 0x101, 64, len(code), 0, 0, 8, 1, number, 0, 0, flags, 0, 0) + code


def container(*entries: bytes) -> bytes:
    content = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(content)) + content


def library(section: bytes) -> bytes:
    """Return an ELF file with the section `.nv_fatbin`, and host code before and after it."""
    names = b"\0.nv_fatbin\0.shstrtab\0"
    before, after = b"host code before", b"host code after."
    start = 64 + len(before)
    sections = [
        struct.pack("<IIQQQQIIQQ", *[0] * 10),
        struct.pack("<IIQQQQIIQQ", 1, 1, 2, 0, start, len(section), 0, 0, 8, 0),
        struct.pack("<IIQQQQIIQQ", 12, 3, 0, 0, start + len(section) + len(after), len(names), 0, 0, 1, 0),
    ]
    table = start + len(section) + len(after) + len(names)
    head = b"\x7fELF\x02\x01\x01" + bytes(9)
    head += struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, table, 0, 64, 56, 0, 64, len(sections), 2)
    return head + before + section + after + names + b"".join(sections)


def numbers(seed: int, count: int) -> bytes:
    """Return bytes that do not compress."""
    import random

    return random.Random(seed).randbytes(count)


OLD, NEW, PTX_CODE = numbers(1, 4096), numbers(2, 4096), numbers(3, 4096)
TWO_ARCHITECTURES = container(entry(PTX, 80, PTX_CODE), entry(CUBIN, 80, OLD), entry(CUBIN, 90, NEW))
FILES = {
    "tiny_kernels/__init__.py": b"VALUE = 7\n",
    "tiny_kernels/table.bin": numbers(4, 30_000),
    LIBRARY: library(TWO_ARCHITECTURES + bytes(8) + container(entry(CUBIN, 90, NEW, ALONE))),
    "tiny_kernels/extension.cpython-311-x86_64-linux-gnu.so": b"\x7fELF for another Python",
}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle")
    wheel = folder / "tiny_kernels-1.0-py3-none-any.whl"
    info = {
        "METADATA": b"Metadata-Version: 2.1\nName: tiny-kernels\nVersion: 1.0\n",
        "WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files = FILES | {f"tiny_kernels-1.0.dist-info/{name}": content for name, content in info.items()}
    record = "".join(f"{name},,\n" for name in [*files, "tiny_kernels-1.0.dist-info/RECORD"])
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in {**files, "tiny_kernels-1.0.dist-info/RECORD": record.encode()}.items():
            archive.writestr(name, content)
    out = folder / "out"
    source = folder / "source.tar.gz"
    source.write_bytes(b"source")
    offline_bundle.make_bundle(HOST, [wheel], out, engine_source=source, part_mib=PART_BYTES / 2**20, preset=0)
    return out


def unpack(bundle: Path, folder: Path) -> int:
    return offline_unpack.unpack(bundle, folder, offline_unpack.read_manifest(bundle, None))


def test_what_is_unpacked_is_the_wheel_without_code_of_other_architectures(bundle: Path, tmp_path: Path) -> None:
    """The unpacking program runs without site-packages. The bundle's Python differs from this one: a warning."""
    manifest = json.loads((bundle / "manifest.json").read_text())
    sizes = [part["bytes"] for part in manifest["parts"]]
    assert len(sizes) > 3 and set(sizes[:-1]) == {PART_BYTES} and sizes[-1] <= PART_BYTES
    checksum = offline_unpack.sha256(bundle / "manifest.json")
    site = tmp_path / "new" / "site"
    command = [sys.executable, "-I", "-S", bundle / "unpack.py", site, "--manifest-sha256", checksum]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "the bundle is for torch 2.11.0" in done.stderr
    assert done.stdout.splitlines()[-1].endswith(f"on a machine with CUDA's toolkit: bash {site}/build_engine.sh")

    for name in ("tiny_kernels/__init__.py", "tiny_kernels/table.bin"):
        assert (site / name).read_bytes() == FILES[name]
    assert (site / LIBRARY).read_bytes() == FILES[LIBRARY].replace(OLD, bytes(4096)).replace(PTX_CODE, bytes(4096))
    assert manifest["blanked_bytes"] == {LIBRARY: 8192}
    assert manifest["left_out_files"] == ["tiny_kernels/extension.cpython-311-x86_64-linux-gnu.so"]
    assert not (site / manifest["left_out_files"][0]).exists()
    [row, _] = manifest["packages"]
    assert (row["package"], row["version"], row["blanked"]) == ("tiny-kernels", "1.0", 8192)
    assert (site / "engine-source/source.tar.gz").read_bytes() == b"source"
    show = f'PYTHONPATH=old; . "{site}/env.sh"; echo "$PYTHONPATH $HF_HUB_OFFLINE"; bash -n "{site}/build_engine.sh"'
    shown = subprocess.run(["bash", "-euc", show], capture_output=True, text=True)
    assert (shown.stdout, shown.stderr) == (f"{site}:old 1\n", "")
    assert os.listdir(site.parent) == ["site"]


@pytest.mark.parametrize("architecture", ["sm_90", "all"])
def test_code_stays_where_an_architecture_is_not_named(tmp_path: Path, architecture: str) -> None:
    path = tmp_path / "kernels.so"
    path.write_bytes(library(container(entry(CUBIN, 90, NEW))))
    assert offline_bundle.blank(tmp_path, architecture) == {}
    assert path.read_bytes() == library(container(entry(CUBIN, 90, NEW)))


def code(kind: int | None, number: int, reach: str = "upwards") -> Code:
    names = {PTX: "ptx", CUBIN: "cubin", None: None}
    return Code(names[kind], number, reach, 0, 8)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("architecture", "entries", "chosen"),
    [
        pytest.param(90, [code(CUBIN, 90), code(CUBIN, 90, "alone")], [0, 1], id="both of this one"),
        pytest.param(
            90, [code(PTX, 80), code(CUBIN, 80), code(PTX, 90)], [2], id="machine code of an older generation"
        ),
        pytest.param(90, [code(PTX, 75), code(PTX, 80), code(PTX, 100)], [1], id="the newest PTX that it compiles"),
        pytest.param(86, [code(CUBIN, 80), code(CUBIN, 90), code(PTX, 80)], [0], id="an older one of its generation"),
        pytest.param(103, [code(CUBIN, 100, "alone"), code(CUBIN, 100, "family"), code(PTX, 90)], [1], id="its family"),
        pytest.param(120, [code(CUBIN, 100, "family"), code(PTX, 90, "alone")], [], id="nothing for it"),
        pytest.param(90, [code(None, 80), code(CUBIN, 90)], [0, 1], id="an unknown kind stays"),
    ],
)
def test_the_driver_finds_what_it_chooses(architecture: int, entries: list[Code], chosen: list[int]) -> None:
    kept = choose(entries, architecture)
    assert [index for index, item in enumerate(entries) if item in kept] == chosen


@pytest.mark.parametrize(
    "section",
    [
        pytest.param(b"\1" * 32, id="no container"),
        pytest.param(TWO_ARCHITECTURES[:-8], id="a container longer than its section"),
        pytest.param(container(entry(CUBIN, 80, OLD)[:-8]), id="an entry longer than its container"),
        pytest.param(container(entry(CUBIN, 80, OLD)[:40]), id="an entry without its whole header"),
    ],
)
def test_an_unknown_layout_is_refused_and_nothing_is_changed(tmp_path: Path, section: bytes) -> None:
    path = tmp_path / "kernels.so"
    path.write_bytes(library(container(entry(CUBIN, 80, OLD)) + section))
    before = path.read_bytes()
    with pytest.raises(SystemExit, match=r"--arch = sm_90: .*kernels.so: .*--arch all"):
        offline_bundle.blank(tmp_path, "sm_90")
    assert path.read_bytes() == before


@pytest.mark.parametrize("place", [1 << 40, (1 << 63) - 64, 1 << 63, (1 << 64) - 1])
def test_a_table_of_sections_outside_of_the_file_is_refused(tmp_path: Path, place: int) -> None:
    content = bytearray(library(TWO_ARCHITECTURES))
    struct.pack_into("<Q", content, 40, place)
    (tmp_path / "kernels.so").write_bytes(content)
    with pytest.raises(SystemExit, match=r"--arch = sm_90: .*kernels.so: .*--arch all"):
        offline_bundle.blank(tmp_path, "sm_90")


def damage(bundle: Path) -> None:
    part = bundle / "part-01"
    content = bytearray(part.read_bytes())
    content[100] ^= 1
    part.write_bytes(content)


def remove(bundle: Path) -> None:
    (bundle / "part-01").unlink()


def shorten(bundle: Path) -> None:
    part = bundle / "part-01"
    part.write_bytes(part.read_bytes()[:-1])


def name_a_file_elsewhere(bundle: Path) -> None:
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["parts"][0]["name"] = "../part-00"
    (bundle / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (damage, "part-01: damaged"),
        (remove, "part-01: missing"),
        (shorten, "part-01: 10239 bytes instead of 10240"),
        (name_a_file_elsewhere, "'../part-00' is not the name of a part"),
    ],
)
def test_a_damaged_bundle_is_refused(bundle: Path, tmp_path: Path, change, message: str) -> None:
    copied = tmp_path / "copy"
    shutil.copytree(bundle, copied)
    change(copied)
    with pytest.raises(offline_unpack.BundleError, match=message):
        unpack(copied, tmp_path / "site")
    assert os.listdir(tmp_path) == ["copy"]


def test_parts_are_read_as_one_file(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("part-00", "part-01", "part-02")]
    for path, content in zip(paths, (b"ab", b"", b"cd"), strict=True):
        path.write_bytes(content)
    with offline_unpack.JoinedParts(paths) as joined:
        # A read of no bytes is not the end of a part.
        assert [joined.read(size) for size in (1, 0, 1, 0, 2, 1, 0)] == [b"a", b"", b"b", b"", b"cd", b"", b""]


def member(name: str, **fields: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(info, field, value)
    return info


@pytest.mark.parametrize(
    ("members", "message"),
    [
        pytest.param([member("../escaped", size=4)], "not a file or folder", id="above the folder"),
        pytest.param([member("a/../../escaped", size=4)], "not a file or folder", id="above by detour"),
        pytest.param([member("/tmp/escaped", size=4)], "not a file or folder", id="absolute"),
        pytest.param(
            [member("a", type=tarfile.SYMTYPE, linkname="/tmp"), member("a/b", size=4)], "not a file", id="link"
        ),
        pytest.param([member("a", type=tarfile.LNKTYPE, linkname="/etc/passwd")], "not a file", id="hard link"),
        pytest.param([member("a", type=tarfile.FIFOTYPE)], "not a file", id="pipe"),
        pytest.param([member("a", size=4), member("a", size=4)], "cannot be read", id="twice"),
        pytest.param([member("a", size=4), member("b", size=400)], "more than the 100 bytes", id="more than announced"),
    ],
)
def test_an_archive_writes_only_files_into_the_folder(
    tmp_path: Path, members: list[tarfile.TarInfo], message: str
) -> None:
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    with tarfile.open(bundle / "part-00", "w:xz") as archive:
        for info in members:
            archive.addfile(info, io.BytesIO(bytes(info.size)))
    part = bundle / "part-00"
    parts = [{"name": part.name, "bytes": part.stat().st_size, "sha256": offline_unpack.sha256(part)}]
    (bundle / "manifest.json").write_text(json.dumps({"parts": parts, "unpacked_bytes": 100}))
    with pytest.raises(offline_unpack.BundleError, match=message):
        unpack(bundle, tmp_path / "site")
    assert os.listdir(tmp_path) == ["bundle"]


def test_a_folder_with_files_and_another_manifest_are_refused(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(offline_unpack.BundleError, match="exists already; name a new folder"):
        unpack(bundle, tmp_path)
    with pytest.raises(offline_unpack.BundleError, match="copy the bundle again"):
        offline_unpack.read_manifest(bundle, "0" * 64)


GIVEN = {"--arch": "sm_90", "--torch": "2.11", "--python": "3.12"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"--arch": "sm_70"}, "invalid choice: 'sm_70'"),
        ({"--python": "3.10"}, "invalid choice: '3.10'"),
        ({"--torch": "2.12"}, "--torch = 2.12: .*install 2.11 or 2.13"),
        ({"--host-has": "transfomers"}, "--host-has = transfomers: .*did you mean transformers?"),
        ({"--host-has": "numpy>=2"}, "--host-has = 'numpy>=2': .*NAME==VERSION"),
        ({"--part-mib": "0"}, "--part-mib = 0.0"),
        ({"--out": "."}, "--out = .*: exists already"),
    ],
)
def test_values_are_refused_before_anything_is_fetched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: dict[str, str], message: str
) -> None:
    asked = GIVEN | {"--out": str(tmp_path / "out")} | options
    with pytest.raises(SystemExit, match=message if "invalid" not in message else None) as refusal:
        offline_bundle.main([text for pair in asked.items() for text in pair])
    assert refusal.value.code not in (0, None)
    if "invalid" in message:
        assert message in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


def test_the_hosts_packages_are_read_as_pip_freeze_writes_them(tmp_path: Path) -> None:
    path = tmp_path / "host.txt"
    path.write_text(
        "# made by pip freeze\nNumPy==2.3.5\nsome_tool @ file:///wheels/x.whl\n-e git+https://x\n\ntyper 0.29.2\n"
    )
    assert offline_bundle.read_host_packages([str(path), "rich,pyarrow==25.0.1"], "3.12") == {
        "numpy": "2.3.5",
        "some-tool": None,
        "typer": "0.29.2",
        "rich": None,
        "pyarrow": "25.0.1",
    }


def test_the_wheel_of_the_hosts_torch_is_found(tmp_path: Path) -> None:
    for folder, tag in (("torch-2.13.0-x86_64", "cp312"), ("torch-2.11.0+cu130-x86_64", "cp311")):
        wheel = tmp_path / folder / f"transformer_engine_torch-2.11.0-{tag}-{tag}-linux_x86_64.whl"
        wheel.parent.mkdir()
        wheel.touch()
    with pytest.raises(SystemExit, match=r"torch-2.11.0\*-x86_64/transformer_engine_torch-2.11.0-cp312-\*.whl"):
        offline_bundle.find_engine_wheel(tmp_path, HOST)
    wheel = tmp_path / "torch-2.11.0+cu130-x86_64/transformer_engine_torch-2.11.0-cp312-cp312-linux_x86_64.whl"
    wheel.touch()
    assert offline_bundle.find_engine_wheel(tmp_path, HOST) == wheel
