"""The recipe file and command-line overrides, merged into plain values before validation.

OmegaConf is imported where it is used, so that `megarl --help` is fast.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.config.reading.explaining import error_page, key_hint, leaves_of
from megarl.config.schema import default_removes, field_at, recipe_field, section_at
from megarl.files import shipped
from megarl.files.nearest import nearest
from megarl.types import ConfigError

if TYPE_CHECKING:
    from megarl.config.secrets import Place


@dataclass(frozen=True, slots=True)
class Merged:
    """Recipe file and overrides as plain values, with references (`${...}`) resolved.

    `references` has the texts of values from the environment. `unread` has fields without a value, because their
    references cannot be resolved. `overridden` has the dotted names set by overrides.
    """

    values: dict[str, Any]
    references: dict[Place, str]
    problems: list[str]
    unread: set[str]
    overridden: frozenset[str]


def merge(path: Path, overrides: Sequence[str]) -> Merged:
    """Read a recipe file and apply overrides in turn. Raises ConfigError unless the file is a YAML mapping."""
    tree, problems = _read_tree(path)
    merging = _Merging(tree, problems)
    for override in overrides:
        merging.apply(override)
    values, references, unread = _resolve_references(path, merging.tree, merging.problems)
    return Merged(values, references, merging.problems, unread, frozenset(merging.overridden))


def _read_tree(path: Path) -> tuple[Any, list[str]]:
    """Return the OmegaConf tree of a recipe file, and a line for each misleading value.

    Raises ConfigError if the file cannot be read, or is not a YAML mapping.
    """
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from megarl.config.reading import strict_yaml

    try:
        text = path.read_text(encoding="utf-8")
        # Look for misleading values in the text, because OmegaConf converts them (1:30 becomes 90).
        problems = strict_yaml.list_problems(text)
        if any(words in problem for problem in problems for words in strict_yaml.UNREADABLE):
            raise ConfigError(error_page(path, problems))
        tree = OmegaConf.load(io.StringIO(text))
    except FileNotFoundError:
        nearest_recipe = nearest(path.stem, shipped.recipes()) if path.name == str(path) else None
        hint = f"; did you mean {nearest_recipe}?" if nearest_recipe else "."
        raise ConfigError(
            f"{path}: recipe not found. Give the path of a YAML file, or a name that `megarl recipes` lists{hint}"
        ) from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{path}:{line}: not valid YAML: {error.problem}. Fix this line.") from None
    except (OSError, UnicodeDecodeError, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: recipe cannot be read ({_one_line(error)}).") from None
    if not OmegaConf.is_dict(tree):
        raise ConfigError(f"{path}: this is a list, but a recipe consists of `section:` and `field: value` lines.")
    return tree, problems


@dataclass(slots=True)
class _Merging:
    """A recipe as an OmegaConf tree. Overrides are applied in turn: a later one wins."""

    tree: Any
    problems: list[str]
    overridden: set[str] = field(default_factory=set)

    def apply(self, override: str) -> None:
        """Apply one override: `section.field=value` sets, `section.field=default` and `~section.field` remove a
        value.
        """
        import yaml
        from omegaconf.errors import OmegaConfBaseException

        key, _, value = override.partition("=")
        if fault := _find_form_fault(override):
            self.problems.append(f"{override!r}: {fault}")
        elif key.startswith("~"):
            self._remove_value(key[1:])
        elif value.strip() == "default" and default_removes(key):
            self._remove_value(key)
        else:
            try:
                self._set_value(key, value)
            except (OmegaConfBaseException, TypeError, yaml.YAMLError) as error:
                fault = f"{_one_line(error)}; write the value as YAML, text with special characters in quotes"
                self.problems.append(f"{override!r}: {fault}")

    def _set_value(self, key: str, text: str) -> None:
        """Set a field, a section or a list item to the value of a YAML text."""
        from omegaconf import OmegaConf

        from megarl.config.reading import strict_yaml

        if value_problems := strict_yaml.list_problems(text, key):
            self.problems += value_problems
            return
        value = _to_plain(OmegaConf.from_dotlist([f"value={text}"]))["value"]
        list_name = self._find_list_around(key)
        if list_name is not None:
            self._set_list_item(list_name, key, value)
            return
        _empty_mappings(self.tree, key, value)
        # `OmegaConf.merge` copies the whole tree, which took two thirds of a search of layouts.
        self.tree.merge_with(OmegaConf.from_dotlist([f"{key}={text}"]))
        self.overridden |= {key + subfield for subfield, _ in leaves_of(value)}

    def _find_list_around(self, key: str) -> str | None:
        """Return the dotted name of the list if a key is in a list item (`reward.functions.0`), else None."""
        from omegaconf import OmegaConf

        parts = key.split(".")
        for num_parts in range(1, len(parts)):
            place = ".".join(parts[:num_parts])
            if parts[num_parts].isdecimal() and (
                OmegaConf.is_list(self._select_value(place))
                or (self._select_value(place) is None and _default_list(place) is not None)
            ):
                return place
        return None

    def _select_value(self, place: str) -> Any:
        """Return the merged tree's value at a dotted place; None if it is absent."""
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        try:
            return OmegaConf.select(self.tree, place)
        except OmegaConfBaseException:
            return None

    def _set_list_item(self, place: str, key: str, value: Any) -> None:
        """Apply an override of a list item, or of a field inside an item. `key` is its dotted name.

        A list missing in the tree is first copied from the recipe, or from the field's default.
        """
        from omegaconf import OmegaConf

        items = self._list_items(place)
        index, _, field_in_item = key[len(place) + 1 :].partition(".")
        if int(index) >= len(items):
            self.problems.append(f"{key}: {_item_numbers_text(place, items, f'write {place}=[VALUE]')}")
            return
        if field_in_item:
            item = items[int(index)]
            # A reward function may be a plain name. To set one of its fields, make it a mapping.
            item = {"name": item} if isinstance(item, str) and section_at(f"{place}.{index}") is not None else item
            node = OmegaConf.create({"item": item})
            _empty_mappings(node, f"item.{field_in_item}", value)
            OmegaConf.update(node, f"item.{field_in_item}", value, force_add=True)
            value = _to_plain(node)["item"]
        items[int(index)] = value
        OmegaConf.update(self.tree, place, items, merge=False, force_add=True)
        self.overridden.add(place)

    def _list_items(self, place: str) -> list[Any]:
        """Return a list's items as plain values; if the tree lacks it, its default."""
        items = self._select_value(place)
        items = self._select_value(recipe_field(place)) if items is None else items
        return (_default_list(place) or []) if items is None else _to_plain(items)

    def _remove_item(self, place: str, index: int) -> None:
        """Remove the item `index` of the list at `place` from the tree."""
        from omegaconf import OmegaConf

        items = self._list_items(place)
        if index >= len(items):
            self.problems.append(f"~{place}.{index}: {_item_numbers_text(place, items, 'nothing can be removed')}")
            return
        del items[index]
        OmegaConf.update(self.tree, place, items, merge=False, force_add=True)
        self.overridden.add(place)

    def _remove_value(self, key: str) -> None:
        """Remove a value, a section or a list item from the tree. A field without a value stays as it is."""
        from omegaconf import OmegaConf

        parent, _, name = key.rpartition(".")
        if parent and self._find_list_around(key) == parent:
            self._remove_item(parent, int(name))
            return
        section = self._select_value(parent) if parent else self.tree
        if OmegaConf.is_dict(section) and name in section:
            del section[name]
        elif field_at(key) is None:
            names = list(section) if OmegaConf.is_dict(section) and section_at(parent) is None else []
            hint = f"{parent} has {', '.join(map(str, names))}" if names else key_hint(key)
            self.problems.append(f"~{key}: there is no such value to remove; {hint}")
        self.overridden = {name for name in self.overridden if not f"{name}.".startswith(f"{key}.")}


