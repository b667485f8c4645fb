"""All ranks of a training step make matching calls on their process groups, and none waits forever.

Each distinct coordinate of a recipe's layout runs log-probs and one update on an imagined device: megarl's trainer,
Megatron's schedule, dispatcher and optimizer, unchanged. A process group records its calls. Then, for all ranks:
members of a group make the same calls with the same sizes; messages meet receives of their size; an execution of all
calls in order ends on every rank. A second row has the exchanges of the reshard, a third those after the loss of an
engine replica. A row shows bytes by link: within a node, between GPUs of equal place in two nodes, and between others.

    python tools/check.py collectives launch/recipes/qwen3_32b_grpo.yaml [OVERRIDES of the recipe]

Ranks with equal work share traces: those of a pipeline stage, and apart from them the first of its tensor-parallel
groups. The first and the last rank of each are traced and compared. --every-rank traces and compares all ranks.
Layers are Megatron's own, because Transformer Engine needs a GPU. Rows of all replicas have equally many tokens, and
all experts too. The broadcast of rows within a replica and the engines' own collectives are not recorded.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.collectives.agreement import mismatches
from tools.collectives.links import link_bytes
from tools.collectives.programs import Job
from tools.collectives.waits import deadlocks

if TYPE_CHECKING:
    from megarl.config import Recipe
    from megarl.config.parallel import ParallelConfig
    from megarl.families.shape import ModelShape

DURATION = {"small": "40 s: four tiny layouts of 8 ranks", "full": "10 minutes: the shipped recipes at full size"}
SMALL = {"cases": "tiny", "faults": True, "every_rank": True}

_MOST_EXAMINED = 16
"""Number of ranks whose own part of a reshard is compared with the sizes of all. A part takes up to 1 s."""
RECIPES = Path(__file__).resolve().parents[2] / "launch/recipes"
SEPARATE = ("rollout.placement=separate", "rollout.ranks=16")
SHIPPED: dict[str, tuple[str, Sequence[str]]] = {
    "14B on 8": ("qwen3_14b_dapo", ()),
    "32B on 16": ("qwen3_32b_grpo", ()),
    "32B on 16, 16 engine ranks": ("qwen3_32b_grpo", ("cluster.nodes=4", *SEPARATE)),
    "30B-A3B on 16": ("qwen3_30b_a3b_gspo", ()),
    "235B-A22B on 128": ("qwen3_235b_a22b_gspo", ()),
    "235B-A22B on 1024": ("qwen3_235b_a22b_gspo", ("cluster.nodes=128",)),
}
"""Recipe and overrides by name."""
_TINY_RECIPE = """
name: tiny
loop: rl
model: {{path: {name}, dtype: bfloat16}}
data: {{train: train.jsonl, max_prompt_tokens: 48}}
cluster: {{ranks_per_node: 8}}
trainer: {{tp: 2, {trainer}, max_tokens_per_microbatch: 256}}
optimizer: {{learning_rate: 1e-3}}
rollout: {{tp: 2, kv_cache_gib: 1, sampling: {{max_new_tokens: 48}}}}
train: {{steps: 1, prompts_per_step: 8, samples_per_prompt: 2}}
"""
_TINY_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 320,
    "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 512,
    "initializer_range": 0.02,
}  # fmt: skip
_TINY_EXPERTS = _TINY_CONFIG | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2,
    "norm_topk_prob": True, "moe_intermediate_size": 32, "tie_word_embeddings": False,
}  # fmt: skip
TINY = {
    "tiny dense": (_TINY_CONFIG, "pp: 2"),
    "tiny experts": (_TINY_EXPERTS, "pp: 2, ep: 2, router_replay: true"),
    "tiny chunks": (_TINY_CONFIG, "pp: 2, cp: 2, vpp: 2"),
    "tiny spread experts": (_TINY_EXPERTS, "cp: 2, ep: 4, router_replay: true"),
}
"""Fields of config.json and of the recipe's trainer, by name."""


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A recipe to check, with its layout and the sizes of its model."""

    name: str
    recipe: Recipe
    parallel: ParallelConfig
    shape: ModelShape


class _Clock:
    """Start of a measurement in seconds: of the wall clock, and of this process's CPU time."""

    def __init__(self) -> None:
        self.wall, self.cpu = time.monotonic(), time.process_time()


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """Yield the recipe of the command line, or those of --cases."""
    from megarl.config.recipe import load
    from megarl.families.shape import planned_shape, shape_from_config
    from megarl.planner.sizes import align_parallel, parallel_of

    def case(name: str, recipe: Recipe, shape: ModelShape) -> Case:
        return Case(name, recipe, align_parallel(recipe, shape, parallel_of(recipe)), shape)

    if options.recipe:
        file, *overrides = options.recipe
        recipe = load(file, overrides)
        yield case(recipe.name, recipe, planned_shape(recipe.model.folder, recipe.model.override_config))
        return
    if options.cases == "shipped":
        for name, (file, overrides) in SHIPPED.items():
            recipe = load(RECIPES / f"{file}.yaml", overrides)
            yield case(name, recipe, planned_shape(recipe.model.folder, recipe.model.override_config))
        return
    for name, (config, trainer) in TINY.items():
        with tempfile.TemporaryDirectory(prefix="megarl-collectives-") as folder:
            file = Path(folder) / "recipe.yaml"
            file.write_text(_TINY_RECIPE.format(name=name.replace(" ", "_"), trainer=trainer))
            yield case(name, load(file), shape_from_config(dict(config)))


