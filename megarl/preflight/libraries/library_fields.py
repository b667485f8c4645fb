"""Checks of recipe fields for Megatron-Core and vLLM, against the fields in the installed sources.

The sources are parsed, not imported: an import takes longer than all other checks together.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megarl.config import Recipe
from megarl.config.libraries.engine_fields import engine_field_fault, refusals_by_field
from megarl.config.libraries.library_settings import find_setting_faults, reserved_settings
from megarl.config.secrets import holds_secret
from megarl.families.registry import FAMILIES
from megarl.families.shape import ModelShape
from megarl.files.nearest import nearest
from megarl.preflight.registry import Cost, checks

_SCALARS: dict[str, tuple[type, ...]] = {"bool": (bool,), "int": (int,), "float": (float, int), "str": (str,)}
_LISTS = ("list", "List", "tuple", "Tuple", "set", "Sequence")


def _find_reserved_fields(recipe: Recipe, shape: ModelShape) -> dict[str, str]:
    """Return Megatron-Core's settings that this recipe and model decide, each with what decides it."""
    reserved_fields = reserved_settings("megatron") | reserved_settings("architecture")
    # Some settings are decided only in certain models and modes.
    has_sinks = "softmax_type" in FAMILIES[shape.family].settings(shape)
    reserved_fields |= reserved_settings("sinks") if has_sinks else {}
    reserved_fields |= reserved_settings("recompute") if recipe.trainer.recompute != "none" else {}
    reserved_fields |= reserved_settings("experts") if shape.num_experts else {}
    reserved_fields |= reserved_settings("fp8") if recipe.trainer.fp8 != "none" else {}
    return reserved_fields


