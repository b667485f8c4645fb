"""Kubernetes manifests of recipes, from the templates in `launch/kubernetes/`: a RayJob of KubeRay, or a SkyPilot job.

A template is a complete manifest. Only the values given here are set in it. The result is checked against the fields
published by KubeRay or SkyPilot before it is returned.
"""

from __future__ import annotations

import copy
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megarl.config import ClusterConfig, Recipe
from megarl.config.cluster import NodeGroup
from megarl.config.secrets import holds_secret
from megarl.files.json_schema import schema_validator
from megarl.files.nearest import nearest
from megarl.files.shipped import home
from megarl.types import ConfigError

Kind = Literal["rayjob", "skypilot"]
Manifest = dict[str, Any]

_RECIPE = "/etc/megarl/recipe.yaml"
"""Place of the recipe in the pods."""
_LAUNCH = {"rayjob": ("cluster.launcher=ray", "cluster.ray_address=auto"), "skypilot": ("cluster.launcher=ray",)}
"""Overrides of a recipe by kind of manifest. SkyPilot's script adds the address of its Ray cluster."""
_START_SECONDS = 1800
"""Deadline for all ranks to connect, if the recipe has none: nodes may download an image of 15 GB first."""
_ENGINES_RESOURCE = "megarl_engines"
_MOST_BYTES = 1_000_000
"""Size of the largest recipe. Kubernetes refuses a ConfigMap above 1 MiB."""
_SAVE_SECONDS = 60
"""Seconds between the end of cluster.signal_seconds and the kill of the head's pod."""
_ARGUMENTS = re.compile(r"(?m)^set -- recipe\.yaml$")
"""Line of a script with the arguments of `megarl train`."""
_FROM_ENVIRONMENT = re.compile(r"\$\{oc\.env:\s*([A-Za-z_][A-Za-z0-9_]*)\s*\}")
"""Reference of a recipe to an environment variable without a default value."""


@dataclass(frozen=True, slots=True)
class ManifestSettings:
    """Settings of a manifest that no recipe has. None: the template's value."""

    image: str
    volume: str | None = None
    """Name of the persistent volume (a PersistentVolumeClaim, or a volume of SkyPilot) at /workspace."""
    gpu: str | None = None
    """Kind of the GPUs for SkyPilot, for example H200. Default: cluster.gpu_memory_gib."""
    cpus: int | None = None
    memory: str | None = None
    environment: tuple[str, ...] = ()
    """Environment variables, as NAME=VALUE."""
    secrets: tuple[str, ...] = ()
    """Environment variables with secret values. RayJob: NAME=SECRET/KEY. SkyPilot: NAME."""
    template: Path | None = None


def launch_overrides(kind: Kind) -> tuple[str, ...]:
    """Return the overrides that a job adds to those of its recipe. Checks of the recipe must include them."""
    return _LAUNCH[kind]


def render(kind: Kind, recipe: Recipe, path: str, overrides: Sequence[str], settings: ManifestSettings) -> str:
    """Return the YAML text of a recipe's manifest.

    `path` is the recipe's file, and `overrides` are those given by the user. Raises one ConfigError with all errors:
    settings that do not fit the kind, secrets in clear text, missing variables of the recipe, and violations of the
    published schema, each with its place in the manifest, the value and the remedy.
    """
    source = settings.template or home() / "launch/kubernetes" / f"{kind}.yaml"
    documents = _read(source)
    manifest = _only(documents, kind, source)
    # Checked first, so that the places to fill exist.
    _check(manifest, kind, source)
    fill = _fill_rayjob if kind == "rayjob" else _fill_skypilot
    variables = _variables(kind, settings)
    _check_references(recipe, variables, kind)
    arguments = [_RECIPE, *overrides, *_LAUNCH[kind], *_further(recipe, kind)]
    fill(manifest, recipe, settings, variables)
    if kind == "rayjob":
        _fill_config_map(documents, manifest["metadata"]["name"], path, arguments, source)
    else:
        manifest["file_mounts"] = {**manifest.get("file_mounts", {}), _RECIPE: str(Path(path).resolve())}
        manifest["run"] = _with_arguments(manifest["run"], arguments, f"{source}: run")
    _check(manifest, kind, source)
    return _header(recipe, kind) + _dump(documents)


def _header(recipe: Recipe, kind: Kind) -> str:
    start = "kubectl apply -f FILE" if kind == "rayjob" else "sky jobs launch FILE"
    return f"# The job of run {recipe.name}, written by megarl kubernetes render. Start it: {start}\n"


# Templates.


