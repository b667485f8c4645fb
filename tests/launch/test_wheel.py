"""The wheel alone, outside a clone: its files, its commands, one training step."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.cli.quickstart import MAKERS

pytestmark = pytest.mark.end_to_end
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the repository's files without its ignored ones."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    files = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.split(b"\0")
    kept = [
        os.fsdecode(file)
        for file in files
        if file.startswith((b"megarl/", b"launch/", b"tools/", b"LICENSE", b"README", b"py"))
    ]
    packed = subprocess.run(["tar", "-c", *kept], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x"], cwd=source, input=packed, check=True)
    build = [
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--wheel-dir",
        str(out),
        str(source),
    ]
    subprocess.run([sys.executable, "-m", "pip", *build], check=True)
    return next(out.glob("megarl-*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Runs a command of the installed wheel in a new folder. The libraries are those of this environment."""
    site, work = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("work")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site)]
    subprocess.run([*pip, str(wheel)], check=True)

    def run(*arguments: str | Path) -> str:
        command = [sys.executable, "-m", "megarl", *map(str, arguments)]
        environment = {**os.environ, "PYTHONPATH": str(site)}
        done = subprocess.run(
            command, cwd=work, env=environment, capture_output=True, text=True, timeout=900, check=False
        )
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    return run


def test_it_holds_what_commands_read(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    delivered = [file.relative_to(ROOT) for file in (ROOT / "launch/recipes").glob("*.yaml")]
    slurm = ("job.sh", "train.sbatch", "service.sbatch", "ray.sbatch", "ray_node.sh")
    delivered += [Path("launch/slurm", name) for name in slurm]
    kubernetes = ("rayjob.yaml", "rayjob.schema.json", "skypilot.yaml", "skypilot.schema.json", "job.sh")
    delivered += [Path("launch/kubernetes", name) for name in kubernetes]
    assert {f"megarl/{file}" for file in delivered} <= names
    assert {"megarl/py.typed", "megarl/config/hints/migration.md", "megarl/report/page.js"} <= names
    assert "megarl/launch/recipes/recipe.schema.json" in names and "megarl/launch/slurm/site.env" not in names
    assert not any(name.startswith(("tests/", "tools/", "launch/")) for name in names)
    tools = {name.removeprefix("megarl/tools/") for name in names if name.startswith("megarl/tools/")}
    assert tools == {file for file, _ in MAKERS.values()} | {"quickstart_report.py"}


def test_its_commands_need_no_clone(installed: Callable[..., str], tmp_path: Path) -> None:
    listed = installed("recipes")
    assert "quickstart\n    GRPO on two ranks" in listed
    assert "wrote problems/" in installed("make", "code", "--out", "problems")
    installed("recipes", "qwen3_14b_dapo_h200", "tiny_rl", "--to", tmp_path)
    recipe = tmp_path / "qwen3_14b_dapo_h200.yaml"
    assert recipe.read_bytes() == (ROOT / "launch/recipes/qwen3_14b_dapo_h200.yaml").read_bytes()
    assert json.loads(installed("plan", recipe, "--json"))["fits"] is True
    script = installed("slurm", "render", recipe)
    home = next(line.partition("=")[2] for line in script.splitlines() if line.startswith("MEGARL_HOME="))
    assert Path(home, "launch/slurm/job.sh").is_file() and not Path(home).is_relative_to(ROOT)
    # A folder with a blank is quoted.
    assert f"MEGARL_VENV=${{MEGARL_VENV:-{shlex.quote(sys.prefix)}}}\n" in script


@pytest.mark.long
def test_it_trains_and_reports(installed: Callable[..., str], tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    data = tmp_path / "sums.jsonl"
    sums = [{"messages": [{"role": "user", "content": f"{n} + 1 ="}], "gt_answer": str(n + 1)} for n in range(8)]
    data.write_text("".join(json.dumps(one) + "\n" for one in sums))
    installed("recipes", "tiny_rl", "--to", tmp_path)
    installed(
        "train", tmp_path / "tiny_rl.yaml", f"model.path={tiny_model()}", f"data.train={data}",
        f"data.validation.heldout={data}", f"runs_folder={tmp_path}", "cluster.ranks_per_node=1", "train.steps=1",
        "train.prompts_per_step=2", "train.samples_per_prompt=2", "rollout.sampling.max_new_tokens=4",
        "optimizer.warmup_steps=0",
    )  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / "tiny_rl/metrics.jsonl").read_text().splitlines()]
    assert any("train/grad_norm" in line for line in lines)
    installed("report", tmp_path / "tiny_rl")
    assert (tmp_path / "tiny_rl/report.html").is_file()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["quikstart"], "quikstart: not a recipe of megarl; did you mean quickstart?"),
        (["tiny_rl", "--to", "{folder}"], "tiny_rl.yaml: exists already; name another folder with --to"),
    ],
)
def test_a_wrong_recipe_copies_nothing(tmp_path: Path, arguments: list[str], expected: str) -> None:
    (tmp_path / "tiny_rl.yaml").write_text("mine")
    command = [sys.executable, "-m", "megarl", "recipes", *(text.format(folder=tmp_path) for text in arguments)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2 and expected in done.stderr.replace("\n", " ")
    assert (tmp_path / "tiny_rl.yaml").read_text() == "mine" and len([*tmp_path.iterdir()]) == 1
