"""Registry of the checks before a start. Importing a module of this package registers its checks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from megarl.findings import Finding, finding_of_line
from megarl.types import ConfigError, DataError

Fault = str | DataError
"""Error found by a check: a line `FIELD = VALUE: problem; remedy` about the recipe, or a DataError about files."""

FACTS = ("recipe", "shape", "dp", "is_start", "is_trained", "has_model")
"""Names of arguments that a check can have: `recipe`, `shape` (the policy's sizes), `dp` (data-parallel size),
`is_start` (ranks start from this machine), `is_trained` (ranks train), `has_model` (the policy's folder is complete).
"""

Function = TypeVar("Function", bound=Callable[..., Iterable[Fault]])


class Cost(IntEnum):
    """Cost of a check. Cheap checks run first."""

    FIELDS = 0
    """Reads recipe fields only."""
    FILES = 1
    """Reads files, or imports a library or a user's code."""
    MODEL = 2
    """Needs the policy's shape, so it runs only if config.json can be read."""


@dataclass(frozen=True, slots=True)
class Check:
    """Registered check: a function that yields errors of one recipe section."""

    section: str
    cost: Cost
    function: Callable[..., Iterable[Fault]]
    facts: tuple[str, ...]
    per_run: bool
    """True: run the check once for the whole recipe. False: once per source of a mixture."""
    training_only: bool
    """True: skip the check if only engines start, as in `megarl eval`."""


_CHECKS: list[Check] = []


def checks(
    section: str, cost: Cost = Cost.FIELDS, *, per_run: bool = False, training_only: bool = False
) -> Callable[[Function], Function]:
    """Register the decorated function as a check of a recipe section. Its parameters are names in `FACTS`."""

    def register(function: Function) -> Function:
        facts = tuple(name for name in inspect.signature(function).parameters if name in FACTS)
        check_cost = Cost.MODEL if "shape" in facts else cost
        _CHECKS.append(Check(section, check_cost, function, facts, per_run, training_only))
        return function

    return register


@cache
def load_checks() -> tuple[Check, ...]:
    """Import all modules of this package, and return their checks, cheap ones first."""
    folder = Path(__file__).parent
    for path in sorted(folder.rglob("*.py")):
        if path.stem != "__init__":
            module = ".".join(path.relative_to(folder).with_suffix("").parts)
            import_module(f"{__package__}.{module}")
    return tuple(sorted(_CHECKS, key=lambda check: check.cost))


def faults(facts: Mapping[str, Any], costs: Iterable[Cost], *, per_run: bool = False) -> Iterator[Finding]:
    """Yield the errors found by checks of these costs, for one source, or with `per_run` for the whole recipe."""
    for check in load_checks():
        is_applicable = check.per_run == per_run and (facts["is_trained"] or not check.training_only)
        if check.cost in costs and is_applicable:
            yield from map(finding_of, check.function(**{name: facts[name] for name in check.facts}))


def finding_of(fault: Fault) -> Finding:
    # The exit code shows whether the recipe or a file is wrong.
    error_type = type(fault) if isinstance(fault, DataError) else ConfigError
    return finding_of_line("bad", str(fault), error_type.exit_code)
