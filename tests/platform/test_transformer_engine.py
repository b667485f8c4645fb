"""A Transformer Engine that is installed but broken is an error with the remedy, wherever it would be used."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from megarl.platform import transformer_engine

ROOT = Path(__file__).resolve().parents[2]
FAULT = "libcudnn.so: cannot open shared object file"


@pytest.fixture
def broken(tmp_path: Path) -> dict[str, str]:
    """The environment of a process that finds a Transformer Engine which a missing CUDA library breaks."""
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "pytorch.py").write_text(f"raise OSError({FAULT!r})\n")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}


@pytest.mark.long
def test_the_trainer_refuses_it_with_the_remedy(broken: dict[str, str]) -> None:
    code = """
import importlib, sys
from megarl.types import ConfigError
for name in ("megarl.models.configuration", "megarl.training.training_engine", "megarl.worker.trainer_worker"):
    try:
        importlib.import_module(name)
    except ConfigError as error:
        print(error)
    assert not [name for name in sys.modules if name.startswith("megatron")]
"""
    done = subprocess.run([sys.executable, "-c", code], env=broken, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    error_text = f"Transformer Engine is installed but cannot be imported (OSError: {FAULT}); run launch/setup.sh"
    assert [line.startswith(error_text) for line in done.stdout.splitlines()] == [True] * 3, done.stdout


@pytest.mark.long
@pytest.mark.distributed
def test_nodes_and_doctor_report_it(broken: dict[str, str]) -> None:
    code = "from megarl.platform.transformer_engine import import_fault; print(import_fault())"
    done = subprocess.run([sys.executable, "-c", code], env=broken, capture_output=True, text=True, timeout=120)
    assert done.stdout == f"OSError: {FAULT}\n", done.stderr
    command = [sys.executable, "-m", "megarl", "doctor", "--json"]
    done = subprocess.run(command, env=broken, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2, done.stdout + done.stderr
    bad = {topic: text for _, topic, state, text in json.loads(done.stdout)["findings"] if state == "bad"}
    assert bad["transformer-engine"].startswith(f"cannot be imported (OSError: {FAULT}); {transformer_engine.REMEDY}")
    assert "layers" in bad


def test_an_empty_toolkit_is_none_for_its_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformer Engine searches `$CUDA_HOME/**`, which would be the whole machine."""
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    names = ("CUDA_HOME", "CUDA_PATH", "CUDNN_PATH", "NVRTC_HOME")
    (package / "pytorch.py").write_text(f"import os\nassert not {set(names)} & set(os.environ), 'an empty folder'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in names:
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("CURAND_HOME", "/usr/local/cuda")
    assert transformer_engine.import_fault() is None
    try:
        transformer_engine.require_importable()
    finally:
        # Not by monkeypatch, which would put the stand-ins back for all tests that follow.
        for name in ("transformer_engine.pytorch", "transformer_engine"):
            sys.modules.pop(name, None)
    assert os.environ["CURAND_HOME"] == "/usr/local/cuda"


def test_none_installed_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformer_engine, "find_spec", lambda name: None)
    transformer_engine.require_importable()
    assert transformer_engine.import_fault() is None


