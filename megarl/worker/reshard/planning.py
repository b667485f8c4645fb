"""Plans of one rank's copies from trainers to engines, and errors for recipes that the engine cannot serve."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.checkpoint.drafter_files import drafter_layouts
from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.engine.parts.drafts import TrainedDrafts
from megarl.engine.parts.trained_adapter import TrainedAdapter
from megarl.families.eagle3 import read_drafter_shape
from megarl.families.lora_rules import adapter_shapes
from megarl.families.shape import ModelShape, read_model_shape
from megarl.files.model_folder import find_folder
from megarl.reshard.adapters import AdapterReshard, record_slots
from megarl.reshard.boxes import Layout
from megarl.reshard.drafters import ReshardWithDrafter, record_drafter
from megarl.reshard.layouts.placed import ReshardLayouts, make_reshard_layouts
from megarl.reshard.layouts.vllm_slots import AdapterSlots, without_adapters
from megarl.reshard.live import DirectReshard, GatheredReshard, LiveReshard, LoadTensors, record_engine_layout
from megarl.reshard.plan import RankTopology
from megarl.reshard.reshard_report import MergeRounding
from megarl.reshard.staging import gather_values
from megarl.training.parts.lora import LoraPart
from megarl.types import ConfigError

if TYPE_CHECKING:
    from megarl.engine.engine import RolloutEngine
    from megarl.training.training_engine import Snapshot, TrainingEngine


@dataclass(frozen=True, kw_only=True, slots=True)
class ReshardEnds:
    """One rank's role in a reshard: trainer (`policy` or its `snapshot`), `engine`, or both.

    `topology` lists all participating ranks, trainers first. Without `group`, all ranks of the world participate.
    `replica` is the engine's number. `transformer_engine`: the trainer uses Transformer Engine's layers; None without a
    trainer.
    """

    recipe: Recipe
    parallel: ParallelConfig
    topology: RankTopology
    policy: TrainingEngine | None = None
    snapshot: Snapshot | None = None
    engine: RolloutEngine | None = None
    transformer_engine: bool | None = None
    replica: int = 0
    group: dist.ProcessGroup | None = None

    def open_sent_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the tensors to send exist: merged weights, or scaled adapters.

        Only for ranks with a policy.
        """
        assert self.policy is not None
        adapters = self.policy.find_part(LoraPart) if self.recipe.sends_adapter else None
        return self.policy.merging() if adapters is None else adapters.scaled_adapters.valid()

    @property
    def rounding(self) -> MergeRounding | None:
        """The rounding error of the weights that this rank sends; None if it merges none."""
        source = self.policy or self.snapshot
        return None if source is None or self.recipe.sends_adapter else source.rounding


class ReshardPlan(NamedTuple):
    """The copies of one rank. `engine_shape` is the shape of the engines' model.

    `recorded` is the layout of this rank's engine, recorded from vLLM's loader; empty if it cannot be written in place.
    `recorded_drafter` is the layout of a trained drafter with its own files. `notices` are texts for the user.
    """

    live_reshard: LiveReshard
    engine_shape: ModelShape
    recorded: Layout
    recorded_drafter: Layout = ()
    notices: tuple[str, ...] = ()


def plan_reshard(reshard_ends: ReshardEnds, load: LoadTensors | None) -> ReshardPlan:
    """Plan copies into the engines in place. If in-place writes are impossible, plan full tensors for `load`.

    `load` is the engine's own loader; None without an engine. A collective. Raises ConfigError if the recipe needs an
    engine written in place.
    """
    # Only ranks with a trainer know whether it uses Transformer Engine, so take the first answer of all ranks.
    answers = gather_values(reshard_ends.transformer_engine, reshard_ends.group)
    transformer_engine = next(answer for answer in answers if answer is not None)
    planner = _Planner(reshard_ends, transformer_engine=transformer_engine)
    plan = planner.plan_adapter() if reshard_ends.recipe.sends_adapter else planner.plan_weights(load)
    return planner.add_drafter(plan) if reshard_ends.recipe.trains_drafter else plan


