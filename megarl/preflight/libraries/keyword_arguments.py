"""Checks of keyword arguments of advantage estimators and losses, against the signatures of their functions."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from megarl.config import Recipe
from megarl.config.effects import unmet
from megarl.config.formulas import Keyword, Keywords, formula_fields, formulas, keyword_fields, kwargs_field
from megarl.config.idle import fields_set_by_user
from megarl.config.schema import value_at
from megarl.files.import_path import import_object, is_import_path
from megarl.files.nearest import nearest
from megarl.preflight.libraries.library_fields import accepts
from megarl.preflight.registry import Cost, checks
from megarl.types import ConfigError

_POSITIONAL: dict[str, tuple[str, ...]] = {
    "algorithm.advantage": ("rewards", "groups"),
    "algorithm.policy_loss": ("policy_logprobs", "old_logprobs", "advantages"),
}
"""Names of the tensors that a user's function gets by position, by recipe field."""
_SEQUENCE_ARGUMENTS = ("cu_seqlens", "mask")
"""Further tensors for a user's policy loss over whole sequences, recognised by its parameter `cu_seqlens`."""
_RETURNS = {"algorithm.advantage": "Tensor", "algorithm.policy_loss": "tuple[Tensor, dict[str, Tensor]]"}
_TRIAL = "megarl.algorithms.trial"
"""Module that calls a user's function on small tensors. It imports torch, so it is imported only if needed."""


@checks("algorithm", Cost.FILES)
def check_keywords(recipe: Recipe) -> Iterator[str]:
    """Yield the errors of all keyword arguments and of a user's own functions, which are imported here."""
    for field in formula_fields():
        name, kwargs_name = value_at(recipe, field), kwargs_field(field)
        if unmet(recipe, field) is not None or name is None or kwargs_name is None:
            continue
        if is_import_path(name):
            yield from _find_user_function_faults(recipe, field, kwargs_name, name)
        else:
            yield from _find_kwargs_faults(recipe, field, kwargs_name, name, formulas(field)[name])
            yield from _find_missing_keyword_faults(recipe, field, kwargs_name, name, formulas(field)[name])


def _find_user_function_faults(recipe: Recipe, field: str, kwargs_name: str, name: str) -> Iterator[str]:
    """Yield the errors of a user's function: of its signature and keywords, else of a call on small tensors."""
    try:
        function = import_object(name, field)
    except ConfigError as error:
        yield str(error)
        return
    signature = inspect.signature(function)
    positional = _POSITIONAL[field]
    if field == "algorithm.policy_loss" and "cu_seqlens" in signature.parameters:
        positional += _SEQUENCE_ARGUMENTS
    if fault := _find_positional_fault(field, name, signature, positional):
        yield fault
        return
    keywords = _read_keywords(signature, len(positional))
    faults = [
        *_find_idle_field_faults(recipe, field, name, keywords),
        *_find_missing_keyword_faults(recipe, field, kwargs_name, name, keywords),
    ]
    # A function with **kwargs accepts any keyword.
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in signature.parameters.values()):
        faults += _find_kwargs_faults(recipe, field, kwargs_name, name, keywords)
    # With wrong keywords, the call would fail for the reason already reported.
    yield from faults or _find_call_faults(recipe, field, kwargs_name, name, function, keywords)


def _find_call_faults(
    recipe: Recipe, field: str, kwargs_name: str, name: str, function: Callable[..., Any], keywords: Keywords
) -> Iterator[str]:
    """Call a function on small tensors with the recipe's keywords. Yield the error, if the call fails."""
    settings = {
        keyword: value_at(recipe, recipe_field)
        for keyword, recipe_field in keyword_fields(field).items()
        if keyword in keywords
    }
    settings |= value_at(recipe, kwargs_name)
    if field == "algorithm.policy_loss":
        needed_metrics = recipe.algorithm.needed_loss_metrics
        # Import by name, because an import statement would load torch for every recipe.
        fault = import_object(f"{_TRIAL}:policy_loss_fault", field)(function, settings, needed_metrics)
    else:
        samples = recipe.train.samples_per_prompt
        fault = import_object(f"{_TRIAL}:advantage_fault", field)(function, settings, samples_per_group=samples)
    if fault is not None:
        yield f"{field} = {name}: {fault}"


