"""A trained model on one rank: its shard of the model, gradients and optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import get_process_group_ranks

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
from megarl.tracking.metrics import Mean, Metric, Sum, merge
from megarl.tracking.model_outputs import NotFinite
from megarl.tracking.outcomes import Update, UpdateOutcome, merge_measured
from megarl.tracking.spikes import UpdateLimits
from megarl.training.host_arena import HostArena
from megarl.training.model import LoadWeights, ModelShard
from megarl.training.not_finite import find_not_finite
from megarl.training.objective import StepNumbers
from megarl.training.offload import MergedWeights, Offloadable
from megarl.training.optimizer import build_optimizer, build_schedule, step_if_finite
from megarl.training.parts.choice import build_engine_parts, select_model_parts, select_update_rule
from megarl.training.parts.engine_part import EnginePart
from megarl.training.replica import Replica
from megarl.training.roles import Role, role_of_critic, role_of_policy
from megarl.training.rows.metrics import (
    KL,
    LOSS,
    MISMATCH,
    RATIO,
    TOKENS,
    Signal,
    losses_of,
    name_metrics,
    read,
    select,
)
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
        """Build the model, attach parts, wrap its chunks with gradient buffers, then build the optimizer."""
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
        self._wrapped = [self._wrap(chunk, index) for index, chunk in enumerate(self.chunks)]
        self.optimizer = build_optimizer(
            self.role.optimizer,
            self.models,
            dtype=self.dtype,
            distributed=trainer.distributed_optimizer,
            host_fraction=trainer.optimizer_offload_fraction,
            rule=select_update_rule(self, self.role.optimizer, self.engine_parts),
        )
        self.schedule = build_schedule(self.role.optimizer, self.optimizer, num_updates=self.role.num_updates)
        self.pending_reduction: Callable[[], None] | None = None
        """Reduces, over the ranks, the gradients of all passes since the last step. None: no such passes."""
        self._replace_reduction()
        self.skipped_in_a_row = 0
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

    def find_part(self, kind: type[Part]) -> Part | None:
        return next((part for part in self.engine_parts if isinstance(part, kind)), None)

    @property
    def models(self) -> list[DistributedDataParallel]:
        return self._wrapped

    def _wrap(self, chunk: PackedModel, index: int) -> DistributedDataParallel:
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=self.overlaps_reduction,
            use_distributed_optimizer=self.recipe.trainer.distributed_optimizer,
        )
        return DistributedDataParallel(self.config, settings, chunk, disable_bucketing=index > 0)

    @property
    def overlaps_reduction(self) -> bool:
        """Whether gradients are reduced during the backward pass: trainer.overlap_grad_reduce, by default True if
        data-parallel ranks are on several nodes.
        """
        if (setting := self.recipe.trainer.overlap_grad_reduce) is not None:
            return setting
        groups: list[Any] = [parallel_state.get_data_parallel_group(with_context_parallel=True)]
        if self.shape.num_experts:
            groups.append(parallel_state.get_expert_data_parallel_group())
        ranks_per_node = self.recipe.cluster.ranks_per_node
        return any(len({rank // ranks_per_node for rank in get_process_group_ranks(group)}) > 1 for group in groups)

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
        for part in self.optimizer.chained_optimizers:
            inner: Any = part.optimizer
            tensors = [parameter for group in inner.param_groups for parameter in group["params"]]
            tensors += [value for state in inner.state.values() for value in state.values()]
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
            update = self.apply(read(rows_metrics), limits or UpdateLimits())
            if self.skipped_in_a_row == 1:
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
        self.pending_reduction = None
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
        """Yield the arguments of Megatron's schedule for forward and backward passes, which run within this context."""
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
            update = self._step(rows, limits)
        faults.reach("updated", self.parameters.values)
        for part in self.engine_parts:
            update.metrics.update(part.update_metrics())
        return update

    def reduce_gradients(self) -> None:
        """Sum the gradients of all passes since the last step over the ranks, once. A collective."""
        if self.pending_reduction is not None:
            with span("reduce gradients"):
                self.pending_reduction()
            self.pending_reduction = None
        faults.reach("gradients", self.gradient_buffers)

    def _replace_reduction(self) -> None:
        """Make Megatron's schedules leave the reduction of gradients over ranks to the next step."""
        self.config.finalize_model_grads_func = self._defer_reduction
        if self.overlaps_reduction:
            # Within this context Megatron's schedules reduce nothing: all microbatches except the last only sum their
            # gradients.
            contexts: Any = [model.no_sync for model in self.models]
            self.config.no_sync_func = contexts if len(contexts) > 1 else contexts[0]

    def _defer_reduction(self, *args: Any, **kwargs: Any) -> None:
        """Store the reduction that Megatron calls at the end of a pass, for the next step.

        Passes add to the same buffers: reducing in each of them would sum earlier gradients over the ranks again.
        """
        self.pending_reduction = partial(_sum_gradients, *args, **kwargs)

    @contextmanager
    def _update_context(self) -> Iterator[None]:
        with ExitStack() as stack:
            for part in self.engine_parts:
                stack.enter_context(part.update_context())
            yield

    def _refuse_too_many_skipped(self) -> None:
        if self.skipped_in_a_row > self.role.optimizer.max_skipped_updates:
            raise MegarlError(
                f"loss or gradient of {self.skipped_in_a_row} updates in a row was not finite. In the first of them, "
                f"{self._not_finite}. Lower {self.role.field}.learning_rate, check this step's data, or raise "
                f"{self.role.field}.max_skipped_updates."
            )

    def _step(self, rows: Sequence[Mapping[str | Signal, Metric]], limits: UpdateLimits) -> Update:
        """Step schedule and optimizer, but skip an update that is not finite or exceeds a limit.

        `rows` has each row's metrics.
        """
        # The schedule advances for skipped updates too, so it ends with the last update.
        self.schedule.step(increment=1)
        learning_rate = self.optimizer.param_groups[0]["lr"]
        losses = [loss for row in rows for loss in losses_of(row)]
        num_tokens = sum(tokens.number for tokens in select(rows, TOKENS))
        # Without a trained token, weight decay and momentum would still move the weights.
        losses_are_finite = bool(np.isfinite(losses).all())
        is_finite_on_all_ranks, has_tokens = self._reduce_flags(
            losses_are_finite, num_tokens > 0, self._finite_flags_outside_norm()
        )
        is_mismatch_exceeded = self._is_mean_above(self.role.max_logprob_gap, rows, MISMATCH)
        exceeds_policy_limit = self._is_mean_above(self.role.skip_ratio, rows, RATIO) or is_mismatch_exceeded
        is_spike = self._is_sum_above(limits.loss, rows, LOSS)
        grad_norm, is_applied = step_if_finite(
            self.optimizer,
            is_allowed=has_tokens and is_finite_on_all_ranks and not exceeds_policy_limit and not is_spike,
            max_norm=limits.grad_norm,
        )
        is_finite = not has_tokens or (is_finite_on_all_ranks and math.isfinite(grad_norm))
        # The norm is equal on all ranks, and so is this decision.
        is_spike |= limits.grad_norm is not None and grad_norm > limits.grad_norm
        is_spike &= is_finite and has_tokens
        # Updates skipped by a limit are intended. Only consecutive non-finite ones count.
        is_skipped_by_limit = not has_tokens or (is_finite_on_all_ranks and exceeds_policy_limit) or is_spike
        self.skipped_in_a_row = 0 if is_applied or is_skipped_by_limit else self.skipped_in_a_row + 1
        outcome = UpdateOutcome(
            applied=is_applied,
            grad_norm=grad_norm,
            learning_rate=float(learning_rate),
            is_empty=not has_tokens,
            not_finite=not is_finite,
            is_spike=is_spike,
            is_mismatch_exceeded=None if self.role.max_logprob_gap is None else is_mismatch_exceeded,
        )
        return _report_rows(outcome, rows) if self.returns_results else Update(outcome, {})

    def _finite_flags_outside_norm(self) -> list[Tensor]:
        """Return bool [] for each gradient on this rank that Megatron leaves out of the norm: whether it is finite.

        A fault in any other gradient shows in the norm. A fault in one of these would reach the weights unnoticed.
        """
        # Megatron leaves parameters marked `shared` out of the norm.
        parameters: Any = [p for p in self.parameters.values() if p.requires_grad and getattr(p, "shared", False)]
        return [parameter.main_grad.isfinite().all() for parameter in parameters]

    def _reduce_flags(
        self, holds_here: bool, occurs_here: bool, device_flags: Sequence[Tensor] = ()
    ) -> tuple[bool, bool]:
        """Return whether `holds_here` and all `device_flags` (bool [] on the device) are True on all ranks.

        The second result: whether `occurs_here` is True on any rank. A collective over the world.
        """
        # One collective for all flags, because the host waits for it. Reading each device flag would be another wait.
        flags = torch.tensor([float(holds_here), -float(occurs_here)], device=self.device)
        for flag in device_flags:
            flags[0] *= flag
        torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MIN)
        holds_on_all, occurs_on_any = flags.tolist()
        return holds_on_all == 1, occurs_on_any == -1

    def _is_mean_above(
        self, limit: float | None, rows: Sequence[Mapping[str | Signal, Metric]], signal: Signal
    ) -> bool:
        """Return whether a signal's mean over the global batch exceeds a limit. Equal on all ranks."""
        if limit is None:
            return False
        means = select(rows, signal) if self.returns_results else []
        sums = [(mean.number * mean.count, mean.count) for mean in means if isinstance(mean, Mean)]
        total = torch.tensor(sums or [(0.0, 0.0)], dtype=torch.float32, device=self.device).sum(0)
        torch.distributed.all_reduce(total)
        # A limit of 0 requires equal log-probs. A log-prob of NaN then counts as a difference.
        return bool(total[0] > limit * total[1]) or (limit == 0 and bool(total[0].isnan()))

    def _is_sum_above(self, limit: float | None, rows: Sequence[Mapping[str | Signal, Metric]], signal: Signal) -> bool:
        """Return whether a signal's sum over the global batch exceeds a limit. Equal on all ranks."""
        if limit is None:
            return False
        numbers = [metric.number for metric in select(rows, signal)] if self.returns_results else []
        total = torch.tensor(sum(numbers), dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(total)
        return bool(total > limit)


class StartingPolicy:
    """The policy at the start of training, as a reference model without weights of its own."""

    def __init__(self, policy: TrainingEngine) -> None:
        self._policy = policy

    def forward(self, rows: Sequence[TokenBatch] | None) -> list[NDArray[np.float32]] | None:
        return self._policy.forward_frozen(rows)


def _report_rows(outcome: UpdateOutcome, rows: Sequence[Mapping[str | Signal, Metric]]) -> Update:
    """Add to an update's outcome what its rows measured: loss, mismatch and KL. Also return all metrics by name."""
    measured_outcome = replace(
        outcome,
        loss=merge_measured(loss for loss in select(rows, LOSS) if isinstance(loss, Sum)),
        mismatch=merge_measured(mismatch for mismatch in select(rows, MISMATCH) if isinstance(mismatch, Mean)),
        kl=merge_measured(kl for kl in select(rows, KL) if isinstance(kl, Mean)),
    )
    return Update(measured_outcome, merge([outcome.metrics(), *(name_metrics(row) for row in rows)]))


def _sum_gradients(model: list[Any], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
    """Reduce gradients over Megatron's ranks without dividing by tokens.

    The token weights already contain every denominator, so gradients are sums. `num_tokens` [] is ignored.
    """
    finalize_model_grads(model, None, **kwargs)


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
    def take(self, version: int) -> None:
        """Copy the trainer's current weights as `version`, unless this version is already copied."""
        if version == self.version:
            return
        self._policy.onload(("parameters",))
        with self._policy.merging():
            for name, weight in self._policy.weights.items():
                self.weights[name].copy_(weight)
        self.version = version