class _Planner:
    def __init__(self, reshard_ends: ReshardEnds, *, transformer_engine: bool) -> None:
        recipe = reshard_ends.recipe
        self._reshard_ends, self._transformer_engine = reshard_ends, transformer_engine
        shape = read_model_shape(recipe.model.folder, recipe.override_of(recipe.model.folder))
        # Engines that draft nothing have no draft layers.
        self._engine_shape = shape.with_draft_layers(recipe.rollout.drafts_with_model_layers)
        self._trainer_shape = shape.with_draft_layers(recipe.trainer.trains_draft_layers)
        self._dtype: torch.dtype = getattr(torch, recipe.model.dtype)
        self._bucket_bytes = recipe.weights.bucket_mib << 20

    def plan_weights(self, load: LoadTensors | None) -> ReshardPlan:
        """Plan the copies of all weights. Raises ConfigError if the recipe needs an engine written in place."""
        reshard_ends, recipe = self._reshard_ends, self._reshard_ends.recipe
        layouts = make_reshard_layouts(
            self._trainer_shape,
            reshard_ends.parallel,
            len(reshard_ends.topology),
            transformer_engine=self._transformer_engine,
            engine=self._engine_shape,
        )
        # In place, if vLLM's loader copies unchanged: the tensors go straight into the live parameters.
        sender = reshard_ends.policy or reshard_ends.snapshot
        sent_weights = sender.weights if sender is not None else {}
        model = reshard_ends.engine.model if reshard_ends.engine is not None else None
        engine_layout, refusal = record_engine_layout(model, self._engine_shape, self._dtype, reshard_ends.group)
        if engine_layout is not None:
            return ReshardPlan(
                self._plan_direct(layouts, engine_layout, sent_weights, model), self._engine_shape, engine_layout
            )
        # Otherwise collect full tensors, and pass them to vLLM's loader.
        refuse_full_tensors(recipe, refusal, is_separate=reshard_ends.group is not None)
        live_reshard = GatheredReshard(
            layouts.sources,
            self._engine_shape,
            sent_weights,
            load,
            dtype=self._dtype,
            bucket_bytes=self._bucket_bytes,
            topology=reshard_ends.topology,
            first_engine=layouts.first_engine,
            group=reshard_ends.group,
        )
        notice = (
            "each reshard sends full tensors to the engine, which is slow, because the engine's weights cannot "
            f"be written in place ({refusal})"
        )
        return ReshardPlan(live_reshard, self._engine_shape, (), notices=(notice,))

    def plan_adapter(self) -> ReshardPlan:
        """Plan the one copy of the base weights, and the copies of the LoRA adapter into the engines' slots.

        Raises ConfigError if either cannot be written in place.
        """
        reshard_ends, lora = self._reshard_ends, self._reshard_ends.recipe.lora
        policy, engine = reshard_ends.policy, reshard_ends.engine
        model = engine.model if engine is not None else None
        engine_part = engine.find_part(TrainedAdapter) if engine is not None else None
        slots = engine_part.slots if engine_part is not None else None
        # Record where vLLM's loader places the base weights, then where the adapter's matrices lie in the slots.
        with without_adapters(model):
            engine_layout, refusal = record_engine_layout(model, self._engine_shape, self._dtype, reshard_ends.group)
        base_layouts, adapter_layouts = (
            make_reshard_layouts(
                self._engine_shape,
                reshard_ends.parallel,
                len(reshard_ends.topology),
                transformer_engine=self._transformer_engine,
                adapter=sent_adapter,
            )
            for sent_adapter in (None, lora)
        )
        # The projections of a fused layer share one matrix A, so the slots have fewer matrices than a folder.
        folder_shapes = adapter_shapes(self._engine_shape, lora.targets, lora.rank)
        matrix_shapes = {tensor.name: folder_shapes[tensor.name] for tensor in adapter_layouts.destinations.tensors}
        slot_layout, slot_refusal = record_slots(slots, matrix_shapes, self._dtype, reshard_ends.group)
        if engine_layout is None or slot_layout is None:
            raise ConfigError(
                "lora.sync = adapter: this engine's tensors cannot be written in place "
                f"({refusal or slot_refusal}); set lora.sync=merged"
            )
        base_weights = policy.tensors if policy is not None else {}
        trained_adapters = policy.find_part(LoraPart) if policy is not None else None
        adapter_weights = trained_adapters.scaled_adapters.weights if trained_adapters is not None else {}
        live_reshard = AdapterReshard(
            self._plan_direct(base_layouts, engine_layout, base_weights, model),
            lambda: self._plan_direct(adapter_layouts, slot_layout, adapter_weights, slots=slots),
        )
        return ReshardPlan(live_reshard, self._engine_shape, engine_layout)

    def add_drafter(self, plan: ReshardPlan) -> ReshardPlan:
        """Return `plan` with further copies: from the trained drafter to the engines' drafters. A collective.

        Raises ConfigError if an engine's drafter cannot be written in place.
        """
        reshard_ends, recipe = self._reshard_ends, self._reshard_ends.recipe
        assert recipe.drafter is not None
        shape = read_drafter_shape(find_folder(recipe.drafter), self._trainer_shape)
        engine_part = reshard_ends.engine.find_part(TrainedDrafts) if reshard_ends.engine is not None else None
        live_drafter = engine_part.written if engine_part is not None else None
        drafter_layout, refusal = record_drafter(live_drafter, shape.tensors, self._dtype, reshard_ends.group)
        if drafter_layout is None:
            raise ConfigError(
                f"trainer.drafter_learning_rate: the engine's drafter cannot be written in place ({refusal}); leave it "
                "out, so that the drafter is frozen"
            )
        num_trainers, num_ranks = reshard_ends.parallel.world_size, len(reshard_ends.topology)
        trainer_layouts = drafter_layouts(shape, reshard_ends.parallel)
        sender = reshard_ends.policy or reshard_ends.snapshot
        drafter_reshard = DirectReshard(
            # Ranks of separate engines send nothing.
            [*trainer_layouts, *[()] * (num_ranks - num_trainers)],
            None,
            drafter_layout,
            sender.weights if sender is not None else {},
            live_drafter,
            dtype=self._dtype,
            bucket_bytes=self._bucket_bytes,
            topology=reshard_ends.topology,
            group=reshard_ends.group,
        )
        live_reshard = ReshardWithDrafter(plan.live_reshard, drafter_reshard)
        return plan._replace(live_reshard=live_reshard, recorded_drafter=drafter_layout)

    def _plan_direct(
        self,
        layouts: ReshardLayouts,
        engine_layout: Layout,
        sent_weights: Mapping[str, Tensor],
        model: torch.nn.Module | None = None,
        slots: AdapterSlots | None = None,
    ) -> DirectReshard:
        """Plan copies into the live parameters of `model`, or into the `slots` of a LoRA adapter.

        `engine_layout` is the layout recorded from vLLM's loader, `sent_weights` this rank's tensors by storage.
        """
        return DirectReshard(
            layouts.sources,
            layouts.destinations,
            engine_layout,
            sent_weights,
            model,
            dtype=self._dtype,
            bucket_bytes=self._bucket_bytes,
            topology=self._reshard_ends.topology,
            group=self._reshard_ends.group,
            slots=slots,
        )


