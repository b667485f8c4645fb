"""Manifests of Kubernetes: what a recipe's job asks for, and what is refused before a line is written."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from typer.testing import CliRunner

from megarl.cli import app
from megarl.cluster.manifests import ManifestSettings, launch_overrides, render
from megarl.config.recipe import load
from megarl.types import ConfigError

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "launch/kubernetes"
RECIPE = str(ROOT / "launch/recipes/qwen3_32b_grpo.yaml")
IMAGE = "registry.example.com/megarl:gpu"


def rendered(kind: Any, overrides: tuple[str, ...] = (), path: str = RECIPE, **settings: Any) -> list[dict[str, Any]]:
    recipe = load(path, [*overrides, *launch_overrides(kind)])
    text = render(kind, recipe, path, overrides, ManifestSettings(**{"image": IMAGE, **settings}))
    return list(yaml.safe_load_all(text))


def refusal(kind: Any, overrides: tuple[str, ...] = (), **settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        rendered(kind, overrides, **settings)
    return str(caught.value)


def copied(tmp_path: Path, name: str, change: Callable[[str], str]) -> Path:
    """A site's own template: a changed copy."""
    text = (FOLDER / name).read_text()
    path = tmp_path / name
    path.write_text(change(text))
    assert path.read_text() != text
    return path


def words(script: str) -> list[str]:
    """The arguments of `megarl train` in a script."""
    [line] = [line for line in script.splitlines() if line.startswith("set -- ")]
    return shlex.split(line)[2:]


# RayJob.


def test_a_ray_job_has_the_recipes_sizes() -> None:
    config_map, job = rendered("rayjob", ("train.steps=3", "name=Big_Run.2"), volume="my-runs", cpus=96, memory="1Ti")
    assert (config_map["kind"], job["kind"]) == ("ConfigMap", "RayJob")
    assert config_map["metadata"]["name"] == job["metadata"]["name"] == "big-run-2"
    assert config_map["data"]["recipe.yaml"] == Path(RECIPE).read_text()
    assert words(config_map["data"]["job.sh"]) == [
        "/etc/megarl/recipe.yaml", "train.steps=3", "name=Big_Run.2", "cluster.launcher=ray",
        "cluster.ray_address=auto", "cluster.start_timeout_seconds=1800",
    ]  # fmt: skip
    spec = job["spec"]
    head, [workers] = spec["rayClusterSpec"]["headGroupSpec"], spec["rayClusterSpec"]["workerGroupSpecs"]
    assert (workers["replicas"], workers["minReplicas"], workers["maxReplicas"]) == (2, 2, 2)
    assert workers["rayStartParams"] == {"num-gpus": "8"}
    # The driver has no GPU, and no rank is placed next to it.
    assert head["rayStartParams"] == {"num-cpus": "0", "num-gpus": "0"}
    [container] = workers["template"]["spec"]["containers"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 8, "cpu": 96, "memory": "1Ti"}}
    for group in (head, workers):
        pod = group["template"]["spec"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in pod["containers"][0]["volumeMounts"]}
        assert pod["containers"][0]["image"] == IMAGE
        assert mounts["/dev/shm"]["emptyDir"] == {"medium": "Memory"}
        assert mounts["/workspace"]["persistentVolumeClaim"] == {"claimName": "my-runs"}
        assert pod["securityContext"]["runAsNonRoot"] is True
    assert {"name": "recipe", "configMap": {"name": "big-run-2"}} in head["template"]["spec"]["volumes"]


