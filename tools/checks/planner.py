"""The memory planner's bytes are those of every tensor of real workers, parameters to KV cache, on every rank.

In each layout all ranks build a worker (Megatron-Core, vLLM) of a tiny model, train on one row, and count the storages
of each kind, each once; the tensors that autograd saves during that row are counted too. A row per kind of memory, for
the rank where counted and planned bytes differ most. It fails if they differ by more than 2 %, or the reshard stages
more than was planned.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from tests.rank_pool import RankPool
from tools.make_tiny_model import make_tiny_model

DURATION = {"small": "20 s (three layouts)", "full": "45 s"}
SMALL = {"only": ["dense tp2 dp2", "dense pp2 dp2", "moe ep2 dp2 lora ppo"]}

LIMIT = 0.02
ROW_TOKENS, SEQUENCES = 256, 2
BF16 = {"model": {"dtype": "bfloat16"}}
PPO = {"algorithm": {"preset": "ppo"}}
LORA = {"lora": {"rank": 8}}
UNSHARDED = {"trainer": {"distributed_optimizer": False}}
OFFLOADED = {"trainer": {"offload": ["optimizer", "gradients", "parameters"]}}
FULL = {"trainer": {"recompute": "full"}}
SELECTIVE = {"trainer": {"recompute": "selective"}}
MLP = {"trainer": {"recompute": "selective", "recompute_modules": ["core_attn", "mlp"]}}
MOE = {"trainer": {"recompute": "selective", "recompute_modules": ["moe"]}}
SHARED = {"trainer": {"recompute": "selective", "recompute_modules": ["shared_experts"]}}
EVEN = dict(num_experts=4, experts_per_token=4)
"""Every token goes to all experts, so that each has as many as the others."""
MODELS: dict[str, dict[str, Any]] = {
    "dense": dict(family="qwen3", num_layers=4, num_kv_heads=2, vocab_size=1100, tie_word_embeddings=False),
    "tied": dict(family="llama", num_layers=4, num_kv_heads=2, vocab_size=1100),
    "moe": dict(family="qwen3_moe", num_layers=4, num_kv_heads=4, vocab_size=1100, tie_word_embeddings=False, **EVEN),
    "shared": dict(
        family="qwen2_moe", num_layers=4, num_kv_heads=4, vocab_size=1100, tie_word_embeddings=False, **EVEN
    ),
}


@dataclass(frozen=True)
class Case:
    """A model in a layout, with fields of the recipe by section."""

    model: str
    sizes: Mapping[str, Any]
    fields: Sequence[Mapping[str, Mapping[str, Any]]] = field(default=())


CASES: dict[str, Case] = {
    "dense one rank": Case("dense", {}),
    "dense one rank bf16": Case("dense", {}, [BF16]),
    "dense tp2 dp2": Case("dense", {"tp": 2, "dp": 2, "rollout_tp": 2}, [BF16, OFFLOADED]),
    "dense tp2, core attention recomputed": Case("dense", {"tp": 2}, [BF16, SELECTIVE]),
    "dense tp2 pp2, feed-forward recomputed": Case("dense", {"tp": 2, "pp": 2}, [BF16, MLP]),
    "dense cp2, core attention recomputed": Case("dense", {"cp": 2}, [BF16, SELECTIVE]),
    "moe ep2 dp2, experts recomputed": Case("moe", {"ep": 2, "dp": 2}, [BF16, MOE]),
    "shared experts tp2, recomputed": Case("shared", {"tp": 2}, [BF16, SHARED]),
    "dense tp4, more ranks than key-value heads": Case("dense", {"tp": 4, "rollout_tp": 4}, [BF16]),
    "dense pp2 dp2": Case("dense", {"pp": 2, "dp": 2}, [BF16]),
    "dense tp2 pp2 vpp2": Case("dense", {"tp": 2, "pp": 2, "vpp": 2}, [BF16]),
    "dense cp2 dp2": Case("dense", {"cp": 2, "dp": 2}, [BF16]),
    "dense dp4, every rank a whole optimizer": Case("dense", {"dp": 4}, [BF16, UNSHARDED]),
    "tied pp2 dp2": Case("tied", {"pp": 2, "dp": 2}, [BF16]),
    "tied tp2, all recomputed": Case("tied", {"tp": 2, "rollout_tp": 2}, [FULL]),
    "dense tp2 dp2 lora": Case("dense", {"tp": 2, "dp": 2}, [BF16, LORA]),
    "dense tp2 dp2 ppo": Case("dense", {"tp": 2, "dp": 2, "rollout_tp": 4}, [BF16, PPO, OFFLOADED]),
    "moe ep2 dp2": Case("moe", {"ep": 2, "dp": 2, "rollout_tp": 2}, [BF16]),
    "moe tp2 ep4 dp2": Case("moe", {"tp": 2, "ep": 4, "dp": 2, "rollout_ep": True, "rollout_tp": 2}, [BF16]),
    "moe tp2 etp2 pp2": Case("moe", {"tp": 2, "etp": 2, "pp": 2, "rollout_tp": 2}, [BF16]),
    "moe etp2 dp4": Case("moe", {"etp": 2, "dp": 4}, []),
    "moe ep2 dp2 lora ppo": Case("moe", {"ep": 2, "dp": 2}, [BF16, LORA, PPO]),
    "shared experts tp2 ep2 dp2": Case("shared", {"tp": 2, "ep": 2, "dp": 2, "rollout_tp": 2}, [BF16]),
}


def recipe_of(model: Path, case: Case) -> Recipe:
    parallel = parallel_of(case)
    sections: dict[str, dict[str, Any]] = {
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"train": "unused", "max_prompt_tokens": 64},
        "cluster": {"ranks_per_node": parallel.world_size},
        "trainer": {
            "max_tokens_per_microbatch": ROW_TOKENS * parallel.cp,
            "logprob_chunk_tokens": 32,
            **{axis: getattr(parallel, axis) for axis in ("tp", "pp", "vpp", "cp", "ep", "etp")},
        },
        "rollout": {
            "tp": parallel.rollout_tp,
            "kv_cache_gib": 0.01,
            "sampling": {"max_new_tokens": ROW_TOKENS * parallel.cp // SEQUENCES - 64},
        },
        "weights": {"bucket_mib": 1},
    }
    if parallel.rollout_ep:
        sections["rollout"]["vllm"] = {"enable_expert_parallel": True}
    for fields in case.fields:
        for name, values in fields.items():
            sections[name] = sections.get(name, {}) | dict(values)
    return Recipe.model_validate({"name": "planner", "loop": "rl", **sections})


def parallel_of(case: Case) -> ParallelConfig:
    return replace(ParallelConfig(tp=1, pp=1, dp=1, rollout_tp=1), **case.sizes)


def counted_bytes(tensors: Iterable[Any]) -> int:
    """Bytes of the tensors' storages, each once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