def _read(source: Path) -> list[Manifest]:
    """Return the documents of a YAML file. Raises ConfigError if it is missing or not YAML mappings."""
    import yaml

    try:
        documents = list(yaml.safe_load_all(source.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read ({error.strerror}); name a template with --template") from None
    # ValueError: not UTF-8, or an impossible date or number.
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{source}: not valid YAML: {error}; correct the template") from None
    if not documents or not all(isinstance(document, dict) for document in documents):
        raise ConfigError(f"{source}: holds something other than mappings; copy launch/kubernetes/rayjob.yaml again")
    return documents


def _only(documents: Sequence[Manifest], kind: Kind, source: Path) -> Manifest:
    """Return the document of the job."""
    matches = [document for document in documents if kind == "skypilot" or document.get("kind") == "RayJob"]
    if len(matches) != 1:
        title = "documents with kind: RayJob" if kind == "rayjob" else "documents"
        raise ConfigError(
            f"{source}: has {len(matches)} {title}, one is needed; start from launch/kubernetes/{kind}.yaml"
        )
    return matches[0]


def _dump(documents: Sequence[Manifest]) -> str:
    import yaml

    class Dumper(yaml.SafeDumper):
        """Dumper with scripts as blocks, and without anchors for values that occur twice."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, text)
    return yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, width=1000, allow_unicode=True)


def _with_arguments(script: str, arguments: Sequence[str], place: str) -> str:
    """Return a script with the arguments of `megarl train` in its line `set -- recipe.yaml`."""
    line = f"set -- {shlex.join(arguments)}"
    filled, count = _ARGUMENTS.subn(lambda _: line, script)
    if count != 1:
        raise ConfigError(
            f"{place}: has {count} lines `set -- recipe.yaml`, one is needed: the arguments of megarl train replace it"
        )
    return filled


# Variables.


def _variables(kind: Kind, settings: ManifestSettings) -> dict[str, Manifest | str | None]:
    """Return the environment variables by name: a text, or a reference to a Secret (RayJob), or None (SkyPilot)."""
    problems: list[str] = []
    variables: dict[str, Manifest | str | None] = {}
    for given in settings.environment:
        name, equals, value = given.partition("=")
        if not equals:
            problems.append(f"--env {given}: has no value; write --env NAME=VALUE")
        elif holds_secret((name,), value):
            form = f"{name}=SECRET/KEY" if kind == "rayjob" else name
            problems.append(f"--env {name}=<hidden>: a secret must not stand in a manifest; write --secret {form}")
        variables[name] = value
    for given in settings.secrets:
        name, equals, reference = given.partition("=")
        if kind == "skypilot":
            if equals:
                problems.append(
                    f"--secret {name}=<hidden>: SkyPilot takes the value at launch (sky jobs launch --secret {name}); "
                    f"write --secret {name}"
                )
            variables[name] = None
            continue
        secret, slash, key = reference.partition("/")
        if not (secret and slash and key):
            problems.append(f"--secret {name}: not the name and key of a Secret; write --secret NAME=SECRET/KEY")
        variables[name] = {"secretKeyRef": {"name": secret, "key": key}}
    if problems:
        raise ConfigError("\n".join(problems))
    return variables


def _check_references(recipe: Recipe, variables: Mapping[str, Any], kind: Kind) -> None:
    """Raise ConfigError if the recipe refers to environment variables that the job would not have."""
    needed = {name for text in recipe.references.values() for name in _FROM_ENVIRONMENT.findall(text)}
    secret = "=SECRET/KEY" if kind == "rayjob" else ""
    problems = [
        f"${{oc.env:{name}}}: the recipe needs this variable, the job would lack it; add --env {name}=VALUE, or "
        f"--secret {name}{secret} for a secret"
        for name in sorted(needed - variables.keys())
    ]
    if problems:
        raise ConfigError("\n".join(problems))


# RayJob.


def _further(recipe: Recipe, kind: Kind) -> Iterator[str]:
    """Yield overrides for fields that the recipe leaves at their defaults."""
    if "start_timeout_seconds" not in recipe.cluster.model_fields_set:
        yield f"cluster.start_timeout_seconds={_START_SECONDS}"
    if kind == "rayjob" and (engines := recipe.cluster.groups.engines) is not None and not engines.ray_resources:
        yield f"cluster.groups.engines.ray_resources={{{_ENGINES_RESOURCE}: 0.001}}"


def _fill_rayjob(
    manifest: Manifest, recipe: Recipe, settings: ManifestSettings, variables: Mapping[str, Manifest | str | None]
) -> None:
    cluster, spec = recipe.cluster, manifest["spec"]
    manifest["metadata"]["name"] = re.sub(r"[^a-z0-9]+", "-", recipe.name.lower()).strip("-")
    spec["backoffLimit"] = cluster.max_restarts
    ray = spec["rayClusterSpec"]
    head, workers = ray["headGroupSpec"], ray["workerGroupSpecs"]
    head["template"]["spec"]["terminationGracePeriodSeconds"] = cluster.signal_seconds + _SAVE_SECONDS
    if cluster.groups.engines is not None:
        engines = copy.deepcopy(workers[0])
        engines["groupName"] = "engines"
        workers.append(engines)
        custom = cluster.groups.engines.ray_resources or {_ENGINES_RESOURCE: 1}
        # Ray itself makes the resources of an accelerator's type.
        named = {name: max(1, amount) for name, amount in custom.items() if not name.startswith("accelerator_type:")}
        # KubeRay puts the text into a shell command, so it has quotes of its own.
        engines.setdefault("rayStartParams", {})["resources"] = json.dumps(json.dumps(named))
        _fill_nodes(engines, cluster.groups.engines, cluster.device, settings)
    _fill_nodes(workers[0], cluster, cluster.device, settings)
    for group in (head, *workers):
        pod = group["template"]["spec"]
        pod["containers"][0]["image"] = settings.image
        _fill_variables(pod["containers"][0], variables)
        for volume in pod.get("volumes", ()):
            if settings.volume is not None and volume["name"] == "workspace" and "persistentVolumeClaim" in volume:
                volume["persistentVolumeClaim"]["claimName"] = settings.volume


def _fill_nodes(group: Manifest, nodes: ClusterConfig | NodeGroup, device: str, settings: ManifestSettings) -> None:
    """Set the number and the size of a worker group's pods: one pod a node, one GPU (or CPU) a rank."""
    ranks, parameters = nodes.ranks_per_node, group.setdefault("rayStartParams", {})
    group |= dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), nodes.nodes)
    size: dict[str, int | str] = {}
    if device == "cpu":
        parameters["num-cpus"] = str(ranks)
        size["cpu"] = settings.cpus or ranks
    else:
        parameters["num-gpus"] = str(ranks)
        size["nvidia.com/gpu"] = ranks
        if settings.cpus is not None:
            size["cpu"] = settings.cpus
    if settings.memory is not None:
        size["memory"] = settings.memory
    resources = group["template"]["spec"]["containers"][0].setdefault("resources", {})
    # Kubernetes requests what is limited, unless `requests` differ.
    resources["limits"] = {**resources.get("limits", {}), **size}


