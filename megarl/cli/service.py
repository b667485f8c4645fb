"""`megarl service`: serves programs written with the Tinker SDK."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from megarl.cli.arguments import Overrides, RecipePath


def service(
    recipe: RecipePath,
    overrides: Overrides = None,
    host: Annotated[
        str, typer.Option(help="Address to listen at. Others than this machine's need --keys.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0: any free one.")] = 8420,
    keys: Annotated[
        Path | None,
        typer.Option(
            help="File of accounts: a name and the SHA-256 of a key in each line. Default: one account for all."
        ),
    ] = None,
    serve_as: Annotated[
        str | None,
        typer.Option(help="Name of the base model for clients, for example Qwen/Qwen3-8B. Default: model.path."),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Folder or Hub name from which clients load the tokenizer. Default: model.path."),
    ] = None,
    idle_minutes: Annotated[
        float,
        typer.Option(
            min=0.1,
            help="Minutes without requests until a model moves from host memory to disk. Its next request brings it "
            "back. A loop's pauses for sampling are shorter than the default.",
        ),
    ] = 30,
    checkpoint_gib: Annotated[
        int, typer.Option(min=1, help="Maximum GiB of checkpoints of one account on the disk of the run.")
    ] = 1024,
    host_memory_gib: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="GiB of each host's memory for models and copies of their weights. Default: 3/4 of what is available "
            "after the start. Beyond it models move to disk; what still does not fit is refused.",
        ),
    ] = None,
    engine_slots: Annotated[
        int | None,
        typer.Option(min=1, help="Adapters that an engine samples from at once. Default: 4; 1 with lora.sync=merged."),
    ] = None,
    queued_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of all accounts' unfinished requests.")] = 1
    << 27,
    queued_tokens_per_key: Annotated[
        int, typer.Option(min=1, help="Maximum tokens of one account's unfinished requests.")
    ] = 1 << 25,
    queued_mib_per_key: Annotated[
        int, typer.Option(min=32, help="Maximum MiB of the bodies of one account's unfinished requests.")
    ] = 2048,
) -> None:
    """Serve programs written with the Tinker SDK: LoRA training and sampling on the ranks of a recipe."""
    from megarl.console.lines import print_lines
    from megarl.service.command import prepare, run
    from megarl.service.queueing.admission import QueueLimits

    prepared = prepare(
        Path(recipe),
        overrides or (),
        host=host,
        port=port,
        keys=keys,
        served_name=serve_as,
        tokenizer=tokenizer,
        idle_seconds=60 * idle_minutes,
        max_checkpoint_bytes=checkpoint_gib * 2**30,
        max_host_bytes=None if host_memory_gib is None else int(host_memory_gib * 2**30),
        engine_slots=engine_slots,
        limits=QueueLimits(
            tokens=queued_tokens, tokens_per_key=queued_tokens_per_key, bytes_per_key=queued_mib_per_key * 2**20
        ),
    )
    print_lines(prepared.notices)

    def announce(url: str) -> None:
        print(f"serving {prepared.served.name} at {url}", flush=True)

    asyncio.run(run(prepared, announce))
