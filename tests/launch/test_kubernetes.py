"""Templates of Kubernetes: filled as the guide says, they fit the published schemas; the job's script starts again."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from megarl.cli import main
from megarl.data.tools.schemas import schema_validator
from tools.published_manifests import filled

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "launch/kubernetes"

pytestmark = pytest.mark.skipif(shutil.which("envsubst") is None, reason="needs envsubst: apt-get install gettext-base")


def violations(kind: str, manifest: dict[str, Any]) -> list[str]:
    schema = json.loads((FOLDER / f"{kind}.schema.json").read_text())
    return [error.json_path for error in schema_validator(schema).iter_errors(manifest)]


@pytest.mark.parametrize("kind", ["rayjob", "skypilot"])
def test_a_filled_template_fits_the_published_schema(kind: str) -> None:
    manifest = filled(kind)
    assert violations(kind, manifest) == []
    assert "$NAME" not in json.dumps(manifest)
    manifest["num_nodez" if kind == "skypilot" else "speck"] = 1
    assert violations(kind, manifest) == ["$"]


def test_the_guide_fills_every_variable_of_a_template() -> None:
    guide = (ROOT / "launch/container/README.md").read_text().partition("## Kubernetes")[2]
    [fields] = re.findall(r"^fields='(.*)'$", guide, re.MULTILINE)
    assert set(fields.split()) == {f"${name}" for name in re.findall(r"([A-Z_]+)=", guide[: guide.index("sky jobs")])}
    for kind in ("rayjob", "skypilot"):
        text = (FOLDER / f"{kind}.yaml").read_text().partition("\nrun: |")[0]
        assert set(re.findall(r"\$[A-Z_]+", text)) <= set(fields.split())


def test_the_workers_request_their_cpus_and_memory() -> None:
    ray = filled("rayjob")["spec"]["rayClusterSpec"]
    [workers] = ray["workerGroupSpecs"]
    assert (workers["replicas"], workers["minReplicas"], workers["maxReplicas"]) == (2, 2, 2)
    assert workers["rayStartParams"] == {"num-gpus": "8"}
    [container] = workers["template"]["spec"]["containers"]
    assert container["resources"] == {
        "requests": {"cpu": "96", "memory": "1000Gi", "nvidia.com/gpu": 8},
        "limits": {"memory": "1000Gi", "nvidia.com/gpu": 8},
    }
    # The driver has no GPU, and no rank is placed next to it.
    head = ray["headGroupSpec"]
    assert head["rayStartParams"] == {"num-cpus": "0", "num-gpus": "0"}
    assert {"cpu", "memory"} == head["template"]["spec"]["containers"][0]["resources"]["requests"].keys()
    resources = filled("skypilot")["resources"]
    assert (resources["accelerators"], resources["cpus"], resources["memory"]) == ("H100:8", "96+", "1000+")


def test_ray_is_the_version_of_the_environment() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    [ray] = map(Requirement, extras["kubernetes"])
    cluster = filled("rayjob")["spec"]["rayClusterSpec"]
    version = cluster["rayVersion"]
    assert (ray.name, ray.extras, version in ray.specifier) == ("ray", {"default"}, True)
    assert f"ray=={version}" in (ROOT / "launch/versions-libraries.txt").read_text().splitlines()
    assert cluster["authOptions"] == {"mode": "token"}


def test_skypilot_restarts_what_slurm_queues_again() -> None:
    queued = next(line for line in (ROOT / "launch/slurm/job.sh").read_text().splitlines() if line.endswith("143)"))
    codes = [int(code) for code in queued.strip().rstrip(")").split(" | ")]
    assert filled("skypilot")["resources"]["job_recovery"]["recover_on_exit_codes"] == codes


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck: apt-get install shellcheck")
def test_the_script_of_a_task_is_sound_shell() -> None:
    script = filled("skypilot")["run"]
    done = subprocess.run(["shellcheck", "-s", "bash", "-"], input=script, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("command", "replacement"),
    [("kubernetes render x.yaml --to rayjob", "launch/kubernetes"), ("serve runs/x --tp 2", "vllm serve")],
)
def test_a_removed_command_names_its_replacement(
    command: str, replacement: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(command.split())
    error = capsys.readouterr().err
    assert ended.value.code == 2 and replacement in error and command.split()[0] in error


# The job's script.

PROGRAM = """#!/usr/bin/env bash
# Stands in for megarl: ends with the next code of `codes`. 75 waits for a signal before.
code="$(head -n 1 codes)"
sed -i 1d codes
echo "$*" >> calls
if [ "$code" = 75 ]; then
    trap 'exit 75' USR1
    : > ready
    while :; do sleep 0.05; done
fi
exit "$code"
"""


def job(tmp_path: Path, *codes: int) -> tuple[list[str], dict[str, str]]:
    """The command and the environment of the job's script, in a folder with a program that ends with these codes."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/megarl").write_text(PROGRAM)
    (tmp_path / "bin/megarl").chmod(0o755)
    # Waits between two starts take no time.
    (tmp_path / "bin/sleep").write_text("#!/usr/bin/env bash\nexec /bin/sleep 0.05\n")
    (tmp_path / "bin/sleep").chmod(0o755)
    (tmp_path / "codes").write_text("".join(f"{code}\n" for code in codes))
    shutil.copy(FOLDER / "job.sh", tmp_path)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "MEGARL_WORKSPACE": str(tmp_path), "TMPDIR": str(tmp_path)}
    environment |= {"MEGARL_OVERRIDES": "train.steps=3 name=big"}
    return ["bash", str(tmp_path / "job.sh")], environment


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        pytest.param((0,), 0, id="done"),
        pytest.param((76, 76, 0), 0, id="lost ranks"),
        pytest.param((73, 0), 0, id="still locked"),
        pytest.param((76, 2), 2, id="wrong recipe"),
        pytest.param((73,) * 21, 73, id="locked for good"),
    ],
)
def test_a_job_starts_again_after_a_lost_rank(tmp_path: Path, codes: tuple[int, ...], expected: int) -> None:
    command, environment = job(tmp_path, *codes)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == expected, done.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == len(codes)
    expected_call = (
        "train /etc/megarl/recipe.yaml train.steps=3 name=big cluster.launcher=ray cluster.ray_address=auto --resume"
    )
    assert set(calls) == {expected_call}


def test_a_pod_that_is_removed_saves_first(tmp_path: Path) -> None:
    command, environment = job(tmp_path, 75)
    running = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        while not (tmp_path / "ready").exists():
            assert running.poll() is None
            time.sleep(0.05)
        subprocess.run([*command, "stop"], env=environment, check=True, timeout=60)
        assert running.wait(timeout=60) == 75
        # Nothing runs: a second call ends at once.
        subprocess.run([*command, "stop"], env=environment, check=True, timeout=60)
    finally:
        if running.poll() is None:
            running.send_signal(signal.SIGKILL)
