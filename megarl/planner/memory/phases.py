"""Predicted memory of a run by phase: start, rollout, reshard, log-probs, train, save."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from megarl.config import Recipe
from megarl.planner.memory import activations, trainer_bytes
from megarl.planner.memory.devices import (
    CONTEXT_BYTES,
    FRAGMENTATION_SHARE,
    LIBRARY_BYTES,
    PINNED_BLOCK_BYTES,
    Platform,
)
from megarl.planner.memory.memory_table import MemoryTable, MemoryUse, Phase
from megarl.planner.memory.models import Models, PlannedModel
from megarl.planner.memory.rank_memory import RankMemory
from megarl.planner.memory.trainer_bytes import TrainerStates
from megarl.rounding import round_up

TEMPORARY = ("activations", "pipeline", "backward", "logits", "drafts", "whole matrices", "engine step")
"""Uses of memory that torch's allocator takes and returns within a phase, in varying sizes."""
# States that may be offloaded, by the names in trainer.offload.
_ALL_STATES = ("parameters", "gradients", "optimizer")


def memory_table(
    recipe: Recipe,
    models: Models,
    platform: Platform,
    *,
    gpu_gib: float | None = None,
    stages: Collection[int] | None = None,
) -> MemoryTable:
    """Return a recipe's predicted memory. Each phase has the numbers of its fullest rank.

    `gpu_gib`: GiB of an engine's GPU, for `rollout.gpu_memory_utilization`. One rank of each pipeline stage in `stages`
    (None: all) is examined, because ranks of a stage differ only by padding; so is the first separate engine rank.
    """
    parallel = models.policy.parallel
    ranks = [parallel.rank(tp=0, dp=0, pp=stage) for stage in (range(parallel.pp) if stages is None else stages)]
    ranks += parallel.leaders()[:1] if parallel.is_separate else ()
    memories = [RankMemory(recipe, models, platform, rank, gpu_gib=gpu_gib) for rank in ranks]
    by_name: dict[str, list[Phase]] = {}
    for memory in memories:
        for phase in RankPhases(memory).list_phases():
            by_name.setdefault(phase.name, []).append(phase)
    phases = tuple(
        max(rank_phases, key=lambda phase: (phase.device_bytes, phase.host_bytes)) for rank_phases in by_name.values()
    )
    engine = next((memory.engine for memory in memories if memory.has_engine), None)
    cache = None if engine is None else engine.cache_capacity()
    return MemoryTable(phases=phases, cache=cache, is_gpu=platform.is_gpu)


