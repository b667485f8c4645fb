"""`megarl convert`: weights between Hugging Face folders and Megatron's checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from megarl.cli.arguments import command_group
from megarl.console.results import print_conversion

app = command_group(
    "convert", "Convert weights between Hugging Face folders and Megatron's torch_dist checkpoints, on the CPU."
)

OutFolder = Annotated[Path, typer.Option("--out", help="Folder to write. It must not exist yet.")]
CastTo = Annotated[
    Literal["float32", "bfloat16", "float16"] | None,
    typer.Option(
        "--dtype",
        help="Data type of the written weights. Default: unchanged.",
        show_default=False,
    ),
]
Verify = Annotated[bool, typer.Option("--verify", help="Read the written weights back and compare every tensor.")]


@app.command()
def to_megatron(
    hf: Annotated[Path, typer.Option(help="Folder of the Hugging Face model.")],
    out: OutFolder,
    tp: Annotated[
        int,
        typer.Option(
            help="Number of tensor-parallel ranks for which the checkpoint is split. Other sizes load it more slowly."
        ),
    ] = 1,
    pp: Annotated[
        int,
        typer.Option(help="Pipeline-parallel size for which the checkpoint is split. Other sizes load it more slowly."),
    ] = 1,
    ep: Annotated[
        int,
        typer.Option(help="Expert-parallel size for which the checkpoint is split. Other sizes load it more slowly."),
    ] = 1,
    etp: Annotated[
        int,
        typer.Option(
            help="Expert-tensor-parallel size for which the checkpoint is split. Other sizes load it more slowly."
        ),
    ] = 1,
    dtype: CastTo = None,
    verify: Verify = False,
) -> None:
    """Write a Hugging Face model folder as a Megatron checkpoint, with one chunk per shard of the given parallel sizes.

    A trainer of any parallel sizes can load the checkpoint, fastest with the given sizes.
    """
    import torch

    from megarl.checkpoint import convert

    torch_dtype = None if dtype is None else getattr(torch, dtype)
    print_conversion(convert.to_megatron(hf, out, tp=tp, pp=pp, ep=ep, etp=etp, dtype=torch_dtype, verify=verify))


@app.command()
def to_hf(
    megatron: Annotated[
        Path,
        typer.Option(help="Folder of a Megatron checkpoint; or of a run or several checkpoints, for the newest one."),
    ],
    out: OutFolder,
    hf: Annotated[
        Path | None,
        typer.Option(
            help="Folder with config.json and tokenizer of the Hugging Face model. Needed if the checkpoint has none."
        ),
    ] = None,
    dtype: CastTo = None,
    shard_gb: Annotated[
        float | None,
        typer.Option(
            help="Maximum size of a weight file in gigabytes. Default: as in the original model, or 5.",
            show_default=False,
        ),
    ] = None,
    verify: Verify = False,
) -> None:
    """Write a Megatron checkpoint of any parallel sizes as a Hugging Face model folder."""
    import torch

    from megarl.checkpoint import convert

    torch_dtype = None if dtype is None else getattr(torch, dtype)
    # Decimal gigabytes, as the Hub and transformers count file sizes.
    max_shard_bytes = None if shard_gb is None else int(shard_gb * 1e9)
    override: Mapping[str, Any] = {}
    checkpoint = convert.find_checkpoint(megatron)
    # The user named a run or a folder of checkpoints, so the choice is printed.
    if checkpoint != megatron:
        print(f"converting the checkpoint {checkpoint}")
    # A run's model.override_config changed config.json, so the converted folder needs it too.
    if hf is None and (run_model := _find_model_of_run(checkpoint)) is not None:
        hf, override = run_model
    print_conversion(
        convert.to_hf(
            checkpoint, out, hf=hf, dtype=torch_dtype, shard_bytes=max_shard_bytes, verify=verify, override=override
        )
    )


def _find_model_of_run(checkpoint: Path) -> tuple[Path, Mapping[str, Any]] | None:
    """Return model folder and model.override_config from the run that contains a checkpoint. None: no run folder
    contains it.
    """
    from megarl.config.recipe import load_of_run
    from megarl.tracking.run_record import RunRecord

    folder = checkpoint.absolute()
    checkpoints_folder = folder if folder.name == "checkpoints" else folder.parent
    if checkpoints_folder.name != "checkpoints" or not (checkpoints_folder.parent / "config.yaml").is_file():
        return None
    RunRecord.read(checkpoints_folder.parent).refuse_newer_version()
    model = load_of_run(checkpoints_folder.parent).model
    return Path(model.folder), model.override_config
