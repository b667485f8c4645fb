"""The worker of a rank: the trainer's shard, the engine's shard, and the reshard from one to the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megarl.checkpoint import peft, safetensors
from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.data.batch import TokenBatch
from megarl.data.chat import tokenizer_of
from megarl.engine.engine import RolloutEngine
from megarl.families.shape import ModelShape, padded_vocab_size, read_model_shape
from megarl.files.atomic import disk_full_named
from megarl.models.configuration import refusals_named, uses_transformer_engine
from megarl.models.distillation import StudentModel, lesson_bytes
from megarl.platform import device
from megarl.platform.megatron_ranks import RankGroups
from megarl.platform.spans import span
from megarl.reshard.layouts.megatron import MegatronLayouts, check_against, megatron_layouts, parameter_shapes
from megarl.reshard.layouts.vllm_computed import VllmLayouts
from megarl.reshard.live import GatheredReshard, Reshard, record
from megarl.reshard.plan import RankTopology
from megarl.reshard.probe import TOLERANCES, check_logprobs, probe_prompt
from megarl.tracking.metrics import Metric
from megarl.training import checkpoint
from megarl.training.engine import StartingPolicy, TrainingEngine
from megarl.training.lessons import HeldLessons, Pupil
from megarl.training.model import FrozenModel, ModelShard
from megarl.training.replica import Replica
from megarl.training.routed_experts import ExpertExchange, HeldExperts
from megarl.training.teacher import InOwnGroups, Teacher
from megarl.types import Completion, ExpertsHandle, Request, TrainingSequence

Model = TypeVar("Model", bound=ModelShard)


class Worker:
    """The methods that the driver calls on a rank, and its models, whose methods it calls as `policy.update`.

    The models are those of the recipe: `policy`, `reference`, `critic`, `reward_model`, `teacher0` and so on.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        recipe: Recipe,
        layout: ParallelConfig,
        topology: RankTopology,
        teacher_layout: ParallelConfig | None = None,
    ) -> None:
        """`teacher_layout` is that of the teachers, unless they have the trainer's."""
        self.recipe, self.layout, self.rank, self.topology = recipe, layout, rank, topology
        device.init_world(recipe.cluster.collective_timeout_seconds)
        self.replica = Replica(layout)
        self.further_groups: dict[tuple[ParallelConfig, bool], tuple[RankGroups, Replica]] = {}
        """Groups of ranks that are not the policy's, by their layout and whether their models have experts."""
        self.held_experts = HeldExperts(rank, world_size)
        # The engine first: what it needs of memory must be free before the trainer takes its share. Then it sleeps, for
        # building the models takes as much.
        self.engine = self._build_engine() if recipe.has_engine else None
        if self.engine:
            self.engine.sleep()
        self.reference: FrozenModel | StartingPolicy | None = None
        if recipe.has_reference and not recipe.lora.rank:
            self.reference = self._build(FrozenModel, recipe.model.folder)
        self.reward_model: FrozenModel | None = None
        if (reward_model := recipe.further_models.get("reward.model")) is not None:
            self.reward_model = self._build(FrozenModel, reward_model, has_value_head=True)
        self.held_lessons = HeldLessons()
        for name, folder in recipe.teachers.items():
            setattr(self, name, self._build_teacher(folder, teacher_layout or layout))
        is_reward_model = recipe.loop == "reward_model"
        self.policy = self._build(TrainingEngine, recipe.model.folder, has_value_head=is_reward_model)
        if recipe.teachers and not recipe.has_advantages:
            self.policy.pupil = self._pupil()
        if recipe.has_reference and recipe.lora.rank:
            self.reference = StartingPolicy(self.policy)
        if recipe.trainer.router_replay:
            top_k = self.policy.shape.top_k
            self.policy.expert_exchange = ExpertExchange(self.held_experts, self.policy.expert_layers, top_k)
        self.critic: TrainingEngine | None = None
        if recipe.has_critic:
            critic = partial(TrainingEngine, role="critic", lender=self.policy)
            self.policy.offload()
            self.critic = self._build(critic, self._critic_source, has_value_head=True)
            self.critic.offload()
            self.policy.onload(("parameters",))
        self.notices: list[str] = []
        self.resharding = None
        if self.engine:
            with self._reshard_memory(self.engine):
                self.resharding = self._plan_reshard(self.engine)
                self.resharding.self_test()
                trainer_logprobs = self._probe_trainer() if self._is_probed else None
            if self._is_probed:
                self._check_probe(trainer_logprobs)

    def start_notices(self) -> list[str]:
        """Notices for the user about how this run is executed."""
        return self.notices

    def advance(
        self, work: tuple[Sequence[Request], Sequence[str]], budget_seconds: float, leave_after: int | None
    ) -> list[Completion]:
        """Step the engine: new requests and aborts in, finished completions out (leaders only).

        `work` is (requests, ids to abort); `budget_seconds` and `leave_after` as in `RolloutEngine.advance`.
        """
        assert self.engine is not None
        return self.engine.advance(*work, budget_seconds, leave_after=leave_after)

    def engine_metrics(self) -> dict[str, Metric]:
        """Metrics of the engine since the call before, on leaders."""
        return self.engine.metrics() if self.engine else {}

    def peak_tflops(self) -> float | None:
        """Peak of this rank's device at the model's type, as far as it is known."""
        return device.peak_tflops(self.recipe.model.dtype)

    def sleep_engine(self) -> None:
        """Free the engine's memory for the trainer until the next reshard."""
        if self.engine:
            self.engine.sleep()
        self.policy.onload()

    def reshard(self, verify: bool = False) -> dict[str, float]:
        """Reshard the trainer's weights into the engine's; with `verify`, compare checksums.

        Returns seconds and bytes by stage.

        Compared are checksums, or where the engine converts its weights log-probs: then `probe_gap` is the mean
        distance in nats. Raises MegarlError with the first parameter that differs, or the rank whose log-probs do.
        """
        assert self.engine is not None and self.resharding is not None
        trainer_logprobs = None
        with self._reshard_memory(self.engine):
            with span("move weights"):
                report = self.resharding.run()
            started = time.perf_counter()
            if verify and isinstance(self.resharding, Reshard):
                self.resharding.verify()
            elif verify:
                trainer_logprobs = self._probe_trainer()
            seconds = time.perf_counter() - started
        if not verify:
            return report
        if self._is_probed:
            started = time.perf_counter()
            report["probe_gap"] = self._check_probe(trainer_logprobs)
            seconds += time.perf_counter() - started
        report["verify_seconds"] = seconds
        return report

    @property
    def _is_probed(self) -> bool:
        """Whether a reshard is verified by log-probs: the engine holds the weights in another form."""
        return isinstance(self.resharding, GatheredReshard)

    def _probe_trainer(self) -> NDArray[np.float32] | None:
        """The probe prompt's log-probs by the trainer, on ranks that report."""
        prompt = self._probe_prompt()
        row = TokenBatch.from_sequences([TrainingSequence(prompt, np.arange(len(prompt)) > 0)])
        found = self.policy.forward([row] * self.layout.rows_multiple)
        return found[0] if found else None

    def _check_probe(self, trainer_logprobs: NDArray[np.float32] | None) -> float:
        """Mean distance, in nats, of the engine's log-probs of the probe prompt from the trainer's; see `probe`."""
        assert self.engine is not None
        tolerance = self.recipe.weights.probe_tolerance or TOLERANCES[self.recipe.model.dtype]
        return check_logprobs(
            trainer_logprobs,
            self.engine.prompt_logprobs(self._probe_prompt()),
            replica=self.engine.replica,
            tolerance=tolerance,
        )

    def _probe_prompt(self) -> NDArray[np.int64]:
        # One less: the engine samples a token behind a prompt that it scores.
        return probe_prompt(self.policy.shape.vocab_size, self.recipe.trained_tokens - 1)

    @contextmanager
    def _reshard_memory(self, engine: RolloutEngine) -> Iterator[None]:
        """Within it only the weights of trainer and engine are on the device; afterwards the engine can sample."""
        self.policy.offload(but=("parameters",))
        self.policy.onload(("parameters",))
        engine.wake(["weights"])
        with self.policy.merged():
            yield
        self.policy.offload()
        engine.wake(["kv_cache"])
        engine.weights_updated()

    def export(self, folder: Path, model: str = "policy") -> None:
        """Export a model to a Hugging Face folder, and its LoRA adapters, if any, to a folder beside it.

        Raises DiskFullError.
        """
        self.policy.onload(("parameters",))
        recipe = self.recipe
        lora = recipe.lora
        bucket_bytes = recipe.weights.bucket_mib << 20
        source = recipe.model.folder if model == "policy" else self._critic_source
        trained = self.policy if model == "policy" else self.critic
        assert trained is not None
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
                    others=self._own_template(),
                    override=recipe.override_of(source),
                )
            if trained.is_adapted and lora.export_adapter:
                beside = folder.with_name("adapter" + folder.name.removeprefix("hf"))
                cuts = peft.adapter_layouts(layouts, lora.targets, lora.rank)
                config = peft.adapter_config(cuts, recipe.model.path, alpha=lora.alpha, dropout=lora.dropout)
                with disk_full_named(beside, sum(weight.nbytes for weight in weights.values())):
                    peft.export(
                        beside,
                        config,
                        cuts,
                        self.rank,
                        trained.parameters,
                        dtype=trained.dtype,
                        bucket_bytes=bucket_bytes,
                    )

    def save_checkpoint(self, folder: Path, asynchronous: bool, is_resharded: bool) -> None:
        """Save the trainer's state into an empty folder; if `asynchronous`, only start to.

        `is_resharded`: the engine has these weights already; after a resume it gets them by one more reshard.
        """
        version = self.engine.weight_version - is_resharded if self.engine else 0
        with self._everything_saved() as models, checkpoint.moved_in_memory(models):
            self.held_experts.save(folder)
            self._save = checkpoint.stage(folder, models, str(self.layout), weight_version=version)
            self._save.write(asynchronous=asynchronous)

    def finish_checkpoint(self, wait: bool) -> dict[str, dict[str, Any]] | None:
        """Finish the save; see `training.checkpoint.Save.finish`."""
        return self._save.finish(wait=wait)

    def load_checkpoint(self, folder: Path) -> None:
        """Load a checkpoint that `check_harmless` has passed. Afterwards the engine needs a reshard."""
        with self._everything_saved() as models:
            driver = checkpoint.restore(folder, models, str(self.layout))
        if self.engine:
            self.engine.weight_version = driver["weight_version"]

    def retain_experts(self, handles: Sequence[ExpertsHandle]) -> int:
        """Drop all routed experts but those with these handles. Returns the bytes that were held before."""
        return self.held_experts.retain(handles)

    def load_experts(self, folder: Path, handles: Sequence[ExpertsHandle]) -> None:
        """Load the routed experts of trajectories that wait in a checkpoint; see `HeldExperts.load`."""
        self.held_experts.load(folder, handles)

    def move_reference(self) -> None:
        """Mix the policy's weights into the reference (algorithm.reference_mixing)."""
        assert isinstance(self.reference, FrozenModel)
        self.reference.move_towards(self.policy.parameters, self.recipe.algorithm.reference_mixing)

    @contextmanager
    def _everything_saved(self) -> Iterator[dict[str, checkpoint.Model]]:
        """The models of a checkpoint by prefix; the policy's is empty, so its tensors have Megatron's own names."""
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
        """The folder that the critic's weights begin with."""
        return self.recipe.further_models.get("critic.path", self.recipe.model.folder)

    def _own_template(self) -> dict[str, str]:
        """The text of the recipe's chat template by the name of its file, where it is not the tokenizer's own."""
        model = self.recipe.model
        if model.chat_template is None and not model.chat_template_kwargs:
            return {}
        return {"chat_template.jinja": str(tokenizer_of(model).chat_template)}

    def _build_engine(self) -> RolloutEngine:
        recipe = self.recipe
        rollout = recipe.rollout
        samplings = [source.recipe.rollout.sampling for source in recipe.sources]
        if truncated := next((sampling for sampling in samplings if sampling.is_truncated), None):
            rollout = rollout.model_copy(update={"sampling": truncated})
        if recipe.trainer.router_replay:
            rollout = rollout.model_copy(update={"vllm": rollout.vllm | {"enable_return_routed_experts": True}})
        return RolloutEngine(
            recipe.model.folder,
            rollout,
            max_model_len=recipe.context_tokens,
            dtype=recipe.model.dtype,
            seed=recipe.seed,
            override=recipe.model.override_config,
            keep_experts=self.held_experts.keep,
        )

    def _build(
        self,
        kind: Callable[..., Model],
        folder: str,
        *,
        has_value_head: bool = False,
        layout: ParallelConfig | None = None,
        replica: Replica | None = None,
    ) -> Model:
        """Build and load a folder's model; with `has_value_head`, under a new value head if it has none.

        `layout` and the `replica` that goes with it are the trainer's unless given.
        """
        shape = self._shape_of(folder)
        shape = shape.with_value_head() if has_value_head else shape
        layout = layout or self.layout
        layouts = self._layouts(shape, layout)

        def load_weights(parameters: Mapping[str, Tensor]) -> None:
            check_against(parameter_shapes(layouts, layout.coordinates(self.rank)), parameters)
            safetensors.load(folder, layouts[self.rank], parameters, override=self.recipe.override_of(folder))

        with refusals_named(self.recipe.trainer.megatron):
            return kind(self.recipe, layout, shape, load_weights, replica=replica or self.replica)

    def _shape_of(self, folder: str) -> ModelShape:
        """The shape of a folder's model, as the recipe has it."""
        return read_model_shape(folder, self.recipe.override_of(folder))

    def _build_teacher(self, folder: str, layout: ParallelConfig) -> FrozenModel | InOwnGroups:
        """Build a folder's teacher, in groups of its own where the policy's do not fit it."""
        kind = self._teacher_kind(folder)
        has_experts = [bool(self._shape_of(model).num_experts) for model in (folder, self.recipe.model.folder)]
        if layout == self.layout and has_experts[0] == has_experts[1]:
            return self._build(kind, folder)
        # Communicators take memory of the device: teachers of one kind share them.
        key = layout, has_experts[0]
        if key not in self.further_groups:
            self.further_groups[key] = RankGroups(), Replica(layout)
        groups, replica = self.further_groups[key]
        with groups.in_place():
            return InOwnGroups(self._build(kind, folder, layout=layout, replica=replica), groups)

    def _teacher_kind(self, folder: str) -> Callable[..., FrozenModel]:
        """The maker of a teacher: one that scores sampled tokens, or one that writes lessons."""
        if self.recipe.has_advantages:
            return FrozenModel
        return partial(Teacher, num_common_tokens=self._num_common_tokens(folder), held=self.held_lessons)

    def _num_common_tokens(self, teacher: str) -> int:
        """Tokens of policy and teacher; further rows of either vocabulary are padding."""
        return min(self._shape_of(folder).vocab_size for folder in (teacher, self.recipe.model.folder))

    def _pupil(self) -> Pupil:
        """The policy's side of the lessons, with this rank's part of the teachers' heads on the last stage."""
        recipe, last = self.recipe, self.policy.chunks[-1]
        assert isinstance(last, StudentModel)
        widths, num_local_tokens = [], []
        heads: list[Tensor | None] = []
        for folder in recipe.teachers.values():
            shape, dtype = self._shape_of(folder), self.policy.dtype
            widths.append(lesson_bytes(recipe.distillation, shape.hidden_size, dtype))
            rows = range(last.first_token_id, last.first_token_id + last.num_local_tokens)
            rows = rows[: max(0, self._num_common_tokens(folder) - rows.start)]
            num_local_tokens.append(len(rows))
            has_head = recipe.distillation.loss == "full_vocabulary" and last.post_process
            override = recipe.override_of(folder)
            heads.append(safetensors.head_rows(folder, rows, override=override).to(dtype) if has_head else None)
        return Pupil(
            self.held_lessons, self.policy.device, widths=widths, num_local_tokens=num_local_tokens, heads=heads
        )

    def _layouts(self, shape: ModelShape, layout: ParallelConfig | None = None) -> MegatronLayouts:
        layout = layout or self.layout
        return megatron_layouts(
            shape,
            layout,
            padded_vocab_size=padded_vocab_size(shape.vocab_size, layout.tp),
            transformer_engine=uses_transformer_engine(),
        )

    def _plan_reshard(self, engine: RolloutEngine) -> Reshard | GatheredReshard:
        bucket_bytes = self.recipe.weights.bucket_mib << 20
        dtype, shape = self.policy.dtype, self.policy.shape
        layouts = self._layouts(shape)
        recorded, refusal = record(engine.model, shape, dtype)
        if recorded is None:
            self.notices.append(f"weights go to the engine as full tensors, which is slow, because of {refusal}")
            return GatheredReshard(
                layouts,
                shape,
                self.policy.weights,
                engine.load_tensors,
                dtype=dtype,
                bucket_bytes=bucket_bytes,
                topology=self.topology,
            )
        layout = self.layout
        computed = VllmLayouts(shape, layout.rollout_tp, layout.world_size, layout.rollout_ep)
        return Reshard(
            layouts,
            computed,
            recorded,
            self.policy.weights,
            engine.model,
            dtype=dtype,
            bucket_bytes=bucket_bytes,
            topology=self.topology,
        )

    def close(self) -> None:
        """Close the engine and leave `torch.distributed`'s world."""
        if self.engine:
            self.engine.close()
        for replica in (self.replica, *(replica for _, replica in self.further_groups.values())):
            replica.close()
        dist.destroy_process_group()
