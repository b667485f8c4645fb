"""Command-line arguments common to several commands."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from megarl.types import ConfigError


def _complete_override(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    from megarl.config.references.completion import override_candidates

    return override_candidates(list(ctx.params.get("overrides") or ()), incomplete)


def recipe_file(name_or_path: str | None) -> str | None:
    """Return the recipe file for a path or the name of a delivered recipe. Typer's callback."""
    from megarl.files import shipped

    return None if name_or_path is None else shipped.recipe_file(name_or_path)


RecipePath = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="YAML file of the recipe, or a name that `megarl recipes` lists.",
        show_default=False,
        callback=recipe_file,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SECTION.FIELD=VALUE",
        help="Overrides of the recipe file. SECTION.FIELD={} empties a mapping; SECTION.FIELD=default or "
        "~SECTION.FIELD removes a value.",
        show_default=False,
        autocompletion=_complete_override,
    ),
]


def refuse_idle_options(context: typer.Context, names: Sequence[str], reason: str) -> None:
    """Raise ConfigError if the command line has options that do nothing.

    `names` are the names of their parameters, `reason` is why, with the remedy: `without --search; add it`.
    """
    sources = {name: context.get_parameter_source(name) for name in names}
    # typer has its own copy of click, so the kind of source is compared by name.
    names_set_by_user = [
        name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"
    ]
    options = [parameter.opts[0] for parameter in context.command.params if parameter.name in names_set_by_user]
    if options:
        raise ConfigError(f"{', '.join(options)}: does nothing {reason}")


class CommandGroup(TyperGroup):
    """Group of commands. Its help shows the whole first sentence of each command."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the section of commands. typer would cut each description to one line."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [
            (name, command.get_short_help_str(sys.maxsize))
            for name, command in commands
            if command is not None and not command.hidden
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def command_group(name: str, help: str) -> typer.Typer:
    """Return a group for commands of one subject, such as `megarl slurm`. Its help has no Rich markup."""
    return typer.Typer(name=name, cls=CommandGroup, help=help, no_args_is_help=True, rich_markup_mode=None)


class RecipeCommand(TyperCommand):
    """Command with a recipe and overrides. Its error for an unknown option suggests a recipe field."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. Raises ConfigError for unknown options, with the recipe field for each."""
        # click's own error names no recipe field. With this setting, unknown options stay among the arguments, in
        # order.
        ctx.ignore_unknown_options = True
        remaining_arguments = super().parse_args(ctx, args)
        # A shell completes an unfinished command line. An error would appear in the middle of it.
        if ctx.resilient_parsing:
            return remaining_arguments
        arguments = [parameter for parameter in self.params if parameter.param_type_name == "argument"]
        texts = [text for argument in arguments for text in _argument_texts(ctx, argument)]
        if unknown := list(_list_options(texts)):
            raise ConfigError("\n".join(_unknown_option(*option, self.params) for option in unknown))
        return remaining_arguments


def _argument_texts(ctx: Any, argument: Any) -> list[str]:
    value = ctx.params.get(argument.name)
    return [] if value is None else [str(item) for item in (value if isinstance(value, list | tuple) else [value])]


def _list_options(arguments: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Yield each option with its value; None: it has none."""
    for argument, next_argument in zip_longest(arguments, arguments[1:]):
        if argument.startswith("-"):
            option, equals, value = argument.partition("=")
            # A dash begins the next option, so it is never a value.
            is_value = next_argument is not None and not next_argument.startswith("-")
            yield option, value if equals else next_argument if is_value else None


def _unknown_option(option: str, value: str | None, parameters: Sequence[Any]) -> str:
    from megarl.config.reading.explaining import option_hint

    options = [name for parameter in parameters for name in parameter.opts if name.startswith("--")]
    return f"{option}: unknown option; {option_hint(option, value, options)}"
