"""Worker class of a training rank: its shards of the models, and their checkpoints and exports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.checkpoint.kept import kept_tensors
from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.data.turn_ends import own_files
from megarl.groups import world
from megarl.groups.megatron_ranks import forget_parallel_groups
from megarl.groups.rendezvous import Meeting
from megarl.models.configuration import uses_transformer_engine
from megarl.platform import device, numa
from megarl.platform.memory.allocator import use_expandable_segments
from megarl.reshard.checks.fingerprint import Fingerprint
from megarl.reshard.plan import RankTopology
from megarl.training import checkpoint, state_copies
from megarl.training.model import FrozenModel
from megarl.training.model_parts import ModelParts
from megarl.training.replica import Replica
from megarl.training.routed_experts import StoredExperts, make_route_feed
from megarl.training.state_copies import StateCopier, StateCopies
from megarl.training.state_fingerprints import state_fingerprints
from megarl.training.training_engine import Snapshot, StartingPolicy, TrainingEngine
from megarl.training.transformers_logprobs import transformers_logprobs
from megarl.types import ExpertsHandle
from megarl.worker.arena_size import start_arena
from megarl.worker.model_builder import ModelBuilder
from megarl.worker.model_export import export_model
from megarl.worker.rank_transfer import RankTransfer, Report
from megarl.worker.teachers import Teachers
from megarl.worker.weight_checks import WeightChecks


class TrainerWorker:
    """Worker of a training rank. The driver calls its methods, or those of one of its models, like `policy.update`.

    The models are the recipe's: `policy`, `reference`, `critic`, `reward_model`, `teacher0` and so on.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        recipe: Recipe,
        parallel: ParallelConfig,
        teacher_parallel: ParallelConfig | None = None,
        topology: RankTopology | None = None,
    ) -> None:
        """Create the torch world and build the models.

        `parallel` has the parallel sizes of the trainer, `teacher_parallel` those of teacher models; None: the same.
        `topology` is the place of the trainer's ranks in the network; None: they share a node.
        """
        self._join_world(rank, world_size, recipe, parallel, topology or [("node",)] * world_size, teacher_parallel)
        self._build_models()
        self.policy.onload()

    def _join_world(
        self,
        rank: int,
        world_size: int,
        recipe: Recipe,
        parallel: ParallelConfig,
        topology: RankTopology,
        teacher_parallel: ParallelConfig | None,
    ) -> None:
        self.recipe, self.parallel, self.rank = recipe, parallel, rank
        world.initialize(recipe.cluster.collective_timeout_seconds)
        self.replica = Replica(parallel)
        self.held_experts = StoredExperts(rank, world_size)
        self.copies = StateCopies()
        """Copies of the training state in this rank's host memory (checkpoint.replicate)."""
        # Before the engine is built, so that the memory is page-locked meanwhile.
        self.arena = start_arena(recipe, parallel, rank, teacher_parallel)
        """Host memory for this rank's offloaded states, and for models that only score."""
        self.builder = ModelBuilder(recipe, parallel, rank, replica=self.replica, arena=self.arena)
        self.teachers = Teachers(self.builder, teacher_parallel or parallel)
        self.topology = topology
        self.state_copier: StateCopier | None = None
        self._save: checkpoint.Save | None = None
        self.weight_version = 0
        """Version of the engines' weights: the number of reshards so far."""

    def _build_models(self) -> None:
        recipe, parallel = self.recipe, self.parallel
        # A colocated engine is complete by now, with its CUDA graphs and the buffers of its all-reduce.
        use_expandable_segments()
        self.reference: FrozenModel | StartingPolicy | None = None
        if recipe.has_reference and not recipe.lora.rank:
            parts = ModelParts(exact_blocks=recipe.exact_blocks)
            self.reference = self.builder.build(partial(FrozenModel, parts=parts), recipe.model.folder)
        self.reward_model: FrozenModel | None = None
        if (reward_model := recipe.further_models.get("reward.model")) is not None:
            self.reward_model = self.builder.build(FrozenModel, reward_model, has_value_head=True)
        for name, teacher in self.teachers.build():
            # The driver addresses models by attribute name.
            setattr(self, name, teacher)
        is_reward_model = recipe.loop == "reward_model"
        self.policy = self.builder.build(
            TrainingEngine, recipe.model.folder, has_value_head=is_reward_model, with_mtp=recipe.trains_mtp
        )
        if recipe.teachers and not recipe.has_advantages:
            self.policy.feeds.append(self.teachers.target_feed(self.policy))
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
            self.critic = self.builder.build(critic, self._critic_source, has_value_head=True)
            self.critic.offload()
            self.policy.onload(("parameters",))
        own_layout = self.builder.layouts(self.policy.shape)[self.rank]
        self.weight_checks = WeightChecks(self.policy, own_layout, self.rank)
        if recipe.weights.check_every:
            self.weight_checks.take_checksums(version=1)
        self.transfer = RankTransfer(
            recipe,
            parallel,
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
        """Export a model to a Hugging Face folder. Raises DiskFullError."""
        self.policy.onload(("parameters",))
        recipe = self.recipe
        trained = self.policy if model == "policy" else self.critic
        assert trained is not None
        source = recipe.model.folder if model == "policy" else self._critic_source
        # Rank 0 writes these files. The critic's folder keeps its own.
        others = own_files(recipe.model) if self.rank == 0 and model == "policy" else {}
        export_model(self.builder, trained, folder=folder, source=source, others=others)

    def save_checkpoint(self, folder: Path, asynchronous: bool, is_resharded: bool) -> None:
        """Save the trainer's state into an empty folder. With `asynchronous` only start saving.

        `is_resharded` says that the engines already have these weights. The saved version is then one less, because a
        resumed run copies the weights once more.
        """
        # A bool counts as 0 or 1. Without an engine there are no weight versions.
        version = self.weight_version - is_resharded if self.recipe.has_engine else 0
        with self._everything_saved() as models, checkpoint.changed_models_loaded(models):
            self.held_experts.save(folder)
            self._save = checkpoint.stage(folder, models, str(self.parallel), weight_version=version)
            self._save.write(asynchronous=asynchronous)

    def finish_checkpoint(self, wait: bool) -> dict[str, dict[str, Any]] | None:
        """Finish an asynchronous save. `wait` blocks until it is complete; otherwise None is returned while it runs."""
        assert self._save is not None
        return self._save.finish(wait=wait)

    def load_checkpoint(self, folder: Path) -> None:
        """Load a checkpoint checked for harmful pickles. Afterwards the engines need the weights again."""
        with self._everything_saved() as models:
            driver = checkpoint.restore(folder, models, str(self.parallel))
        self.copies.keep_only(None)
        self._set_version(driver["weight_version"])

    def begin_copy(self, step: int, is_resharded: bool) -> int:
        """Copy the state after a step to host memory, and start sending it to another node. Returns the bytes."""
        if self.state_copier is None:
            self.state_copier = StateCopier(self.copies, self.topology)
        # As in `save_checkpoint`: the restored state is copied to the engines once more.
        version = self.weight_version - is_resharded if self.recipe.has_engine else 0
        with self._everything_saved() as models, checkpoint.changed_models_loaded(models):
            return self.state_copier.begin(step, models, str(self.parallel), weight_version=version)

    def finish_copy(self, wait: bool) -> bool:
        """Return whether the copy that `begin_copy` began is complete on this rank. `wait` blocks until it is."""
        assert self.state_copier is not None
        return self.state_copier.finish(wait=wait)

    def restore_copy(self, step: int) -> int:
        """Load the state after a step from copies in host memory. Afterwards the engines need the weights again.

        Returns the bytes received from other ranks.
        """
        with self._everything_saved() as models:
            driver, received = state_copies.restore(self.copies, step, models, str(self.parallel), self.topology)
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
        for replica in (self.replica, *self.teachers.replicas):
            replica.close()
        self.arena.close()
        world.leave()
