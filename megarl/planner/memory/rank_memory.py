"""Predicted bytes of one rank: trained models, scoring models, engine, communicators."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import KW_ONLY, dataclass
from functools import cached_property

from megarl.config import OptimizerConfig, Recipe
from megarl.config.libraries.library_settings import balance_losses
from megarl.config.parallel import ParallelConfig
from megarl.families.eagle3 import DrafterShape, read_drafter_shape
from megarl.families.logprob_chunks import has_logit_kernels, logprob_chunk_tokens
from megarl.files.model_folder import find_folder
from megarl.planner.memory import activations, trainer_bytes
from megarl.planner.memory.activations import PassSettings, carried_bytes
from megarl.planner.memory.communicators import Communicator, list_communicators
from megarl.planner.memory.deep_ep import NUM_SMS, deep_ep_bytes
from megarl.planner.memory.devices import Platform
from megarl.planner.memory.drafter_bytes import drafter_bytes
from megarl.planner.memory.engine_memory import EngineMemory
from megarl.planner.memory.models import Models, PlannedModel
from megarl.planner.memory.trainer_bytes import TrainerStates
from megarl.reshard.layouts.lora import adapter_layouts
from megarl.reshard.layouts.megatron import parameter_shapes
from megarl.types import DataError

ITEM_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class RankMemory:
    """Predicts the memory of one rank: of its trainer, its engine, or both."""

    recipe: Recipe
    models: Models
    platform: Platform
    rank: int
    _: KW_ONLY
    gpu_gib: float | None = None
    expert_load: float = activations.EXPERT_IMBALANCE
    """Assumed tokens of the fullest expert-parallel rank, divided by the mean."""

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
    def policy_states(self) -> TrainerStates:
        """The policy's states after the first update: before it, the optimizer has no moments."""
        if not self.has_trainer:
            return trainer_bytes.NO_STATES
        return self._trainer_states(self.models.policy, self.recipe.optimizer, self.recipe.lora.rank)

    @cached_property
    def critic_states(self) -> TrainerStates:
        if self.models.critic is None or not self.has_trainer:
            return trainer_bytes.NO_STATES
        return self._trainer_states(self.models.critic, self.recipe.critic.optimizer, 0)

    @cached_property
    def frozen_bytes(self) -> dict[str, int]:
        if not self.has_trainer:
            return {}
        return {
            name: trainer_bytes.parameter_bytes(planned_model.layouts, self.rank, itemsize=self.itemsize)
            for name, planned_model in self.models.frozen.items()
        }

    @cached_property
    def engine(self) -> EngineMemory:
        return EngineMemory(
            self.recipe,
            self.models.policy,
            self.platform,
            self.rank,
            has_engine=self.has_engine,
            itemsize=self.itemsize,
            gpu_gib=self.gpu_gib,
        )

    @cached_property
    def staging_bytes(self) -> int:
        """The bytes of a reshard's buffers: two buckets, or all weights if smaller."""
        if not self.recipe.has_engine or self.parallel.num_ranks == 1:
            return 0
        bucket = self.recipe.weights.bucket_mib << 20
        return min(2 * bucket, self.engine.weight_bytes + self.policy_states.parameters)

    @property
    def offloads_states(self) -> bool:
        """Whether models' states ever leave the GPU: to make room for an engine on this rank, or for the critic."""
        return self.has_engine or self.models.critic is not None

    @property
    def host_copy_bytes(self) -> int:
        """Bytes of host memory for offloaded states and, with GPUs, copies of the scoring models."""
        offload = self.recipe.trainer.offload if self.offloads_states else ()
        scoring = sum(self.frozen_bytes.values()) if self.platform.is_gpu else 0
        return self.policy_states.offloaded_bytes(offload) + self.critic_states.offloaded_bytes(offload) + scoring

    @property
    def max_host_copies(self) -> int:
        """Upper bound of host tensors: weights, main weights, two moments of each."""
        models = filter(None, [self.models.policy, self.models.critic, *self.models.frozen.values()])
        return 4 * sum(len(parameter_shapes(model.layouts, model.parallel.coordinates(self.rank))) for model in models)

    @property
    def deep_ep_buffer_bytes(self) -> int:
        """The bytes of DeepEP's buffers, shared by the trained models: the widest model counts.

        Zero: every rank has all experts, so no tokens are sent.
        """
        num_ranks = self.parallel.etp * self.parallel.ep
        if num_ranks == 1:
            return 0
        models = [self.models.policy, self.models.critic, *self.models.frozen.values()]
        largest_hidden_size = max(
            planned_model.shape.hidden_size for planned_model in models if planned_model is not None
        )
        num_sms = self.recipe.trainer.megatron.get("moe_deepep_num_sms", NUM_SMS)
        num_sms = num_sms if isinstance(num_sms, int) else NUM_SMS
        return deep_ep_bytes(
            hidden_size=largest_hidden_size, itemsize=self.itemsize, num_ranks=num_ranks, num_sms=num_sms
        )

    @cached_property
    def communicators(self) -> list[Communicator]:
        cluster, engines = self.recipe.cluster, self.recipe.cluster.groups.engines
        nodes = cluster if self.has_trainer or engines is None else engines
        return list_communicators(
            self.parallel,
            nodes.ranks_per_node,
            has_trainer=self.has_trainer,
            has_engine=self.has_engine,
            has_experts=bool(self.models.policy.shape.num_experts),
            is_distributed=self.recipe.trainer.distributed_optimizer,
            shares_embedding=self._shares_embedding,
            balance_losses=balance_losses(self.recipe.trainer.megatron),
            gathers_matrices=self._gathers_matrices,
        )

    @property
    def _gathers_matrices(self) -> bool:
        optimizers = [self.recipe.optimizer, *([self.recipe.critic.optimizer] if self.models.critic else [])]
        return any(optimizer.name == "muon" for optimizer in optimizers)

    @property
    def _shares_embedding(self) -> bool:
        """Whether this rank is on the first or last pipeline stage and both stages copy one embedding."""
        shape, last_stage = self.models.policy.shape, self.parallel.pp - 1
        trained_shape = shape.with_draft_layers(self.recipe.trainer.trains_draft_layers)
        has_copy = shape.tie_word_embeddings or trained_shape.num_draft_layers > 0 or self.recipe.trains_drafter
        return (
            self.has_trainer
            and has_copy
            and last_stage > 0
            and self.parallel.coordinates(self.rank).pp in (0, last_stage)
        )

    def _trainer_states(self, planned_model: PlannedModel, optimizer: OptimizerConfig, lora_rank: int) -> TrainerStates:
        """Return the bytes of a trained model's states on this rank."""
        layouts = planned_model.layouts
        return trainer_bytes.trainer_states(
            layouts,
            self.rank,
            itemsize=self.itemsize,
            is_distributed=self.recipe.trainer.distributed_optimizer,
            optimizer=optimizer.name,
            is_pinned=self.platform.is_gpu,
            adapters=adapter_layouts(layouts, self.recipe.lora.targets, lora_rank) if lora_rank else None,
            # A tuple can be a key of the cache, so equal sizes are computed once.
            whole_shapes=tuple(self._drafter_shapes) if planned_model is self.models.policy else (),
            host_fraction=self.recipe.trainer.optimizer_offload_fraction,
        )

    @cached_property
    def drafter(self) -> DrafterShape | None:
        """The shape of the trained drafter. None: no drafter is trained, or its files are broken."""
        if not self.recipe.trains_drafter or self.recipe.drafter is None:
            return None
        try:
            return read_drafter_shape(find_folder(self.recipe.drafter), self.models.policy.shape)
        except (DataError, OSError, KeyError):
            # The checks before a start report broken files.
            return None

    @property
    def _drafter_shapes(self) -> Collection[tuple[int, ...]]:
        """The trained drafter's tensors. Only the last pipeline stage has them."""
        is_last = self.parallel.coordinates(self.rank).pp == self.parallel.pp - 1
        return self.drafter.tensors.values() if self.drafter and is_last else ()

    @property
    def drafter_weight_bytes(self) -> int:
        return sum(map(math.prod, self._drafter_shapes)) * self.itemsize

    def drafting_bytes(self) -> int:
        """Return the bytes for drafting a row in an update of the policy; 0 without a trained drafter."""
        if self.drafter is None:
            return 0
        shape, parallel = self.models.policy.shape, self.parallel
        settings, stage = self.pass_settings(self.models.policy), parallel.coordinates(self.rank).pp
        received_bytes = int(carried_bytes(shape, parallel, stage, settings, self.drafter.aux_layers))
        if stage < parallel.pp - 1:
            return received_bytes
        # The last stage has a copy of the first stage's embedding.
        embedding_bytes = shape.vocab_size * shape.hidden_size * self.itemsize // parallel.tp if parallel.pp > 1 else 0
        ranks_per_row = parallel.cp * (parallel.tp if settings.sequence_parallel else 1)
        num_steps = self.recipe.trainer.drafter_steps
        return (
            received_bytes
            + embedding_bytes
            + drafter_bytes(self.drafter, settings, num_steps=num_steps, ranks_per_row=ranks_per_row)
        )

    def pass_settings(self, planned_model: PlannedModel) -> PassSettings:
        """Return the settings of an update's passes through a model."""
        trainer_config = self.recipe.trainer
        is_bf16 = self.itemsize == 2
        megatron = trainer_config.megatron
        granularity = megatron.get("recompute_granularity")
        # ("core_attn",) is Megatron-Core's default for recompute_modules.
        recomputed_modules = megatron.get("recompute_modules", ("core_attn",)) if granularity == "selective" else ()
        if trainer_config.recompute == "selective":
            recomputed_modules = trainer_config.recompute_modules
        return PassSettings(
            row_tokens=trainer_config.max_tokens_per_microbatch,
            chunk_tokens=logprob_chunk_tokens(
                self.recipe, planned_model.shape, planned_model.parallel, is_gpu=self.platform.is_gpu
            ),
            itemsize=self.itemsize,
            sequence_parallel=planned_model.parallel.tp > 1 and trainer_config.sequence_parallel is not False,
            recomputes_layers="full" in (trainer_config.recompute, granularity),
            recomputed=frozenset(recomputed_modules),
            spec="transformer_engine" if self.platform.has_transformer_engine else "local",
            fuses_activation=bool(megatron.get("bias_activation_fusion", self.platform.is_gpu)),
            pads_attention=not self.platform.is_gpu or not is_bf16,
            lora_rank=self.recipe.lora.rank if planned_model is self.models.policy else 0,
            has_logit_kernels=has_logit_kernels(self.recipe, is_gpu=self.platform.is_gpu),
            longest=max(self.recipe.trained_tokens, self.recipe.teacher_tokens),
            expert_load=float(megatron.get("moe_expert_capacity_factor") or self.expert_load),
        )
