"""Environments in folders that a run covers, below links, and below folders with blanks in their names."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import megarl

MAIN = """
import json, sys
from megarl.sandbox.sandbox import Sandbox, SandboxSettings
settings = SandboxSettings(require=json.loads(sys.argv[1]), packages=("megarl_probe", "megarl_probe_file"))
sandbox = Sandbox(settings, _without=json.loads(sys.argv[2]))
print(json.dumps([sandbox.run(program).stdout for program in sys.argv[3:]]))
sandbox.close()
"""
IMPORTS = "import decimal, megarl_probe, megarl_probe_file\nprint(megarl_probe.VALUE + megarl_probe_file.VALUE)"
LISTS_TMP = "import os\nopen('/tmp/x', 'w').close()\nprint(*sorted(os.listdir('/tmp')), sep='|')"
CHANGES = """
import os, megarl_probe
folder = os.path.dirname(megarl_probe.__file__)
def attempt(name, change):
    try: change()
    except OSError: return
    print('BREACH', name)
attempt('append', lambda: open(megarl_probe.__file__, 'a').write('x'))
attempt('create', lambda: open(folder + '/new.py', 'w'))
attempt('remove', lambda: os.unlink(megarl_probe.__file__))
attempt('rename', lambda: os.rename(megarl_probe.__file__, folder + '/other.py'))
attempt('move in', lambda: (open('/tmp/y.py', 'w').close(), os.rename('/tmp/y.py', folder + '/y.py')))
attempt('link in', lambda: os.symlink('/tmp', folder + '/link'))
attempt('create in the packages', lambda: open(os.path.dirname(folder) + '/new.py', 'w'))
attempt('remove the folder', lambda: os.rmdir(folder))
print('tried')
"""
STRICT = ("namespaces", "landlock", "seccomp", "limits", "unprivileged")


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder of its own in the folder that a test names."""
    with contextlib.ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="megarl-place-", dir=request.param))
        stack.callback(shutil.rmtree, folder)
        folder.chmod(0o755)
        yield folder


def make_environment(folder: Path, interpreter: str = sys.executable) -> Path:
    """A virtual environment with a package and a module of one file; returns its Python."""
    subprocess.run([interpreter, "-m", "venv", "--without-pip", folder], check=True, capture_output=True)
    [packages] = folder.glob("lib/python3*/site-packages")
    (packages / "megarl_probe").mkdir()
    (packages / "megarl_probe" / "__init__.py").write_text("VALUE = 5\n")
    (packages / "megarl_probe_file.py").write_text("VALUE = 2\n")
    # Whoever runs as root runs programs as another user, from whom files' own modes would protect them.
    for path in (packages, *packages.rglob("*")):
        path.chmod(0o777)
    return folder / "bin" / "python"


def outputs(python: Path, *programs: str, without: Sequence[str] = ()) -> list[str]:
    """What programs print in one sandbox of an environment."""
    required = json.dumps([layer for layer in STRICT if layer not in without])
    command = [python, "-c", MAIN, required, json.dumps(without), *programs]
    paths = (Path(megarl.__file__).parents[1], sysconfig.get_path("purelib"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("place", ["/tmp", "/dev/shm"], indirect=True)
def test_an_environment_in_a_folder_that_runs_cover(place: Path) -> None:
    python = make_environment(place / "venv")
    seen, listed, tried, after = outputs(python, IMPORTS, LISTS_TMP, CHANGES, IMPORTS)
    names = [place.name] if place.parent == Path("/tmp") else []
    assert (seen, listed, tried, after) == ("7\n", "|".join([*names, "x"]) + "\n", "tried\n", "7\n")
    assert sorted(path.name for path in place.iterdir()) == ["venv"]


@pytest.mark.parametrize("place", ["/tmp"], indirect=True)
@pytest.mark.parametrize("layer", ["landlock", "seccomp"])
def test_other_layers_protect_it_where_one_is_missing(place: Path, layer: str) -> None:
    python = make_environment(place / "venv")
    assert outputs(python, CHANGES, IMPORTS, without=[layer]) == ["tried\n", "7\n"]


@pytest.mark.parametrize("place", ["/tmp", "/var/tmp"], indirect=True)
def test_an_environment_below_a_link_and_one_with_blanks_in_its_name(place: Path) -> None:
    (place / "a home, with blanks").mkdir()
    (place / "link").symlink_to(place / "a home, with blanks")
    make_environment(place / "a home, with blanks" / "venv")
    for name in ("link", "a home, with blanks"):
        assert outputs(place / name / "venv" / "bin" / "python", IMPORTS, CHANGES) == ["7\n", "tried\n"]


@pytest.mark.parametrize("place", ["/tmp"], indirect=True)
def test_an_interpreter_whose_library_lies_below_tmp(place: Path) -> None:
    """Its library is a link there: what programs read is what the link leads to."""
    (place / "base python" / "bin").mkdir(parents=True)
    original = Path(sys.base_prefix)
    (place / "base python" / "lib").symlink_to(original / "lib")
    interpreter = place / "base python" / "bin" / f"python3.{sys.version_info.minor}"
    shutil.copy(Path(getattr(sys, "_base_executable", sys.executable)).resolve(), interpreter)
    python = make_environment(place / "venv", str(interpreter))
    program = f"import sys, os\nprint(os.path.exists({str(original)!r}), any('base python' in p for p in sys.path))"
    assert outputs(python, IMPORTS, program) == ["7\n", "False True\n"]
