"""Hints and MIGRATION.md from `megarl.config.hints.foreign`, the table of other programs' options.

`meanings` returns the recipe fields for an option, for errors about unknown recipe keys and command-line options.
`migration_page` lists all options by program.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.config.effects import conditions
from megarl.config.hints.foreign import OPTIONS, OTHERS
from megarl.config.hints.value_hints import BASE_RECIPE, written_override
from megarl.config.schema import all_fields

if TYPE_CHECKING:
    from megarl.config import Recipe

_COMPANIONS = {
    "trainer.tp": "cluster.ranks_per_node=2",
    "trainer.pp": "cluster.ranks_per_node=2",
    "trainer.cp": "cluster.ranks_per_node=2",
    "rollout.tp": "cluster.ranks_per_node=2",
    "distillation.tp": "cluster.ranks_per_node=2",
    "trainer.sequence_parallel": "trainer.tp=2 cluster.ranks_per_node=2",
    "rollout.max_staleness": "algorithm.importance_sampling=tis",
    "rollout.stragglers": "algorithm.importance_sampling=tis",
    "rollout.max_turns": "rollout.environment=calculator",
    "sandbox.url": "reward.functions=[code]",
    "algorithm.reward_order": "reward.functions=[boxed,format]",
    "data.ptx": "algorithm.ptx_coefficient=0.1",
    "algorithm.ptx_conversations": "algorithm.ptx_coefficient=0.1",
    "algorithm.ptx_coefficient": "data.ptx=talk.jsonl",
}
"""Overrides that a field's example needs in addition to its conditions, because `preflight` checks fields together."""


@dataclass(frozen=True, slots=True)
class Option:
    """An option of another program: a row of `foreign.OPTIONS`."""

    program: str
    """Name of the training program. `OTHERS`: many programs, or a program without a table in MIGRATION.md."""
    spellings: tuple[str, ...]
    """Spellings of the option on the program's command line: `--dataset`, `-d`."""
    value: str
    """The row applies only if the option has this value. Empty: the row applies to all values."""
    assignments: tuple[str, ...]
    """Recipe fields that replace the option, some with an example value: `train.epochs=2`. Empty: none does."""
    note: str

    @property
    def fields(self) -> tuple[str, ...]:
        """Recipe fields: `data.validation` for `data.validation.math=math.jsonl`."""
        return tuple(dict.fromkeys(_find_field(item.partition("=")[0]) for item in self.assignments))

    @property
    def names(self) -> tuple[str, ...]:
        """Plain names that match the option.

        The recipe field's own name is left out: for it, the hint about a field of another section is better.
        """
        names = (_plain_name(spelling) for spelling in self.spellings if not _is_short(spelling))
        own_name = _last_part(self.fields[0]) if self.fields and self.program != OTHERS else None
        return tuple(name for name in names if _last_part(name) != own_name)

    @property
    def text(self) -> str:
        return f"{self.spellings[0]} {self.value}".rstrip()


@dataclass(frozen=True, slots=True)
class Meaning:
    """Options of one or several programs with the same recipe fields."""

    options: tuple[Option, ...]

    @property
    def fields(self) -> tuple[str, ...]:
        return self.options[0].fields

    @property
    def programs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(option.program for option in self.options))

    @property
    def takes_value(self) -> bool:
        return len(self.fields) == 1 and any(not option.note and not option.value for option in self.options)

    def describe(self, is_only: bool) -> str:
        """Return the end of an error message: `here it is train.samples_per_prompt`.

        `is_only`: the option means the same in all programs. Otherwise the text names the programs.
        """
        programs_text = "elsewhere" if OTHERS in self.programs else f"in {_join_words(self.programs)}"
        notes = self._join_notes()
        if not self.fields:
            return f"has no counterpart: {notes}" if is_only else f"{programs_text} it has no counterpart: {notes}"
        option = self.options[0]
        fields = " ".join(option.assignments) if option.value else " and ".join(self.fields)
        return f"{'here' if is_only else programs_text} it is {fields}" + (f" ({notes})" if notes else "")

    def _join_notes(self) -> str:
        """Return the notes, which say how options differ from the recipe field, as one text.

        Empty: in one of the programs the option means the same. Different notes name their programs.
        """
        programs_by_note: defaultdict[str, list[str]] = defaultdict(list)
        for option in self.options:
            programs_by_note[option.note].append(option.program)
        if "" in programs_by_note:
            return ""
        if len(programs_by_note) == 1:
            return self.options[0].note
        return "; ".join(
            note if OTHERS in programs else f"{_join_words(list(dict.fromkeys(programs)))}: {note}"
            for note, programs in programs_by_note.items()
        )


@cache
def options() -> tuple[Option, ...]:
    return tuple(_read_row(program, row) for program, rows in OPTIONS.items() for row in rows)


def _read_row(program: str, row: Sequence[str]) -> Option:
    option, fields, note = (*row, "")[:3]
    spellings, _, value = option.partition("=")
    return Option(program, tuple(spellings.split()), value, tuple(fields.split()), note)


@cache
def _options_by_name() -> dict[str, list[Option]]:
    table: defaultdict[str, list[Option]] = defaultdict(list)
    for option in options():
        for name in option.names:
            table[name].append(option)
    return dict(table)