def _fill_variables(container: Manifest, variables: Mapping[str, Manifest | str | None]) -> None:
    """Add environment variables to a container. One of the template with the same name is replaced."""
    unchanged = [variable for variable in container.get("env", ()) if variable["name"] not in variables]
    variables_made = [
        {"name": name, "value": value} if isinstance(value, str) else {"name": name, "valueFrom": value}
        for name, value in variables.items()
    ]
    container["env"] = [*unchanged, *variables_made]


def _fill_config_map(
    documents: Sequence[Manifest], name: str, path: str, arguments: Sequence[str], source: Path
) -> None:
    """Put the recipe and the script of the job into the ConfigMap, and name it after the job."""
    content = Path(path).read_text(encoding="utf-8")
    if len(content.encode()) > _MOST_BYTES:
        raise ConfigError(f"{path}: has {len(content.encode())} bytes, a ConfigMap at most {_MOST_BYTES}; shorten it")
    maps = [document for document in documents if document.get("kind") == "ConfigMap"]
    if len(maps) != 1 or maps[0].get("apiVersion") != "v1" or not isinstance(maps[0].get("metadata"), dict):
        raise ConfigError(f"{source}: needs one document with kind: ConfigMap, apiVersion: v1 and metadata; copy it "
                          "from launch/kubernetes/rayjob.yaml")  # fmt: skip
    script = home() / "launch/kubernetes/job.sh"
    filled = _with_arguments(script.read_text(encoding="utf-8"), arguments, str(script))
    maps[0]["metadata"]["name"] = name
    maps[0]["data"] = {"recipe.yaml": content, "job.sh": filled}
    [job] = [document for document in documents if document.get("kind") == "RayJob"]
    for volume in job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"].get("volumes", ()):
        if volume["name"] == "recipe" and "configMap" in volume:
            volume["configMap"]["name"] = name


# SkyPilot.