# Merging an empty mapping changes nothing, so the earlier value is removed before the merge.
def _empty_mappings(tree: Any, key: str, value: Any) -> None:
    """Empty each mapping in the tree, at `key` or below, for which the new value has an empty mapping."""
    from omegaconf import OmegaConf

    if value == {}:
        OmegaConf.update(tree, key, {}, merge=False, force_add=True)
    elif isinstance(value, dict):
        for name, inner_value in value.items():
            # Names in brackets may have dots.
            _empty_mappings(tree, f"{key}[{name}]", inner_value)


def _item_numbers_text(place: str, items: list[Any], remedy: str) -> str:
    """Return a list's valid item numbers in words. `remedy`: what to do for an empty list."""
    return f"{place} has {len(items)} items; " + (f"their numbers are 0 to {len(items) - 1}" if items else remedy)


def _to_plain(tree: Any) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.to_container(tree, resolve=False)


def _find_form_fault(override: str) -> str | None:
    """Return what is wrong with the form of an override, and the remedy; None: nothing."""
    key, equals, value = override.partition("=")
    if key.startswith("+"):
        return f"a field is set without the +; write {override.lstrip('+')}"
    if key.startswith("~") and equals:
        return f"removes a value and takes none; write {key}, or {key[1:]}={value}"
    name = key.removeprefix("~")
    if not (equals or key.startswith("~")) or not all(part and part == part.strip() for part in name.split(".")):
        return "not an override; write section.field=value, no spaces around the =, or ~section.field to remove it"
    return None


