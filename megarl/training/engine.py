"""A model in training on one rank: its shard, gradients and optimizer."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import get_process_group_ranks

from megarl.config import OptimizerConfig, Recipe
from megarl.config.parallel import ParallelConfig
from megarl.data.batch import TokenBatch
from megarl.families.adapters import LINEARS
from megarl.families.shape import ModelShape
from megarl.models import adapters
from megarl.models.balance import ExpertBalance
from megarl.models.configuration import accumulates_in_transformer_engine
from megarl.models.distillation import StudentModel
from megarl.models.policy import PackedModel, accumulate_in_main_gradients
from megarl.platform.spans import span
from megarl.tracking.metrics import Max, Mean, Metric, merge
from megarl.training.merged import MergedWeights
from megarl.training.model import LoadWeights, ModelShard
from megarl.training.objective import (
    Objective,
    StepNumbers,
    critic_objective,
    divergence_objective,
    policy_objective,
    preference_objective,
    reward_objective,
    supervised,
)
from megarl.training.offload import Offloadable
from megarl.training.optimizer import build_optimizer, build_schedule, step_if_finite
from megarl.training.replica import Replica
from megarl.types import MegarlError

METRICS = {
    "train/grad_norm": ("1", "norm of the gradient before clipping, the largest of the step's updates"),
    "train/learning_rate": ("1", "learning rate, the largest of the step's updates"),
    "train/update_skipped": ("0 or 1", "whether an update left all parameters as they were"),
    "train/gap_exceeded": ("0 or 1", "whether updates were left out because of train.max_logprob_gap"),
}
"""Names, units and meanings, for `tracking.table`."""


@dataclass(frozen=True, slots=True)
class Role:
    """A trained model's objective, optimizer settings and number of updates."""

    objective: Objective
    optimizer: OptimizerConfig
    num_updates: int
    skip_ratio: float | None = None
    """An update is skipped if the mean ratio of its tokens is above."""
    max_logprob_gap: float | None = None
    """An update is skipped if the mean distance of its tokens' log-probs from the engine's is above, in nats."""
    field: str = "optimizer"
    """Where the recipe has the optimizer's settings."""


def role_of_policy(recipe: Recipe) -> Role:
    """The model that a recipe is about."""
    steps, algorithm = recipe.train.steps, recipe.algorithm
    if recipe.is_on_policy:
        updates = (steps - recipe.frozen_steps) * recipe.train.num_updates
        gap = recipe.train.max_logprob_gap
        objective = policy_objective(algorithm) if recipe.has_advantages else divergence_objective
        return Role(objective, recipe.optimizer, updates, algorithm.skip_ratio, gap)
    objective = {
        "sft": lambda: supervised,
        "preference": lambda: preference_objective(recipe.preference),
        "reward_model": lambda: reward_objective(recipe.preference),
    }[recipe.loop]()
    return Role(objective, recipe.optimizer, steps)


def role_of_critic(recipe: Recipe) -> Role:
    """The model whose values are the policy's baseline."""
    critic = recipe.critic
    updates = recipe.train.steps * critic.updates_per_step
    return Role(critic_objective(critic), critic.optimizer, updates, field="critic.optimizer")


