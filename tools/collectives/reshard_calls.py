"""The exchanges of a reshard as programs of all its ranks: trainers and engines."""

from __future__ import annotations

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.families.shape import ModelShape
from megarl.reshard.layouts.placed import reshard_ends
from megarl.reshard.plan import Plan, make_plan
from megarl.reshard.staging import splits
from tools.collectives.programs import Call, Group, Job, Program


def plan_of(recipe: Recipe, layout: ParallelConfig, shape: ModelShape, num_ranks: int, itemsize: int) -> Plan:
    """Return the plan of a reshard over `num_ranks` ranks: fewer than the layout's if engine replicas are lost."""
    ends = reshard_ends(
        shape.with_mtp(recipe.trains_mtp),
        layout,
        num_ranks,
        transformer_engine=True,
        engine=shape.with_mtp(recipe.drafts_with_mtp),
    )
    size = recipe.cluster.ranks_per_node
    return make_plan(
        ends.sources,
        ends.destinations,
        itemsize=itemsize,
        bucket_bytes=recipe.weights.bucket_mib << 20,
        topology=[(rank // size,) for rank in range(num_ranks)],
    )


def reshard_job(plan: Plan, dtype: str) -> Job:
    """Return the exchanges of all ranks. Each rank computes its own part of the plan, as in a run."""
    group = Group("RESHARD", tuple(range(plan.num_ranks)))
    return Job.of_programs([group], [_program(plan, rank, dtype) for rank in range(plan.num_ranks)])


def _program(plan: Plan, rank: int, dtype: str) -> Program:
    own = plan.for_rank(rank)
    calls, steps = [], []
    for bucket in own.buckets:
        if not bucket.is_exchanged:
            continue
        sends, receives = (
            tuple((peer, numel) for peer, numel in enumerate(sizes) if numel) for sizes in splits(own, bucket)
        )
        calls.append(Call("all_to_all", 0, False, dtype, sends=sends, receives=receives, place="megarl/reshard"))
        # As in `Transport.reshard`: an exchange starts before the one before it is waited for.
        steps.append(len(calls) - 1)
        if len(calls) > 1:
            steps.append(~(len(calls) - 2))
    if calls:
        steps.append(~(len(calls) - 1))
    return Program(calls, steps)