class SavedTensors:
    """Counts the bytes that autograd has saved, each storage once; `peak` is the most."""

    def __init__(self, without: Iterable[Any]) -> None:
        self._without = {t.untyped_storage()._cdata for t in without}
        self._held: dict[int, int] = {}
        self._bytes = self.peak = 0

    def hooks(self) -> Any:
        import torch

        return torch.autograd.graph.saved_tensors_hooks(lambda t: _Saved(t, self), lambda saved: saved.tensor)

    def add(self, tensor: Any) -> int | None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._without:
            return None
        count = self._held.get(storage._cdata, 0)
        self._held[storage._cdata] = count + 1
        if not count:
            self._bytes += storage.nbytes()
            self.peak = max(self.peak, self._bytes)
        return storage._cdata

    def drop(self, key: int, size: int) -> None:
        self._held[key] -= 1
        if not self._held[key]:
            del self._held[key]
            self._bytes -= size


class _Saved:
    """A tensor that autograd holds; it is counted until it is let go of."""

    def __init__(self, tensor: Any, counter: SavedTensors) -> None:
        self.tensor, self._counter = tensor, counter
        self._key, self._size = counter.add(tensor), tensor.untyped_storage().nbytes()

    def __del__(self) -> None:
        if self._key is not None:
            self._counter.drop(self._key, self._size)


