"""`megarl kubernetes`: runs a recipe as a job on Kubernetes, with KubeRay or SkyPilot."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from megarl.cli.arguments import Overrides, RecipeCommand, RecipePath, command_group

app = command_group("kubernetes", "Run a recipe on Kubernetes, with KubeRay or SkyPilot.")


@app.callback()
def _kubernetes() -> None:
    pass


@app.command(cls=RecipeCommand)
def render(
    recipe: RecipePath,
    image: Annotated[
        str,
        typer.Option(
            "--image",
            metavar="IMAGE",
            help="Container image with megarl, for example registry.example.com/megarl:gpu.",
            show_default=False,
        ),
    ],
    overrides: Overrides = None,
    to: Annotated[
        Literal["rayjob", "skypilot"], typer.Option("--to", help="Kind of manifest: KubeRay's or SkyPilot's.")
    ] = "rayjob",
    volume: Annotated[
        str | None,
        typer.Option(
            "--volume",
            metavar="NAME",
            help="Persistent volume with models, data and runs, mounted at /workspace: a PersistentVolumeClaim, or a "
            "volume of SkyPilot. Default: megarl.",
            show_default=False,
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu",
            metavar="KIND",
            help="Kind of GPU for SkyPilot. Default: cluster.gpu_memory_gib of the recipe.",
            show_default=False,
        ),
    ] = None,
    cpus: Annotated[
        int | None, typer.Option("--cpus", min=1, help="CPUs of a worker node.", show_default=False)
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            metavar="SIZE",
            help="Memory of a worker node: 256Gi for KubeRay, 256 (GiB) for SkyPilot.",
            show_default=False,
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option("--env", metavar="NAME=VALUE", help="Environment variable. May be repeated.", show_default=False),
    ] = None,
    secret: Annotated[
        list[str] | None,
        typer.Option(
            "--secret",
            metavar="NAME=SECRET/KEY",
            help="Environment variable with a value from a Secret of Kubernetes. SkyPilot: NAME, with the value given "
            "at launch. May be repeated.",
            show_default=False,
        ),
    ] = None,
    template: Annotated[
        Path | None,
        typer.Option(
            "--template",
            metavar="FILE",
            help="Manifest to fill in, with your site's settings. Default: megarl's, launch/kubernetes/rayjob.yaml or "
            "skypilot.yaml.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", metavar="FILE", help="File for the manifest. Default: it is printed.", show_default=False
        ),
    ] = None,
) -> None:
    """Print the manifest of a recipe's job, checked against the published schema.

    If anything is wrong, nothing is written.
    """
    from megarl.cli.checking import with_notices_shown
    from megarl.cluster.manifests import ManifestSettings, launch_overrides
    from megarl.cluster.manifests import render as render_manifest
    from megarl.config.recipe import load
    from megarl.files.atomic import replace_text
    from megarl.types import ConfigError

    override_texts = overrides or []
    settings = ManifestSettings(image, volume, gpu, cpus, memory, tuple(env or ()), tuple(secret or ()), template)
    loaded = with_notices_shown(load(recipe, [*override_texts, *launch_overrides(to)]))
    text = render_manifest(to, loaded, recipe, override_texts, settings)
    if output is None:
        print(text, end="")
        return
    try:
        replace_text(output, text)
    except OSError as error:
        raise ConfigError(f"--output {output}: cannot be written ({error.strerror}); give a file in a folder") from None
    print(f"wrote {output}")