def test_a_ray_jobs_restarts_are_those_of_the_recipe() -> None:
    _, job = rendered("rayjob", ("cluster.max_restarts=7", "cluster.signal_seconds=500"))
    spec = job["spec"]
    assert (spec["backoffLimit"], spec["shutdownAfterJobFinishes"], spec["ttlSecondsAfterFinished"]) == (7, True, 3600)
    pod = spec["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 560
    assert pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"] == ["bash", "/etc/megarl/job.sh", "stop"]


def test_ray_is_the_version_of_the_environment() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    [ray] = map(Requirement, extras["kubernetes"])
    _, job = rendered("rayjob")
    version = job["spec"]["rayClusterSpec"]["rayVersion"]
    assert (ray.name, ray.extras, version in ray.specifier) == ("ray", {"default"}, True)
    assert f"ray=={version}" in (ROOT / "launch/versions-libraries.txt").read_text().splitlines()
    assert job["spec"]["rayClusterSpec"]["authOptions"] == {"mode": "token"}


def test_cpus_take_the_place_of_gpus() -> None:
    _, job = rendered("rayjob", ("cluster.device=cpu",))
    [workers] = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert workers["rayStartParams"] == {"num-cpus": "8"}
    assert workers["template"]["spec"]["containers"][0]["resources"]["limits"] == {"cpu": 8}


@pytest.mark.parametrize(
    ("resources", "expected_resources", "expected_override"),
    [
        pytest.param("", {"megarl_engines": 1}, "{megarl_engines: 0.001}", id="none"),
        pytest.param(", ray_resources: {small: 0.001}", {"small": 1}, None, id="a site's own"),
        pytest.param(", ray_resources: {'accelerator_type:H100': 0.001}", {}, None, id="made by Ray"),
    ],
)
def test_engines_on_nodes_of_their_own_kind_are_a_group(
    resources: str, expected_resources: dict[str, int], expected_override: str | None
) -> None:
    given = ("rollout.placement=separate", f"cluster.groups.engines={{nodes: 4, ranks_per_node: 4{resources}}}")
    config_map, job = rendered("rayjob", given)
    trainer, engines = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert (trainer["replicas"], engines["replicas"], engines["groupName"]) == (2, 4, "engines")
    assert "resources" not in trainer["rayStartParams"] and engines["rayStartParams"]["num-gpus"] == "4"
    # KubeRay writes `--resources=` and this text into a command of a shell.
    [word] = shlex.split(engines["rayStartParams"]["resources"])
    assert json.loads(word) == expected_resources
    override = [text for text in words(config_map["data"]["job.sh"]) if "ray_resources=" in text]
    assert override == ([f"cluster.groups.engines.ray_resources={expected_override}"] if expected_override else [])
    engines_of = load(RECIPE, words(config_map["data"]["job.sh"])[1:]).cluster.groups.engines
    assert engines_of is not None and engines_of.ray_resources


def test_variables_reach_every_pod() -> None:
    _, job = rendered("rayjob", environment=("NCCL_SOCKET_IFNAME=eth0",), secrets=("HF_TOKEN=hub/token",))
    ray = job["spec"]["rayClusterSpec"]
    for group in (ray["headGroupSpec"], *ray["workerGroupSpecs"]):
        assert group["template"]["spec"]["containers"][0]["env"] == [
            {"name": "NCCL_SOCKET_IFNAME", "value": "eth0"},
            {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}},
        ]


def test_a_sites_template_keeps_its_settings(tmp_path: Path) -> None:
    site = "          nodeSelector: {gpu: h200}\n          restartPolicy: Never\n"
    template = copied(tmp_path, "rayjob.yaml", lambda text: text.replace("          restartPolicy: Never\n", site, 1))
    _, job = rendered("rayjob", template=template)
    assert job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["nodeSelector"] == {"gpu": "h200"}


# SkyPilot.


def test_a_task_of_skypilot_has_the_recipes_sizes() -> None:
    [task] = rendered("skypilot", ("train.steps=3",), volume="my-runs", cpus=96, memory="1000", secrets=("HF_TOKEN",))
    assert (task["name"], task["num_nodes"]) == ("qwen3_32b_grpo", 2)
    resources = task["resources"]
    assert (resources["accelerators"], resources["image_id"]) == ("H200:8", f"docker:{IMAGE}")
    assert (resources["cpus"], resources["memory"]) == ("96+", "1000+")
    assert resources["job_recovery"]["recover_on_exit_codes"] == [75, 76, 138, 143]
    assert task["secrets"] == {"RAY_AUTH_TOKEN": None, "HF_TOKEN": None}
    assert task["volumes"] == {"/workspace": "my-runs"} and task["file_mounts"] == {"/etc/megarl/recipe.yaml": RECIPE}
    assert words(task["run"]) == [
        "/etc/megarl/recipe.yaml", "train.steps=3", "cluster.launcher=ray", "cluster.start_timeout_seconds=1800",
    ]  # fmt: skip


