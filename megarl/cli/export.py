"""`megarl export`: a model folder made from a run, with a model card, and its upload to the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megarl.console.lines import print_lines
from megarl.console.results import print_conversion
from megarl.types import ConfigError


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run (runs/NAME).")],
    step: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Convert the checkpoint of this step to RUN/hf_step_NNNNNN. Default: the model that the run exported "
            "at its end, RUN/hf.",
            show_default=False,
        ),
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="Take the model of the run's best evaluation, RUN/hf_best.")] = (
        False
    ),
    out: Annotated[
        Path | None,
        typer.Option(
            help="With --step: write this folder instead of RUN/hf_step_NNNNNN. It must not exist.", show_default=False
        ),
    ] = None,
    push_to_hub: Annotated[
        str | None,
        typer.Option(
            metavar="OWNER/NAME",
            help="Upload the folder to this repository on the Hub, in one commit. It is created if missing. The token "
            "is HF_TOKEN, or that of hf auth login.",
            show_default=False,
        ),
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="With --push-to-hub: make a new repository private.")
    ] = False,
) -> None:
    """Make a model folder from a run's checkpoint, renew its model card, and upload it to the Hugging Face Hub.

    The card has base model, data, recipe, versions, and results with 95 % intervals: of the run, and of `megarl eval
    RUN`.
    """
    if step is not None and best:
        raise ConfigError("--step and --best: give one of them; --step takes a checkpoint, --best takes RUN/hf_best")
    if out is not None and step is None:
        raise ConfigError(
            f"--out {out}: works with --step only. Without it, the result is in {run / 'hf'}: copy that folder"
        )
    if private and push_to_hub is None:
        raise ConfigError("--private: has an effect with --push-to-hub only; leave it out")
    if push_to_hub is not None:
        from megarl.files.hub import check_push

        # Before the conversion, which may take long.
        check_push("--push-to-hub", push_to_hub)
    from megarl.loops.commands import exporting

    exported = exporting.export(run, step=step, is_best=best, out=out)
    if exported.conversion is not None:
        print_conversion(exported.conversion)
    print_lines([f"model of step {exported.step}, with a new model card: {exported.folder}"])
    if exported.drafter is not None:
        print_lines([f"its drafter, for rollout.vllm.speculative_config.model: {exported.drafter}"])
    if push_to_hub is not None:
        pushed = exporting.push(run, exported, push_to_hub, is_private=private)
        print_lines([f"pushed {pushed.name}: commit {pushed.commit}"])
        if exported.drafter is not None:
            upload = f"hf upload {push_to_hub}-drafter {exported.drafter}"
            print_lines([f"its drafter is not in this repository; upload it to one of its own: {upload}"])
