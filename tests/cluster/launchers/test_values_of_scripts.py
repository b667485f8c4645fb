"""Values of a run folder in batch scripts and manifests: names of nodes, or a refusal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.cluster.launchers.sbatch import is_host_name, render, reporting_bad_nodes
from megarl.config.recipe import load
from megarl.tracking.run_folder import RunFolder
from megarl.types import ConfigError, DataError, FaultyNodeError

RECIPE = Path(__file__).resolve().parents[3] / "launch/recipes/qwen3_32b_grpo.yaml"
HOSTILE = [
    "n1\nscontrol shutdown",
    "n1\n",
    "n1\r#SBATCH --wrap=id",
    "n1,n2",
    "n[1-4]",
    "--wrap=id",
    "n1 n2",
    "$(id)",
    "`id`",
    "n1;id",
    "n1'",
    "n1\u2028id",
    "",
    "n" * 254,
    7,
    None,
    ["n1"],
]


def write_status(folder: Path, bad_nodes: object) -> Path:
    run = folder / "qwen3_32b_grpo"
    run.mkdir(parents=True)
    (run / "status.json").write_text(json.dumps({"state": "failed", "step": 3, "bad_nodes": bad_nodes}))
    return run


@pytest.mark.parametrize("value", HOSTILE)
def test_what_is_not_a_host_does_not_reach_a_batch_script(tmp_path: Path, value: object) -> None:
    run = write_status(tmp_path, ["n1", value])
    with pytest.raises(DataError, match=r"status\.json: bad_nodes = ") as error:
        render(load(RECIPE, [f"runs_folder={tmp_path}"]), arguments=["recipe.yaml"])
    assert str(run) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("value", ["n1", {"n1": 1}, 3])
def test_nodes_that_are_not_a_list_are_refused(tmp_path: Path, value: object) -> None:
    write_status(tmp_path, value)
    with pytest.raises(DataError, match=r"status\.json: bad_nodes = .*not a list"):
        render(load(RECIPE, [f"runs_folder={tmp_path}"]), arguments=["recipe.yaml"])


def test_names_and_addresses_of_hosts_are_excluded(tmp_path: Path) -> None:
    names = ["gpu7", "node-1.cluster.example", "gpu_07", "10.0.0.7", "fe80::1"]
    write_status(tmp_path, names)
    script = render(load(RECIPE, [f"runs_folder={tmp_path}"]), arguments=["recipe.yaml"])
    assert f"#SBATCH --exclude={','.join(names)}" in script.splitlines()


def test_a_job_of_ray_excludes_no_nodes_because_the_run_avoids_them(tmp_path: Path) -> None:
    write_status(tmp_path, ["10.0.0.7 (abcdef12)"])
    assert "--exclude" not in render(
        load(RECIPE, [f"runs_folder={tmp_path}", "cluster.launcher=ray"]), arguments=["r.yaml"]
    )


def test_a_resumed_run_refuses_nodes_that_are_not_names(tmp_path: Path) -> None:
    write_status(tmp_path, ["n1\nn2"])
    with RunFolder(load(RECIPE, [f"runs_folder={tmp_path}"]), resume=True) as folder, pytest.raises(DataError):
        folder.begin()


def test_only_hosts_are_reported_to_the_batch_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGARL_BAD_NODES_FILE", str(tmp_path / "bad"))
    with pytest.raises(FaultyNodeError), reporting_bad_nodes():
        raise FaultyNodeError("wrong", nodes=("n1", "n2\nn3", "10.0.0.7 (abcdef12)"))
    assert (tmp_path / "bad").read_text() == "n1\n"


@pytest.mark.parametrize("name", ["$(id)", "a`id`", 'a"b', "a\\b", "a b", "a\nb"])
def test_a_resource_of_ray_is_a_name(name: str) -> None:
    kinds = json.dumps({"nodes": 1, "ranks_per_node": 1, "ray_resources": {name: 1.0}})
    with pytest.raises(ConfigError, match=r"cluster\.groups\.engines\.ray_resources"):
        load(RECIPE, ["rollout.placement=separate", f"cluster.groups.engines={kinds}"])


def test_a_host_name_is_one_word() -> None:
    assert [value for value in HOSTILE if is_host_name(value)] == []
