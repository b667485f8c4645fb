"""Predicted bytes of one rank's engine: weights, KV cache, a step."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from functools import cached_property

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.families.eagle3 import read_stored_bytes
from megarl.families.shape import ModelShape
from megarl.files.model_folder import find_folder
from megarl.planner.memory import engine_bytes
from megarl.planner.memory.communicators import Communicator
from megarl.planner.memory.devices import CONTEXT_BYTES, Platform
from megarl.planner.memory.memory_table import CacheCapacity
from megarl.planner.memory.models import PlannedModel
from megarl.reshard.layouts.vllm_adapters import VllmAdapterLayouts
from megarl.reshard.layouts.vllm_computed import VllmLayouts
from megarl.rounding import divide_up


@dataclass(frozen=True)
class EngineMemory:
    """Predicts the memory of the engine of one rank, which samples with `policy`. Without an engine, all bytes are 0.

    `rank` is the rank in the run. `itemsize` is the size of a weight, in bytes.
    """

    recipe: Recipe
    policy: PlannedModel
    platform: Platform
    rank: int
    _: KW_ONLY
    has_engine: bool
    itemsize: int
    gpu_gib: float | None

    @property
    def parallel(self) -> ParallelConfig:
        return self.policy.parallel

    @cached_property
    def weight_bytes(self) -> int:
        """The bytes of the engine's weights, adapter slots and drafter on this rank."""
        if not self.has_engine:
            return 0
        weights = engine_bytes.engine_weight_bytes(
            self._layouts,
            self._engine_rank,
            itemsize=self.itemsize,
            quantization=self.recipe.rollout.quantization,
        )
        # A drafter's embedding, head and projection dominate. This upper bound assumes that no rank shares them.
        drafter = self.recipe.drafter
        return weights + self.adapter_slot_bytes + (0 if drafter is None else read_stored_bytes(find_folder(drafter)))

    @cached_property
    def adapter_slot_bytes(self) -> int:
        """The bytes of the engine's slots for a LoRA adapter, counted as engine weights."""
        if not self.has_engine or not self.recipe.sends_adapter:
            return 0
        lora = self.recipe.lora
        slots = VllmAdapterLayouts(self._layouts, lora.targets, lora.rank)
        return slots.bytes_on(self._engine_rank, self.itemsize)

    @cached_property
    def unquantised_weight_bytes(self) -> int:
        """The bytes that an engine needs to quantise its FP8 weights during a reshard."""
        if not self.has_engine or self.recipe.rollout.quantization == "none":
            return 0
        return engine_bytes.unquantised_bytes(
            self._layouts,
            self._engine_rank,
            itemsize=self.itemsize,
            bucket_bytes=self.recipe.weights.bucket_mib << 20,
            stages=self.parallel.pp,
        )

    @property
    def _layouts(self) -> VllmLayouts:
        parallel = self.parallel
        num_ranks = parallel.rollout_ranks or parallel.world_size
        return VllmLayouts(self._shape, parallel.rollout_tp, num_ranks, parallel.rollout_ep)

    @property
    def _shape(self) -> ModelShape:
        """The policy's draft layers count only if engines draft with them."""
        return self.policy.shape.with_draft_layers(self.recipe.rollout.drafts_with_model_layers)

    @property
    def _engine_rank(self) -> int:
        return self.rank - self.parallel.leaders()[0]

    @cached_property
    def cache_bytes(self) -> int:
        if not self.has_engine:
            return 0
        return engine_bytes.cache_bytes(self._requested_cache_bytes, block_bytes=self._block_bytes)

    @cached_property
    def step_bytes(self) -> int:
        """The temporary bytes of an engine step."""
        if not self.has_engine:
            return 0
        rollout = self.recipe.rollout
        default_tokens = engine_bytes.BATCHED_TOKENS[self.platform.kind]
        # On CPUs, `platform.cpu.vllm_patches` raises the limit to the longest request.
        if not self.platform.is_gpu:
            default_tokens = max(default_tokens, self.recipe.context_tokens)
        return engine_bytes.step_bytes(
            self.policy.shape,
            self.parallel.rollout_tp,
            batched_tokens=int(rollout.vllm.get("max_num_batched_tokens") or default_tokens),
            max_requests=rollout.max_concurrent_requests,
            itemsize=self.itemsize,
        )

    def cache_capacity(self) -> CacheCapacity:
        blocks = self.cache_bytes // self._block_bytes
        # vLLM 0.30 reserves one block, which holds no request.
        tokens = max(0, blocks - 1) * self._block_tokens
        max_requests = self.recipe.rollout.max_concurrent_requests
        return CacheCapacity(
            tokens=tokens,
            longest=self.recipe.context_tokens,
            max_concurrent_requests=max_requests,
            decoding_requests=min(max_requests, self._requests_per_engine),
        )

    @property
    def _requests_per_engine(self) -> int:
        train = self.recipe.train
        num_samples = math.ceil(train.prompts_per_step * train.samples_per_prompt * self.recipe.algorithm.oversampling)
        num_engines = (self.parallel.rollout_ranks or self.parallel.world_size) // self.parallel.rollout_tp
        return divide_up(num_samples, by=max(num_engines, 1))

    @property
    def _block_tokens(self) -> int:
        return int(self.recipe.rollout.vllm.get("block_size") or engine_bytes.BLOCK_TOKENS[self.platform.kind])

    @property
    def _block_bytes(self) -> int:
        itemsize = self.itemsize if self.recipe.rollout.kv_cache_dtype == "auto" else 1
        return engine_bytes.cache_block_bytes(
            self._shape,
            self.parallel.rollout_tp,
            block_tokens=self._block_tokens,
            itemsize=itemsize,
            draft_layers=bool(self.recipe.drafter),
        )

    @property
    def _requested_cache_bytes(self) -> int:
        """The bytes for the KV cache: the recipe's, or what is left of vLLM's share of the GPU."""
        gpu_share = self.recipe.rollout.gpu_memory_utilization
        if gpu_share is None:
            return int(self.recipe.rollout.kv_cache_gib * 2**30)
        if self.gpu_gib is None:
            return 0
        # vLLM subtracts the memory of its own communicator. The trainer creates its communicators later.
        library_bytes = (
            CONTEXT_BYTES + Communicator("engine", self.parallel.rollout_tp).num_bytes + self.cuda_graph_bytes
        )
        return max(0, int(gpu_share * self.gpu_gib * 2**30) - self.weight_bytes - self.step_bytes - library_bytes)

    @property
    def cuda_graph_bytes(self) -> int:
        rollout = self.recipe.rollout
        if not self.has_engine or rollout.vllm.get("enforce_eager"):
            return 0
        return engine_bytes.graph_bytes(self._shape, max_requests=rollout.max_concurrent_requests)