class TrainingEngine(ModelShard):
    """A model that learns; `models` are its chunks with their gradients.

    `load_weights` fills the parameters before the optimizer copies them. A model with a `lender` works in that one's
    memory, and is out of it otherwise.
    """

    def __init__(
        self,
        recipe: Recipe,
        layout: ParallelConfig,
        shape: ModelShape,
        load_weights: LoadWeights,
        *,
        role: Literal["policy", "critic"] = "policy",
        replica: Replica | None = None,
        lender: TrainingEngine | None = None,
    ) -> None:
        trainer, is_policy = recipe.trainer, role == "policy"
        router_replay = trainer.router_replay and is_policy
        super().__init__(recipe, layout, shape, load_weights, replica=replica, router_replay=router_replay)
        self._lender = lender
        self.role = role_of_policy(recipe) if is_policy else role_of_critic(recipe)
        self.is_adapted = is_policy and recipe.lora.rank > 0
        if self.is_adapted:
            self._attach_adapters()
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
        )
        self.schedule = build_schedule(self.role.optimizer, self.optimizer, num_updates=self.role.num_updates)
        self.config.finalize_model_grads_func = _sum_gradients
        if self.overlaps_reduction:
            # Megatron's schedules reduce nothing within it: gradients of all microbatches but the last are only summed.
            contexts: Any = [model.no_sync for model in self.models]
            self.config.no_sync_func = contexts if len(contexts) > 1 else contexts[0]
        self.balance = ExpertBalance(self.config, self.chunks)
        self.skipped_in_a_row = 0
        self._merged = MergedWeights(self.chunks, self.parameters)
        self._offloadable = {
            "parameters": Offloadable(lambda: self.parameters.values()),
            "gradients": Offloadable(self._gradients, keeps_values=False),
            "optimizer": Offloadable(self._optimizer_state),
        }

    @property
    def models(self) -> list[DistributedDataParallel]:
        """The model chunks, each with the buffers of its gradients."""
        return self._wrapped

    def _attach_adapters(self) -> None:
        """Freeze the model beside new adapters: they are what learns."""
        lora = self.recipe.lora
        for chunk in self.chunks:
            adapters.attach(
                chunk,
                [LINEARS[name] for name in lora.targets],
                rank=lora.rank,
                scale=lora.alpha / lora.rank,
                dropout=lora.dropout,
                seed=self.recipe.seed,
            )

    def _build(self, index: int) -> PackedModel:
        recipe = self.recipe
        if recipe.loop == "distillation" and not recipe.has_advantages:
            return self._build_policy(StudentModel, index, distillation=recipe.distillation)
        return super()._build(index)

    def _wrap(self, chunk: PackedModel, index: int) -> DistributedDataParallel:
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=self.overlaps_reduction,
            use_distributed_optimizer=self.recipe.trainer.distributed_optimizer,
        )
        return DistributedDataParallel(self.config, settings, chunk, disable_bucketing=index > 0)

    @property
    def overlaps_reduction(self) -> bool:
        """Whether gradients are reduced during the backward pass: as the recipe says, else where they cross nodes."""
        if (given := self.recipe.trainer.overlap_grad_reduce) is not None:
            return given
        groups: list[Any] = [parallel_state.get_data_parallel_group(with_context_parallel=True)]
        if self.shape.num_experts:
            groups.append(parallel_state.get_expert_data_parallel_group())
        size = self.recipe.cluster.ranks_per_node
        return any(len({rank // size for rank in get_process_group_ranks(group)}) > 1 for group in groups)

    def offload(self, *, but: Collection[str] = ()) -> None:
        """Give the engine what memory `trainer.offload` names, all `but` some of it."""
        self.optimizer.zero_grad()
        self.forget_fp8_weights()
        for name in self.recipe.trainer.offload:
            if name not in but:
                self._offloadable[name].offload()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def onload(self, names: Iterable[str] = ("parameters", "gradients", "optimizer")) -> None:
        """Take memory back that was given; needed before anything else is asked of the trainer."""
        for name in names:
            self._offloadable[name].onload()

    def _gradients(self) -> Iterator[Tensor]:
        for model in self.models:
            buffers: Any = model.buffers  # Megatron's list of gradient buffers hides torch's method of that name.
            yield from (buffer.grad_data for buffer in (*buffers, *model.expert_parallel_buffers))

    def _optimizer_state(self) -> Iterator[Tensor]:
        """Moments and master weights; where the weights themselves are trained, those are not the optimizer's."""
        others = {t.untyped_storage()._cdata for t in (*self.parameters.values(), *self._gradients())}
        for part in self.optimizer.chained_optimizers:
            inner: Any = part.optimizer
            tensors = [parameter for group in inner.param_groups for parameter in group["params"]]
            tensors += [value for state in inner.state.values() for value in state.values()]
            yield from (
                t for t in tensors if torch.is_tensor(t) and t.numel() > 1 and t.untyped_storage()._cdata not in others
            )

    @property
    def weights(self) -> dict[str, Tensor]:
        """The weights for the engine and for model folders, by Megatron's names; values are merged within `merged`."""
        return self._merged.weights

    def merged(self) -> AbstractContextManager[None]:
        """Within, `weights` hold the model of now, adapters merged in."""
        return self._merged.merged_lora()

    @contextmanager
    def in_memory(self) -> Iterator[None]:
        """Within, the model is in memory, in the place of the one that lends it its own."""
        if self._lender is None:
            yield
            return
        self._lender.offload()
        self.onload()
        yield
        self.offload()
        self._lender.onload()

    def forward(self, rows: Sequence[TokenBatch] | None) -> list[NDArray[np.float32]] | None:
        """As of any model."""
        with self.in_memory():
            return super().forward(rows)

    def forward_with_entropies(self, rows: Sequence[TokenBatch] | None) -> list[NDArray[np.float32]] | None:
        """As `forward` of a policy, but float32 [2, tokens of the row] per row: log-probs and entropies, in nats."""
        with self.in_memory():
            return self._outputs(rows, 2)

    def forward_frozen(self, rows: Sequence[TokenBatch] | None) -> list[NDArray[np.float32]] | None:
        """`forward` of the model that training started from: without adapters, and choosing its experts itself."""
        with adapters.running(self.chunks, on=False, drops=False):
            return self.forward([replace(row, experts=None) for row in self.shared(rows)])

    def update(
        self, rows: Sequence[TokenBatch] | None, kl_coefficient: float | None = None, kto_kl: float | None = None
    ) -> dict[str, Metric]:
        """One optimizer step on this replica's share of the global batch. Metrics on the ranks that report.

        `rows` as in `forward`. `kl_coefficient` weighs the KL to the reference, the recipe's algorithm.kl_coefficient
        unless given; `kto_kl` is the KL (nats an answer) that KTO compares answers with.
        No parameter changes (`train/update_skipped`) where loss or gradient is not finite, the mean ratio above
        `algorithm.skip_ratio`, or the gap above `train.max_logprob_gap`. Raises MegarlError after too many updates in a
        row that were not finite.
        """
        own = self.shared(rows)
        if kl_coefficient is None:
            kl_coefficient = self.recipe.algorithm.kl_coefficient
        objective = partial(self.role.objective, numbers=StepNumbers(kl_coefficient, kto_kl))
        with self.in_memory():
            for model in self.models:
                model.zero_grad_buffer()
            self.optimizer.zero_grad()
            if self.balance.is_on:
                self._begin_balance(own)
            with adapters.running(self.chunks, on=True, drops=True), torch.enable_grad(), span("forward and backward"):
                losses = get_forward_backward_func()(**self.passes(own, objective))
            if self.pupil is not None:
                self.pupil.release()
            with span("optimizer"):
                metrics = self._step(losses)
            if self.balance.is_on:
                found = self.balance.metrics(self.layout.pp, self.device)
                metrics |= {name: Mean(value) for name, value in found.items()} if self.reports else {}
            return metrics

    def _begin_balance(self, rows: Sequence[TokenBatch]) -> None:
        """Prepare the losses of the experts' balance for an update on this replica's rows of the global batch.

        Losses over the whole batch compare with its tokens per expert, which a forward pass counts first.
        """
        num_tokens = torch.tensor(sum(len(row.token_ids) for row in rows), device=self.device)
        torch.distributed.all_reduce(num_tokens, group=parallel_state.get_data_parallel_group())
        self.balance.begin(int(num_tokens))
        if self.balance.needs_counts:
            with span("count tokens per expert"), self.balance.counting():
                self._forward_only([row.with_arrays({}) for row in rows], lambda *_, **__: None)

    def _step(self, losses: Sequence[Mapping[str, Metric]]) -> dict[str, Metric]:
        """The optimizer's step on the gradients of these microbatches; see `update`."""
        self.schedule.step(increment=1)
        learning_rate = self.optimizer.param_groups[0]["lr"]
        finite = self._everywhere(all(np.isfinite(part["train/loss"].number) for part in losses))
        is_gap_exceeded = self._is_mean_above(self.role.max_logprob_gap, losses, "logprob_gap/mean")
        strayed = self._is_mean_above(self.role.skip_ratio, losses, "train/ratio") or is_gap_exceeded
        grad_norm, applied = step_if_finite(self.optimizer, is_wanted=finite and not strayed)
        self.skipped_in_a_row = 0 if applied or (finite and strayed) else self.skipped_in_a_row + 1
        if self.skipped_in_a_row > self.role.optimizer.max_skipped_updates:
            raise MegarlError(
                f"loss or gradient (norm {grad_norm}) of {self.skipped_in_a_row} updates in a row was not finite. "
                f"Lower {self.role.field}.learning_rate, look at this step's data, or raise {self.role.field}"
                ".max_skipped_updates."
            )
        if not self.reports:
            return {}
        metrics = {
            "train/grad_norm": Max(grad_norm),
            "train/learning_rate": Max(float(learning_rate)),
            "train/update_skipped": Max(float(not applied)),
        }
        if self.role.max_logprob_gap is not None:
            metrics["train/gap_exceeded"] = Max(float(is_gap_exceeded))
        return merge([metrics, *losses])

    def _everywhere(self, flag: bool) -> bool:
        """Whether the flag is up on all ranks."""
        flags = torch.tensor([float(flag)], device=self.device)
        torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MIN)
        return bool(flags.item())

    def _is_mean_above(self, limit: float | None, losses: Sequence[Mapping[str, Metric]], name: str) -> bool:
        """Whether a metric's mean over the global batch is above what the recipe lets pass; the same on all ranks."""
        if limit is None:
            return False
        means = [part[name] for part in losses if name in part] if self.reports else []
        sums = [(mean.number * mean.count, mean.count) for mean in means if isinstance(mean, Mean)]
        total = torch.tensor(sums or [(0.0, 0.0)], dtype=torch.float32, device=self.device).sum(0)
        torch.distributed.all_reduce(total)
        return bool(total[0] > limit * total[1])


class StartingPolicy:
    """The policy that training started from, where adapters alone are trained: the same weights without them."""

    def __init__(self, policy: TrainingEngine) -> None:
        self._policy = policy

    def forward(self, rows: Sequence[TokenBatch] | None) -> list[NDArray[np.float32]] | None:
        """As of any model."""
        return self._policy.forward_frozen(rows)


def _sum_gradients(model: list[Any], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
    """Megatron's reduction of gradients over its ranks, without its division by tokens.

    This is the one place where Megatron's averaging is undone: the token weights of the global batch already hold
    every denominator, so that gradients are sums.
    """
    finalize_model_grads(model, None, **kwargs)
