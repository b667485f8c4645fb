"""Worker class of a training rank: its shards of the models, and their checkpoints and exports."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.data.templates.turn_ends import export_files
from megarl.groups import world
from megarl.groups.peer_errors import LostPeer
from megarl.groups.rendezvous import Meeting
from megarl.models.configuration import uses_transformer_engine
from megarl.platform import device, numa
from megarl.platform.memory.allocator import use_expandable_segments
from megarl.reshard.plan import RankTopology
from megarl.reshard.reshard_report import ReshardReport
from megarl.training.replica import Replica
from megarl.training.state import checkpoint
from megarl.training.training_engine import Snapshot, TrainingEngine
from megarl.worker.arena_size import start_arena
from megarl.worker.model_builder import ModelBuilder
from megarl.worker.model_export import export_model
from megarl.worker.rank_state import RankState
from megarl.worker.reshard.cross_world_reshard import CrossWorldReshard
from megarl.worker.trainer_part import TrainerPart
from megarl.worker.trainer_parts import build_trainer_parts
from megarl.worker.untrained_tensors import untrained_notices

Part = TypeVar("Part", bound=TrainerPart)


class TrainerWorker:
    """Worker of a training rank. The driver calls its methods, or those of a model or part: `policy.update`.

    The recipe determines the models, such as `policy`, `critic` and `reference`. `trainer_parts` names the parts.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        recipe: Recipe,
        parallel: ParallelConfig,
        frozen_parallel: ParallelConfig | None = None,
        topology: RankTopology | None = None,
    ) -> None:
        """`parallel` has the trainer's parallel sizes, `frozen_parallel` those of frozen models; None: the same.

        `topology` has the nodes and switches of the trainer's ranks; None: they share a node.
        """
        self._join_world(rank, world_size, recipe, parallel, topology or [("node",)] * world_size, frozen_parallel)
        self._build_models()
        self.policy.onload()

    def _join_world(
        self,
        rank: int,
        world_size: int,
        recipe: Recipe,
        parallel: ParallelConfig,
        topology: RankTopology,
        frozen_parallel: ParallelConfig | None,
    ) -> None:
        """Join the torch world, and prepare what building models needs."""
        self.recipe, self.parallel, self.rank = recipe, parallel, rank
        world.initialize(recipe.cluster.collective_timeout_seconds)
        self.replica = Replica(parallel)
        # Start before the engine is built, so that the memory is page-locked meanwhile.
        self.arena = start_arena(recipe, parallel, rank, frozen_parallel)
        """Host memory for this rank's offloaded states, and for models that only score."""
        self.builder = ModelBuilder(recipe, parallel, rank, replica=self.replica, arena=self.arena)
        self.state = RankState(recipe, parallel, rank, topology)
        self.state.parts = build_trainer_parts(self.state, self.builder, frozen_parallel or parallel, world_size)
        for name, part in self.state.parts.items():
            # The driver addresses parts and models by attribute name.
            setattr(self, name, part)
        self._save: checkpoint.Save | None = None

    def _build_models(self) -> None:
        recipe, parts = self.recipe, self.state.parts.values()
        # Only now, when a colocated engine is complete with its CUDA graphs and its all-reduce buffers.
        use_expandable_segments()
        for part in parts:
            part.build_models()
        self.policy = self.state.policy = self.builder.build_policy()
        for part in parts:
            part.extend_policy(self.policy)
            for name, model in part.built_models().items():
                setattr(self, name, model)
        self.critic = self.state.critic = self._build_critic() if recipe.has_critic else None
        for part in parts:
            part.finish_build()
        self.cross_world_reshard = CrossWorldReshard(
            recipe,
            self.parallel,
            self.rank,
            policy=self.policy,
            # With overlap, the policy may change while its weights are sent, so send a copy.
            snapshot=Snapshot(self.policy) if recipe.weights.overlap else None,
            transformer_engine=uses_transformer_engine(),
        )

    def _build_critic(self) -> TrainingEngine:
        # While it is built, the critic needs as much memory as the policy, so offload the policy first.
        self.policy.offload()
        critic_class = partial(TrainingEngine, role="critic", memory_owner=self.policy)
        critic = self.builder.build(critic_class, self._critic_source, has_value_head=True)
        critic.offload()
        self.policy.onload(("parameters",))
        return critic

    def find_part(self, kind: type[Part]) -> Part:
        """Return this rank's part of a class. Raises LookupError if it has none."""
        for part in self.state.parts.values():
            if isinstance(part, kind):
                return part
        raise LookupError(f"this rank has no part {kind.__name__}")

    @property
    def weight_version(self) -> int:
        return self.state.weight_version

    def join_and_reshard(self, meeting: Meeting, topology: RankTopology, version: int) -> ReshardReport | LostPeer:
        """Join a process group with separate engines and send them the weights of this version."""
        return self._record_version(version, self.cross_world_reshard.join_and_reshard(meeting, topology, version))

    def reshard(self, verify: bool, version: int) -> ReshardReport | LostPeer:
        """Send the policy's weights of this version to the engines. With `verify` they are compared afterwards."""
        return self._record_version(version, self.cross_world_reshard.run_reshard(verify, version))

    def start_reshard(self, verify: bool, version: int) -> None:
        """Start sending a copy of the policy's weights in the background. The policy can be trained meanwhile."""
        self.cross_world_reshard.start_sending(verify, version)
        self.state.weight_version = version

    def finish_reshard(self) -> ReshardReport | LostPeer:
        return self.cross_world_reshard.finish_sending()

    def _record_version(self, version: int, report: ReshardReport | LostPeer) -> ReshardReport | LostPeer:
        if isinstance(report, ReshardReport):
            self.state.weight_version = version
        return report

    def start_notices(self) -> list[str]:
        part_notices = [text for part in self.state.parts.values() for text in part.notices()]
        untrained = untrained_notices(self.recipe.model.folder, self.policy.shape)
        return [*numa.notices(), *untrained, *part_notices, *self.cross_world_reshard.notices]

    def peak_tflops(self) -> float | None:
        return device.peak_tflops(self.recipe.model.dtype)

    def export(self, folder: Path, model: str = "policy") -> None:
        """Export a model to a Hugging Face folder. Raises DiskFullError."""
        self.policy.onload(("parameters",))
        recipe = self.recipe
        trained = self.policy if model == "policy" else self.critic
        assert trained is not None
        source = recipe.model.folder if model == "policy" else self._critic_source
        # Rank 0 writes the policy's own texts. The critic's folder has its own already.
        files = export_files(recipe.model) if self.rank == 0 and model == "policy" else {}
        export_model(self.builder, trained, folder=folder, source=source, texts_by_file=files)

    def save_checkpoint(self, folder: Path, asynchronous: bool, is_resharded: bool) -> None:
        """Save the trainer's state into an empty folder. With `asynchronous`, only start saving.

        `is_resharded`: the engines already have these weights.
        """
        version = self.state.version_to_save(is_resharded)
        with self.state.saved_models() as models, checkpoint.load_changed_models(models):
            for part in self.state.parts.values():
                part.save(folder)
            self._save = checkpoint.plan_save(folder, models, str(self.parallel), weight_version=version)
            self._save.write(asynchronous=asynchronous)

    def finish_checkpoint(self, wait: bool) -> dict[str, dict[str, Any]] | None:
        """Finish an asynchronous save. `wait` blocks until it is complete; otherwise None is returned while it runs."""
        assert self._save is not None
        return self._save.finish(wait=wait)

    def load_checkpoint(self, folder: Path) -> None:
        self.state.load(folder)

    @property
    def _critic_source(self) -> str:
        return self.recipe.further_models.get("critic.path", self.recipe.model.folder)

    def close(self) -> None:
        """Leave the process group with separate engines, and destroy the torch world."""
        self.cross_world_reshard.leave()
        # Before the world, because process groups cannot be destroyed after it.
        self.replica.close()
        for part in self.state.parts.values():
            part.close()
        self.arena.close()
        world.leave()
