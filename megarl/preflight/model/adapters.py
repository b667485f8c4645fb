"""Checks of recipes whose engines receive LoRA adapters instead of merged weights."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config import Recipe
from megarl.families.shape import ModelShape
from megarl.planner.adapter_sync import find_objections
from megarl.preflight.registry import checks


@checks("lora")
def check_adapter_slots(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    """Yield the reasons why engines cannot take LoRA adapters in place of merged weights."""
    if not recipe.sends_adapter:
        return
    for reason, remedy in find_objections(recipe, shape):
        remedies = f"{remedy}, or set lora.sync=merged" if remedy else "set lora.sync=merged"
        yield f"lora.sync = adapter: {reason}; {remedies}"