def refuse_full_tensors(recipe: Recipe, refusal: str, *, is_separate: bool) -> None:
    """Raise ConfigError if the recipe needs an engine written in place. `refusal` says why that is impossible."""
    if recipe.rollout.drafts_with_model_layers:
        raise ConfigError(
            "rollout.vllm.speculative_config: the engine's weights, with those of its draft layers, cannot be "
            f"written in place, because of {refusal}; leave the field out"
        )
    if recipe.rollout.quantization != "none":
        raise ConfigError(
            f"rollout.quantization = {recipe.rollout.quantization}: a reshard cannot write this engine's "
            f"weights in place ({refusal}). Change this, or set rollout.quantization=none"
        )
    if not recipe.rollout.recompute_kv:
        raise ConfigError(
            "rollout.recompute_kv = false: interrupted requests then stay in the engine during a reshard. But a "
            f"reshard cannot write this engine's weights in place ({refusal}), so it is checked with a probe "
            "prompt, which needs an engine without other requests; set rollout.recompute_kv=true"
        )
    if is_separate and recipe.weights.overlap:
        raise ConfigError(
            f"weights.overlap = true: a reshard cannot write this engine's weights in place ({refusal}), so it is "
            "checked by a forward pass of the trainer. With overlap, the trainer is training at that time; set "
            "weights.overlap=false"
        )
