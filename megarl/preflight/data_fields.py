"""Check of the names of record fields: each must belong to a kind of record that the run reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from megarl.config import Recipe
from megarl.config.formulas import either
from megarl.config.sections.data_sets import DataSetConfig, Role
from megarl.data.kinds import KindName
from megarl.datasets.fields import data_sets, kind_of_set
from megarl.preflight.registry import checks

_PROMPT_ROLES = ("prompt", "input", "system", "history", "tools")
_ROLES: dict[KindName, tuple[str, ...]] = {
    "problems": ("answer",),
    "conversations": ("response",),
    "pairs": ("chosen", "rejected"),
    "judged": ("response", "label"),
}
"""Roles of fields that a kind of record has besides those of a prompt."""


@checks("data")
def check_field_roles(recipe: Recipe) -> Iterator[str]:
    """Yield an error for each name of a field that no record of the run has."""
    kinds_of_data: list[KindName] = []
    for field, data_set in data_sets(recipe).items():
        kind = kind_of_set(recipe, field)
        if isinstance(data_set, DataSetConfig) and data_set.has_own_names:
            yield from _find_idle_roles(f"{field}.fields", data_set.fields, [kind])
        else:
            kinds_of_data.append(kind)
    yield from _find_idle_roles("data.fields", recipe.data.fields, kinds_of_data)


def _find_idle_roles(section: str, names: Mapping[Role, str], kinds: Sequence[KindName]) -> Iterator[str]:
    """Yield an error for each role in `names` that no record of these kinds has."""
    used_roles = list(dict.fromkeys((*_PROMPT_ROLES, *(role for kind in kinds for role in _ROLES[kind]))))
    for role, name in names.items():
        if role not in used_roles:
            yield (
                f"{section}.{role} = {name}: does nothing, because this run reads "
                f"{' and '.join(dict.fromkeys(kinds))}; leave it out, or give this name to {either(used_roles)}"
            )
