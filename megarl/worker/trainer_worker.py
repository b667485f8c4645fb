"""Worker class of a training rank: its shards of the models, and their checkpoints and exports."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megarl.checkpoint import peft, safetensors
from megarl.checkpoint.kept import kept_tensors
from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.data.turn_ends import own_files
from megarl.families.shape import ModelShape, padded_vocab_size, read_model_shape
from megarl.files.atomic import disk_full_named
from megarl.groups import world
from megarl.groups.megatron_ranks import RankGroups, forget_parallel_groups
from megarl.groups.rendezvous import Meeting
from megarl.models.configuration import refusals_named, uses_transformer_engine
from megarl.models.teacher_student import StudentModel, target_bytes
from megarl.platform import device, numa
from megarl.platform.allocator import use_expandable_segments
from megarl.reshard.fingerprint import Fingerprint
from megarl.reshard.layouts.lora import adapter_layouts
from megarl.reshard.layouts.megatron import MegatronLayouts, check_against, megatron_layouts, parameter_shapes
from megarl.reshard.ledger import Ledger, RankChanges, RankChecksums
from megarl.reshard.plan import RankTopology
from megarl.tracking.model_outputs import CanaryReport
from megarl.training import checkpoint, state_copies
from megarl.training.canary import compute_canary
from megarl.training.distillation_targets import StoredTargets, TargetFetcher
from megarl.training.lora_part import LoraPart
from megarl.training.model import FrozenModel, ModelShard
from megarl.training.model_parts import ModelParts
from megarl.training.replica import Replica
from megarl.training.routed_experts import StoredExperts, make_route_feed
from megarl.training.state_copies import StateCopier, StateCopies
from megarl.training.state_fingerprints import state_fingerprints
from megarl.training.teacher import ModelInOwnGroups, Teacher
from megarl.training.training_engine import Snapshot, StartingPolicy, TrainingEngine
from megarl.training.transformers_logprobs import transformers_logprobs
from megarl.types import ExpertsHandle
from megarl.worker.arena_size import start_arena
from megarl.worker.rank_transfer import RankTransfer, Report

Model = TypeVar("Model", bound=ModelShard)


class TrainerWorker:
    """Worker of a training rank. The driver calls its methods, or those of one of its models, like `policy.update`.

    The models are the recipe's: `policy`, `reference`, `critic`, `reward_model`, `teacher0` and so on.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        recipe: Recipe,
        layout: ParallelConfig,
        teacher_layout: ParallelConfig | None = None,
        topology: RankTopology | None = None,
    ) -> None:
        """Create the torch world and build the models.

        `layout` has the parallel sizes of the trainer, `teacher_layout` those of teacher models; None: the same.
        `topology` is the place of the trainer's ranks in the network; None: they share a node.
        """
        self._join_world(rank, world_size, recipe, layout, topology or [("node",)] * world_size, teacher_layout)
        self._build_models(teacher_layout)
        self.policy.onload()

    def _join_world(
        self,
        rank: int,
        world_size: int,
        recipe: Recipe,
        layout: ParallelConfig,
        topology: RankTopology,
        teacher_layout: ParallelConfig | None,
    ) -> None:
        self.recipe, self.layout, self.rank = recipe, layout, rank
        world.initialize(recipe.cluster.collective_timeout_seconds)
        self.replica = Replica(layout)
        self.further_groups: dict[tuple[ParallelConfig, bool], tuple[RankGroups, Replica]] = {}
        """Process groups of models whose parallel sizes differ from the policy's, by layout and by whether they have
        experts.
        """
        self.held_experts = StoredExperts(rank, world_size)
        self.stored_targets = StoredTargets()
        self.copies = StateCopies()
        """Copies of the training state in this rank's host memory (checkpoint.replicate)."""
        # Before the engine is built, so that the memory is page-locked meanwhile.
        self.arena = start_arena(recipe, layout, rank, teacher_layout)
        """Host memory for this rank's offloaded states, and for models that only score."""
        self.topology = topology
        self.state_copier: StateCopier | None = None
        self._save: checkpoint.Save | None = None
        self.weight_version = 0
        """Version of the engines' weights: the number of reshards so far."""

    def _build_models(self, teacher_layout: ParallelConfig | None) -> None:
        recipe, layout = self.recipe, self.layout
        # A colocated engine is complete by now, with its CUDA graphs and the buffers of its all-reduce.
        use_expandable_segments()
        self.reference: FrozenModel | StartingPolicy | None = None
        if recipe.has_reference and not recipe.lora.rank:
            parts = ModelParts(exact_blocks=recipe.exact_blocks)
            self.reference = self._build(partial(FrozenModel, parts=parts), recipe.model.folder)
        self.reward_model: FrozenModel | None = None
        if (reward_model := recipe.further_models.get("reward.model")) is not None:
            self.reward_model = self._build(FrozenModel, reward_model, has_value_head=True)
        for name, folder in recipe.teachers.items():
            # The driver addresses models by attribute name: teacher0, teacher1 and so on.
            setattr(self, name, self._build_teacher(folder, teacher_layout or layout))
        is_reward_model = recipe.loop == "reward_model"
        self.policy = self._build(
            TrainingEngine, recipe.model.folder, has_value_head=is_reward_model, with_mtp=recipe.trains_mtp
        )
        if recipe.teachers and not recipe.has_advantages:
            self.policy.feeds.append(self._target_fetcher())
        if recipe.has_reference and recipe.lora.rank:
            # With LoRA the reference is the policy without its adapters, so it needs no weights of its own.
            self.reference = StartingPolicy(self.policy)
        if recipe.trainer.router_replay:
            self.policy.feeds.append(make_route_feed(self.held_experts, self.policy))
        self.critic: TrainingEngine | None = None
        if recipe.has_critic:
            # The critic takes as much memory as the policy while it is built, so the policy leaves the device first.
            critic = partial(TrainingEngine, role="critic", memory_owner=self.policy)
            self.policy.offload()
            self.critic = self._build(critic, self._critic_source, has_value_head=True)
            self.critic.offload()
            self.policy.onload(("parameters",))
        if recipe.weights.check_every:
            self.take_checksums(version=1)
        self.transfer = RankTransfer(
            recipe,
            layout,
            self.rank,
            policy=self.policy,
            # With overlap the policy may change while its weights are sent, so a copy is the source.
            snapshot=Snapshot(self.policy) if recipe.weights.overlap else None,
            transformer_engine=uses_transformer_engine(),
        )

    def join(self, meeting: Meeting, topology: RankTopology, version: int) -> Report:
        """Join a process group with separate engines and send them the weights. Returns seconds and bytes.

        `meeting` says how to join the group, `topology` places its ranks in the network, `version` is the weights'
        version.
        """
        return self._note_version(version, self.transfer.join(meeting, topology, version))

    def reshard(self, verify: bool, version: int) -> Report:
        """Send the policy's weights of this version to the engines. With `verify` they are compared afterwards."""
        return self._note_version(version, self.transfer.run(verify, version))

    def start_reshard(self, verify: bool, version: int) -> None:
        """Start sending a copy of the policy's weights in the background. The policy can be trained meanwhile."""
        self.transfer.start(verify, version)
        self.weight_version = version

    def finish_reshard(self) -> Report:
        """Wait until the sending that `start_reshard` began is complete, and return its report."""
        return self.transfer.finish()

    @cached_property
    def ledger(self) -> Ledger:
        """Checksums of the policy's weights, as exported. It is made only for runs with weights.check_every."""
        own = self._layouts(self.policy.shape)[self.rank]
        return Ledger(f"trainer rank {self.rank}", own, self.policy.weights)

    def take_checksums(self, version: int) -> RankChecksums:
        """Compute, store and return the checksums of the policy's weights, which are of this version."""
        with self.policy.merged():
            return self.ledger.take(version)

    def newest_checksums(self) -> RankChecksums | None:
        """Return the checksums taken last; None if the newest version has none."""
        return self.ledger.newest

    def forget_checksums(self) -> None:
        """Drop the checksums of a version that has changed since."""
        self.ledger.forget()

    def compare_weights(self) -> RankChanges | None:
        """Return the policy's weights changed since their checksums were taken; None if they have none."""
        with self.policy.merged():
            return self.ledger.compare()

    def compute_canary(self) -> CanaryReport:
        """Compute the canary batch twice with the policy, and return the checksums of all module outputs."""
        return compute_canary(self.policy)

    def transformers_logprobs(self, sequences: Sequence[NDArray[np.int64]]) -> list[NDArray[np.float32]] | str | None:
        """Compute log-probs of token ids with transformers' own model of the policy's folder, on the first rank alone.

        Returns the log-probs of each sequence, or why there are none; None on other ranks.
        """
        if self.rank:
            return None
        recipe, dtype = self.recipe, self.policy.dtype
        return transformers_logprobs(recipe.model.folder, recipe.override_of(recipe.model.folder), sequences, dtype)

    def _note_version(self, version: int, report: Report) -> Report:
        """Record the version of the engines' weights after a transfer, unless a peer was lost. Returns the transfer's
        report.
        """
        if "lost" not in report:
            self.weight_version = version
        return report

    def start_notices(self) -> list[str]:
        """Return start-up notices for the user about how this run is executed."""
        copier = self.transfer.copier
        return [*numa.notices(), *self.kept_notices, *(copier.notices if copier else [])]

    @property
    def kept_notices(self) -> list[str]:
        """Return a notice if the model's folder has tensors not trained."""
        folder = self.recipe.model.folder
        kept = kept_tensors(folder, self.policy.shape)
        if not kept:
            return []
        return [f"{len(kept)} tensors of {folder} are not trained, such as {min(kept)}; exports copy them unchanged"]

    def peak_tflops(self) -> float | None:
        """Return the peak performance of this rank's device at the model's dtype, in TFLOP/s; None if unknown."""
        return device.peak_tflops(self.recipe.model.dtype)

    def export(self, folder: Path, model: str = "policy") -> None:
        """Export a model to a Hugging Face folder. LoRA adapters, if any, go to a folder next to it.

        Raises DiskFullError.
        """
        self.policy.onload(("parameters",))
        recipe = self.recipe
        lora = recipe.lora
        # Exports move weights in buckets of the same size as reshards.
        bucket_bytes = recipe.weights.bucket_mib << 20
        source = recipe.model.folder if model == "policy" else self._critic_source
        trained = self.policy if model == "policy" else self.critic
        assert trained is not None
        # Rank 0 writes these files. The critic's folder keeps its own.
        others = own_files(recipe.model) if self.rank == 0 and model == "policy" else {}
        with trained.in_memory():
            layouts = self._layouts(trained.shape)
            weights = trained.weights
            with disk_full_named(folder, sum(weight.nbytes for weight in weights.values())), trained.merged():
                safetensors.export(
                    folder,
                    source,
                    trained.shape,
                    layouts,
                    self.rank,
                    weights,
                    dtype=trained.dtype,
                    bucket_bytes=bucket_bytes,
                    others=others,
                    override=recipe.override_of(source),
                )
            if trained.find_part(LoraPart) is not None and lora.export_adapter:
                # The adapter's folder has the export's name with `adapter` in place of `hf`.
                adapter = folder.with_name("adapter" + folder.name.removeprefix("hf"))
                cuts = adapter_layouts(layouts, lora.targets, lora.rank)
                config = peft.adapter_config(cuts, recipe.model.path, alpha=lora.alpha, dropout=lora.dropout)
                with disk_full_named(adapter, sum(weight.nbytes for weight in weights.values())):
                    peft.export(
                        adapter,
                        config,
                        cuts,
                        self.rank,
                        trained.parameters,
                        dtype=trained.dtype,
                        bucket_bytes=bucket_bytes,
                    )

    def save_checkpoint(self, folder: Path, asynchronous: bool, is_resharded: bool) -> None:
        """Save the trainer's state into an empty folder. With `asynchronous` only start saving.

        `is_resharded` says that the engines already have these weights. The saved version is then one less, because a
        resumed run copies the weights once more.
        """
        # A bool counts as 0 or 1. Without an engine there are no weight versions.
        version = self.weight_version - is_resharded if self.recipe.has_engine else 0
        with self._everything_saved() as models, checkpoint.changed_models_loaded(models):
            self.held_experts.save(folder)
            self._save = checkpoint.stage(folder, models, str(self.layout), weight_version=version)
            self._save.write(asynchronous=asynchronous)

    def finish_checkpoint(self, wait: bool) -> dict[str, dict[str, Any]] | None:
        """Finish an asynchronous save. `wait` blocks until it is complete; otherwise None is returned while it runs."""
        assert self._save is not None
        return self._save.finish(wait=wait)

    def load_checkpoint(self, folder: Path) -> None:
        """Load a checkpoint checked for harmful pickles. Afterwards the engines need the weights again."""
        with self._everything_saved() as models:
            driver = checkpoint.restore(folder, models, str(self.layout))
        self.copies.keep_only(None)
        self._set_version(driver["weight_version"])

    def begin_copy(self, step: int, is_resharded: bool) -> int:
        """Copy the state after a step to host memory, and start sending it to another node. Returns the bytes."""
        if self.state_copier is None:
            self.state_copier = StateCopier(self.copies, self.topology)
        # As in `save_checkpoint`: the restored state is copied to the engines once more.
        version = self.weight_version - is_resharded if self.recipe.has_engine else 0
        with self._everything_saved() as models, checkpoint.changed_models_loaded(models):
            return self.state_copier.begin(step, models, str(self.layout), weight_version=version)

    def finish_copy(self, wait: bool) -> bool:
        """Return whether the copy that `begin_copy` began is complete on this rank. `wait` blocks until it is."""
        assert self.state_copier is not None
        return self.state_copier.finish(wait=wait)

    def restore_copy(self, step: int) -> int:
        """Load the state after a step from copies in host memory. Afterwards the engines need the weights again.

        Returns the bytes received from other ranks.
        """
        with self._everything_saved() as models:
            driver, received = state_copies.restore(self.copies, step, models, str(self.layout), self.topology)
        # Later copies, of the lost attempt, must not be mixed with those of the same steps trained again.
        self.copies.keep_only(step)
        self._set_version(driver["weight_version"])
        return received

    def roll_back(self, folder: Path) -> None:
        """Load a checkpoint's weights and optimizer in the middle of a run, and keep versions and learning rates.

        The folder must have been checked for harmful pickles.
        """
        trained = [self.policy] if self.critic is None else [self.policy, self.critic]
        version, updates = self.weight_version, [model.schedule.num_steps for model in trained]
        self.load_checkpoint(folder)
        self._set_version(version)
        for model, number in zip(trained, updates, strict=True):
            # The schedule counts all updates of the run, also those whose effect is gone.
            model.schedule.step(increment=number - model.schedule.num_steps)

    def _set_version(self, version: int) -> None:
        """Set the version of the engines' weights, after another state was loaded. The next reshard adds 1 to it."""
        self.weight_version = version

    def state_fingerprints(self, with_optimizer: bool) -> dict[str, Fingerprint]:
        """Return fingerprints of this rank's part of all that a checkpoint holds, by tensor name.

        Without `with_optimizer` only weights are included, not main weights and moments.
        """
        with self._everything_saved() as models, checkpoint.changed_models_loaded(models):
            return state_fingerprints(models, with_optimizer=with_optimizer)

    def change_objective(self, recipe: Recipe) -> None:
        """Use the objective of another recipe in later updates. Models, layout and optimizer stay."""
        self.policy.change_objective(recipe)
        if self.critic is not None:
            self.critic.change_objective(recipe)

    def retain_experts(self, handles: Sequence[ExpertsHandle]) -> int:
        """Delete all stored routed experts (MoE) except those with these handles. Returns the bytes stored before."""
        return self.held_experts.retain(handles)

    def load_experts(self, folder: Path, handles: Sequence[ExpertsHandle]) -> None:
        """Load the routed experts (MoE) of trajectories waiting in a checkpoint."""
        self.held_experts.load(folder, handles)

    def move_reference(self) -> None:
        """Mix the policy's weights into the reference model's, in the ratio algorithm.reference_mixing."""
        assert isinstance(self.reference, FrozenModel)
        self.reference.move_towards(self.policy.tensors, self.recipe.algorithm.reference_mixing)

    @contextmanager
    def _everything_saved(self) -> Iterator[dict[str, checkpoint.Model]]:
        """Yield the models that a checkpoint contains, by the prefix of their tensors, while they are in device memory.

        The policy's prefix is empty, so its tensors have Megatron's own names.
        """
        models: dict[str, checkpoint.Model] = {"": self.policy}
        with ExitStack() as stack:
            if self.critic is not None:
                self.critic.onload()
                stack.callback(self.critic.offload)
                models["critic"] = self.critic
            if isinstance(self.reference, FrozenModel):
                models["reference"] = self.reference
            yield models

    @property
    def _critic_source(self) -> str:
        """Folder from which the critic's initial weights are loaded."""
        return self.recipe.further_models.get("critic.path", self.recipe.model.folder)

    def _build(
        self,
        kind: Callable[..., Model],
        folder: str,
        *,
        has_value_head: bool = False,
        with_mtp: bool = False,
        layout: ParallelConfig | None = None,
        replica: Replica | None = None,
    ) -> Model:
        """Build a model of the class `kind`, and load its weights from a folder.

        `has_value_head` adds a new value head if the folder has none, `with_mtp` the folder's layers for multi-token
        prediction. `layout` and `replica` default to the trainer's
        parallel sizes and data-parallel replica.
        """
        shape = self._shape_of(folder)
        shape = shape.with_value_head() if has_value_head else shape
        shape = shape.with_mtp(with_mtp)
        layout = layout or self.layout
        layouts = self._layouts(shape, layout)

        def load_weights(tensors: Mapping[str, Tensor]) -> None:
            # The computed layout must agree with Megatron-Core 0.16.1's real parameters before any byte is copied.
            check_against(parameter_shapes(layouts, layout.coordinates(self.rank)), tensors)
            override = self.recipe.override_of(folder)
            safetensors.load(folder, layouts[self.rank], tensors, override=override, with_mtp=with_mtp)

        with refusals_named(self.recipe.trainer.megatron):
            return kind(self.recipe, layout, shape, load_weights, replica=replica or self.replica, arena=self.arena)

    def _shape_of(self, folder: str) -> ModelShape:
        """Return the sizes of the model in a folder, with the recipe's overrides."""
        return read_model_shape(folder, self.recipe.override_of(folder))

    def _build_teacher(self, folder: str, layout: ParallelConfig) -> FrozenModel | ModelInOwnGroups:
        """Build the teacher model in a folder. It gets process groups of its own if the policy's do not fit."""
        kind = self._teacher_kind(folder)
        has_experts = [bool(self._shape_of(model).num_experts) for model in (folder, self.recipe.model.folder)]
        if layout == self.layout and has_experts[0] == has_experts[1]:
            return self._build(kind, folder)
        # NCCL communicators take device memory, so teachers with equal groups share them.
        key = layout, has_experts[0]
        if key not in self.further_groups:
            self.further_groups[key] = RankGroups(), Replica(layout)
        groups, replica = self.further_groups[key]
        with groups.in_place():
            return ModelInOwnGroups(self._build(kind, folder, layout=layout, replica=replica), groups)

    def _teacher_kind(self, folder: str) -> Callable[..., FrozenModel]:
        """Return the class of a teacher: one scoring sampled tokens, or one storing whole distributions."""
        if self.recipe.has_advantages:
            return FrozenModel
        return partial(Teacher, num_common_tokens=self._num_common_tokens(folder), stored=self.stored_targets)

    def _num_common_tokens(self, teacher: str) -> int:
        """Return the number of tokens that the vocabularies of policy and teacher share. Further rows are padding."""
        return min(self._shape_of(folder).vocab_size for folder in (teacher, self.recipe.model.folder))

    def _target_fetcher(self) -> TargetFetcher:
        """Return the object that fetches the teachers' targets for the policy's update.

        On the last pipeline stage it has this rank's rows of the teachers' output layers.
        """
        recipe, last = self.recipe, self.policy.chunks[-1]
        assert isinstance(last, StudentModel)
        widths, num_local_tokens = [], []
        heads: list[Tensor | None] = []
        for folder in recipe.teachers.values():
            shape, dtype = self._shape_of(folder), self.policy.dtype
            widths.append(target_bytes(recipe.distillation, shape.hidden_size, dtype))
            rows = range(last.first_token_id, last.first_token_id + last.num_local_tokens)
            # The last tensor-parallel ranks may hold padding rows only: then the range is empty.
            rows = rows[: max(0, self._num_common_tokens(folder) - rows.start)]
            num_local_tokens.append(len(rows))
            has_head = recipe.distillation.loss == "full_vocabulary" and last.post_process
            override = recipe.override_of(folder)
            heads.append(safetensors.head_rows(folder, rows, override=override).to(dtype) if has_head else None)
        return TargetFetcher(
            self.stored_targets, self.policy.device, widths=widths, num_local_tokens=num_local_tokens, heads=heads
        )

    def _layouts(self, shape: ModelShape, layout: ParallelConfig | None = None) -> MegatronLayouts:
        layout = layout or self.layout
        return megatron_layouts(
            shape,
            layout,
            padded_vocab_size=padded_vocab_size(shape.vocab_size, layout.tp),
            transformer_engine=uses_transformer_engine(),
        )

    def abandon(self) -> StateCopies:
        """Leave the torch world after another rank was lost. Ranks waiting for this one in a collective then fail too.

        Returns the copies of the training state in this rank's memory, for the next worker of this process.
        """
        if self._save is not None:
            self._save.abandon()
        self.close()
        forget_parallel_groups()
        return self.copies

    def inherit(self, copies: StateCopies) -> None:
        """Take over the copies of the training state that this process's earlier worker held."""
        self.copies.held |= copies.held

    def close(self) -> None:
        """Leave the process group with separate engines, and destroy the torch world."""
        self.transfer.leave()
        # Before the world: process groups cannot be destroyed after it.
        for replica in (self.replica, *(replica for _, replica in self.further_groups.values())):
            replica.close()
        self.arena.close()
        world.leave()
