"""`megarl data`: examine data before training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from megarl.cli.arguments import command_group, recipe_file, refuse_idle_options
from megarl.console.surveys import print_survey
from megarl.types import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

    from megarl.config import Recipe
    from megarl.data.formats import FieldNames

app = command_group("data", "Examine data sets before training.")


@app.command(name="check")
def check_data(
    context: typer.Context,
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="[SOURCE]",
            help="File, folder or Hub name of a data source, as in data.train. Default: all data sets of --recipe.",
            show_default=False,
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="RECIPE",
            help="YAML file of a recipe, or a name that `megarl recipes` lists. Its model, field names and system "
            "prompt apply; SOURCE is read as its training data.",
            show_default=False,
            callback=recipe_file,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Folder or Hub name of a model whose tokenizer counts tokens. Default: lengths are in characters.",
            show_default=False,
        ),
    ] = None,
    heldout: Annotated[
        list[str] | None,
        typer.Option(
            help="Held-out data source. None of its prompts may be in SOURCE. May be repeated.", show_default=False
        ),
    ] = None,
    kind: Annotated[
        Literal["problems", "conversations", "pairs", "judged"] | None,
        typer.Option(
            help="Use of the records: problems (rl), conversations (sft), pairs (preference, reward_model), "
            "judged (kto). Default: decided by the fields of the first record.",
            show_default=False,
        ),
    ] = None,
    data_format: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="Format of the records, as in data.format. Default: recognised from the first record.",
            show_default=False,
        ),
    ] = None,
    fields: Annotated[
        str | None,
        typer.Option(
            help="Names of the record fields, as in data.fields, for example '{prompt: question, answer: solution}'.",
            show_default=False,
        ),
    ] = None,
    answer_field: Annotated[
        str | None, typer.Option(help="Record field with the gold answer, as in data.answer_field.", show_default=False)
    ] = None,
    chat_template: Annotated[
        str | None, typer.Option(help="Chat template, as in model.chat_template.", show_default=False)
    ] = None,
    system_prompt: Annotated[
        str | None, typer.Option(help="System message, as in data.system_prompt.", show_default=False)
    ] = None,
) -> None:
    """Read a whole data source, then print its errors by line, lengths, duplicates, overlap with held-out data, and
    first record.
    """
    if recipe is not None:
        options = {
            "--model": model, "--kind": kind, "--format": data_format, "--fields": fields,
            "--answer-field": answer_field, "--chat-template": chat_template, "--system-prompt": system_prompt,
        }  # fmt: skip
        _check_data_of_recipe(
            recipe, source, heldout or [], [option for option, value in options.items() if value is not None]
        )
        return
    if source is None:
        raise ConfigError("SOURCE: missing; give a data source, or --recipe RECIPE to check all data sets of a recipe")
    if model is None:
        refuse_idle_options(context, ["chat_template"], "without --model, whose tokens it changes; add it")
    from megarl.config import ModelConfig
    from megarl.data.chat import tokenizer_of
    from megarl.data.survey import survey

    names = _read_field_names(data_format, fields, answer_field)
    survey_result = survey(
        source,
        names=names,
        kind=kind,
        tokenizer=tokenizer_of(ModelConfig(path=model, chat_template=chat_template)) if model else None,
        system_prompt=system_prompt,
        other_sources=dict.fromkeys(heldout or (), names),
    )
    print_survey(survey_result, unit="tokens" if model else "characters")
    if not survey_result.is_sound:
        raise typer.Exit(DataError.exit_code)


def _read_field_names(data_format: str | None, fields: str | None, answer_field: str | None) -> FieldNames:
    """Return the record field names in options. Raises ConfigError for invalid ones."""
    import yaml
    from pydantic import ValidationError

    from megarl.config.sections.data_sets import DataSetConfig
    from megarl.data.formats import FieldNames

    # YAML, because a recipe writes data.fields the same way.
    try:
        option_fields = yaml.safe_load(fields or "{}")
    except (yaml.YAMLError, ValueError):
        option_fields = None
    if not isinstance(option_fields, dict):
        raise ConfigError(
            f"--fields {fields}: is not a mapping of names; write '{{prompt: question, answer: solution}}'"
        )
    try:
        values = {"format": data_format, "fields": option_fields, "answer_field": answer_field}
        config = DataSetConfig.model_validate({"path": "", **values})
    except ValidationError as error:
        # For three options, unlike for a recipe, the first fault is enough.
        first_fault = error.errors(include_url=False)[0]
        if not first_fault["loc"]:
            raise ConfigError(f"--fields and --answer-field: {first_fault['msg']}") from None
        option = f"--{str(first_fault['loc'][0]).replace('_', '-')} "
        remedy = first_fault["msg"].replace("Input should be", "known are").replace("'", "")
        raise ConfigError(f"{option}{first_fault['input']}: {remedy}") from None
    names_by_role = {str(role): name for role, name in config.fields.items()}
    return FieldNames(config.format, names_by_role, config.answer_field, remedy="--fields '{}'")


def _check_data_of_recipe(path: str, source: str | None, heldout: list[str], conflicting: list[str]) -> None:
    """Check the data sets of a recipe. If a data set has errors, exit with an error.

    With `source`, check only this source as training data of the recipe, and compare its prompts with the `heldout`
    sets.
    """
    from megarl.config.recipe import load
    from megarl.datasets.surveys import survey_as_training, surveys

    # These options would silently contradict the recipe.
    if conflicting:
        raise ConfigError(
            f"{conflicting[0]}: the recipe of --recipe already decides this; remove one of the two options"
        )
    if heldout and source is None:
        raise ConfigError(
            "--heldout: with --recipe and without SOURCE, training data are compared with data.validation; remove "
            "this option"
        )
    recipe = load(path)
    tokenizer = _load_tokenizer(recipe)
    is_sound = True
    sets = (
        surveys(recipe, tokenizer) if source is None else [("", survey_as_training(recipe, source, tokenizer, heldout))]
    )
    for field, survey_result in sets:
        if field:
            print(f"{field}:")
        print_survey(survey_result, unit="tokens" if tokenizer else "characters")
        is_sound &= survey_result.is_sound
    if not is_sound:
        raise typer.Exit(DataError.exit_code)


def _load_tokenizer(recipe: Recipe) -> Tokenizer | None:
    from megarl.data.chat import tokenizer_of

    if Path(recipe.model.folder).is_dir():
        return tokenizer_of(recipe.model)
    print(f"model.path = {recipe.model.path}: not found, so lengths are in characters instead of tokens")
    return None
