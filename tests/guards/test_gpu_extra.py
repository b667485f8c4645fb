"""The extras `gpu` and `gpu-next`: one Transformer Engine core, of torch's CUDA major, inside Megatron's bound."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.guards.test_gpu_environment import disk_fault

ROOT = Path(__file__).resolve().parents[2]
LOCKS = [*(("gpu", python) for python in ("3.11", "3.12", "3.13")), ("gpu-next", "3.12"), ("gpu-next", "3.13")]
every = pytest.mark.parametrize(("extra", "python"), LOCKS)
BUILT_APART = "transformer-engine-cu12\ntransformer-engine-torch\n"
"""Packages that launch/setup.sh leaves out: the other core, and the extension that it builds."""


def check(versions: dict[str, Version], extra: str) -> None:
    """Check the versions of an environment of an extra, by package."""
    cores = [name for name in versions if re.fullmatch(r"transformer-engine-cu\d+", name)]
    majors = {name.rpartition("-cu")[2] for name in versions if re.fullmatch(r"nvidia-(cudnn|nccl)-cu\d+", name)}
    assert len(cores) == 1 and len(majors) == 1, (cores, majors)
    assert cores[0] == f"transformer-engine-cu{majors.pop()}"
    assert versions[cores[0]] == versions["transformer-engine"] == Version(pinned(extra))
    if versions["megatron-core"] == Version(version("megatron-core")):
        check_bound(versions)
    check_compiler(versions)


def check_bound(versions: dict[str, Version]) -> None:
    """Check that the installed Megatron-Core, which has the version checked, accepts the Transformer Engine."""
    bounds = [
        asked.specifier
        for text in requires("megatron-core") or ()
        if (asked := Requirement(text)).name == "transformer-engine"
    ]
    assert bounds and all(bound.contains(versions["transformer-engine"], prereleases=True) for bound in bounds)


def check_compiler(versions: dict[str, Version]) -> None:
    """Check that the CUDA compiler is of the runtime's CUDA version: FlashInfer's headers refuse any other."""
    [compiler] = {versions[name] for name in ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm")}
    assert compiler.release[:2] == versions["nvidia-cuda-runtime"].release[:2]


def pinned(extra: str) -> str:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    [engine] = [r for r in map(Requirement, extras[extra]) if r.name == "transformer-engine"]
    [pin] = engine.specifier
    return pin.version


def lock(extra: str, python: str) -> str:
    return (ROOT / f"launch/requirements-{extra}-{python}.txt").read_text()


def versions_of(text: str) -> dict[str, Version]:
    found = re.findall(r"^([a-z0-9-]+)==([a-z0-9.+]+)", text, re.MULTILINE)
    return {name: Version(version) for name, version in found}


@every
def test_the_lock_has_one_core_of_torchs_cuda(extra: str, python: str) -> None:
    check(versions_of(lock(extra, python)), extra)


def test_a_second_core_or_another_compiler_is_noticed() -> None:
    versions = versions_of(lock("gpu", "3.11"))
    with pytest.raises(AssertionError):
        check(versions | {"transformer-engine-cu12": versions["transformer-engine"]}, "gpu")
    compilers = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm")
    with pytest.raises(AssertionError):
        check(versions | dict.fromkeys(compilers, Version("13.5.37")), "gpu")
    with pytest.raises(ValueError, match="unpack"):
        check(versions | {"nvidia-nvvm": Version("13.5.37")}, "gpu")
    engines = ("transformer-engine", "transformer-engine-cu13")
    with pytest.raises(AssertionError):
        check(versions | dict.fromkeys(engines, Version("2.20.0")), "gpu")


@pytest.mark.skipif(Version(version("megatron-core")) >= Version("0.19"), reason="Megatron-Core 0.19 has no bound")
def test_a_transformer_engine_outside_megatrons_bound_is_noticed() -> None:
    with pytest.raises(AssertionError):
        check_bound({"transformer-engine": Version("2.20.2")})


def test_a_disk_too_small_for_the_environment_is_named(tmp_path: Path) -> None:
    venv = tmp_path / "absent/venv"
    assert disk_fault(venv, 1) is None
    fault = disk_fault(venv, 1 << 60)
    assert fault is not None and fault.startswith(f"{venv}: the CUDA environment needs 1073741824 GiB")
    assert "GPU_VENV" in fault
    (venv / "bin").mkdir(parents=True)
    (venv / "bin/python").touch()
    assert disk_fault(venv, 1 << 60) is None


@pytest.mark.gpu_environment
@every
def test_the_registry_resolves_the_extra_so(tmp_path: Path, extra: str, python: str) -> None:
    left_out = tmp_path / "left_out"
    left_out.write_text(BUILT_APART)
    uv = Path(sys.executable).with_name("uv")
    command = [
        os.environ.get("UV", str(uv)), "pip", "compile", "--quiet", "--no-annotate", "--python-version", python,
        "--python-platform", "x86_64-manylinux_2_28", str(ROOT / "pyproject.toml"), "--extra", extra,
        "--excludes", str(left_out),
    ]  # fmt: skip
    # uv leaves the locks of its builds where temporary files go.
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    check(versions_of(done.stdout), extra)
