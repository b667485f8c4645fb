"""Predicted memory of a run by phase: start, rollout, reshard, log-probs, train, save."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import Literal

from megarl.config import Recipe
from megarl.config.library_settings import balance_losses
from megarl.config.parallel import ParallelConfig
from megarl.families.logprob_chunks import has_logit_kernels, logprob_chunk_tokens
from megarl.families.shape import ModelShape
from megarl.memory_plan import activations, engine_bytes, trainer_bytes
from megarl.memory_plan.activations import PassSettings
from megarl.memory_plan.communicators import Communicator, communicators_of
from megarl.memory_plan.deep_ep import NUM_SMS, deep_ep_bytes
from megarl.memory_plan.devices import (
    CONTEXT_BYTES,
    FRAGMENTATION_SHARE,
    LIBRARY_BYTES,
    PINNED_BLOCK_BYTES,
    Platform,
)
from megarl.memory_plan.memory_table import CacheCapacity, MemoryTable, Phase, Use
from megarl.memory_plan.models import Built, Models
from megarl.memory_plan.trainer_bytes import TrainerStates
from megarl.reshard.layouts.lora import adapter_layouts
from megarl.reshard.layouts.megatron import parameter_shapes
from megarl.reshard.layouts.vllm_adapters import VllmAdapterLayouts
from megarl.reshard.layouts.vllm_computed import VllmLayouts

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
TEMPORARY = ("activations", "pipeline", "backward", "logits", "engine step")
"""Uses of memory that torch's allocator takes and returns within a phase, in sizes that vary."""
# States that may be offloaded, by the names in trainer.offload.
_ALL = ("parameters", "gradients", "optimizer")


def memory_table(
    recipe: Recipe,
    models: Models,
    platform: Platform,
    *,
    gpu_gib: float | None = None,
    stages: Collection[int] | None = None,
) -> MemoryTable:
    """Return a recipe's predicted memory. Each phase is shown on the rank needing most memory in it.

    `gpu_gib` is the memory of a GPU in GiB, of which `rollout.gpu_memory_utilization` is a share. One rank of each
    pipeline stage is examined, because ranks of a stage differ only by a few elements of padding. `stages`: examine
    these stages only; None: all. With separate engines, the first engine rank is examined too.
    """
    parallel = models.policy.parallel
    ranks = [parallel.rank(tp=0, dp=0, pp=stage) for stage in (range(parallel.pp) if stages is None else stages)]
    ranks += parallel.leaders()[:1] if parallel.is_separate else ()
    memories = [RankMemory(recipe, models, platform, rank, gpu_gib=gpu_gib) for rank in ranks]
    by_name: dict[str, list[Phase]] = {}
    for memory in memories:
        for phase in memory.phases():
            by_name.setdefault(phase.name, []).append(phase)
    phases = tuple(max(same, key=lambda phase: (phase.device_bytes, phase.host_bytes)) for same in by_name.values())
    sampling = next((memory for memory in memories if memory.has_engine), None)
    cache = None if sampling is None else sampling.cache_capacity()
    return MemoryTable(phases=phases, cache=cache, is_gpu=platform.is_gpu)


