"""`megarl data`: look at data before they are trained on."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from megarl.console import print_survey
from megarl.types import ConfigError, DataError

app = typer.Typer(name="data", help="Look at data.", no_args_is_help=True, rich_markup_mode=None)


@app.command(name="check")
def check_data(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="File, folder or name on the Hub, as data.train takes it.")
    ],
    model: Annotated[
        str | None, typer.Option(help="Model folder, or its name on the Hub, whose tokens count.", show_default=False)
    ] = None,
    heldout: Annotated[
        list[str] | None,
        typer.Option(help="A source whose prompts this one should not have; repeatable.", show_default=False),
    ] = None,
    kind: Annotated[
        Literal["problems", "conversations", "pairs", "judged"] | None,
        typer.Option(
            help="For rl, sft, preference and reward_model, kto; left out: by the first record's fields.",
            show_default=False,
        ),
    ] = None,
    data_format: Annotated[
        str | None, typer.Option("--format", help="As data.format; left out: recognised.", show_default=False)
    ] = None,
    answer_field: Annotated[str | None, typer.Option(help="As data.answer_field.", show_default=False)] = None,
    chat_template: Annotated[str | None, typer.Option(help="As model.chat_template.", show_default=False)] = None,
    system_prompt: Annotated[str | None, typer.Option(help="As data.system_prompt.", show_default=False)] = None,
) -> None:
    """Read all of a data source: faults by line, lengths, duplicates, overlap with held-out data, the first record."""
    from megarl.config import ModelConfig
    from megarl.data.chat import tokenizer_of
    from megarl.data.formats import FORMATS, FieldNames
    from megarl.data.survey import survey

    if data_format is not None and data_format not in FORMATS:
        raise ConfigError(f"--format {data_format}: unknown; known are {', '.join(FORMATS)}")
    found = survey(
        source,
        names=FieldNames(data_format, {}, answer_field),
        kind=kind,
        tokenizer=tokenizer_of(ModelConfig(path=model, chat_template=chat_template)) if model else None,
        system_prompt=system_prompt,
        others=heldout or (),
    )
    print_survey(found, unit="tokens" if model else "characters")
    if not found.is_sound:
        raise typer.Exit(DataError.exit_code)