@dataclass(frozen=True)
class RankPhases:
    """Lists the memory of one rank by phase and use."""

    memory: RankMemory

    def list_phases(self) -> Iterator[Phase]:
        """Yield the phases of a step, each with all its uses of memory."""
        part: Literal["", "trainer", "engine"] = ""
        if self.memory.parallel.is_separate:
            part = "trainer" if self.memory.has_trainer else "engine"
        uses_by_phase = self._list_trainer_phases() if self.memory.has_trainer else self._list_engine_phases()
        for name, uses in uses_by_phase.items():
            all_uses = tuple(self._add_libraries([*uses, *self._list_overlap_uses(name)]))
            yield Phase(name=name, rank=self.memory.rank, uses=all_uses, part=part)

    def _list_engine_phases(self) -> dict[str, list[MemoryUse]]:
        return {
            "start engine": self._list_start_uses(),
            "rollout": self._list_rollout_uses(),
            "reshard engine": self._list_reshard_uses(),
        }

    def _list_trainer_phases(self) -> dict[str, list[MemoryUse]]:
        """Return what uses a trainer rank's memory, by phase. Keys as in `logprobs reference` or `train critic`."""
        uses_by_phase = {"start": self._list_start_uses()}
        if self.memory.has_engine:
            uses_by_phase["rollout"] = self._list_rollout_uses()
        if self.memory.recipe.has_engine:
            uses_by_phase["reshard"] = self._list_reshard_uses()
        if self.memory.recipe.is_on_policy:
            uses_by_phase["logprobs"] = self._list_scoring_uses("policy")
        uses_by_phase |= {f"logprobs {name}": self._list_scoring_uses(name) for name in self.memory.frozen_bytes}
        if self.memory.models.critic is not None:
            uses_by_phase["logprobs critic"] = self._list_scoring_uses("critic")
        uses_by_phase["train"] = self._list_training_uses("policy")
        if self.memory.models.critic is not None:
            uses_by_phase["train critic"] = self._list_training_uses("critic")
        uses_by_phase["save"] = self._list_save_uses()
        return uses_by_phase

    def _list_start_uses(self) -> list[MemoryUse]:
        """Return the uses at the fullest moment of a start: engine built, all models loaded, or first reshard."""
        # Before the first update, the optimizer has no moments.
        states_at_start = replace(self.memory.policy_states, moments=0)
        uses_while_building = [
            *self._list_state_uses(states_at_start, _ALL_STATES),
            *self._list_critic_uses(()),
            *self._list_idle_engine(),
            *self._list_idle_models(),
        ]
        if built_bytes := max(
            self.memory.policy_states.construction_bytes, self.memory.critic_states.construction_bytes
        ):
            built_host_bytes = max(
                self.memory.policy_states.construction_host_bytes, self.memory.critic_states.construction_host_bytes
            )
            uses_while_building.append(
                MemoryUse("optimizer being built", device_bytes=built_bytes, host_bytes=built_host_bytes)
            )
        uses_by_moment = [uses_while_building]
        if self.memory.recipe.has_engine:
            uses_by_moment += [
                self._list_awake_engine(),
                self._list_reshard_uses(states_at_start),
                self._list_rollout_uses(states_at_start),
            ]
        return max(uses_by_moment, key=lambda uses: sum(use.device_bytes for use in uses))

    def _list_rollout_uses(self, policy: TrainerStates | None = None) -> list[MemoryUse]:
        return [
            *self._list_state_uses(policy or self.memory.policy_states, ()),
            *self._list_critic_uses(()),
            *self._list_awake_engine(),
            *self._list_idle_models(),
        ]

    def _list_reshard_uses(self, policy: TrainerStates | None = None) -> list[MemoryUse]:
        """Return the uses of a reshard. `policy`: the policy's states if they are not the usual ones (at a start)."""
        policy_states = policy or self.memory.policy_states
        # A separate rank has either a trainer or an engine, so nothing is offloaded and no engine sleeps.
        is_separate = self.memory.parallel.is_separate
        uses = [
            *self._list_state_uses(policy_states, _ALL_STATES if is_separate else ("parameters",)),
            *self._list_critic_uses(()),
            *self._list_idle_models(),
        ]
        if policy_states.merged and not self.memory.recipe.sends_adapter:
            uses.append(MemoryUse("merged adapters", device_bytes=policy_states.merged))
        if self.memory.engine.unquantised_weight_bytes:
            uses.append(MemoryUse("unquantised weights", device_bytes=self.memory.engine.unquantised_weight_bytes))
        # On a colocated GPU the cache is released during a reshard.
        cache_bytes = 0 if self.memory.platform.is_gpu and not is_separate else self.memory.engine.cache_bytes
        return [
            *uses,
            MemoryUse("engine weights", device_bytes=self.memory.engine.weight_bytes),
            MemoryUse("KV cache", device_bytes=cache_bytes),
            MemoryUse("staging", device_bytes=self.memory.staging_bytes),
        ]

    def _list_scoring_uses(self, name: str) -> list[MemoryUse]:
        """Return the uses while the model `name` scores, without gradients."""
        planned_model = self._find_model(name)
        settings = self.memory.pass_settings(planned_model)
        if (row_tokens := self.memory.recipe.trainer.max_tokens_per_forward) is not None:
            settings = replace(settings, row_tokens=row_tokens)
        uses = [*self._list_uses_of_pass(name), *self._list_idle_engine()]
        forward_bytes = activations.forward_bytes(planned_model.shape, planned_model.parallel, settings)
        logit_bytes = (
            activations.logits_bytes(planned_model.shape, planned_model.parallel, settings)
            if self._is_last(planned_model)
            else 0
        )
        return [
            *uses,
            *self._list_fp8_uses(planned_model),
            MemoryUse("activations", device_bytes=int(forward_bytes)),
            MemoryUse("logits", device_bytes=int(logit_bytes)),
        ]

    def _list_training_uses(self, name: str) -> list[MemoryUse]:
        """Return the uses at the peak of an update of the model `name`: a row's passes, or the optimizer's step."""
        planned_model = self._find_model(name)
        settings = self.memory.pass_settings(planned_model)
        stage = planned_model.parallel.coordinates(self.memory.rank).pp
        # A row stored as a tree saves other tensors than a row of separate sequences. The larger of both sizes counts.
        row_settings = [settings]
        if self.memory.recipe.trainer.share_prefixes == "auto":
            row_settings.append(replace(settings, shares_prefixes=True))
        saved_bytes = max(
            activations.stage_bytes(planned_model.shape, planned_model.parallel, stage, settings_of_row)
            for settings_of_row in row_settings
        )
        backward_bytes = activations.backward_bytes(planned_model.shape, planned_model.parallel, settings)
        head_settings = replace(settings, keeps_logits=bool(self.memory.recipe.trainer.keep_logits))
        logit_bytes = (
            activations.logits_bytes(planned_model.shape, planned_model.parallel, head_settings)
            if self._is_last(planned_model)
            else 0
        )
        pass_uses = [
            MemoryUse("activations", device_bytes=int(saved_bytes)),
            MemoryUse(
                "pipeline",
                device_bytes=int(
                    activations.pipeline_bytes(planned_model.shape, planned_model.parallel, stage, settings)
                ),
            ),
            MemoryUse("backward", device_bytes=int(backward_bytes)),
            MemoryUse("logits", device_bytes=int(logit_bytes)),
            *(
                [MemoryUse("drafts", device_bytes=self.memory.drafting_bytes())]
                if planned_model is self.memory.models.policy
                else []
            ),
        ]
        # The optimizer steps after the activations are freed.
        temporary_uses = max(
            pass_uses, self._list_optimizer_uses(name), key=lambda uses: sum(use.device_bytes for use in uses)
        )
        return [
            *self._list_uses_of_pass(name),
            *self._list_idle_engine(),
            *self._list_fp8_uses(planned_model),
            *temporary_uses,
        ]

    def _list_optimizer_uses(self, name: str) -> list[MemoryUse]:
        """Return the temporary uses of an optimizer step, for Muon only."""
        recipe = self.memory.recipe
        optimizer = recipe.critic.optimizer if name == "critic" else recipe.optimizer
        if optimizer.name != "muon":
            return []
        product_bytes = 2 if optimizer.muon.products == "bfloat16" else 4
        matrix_bytes = trainer_bytes.whole_matrix_bytes(self._find_model(name).layouts, product_bytes=product_bytes)
        return [MemoryUse("whole matrices", device_bytes=matrix_bytes)]

    def _list_fp8_uses(self, planned_model: PlannedModel) -> Iterator[MemoryUse]:
        """Yield the FP8 copies of weights; the policy keeps them until the engine samples.

        The smaller saved activations under FP8 are not counted.
        """
        if self.memory.recipe.trainer.fp8 != "none":
            layouts_by_model = {id(model): model.layouts for model in (planned_model, self.memory.models.policy)}
            copy_bytes = sum(
                trainer_bytes.fp8_bytes(layouts, self.memory.rank) for layouts in layouts_by_model.values()
            )
            yield MemoryUse("weights in FP8", device_bytes=copy_bytes)

    def _list_save_uses(self) -> list[MemoryUse]:
        """Return the uses while a checkpoint is staged in host memory."""
        staged_bytes = (self.memory.policy_states + self.memory.critic_states).saved
        # Checkpoints are staged in whole blocks of page-locked memory.
        if self.memory.platform.is_gpu:
            staged_bytes = round_up(staged_bytes, multiple=PINNED_BLOCK_BYTES)
        return [
            *self._list_state_uses(self.memory.policy_states, _ALL_STATES),
            *self._list_critic_uses(_ALL_STATES),
            *self._list_idle_engine(),
            *self._list_idle_models(),
            MemoryUse("checkpoint", host_bytes=staged_bytes),
        ]

    def _list_uses_of_pass(self, name: str) -> list[MemoryUse]:
        """Return the memory of all models while the model `name` computes.

        The policy is offloaded while the critic computes. A scoring model is loaded in addition to the policy.
        """
        if name == "critic":
            return [
                *self._list_state_uses(self.memory.policy_states, ()),
                *self._list_critic_uses(_ALL_STATES),
                *self._list_idle_models(),
            ]
        return [
            *self._list_state_uses(self.memory.policy_states, _ALL_STATES),
            *self._list_critic_uses(()),
            *self._list_idle_models(computing_model=name),
        ]

    def _list_state_uses(self, states: TrainerStates, loaded_states: Collection[str]) -> Iterator[MemoryUse]:
        """Yield the memory of a trained model's states.

        States in `loaded_states`, and states that are never offloaded, are on the device. All others are on the host.
        """
        offload = self.memory.recipe.trainer.offload
        is_on_device = {name: name in loaded_states or name not in offload for name in _ALL_STATES}
        yield MemoryUse("parameters", device_bytes=states.parameters * is_on_device["parameters"])
        yield MemoryUse("gradients", device_bytes=states.gradients * is_on_device["gradients"])
        yield MemoryUse("main weights", device_bytes=states.main_weights * is_on_device["optimizer"])
        yield MemoryUse("moments", device_bytes=states.moments * is_on_device["optimizer"])
        yield MemoryUse("offloaded copies", host_bytes=states.offloaded_bytes(offload) * self.memory.offloads_states)
        if states.on_host:
            yield MemoryUse("optimizer on the host", host_bytes=states.on_host)

    def _list_critic_uses(self, loaded_states: Collection[str]) -> Iterator[MemoryUse]:
        uses = [*self._list_state_uses(self.memory.critic_states, loaded_states)]
        yield MemoryUse(
            "critic",
            device_bytes=sum(use.device_bytes for use in uses),
            host_bytes=sum(use.host_bytes for use in uses),
        )

    def _list_overlap_uses(self, phase: str) -> Iterator[MemoryUse]:
        """Yield the uses of a reshard that overlaps training."""
        if not (self.memory.has_trainer and self.memory.parallel.is_separate and self.memory.recipe.weights.overlap):
            return
        policy = self.memory.models.policy
        policy_bytes = trainer_bytes.parameter_bytes(policy.layouts, self.memory.rank, itemsize=self.memory.itemsize)
        yield MemoryUse("weights being sent", device_bytes=policy_bytes + self.memory.drafter_weight_bytes)
        # The uses of a start and of a reshard include its buffers.
        if phase not in ("start", "reshard"):
            yield MemoryUse("staging", device_bytes=self.memory.staging_bytes)

    def _list_idle_models(self, computing_model: str = "") -> Iterator[MemoryUse]:
        """Yield the memory of the scoring models. On GPUs all wait in host memory, except `computing_model`."""
        for name, size in self.memory.frozen_bytes.items():
            is_on_device = name == computing_model or not self.memory.platform.is_gpu
            yield MemoryUse(
                name,
                device_bytes=size if is_on_device else 0,
                host_bytes=size if self.memory.platform.is_gpu else 0,
            )

    def _list_awake_engine(self) -> list[MemoryUse]:
        return [
            MemoryUse("engine weights", device_bytes=self.memory.engine.weight_bytes),
            MemoryUse("KV cache", device_bytes=self.memory.engine.cache_bytes),
            MemoryUse("engine step", device_bytes=self.memory.engine.step_bytes),
        ]

    def _list_idle_engine(self) -> list[MemoryUse]:
        """Return the memory of an engine that does not sample: on a GPU it sleeps without GPU memory, on a CPU it
        cannot.
        """
        if not self.memory.platform.is_gpu:
            return self._list_awake_engine()[:2]
        has_drafter = self.memory.has_engine and self.memory.recipe.drafter is not None
        # An adapter or a drafter needs the engine's weights in host memory.
        is_copied = has_drafter or self.memory.engine.adapter_slot_bytes > 0
        return [MemoryUse("sleeping engine", host_bytes=self.memory.engine.weight_bytes)] if is_copied else []

    def _add_libraries(self, uses: list[MemoryUse]) -> Iterator[MemoryUse]:
        """Yield the uses, then libraries and checkpoint copies. On CPUs everything counts as host memory."""
        if self.memory.platform.is_gpu:
            yield from uses
            yield MemoryUse("CUDA", device_bytes=CONTEXT_BYTES)
            yield MemoryUse(
                "NCCL", device_bytes=sum(communicator.num_bytes for communicator in self.memory.communicators)
            )
            yield MemoryUse("CUDA graphs", device_bytes=self.memory.engine.cuda_graph_bytes)
            # The share was simulated with expandable segments, which only trainers turn on. A rank that only samples
            # wastes more, by an unknown amount.
            temporary_bytes = sum(use.device_bytes for use in uses if use.kind in TEMPORARY)
            yield MemoryUse("fragmentation", device_bytes=int(FRAGMENTATION_SHARE * temporary_bytes))
            if self.memory.has_trainer and self.memory.recipe.trainer.moe_dispatcher == "flex":
                yield MemoryUse("DeepEP", device_bytes=self.memory.deep_ep_buffer_bytes)
        else:
            yield from (MemoryUse(use.kind, host_bytes=use.device_bytes + use.host_bytes) for use in uses)
        if self.memory.has_trainer and self.memory.recipe.checkpoint.replicate:
            # There are copies of the newest copied step and of the next one: of this rank's state, and of a partner's
            # if there is another node.
            num_copies = 4 if self.memory.recipe.cluster.nodes > 1 else 2
            yield MemoryUse(
                "copies of the state",
                host_bytes=num_copies * (self.memory.policy_states + self.memory.critic_states).saved,
            )
        yield MemoryUse("libraries", host_bytes=LIBRARY_BYTES)

    def _find_model(self, name: str) -> PlannedModel:
        if name == "critic":
            assert self.memory.models.critic is not None
            return self.memory.models.critic
        return self.memory.models.policy if name == "policy" else self.memory.models.frozen[name]

    def _is_last(self, planned_model: PlannedModel) -> bool:
        return planned_model.parallel.coordinates(self.memory.rank).pp == planned_model.parallel.pp - 1