def _find_kwargs_faults(recipe: Recipe, field: str, kwargs_name: str, name: str, keywords: Keywords) -> Iterator[str]:
    """Yield an error for each unknown keyword of the function, and for each value of the wrong type."""
    measured_keywords = formula_fields()[field].measured
    settable_keywords = [
        keyword for keyword in keywords if keyword not in keyword_fields(field) and keyword not in measured_keywords
    ]
    for keyword, value in value_at(recipe, kwargs_name).items():
        setting = f"{kwargs_name}.{keyword} = {value!r}"
        if keyword in keyword_fields(field):
            yield f"{setting}: this keyword is a recipe field of its own; set {keyword_fields(field)[keyword]}"
        elif keyword in measured_keywords:
            yield f"{setting}: the run computes this keyword from its samples; leave it out"
        elif keyword not in keywords:
            nearest_keyword = nearest(keyword, settable_keywords)
            hint = f"did you mean {nearest_keyword}? " if nearest_keyword else ""
            choices = (
                f"known are {', '.join(settable_keywords)}" if settable_keywords else "it takes none; leave this out"
            )
            yield f"{setting}: {name} takes no such keyword; {hint}{choices}"
        elif (annotation := keywords[keyword].annotation) is not None and not _fits(annotation, value):
            yield f"{setting}: {name} has the type {ast.unparse(annotation)}; give a value of that type"


def _fits(annotation: ast.expr, value: Any) -> bool:
    """Return whether a value fits a type annotation. None fits only if the annotation allows it."""
    if value is None:
        return "None" in ast.unparse(annotation) or "Optional" in ast.unparse(annotation)
    return accepts(annotation, value)


def _find_positional_fault(
    field: str, name: str, signature: inspect.Signature, positional: tuple[str, ...]
) -> str | None:
    """Return why the run cannot call the function with its tensors; None: it can."""
    keywords = _read_keywords(signature, len(positional))
    try:
        # `bind` raises TypeError if a call with these arguments would fail.
        required_keywords = [keyword for keyword, parameter in keywords.items() if parameter.is_required]
        signature.bind(*positional, **dict.fromkeys(required_keywords))
    except TypeError as error:
        function = name.rpartition(":")[2]
        return (
            f"{field} = {name}: its signature is {signature}, which does not take {', '.join(positional)} ({error}). "
            f"Define it as: def {function}({', '.join(positional)}, *, ...) -> {_RETURNS[field]}"
        )
    return None


def _read_keywords(signature: inspect.Signature, num_positional: int) -> Keywords:
    """Return a function's keyword arguments: the parameters after the first `num_positional`."""
    keywords: dict[str, Keyword] = {}
    for index, parameter in enumerate(signature.parameters.values()):
        by_name = parameter.kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        if by_name and (index >= num_positional or parameter.kind is inspect.Parameter.KEYWORD_ONLY):
            keywords[parameter.name] = Keyword(
                _parse_annotation(parameter), parameter.default is inspect.Parameter.empty
            )
    return keywords


def _parse_annotation(parameter: inspect.Parameter) -> ast.expr | None:
    """Return a parameter's type annotation as a syntax tree, or None without a valid one."""
    annotation = parameter.annotation
    if annotation is inspect.Parameter.empty:
        return None
    # `inspect` gives a string under postponed annotations, else the object itself.
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError:
        return None


def _find_idle_field_faults(recipe: Recipe, field: str, name: str, keywords: Keywords) -> Iterator[str]:
    """Yield an error for each field set in the recipe whose keyword is missing in the user's function."""
    recipe_fields = set(fields_set_by_user(recipe))
    for keyword, recipe_field in keyword_fields(field).items():
        if recipe_field in recipe_fields and keyword not in keywords:
            yield (
                f"{recipe_field} = {value_at(recipe, recipe_field)!r}: has no effect with {field}={name}, which has no "
                f"keyword {keyword}; leave it out, or add the keyword there"
            )


def _find_missing_keyword_faults(
    recipe: Recipe, field: str, kwargs_name: str, name: str, keywords: Keywords
) -> Iterator[str]:
    """Yield an error for each keyword that the function requires and nothing supplies."""
    supplied_keywords = (
        keyword_fields(field).keys() | set(formula_fields()[field].measured) | value_at(recipe, kwargs_name).keys()
    )
    for keyword, parameter in keywords.items():
        if parameter.is_required and keyword not in supplied_keywords:
            remedy = "give it, or a default in its definition" if is_import_path(name) else "give it"
            yield f"{kwargs_name}.{keyword}: missing; {name} needs it: {remedy}"