def _fill_skypilot(
    manifest: Manifest, recipe: Recipe, settings: ManifestSettings, variables: Mapping[str, Manifest | str | None]
) -> None:
    cluster, resources = recipe.cluster, manifest["resources"]
    if cluster.groups.engines is not None:
        raise ConfigError("cluster.groups.engines: a SkyPilot job has nodes of one kind; render --to rayjob")
    manifest["name"] = recipe.name
    manifest["num_nodes"] = cluster.nodes
    resources["image_id"] = f"docker:{settings.image}"
    if cluster.device == "cpu":
        resources.pop("accelerators", None)
        resources["cpus"] = f"{settings.cpus or cluster.ranks_per_node}+"
    else:
        resources["accelerators"] = f"{_gpu_kind(cluster, settings)}:{cluster.ranks_per_node}"
        if settings.cpus is not None:
            resources["cpus"] = f"{settings.cpus}+"
    if settings.memory is not None:
        resources["memory"] = f"{settings.memory}+"
    if settings.volume is not None:
        manifest["volumes"] = {**manifest.get("volumes", {}), "/workspace": settings.volume}
    values = {name: value for name, value in variables.items() if value is not None}
    manifest["envs"] = {**manifest.get("envs", {}), **values}
    hidden: dict[str, None] = {name: None for name, value in variables.items() if value is None}
    manifest["secrets"] = {**manifest.get("secrets", {}), **hidden}


def _gpu_kind(cluster: ClusterConfig, settings: ManifestSettings) -> str:
    """Return SkyPilot's name of the recipe's GPUs. Raises ConfigError if it is unknown."""
    kind = settings.gpu or (cluster.gpu_memory_gib if isinstance(cluster.gpu_memory_gib, str) else None)
    if kind is None:
        raise ConfigError(
            f"cluster.gpu_memory_gib = {cluster.gpu_memory_gib}: SkyPilot asks for a kind of GPU; set h100, h200 or "
            "b200 there, or give --gpu KIND (`sky show-gpus` lists them)"
        )
    return kind.upper()


# Checks against published schemas.


def _check(manifest: Manifest, kind: Kind, source: Path) -> None:
    """Raise one ConfigError with all violations of the published fields, and all secrets in clear text."""
    schema = json.loads((home() / "launch/kubernetes" / f"{kind}.schema.json").read_text(encoding="utf-8"))
    errors = sorted(schema_validator(schema).iter_errors(manifest), key=lambda error: error.json_path)
    problems = [line for error in errors for line in _lines(error)]
    problems += _clear_secrets(manifest)
    if problems:
        raise ConfigError("\n".join(f"{source.name}: {problem}" for problem in problems))


def _lines(error: Any) -> Iterator[str]:
    """Yield the messages of one violation: place, value, remedy."""
    place = _dotted(error.absolute_path)
    if error.validator == "additionalProperties" and isinstance(error.instance, dict):
        properties = error.schema["properties"]
        for name in sorted(error.instance.keys() - properties.keys(), key=str):
            near = nearest(str(name), properties)
            remedy = f"did you mean {near}?" if near else f"remove it; known here: {', '.join(properties)}"
            yield f"{_dotted((*error.absolute_path, name))}: unknown field; {remedy}"
    elif error.validator == "required":
        for name in error.validator_value:
            if name not in error.instance:
                yield f"{_dotted((*error.absolute_path, name))}: missing; add it"
    else:
        rule = error.schema.get("description", f"must fit {error.validator}: {error.validator_value}")
        yield f"{place} = {_shown(error)}: needs {rule}"


def _shown(error: Any) -> str:
    """Return the value of a violation for its message. Values of secrets are hidden."""
    place, value = list(error.absolute_path), error.instance
    if holds_secret(tuple(place), value if isinstance(value, str) else "x") and "secretKeyRef" not in place:
        return "<hidden>"
    return f"{value!r:.100}"


def _dotted(place: Iterable[str | int]) -> str:
    """Return a place as a text: spec.workerGroupSpecs[0].template."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".") or "(top)"


def _clear_secrets(value: Any, place: tuple[str | int, ...] = ()) -> Iterator[str]:
    """Yield one message per environment variable of the manifest with a secret in clear text."""
    remedy = "<hidden>: a secret must not stand in a manifest; give it with --secret"
    if isinstance(value, dict):
        if {"name", "value"} <= value.keys() and holds_secret((str(value["name"]),), value["value"]):
            yield f"{_dotted((*place, 'value'))} of {value['name']} = {remedy}"
        for name, item in value.items():
            if place[-1:] == ("envs",) and holds_secret((str(name),), item):
                yield f"{_dotted((*place, name))} = {remedy}"
            yield from _clear_secrets(item, (*place, name))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _clear_secrets(item, (*place, index))
