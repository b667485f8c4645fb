"""Fields that a recipe hands through to Megatron-Core and vLLM, checked against the installed sources.

The sources are parsed, not imported: an import of either takes longer than all other checks together.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megarl.config import Recipe
from megarl.config.decided_fields import (
    ENGINE_FIELDS,
    EXPERT_FIELDS,
    FP8_FIELDS,
    RECOMPUTE_FIELDS,
    TRANSFORMER_FIELDS,
)
from megarl.config.idle_fields import without_effect
from megarl.config.secrets import holds_secret
from megarl.families.shape import ModelShape
from megarl.files.nearest import nearest

_SCALARS: dict[str, tuple[type, ...]] = {"bool": (bool,), "int": (int,), "float": (float, int), "str": (str,)}
_LISTS = ("list", "List", "tuple", "Tuple", "set", "Sequence")


def megatron_fields(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    """Fields of `trainer.megatron` that Megatron-Core's TransformerConfig does not take, or that change nothing."""
    settings = recipe.trainer.megatron
    decided = dict(TRANSFORMER_FIELDS)
    decided |= RECOMPUTE_FIELDS if recipe.trainer.recompute != "none" else {}
    decided |= EXPERT_FIELDS if shape.num_experts else {}
    decided |= FP8_FIELDS if recipe.trainer.fp8 != "none" else {}
    known: dict[str, ast.expr] = {}
    for file, name in (
        ("core/model_parallel_config.py", "ModelParallelConfig"),
        ("core/transformer/transformer_config.py", "TransformerConfig"),
    ):
        known |= class_fields("megatron", file, name)
    elsewhere = {
        name: owner
        for file, owner in (
            ("core/optimizer/optimizer_config.py", "OptimizerConfig"),
            ("core/distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig"),
        )
        for name in class_fields("megatron", file, owner)
    }
    if settings.get("fp8") and settings.get("fp8_recipe", "delayed") == "delayed":
        yield (
            "trainer.megatron.fp8_recipe = 'delayed': its history is saved as a pickle, which is never loaded; "
            "set it to blockwise, tensorwise or mxfp8"
        )
    if recipe.trainer.router_replay:
        yield from _without_replay(settings)
    undecided = {field: value for field, value in settings.items() if field not in decided}
    yield from without_effect(undecided, has_experts=bool(shape.num_experts))
    for field, value in settings.items():
        if field in decided:
            yield f"trainer.megatron.{field} = {value!r}: follows from {decided[field]}; remove it"
        elif known and field not in known and field in elsewhere:
            yield (
                f"trainer.megatron.{field} = {value!r}: is a field of Megatron-Core's {elsewhere[field]}, and "
                "trainer.megatron sets those of its TransformerConfig; see the recipe's sections optimizer and trainer"
            )
        elif known:
            yield from _check("trainer.megatron", "Megatron-Core's TransformerConfig", field, value, known)


def _without_replay(settings: Mapping[str, Any]) -> Iterator[str]:
    """Settings under which Megatron-Core's router does not take the experts that an engine chose."""
    if settings.get("moe_router_fusion"):
        yield (
            "trainer.megatron.moe_router_fusion = True: the fused router chooses anew, trainer.router_replay would "
            "replay nothing; leave one out"
        )
    granularity, modules = settings.get("recompute_granularity"), settings.get("recompute_modules") or ()
    if granularity == "full":
        yield (
            "trainer.megatron.recompute_granularity = 'full': under trainer.router_replay layers computed anew would "
            "choose anew; set trainer.recompute=selective instead"
        )
    elif granularity == "selective" and isinstance(modules, list | tuple) and "moe" in modules:
        yield (
            f"trainer.megatron.recompute_modules = {modules!r}: under trainer.router_replay experts computed anew "
            "would choose anew; name moe_act instead"
        )