@dataclass(frozen=True)
class RankMemory:
    """Predicts the memory of one rank: of its models, its engine, or both."""

    recipe: Recipe
    models: Models
    platform: Platform
    rank: int
    _: KW_ONLY
    gpu_gib: float | None = None
    expert_load: float = activations.EXPERT_IMBALANCE
    """Assumed tokens of the fullest expert-parallel rank, divided by the mean over these ranks."""

    @property
    def parallel(self) -> ParallelConfig:
        return self.models.policy.parallel

    @property
    def has_trainer(self) -> bool:
        return self.rank < self.parallel.world_size

    @property
    def has_engine(self) -> bool:
        return self.recipe.has_engine and not (self.parallel.is_separate and self.has_trainer)

    @property
    def itemsize(self) -> int:
        return ITEM_BYTES[self.recipe.model.dtype]

    @cached_property
    def policy(self) -> TrainerStates:
        """Return the policy's states as they are after the first update: an optimizer has no moments before."""
        if not self.has_trainer:
            return trainer_bytes.NOTHING
        return self._trained(self.models.policy, self.recipe.optimizer.name, self.recipe.lora.rank)

    @cached_property
    def critic(self) -> TrainerStates:
        if self.models.critic is None or not self.has_trainer:
            return trainer_bytes.NOTHING
        return self._trained(self.models.critic, self.recipe.critic.optimizer.name, 0)

    @cached_property
    def frozen(self) -> dict[str, int]:
        """Return the bytes of each model that only scores (reference, reward model, teachers)."""
        if not self.has_trainer:
            return {}
        return {
            name: trainer_bytes.parameter_bytes(built.layouts, self.rank, itemsize=self.itemsize)
            for name, built in self.models.frozen.items()
        }

    @cached_property
    def engine_weights(self) -> int:
        if not self.has_engine:
            return 0
        weights = engine_bytes.engine_weights(
            self._engine_layouts,
            self._engine_rank,
            itemsize=self.itemsize,
            quantization=self.recipe.rollout.quantization,
        )
        return weights + self.adapter_slots

    @cached_property
    def adapter_slots(self) -> int:
        """Return the bytes of the engine's slots for a LoRA adapter, which count as engine weights."""
        if not self.has_engine or not self.recipe.sends_adapter:
            return 0
        lora = self.recipe.lora
        slots = VllmAdapterLayouts(self._engine_layouts, lora.targets, lora.rank)
        return slots.bytes_on(self._engine_rank, self.itemsize)

    @cached_property
    def unquantised_weights(self) -> int:
        """Return the bytes that an engine needs during a reshard to make its FP8 weights."""
        if not self.has_engine or self.recipe.rollout.quantization == "none":
            return 0
        return engine_bytes.unquantised_bytes(
            self._engine_layouts,
            self._engine_rank,
            itemsize=self.itemsize,
            bucket_bytes=self.recipe.weights.bucket_mib << 20,
            stages=self.parallel.pp,
        )

    @property
    def _engine_layouts(self) -> VllmLayouts:
        parallel = self.parallel
        num_ranks = parallel.rollout_ranks or parallel.world_size
        return VllmLayouts(self._engine_shape, parallel.rollout_tp, num_ranks, parallel.rollout_ep)

    @property
    def _engine_shape(self) -> ModelShape:
        """Return the engines' model: the policy's MTP layers are part of it only if they draft tokens."""
        return self.models.policy.shape.with_mtp(self.recipe.drafts_with_mtp)

    @property
    def _engine_rank(self) -> int:
        return self.rank - self.parallel.leaders()[0]

    @cached_property
    def cache_bytes(self) -> int:
        if not self.has_engine:
            return 0
        return engine_bytes.cache_bytes(self._cache_asked, block_bytes=self._block_bytes)

    @cached_property
    def engine_step(self) -> int:
        if not self.has_engine:
            return 0
        rollout = self.recipe.rollout
        default = engine_bytes.BATCHED_TOKENS[self.platform.kind]
        # The same limit as set in `platform.cpu.vllm_patches`.
        if not self.platform.is_gpu:
            default = max(default, self.recipe.context_tokens)
        return engine_bytes.step_bytes(
            self.models.policy.shape,
            self.parallel.rollout_tp,
            batched_tokens=int(rollout.vllm.get("max_num_batched_tokens") or default),
            max_requests=rollout.max_concurrent_requests,
            itemsize=self.itemsize,
        )

    @cached_property
    def staging(self) -> int:
        """Return the bytes of the reshard's buffers: two buckets, or all weights if they are smaller."""
        if not self.recipe.has_engine or self.parallel.num_ranks == 1:
            return 0
        bucket = self.recipe.weights.bucket_mib << 20
        return min(2 * bucket, self.engine_weights + self.policy.parameters)

    def cache_capacity(self) -> CacheCapacity:
        """Return how many requests fit into the KV cache of the rank's engine."""
        blocks = self.cache_bytes // self._block_bytes
        # vLLM 0.30 holds one block back.
        tokens = max(0, blocks - 1) * self._block_tokens
        most = self.recipe.rollout.max_concurrent_requests
        return CacheCapacity(
            tokens=tokens,
            longest=self.recipe.context_tokens,
            max_concurrent_requests=most,
            under_way=min(most, self._requests_of_step),
        )

    @property
    def _requests_of_step(self) -> int:
        """Return how many requests of a training step one engine handles."""
        train = self.recipe.train
        attempts = math.ceil(train.prompts_per_step * train.samples_per_prompt * self.recipe.algorithm.oversampling)
        num_engines = (self.parallel.rollout_ranks or self.parallel.world_size) // self.parallel.rollout_tp
        return -(-attempts // max(num_engines, 1))

    def phases(self) -> Iterator[Phase]:
        """Yield all phases of the run on the examined rank."""
        part: Literal["", "trainer", "engine"] = ""
        if self.parallel.is_separate:
            part = "trainer" if self.has_trainer else "engine"
        moments = self._of_trainer() if self.has_trainer else self._of_engine()
        for name, uses in moments.items():
            placed = tuple(self._placed([*uses, *self._background_send(name)]))
            yield Phase(name=name, rank=self.rank, uses=placed, part=part)

    def _of_engine(self) -> dict[str, list[Use]]:
        """Return the phases of a rank that only samples."""
        return {"start engine": self._start(), "rollout": self._rollout(), "reshard engine": self._reshard()}

    def _of_trainer(self) -> dict[str, list[Use]]:
        moments = {"start": self._start()}
        if self.has_engine:
            moments["rollout"] = self._rollout()
        if self.recipe.has_engine:
            moments["reshard"] = self._reshard()
        if self.recipe.is_on_policy:
            moments["logprobs"] = self._scoring("policy")
        moments |= {f"logprobs {name}": self._scoring(name) for name in self.frozen}
        if self.models.critic is not None:
            moments["logprobs critic"] = self._scoring("critic")
        moments["train"] = self._training("policy")
        if self.models.critic is not None:
            moments["train critic"] = self._training("critic")
        moments["save"] = self._save()
        return moments

    def _start(self) -> list[Use]:
        """Return the peak of a run's start. It occurs while the engine is built, when all models are loaded, or in the
        first reshard."""
        # Moments appear with the first update, so they are missing until then.
        began = replace(self.policy, moments=0)
        building = [*self._states(began, _ALL), *self._critic(()), *self._idle_engine(), *self._idle_models()]
        if built := max(self.policy.built, self.critic.built):
            on_host = max(self.policy.built_on_host, self.critic.built_on_host)
            building.append(Use("optimizer being built", device_bytes=built, host_bytes=on_host))
        moments = [building]
        if self.recipe.has_engine:
            moments += [self._awake_engine(), self._reshard(began), self._rollout(began)]
        return max(moments, key=lambda uses: sum(use.device_bytes for use in uses))

    def _rollout(self, policy: TrainerStates | None = None) -> list[Use]:
        return [
            *self._states(policy or self.policy, ()),
            *self._critic(()),
            *self._awake_engine(),
            *self._idle_models(),
        ]

    def _reshard(self, policy: TrainerStates | None = None) -> list[Use]:
        states = policy or self.policy
        # A separate rank holds only one of the two, so nothing is offloaded and nothing sleeps.
        is_alone = self.parallel.is_separate
        uses = [*self._states(states, _ALL if is_alone else ("parameters",)), *self._critic(()), *self._idle_models()]
        if states.merged and not self.recipe.sends_adapter:
            uses.append(Use("merged adapters", device_bytes=states.merged))
        if self.unquantised_weights:
            uses.append(Use("unquantised weights", device_bytes=self.unquantised_weights))
        # On a colocated GPU the cache is released during a reshard.
        cache = 0 if self.platform.is_gpu and not is_alone else self.cache_bytes
        return [
            *uses,
            Use("engine weights", device_bytes=self.engine_weights),
            Use("KV cache", device_bytes=cache),
            Use("staging", device_bytes=self.staging),
        ]

    def _scoring(self, name: str) -> list[Use]:
        built = self._built(name)
        settings = self.pass_settings(built)
        if (row_tokens := self.recipe.trainer.max_tokens_per_forward) is not None:
            settings = replace(settings, row_tokens=row_tokens)
        uses = [*self._working(name), *self._idle_engine()]
        forward = activations.forward_bytes(built.shape, built.parallel, settings)
        logits = activations.logits_bytes(built.shape, built.parallel, settings) if self._is_last(built) else 0
        return [
            *uses,
            *self._fp8(built),
            Use("activations", device_bytes=int(forward)),
            Use("logits", device_bytes=int(logits)),
        ]

    def _training(self, name: str) -> list[Use]:
        built = self._built(name)
        settings = self.pass_settings(built)
        stage = built.parallel.coordinates(self.rank).pp
        # A row stored as a tree saves other tensors than separate sequences do: the larger ones count.
        rows = [settings]
        if self.recipe.trainer.share_prefixes == "auto":
            rows.append(replace(settings, shares_prefixes=True))
        saved = max(activations.stage_bytes(built.shape, built.parallel, stage, row) for row in rows)
        passing = activations.backward_bytes(built.shape, built.parallel, settings)
        head = replace(settings, keeps_logits=bool(self.recipe.trainer.keep_logits))
        logits = activations.logits_bytes(built.shape, built.parallel, head) if self._is_last(built) else 0
        return [
            *self._working(name),
            *self._idle_engine(),
            *self._fp8(built),
            Use("activations", device_bytes=int(saved)),
            Use("pipeline", device_bytes=int(activations.pipeline_bytes(built.shape, built.parallel, stage, settings))),
            Use("backward", device_bytes=int(passing)),
            Use("logits", device_bytes=int(logits)),
        ]

    def _fp8(self, built: Built) -> Iterator[Use]:
        """Yield the FP8 copies of weights in an update. The policy retains them until the engine samples. FP8 also
        makes saved activations smaller; this is not counted.
        """
        if self.recipe.trainer.fp8 != "none":
            models = {id(model): model.layouts for model in (built, self.models.policy)}
            copies = sum(trainer_bytes.fp8_bytes(layouts, self.rank) for layouts in models.values())
            yield Use("weights in FP8", device_bytes=copies)

    def _save(self) -> list[Use]:
        saved = (self.policy + self.critic).saved
        # Checkpoints are staged in whole blocks of page-locked memory.
        if self.platform.is_gpu:
            saved = -(-saved // PINNED_BLOCK_BYTES) * PINNED_BLOCK_BYTES
        return [
            *self._states(self.policy, _ALL),
            *self._critic(_ALL),
            *self._idle_engine(),
            *self._idle_models(),
            Use("checkpoint", host_bytes=saved),
        ]

    def _working(self, name: str) -> list[Use]:
        """Return the memory of all models while the model `name` computes.

        While the critic computes, the policy is offloaded. A scoring model is loaded in addition to the policy.
        """
        if name == "critic":
            return [*self._states(self.policy, ()), *self._critic(_ALL), *self._idle_models()]
        return [*self._states(self.policy, _ALL), *self._critic(()), *self._idle_models(at_work=name)]

    def _states(self, states: TrainerStates, awake: Collection[str]) -> Iterator[Use]:
        """Yield the memory of a trained model's states. States in `awake`, and those never offloaded, are on the
        device. The others are on the host."""
        offload = self.recipe.trainer.offload
        is_here = {name: name in awake or name not in offload for name in _ALL}
        yield Use("parameters", device_bytes=states.parameters * is_here["parameters"])
        yield Use("gradients", device_bytes=states.gradients * is_here["gradients"])
        yield Use("main weights", device_bytes=states.main_weights * is_here["optimizer"])
        yield Use("moments", device_bytes=states.moments * is_here["optimizer"])
        yield Use("offloaded copies", host_bytes=states.offloaded(offload) * self._takes_turns)
        if states.on_host:
            yield Use("optimizer on the host", host_bytes=states.on_host)

    @property
    def _takes_turns(self) -> bool:
        """Return whether states are ever offloaded: for an engine on the same rank, or for the critic."""
        return self.has_engine or self.models.critic is not None

    @property
    def host_copies(self) -> int:
        """Return the bytes of a trainer's tensors with a copy in host memory: offloaded states, and on GPUs the models
        that only score."""
        offload = self.recipe.trainer.offload if self._takes_turns else ()
        scoring = sum(self.frozen.values()) if self.platform.is_gpu else 0
        return self.policy.offloaded(offload) + self.critic.offloaded(offload) + scoring

    @property
    def most_host_copies(self) -> int:
        """Return the maximum number of these tensors: weights, main weights, and two moments of each."""
        built = [self.models.policy, self.models.critic, *self.models.frozen.values()]
        return 4 * sum(
            len(parameter_shapes(one.layouts, one.parallel.coordinates(self.rank))) for one in built if one is not None
        )

    def _critic(self, awake: Collection[str]) -> Iterator[Use]:
        """Yield the critic's states, summed as one use."""
        uses = [*self._states(self.critic, awake)]
        yield Use(
            "critic",
            device_bytes=sum(use.device_bytes for use in uses),
            host_bytes=sum(use.host_bytes for use in uses),
        )

    def _background_send(self, phase: str) -> Iterator[Use]:
        """Yield the memory of a reshard that overlaps the trainer's work: a copy of the weights, and in some phases
        buffers."""
        if not (self.has_trainer and self.parallel.is_separate and self.recipe.weights.overlap):
            return
        policy = self.models.policy
        sent = trainer_bytes.parameter_bytes(policy.layouts, self.rank, itemsize=self.itemsize)
        yield Use("weights being sent", device_bytes=sent)
        if phase in ("logprobs", "train", "save") or phase.startswith(("logprobs ", "train ")):
            yield Use("staging", device_bytes=self.staging)

    def _idle_models(self, at_work: str = "") -> Iterator[Use]:
        """Yield the memory of the scoring models. On GPUs each waits in host memory until it is used."""
        for name, size in self.frozen.items():
            is_on_device = name == at_work or not self.platform.is_gpu
            yield Use(
                name,
                device_bytes=size if is_on_device else 0,
                host_bytes=size if self.platform.is_gpu else 0,
            )

    def _awake_engine(self) -> list[Use]:
        return [
            Use("engine weights", device_bytes=self.engine_weights),
            Use("KV cache", device_bytes=self.cache_bytes),
            Use("engine step", device_bytes=self.engine_step),
        ]

    def _idle_engine(self) -> list[Use]:
        """Return the memory of an idle engine. On a GPU it sleeps and takes none; on a CPU it cannot sleep.

        An engine with a LoRA adapter keeps its weights on the host while it sleeps.
        """
        if not self.platform.is_gpu:
            return self._awake_engine()[:2]
        return [Use("sleeping engine", host_bytes=self.engine_weights)] if self.adapter_slots else []

    def _placed(self, uses: list[Use]) -> Iterator[Use]:
        """Yield the uses, and the memory of libraries. On a CPU everything counts as host memory."""
        if self.platform.is_gpu:
            yield from uses
            yield Use("CUDA", device_bytes=CONTEXT_BYTES)
            yield Use("NCCL", device_bytes=sum(one.num_bytes for one in self.communicators))
            yield Use("CUDA graphs", device_bytes=self._graphs)
            # The share was simulated with expandable segments, which only trainers turn on. A rank that only samples
            # wastes more: how much is not known.
            temporary = sum(use.device_bytes for use in uses if use.kind in TEMPORARY)
            yield Use("fragmentation", device_bytes=int(FRAGMENTATION_SHARE * temporary))
            if self.has_trainer and self.recipe.trainer.moe_dispatcher == "flex":
                yield Use("DeepEP", device_bytes=self._deep_ep)
        else:
            yield from (Use(use.kind, host_bytes=use.device_bytes + use.host_bytes) for use in uses)
        if self.has_trainer and self.recipe.checkpoint.replicate and self.parallel.world_size > 1:
            # This rank's state and a partner's, after the newest copied step and while the next copy is made.
            yield Use("copies of the state", host_bytes=4 * (self.policy + self.critic).saved)
        yield Use("libraries", host_bytes=LIBRARY_BYTES)

    @property
    def _deep_ep(self) -> int:
        """Return the bytes of DeepEP's buffers, shared by all trainer models and sized for the widest.

        0: every rank has all experts, so no tokens are sent.
        """
        num_ranks = self.parallel.etp * self.parallel.ep
        if num_ranks == 1:
            return 0
        models = [self.models.policy, self.models.critic, *self.models.frozen.values()]
        widest = max(built.shape.hidden_size for built in models if built is not None)
        given = self.recipe.trainer.megatron.get("moe_deepep_num_sms")
        num_sms = given if isinstance(given, int) else NUM_SMS
        return deep_ep_bytes(hidden_size=widest, itemsize=self.itemsize, num_ranks=num_ranks, num_sms=num_sms)

    @cached_property
    def communicators(self) -> list[Communicator]:
        """Return NCCL's communicators of the rank."""
        cluster, engines = self.recipe.cluster, self.recipe.cluster.groups.engines
        own = cluster if self.has_trainer or engines is None else engines
        return communicators_of(
            self.parallel,
            own.ranks_per_node,
            has_trainer=self.has_trainer,
            has_engine=self.has_engine,
            has_experts=bool(self.models.policy.shape.num_experts),
            is_distributed=self.recipe.trainer.distributed_optimizer,
            shares_embedding=self._shares_embedding,
            balance_losses=balance_losses(self.recipe.trainer.megatron),
        )

    @property
    def _shares_embedding(self) -> bool:
        """Return whether the first and the last pipeline stage have copies of one embedding, and this rank one of
        them.
        """
        shape, last = self.models.policy.shape, self.parallel.pp - 1
        has_copy = shape.tie_word_embeddings or bool(shape.with_mtp(self.recipe.trains_mtp).num_mtp_layers)
        return self.has_trainer and has_copy and last > 0 and self.parallel.coordinates(self.rank).pp in (0, last)

    def _trained(self, built: Built, optimizer: str, lora_rank: int) -> TrainerStates:
        layouts = built.layouts
        return trainer_bytes.trainer_states(
            layouts,
            self.rank,
            itemsize=self.itemsize,
            is_distributed=self.recipe.trainer.distributed_optimizer,
            has_moments=optimizer == "adam",
            is_pinned=self.platform.is_gpu,
            adapters=adapter_layouts(layouts, self.recipe.lora.targets, lora_rank) if lora_rank else None,
            host_fraction=self.recipe.trainer.optimizer_offload_fraction,
        )

    def _built(self, name: str) -> Built:
        if name == "critic":
            assert self.models.critic is not None
            return self.models.critic
        return self.models.policy if name == "policy" else self.models.frozen[name]

    def _is_last(self, built: Built) -> bool:
        return built.parallel.coordinates(self.rank).pp == built.parallel.pp - 1

    def pass_settings(self, built: Built) -> PassSettings:
        """Return how an update's rows pass through a model."""
        trainer_config = self.recipe.trainer
        is_bf16 = self.itemsize == 2
        given = trainer_config.megatron
        granularity = given.get("recompute_granularity")
        # ("core_attn",) is Megatron-Core's default for recompute_modules.
        recomputed = given.get("recompute_modules", ("core_attn",)) if granularity == "selective" else ()
        if trainer_config.recompute == "selective":
            recomputed = trainer_config.recompute_modules
        return PassSettings(
            row_tokens=trainer_config.max_tokens_per_microbatch,
            chunk_tokens=logprob_chunk_tokens(self.recipe, built.shape, built.parallel, is_gpu=self.platform.is_gpu),
            itemsize=self.itemsize,
            sequence_parallel=built.parallel.tp > 1 and trainer_config.sequence_parallel is not False,
            recomputes_layers="full" in (trainer_config.recompute, granularity),
            recomputed=frozenset(recomputed),
            spec="transformer_engine" if self.platform.has_transformer_engine else "local",
            fuses_activation=bool(given.get("bias_activation_fusion", self.platform.is_gpu)),
            pads_attention=not self.platform.is_gpu or not is_bf16,
            lora_rank=self.recipe.lora.rank if built is self.models.policy else 0,
            has_logit_kernels=has_logit_kernels(self.recipe, is_gpu=self.platform.is_gpu),
            longest=self.recipe.trained_tokens,
            expert_load=float(given.get("moe_expert_capacity_factor") or self.expert_load),
        )

    @property
    def _block_tokens(self) -> int:
        return int(self.recipe.rollout.vllm.get("block_size") or engine_bytes.BLOCK_TOKENS[self.platform.kind])

    @property
    def _block_bytes(self) -> int:
        itemsize = self.itemsize if self.recipe.rollout.kv_cache_dtype == "auto" else 1
        return engine_bytes.cache_block_bytes(
            self._engine_shape, self.parallel.rollout_tp, block_tokens=self._block_tokens, itemsize=itemsize
        )

    @property
    def _cache_asked(self) -> int:
        """Return the bytes for the KV cache: as set in the recipe, or what vLLM's share of the GPU leaves."""
        share = self.recipe.rollout.gpu_memory_utilization
        if share is None:
            return int(self.recipe.rollout.kv_cache_gib * 2**30)
        if self.gpu_gib is None:
            return 0
        # vLLM counts what its own group takes. The trainer's groups come later.
        others = CONTEXT_BYTES + Communicator("engine", self.parallel.rollout_tp).num_bytes + self._graphs
        return max(0, int(share * self.gpu_gib * 2**30) - self.engine_weights - self.engine_step - others)

    @property
    def _graphs(self) -> int:
        """Return the bytes of the engine's CUDA graphs."""
        rollout = self.recipe.rollout
        if not self.has_engine or rollout.vllm.get("enforce_eager"):
            return 0
        return engine_bytes.graph_bytes(self._engine_shape, max_requests=rollout.max_concurrent_requests)
