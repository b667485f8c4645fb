"""Changes of a run's parallel sizes between two steps: `megarl resize`, and smaller sizes after a loss."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, get_args

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.files.atomic import replace_text
from megarl.files.model_folder import read_object
from megarl.planner.search import with_field_values
from megarl.preflight import check
from megarl.types import ConfigError, DataError

FIELDS = (
    "cluster.nodes", "cluster.ranks_per_node", "trainer.tp", "trainer.dp", "trainer.pp", "trainer.vpp", "trainer.cp",
    "trainer.ep", "trainer.etp", "rollout.tp", "rollout.ranks",
)  # fmt: skip
"""Recipe fields that a resize may change."""
_MOST = 100_000
"""Largest size in a request: more ranks than any cluster has."""
_REQUEST = "resize.json"
"""File in the run folder with requested values by field. The run reads and removes it."""


class ResizedRecipe(NamedTuple):
    """A recipe with other parallel sizes, and these sizes."""

    recipe: Recipe
    parallel: ParallelConfig


class ShrunkRecipe(NamedTuple):
    """A recipe for the ranks left after a loss."""

    recipe: Recipe
    parallel: ParallelConfig
    continuing_ranks: list[int]
    """For each new rank, the surviving rank whose place it gets."""


class ResizeAskedError(Exception):
    """Raised between two steps to continue the run with a recipe that has other parallel sizes."""

    def __init__(self, resized: ResizedRecipe) -> None:
        super().__init__(f"the run continues with {resized.parallel}")
        self.recipe, self.parallel = resized


def refuse_other_fields(fields: Iterable[str]) -> None:
    if unknown_fields := [field for field in fields if field not in FIELDS]:
        raise ConfigError(f"{unknown_fields[0]}: a resize cannot change it; it can change {', '.join(FIELDS)}")


def request_resize(run_folder: Path, values: Mapping[str, Any]) -> None:
    """Request a run to change these fields after its current step.

    Raises ConfigError for other fields, or if the run has not read an earlier request yet.
    """
    refuse_other_fields(values)
    request_file = run_folder / _REQUEST
    complete_file = run_folder / f".{_REQUEST}.{os.getpid()}"
    replace_text(complete_file, json.dumps(dict(values)) + "\n")
    try:
        _link_or_create(complete_file, request_file)
    except FileExistsError:
        raise ConfigError(
            f"{request_file}: another change waits for the end of the current step; ask again when the run has made it"
        ) from None
    finally:
        complete_file.unlink(missing_ok=True)


def _link_or_create(complete: Path, path: Path) -> None:
    """Give a complete file the name `path`. Raises FileExistsError, where a rename would replace a file."""
    try:
        os.link(complete, path)
    except FileExistsError:
        raise
    except OSError:
        # A file system without hard links.
        with path.open("x", encoding="utf-8") as file:
            file.write(complete.read_text(encoding="utf-8"))


def take_request(run_folder: Path, recipe: Recipe) -> ResizedRecipe | None:
    """Return the recipe that a request changes a run to, and remove the request. None without one.

    Raises ConfigError or DataError if the run cannot change like this.
    """
    path = run_folder / _REQUEST
    if not path.exists():
        return None
    # Renamed first: a request written meanwhile is not removed unread.
    request_file = path.replace(path.with_suffix(".taken"))
    try:
        values = read_object(request_file)
    finally:
        request_file.unlink(missing_ok=True)
    if unknown_fields := [field for field in values if field not in FIELDS]:
        raise DataError(f"{path}: {unknown_fields[0]} is not a field that a resize can change")
    for field, value in values.items():
        # `with_field_values` does not validate.
        if not _is_size(recipe, field, value):
            raise DataError(
                f"{path}: {field} = {json.dumps(value):.40} is not a whole number from 1 to {_MOST}; ask with megarl "
                "resize"
            )
    resized_recipe = change_sizes(recipe, values)
    refuse_same_sizes(recipe, resized_recipe)
    return resized_recipe


def refuse_same_sizes(recipe: Recipe, resized: ResizedRecipe) -> None:
    sizes = attrgetter("cluster.nodes", "cluster.ranks_per_node")
    if sizes(recipe) == sizes(resized.recipe) and check(recipe, is_start=False) == resized.parallel:
        raise ConfigError(f"the run has these sizes already ({resized.parallel}); nothing changes")


def _is_size(recipe: Recipe, field: str, value: Any) -> bool:
    """Return whether a requested value is a valid size, or null for a field that may be null."""
    if value is not None:
        return type(value) is int and 1 <= value <= _MOST
    section, _, name = field.partition(".")
    return type(None) in get_args(type(getattr(recipe, section)).model_fields[name].annotation)


def change_sizes(recipe: Recipe, values: Mapping[str, Any]) -> ResizedRecipe:
    """Return the recipe with these sizes. Raises ConfigError if they do not fit."""
    _refuse_incomplete_copies(recipe)
    return _with_checked_sizes(recipe, values)


def with_sizes(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """Return the recipe with these sizes, unchecked. Raises ConfigError if its runs cannot be resized."""
    _refuse_incomplete_copies(recipe)
    return with_field_values(recipe, values)


def _refuse_incomplete_copies(recipe: Recipe) -> None:
    """Raise ConfigError if copies of the state, which a resize needs, would be incomplete."""
    if not _is_copied_whole(recipe):
        raise ConfigError("trainer.router_replay = true: copies of the state lack the recorded experts; no resize")


def _is_copied_whole(recipe: Recipe) -> bool:
    # Recorded experts stay on their rank. Only checkpoints contain them.
    return not recipe.trainer.router_replay


def can_grow(recipe: Recipe) -> bool:
    """Return whether a run can return to its size after a loss made it smaller."""
    # On this machine a lost rank means a fault of the machine, and no node can come back.
    return recipe.cluster.launcher != "local" and _is_copied_whole(recipe)


def _with_checked_sizes(recipe: Recipe, values: Mapping[str, Any]) -> ResizedRecipe:
    resized_recipe = with_field_values(recipe, values)
    return ResizedRecipe(resized_recipe, check(resized_recipe, is_start=False))


def shrink_to(recipe: Recipe, parallel: ParallelConfig, survivors: Sequence[int]) -> ShrunkRecipe:
    """Return the recipe with as many data-parallel replicas as the surviving ranks can hold.

    Numbers of replicas that the recipe refuses are left out, such as 3 for a batch of 8 sequences. Raises ConfigError
    if the survivors cannot hold one replica, or the recipe refuses every number.
    """
    ranks_per_replica = parallel.world_size // parallel.dp
    max_replicas = len(survivors) // ranks_per_replica
    if not max_replicas:
        raise ConfigError(
            f"cluster.recover = shrink: {len(survivors)} processes are left, but one data-parallel replica needs "
            f"{ranks_per_replica}; continue from the last checkpoint with --resume, on at least "
            f"{ranks_per_replica} ranks"
        )
    shrunk = _with_replicas(recipe, max_replicas, ranks_per_replica)
    # Whole replicas stay where they are, if possible. Then their weights need not move.
    ranks_by_replica = [parallel.replica_ranks(replica) for replica in range(parallel.dp)]
    ranks_of_whole_replicas = [rank for ranks in ranks_by_replica if set(ranks) <= set(survivors) for rank in ranks]
    preferred_ranks = [*ranks_of_whole_replicas, *(rank for rank in survivors if rank not in ranks_of_whole_replicas)]
    return ShrunkRecipe(shrunk.recipe, shrunk.parallel, sorted(preferred_ranks[: shrunk.parallel.world_size]))


def _with_replicas(recipe: Recipe, max_replicas: int, ranks_per_replica: int) -> ResizedRecipe:
    """Return the recipe with the largest number of replicas that it accepts, at most `max_replicas`.

    Tries fewer replicas, and for each number fewer ranks per node. Raises the last refusal if none is accepted.
    """
    last_refusal = ConfigError("cluster.recover = shrink: no number of replicas is left")
    # Separate engines without nodes of their own keep their ranks on the trainers' nodes.
    num_engine_ranks = recipe.separate_ranks if recipe.cluster.groups.engines is None else 0
    for replicas in range(max_replicas, 0, -1):
        dp_field = {} if recipe.trainer.dp is None else {"trainer.dp": replicas}
        num_ranks = replicas * ranks_per_replica + num_engine_ranks
        for ranks_per_node in range(min(recipe.cluster.ranks_per_node, num_ranks), 0, -1):
            num_nodes, remainder = divmod(num_ranks, ranks_per_node)
            if remainder:
                continue
            sizes = {"cluster.nodes": num_nodes, "cluster.ranks_per_node": ranks_per_node, **dp_field}
            try:
                return _with_checked_sizes(recipe, sizes)
            except ConfigError as error:
                last_refusal = error
    raise last_refusal