def _default_list(place: str) -> list[Any] | None:
    """Return a list field's default as plain values, or None if it is no list."""
    list_field = field_at(place)
    default = list_field.default if list_field is not None else None
    if not isinstance(default, tuple):
        return None
    return [item.model_dump() if hasattr(item, "model_dump") else item for item in default]


def _resolve_references(
    path: Path, tree: Any, problems: list[str]
) -> tuple[dict[str, Any], dict[Place, str], set[str]]:
    """Return a tree's resolved values, its references to the environment, and its unresolvable fields.

    A reference is a text like `${oc.env:NAME}`, by its place (keys and indices).
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    unread: set[str] = set()
    while True:
        try:
            values: Any = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
            return values, _find_environment_references(tree), unread
        except OmegaConfBaseException as error:
            # OmegaConf writes items as reward.functions[0], overrides as reward.functions.0.
            place = re.sub(r"\[(\d+)\]", r".\1", getattr(error, "full_key", None) or "value")
            problem = (
                f"{place}: {_one_line(error)}. Set it here or as {place}=VALUE on the command line; "
                "${section.field} refers to another field of the recipe, \\${ is the text itself"
            )
            problems.append(problem)
            section, _, name = place.rpartition(".")
            parent = OmegaConf.select(tree, section) if section else tree
            if not OmegaConf.is_dict(parent) or name not in parent:
                raise ConfigError(error_page(path, problems)) from None
            # OmegaConf stops at the first unresolvable value. Remove it, to find the next.
            del parent[name]
            unread.add(place)


# OmegaConf does not report whether a value came from the environment, so its resolver is replaced meanwhile.
def _find_environment_references(tree: Any) -> dict[Place, str]:
    """Return the unresolved text of each value that refers to the environment, by its place (keys and indices).

    A value refers to a variable directly (`${oc.env:NAME}`), or through another field.
    """
    from omegaconf import OmegaConf
    from omegaconf.resolvers import oc

    reads_environment = False

    def read_variable(*arguments: Any) -> Any:
        nonlocal reads_environment
        reads_environment = True
        return oc.env(*arguments)

    def find_references(raw_value: Any, container: Any, place: Place) -> Iterator[tuple[Place, str]]:
        """Yield place and text of each value whose resolution calls `read_variable`.

        `container` is the section or list with the value `raw_value`.
        """
        nonlocal reads_environment
        if isinstance(raw_value, str):
            # Resolve the value alone, and see whether that reads a variable.
            if "${" in raw_value:
                reads_environment = False
                resolved_value = container[place[-1]]
                if OmegaConf.is_config(resolved_value):
                    OmegaConf.to_container(resolved_value, resolve=True)
                if reads_environment:
                    yield place, raw_value
        elif raw_value and isinstance(raw_value, dict | list):
            inner_container = container[place[-1]] if place else container
            for key in raw_value if isinstance(raw_value, dict) else range(len(raw_value)):
                yield from find_references(raw_value[key], inner_container, (*place, key))

    # Replace OmegaConf's resolver for a moment, to notice when a variable is read.
    OmegaConf.register_resolver("oc.env", read_variable, replace=True)
    try:
        references = find_references(OmegaConf.to_container(tree, resolve=False), tree, ())
        return {tuple(key if isinstance(key, int) else str(key) for key in place): text for place, text in references}
    finally:
        OmegaConf.register_resolver("oc.env", oc.env, replace=True)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split("\n    full_key")[0].split())