def gpu_extra() -> dict[str, Requirement]:
    extra = re.search(r"^gpu = (\[.*\])$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert extra is not None
    return {requirement.name: requirement for requirement in map(Requirement, json.loads(extra[1]))}


def test_the_gpu_extra_pins_what_fits_megatron_and_cuda() -> None:
    """One core, that of CUDA 13, in a version that Megatron-Core allows and whose loader finds CUDA 13's wheels."""
    engine = gpu_extra()["transformer-engine"]
    [pin] = engine.specifier
    assert pin.operator == "==" and engine.extras == {"core_cu13", "pytorch"}
    allowed = [
        asked for text in requires("megatron-core") or () if (asked := Requirement(text)).name == "transformer-engine"
    ]
    assert allowed and all(asked.specifier.contains(pin.version, prereleases=True) for asked in allowed)
    assert SpecifierSet(">=2.11").contains(pin.version)


STUB = """#!/bin/bash
echo "$(basename "$0") $*" >> "$LOG"
case "$*" in
    *"pip wheel"*) echo "CUDA_HOME $CUDA_HOME CPATH $CPATH" >> "$LOG"
        echo "without a commit in its version: $NVTE_NO_LOCAL_VERSION" >> "$LOG" ;;
esac
while [ $# -gt 0 ]; do
    case "$1" in
        --excludes) echo "excludes $(tr '\\n' ' ' < "$2")" >> "$LOG" ;;
        --wheel-dir) touch "$2/transformer_engine_torch-$ENGINE-cp311-cp311-linux_x86_64.whl"
            [ "$BUILDS" = True ] || exit 1 ;;
        *sysconfig*) echo /site ;;
        *"m.version('torch'))") echo 2.13.0+cu130 ;;
        *cp%d%d*) echo cp311 ;;
        *version_info*) echo 3.11 ;;
        *m.version*transformer-engine-torch*) exit 1 ;;
    esac
    shift
done
"""


def set_up(folder: Path, wheels: Path, *asked: str, has_driver: bool = True, builds: bool = True) -> list[str]:
    """Run launch/setup.sh in a new checkout with programs in place of Python and uv, and return their calls.

    It fails without `builds`, as the compiler then does.
    """
    (folder / "launch").mkdir(parents=True)
    locks = [f"launch/requirements-{kind}-3.11.txt" for kind in ("cpu", "gpu")]
    sets = ["launch/versions-stable.txt", "launch/versions-libraries.txt"]
    for name in ("launch/setup.sh", "pyproject.toml", *locks, *sets):
        shutil.copy(ROOT / name, folder / name)
    for path in (".venv/bin/python", ".venv/bin/uv", "bin/nvidia-smi"):
        program = folder / path
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(STUB if has_driver or path != "bin/nvidia-smi" else "#!/bin/bash\nexit 1\n")
        program.chmod(0o755)
    log = folder / "log"
    environment = {
        **os.environ,
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "LOG": str(log),
        "CPATH": "",
        "PYTHON": sys.executable,
        "ENGINE": engine_version(),
        "MEGARL_WHEELS": str(wheels),
        "BUILDS": str(builds),
    }
    command = ["bash", "launch/setup.sh", *asked]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert (done.returncode == 0) == builds, done.stderr
    return log.read_text().splitlines()


def engine_version() -> str:
    return next(iter(gpu_extra()["transformer-engine"].specifier)).version


def test_setup_builds_the_extension_against_the_installed_torch_once(tmp_path: Path) -> None:
    """The machine has a GPU driver. A second checkout that shares the folder of wheels uses the wheel of the first."""
    first, wheels = tmp_path / "first", tmp_path / "wheels"
    lines = set_up(first, wheels)
    installs = [line for line in lines if line.startswith("uv pip install")]
    name = f"transformer_engine_torch-{engine_version()}-cp311-cp311-linux_x86_64.whl"
    wheel = wheels / f"torch-2.13.0+cu130-{platform.machine()}" / name
    assert wheel.exists() and os.listdir(wheel.parent) == [wheel.name]
    assert installs[0].endswith("-e .[gpu]") and installs[1].endswith("--group engine-build --group engine-imports")
    assert installs[2] == f"uv pip install --quiet --no-deps {wheel}"
    [built] = [line for line in lines if "pip wheel" in line]
    assert "--no-build-isolation --no-deps" in built and built.endswith(f"transformer-engine-torch=={engine_version()}")
    assert "without a commit in its version: 1" in lines
    assert "excludes transformer-engine-cu12 transformer-engine-torch " in lines
    headers = "/site/nvidia/cudnn/include:/site/nvidia/nccl/include:/site/nvidia/cu13/include/cccl"
    toolkit = first / ".venv/cuda"
    assert f"CUDA_HOME {toolkit} CPATH {headers}" in lines
    assert (toolkit / "bin").readlink() == Path("/site/nvidia/cu13/bin")
    assert lines[-1] == "python -c import transformer_engine.pytorch"

    again = set_up(tmp_path / "second", wheels)
    assert not any("pip wheel" in line for line in again)
    # What its import needs is not only what it is built with.
    assert any(line.endswith("--group engine-build --group engine-imports") for line in again)
    assert f"uv pip install --quiet --no-deps {wheel}" in again


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    lines = set_up(tmp_path / "checkout", tmp_path / "wheels", builds=False)
    assert "pip wheel" in lines[-3]
    [folder] = (tmp_path / "wheels").iterdir()
    assert os.listdir(folder) == []


def test_the_gpu_environment_can_be_asked_for_without_a_driver(tmp_path: Path) -> None:
    lines = set_up(tmp_path / "asked", tmp_path / "wheels", "gpu,dev", has_driver=False)
    assert any(line.endswith("-e .[gpu,dev]") for line in lines)
    lines = set_up(tmp_path / "not", tmp_path / "wheels", "dev", has_driver=False)
    assert any(line.endswith("-e .[cpu,dev]") for line in lines)


def test_setup_leaves_the_extension_out_where_none_was_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRANSFORMER_ENGINE=cached: neither the core nor a build, until the folder of wheels has the extension."""
    monkeypatch.setenv("TRANSFORMER_ENGINE", "cached")
    first, wheels = tmp_path / "first", tmp_path / "wheels"
    name = f"transformer_engine_torch-{engine_version()}-cp311-cp311-linux_x86_64.whl"
    # Built for other versions of torch, so they could not be imported here.
    for torch in ("2.12.0+cu130", "2.13.1"):
        older = wheels / f"torch-{torch}-{platform.machine()}" / name
        older.parent.mkdir(parents=True)
        older.touch()
    lines = set_up(first, wheels, "gpu,dev", has_driver=False)
    assert "excludes transformer-engine transformer-engine-cu13 " in lines
    assert not any("pip wheel" in line or "import transformer_engine" in line for line in lines)
    assert (first / ".venv/.installed-gpu,dev").read_text().endswith(" without Transformer Engine\n")
    wheel = wheels / f"torch-2.13.0+cu130-{platform.machine()}" / name
    wheel.parent.mkdir(parents=True)
    wheel.touch()
    lines = set_up(tmp_path / "second", wheels, "gpu,dev", has_driver=False)
    assert f"uv pip install --quiet --no-deps {wheel}" in lines