@checks("trainer")
def check_megatron_fields(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    """Yield errors of `trainer.megatron`: fields unknown to Megatron-Core's TransformerConfig, or without effect."""
    settings = recipe.trainer.megatron
    # Parsing the libraries' sources below takes 0.1 s of CPU time.
    if not settings:
        return
    reserved_fields = _find_reserved_fields(recipe, shape)
    known_fields: dict[str, ast.expr] = {}
    for file, name in (
        ("core/model_parallel_config.py", "ModelParallelConfig"),
        ("core/transformer/transformer_config.py", "TransformerConfig"),
    ):
        known_fields |= class_fields("megatron", file, name)
    # A common mistake: the field belongs to another config class of Megatron-Core 0.16.1, which users cannot set.
    fields_elsewhere = {
        name: owner
        for file, owner in (
            ("core/optimizer/optimizer_config.py", "OptimizerConfig"),
            ("core/distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig"),
        )
        for name in class_fields("megatron", file, owner)
    }
    # "delayed" is Megatron-Core's default, so it also applies without fp8_recipe.
    if settings.get("fp8") and settings.get("fp8_recipe", "delayed") == "delayed":
        yield (
            "trainer.megatron.fp8_recipe = 'delayed': Megatron saves its history as a pickle, which megarl never "
            "loads; set it to blockwise, tensorwise or mxfp8"
        )
    if recipe.trainer.router_replay:
        yield from _find_replay_faults(settings)
    free_settings = {field: value for field, value in settings.items() if field not in reserved_fields}
    yield from find_setting_faults(free_settings, has_experts=bool(shape.num_experts))
    # Without Megatron-Core, `known_fields` is empty, and no field can be called unknown.
    for field, value in settings.items():
        if field in reserved_fields:
            yield f"trainer.megatron.{field} = {value!r}: megarl sets this from {reserved_fields[field]}; remove it"
        elif known_fields and field not in known_fields and field in fields_elsewhere:
            yield (
                f"trainer.megatron.{field} = {value!r}: is a field of Megatron-Core's {fields_elsewhere[field]}, but "
                "trainer.megatron sets fields of TransformerConfig; see the recipe's sections optimizer and trainer"
            )
        elif known_fields:
            yield from _find_field_faults(
                "trainer.megatron", "Megatron-Core's TransformerConfig", field, value, known_fields
            )


def _find_replay_faults(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield errors of settings with which the trainer would not use the engine's experts, despite router replay."""
    if settings.get("moe_router_fusion"):
        yield (
            "trainer.megatron.moe_router_fusion = True: the fused router chooses experts itself, so "
            "trainer.router_replay would have no effect; leave one of both out"
        )
    granularity, modules = settings.get("recompute_granularity"), settings.get("recompute_modules") or ()
    if granularity == "full":
        yield (
            "trainer.megatron.recompute_granularity = 'full': with trainer.router_replay, recomputed layers would "
            "choose other experts; set trainer.recompute=selective instead"
        )
    elif granularity == "selective" and isinstance(modules, list | tuple) and "moe" in modules:
        yield (
            f"trainer.megatron.recompute_modules = {modules!r}: with trainer.router_replay, recomputed routers would "
            "choose other experts; name moe_act instead"
        )


@checks("rollout", Cost.FILES)
def check_vllm_fields(recipe: Recipe) -> Iterator[str]:
    """Yield errors of `rollout.vllm`: fields unknown to vLLM's EngineArgs, refused by megarl, or of a wrong type."""
    settings = recipe.rollout.vllm
    # Parsing vLLM's source takes 0.1 s of CPU time, and few recipes set its fields.
    known_fields = class_fields("vllm", "engine/arg_utils.py", "EngineArgs") if settings else {}
    for field, value in settings.items():
        is_listed = field in known_fields or field in refusals_by_field()
        if is_listed and (fault := engine_field_fault(field)) is not None:
            yield f"rollout.vllm.{field} = {_format_value('rollout.vllm', field, value)}: {fault}"
        elif known_fields:
            yield from _find_field_faults("rollout.vllm", "vLLM's EngineArgs", field, value, known_fields)


@cache
def class_fields(package: str, file: str, name: str) -> dict[str, ast.expr]:
    """Return the annotated fields of a class in an installed package, in order; empty if package or file is missing."""
    source = _parse_source(package, file)
    classes = [node for node in ast.walk(source) if isinstance(node, ast.ClassDef) and node.name == name]
    return {
        statement.target.id: statement.annotation
        for node in classes
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }


def supported_head_sizes() -> list[int]:
    """Return the head sizes of vLLM's attention on CPUs; empty if they cannot be read from its source."""
    # In vLLM 0.30, the return statement of get_supported_head_sizes lists the sizes.
    source = _parse_source("vllm", "v1/attention/backends/cpu_attn.py")
    for node in ast.walk(source):
        if isinstance(node, ast.FunctionDef) and node.name == "get_supported_head_sizes":
            return_values = [statement.value for statement in node.body if isinstance(statement, ast.Return)]
            if return_values and isinstance(return_values[0], ast.List):
                constants = (item.value for item in return_values[0].elts if isinstance(item, ast.Constant))
                return [size for size in constants if isinstance(size, int)]
    return []


def _parse_source(package: str, file: str) -> ast.Module:
    spec = find_spec(package)
    for folder in (spec and spec.submodule_search_locations) or ():
        if (path := Path(folder) / file).is_file():
            return ast.parse(path.read_text(encoding="utf-8"))
    return ast.Module(body=[], type_ignores=[])


def _find_field_faults(
    section: str, owner: str, field: str, value: Any, known_fields: Mapping[str, ast.expr]
) -> Iterator[str]:
    """Yield an error if a library's class lacks the field, or the value does not fit the field's type."""
    if field not in known_fields:
        nearest_field = nearest(field, known_fields)
        hint = (
            f"did you mean {nearest_field}?"
            if nearest_field
            else f"remove it; fields are listed at the class {owner.split()[-1]}"
        )
        # Do not print strings: a secret under a mistyped name is not recognised as one.
        value_text = f" = {value!r}" if isinstance(value, bool | int | float) else ""
        yield f"{section}.{field}{value_text}: {owner} has no such field; {hint}"
    elif not accepts(known_fields[field], value):
        yield (
            f"{section}.{field} = {_format_value(section, field, value)}: {owner} has the type "
            f"{ast.unparse(known_fields[field])}; give a value of that type"
        )


def _format_value(section: str, field: str, value: Any) -> str:
    return "<hidden>" if holds_secret((*section.split("."), field), value) else repr(value)


def accepts(annotation: ast.expr, value: Any) -> bool:
    """Return whether a value fits a library field's annotation: bool, int, float, str, literals, lists, unions.

    Other annotations accept everything, and None always fits: libraries annotate fields with default None otherwise.
    """
    if value is None:
        return True
    match annotation:
        case ast.Name(id=name) if name in _SCALARS:
            # Python counts bool as an int, but `tp: true` must not pass as 1.
            return isinstance(value, _SCALARS[name]) and (name == "bool" or not isinstance(value, bool))
        case ast.Constant(value=None):
            return False
        case ast.Constant(value=str(text)):
            return accepts(ast.parse(text, mode="eval").body, value)
        case ast.BinOp(op=ast.BitOr(), left=left, right=right):
            return accepts(left, value) or accepts(right, value)
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner_annotation):
            return accepts(inner_annotation, value)
        case ast.Subscript(value=ast.Name(id="Union"), slice=ast.Tuple(elts=members)):
            return any(accepts(member, value) for member in members)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=inner_annotation):
            choices = inner_annotation.elts if isinstance(inner_annotation, ast.Tuple) else [inner_annotation]
            return value in [choice.value for choice in choices if isinstance(choice, ast.Constant)]
        case ast.Subscript(value=ast.Name(id=name), slice=inner_annotation) if name in _LISTS:
            inner_annotation = inner_annotation.elts[0] if isinstance(inner_annotation, ast.Tuple) else inner_annotation
            return isinstance(value, list | tuple | set) and all(accepts(inner_annotation, item) for item in value)
        case ast.Subscript(value=ast.Name(id="dict" | "Dict")):
            return isinstance(value, Mapping)
    return True
