"""A Transformer Engine that is installed but broken is an error with the remedy, wherever it would be used."""

from __future__ import annotations

import json
import os
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


def test_the_trainer_refuses_it_with_the_remedy(broken: dict[str, str]) -> None:
    code = """
import importlib, sys
from megarl.types import ConfigError
for name in ("megarl.models.configuration", "megarl.training.engine", "megarl.worker.trainer"):
    try:
        importlib.import_module(name)
    except ConfigError as error:
        print(error)
    assert not [name for name in sys.modules if name.startswith("megatron")]
"""
    done = subprocess.run([sys.executable, "-c", code], env=broken, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    told = f"Transformer Engine is installed but cannot be imported (OSError: {FAULT}); run launch/setup.sh"
    assert [line.startswith(told) for line in done.stdout.splitlines()] == [True] * 3, done.stdout


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


def test_none_installed_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformer_engine, "find_spec", lambda name: None)
    transformer_engine.require_sound()
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
while [ $# -gt 0 ]; do
    case "$1" in
        --excludes) echo "excludes $(tr '\\n' ' ' < "$2")" >> "$LOG" ;;
        transformer-engine-torch==*) echo "CUDA_HOME $CUDA_HOME CPATH $CPATH" >> "$LOG" ;;
        *sysconfig*) echo /site ;;
        *m.version*transformer-engine-torch*) exit 1 ;;
    esac
    shift
done
"""


def test_setup_builds_the_extension_against_the_installed_torch(tmp_path: Path) -> None:
    """launch/setup.sh where a driver answers, with programs in place of Python and uv that note their arguments."""
    (tmp_path / "launch").mkdir()
    for name in ("launch/setup.sh", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    for path in (".venv/bin/python", ".venv/bin/uv", "bin/nvidia-smi"):
        program = tmp_path / path
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(STUB)
        program.chmod(0o755)
    log = tmp_path / "log"
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "LOG": str(log), "CPATH": "", "PYTHON": sys.executable}
    done = subprocess.run(["bash", "launch/setup.sh"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = log.read_text().splitlines()
    version = next(iter(gpu_extra()["transformer-engine"].specifier)).version
    installs = [line for line in lines if line.startswith("uv pip install")]
    assert installs[0].endswith("-e .[gpu]") and installs[1].endswith("einops onnx onnxscript")
    assert installs[2] == f"uv pip install --quiet --no-build-isolation --no-deps transformer-engine-torch=={version}"
    assert "excludes transformer-engine-cu12 transformer-engine-torch " in lines
    nvidia = "/site/nvidia"
    headers = f"{nvidia}/cudnn/include:{nvidia}/nccl/include:{nvidia}/cu13/include/cccl"
    assert f"CUDA_HOME {nvidia}/cu13 CPATH {headers}" in lines
    assert lines[-1] == "python -c import transformer_engine.pytorch"