def meanings(name: str, value: str | None = None) -> list[Meaning]:
    """Return the different meanings of another program's dotted option in a recipe; empty: unknown option.

    `value` is the option's value: with some values, some options mean another field.
    """
    parts = _plain_name(name).split(".")
    name_endings = (".".join(parts[start:]) for start in range(len(parts)))
    options_by_ending = [_options_by_name().get(ending, []) for ending in name_endings]
    # If all rows (options) of a name are about other values, try the next shorter name.
    return next(
        filter(None, (_group_by_meaning(ending_options, value) for ending_options in options_by_ending)), []
    ) or next(filter(None, (_group_by_meaning(ending_options, None) for ending_options in options_by_ending)), [])


def short_meanings(name: str, value: str | None = None) -> list[Meaning]:
    """Return the meanings of another program's short option, like `tMbs`, without its dash."""
    rows = [option for option in options() if f"-{name}" in option.spellings]
    return _group_by_meaning(rows, value) or _group_by_meaning(rows, None)


def _group_by_meaning(options: Sequence[Option], value: str | None) -> list[Meaning]:
    """Return what another program's option means with this value.

    `value` None: return the meanings with any value, or if there are none, those with single values.
    """
    options_for_value = [
        option for option in options if option.value and value and _plain_name(option.value) == _plain_name(value)
    ]
    decided_fields = {field for option in options_for_value for field in option.fields}
    options_for_all_values = [
        option for option in options if not option.value and not decided_fields & set(option.fields)
    ]
    matches = [*options_for_value, *options_for_all_values] or (options if value is None else [])
    groups: defaultdict[tuple[str, ...], list[Option]] = defaultdict(list)
    for option in matches:
        groups[option.assignments if option.value else tuple(sorted(option.fields))].append(option)
    return sorted((Meaning(tuple(group)) for group in groups.values()), key=lambda meaning: OTHERS in meaning.programs)


def describe_replacements(
    option_meanings: Sequence[Meaning], value: str | None = None, *, with_override: bool = False
) -> str:
    """Return the end of an error about another program's option: the fields that replace it.

    `with_override`: add the override to write, if a field takes the option's `value`.
    """
    texts = []
    is_only = len(option_meanings) == 1
    for meaning in option_meanings:
        text = meaning.describe(is_only=is_only)
        if with_override and meaning.takes_value:
            text += f"{';' if is_only else ','} write {written_override(meaning.fields[0], value)}"
        texts.append(text)
    return "; ".join(texts)


def _join_words(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _plain_name(name: str) -> str:
    return name.lstrip("-").lower().replace("-", "_")


def _is_short(spelling: str) -> bool:
    return spelling.startswith("-") and not spelling.startswith("--")


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]


def _find_field(name: str) -> str:
    """Return the recipe field of a name: `data.validation` for `data.validation.math`."""
    while name and name not in all_fields():
        name = name.rpartition(".")[0]
    return name


def migration_page() -> str:
    """Return the text of launch/recipes/MIGRATION.md: `migration.md` with one table per program."""
    page = Path(__file__).with_name("migration.md").read_text(encoding="utf-8")
    for program in OPTIONS.keys() - {OTHERS}:
        rows = (_page_row(option) for option in options() if option.program == program)
        page = page.replace(f"{{{program}}}", "\n".join(rows))
    return page


def _page_row(option: Option) -> str:
    recipe = f"`{' '.join(overrides_of(option))}`" if option.fields else "—"
    return f"| `{option.text}` | {recipe} | {option.note} |".replace("  ", " ")


def overrides_of(option: Option) -> list[str]:
    """Return overrides of a recipe that express an option: the conditions of its fields, the fields, then their
    companions.
    """
    base_recipe = _base_recipe()
    unmet_conditions = [
        condition for field in option.fields for condition in conditions(field) if not condition.holds(base_recipe)
    ]
    condition_overrides = " ".join(condition.example for condition in unmet_conditions).split()
    assignments = [item if "=" in item else f"{item}={_default_text(item)}" for item in option.assignments]
    companions = " ".join(_COMPANIONS.get(field, "") for field in option.fields).split()
    added_overrides = _drop_overridden(condition_overrides, assignments)
    return [
        *added_overrides,
        *assignments,
        *_drop_overridden(companions, [*added_overrides, *assignments]),
    ]


def _drop_overridden(overrides: Sequence[str], stronger_overrides: Sequence[str]) -> list[str]:
    """Return the first override of each field, without the fields of `stronger_overrides`."""
    overridden_fields = {_field_name(override) for override in stronger_overrides}
    first_overrides = {_field_name(override): override for override in reversed(overrides)}
    return [
        first_overrides[name] for name in dict.fromkeys(map(_field_name, overrides)) if name not in overridden_fields
    ]


@cache
def _base_recipe() -> Recipe:
    from megarl.config import Recipe

    return Recipe.model_validate(BASE_RECIPE)


def _field_name(override: str) -> str:
    return override.partition("=")[0]


def _default_text(field: str) -> str:
    """Return a field's default value as one line of YAML without blanks."""
    import yaml

    value = all_fields()[field].get_default(call_default_factory=True)
    plain = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(plain, default_flow_style=True).removesuffix("...\n").strip().replace(" ", "")
