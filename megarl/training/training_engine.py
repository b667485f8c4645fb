"""A trained model on one rank: its shard of the model, gradients and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.pipeline_parallel import get_forward_backward_func
from numpy.typing import NDArray
from torch import Tensor

from megarl import faults
from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.data.token_batch import TokenBatch
from megarl.families.shape import ModelShape
from megarl.models.configuration import accumulates_in_transformer_engine
from megarl.models.layer_caches import drop_weight_copies
from megarl.models.policy import PackedModel, accumulate_in_main_gradients
from megarl.platform.spans import span
from megarl.reshard.reshard_report import MergeRounding
from megarl.tracking.metrics import Metric
from megarl.tracking.model_outputs import NotFinite
from megarl.tracking.outcomes import Update
from megarl.tracking.spikes import UpdateLimits
from megarl.training.gradient_reduction import GradientReduction, overlaps_backward
from megarl.training.host.host_arena import HostArena
from megarl.training.host.offload import MergedWeights, Offloadable
from megarl.training.model import LoadWeights, ModelShard
from megarl.training.not_finite import find_not_finite
from megarl.training.objective import StepNumbers
from megarl.training.optimizer import build_optimizer, build_schedule
from megarl.training.optimizer_step import OptimizerStep
from megarl.training.parts.choice import build_engine_parts, select_model_parts, select_update_rule
from megarl.training.parts.engine_part import EnginePart
from megarl.training.replica import Replica
from megarl.training.roles import Role, role_of_critic, role_of_policy
from megarl.training.rows.metrics import Signal, read_metrics
from megarl.types import MegarlError

Part = TypeVar("Part", bound=EnginePart)
Row = TypeVar("Row")


class TrainingEngine(ModelShard):
    """A trained model on one rank. `models` are its chunks with gradient buffers.

    `load_weights` fills the parameters before the optimizer copies them. With a `memory_owner`, the two models share
    device memory: this one has it while it works, the owner otherwise.
    """

    def __init__(
        self,
        recipe: Recipe,
        parallel: ParallelConfig,
        shape: ModelShape,
        load_weights: LoadWeights,
        *,
        role: Literal["policy", "critic"] = "policy",
        replica: Replica | None = None,
        arena: HostArena | None = None,
        memory_owner: TrainingEngine | None = None,
    ) -> None:
        """Build chunks, parts, gradient buffers and optimizer, in this order."""
        trainer, is_policy = recipe.trainer, role == "policy"
        parts = select_model_parts(recipe, is_policy=is_policy)
        super().__init__(recipe, parallel, shape, load_weights, replica=replica, arena=arena, parts=parts)
        self._memory_owner = memory_owner
        # Parts come before the wrapping: Megatron allocates gradient buffers for trainable parameters only.
        self.engine_parts = list(build_engine_parts(self, is_policy=is_policy))
        self._make_base_role = role_of_policy if is_policy else role_of_critic
        self.role = self._make_role(recipe)
        if accumulates_in_transformer_engine(self.config, trainer.megatron):
            for chunk in self.chunks:
                accumulate_in_main_gradients(chunk)
        self.overlaps_reduction = overlaps_backward(recipe, shape)
        self._wrapped = [self._wrap_chunk(chunk, index) for index, chunk in enumerate(self.chunks)]
        self.optimizer = build_optimizer(
            self.role.optimizer,
            self.models,
            dtype=self.dtype,
            distributed=trainer.distributed_optimizer,
            host_fraction=trainer.optimizer_offload_fraction,
            rule=select_update_rule(self, self.role.optimizer, self.engine_parts),
        )
        self.schedule = build_schedule(self.role.optimizer, self.optimizer, num_updates=self.role.num_updates)
        self.optimizer_step = OptimizerStep(self, self.optimizer, self.schedule)
        self.gradient_reduction = GradientReduction(self.config, self.models, overlaps=self.overlaps_reduction)
        self._not_finite: NotFinite | None = None
        self._merged = MergedWeights(self.chunks, self.tensors)
        self._offloadable = {
            "parameters": Offloadable(lambda: self.parameters.values(), self.arena),
            "gradients": Offloadable(self.gradient_buffers),
            "optimizer": Offloadable(self._optimizer_state, self.arena),
        }

    def change_objective(self, recipe: Recipe) -> None:
        """Use another recipe's objective and limits in later updates."""
        self.recipe = recipe
        self.role = self._make_role(recipe)

    def _make_role(self, recipe: Recipe) -> Role:
        role = self._make_base_role(recipe)
        for part in self.engine_parts:
            role = replace(role, objective=part.extend_objective(role.objective, recipe))
        return role

    def find_part(self, part_class: type[Part]) -> Part | None:
        return next((part for part in self.engine_parts if isinstance(part, part_class)), None)

    @property
    def models(self) -> list[DistributedDataParallel]:
        return self._wrapped

    def _wrap_chunk(self, chunk: PackedModel, index: int) -> DistributedDataParallel:
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=self.overlaps_reduction,
            use_distributed_optimizer=self.recipe.trainer.distributed_optimizer,
        )
        return DistributedDataParallel(self.config, settings, chunk, disable_bucketing=index > 0)

    def offload(self, *, exceptions: Collection[str] = ()) -> None:
        """Free the device memory listed in `trainer.offload` for the engine, without the names in `exceptions`."""
        self.optimizer.zero_grad()
        drop_weight_copies(self.chunks)
        for name in self.recipe.trainer.offload:
            if name not in exceptions:
                self._offloadable[name].offload()
        if torch.cuda.is_available():
            # Return cached blocks to the driver: vLLM's memory pool cannot use blocks cached by torch's allocator.
            torch.cuda.empty_cache()

    def onload(self, names: Iterable[str] = ("parameters", "gradients", "optimizer")) -> None:
        for name in names:
            self._offloadable[name].onload()

    def gradient_buffers(self) -> Iterator[Tensor]:
        """Yield the gradient buffers [elements] of dense and expert parameters."""
        for model in self.models:
            buffers: Any = model.buffers  # Megatron's list of gradient buffers hides torch's method of this name.
            yield from (buffer.grad_data for buffer in (*buffers, *model.expert_parallel_buffers))

    def _optimizer_state(self) -> Iterator[Tensor]:
        """Yield moments and master weights, without tensors shared with parameters or gradients."""
        shared_storages = {t.untyped_storage()._cdata for t in (*self.parameters.values(), *self.gradient_buffers())}
        for optimizer_part in self.optimizer.chained_optimizers:
            inner_optimizer: Any = optimizer_part.optimizer
            tensors = [parameter for group in inner_optimizer.param_groups for parameter in group["params"]]
            tensors += [value for state in inner_optimizer.state.values() for value in state.values()]
            for tensor in tensors:
                # Scalars are step counts, which are not moved.
                if not torch.is_tensor(tensor) or tensor.numel() <= 1:
                    continue
                # With float32 weights, the optimizer trains the parameters themselves.
                if tensor.untyped_storage()._cdata not in shared_storages:
                    yield tensor

    @property
    def weights(self) -> dict[str, Tensor]:
        """The weights [*shape] for the engine and for model folders, by Megatron's names. Valid within `merging`."""
        return self._merged.weights

    def merging(self) -> AbstractContextManager[None]:
        """Context in which `weights` are valid."""
        return self._merged.merging()

    @property
    def rounding(self) -> MergeRounding | None:
        """The rounding error of the newest `merging` on this rank; None: nothing was merged."""
        return self._merged.rounding

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Context in which this model, not its `memory_owner`, has the device memory that both share."""
        if self._memory_owner is None:
            yield
            return
        self._memory_owner.offload()
        self.onload()
        yield
        self.offload()
        self._memory_owner.onload()

    def forward(self, rows: Sequence[TokenBatch] | None) -> list[NDArray[np.float32]] | None:
        with self.on_device():
            return super().forward(rows)

    def forward_with_entropies(self, rows: Sequence[TokenBatch] | None) -> list[NDArray[np.float32]] | None:
        """Compute log-probs and entropies in nats, float32 [2, tokens of the row] for each row; else as in
        `forward`.
        """
        with self.on_device():
            return self._compute_outputs(rows, 2)

    def forward_frozen(self, rows: Sequence[TokenBatch] | None) -> list[NDArray[np.float32]] | None:
        """Compute log-probs of the model at the start of training (`starting_weights`), as in `forward`.

        The model's routers choose the experts.
        """
        with self.starting_weights():
            return self.forward([replace(row, experts=None) for row in self.share_rows(rows)])

    @contextmanager
    def starting_weights(self) -> Iterator[None]:
        """Context in which the model computes as at the start of training.

        Only for a model whose trained parameters all belong to `engine_parts`.
        """
        with ExitStack() as stack:
            for part in self.engine_parts:
                stack.enter_context(part.start_context())
            yield

    def update(
        self,
        rows: Sequence[TokenBatch] | None,
        kl_coefficient: float | None = None,
        kto_kl: float | None = None,
        limits: UpdateLimits | None = None,
    ) -> Update:
        """Run one optimizer step on this replica's share of the global batch. Ranks that report return metrics too.

        `kl_coefficient` weighs the KL to the reference (default: algorithm.kl_coefficient). `kto_kl` is KTO's reference
        point, a KL in nats per answer. `limits`: gradient norm and loss of a spike (train.on_spike); None: no limits.

        No parameter changes (`UpdateOutcome.applied` is False) in these cases: no token is trained; loss or gradient is
        not finite; the mean ratio exceeds `algorithm.skip_ratio`; the mismatch exceeds `train.max_logprob_gap`; a limit
        is exceeded. The first of consecutive updates that are not finite is computed again, to find the first such
        tensor (`last_not_finite`). Raises MegarlError after too many of them.
        """
        faults.reach("update")
        replica_rows = self.share_rows(rows)
        if kl_coefficient is None:
            kl_coefficient = self.recipe.algorithm.kl_coefficient
        objective = partial(self.role.objective, numbers=StepNumbers(kl_coefficient, kto_kl))
        with self.on_device():
            self.clear_gradients()
            with self._gradient_passes(replica_rows, objective) as arguments:
                rows_metrics = get_forward_backward_func()(**arguments)
            update = self.apply(read_metrics(rows_metrics), limits or UpdateLimits())
            if self.optimizer_step.skipped_in_a_row == 1:
                with self._update_context():
                    self._not_finite = find_not_finite(self, replica_rows, objective)
            self._refuse_too_many_skipped()
            return update

    def last_not_finite(self) -> NotFinite | None:
        """Return the first tensor that was not finite in the newest faulty update, equal on all ranks; None: no such
        update.
        """
        return self._not_finite

    def clear_gradients(self) -> None:
        self.gradient_reduction.pending = None
        for model in self.models:
            model.zero_grad_buffer()
        self.optimizer.zero_grad()

    def accumulate(self, rows: Sequence[TokenBatch], objective: Callable[..., tuple[Tensor, Tensor, Row]]) -> list[Row]:
        """Add the gradients [elements] of this replica's rows to the gradients that earlier calls have summed. Returns
        what the objective measured.

        `objective(output, batch=Microbatch)` returns a row's loss [], a token count [] that Megatron requires, and what
        it measures. `apply` reduces the gradients over the ranks, once. With trainer.overlap_grad_reduce, only one call
        may precede it.
        """
        with self._gradient_passes(rows, objective) as arguments:
            return get_forward_backward_func()(**arguments)

    @contextmanager
    def _gradient_passes(self, rows: Sequence[TokenBatch], objective: Callable[..., Any]) -> Iterator[dict[str, Any]]:
        """Yield the arguments of Megatron's schedule for passes, which run within this context."""
        for part in self.engine_parts:
            part.prepare_update(rows)
        with self._update_context(), torch.enable_grad(), span("forward and backward"):
            yield self.schedule_arguments(rows, objective)
        self.release_feeds()

    def apply(self, rows: Sequence[Mapping[str | Signal, Metric]], limits: UpdateLimits) -> Update:
        """Reduce the gradients of all passes since the last step, and run the optimizer's step.

        `rows` are the metrics of the passes' rows. `limits` as in `update`.
        """
        self.reduce_gradients()
        with span("optimizer"):
            update = self.optimizer_step.step_or_skip(self.role, rows, limits)
        faults.reach("updated", self.parameters.values)
        for part in self.engine_parts:
            update.metrics.update(part.update_metrics())
        return update

    def reduce_gradients(self) -> None:
        """Sum the gradients of all passes since the last step over the ranks, once. A collective."""
        self.gradient_reduction.reduce_pending()
        faults.reach("gradients", self.gradient_buffers)

    @contextmanager
    def _update_context(self) -> Iterator[None]:
        with ExitStack() as stack:
            for part in self.engine_parts:
                stack.enter_context(part.update_context())
            yield

    def _refuse_too_many_skipped(self) -> None:
        num_skipped = self.optimizer_step.skipped_in_a_row
        if num_skipped > self.role.optimizer.max_skipped_updates:
            raise MegarlError(
                f"loss or gradient of {num_skipped} updates in a row was not finite. In the first of them, "
                f"{self._not_finite}. Lower {self.role.field}.learning_rate, check this step's data, or raise "
                f"{self.role.field}.max_skipped_updates."
            )


class StartingPolicy:
    """The policy at the start of training, as a reference model without weights of its own."""

    def __init__(self, policy: TrainingEngine) -> None:
        self._policy = policy

    def forward(self, rows: Sequence[TokenBatch] | None) -> list[NDArray[np.float32]] | None:
        return self._policy.forward_frozen(rows)


class Snapshot:
    """Copies of the policy's weights for the engine, by Megatron's names. Their addresses stay the same."""

    def __init__(self, policy: TrainingEngine) -> None:
        self._policy = policy
        self.weights: dict[str, Tensor] = {name: torch.empty_like(weight) for name, weight in policy.weights.items()}
        self.version: int | None = None

    @property
    def rounding(self) -> MergeRounding | None:
        return self._policy.rounding

    @torch.no_grad()
    def copy_weights(self, version: int) -> None:
        """Copy the trainer's current weights as `version`, unless this version is already copied."""
        if version == self.version:
            return
        self._policy.onload(("parameters",))
        with self._policy.merging():
            for name, weight in self._policy.weights.items():
                self.weights[name].copy_(weight)
        self.version = version