def check_step(case: Case, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Trace the step of a case and yield its row; with --faults also those of seeded faults."""
    from tools.collectives.jobs import differing_ranks, representatives, shared_job
    from tools.collectives.traced_rank import Work, trace_ranks

    started = _Clock()
    parallel = case.parallel
    work = Work(case.recipe, parallel, case.shape, options.rows or 2 * parallel.pp)
    ranks = list(range(parallel.world_size)) if options.every_rank else representatives(parallel)
    traces = {trace.rank: trace for trace in trace_ranks(work, ranks, options.processes)}
    groups = traces[ranks[0]].groups
    findings = [
        f"rank {rank} creates other process groups than rank {ranks[0]}"
        for rank, trace in traces.items()
        if list(trace.groups) != list(groups)
    ]
    job, missing = shared_job(parallel, groups, {rank: trace.program for rank, trace in traces.items()})
    if missing:
        traces |= {trace.rank: trace for trace in trace_ranks(work, missing, options.processes)}
        job, _ = shared_job(parallel, groups, {rank: trace.program for rank, trace in traces.items()})
    differing = differing_ranks(parallel, groups, {rank: trace.program for rank, trace in traces.items()})
    findings += [f"rank {rank}: its calls are not those of the first rank with the same work" for rank in differing]
    cpu_seconds = sum(trace.cpu_seconds for trace in traces.values())
    yield _row(case, "step", job, findings, traced=len(traces), started=started, cpu_seconds=cpu_seconds)
    if options.faults:
        yield from check_faults(case, job)


def check_faults(case: Case, job: Job) -> Iterator[dict[str, Any]]:
    """Put faults into one rank's calls. Yields rows that fail if rank and call are not named."""
    from tools.collectives import faults

    rank = len(job.ranks) - 1
    for name, place, changed in (
        ("a skipped call", faults.collective_in_the_middle, faults.with_skipped_call),
        ("swapped calls", faults.pair_in_the_middle, faults.with_swapped_calls),
    ):
        started = _Clock()
        row = _row(case, name, changed(job, rank, place(job, rank)), [], traced=0, started=started)
        yield row | {"met": row["findings"] > 0 and f"rank {rank} " in row["first"]}


def check_reshard(case: Case, num_ranks: int, name: str) -> dict[str, Any]:
    """Return the row of the reshard over `num_ranks` ranks of a case."""
    import torch

    from tools.collectives.reshard_calls import differing_ranks, exchanges, plan_of, reshard_job

    started = _Clock()
    dtype = case.recipe.model.dtype
    plan = plan_of(case.recipe, case.parallel, case.shape, num_ranks, getattr(torch, dtype).itemsize)
    exchanged = exchanges(plan)
    examined = sorted({*range(0, num_ranks, -(-num_ranks // _MOST_EXAMINED)), num_ranks - 1})
    differing = differing_ranks(plan, exchanged, examined)
    findings = [f"rank {rank}: its own part of the reshard has other sizes than its peers expect" for rank in differing]
    return _row(case, name, reshard_job(plan, exchanged, dtype), findings, traced=len(examined), started=started)


def _row(
    case: Case,
    phase: str,
    job: Job,
    findings: Sequence[str],
    *,
    traced: int,
    started: _Clock,
    cpu_seconds: float = 0.0,
) -> dict[str, Any]:
    findings = [*findings, *mismatches(job), *deadlocks(job)]
    links = link_bytes(job, case.recipe.cluster.ranks_per_node)
    return {
        "case": case.name,
        "phase": phase,
        "ranks": len(job.ranks),
        "traced": traced,
        "calls": job.num_calls,
        **{f"{link}_gb": num_bytes / 1e9 for link, num_bytes in links.items()},
        "seconds": round(time.monotonic() - started.wall),
        "cpu_seconds": round(time.process_time() - started.cpu + cpu_seconds),
        "findings": len(findings),
        "first": findings[0] if findings else "",
        "met": not findings,
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", nargs="*", help="recipe and its overrides; none: those of --cases")
    parser.add_argument("--cases", choices=("shipped", "tiny"), default="shipped", help="recipes if none is given")
    parser.add_argument("--rows", type=int, help="rows of each replica; default: two for each pipeline stage")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), help="ranks traced at a time")
    parser.add_argument("--phase", choices=("step", "reshard", "all"), default="all", help="check this phase only")
    parser.add_argument("--faults", action="store_true", help="also seed two faults, which must be found")
    parser.add_argument("--every-rank", action="store_true", help="trace the ranks of all replicas and compare them")


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    from tools.collectives.imagined_device import choose_imagined_device

    choose_imagined_device()
    for case in cases(options):
        if options.phase in ("step", "all"):
            yield from check_step(case, options)
        if not case.recipe.has_engine or options.phase == "step":
            continue
        yield check_reshard(case, case.parallel.num_ranks, "reshard")
        if case.parallel.is_separate and len(case.parallel.leaders()) > 1:
            yield check_reshard(case, case.parallel.num_ranks - case.parallel.rollout_tp, "reshard, replica lost")
