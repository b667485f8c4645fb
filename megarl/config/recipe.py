"""Reading and printing of recipes: a YAML file, overrides from the command line, one page of errors.

OmegaConf and pydantic are imported where they are used, so that `megarl --help` waits for neither.
"""

from __future__ import annotations

import difflib
import io
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.config.migration import counterpart
from megarl.types import ConfigError

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from megarl.config import Recipe, Section
    from megarl.config.secrets import Place


@dataclass(frozen=True, slots=True)
class Draft:
    """A recipe as far as it can be read, and what is wrong with it."""

    path: Path
    recipe: Recipe
    """Unknown keys are left out, fields of `unread` are at their defaults."""
    problems: tuple[str, ...]
    """A line each: field, value, what is wrong, remedy."""
    unread: frozenset[str]
    """Fields whose values are missing or cannot be used, by dotted name."""


def load(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of a YAML file with `section.field=value` overrides on top.

    Values may refer to each other (`${model.path}`) and to the environment (`${oc.env:HOME}`), which the recipe
    remembers (`Recipe.references`); `???` is a value that an override must give. Raises one ConfigError that lists all
    that is wrong; a secret in clear is, and so is a field that does nothing (`config.effects`).
    """
    draft = read(path, overrides)
    if draft.problems:
        raise ConfigError(error_page(path, draft.problems))
    return draft.recipe


def read(path: str | Path, overrides: Sequence[str] = (), *, is_of_run: bool = False) -> Draft:
    """As `load`, but a recipe with faults is read on, so that whoever checks more can tell all at once.

    `is_of_run`: the file is a run's config.yaml, which has all fields; those that overrides leave without an effect are
    no faults. Raises ConfigError only for a file that is no YAML of sections and fields.
    """
    from megarl.config.secrets import literal_secrets

    merged = _merged(Path(path), overrides)
    problems = [*merged.problems, *literal_secrets(merged.values, merged.references)]
    recipe, faults, unread = _validated(merged.values, merged.references)
    unread |= merged.unread
    idle = _idle(recipe, merged.references, unread)
    if is_of_run:
        keys = [override.partition("=")[0] for override in overrides]
        idle = {field: text for field, text in idle.items() if any(_overlap(field, key) for key in keys)}
    problems += [*faults, *idle.values()]
    return Draft(Path(path), recipe.with_references(merged.references), tuple(problems), frozenset(unread))


def _validated(values: dict[str, Any], references: Mapping[Place, str]) -> tuple[Recipe, list[str], set[str]]:
    """The recipe of plain values, what is wrong with them, and the fields that are left out for it.

    The values are changed: what is wrong is taken out, and what is missing gets its own name in angle brackets.
    """
    from pydantic import ValidationError

    from megarl.config import Recipe

    problems: list[str] = []
    unread: set[str] = set()
    while True:
        try:
            return Recipe.model_validate(values), problems, unread
        except ValidationError as error:
            for found in error.errors(include_url=False):
                told = _explain(found["type"], found["loc"], found["input"], found["msg"], references)
                problems += told.split("\n")
                unread |= _take_out(values, found["loc"], is_unknown=found["type"] == "extra_forbidden")


def _take_out(values: dict[str, Any], loc: tuple[int | str, ...], *, is_unknown: bool) -> set[str]:
    """Remove what an error of pydantic is about, or put a name in its place where it is required; the fields' names."""
    from megarl.config import Recipe

    known = dict(_fields(Recipe))
    parts = [str(part) for part in loc]
    while not is_unknown and _in_schema(".".join(parts)) not in known:
        parts.pop()  # an item of a list, a key of a mapping, a member of a union
    name = ".".join(parts)
    parent: Any = values
    for part in parts[:-1]:
        parent = parent.setdefault(part, {})
    parent.pop(parts[-1], None)
    if is_unknown:
        return set()
    if name == "mixture" and isinstance(data := values.setdefault("data", {}), dict):
        data.setdefault("train", "<data.train>")  # only sources had it
    if (field := _in_schema(name)) != name:
        if known[field].is_required():
            parent[parts[-1]] = f"<{field}>"
        return {name}
    required = [field for field in known if field == name or field.startswith(f"{name}.")]
    required = [field for field in required if known[field].is_required() and not _is_section(known[field])]
    for field in required:
        section: Any = values
        *sections, last = field.split(".")
        for part in sections:
            section = section.setdefault(part, {})
        section[last] = _PLACEHOLDERS.get(field, f"<{field}>")
    return {name, *required}


def _in_schema(place: str) -> str:
    """The dotted name of a field; of a source's own in a mixture that of the recipe's field."""
    parts = place.split(".")
    return ".".join(parts[2:]) if parts[0] == "mixture" and len(parts) > 3 else place


_PLACEHOLDERS = {"name": "unnamed", "loop": "rl"}
"""Values of required fields that a recipe does not give, until its errors are told."""


def _overlap(one: str, other: str) -> bool:
    """Whether one of two dotted names is the other, or a section around it."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def _idle(recipe: Recipe, references: Mapping[Place, str], unread: Set[str]) -> dict[str, str]:
    """A line for each given field that does nothing, unless what decides that could not be read."""
    from megarl.config import Recipe
    from megarl.config.effects import idle_fields, value_at

    known = dict(_fields(Recipe))
    found: dict[str, str] = {}
    for field, name, of_source, need in idle_fields(recipe):
        if field in unread or unread & {*need.fields, "loop"}:
            continue
        place = tuple(field.split("."))
        value = _reference_around(place, references) or _printable(value_at(of_source, name), place, references)
        shown = f"{field} = {textwrap.shorten(repr(value), 80)}"
        reason = f"does nothing {need.state(of_source)}; leave it out, or {need.remedy}"
        found[field] = f"{shown}: {reason}. {_doc(known[name])}"
    return found


def error_page(title: str | Path, problems: Sequence[str]) -> str:
    """All problems under one title, a line each."""
    return f"{title}: {len(problems)} error{'s' if len(problems) > 1 else ''}\n" + textwrap.indent(
        "\n".join(problems), "  "
    )


def to_yaml(recipe: Recipe, comments: bool = False) -> str:
    """The recipe as YAML that `load` reads back: all fields that have an effect under its loop and algorithm.

    What was read from the environment stays a reference to it; a secret in clear is hidden. With `comments` each field
    comes after its description.
    """
    from megarl.config.effects import given_fields, may_be_idle, unmet

    given = set(given_fields(recipe))

    def has_effect(place: Place) -> bool:
        field = ".".join(map(str, place))
        return unmet(recipe, field) is None and (field in given or not may_be_idle(recipe, field))

    return _section_yaml(recipe, (), recipe.references, has_effect, comments)


def written_value(recipe: Recipe, field: str) -> Any:
    """The value of a field, by dotted name, as it may be written: references as they stand, secrets hidden.

    Plain values, as YAML and JSON have them.
    """
    from megarl.config.effects import value_at

    place, references = tuple(field.split(".")), recipe.references
    return _reference_around(place, references) or _printable(value_at(recipe, field), place, references)


def recipe_changes(earlier: Mapping[str, Any], recipe: Recipe) -> list[str]:
    """`field: old -> new` for each field whose value is not what it was in an earlier recipe, read from its YAML.

    A field that the earlier recipe does not have, since it was not known or did nothing, counts as its default.
    """
    import yaml

    from megarl.config import Recipe

    required = {"model": {"path": recipe.model.path}, "data": {"train": recipe.data.train}}
    defaults = Recipe.model_validate({"name": recipe.name, "loop": recipe.loop, **required})
    now = _settings(yaml.safe_load(to_yaml(recipe)))
    known = _settings(defaults.model_dump(mode="json"))
    before = {field: value for field, value in known.items() if field in now} | _settings(earlier)
    absent = "(not set)"
    return [
        f"{field}: {before.get(field, absent)} -> {now.get(field, absent)}"
        for field in dict.fromkeys((*now, *before))
        if before.get(field, absent) != now.get(field, absent)
    ]


def _settings(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a recipe by their dotted names; a list is one value."""
    return {rest[1:]: value for rest, value in _leaves(recipe) if value != {}}


def _section_yaml(
    section: Section,
    place: Place,
    references: Mapping[Place, str],
    has_effect: Callable[[Place], bool],
    comments: bool,
) -> str:
    import yaml

    parts = []
    for name, field in type(section).model_fields.items():
        value, own = getattr(section, name), (*place, name)
        if _is_section(field) and own not in references:
            inner = _section_yaml(value, own, references, has_effect, comments)
            text = f"{name}:\n{textwrap.indent(inner, '  ')}" if inner else ""
        elif _is_section(field) or has_effect(own):
            plain = {name: _printable(value, own, references)}
            text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=10**6)
        else:
            text = ""
        if text and comments:
            text = textwrap.fill(_doc(field), 110, initial_indent="# ", subsequent_indent="# ") + "\n" + text
        parts.append(text)
    return "".join(parts)