def trained_counts(model: Any, prefix: str) -> dict[str, int]:
    """Return the bytes of a trained model by kind."""
    weights = {t.untyped_storage()._cdata for t in model.parameters.values()}
    main = [t for part in model.optimizer.chained_optimizers for g in part.optimizer.param_groups for t in g["params"]]
    moments = [
        value
        for part in model.optimizer.chained_optimizers
        for state in part.optimizer.state.values()
        for value in state.values()
        if getattr(value, "ndim", 0) > 0
    ]
    with model.merging():
        merged = counted_bytes(model.weights[name] for name in model._merged._adapters)
    return {
        f"{prefix}parameters": counted_bytes(model.parameters.values()),
        f"{prefix}gradients": counted_bytes(model.gradient_buffers()),
        f"{prefix}main weights": counted_bytes(t for t in main if t.untyped_storage()._cdata not in weights),
        f"{prefix}moments": counted_bytes(moments),
        f"{prefix}merged": merged,
    }


def copies_of(model: Any) -> list[int]:
    """Bytes of each copy that a trained model has in host memory."""
    return [copy.memory.nbytes for name in ("parameters", "optimizer") for copy in model._offloadable[name]._copies]


def count(recipe: Recipe, parallel: ParallelConfig, rows: Sequence[Any]) -> dict[str, int]:
    """Return what this rank holds, in bytes by kind, after its worker was built and updated with `rows`."""
    import torch.distributed as dist

    from megarl.reshard.live import DirectReshard
    from megarl.training.model import FrozenModel
    from megarl.worker.colocated import Worker
    from megarl.worker.scoring_models import ScoringModels

    rank = dist.get_rank()
    worker = Worker(rank, parallel.world_size, recipe, parallel, [("here",)] * parallel.world_size)
    try:
        worker.sleep_engine()
        policy, engine = worker.policy, worker.engine
        assert engine is not None
        saved = SavedTensors([*policy.parameters.values(), *policy.gradient_buffers()])
        with saved.hooks():
            policy.update(rows)
        counts = trained_counts(policy, "") | {"activations": saved.peak}
        if worker.critic is not None:
            worker.critic.update([critic_row(row) for row in rows])
            worker.critic.onload()
            counts |= trained_counts(worker.critic, "critic ")
            worker.critic.offload()
        reference = worker.find_part(ScoringModels).models.get("reference")
        if isinstance(reference, FrozenModel):
            counts["reference"] = counted_bytes(reference.parameters.values())
        policy.offload()
        copies = copies_of(policy)
        counts["offloaded copies"] = sum(copies)
        copies += [] if worker.critic is None else copies_of(worker.critic)
        counts["page-locked"] = worker.arena.num_locked_bytes
        # What torch's allocator would lock: each copy by a call of its own, as a power of two.
        counts["copies"] = len(copies)
        counts["as powers of two"] = sum(1 << (size - 1).bit_length() for size in copies)
        counts["locking calls"] = worker.arena.num_calls
        buffers = [*engine.model.parameters(), *engine.model.buffers()]
        counts["engine weights"] = counted_bytes(buffers)
        counts["KV cache"] = counted_bytes(engine._worker.model_runner.kv_caches)
        assert worker.rank_reshard is not None
        assert isinstance(worker.rank_reshard.live_reshard, DirectReshard)
        counts["staging"] = worker.rank_reshard.live_reshard.staged_bytes
        return counts
    finally:
        worker.close()


def critic_row(row: Any) -> Any:
    per_token = {name: row.per_token[name] for name in ("token_weights", "values", "returns")}
    return replace(row, per_token=per_token)


