"""Names and keyword arguments of the formulas in `megarl.algorithms`, read from their source code.

Recipes are checked and printed without torch, but importing the formulas needs it. So the source is parsed instead. An
entry of a table in `megarl.algorithms` becomes a value of the recipe's field, and its keywords become settings. No
second registration is needed.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_ALGORITHMS = Path(__file__).parents[1] / "algorithms"

TABLES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "algorithm.advantage": ("advantages", "ADVANTAGES", ("gae",)),
    "algorithm.policy_loss": ("policy_losses", "POLICY_LOSSES", ()),
    "algorithm.importance_sampling": ("importance", "IMPORTANCE_SAMPLING", ()),
    "preference.loss": ("preference_losses", "PREFERENCE_LOSSES", ()),
    "distillation.divergence": ("divergences", "DIVERGENCES", ()),
}
"""Source of the formulas accepted by each recipe field: (module of `megarl.algorithms`, its table of formulas, further
functions of the module accepted by the field)."""

FIELDS: dict[str, dict[str, str]] = {
    "algorithm.advantage": {
        "normalize_by_std": "algorithm.normalize_by_std",
        "lone_sample": "algorithm.lone_sample",
        "k": "algorithm.pass_k",
        "gamma": "algorithm.gamma",
        "gae_lambda": "algorithm.gae_lambda",
    },
    "algorithm.policy_loss": {
        "clip_low": "algorithm.clip_low",
        "clip_high": "algorithm.clip_high",
        "dual_clip": "algorithm.dual_clip",
        "max_ratio": "algorithm.max_ratio",
    },
    "algorithm.importance_sampling": {
        "low": "algorithm.importance_sampling_low",
        "high": "algorithm.importance_sampling_high",
    },
    "preference.loss": {
        "beta": "preference.beta",
        "margin": "preference.margin",
        "label_smoothing": "preference.label_smoothing",
        "normalize_by_length": "preference.normalize_by_length",
        "desirable_weight": "preference.desirable_weight",
        "undesirable_weight": "preference.undesirable_weight",
    },
    "distillation.divergence": {"beta": "distillation.jsd_beta"},
}
"""Keyword arguments of formulas with a recipe field of their own.

For each field choosing a formula: the argument's name, mapped to the field with its value.
"""

KWARGS = {
    "algorithm.advantage": "algorithm.advantage_kwargs",
    "algorithm.policy_loss": "algorithm.policy_loss_kwargs",
    "algorithm.importance_sampling": "algorithm.importance_sampling_kwargs",
    "preference.loss": "preference.loss_kwargs",
}
"""Recipe field with all other keyword arguments of a formula, by the field choosing the formula."""

MEASURED: dict[str, tuple[str, ...]] = {
    "algorithm.advantage": ("lengths", "passes", "mask"),
    "preference.loss": ("kl",),
}
"""Keyword arguments computed by the run from its samples. A recipe cannot set them. The keys are the recipe fields
choosing the formula."""


@dataclass(frozen=True, slots=True)
class Keyword:
    """A keyword argument of a formula. `annotation` is its type annotation; None if the source has none."""

    annotation: ast.expr | None
    is_required: bool


Keywords = Mapping[str, Keyword]


# The tables are dict literals of names by convention, so parsing finds them without running the module.
@cache
def formulas(field: str) -> dict[str, Keywords]:
    """Return the formulas accepted by a recipe field: their names, each with the formula's keyword arguments."""
    module, table, further = TABLES[field]
    body = ast.parse((_ALGORITHMS / f"{module}.py").read_text(encoding="utf-8")).body
    functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
    named: dict[str, str] = {}
    for node in body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and _target(node) == table:
            for key, value in zip(node.value.keys, node.value.values, strict=True):
                assert isinstance(key, ast.Constant) and isinstance(value, ast.Name)
                named[str(key.value)] = value.id
    named |= {name: name for name in further}
    return {name: _keywords(functions[function].args) for name, function in named.items()}


def taking(field: str, keyword: str) -> list[str]:
    """Return the names of the formulas accepted by a recipe field and having this keyword argument."""
    return [name for name, keywords in formulas(field).items() if keyword in keywords]


def either(choices: Sequence[object]) -> str:
    """Return the choices (at least one) in words: `a, b or c`."""
    *others, last = map(str, choices)
    return f"{', '.join(others)} or {last}" if others else last


def _target(node: ast.Assign) -> str | None:
    [target] = node.targets
    return target.id if isinstance(target, ast.Name) else None


def _keywords(arguments: ast.arguments) -> Keywords:
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return {argument.arg: Keyword(argument.annotation, default is None) for argument, default in pairs}
