"""Choices that save GPU memory, cheapest first: offloaded states, recomputed activations."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from megarl.config import Recipe
from megarl.families.shape import ModelShape

_STATES = ("optimizer", "gradients", "parameters")
"""Trainer states that may be offloaded, in the order of recipes."""
_CHEAPEST_FIRST = ("gradients", "optimizer", "parameters")
"""The same states, cheapest first. Gradients are dropped and come back as zeros. Optimizer and parameters are copied to
the host and back; parameters come back twice per step, because a reshard needs them too.
"""


class Recomputation(NamedTuple):
    """Values of `trainer.recompute` and `trainer.recompute_modules`."""

    recompute: str
    modules: tuple[str, ...] = ()
    """Recomputed modules under `selective`."""

    @property
    def values(self) -> dict[str, Any]:
        modules = {"trainer.recompute_modules": self.modules} if self.recompute == "selective" else {}
        return {"trainer.recompute": self.recompute, **modules}

    @property
    def attention_share(self) -> float:
        return float(self.recompute == "full")

    @property
    def feed_forward_share(self) -> float:
        # Recomputing an activation function needs no matrix product.
        has_products = self.recompute == "selective" and any(module in ("mlp", "moe") for module in self.modules)
        return float(self.recompute == "full" or has_products)


def recomputations(recipe: Recipe, shape: ModelShape) -> list[Recomputation]:
    """Return the settings of recomputation to try, the least work first. Router replay excludes some."""
    replays = recipe.trainer.router_replay
    choices = [Recomputation("none")]
    if shape.has_dense_layers:
        choices.append(Recomputation("selective", ("mlp",)))
    if shape.num_experts:
        choices.append(Recomputation("selective", ("layernorm", "moe_act")))
        if not replays:
            choices.append(Recomputation("selective", ("moe",)))
    return choices if replays else [*choices, Recomputation("full")]


def offloads(recipe: Recipe) -> list[tuple[str, ...]]:
    """Return the choices of offloaded states, none first.

    Offloading helps only ranks that alternate between models: trainer and engine, or policy and critic.
    """
    if not recipe.has_engine or (recipe.separate_ranks and not recipe.has_critic):
        return [()]
    # An optimizer that steps on the host has no states to offload.
    on_host = recipe.trainer.optimizer_offload_fraction > 0
    states = [state for state in _CHEAPEST_FIRST if not (on_host and state == "optimizer")]
    return [in_written_order(states[:num_states]) for num_states in range(len(states) + 1)]


def in_written_order(states: Collection[str]) -> tuple[str, ...]:
    return tuple(state for state in _STATES if state in states)