def vllm_fields(recipe: Recipe) -> Iterator[str]:
    """Fields of `rollout.vllm` that vLLM's EngineArgs does not take."""
    known = class_fields("vllm", "engine/arg_utils.py", "EngineArgs")
    for field, value in recipe.rollout.vllm.items():
        if field in ENGINE_FIELDS:
            yield f"rollout.vllm.{field}: set {ENGINE_FIELDS[field]} instead"
        elif known:
            yield from _check("rollout.vllm", "vLLM's EngineArgs", field, value, known)


@cache
def class_fields(package: str, file: str, name: str) -> dict[str, ast.expr]:
    """The annotated fields of a class in an installed package, in order; none where the package or file is missing."""
    source = _read(package, file)
    classes = [node for node in ast.walk(source) if isinstance(node, ast.ClassDef) and node.name == name]
    return {
        statement.target.id: statement.annotation
        for node in classes
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }


def supported_head_sizes() -> list[int]:
    """The head sizes of vLLM's attention on CPU; none where that cannot be read."""
    source = _read("vllm", "v1/attention/backends/cpu_attn.py")
    for node in ast.walk(source):
        if isinstance(node, ast.FunctionDef) and node.name == "get_supported_head_sizes":
            returned = [statement.value for statement in node.body if isinstance(statement, ast.Return)]
            if returned and isinstance(returned[0], ast.List):
                constants = (item.value for item in returned[0].elts if isinstance(item, ast.Constant))
                return [size for size in constants if isinstance(size, int)]
    return []


def _read(package: str, file: str) -> ast.Module:
    spec = find_spec(package)
    for folder in (spec and spec.submodule_search_locations) or ():
        if (path := Path(folder) / file).is_file():
            return ast.parse(path.read_text(encoding="utf-8"))
    return ast.Module(body=[], type_ignores=[])


def _check(section: str, owner: str, field: str, value: Any, known: Mapping[str, ast.expr]) -> Iterator[str]:
    if field not in known:
        near = nearest(field, known)
        hint = f"did you mean {near}?" if near else f"remove it; fields are listed at the class {owner.split()[-1]}"
        # Without a text: under a mistyped name a secret is not known as one.
        shown = f" = {value!r}" if isinstance(value, bool | int | float) else ""
        yield f"{section}.{field}{shown}: {owner} has no such field; {hint}"
    elif not accepts(known[field], value):
        shown = "<hidden>" if holds_secret((*section.split("."), field), value) else repr(value)
        yield f"{section}.{field} = {shown}: {owner} says {ast.unparse(known[field])}; give a value of that type"


def accepts(annotation: ast.expr, value: Any) -> bool:
    """Whether a value of a recipe fits an annotation; True where the annotation is none of the simple ones.

    Simple are bool, int, float, str, literals, lists of these, and unions. None fits everything: libraries give it as
    the default of fields whose annotation does not mention it.
    """
    if value is None:
        return True
    match annotation:
        case ast.Name(id=name) if name in _SCALARS:
            return isinstance(value, _SCALARS[name]) and (name == "bool" or not isinstance(value, bool))
        case ast.Constant(value=None):
            return False
        case ast.Constant(value=str(text)):
            return accepts(ast.parse(text, mode="eval").body, value)
        case ast.BinOp(op=ast.BitOr(), left=left, right=right):
            return accepts(left, value) or accepts(right, value)
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            return accepts(inner, value)
        case ast.Subscript(value=ast.Name(id="Union"), slice=ast.Tuple(elts=members)):
            return any(accepts(member, value) for member in members)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
            choices = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            return value in [choice.value for choice in choices if isinstance(choice, ast.Constant)]
        case ast.Subscript(value=ast.Name(id=name), slice=inner) if name in _LISTS:
            inner = inner.elts[0] if isinstance(inner, ast.Tuple) else inner
            return isinstance(value, list | tuple | set) and all(accepts(inner, item) for item in value)
        case ast.Subscript(value=ast.Name(id="dict" | "Dict")):
            return isinstance(value, Mapping)
    return True
