"""The images: clean by hadolint, with the same parts in Docker and Apptainer, and without a site's secrets."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "launch/container/Dockerfile").read_text()
DEFINITION = (ROOT / "launch/container/megarl.def").read_text()
HADOLINT = shutil.which("hadolint", path=f"{Path(sys.executable).parent}")


def stages() -> dict[str, str]:
    """The instructions of the Dockerfile by stage."""
    found = re.split(r"(?m)^FROM \S+ AS (\S+)\n", DOCKERFILE)[1:]
    return dict(zip(found[::2], found[1::2], strict=True))


def lint(text: str) -> subprocess.CompletedProcess[str]:
    assert HADOLINT is not None, "launch/setup.sh dev installs it"
    return subprocess.run([HADOLINT, "--no-color", "-"], input=text, capture_output=True, text=True, check=False)


def test_the_dockerfile_is_clean() -> None:
    done = lint(DOCKERFILE)
    assert (done.returncode, done.stdout) == (0, "")
    assert "DL3006" in lint("FROM debian\n").stdout


def test_the_stages_are_the_documented_targets() -> None:
    assert {"base", "cpu", "gpu"} <= stages().keys()
    for target in ("cpu", "gpu"):
        own = stages()[target]
        assert f"COPY --from={target}-environment /opt/megarl/.venv /opt/megarl/.venv" in own
        assert own.rstrip().endswith("USER 1000:1000")
        assert f"RUN launch/setup.sh {target},kubernetes\n" in stages()[f"{target}-environment"]
    assert 'ENTRYPOINT ["megarl"]' in stages()["runtime"]


def test_the_environments_layer_has_all_that_its_script_reads() -> None:
    """A file that launch/setup.sh reads and the stage lacks would fail the build, after minutes."""
    patterns = re.findall(r"(?m)^COPY (.+) \S+$", stages()["locked"])
    copied = [pattern for line in patterns for pattern in line.split()]
    read = re.findall(
        r"launch/(?:requirements|versions)-\S+?\.txt|pyproject\.toml", (ROOT / "launch/setup.sh").read_text()
    )
    for name in {re.sub(r"\$\{?\w+\}?", "*", name) for name in read} | {"LICENSE", "megarl/__init__.py"}:
        assert any(fnmatch(name, pattern) or name == pattern for pattern in copied), name


def ignored(name: str) -> bool:
    """Whether .dockerignore leaves a path out: the last pattern that fits it, or a folder above it, decides."""
    result = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line and not line.startswith("#"):
            pattern = line.removeprefix("!").removeprefix("**/")
            parts = name.split("/")
            places = ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]
            places += parts if line.startswith("**/") else []
            if any(fnmatch(place, pattern) for place in places):
                result = not line.startswith("!")
    return result


def test_images_have_the_code_and_no_secrets() -> None:
    patterns = [word for line in re.findall(r"(?m)^COPY (?!--from)(.+) \S+$", DOCKERFILE) for word in line.split()]
    needed = [str(path.relative_to(ROOT)) for pattern in patterns if pattern != "." for path in ROOT.glob(pattern)]
    assert len(needed) > 6
    assert [name for name in [*needed, "megarl/launch", "launch/slurm/job.sh"] if ignored(name)] == []
    unwanted = ["launch/slurm/site.env", ".git/config", ".venv/bin/python", "runs/a/config.yaml", "tests/conftest.py"]
    assert [name for name in [*unwanted, "megarl/cli/__pycache__/slurm.pyc", ".env"] if not ignored(name)] == []


def test_apptainers_image_has_the_same_parts() -> None:
    [base] = re.findall(r"(?m)^FROM (\S+:\S+) AS base$", DOCKERFILE)
    assert f"\nFrom: {base}\n" in DEFINITION
    section = DEFINITION.partition("%files\n")[2].partition("\n%")[0]
    files = [line.split() for line in section.strip().splitlines()]
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert {source for source, _ in files} == kept
    assert all(target == f"/opt/megarl/{source}" and (ROOT / source).exists() for source, target in files)
    assert "launch/setup.sh {{ TARGET }},kubernetes" in DEFINITION
    assert "find /opt/megarl -name site.env -delete" in DEFINITION
    for command in (
        "bash launch/container/system.sh {{ TARGET }}",
        'PATH="/opt/megarl/.venv/bin:$PATH"',
        'exec megarl "$@"',
    ):
        assert command in DEFINITION


def test_packages_are_installed_for_known_targets_only() -> None:
    script = ROOT / "launch/container/system.sh"
    done = subprocess.run(["bash", str(script), "gpus"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "launch/container/system.sh: target = 'gpus': not an image's target; choose cpu or gpu\n"


def test_the_devcontainer_builds_a_stage_of_the_dockerfile() -> None:
    settings = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    build, folder = settings["build"], ROOT / ".devcontainer"
    assert (folder / build["dockerfile"]).resolve() == ROOT / "launch/container/Dockerfile"
    assert (folder / build["context"]).resolve() == ROOT and build["target"] in stages()
    assert f"--create-home --shell /bin/bash {settings['remoteUser']}" in stages()[build["target"]]
    script, extras = settings["postCreateCommand"].split()
    assert (ROOT / script).is_file() and extras == "dev"