def test_skypilot_restarts_what_slurm_queues_again() -> None:
    [task] = rendered("skypilot")
    queued = next(line for line in (ROOT / "launch/slurm/job.sh").read_text().splitlines() if line.endswith("143)"))
    codes = [int(code) for code in queued.strip().rstrip(")").split(" | ")]
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == codes


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck: apt-get install shellcheck")
def test_the_script_of_a_task_is_sound_shell() -> None:
    [task] = rendered("skypilot")
    done = subprocess.run(["shellcheck", "-s", "bash", "-"], input=task["run"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# Errors.


@pytest.mark.parametrize(
    ("kind", "overrides", "settings", "expected"),
    [
        pytest.param("rayjob", ("name=3b",), {}, "rayjob.yaml: metadata.name = '3b': needs at most 47", id="name"),
        pytest.param("rayjob", (f"name={'a' * 48}",), {}, "metadata.name = 'aaaa", id="long name"),
        pytest.param("rayjob", (), {"image": "my image"}, "].image = 'my image': needs an image, for", id="image"),
        pytest.param("rayjob", (), {"memory": "64 GB"}, "limits.memory = '64 GB': needs a number with", id="memory"),
        pytest.param("rayjob", (), {"volume": "My_Runs"}, "claimName = 'My_Runs': needs the name of a", id="volume"),
        pytest.param("rayjob", (), {"environment": ("A-B=1",)}, "].name = 'A-B': needs the name of an env", id="name"),
        pytest.param("rayjob", (), {"environment": ("AB",)}, "--env AB: has no value; write --env NAME", id="env"),
        pytest.param("rayjob", (), {"environment": ("HF_TOKEN=hf_1",)}, "--secret HF_TOKEN=SECRET/KEY", id="clear"),
        pytest.param("rayjob", (), {"secrets": ("HF_TOKEN",)}, "write --secret NAME=SECRET/KEY", id="no reference"),
        pytest.param("rayjob", (), {"secrets": ("T=My/token",)}, "secretKeyRef.name = 'My': needs lower", id="Secret"),
        pytest.param("skypilot", (), {"secrets": ("HF_TOKEN=hf_1",)}, "write --secret HF_TOKEN", id="sky's secret"),
        pytest.param("skypilot", (), {"memory": "1 TB"}, "resources.memory = '1 TB+': needs GiB, for", id="GiB"),
        pytest.param("skypilot", (), {"gpu": "h 200"}, "accelerators = 'H 200:8': needs kind and number", id="GPU"),
        pytest.param("skypilot", ("cluster.gpu_memory_gib=140",), {}, "cluster.gpu_memory_gib = 140.0:", id="kind"),
        pytest.param("skypilot", ("rollout.placement=separate", "cluster.groups.engines={nodes: 1}"), {},
            "cluster.groups.engines: a SkyPilot job has nodes of one kind; render --to rayjob", id="two kinds"),
    ],
)  # fmt: skip
def test_what_a_schema_forbids_is_refused(
    kind: str, overrides: tuple[str, ...], settings: dict[str, Any], expected: str
) -> None:
    message = refusal(kind, overrides, **settings)
    assert expected in message and "hf_1" not in message


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        pytest.param("restartPolicy: Never", "restartPolice: Never", "did you mean restartPolicy?", id="unknown"),
        pytest.param("restartPolicy: Never", "restartPolicy: never", "= 'never': needs Always, Never or", id="value"),
        pytest.param("ttlSecondsAfterFinished: 3600", "ttlSecondsAfterFinished: 1h", "= '1h': needs a", id="type"),
        pytest.param("entrypoint: bash", "entrypont: bash", "spec.entrypoint: missing; add it", id="missing"),
        pytest.param("env: []", "env: [{name: API_KEY, value: sk-1}]", "of API_KEY = <hidden>: a secret", id="secret"),
        pytest.param("kind: RayJob", "kind: RayJbo", "has 0 documents with kind: RayJob", id="no job"),
        pytest.param("kind: ConfigMap", "kind: Secret", "needs one document with kind: ConfigMap", id="no map"),
        pytest.param("kind: RayJob", "kind: [RayJob", "not valid YAML", id="no YAML"),
    ],
)
def test_a_wrong_template_is_refused(tmp_path: Path, old: str, new: str, expected: str) -> None:
    message = refusal("rayjob", template=copied(tmp_path, "rayjob.yaml", lambda text: text.replace(old, new)))
    assert expected in message and message.startswith((str(tmp_path), "rayjob.yaml: ")) and "sk-1" not in message


def test_all_errors_are_in_one_message(tmp_path: Path) -> None:
    change = "mode: token", "mode: tokn"
    template = copied(tmp_path, "rayjob.yaml", lambda text: text.replace(*change).replace("groupName", "group"))
    assert [line.split(" ")[1] for line in refusal("rayjob", template=template).splitlines()] == [
        "spec.rayClusterSpec.authOptions.mode",
        "spec.rayClusterSpec.workerGroupSpecs[0].group:",
        "spec.rayClusterSpec.workerGroupSpecs[0].groupName:",
    ]


def test_a_variable_of_the_recipe_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA", "data")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(Path(RECIPE).read_text().replace("train: data/", "train: ${oc.env:DATA}/"))
    assert "add --env DATA=VALUE, or --secret DATA=SECRET/KEY" in refusal("rayjob", path=str(recipe))
    assert rendered("rayjob", path=str(recipe), environment=("DATA=/data",))


def test_a_refused_manifest_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    output = tmp_path / "job.yaml"
    command = ["kubernetes", "render", RECIPE, "--image", IMAGE, "--output", str(output)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0 and done.stdout == f"wrote {output}\n"
    first = output.read_text()
    done = CliRunner().invoke(app, [*command, "--memory", "64 GB"])
    assert isinstance(done.exception, ConfigError)
    assert output.read_text() == first and [*tmp_path.iterdir()] == [output]


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
    config_map, _ = rendered("rayjob")
    (tmp_path / "job.sh").write_text(config_map["data"]["job.sh"])
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "MEGARL_WORKSPACE": str(tmp_path), "TMPDIR": str(tmp_path)}
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
    assert all(call.startswith("train /etc/megarl/recipe.yaml ") and call.endswith(" --resume") for call in calls)


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
