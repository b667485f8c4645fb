"""Compare the filled templates of Kubernetes with the schemas of KubeRay and SkyPilot themselves.

    python tools/published_manifests.py --crd ray.io_rayjobs.yaml --skypilot OTHER_VENV/bin/python

The tests use the compact schemas of `launch/kubernetes/`, because neither schema comes with a package of megarl's
environment. This program proves that they are true: run it after a change of them, or for a newer KubeRay or SkyPilot.
The CRD is helm-chart/kuberay-operator/crds/ray.io_rayjobs.yaml of KubeRay's release. SkyPilot needs an environment of
its own (`pip install skypilot[kubernetes]`). Exits with 1 if a manifest or a field differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

OF_SKYPILOT = """
import json, sys
import sky
from sky.utils import schemas
sky.Task.from_yaml_config(json.load(sys.stdin))
print(json.dumps({"version": sky.__version__, "task": list(schemas.get_task_schema()["properties"]),
                  "resources": list(schemas.get_resources_schema()["properties"])}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--crd", type=Path, help="ray.io_rayjobs.yaml of a release of KubeRay")
    parser.add_argument("--skypilot", help="Python of an environment with SkyPilot")
    options = parser.parse_args()
    problems: list[str] = []
    if options.crd:
        problems += of_kuberay(options.crd)
    if options.skypilot:
        problems += of_skypilot(options.skypilot)
    for problem in problems:
        print(problem)
    print(f"{len(problems)} differences")
    sys.exit(bool(problems))


VALUES = {
    "NAME": "my-run", "IMAGE": "registry.example.com/megarl:gpu", "VOLUME": "my-runs", "NODES": "2", "GPUS": "8",
    "CPUS": "96", "OVERRIDES": "train.steps=3 name=big",
}  # fmt: skip
KINDS = {"rayjob": {"MEMORY": "1000Gi"}, "skypilot": {"MEMORY": "1000", "GPU_KIND": "H100", "RECIPE": "my_recipe.yaml"}}


def filled(kind: str) -> dict[str, Any]:
    """Return the manifest that envsubst makes of a template, as the guide says."""
    values = VALUES | KINDS[kind]
    template = (ROOT / f"launch/kubernetes/{kind}.yaml").read_text()
    command = ["envsubst", " ".join(f"${name}" for name in values)]
    done = subprocess.run(command, input=template, capture_output=True, text=True, check=True, env=os.environ | values)
    return yaml.safe_load(done.stdout)


def of_kuberay(crd: Path) -> Iterator[str]:
    """Yield the differences from KubeRay's published schema."""
    document = yaml.load(crd.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    [version] = [version for version in document["spec"]["versions"] if version["name"] == "v1"]
    published = strict(version["schema"]["openAPIV3Schema"])
    published["properties"]["metadata"] = {"type": "object"}
    errors = Draft202012Validator(published).iter_errors(filled("rayjob"))
    yield from (f"{error.json_path}: {error.message:.200}" for error in errors)
    compact = json.loads((ROOT / "launch/kubernetes/rayjob.schema.json").read_text())
    yield from differing_fields(compact, published, compact["$defs"], "")


def strict(schema: Any) -> Any:
    """Return a schema of Kubernetes as JSON Schema: unknown fields are errors, as for `kubectl --validate=strict`."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: strict(item) for name, item in schema.items()}
    # A property may be called `properties` or `type`; only a schema has both as a mapping and a text.
    if schema.get("type") == "object" and isinstance(schema.get("properties"), dict):
        made["additionalProperties"] = False
    return made


def differing_fields(
    compact: Any, published: Mapping[str, Any], definitions: Mapping[str, Any], place: str
) -> Iterator[str]:
    """Yield fields that only one of two schemas has, and types that differ."""
    if not isinstance(compact, dict):
        return
    if "$ref" in compact:
        compact = definitions[compact["$ref"].rpartition("/")[2]]
    kinds, kind = compact.get("type"), published.get("type")
    if kinds and kind and kind not in (kinds if isinstance(kinds, list) else [kinds]):
        yield f"{place}: type {kinds} here, {kind} published"
    if "items" in compact:
        yield from differing_fields(compact["items"], published["items"], definitions, f"{place}[]")
    ours, theirs = compact.get("properties"), published.get("properties")
    if ours is None or theirs is None:
        return
    if compact.get("additionalProperties") is False:
        for name in sorted(ours.keys() ^ theirs.keys()):
            yield f"{place}.{name}: only {'here' if name in ours else 'published'}"
    for name in ours.keys() & theirs.keys():
        yield from differing_fields(ours[name], theirs[name], definitions, f"{place}.{name}")


def of_skypilot(python: str) -> Iterator[str]:
    """Yield the differences from SkyPilot's own schema. SkyPilot parses the task."""
    task = filled("skypilot")
    # SkyPilot asks for the values of secrets when it reads a task.
    task["secrets"] = dict.fromkeys(task["secrets"], "x")
    done = subprocess.run([python, "-c", OF_SKYPILOT], input=json.dumps(task), capture_output=True, text=True)
    if done.returncode:
        yield f"SkyPilot refuses the task: {done.stderr.strip()[-2000:]}"
        return
    found = json.loads(done.stdout.splitlines()[-1])
    print(f"SkyPilot {found['version']}")
    compact = json.loads((ROOT / "launch/kubernetes/skypilot.schema.json").read_text())
    for place, ours, theirs in (
        ("task", compact["properties"], found["task"]),
        ("task.resources", compact["properties"]["resources"]["properties"], found["resources"]),
    ):
        # A leading underscore marks SkyPilot's internal fields.
        for name in sorted(ours.keys() ^ {name for name in theirs if not name.startswith("_")}):
            yield f"{place}.{name}: only {'here' if name in ours else 'published'}"


if __name__ == "__main__":
    main()
