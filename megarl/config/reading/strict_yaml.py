"""Finds values with a surprising meaning in YAML 1.1, in the text of a recipe."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import yaml

from megarl.files.plain_yaml import count_yaml_values

MAX_DEPTH = 32
"""Maximum nesting of sections and lists in a YAML file. Recipes need four levels."""

MAX_VALUES = 100_000
"""Maximum number of values in a recipe. An alias counts as all its values: nested aliases grow exponentially."""

TOO_LARGE = f"has more than {MAX_VALUES} values, where an alias counts as all its values"

TOO_LONG = "digits, which is more than are read"

TOO_DEEP = f"nested deeper than {MAX_DEPTH} levels"

UNREADABLE = TOO_LARGE, TOO_LONG, TOO_DEEP
"""Errors after which the rest of the text cannot be read."""

NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
BOOLEAN = "tag:yaml.org,2002:bool"
OCTAL = re.compile(r"[-+]?0[0-7_]+")


def list_problems(text: str, field: str = "") -> list[str]:
    """Return one error line per misleading value of a YAML text: its field, the value as written, the remedy.

    Misleading are numbers to the base 60 (`1:30`) and 8 (`010`); yes, no, on and off; halves of surrogate pairs;
    numbers with more digits than Python reads; and nesting deeper than MAX_DEPTH. More than MAX_VALUES values give a
    single line. `field` is the dotted name of the whole text. Raises yaml.YAMLError if the text is not YAML.
    """
    too_large = f"{field or 'the file'}: {TOO_LARGE}; remove values or aliases"
    # Check before parsing, which takes 50 us per value.
    if count_yaml_values(text.encode(errors="replace")) > MAX_VALUES:
        return [too_large]
    # `compose` keeps each value's text and quotes. `load` would already have converted 1:30 to 90.
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except RecursionError:
        return [_too_deep(field)]
    if root is None:
        return []
    if _count_values(root, {}) > MAX_VALUES:
        return [too_large]
    return list(_find_problems(root, field, 0))


def _count_values(node: yaml.Node, counts: dict[int, int]) -> int:
    """Return the number of values below a YAML node, with aliases expanded.

    `counts` has the results of visited nodes by `id(node)`, so that many aliases cost no time.
    """
    if id(node) not in counts:
        counts[id(node)] = 1
        children = [] if isinstance(node, yaml.ScalarNode) else node.value
        # The children of a mapping are pairs of key and value.
        inner_nodes = [item for part in children for item in (part if isinstance(part, tuple) else (part,))]
        counts[id(node)] = 1 + sum(_count_values(item, counts) for item in inner_nodes)
    return counts[id(node)]


def _find_problems(node: yaml.Node, field: str, depth: int) -> Iterator[str]:
    """Yield an error line for each misleading value at or below a node, `depth` levels below the root."""
    if depth > MAX_DEPTH:
        yield _too_deep(field)
    elif isinstance(node, yaml.ScalarNode):
        yield from _find_scalar_problems(node, field)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _find_problems(item, f"{field}.{index}" if field else str(index), depth + 1)
    elif isinstance(node, yaml.MappingNode):
        for key, item in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else "?"
            place = f"{field}.{name}" if field else name
            yield from _find_problems(key, f"the key of {place}", depth + 1)
            yield from _find_problems(item, place, depth + 1)


def _find_scalar_problems(node: yaml.ScalarNode, field: str) -> Iterator[str]:
    """Yield an error line if YAML reads a value otherwise than its writer probably meant."""
    shortened_text = node.value if len(node.value) <= 60 else node.value[:57] + "..."
    if any("\ud800" <= character <= "\udfff" for character in node.value):
        yield f"{field} = {shortened_text!a}: half of a surrogate pair or a broken byte, not a character; remove it"
    is_plain = node.style is None
    if is_plain and node.tag in NUMBERS and len(node.value) > sys.get_int_max_str_digits():
        yield f"{field} = {shortened_text}: has {len(node.value)} {TOO_LONG}; write fewer, or text in quotes"
    elif is_plain and node.tag in NUMBERS and (":" in node.value or OCTAL.fullmatch(node.value)):
        base = 60 if ":" in node.value else 8
        parsed_value = yaml.safe_load(node.value)
        yield (
            f"{field} = {shortened_text}: YAML reads this as {parsed_value} (base {base}); write {parsed_value}, or "
            "text in quotes"
        )
    if is_plain and node.tag == BOOLEAN and node.value.lower() not in ("true", "false"):
        parsed_value = str(yaml.safe_load(node.value)).lower()
        yield f"{field} = {shortened_text}: YAML reads this as {parsed_value}; write {parsed_value}, or text in quotes"


def _too_deep(field: str) -> str:
    return f"{field or 'the file'}: {TOO_DEEP}; a recipe has sections and fields only"
