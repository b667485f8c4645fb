"""Names and keyword arguments of the formulas in `megarl.algorithms` (losses, advantage estimators, KL estimators).

They are parsed from the source code, because recipes are checked without importing torch. A recipe field with a
`Formula` annotation accepts the names in a table of the source. Keyword arguments become recipe settings. So a new
formula needs no second registration. pydantic is imported where it is used, so that `megarl --help` is fast.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.config.annotations import KeywordOf
from megarl.config.schema import all_fields, annotated_with
from megarl.files.import_path import is_import_path

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema

_ALGORITHMS = Path(__file__).parents[1] / "algorithms"


@dataclass(frozen=True, slots=True)
class Keyword:
    """Keyword argument of a formula. `annotation` is its type annotation; None: the source has none."""

    annotation: ast.expr | None
    is_required: bool


Keywords = Mapping[str, Keyword]


@dataclass(frozen=True, slots=True)
class Formula:
    """Annotation of a recipe field that selects a formula by its name in a table of `megarl.algorithms`.

    `further` are functions accepted in addition to the table. `measured` are keyword arguments computed by the run from
    its samples, so a recipe cannot set them. `takes_own`: the import path of a user's formula is accepted too.
    """

    module: str
    table: str
    further: tuple[str, ...] = ()
    measured: tuple[str, ...] = ()
    takes_own: bool = False

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema

        return core_schema.no_info_after_validator_function(self._check_formula_name, handler(source))

    def _check_formula_name(self, name: str | None) -> str | None:
        """Validate a formula's name: one of this field, or the user's import path."""
        from pydantic_core import PydanticCustomError

        functions = _read_functions(self)
        if name is None or name in functions or (self.takes_own and is_import_path(name)):
            return name
        import_path_hint = "; your own as package.module:function or path/to/file.py:function" if self.takes_own else ""
        choices_text = either([repr(function) for function in functions])
        raise PydanticCustomError(
            "formula", "must be {choices}{own}", {"choices": choices_text, "own": import_path_hint}
        )


# The tables are dict literals of names by convention, so parsing finds them without running the module.
@cache
def _read_functions(formula: Formula) -> dict[str, Keywords]:
    """Return the formulas accepted by the annotated field, by name, each with its keyword arguments."""
    statements = ast.parse((_ALGORITHMS / f"{formula.module}.py").read_text(encoding="utf-8")).body
    functions = {node.name: node for node in statements if isinstance(node, ast.FunctionDef)}
    function_names: dict[str, str] = {}
    for node in statements:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and _target_name(node) == formula.table:
            for key, value in zip(node.value.keys, node.value.values, strict=True):
                assert isinstance(key, ast.Constant) and isinstance(value, ast.Name)
                function_names[str(key.value)] = value.id
    function_names |= {name: name for name in formula.further}
    return {name: _read_keywords(functions[function].args) for name, function in function_names.items()}


@cache
def formula_fields() -> dict[str, Formula]:
    return {place: annotations[0] for place in all_fields() if (annotations := annotated_with(place, Formula))}


def formulas(field: str) -> dict[str, Keywords]:
    return _read_functions(formula_fields()[field])


@cache
def keyword_fields(field: str) -> dict[str, str]:
    """Return the recipe fields of the formulas' keyword arguments, by keyword."""
    return {
        item.name or place.rpartition(".")[2]: place
        for place in all_fields()
        for item in annotated_with(place, KeywordOf)
        if item.formula == field
    }


def kwargs_field(field: str) -> str | None:
    """Return the field with a formula's other arguments, like algorithm.policy_loss_kwargs, or None."""
    name = f"{field}_kwargs"
    return name if name in all_fields() else None


def taking(field: str, keyword: str) -> list[str]:
    """Return the names of a field's formulas that have this keyword argument."""
    return [name for name, keywords in formulas(field).items() if keyword in keywords]


def either(choices: Sequence[object]) -> str:
    """Join names for a sentence: `a, b or c`."""
    *leading, last = map(str, choices)
    return f"{', '.join(leading)} or {last}" if leading else last


def _target_name(node: ast.Assign) -> str | None:
    [target] = node.targets
    return target.id if isinstance(target, ast.Name) else None


def _read_keywords(arguments: ast.arguments) -> Keywords:
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return {argument.arg: Keyword(argument.annotation, default is None) for argument, default in pairs}