def _printable(value: Any, place: Place, references: Mapping[Place, str]) -> Any:
    """A value as it may be written: references as they stand, secrets hidden."""
    from megarl.config.secrets import holds_secret

    if place in references:
        return references[place]
    if hasattr(value, "model_dump"):
        value = value.model_dump()
    if isinstance(value, Mapping):
        return {name: _printable(item, (*place, str(name)), references) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_printable(item, (*place, index), references) for index, item in enumerate(value)]
    if isinstance(value, str):
        # `load` would take a bare ${...} for a reference.
        return "<hidden>" if holds_secret(place, value) else value.replace("${", "\\${")
    return value


def _reference_around(place: Place, references: Mapping[Place, str]) -> str | None:
    """The reference that a value, or a section around it, was read by."""
    return next((references[place[:end]] for end in range(len(place), 0, -1) if place[:end] in references), None)


@dataclass(frozen=True, slots=True)
class _Merged:
    """File and overrides as plain values, references resolved.

    `references` are the texts of values that read the environment; `unread` are fields whose references cannot be
    resolved and which are left out.
    """

    values: dict[str, Any]
    references: dict[Place, str]
    problems: list[str]
    unread: set[str]


def _merged(path: Path, overrides: Sequence[str]) -> _Merged:
    """Raises ConfigError for a file that is no YAML of sections and fields."""
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from megarl.config import strict_yaml

    try:
        text = path.read_text(encoding="utf-8")
        problems = strict_yaml.problems(text)
        if any(words in problem for problem in problems for words in (strict_yaml.TOO_DEEP, strict_yaml.TOO_LARGE)):
            raise ConfigError(error_page(path, problems))
        tree = OmegaConf.load(io.StringIO(text))
    except FileNotFoundError:
        raise ConfigError(f"{path}: recipe not found. Give the path of a YAML file.") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{path}:{line}: not valid YAML: {error.problem}. Mend this line.") from None
    except (OSError, UnicodeDecodeError, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: recipe cannot be read ({_one_line(error)}).") from None
    if not OmegaConf.is_dict(tree):
        raise ConfigError(f"{path}: a recipe is made of `section:` and `field: value` lines; this is a list.")
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not all(part and part == part.strip() for part in key.split(".")):
            problems.append(f"{override!r}: not an override; write section.field=value, no spaces around the =")
            continue
        try:
            if doubtful := strict_yaml.problems(value, key):
                problems += doubtful
            else:
                tree = OmegaConf.merge(tree, OmegaConf.from_dotlist([override]))
        except (OmegaConfBaseException, TypeError, yaml.YAMLError) as error:
            problems.append(f"{override!r}: {_one_line(error)}; give a value in YAML, text with signs in quotes")
    return _resolved(path, tree, problems)


def _resolved(path: Path, tree: Any, problems: list[str]) -> _Merged:
    """The tree with its references resolved; those that cannot be are told and left out."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    unread: set[str] = set()
    while True:
        try:
            values: Any = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
            return _Merged(values, _environment_references(tree), problems, unread)
        except OmegaConfBaseException as error:
            place = getattr(error, "full_key", None) or "value"
            problem = (
                f"{place}: {_one_line(error)}. Set it here or as {place}=VALUE on the command line; "
                "${section.field} refers to another field of the recipe, \\${ is the text itself"
            )
            problems.append(problem)
            section, _, name = place.rpartition(".")
            parent = OmegaConf.select(tree, section) if section else tree
            if not OmegaConf.is_dict(parent) or name not in parent:
                raise ConfigError(error_page(path, problems)) from None
            del parent[name]
            unread.add(place)


def _environment_references(tree: Any) -> dict[Place, str]:
    """The text of each value whose resolving reads the environment, also by way of another field."""
    from omegaconf import OmegaConf
    from omegaconf.resolvers import oc

    has_read = False

    def read(*arguments: Any) -> Any:
        nonlocal has_read
        has_read = True
        return oc.env(*arguments)

    def walk(raw: Any, node: Any, place: Place) -> Iterator[tuple[Place, str]]:
        nonlocal has_read
        if isinstance(raw, str):
            if "${" in raw:
                has_read = False
                resolved = node[place[-1]]
                if OmegaConf.is_config(resolved):
                    OmegaConf.to_container(resolved, resolve=True)
                if has_read:
                    yield place, raw
        elif raw and isinstance(raw, dict | list):
            inner = node[place[-1]] if place else node
            for key in raw if isinstance(raw, dict) else range(len(raw)):
                yield from walk(raw[key], inner, (*place, key))

    OmegaConf.register_resolver("oc.env", read, replace=True)
    try:
        found = walk(OmegaConf.to_container(tree, resolve=False), tree, ())
        return {tuple(p if isinstance(p, int) else str(p) for p in place): raw for place, raw in found}
    finally:
        OmegaConf.register_resolver("oc.env", oc.env, replace=True)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split("\n    full_key")[0].split())


def _explain(kind: str, loc: tuple[int | str, ...], value: Any, message: str, references: Mapping[Place, str]) -> str:
    """One line for one error of pydantic: field, value as it may be written, what is wrong, remedy."""
    from megarl.config import Recipe

    known = dict(_fields(Recipe))
    is_key = loc[-1:] == ("[key]",)
    place = ".".join(str(part) for part in (loc[:-1] if is_key else loc))
    value = _reference_around(loc, references) or _printable(value, loc, references)
    shown = f"{place} = {textwrap.shorten(repr(value), 80)}"
    if kind == "missing":
        required = [name for name, field in known.items() if name.startswith(place + ".") and field.is_required()]
        needed = required or [place]
        return "\n".join(f"{name}: missing; add it: {_doc(known[_in_schema(name)])}" for name in needed)
    if kind == "extra_forbidden":
        foreign = [(f"{place}{rest}", item) for rest, item in _leaves(value) if counterpart(f"{place}{rest}")]
        lines = []
        for name, item in foreign or [(place, value)]:
            lines.append(f"{name} = {textwrap.shorten(repr(item), 80)}: unknown key; {_hint(name, known)}")
        return "\n".join(lines)
    if kind == "model_type":
        children = [name for name in known if name.rpartition(".")[0] == place]
        return f"{shown}: is a section; leave it out or set {', '.join(children)}"
    if is_key and kind == "literal_error":
        keys = message.removeprefix("Input should be ").replace("'", "")
        section, doc = place.rpartition(".")[0], _doc_of(place, known)
        return f"{place}: {value!r} is not a key of {section}; its keys are {keys}. {doc}"
    if is_key:
        return f"{place}: bad name {value!r}; use letters, digits, dots, dashes and underscores"
    wrong = message.replace("Input should be", "must be").replace("a valid tuple", "a list, such as [a, b]")
    return f"{shown}: {wrong}. {_doc_of(place, known)}".removesuffix(". ")


def _doc_of(place: str, known: Mapping[str, FieldInfo]) -> str:
    """The description of the field that a place is, or is inside of; empty for a place in no field."""
    parts = _in_schema(place).split(".")
    found = next((known[name] for end in range(len(parts), 1, -1) if (name := ".".join(parts[:end])) in known), None)
    return "" if found is None else _doc(found)


def _leaves(value: Any) -> Iterator[tuple[str, Any]]:
    """A section's values by the rest of their dotted names; of anything else, itself."""
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from ((f".{name}{rest}", leaf) for rest, leaf in _leaves(item))
    else:
        yield "", value


def _hint(place: str, known: Mapping[str, Any]) -> str:
    """Where an unknown key may have been meant to stand, or what another program's option is called here."""
    from megarl.config.mixture import SourceConfig

    if known_elsewhere := counterpart(place):
        return str(known_elsewhere)
    if place.startswith("mixture."):
        inner = _in_schema(place)
        return _hint(inner, known) if inner != place else f"a source has {', '.join(SourceConfig.model_fields)}"
    section, _, key = place.rpartition(".")
    leaf_of = {name: name.rpartition(".")[2] for name in known}
    siblings = {name: leaf for name, leaf in leaf_of.items() if name.rpartition(".")[0] == section}
    if elsewhere := [name for name, leaf in leaf_of.items() if leaf == key]:
        parents = [name.rpartition(".")[0] or "the top level" for name in elsewhere]
        return f"it belongs under {' or '.join(parents)}: {', '.join(elsewhere)}"
    for names in (siblings, leaf_of):
        if close := difflib.get_close_matches(key, names.values(), n=1):
            return f"did you mean {' or '.join(name for name, leaf in names.items() if leaf == close[0])}?"
    return f"known are {', '.join(siblings)}"


def _fields(section: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every field of the schema by dotted name, sections included."""
    for name, field in section.model_fields.items():
        yield prefix + name, field
        if (inner := _section(field)) is not None:
            yield from _fields(inner, f"{prefix}{name}.")


def _section(field: FieldInfo) -> type[Section] | None:
    """The section that a field is, if it is one."""
    from megarl.config.section import Section

    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def _is_section(field: FieldInfo) -> bool:
    return _section(field) is not None


def _doc(field: FieldInfo) -> str:
    return " ".join((field.description or "").split())
