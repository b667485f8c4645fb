"""`megarl convert`: weights between Hugging Face folders and Megatron's checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from megarl.console import print_conversion

app = typer.Typer(
    name="convert",
    help="Convert weights between Hugging Face folders and Megatron's torch_dist checkpoints, on the CPU.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

OutFolder = Annotated[Path, typer.Option("--out", help="Folder to write; must not be there yet.")]
CastTo = Annotated[
    Literal["float32", "bfloat16", "float16"] | None,
    typer.Option("--dtype", help="Type to cast to; left out: kept.", show_default=False),
]
Verify = Annotated[bool, typer.Option("--verify", help="Read everything back and compare every tensor.")]


@app.command()
def to_megatron(
    hf: Annotated[Path, typer.Option(help="Hugging Face model folder.")],
    out: OutFolder,
    tp: Annotated[int, typer.Option(help="Tensor-parallel size to chunk for.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline-parallel size to chunk for.")] = 1,
    ep: Annotated[int, typer.Option(help="Expert-parallel size to chunk for.")] = 1,
    etp: Annotated[int, typer.Option(help="Tensor-parallel size of experts to chunk for.")] = 1,
    dtype: CastTo = None,
    verify: Verify = False,
) -> None:
    """Write a model folder as a checkpoint that Megatron loads at any parallel sizes, fastest at these."""
    import torch

    from megarl.checkpoint import convert

    cast = None if dtype is None else getattr(torch, dtype)
    print_conversion(convert.to_megatron(hf, out, tp=tp, pp=pp, ep=ep, etp=etp, dtype=cast, verify=verify))


@app.command()
def to_hf(
    megatron: Annotated[
        Path,
        typer.Option(help="Checkpoint; or a run, whose newest is taken, or a folder with Megatron's tracker file."),
    ],
    out: OutFolder,
    hf: Annotated[
        Path | None,
        typer.Option(help="Model folder with config.json and tokenizer, for a checkpoint that does not carry them."),
    ] = None,
    dtype: CastTo = None,
    shard_gb: Annotated[
        float | None,
        typer.Option(help="Largest file in gigabytes; left out: files as before, or of 5.", show_default=False),
    ] = None,
    verify: Verify = False,
) -> None:
    """Write a Megatron checkpoint of any parallel sizes as a model folder."""
    import torch

    from megarl.checkpoint import convert

    cast = None if dtype is None else getattr(torch, dtype)
    size = None if shard_gb is None else int(shard_gb * 1e9)
    override: Mapping[str, Any] = {}
    checkpoint = convert.find_checkpoint(megatron)
    if checkpoint != megatron:
        print(f"converting {checkpoint}")
    if hf is None and (of_run := _model_of_run(checkpoint)) is not None:
        hf, override = of_run
    print_conversion(
        convert.to_hf(checkpoint, out, hf=hf, dtype=cast, shard_bytes=size, verify=verify, override=override)
    )


def _model_of_run(checkpoint: Path) -> tuple[Path, Mapping[str, Any]] | None:
    """The model folder that a run's recipe names and its model.override_config, of a checkpoint in a run folder.

    None elsewhere.
    """
    from megarl.config.recipe import load

    folder = checkpoint.absolute()
    home = folder if folder.name == "checkpoints" else folder.parent
    if home.name != "checkpoints" or not (home.parent / "config.yaml").is_file():
        return None
    model = load(home.parent / "config.yaml").model
    return Path(model.folder), model.override_config
