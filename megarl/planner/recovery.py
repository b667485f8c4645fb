"""Recovery from lost ranks: its default, by a node's host memory, and the steps that a loss costs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megarl.config import Recipe
from megarl.planner.gpus_of_run import uses_this_machine
from megarl.planner.judge import MemoryJudge
from megarl.planner.memory.node_bytes import fullest_node_bytes
from megarl.planner.search import with_field_values
from megarl.platform.memory.host_memory import machine_bytes

RECOVER, REPLICATE = "cluster.recover", "checkpoint.replicate"
_HOST_SHARE = 0.75
"""Share of a node's host memory that ranks with copies may take. Data, rewards and sandboxes need the rest."""
_STEPS_WITHOUT_SAMPLING = 10
"""Default of checkpoint.replicate in loops without sampling: their steps are short, and each copy takes host bandwidth.
Steps with sampling take tens of seconds, so each step is copied.
"""


def can_choose_recovery(recipe: Recipe) -> bool:
    """Return whether megarl may choose cluster.recover or checkpoint.replicate: the recipe leaves one out, and trains.

    False unless the run uses this machine's GPUs: the host memory of other nodes is unknown.
    """
    return bool(_choose_unset_fields(recipe)) and recipe.train.steps != 0 and uses_this_machine(recipe)


def with_recovery(recipe: Recipe, judge: MemoryJudge) -> Recipe:
    """Return the recipe with recovery from copies in host memory, if a node has memory for the copies.

    Fields set in the recipe are unchanged.
    """
    recovering_recipe = with_field_values(recipe, _choose_unset_fields(recipe))
    # This prediction includes the copies, because the recipe asks for them.
    node_bytes = fullest_node_bytes(recovering_recipe, judge.predict(recovering_recipe))
    return recovering_recipe if node_bytes <= _HOST_SHARE * machine_bytes() else recipe


def _choose_unset_fields(recipe: Recipe) -> dict[str, Any]:
    """Return values for recovery fields that the recipe leaves out. Empty: it sets both, or rules recovery out."""
    # A field written with its default value is still the user's choice.
    sets_recover = "recover" in recipe.cluster.model_fields_set
    sets_copies = "replicate" in recipe.checkpoint.model_fields_set
    is_refused = (sets_recover and recipe.cluster.recover == "stop") or (
        sets_copies and not recipe.checkpoint.replicate
    )
    # The copies lack the experts that router replay records for each token.
    if is_refused or recipe.trainer.router_replay:
        return {}
    interval = 1 if recipe.is_on_policy else _STEPS_WITHOUT_SAMPLING
    return ({} if sets_recover else {RECOVER: "restart"}) | ({} if sets_copies else {REPLICATE: interval})


def recovery_defaults(written: Recipe, completed: Recipe) -> Iterator[str]:
    reason = f"the copies fit into {_HOST_SHARE:.0%} of a node's memory"
    if completed.cluster.recover != written.cluster.recover:
        yield f"{RECOVER} = {completed.cluster.recover} by default: {reason}"
    if completed.checkpoint.replicate != written.checkpoint.replicate:
        yield f"{REPLICATE} = {completed.checkpoint.replicate} by default: {reason}"


def describe_loss(recipe: Recipe) -> str:
    """Return in words the effect of losing a trainer's rank or node, and how many steps are lost."""
    checkpoint, recover = recipe.checkpoint, recipe.cluster.recover
    outcomes = {
        "stop": "the run ends",
        "restart": "all ranks start again",
        "shrink": "the run goes on with fewer ranks",
    }
    cost = "all steps, because checkpoint.every_steps = 0"
    if checkpoint.every_steps:
        cost = f"the steps since the newest checkpoint (checkpoint.every_steps = {checkpoint.every_steps})"
    if recover != "stop" and checkpoint.replicate:
        # A step's copy may still be in transfer while the steps up to the next copied step are trained.
        copied_cost = f"at most {2 * checkpoint.replicate} steps (checkpoint.replicate = {checkpoint.replicate})"
        # If the only node is lost, its copies are lost too.
        cost = copied_cost if recipe.cluster.nodes > 1 else f"{copied_cost}; the loss of the node costs {cost}"
    return f"{outcomes[recover]}; it costs {cost}"