def rows_of(parallel: ParallelConfig, vocab_size: int) -> list[Any]:
    """Return as many full rows as fill the pipeline. All their sequences have one length."""
    from megarl.data.token_batch import TokenBatch
    from megarl.types import TrainingSequence

    random = np.random.default_rng(5)
    length = ROW_TOKENS * parallel.cp // SEQUENCES
    rows = []
    for _ in range(2 * parallel.pp):
        numbers = {name: random.normal(0.0, 0.5, length).astype(np.float32) for name in _PER_TOKEN}
        sequence = TrainingSequence(random.integers(1, vocab_size, size=length), np.arange(length) >= 8)
        row = TokenBatch.from_sequences([sequence] * SEQUENCES)
        for name, values in numbers.items():
            row.per_token[name] = np.tile(values, SEQUENCES)
        row.per_token["token_weights"] = np.full(row.lengths.sum(), 1e-3, np.float32)
        rows.append(row)
    return rows


_PER_TOKEN = ("advantages", "old_logprobs", "reference_logprobs", "values", "returns")


def plan_bytes(recipe: Recipe, parallel: ParallelConfig, rank: int) -> dict[str, int]:
    """Return the planner's prediction for a rank, in bytes by kind."""
    from megarl.families.shape import read_model_shape
    from megarl.planner.memory.devices import CPU
    from megarl.planner.memory.models import read_models
    from megarl.planner.memory.phases import RankPhases
    from megarl.planner.memory.rank_memory import RankMemory

    models = read_models(recipe, read_model_shape(recipe.model.path), parallel)
    memory = RankMemory(recipe, models, CPU, rank, expert_load=1.0)
    plan: dict[str, int] = {}
    for prefix, states in (("", memory.policy_states), ("critic ", memory.critic_states)):
        if prefix and models.critic is None:
            continue
        plan |= {
            f"{prefix}parameters": states.parameters,
            f"{prefix}gradients": states.gradients,
            f"{prefix}main weights": states.main_weights,
            f"{prefix}moments": states.moments,
            f"{prefix}merged": states.merged,
        }
    uses = {phase.name: phase for phase in RankPhases(memory).list_phases()}
    offload = recipe.trainer.offload
    return plan | {
        **memory.frozen_bytes,
        "activations": uses["train"].use("activations").host_bytes,
        "offloaded copies": memory.policy_states.offloaded_bytes(offload),
        "page-locked": memory.host_copy_bytes,
        "engine weights": memory.engine.weight_bytes,
        "KV cache": memory.engine.cache_bytes,
        "staging": memory.staging_bytes,
    }


def check(name: str, model: Path, ranks: RankPool) -> Iterator[dict[str, Any]]:
    """Yield a line for each kind of memory: counted and planned bytes of the rank where they differ most."""
    case = CASES[name]
    parallel, recipe = parallel_of(case), recipe_of(model, case)
    counts = ranks.run(count, recipe, parallel, rows_of(parallel, 1000), world_size=parallel.world_size)
    plans = [plan_bytes(recipe, parallel, rank) for rank in range(parallel.world_size)]
    for kind in plans[0]:
        pairs = [(counted.get(kind, 0), plan[kind]) for counted, plan in zip(counts, plans, strict=True)]
        if kind == "staging":
            errors = [max(0.0, counted / plan - 1) if counted else 0.0 for counted, plan in pairs]
        else:
            errors = [abs(plan / counted - 1) if counted else float(plan != 0) for counted, plan in pairs]
        worst = int(np.argmax(errors))
        line = {"layout": name, "kind": kind, "rank": worst, "counted": pairs[worst][0], "planned": pairs[worst][1]}
        if kind == "page-locked":
            calls, copies, powers = (counts[worst][extra] for extra in ("locking calls", "copies", "as powers of two"))
            if copies:
                line["kind"] += f" by {calls} calls (each of {copies} copies as a power of two: {powers} bytes)"
        yield line | {"error": errors[worst], "met": errors[worst] <= LIMIT}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", action="append", choices=CASES, help="a layout; repeatable; left out: all")


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder, RankPool(4) as ranks:
        for name in options.only or CASES:
            model = Path(folder) / CASES[name].model
            if not model.exists():
                make_tiny_model(model, **MODELS[CASES[name].model])
            yield from check(name, model, ranks)
