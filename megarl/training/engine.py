"""The trainer's shard on one rank: model, gradients, optimizer, and Megatron's schedules over packed rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import Tensor

from megarl.config import Recipe
from megarl.model_shape import ModelShape
from megarl.models.configuration import transformer_config
from megarl.models.policy import PolicyModel
from megarl.parallel_layout import ParallelLayout
from megarl.platform import device
from megarl.platform.megatron_ranks import ranks_dealt
from megarl.tracking.metrics import Max, Mean, Metric, Sum, merge
from megarl.training.batch import Microbatch, pack_row, unpack_row
from megarl.training.objective import Objective, policy_objective, supervised
from megarl.training.optimizer import build_optimizer, build_schedule
from megarl.types import MegarlError, TrainingSequence

Row = Sequence[TrainingSequence]
LoadWeights = Callable[[Mapping[str, Tensor]], None]
"""Fills a model's parameters, given by name, in place."""


class TrainingEngine:
    """The policy on this rank, and the reference model if the objective needs one.

    Built on all ranks together; every method is a collective over the trainer's ranks. `load_weights` fills the
    parameters before the optimizer copies them.
    """

    def __init__(self, recipe: Recipe, layout: ParallelLayout, shape: ModelShape, load_weights: LoadWeights) -> None:
        self.recipe, self.shape = recipe, shape
        self.device = device.current()
        self.dtype = getattr(torch, recipe.model.dtype)
        with ranks_dealt(layout.rank_of_part):
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=layout.tp,
                pipeline_model_parallel_size=layout.pp,
                order=layout.order,
                create_gloo_process_groups=False,
            )
        model_parallel_cuda_manual_seed(recipe.seed)
        self.sequence_parallel = layout.tp > 1 and recipe.trainer.sequence_parallel is not False
        self.config = transformer_config(
            shape,
            layout,
            dtype=self.dtype,
            sequence_parallel=self.sequence_parallel,
            overrides=recipe.trainer.megatron,
        )
        self.policy = self._build_model(load_weights)
        self.reference: PolicyModel | None = None
        if recipe.loop == "rl" and recipe.algorithm.kl_coefficient:
            self.reference = self._build_model(load_weights).requires_grad_(False)
        self.model = self._wrap(self.policy, recipe.trainer.distributed_optimizer)
        self.chunks, self.models = [self.policy], [self.model]
        self.optimizer = build_optimizer(
            recipe.optimizer, self.model, dtype=self.dtype, distributed=recipe.trainer.distributed_optimizer
        )
        updates = recipe.train.steps * (recipe.train.updates_per_step if recipe.loop == "rl" else 1)
        self.schedule = build_schedule(recipe.optimizer, self.optimizer, num_updates=updates)
        self.objective = policy_objective(recipe.algorithm) if recipe.loop == "rl" else supervised
        self.config.finalize_model_grads_func = _sum_gradients

    def _build_model(self, load_weights: LoadWeights) -> PolicyModel:
        sampling = self.recipe.rollout.sampling
        model = PolicyModel(
            self.config,
            self.shape,
            temperature=sampling.temperature if self.recipe.loop == "rl" else 1.0,
            logprob_chunk_tokens=self.recipe.trainer.logprob_chunk_tokens,
        ).to(self.device)
        load_weights(dict(model.named_parameters()))
        return model

    def _wrap(self, model: PolicyModel, distributed_optimizer: bool) -> DistributedDataParallel:
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=False,
            use_distributed_optimizer=distributed_optimizer,
        )
        return DistributedDataParallel(self.config, settings, model)

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The policy's live parameters on this rank, by Megatron's names."""
        return dict(self.policy.named_parameters())

    @property
    def reports(self) -> bool:
        """Whether this rank holds its data-parallel replica's results: the last stage's first tensor rank."""
        return parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0

    def logprobs(self, rows: Sequence[Row], *, of: str = "policy") -> list[list[np.ndarray]] | None:
        """Log-probs of every token of this replica's rows under the `policy` or the `reference`, before any update.

        Returns, on the rank that reports, one float32 [tokens] array per sequence of each row; elsewhere None.
        """
        model = self.model if of == "policy" else self.reference
        assert model is not None, "the reference model exists where algorithm.kl_coefficient is not zero"
        outputs = self._run(rows, model, lambda output, batch: output[0], forward_only=True)
        if not self.reports:
            return None
        return [unpack_row(values, [len(s) for s in row]) for values, row in zip(outputs, rows, strict=True)]

    def update(self, rows: Sequence[Row]) -> dict[str, Metric]:
        """One optimizer step on this replica's share of the global batch. Metrics on the rank that reports.

        Raises MegarlError where the loss or the gradient is not finite.
        """
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = self._run(rows, self.model, partial(_weighted_loss, objective=self.objective), forward_only=False)
        self.schedule.step(increment=1)
        learning_rate = self.optimizer.param_groups[0]["lr"]
        _, grad_norm, _ = self.optimizer.step()  # type: ignore[misc]
        if not np.isfinite(grad_norm):
            raise MegarlError(
                f"gradient norm {grad_norm} is not finite. Lower optimizer.learning_rate or look at this step's data."
            )
        if not self.reports:
            return {}
        metrics = {"train/grad_norm": Max(float(grad_norm)), "train/learning_rate": Max(float(learning_rate))}
        return merge([metrics, *losses])

    def _run(
        self,
        rows: Sequence[Row],
        model: torch.nn.Module,
        reduce: Callable[[Tensor, Microbatch], Any],
        *,
        forward_only: bool,
    ) -> list[Any]:
        """Run Megatron's schedule over the rows; on the last stage, one result of `reduce` a row."""
        multiple = self.config.tensor_model_parallel_size if self.sequence_parallel else 1
        batches = (
            pack_row(row, multiple=multiple, qkv_format=self.policy.qkv_format, device=self.device) for row in rows
        )

        def forward_step(iterator: Any, chunk: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
            batch: Microbatch = next(iterator)
            output = chunk(
                input_ids=batch.input_ids,
                position_ids=None,
                attention_mask=None,
                labels=batch.labels,
                packed_seq_params=batch.row,
            )
            return output, partial(_collect, batch=batch, reduce=reduce)

        with torch.set_grad_enabled(not forward_only):
            return get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=batches,
                model=model,
                num_microbatches=len(rows),
                seq_length=self.recipe.trainer.max_tokens_per_microbatch,
                micro_batch_size=1,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )


def _collect(
    output: Tensor, batch: Microbatch, reduce: Callable[[Tensor, Microbatch], Any], non_loss_data: bool = False
) -> Any:
    return reduce(output, batch)


def _weighted_loss(output: Tensor, batch: Microbatch, objective: Objective) -> tuple[Tensor, Tensor, dict[str, Metric]]:
    """The row's part of the global loss, a token count that Megatron wants, and the row's metrics."""
    logprobs, entropies = output
    per_token, metrics = objective(logprobs, entropies, batch)
    # Selecting instead of multiplying: what an untrained token's loss is, even inf, must not reach the sum.
    loss = (torch.where(batch.mask, per_token, 0.0) * batch.known["token_weights"]).sum()
    count = int(batch.mask.sum())
    logged: dict[str, Metric] = {"train/loss": Sum(loss.item()), "train/tokens": Sum(float(count))}
    for name, values in metrics.items():
        logged[name] = _mean(values.detach()[batch.mask])
    if (rollout_logprobs := batch.known.get("rollout_logprobs")) is not None and count:
        gap = (logprobs.detach() - rollout_logprobs)[batch.mask].abs()
        logged["logprob_gap/max"] = Max(gap.max().item())
        logged["logprob_gap/mean"] = _mean(gap)
    return loss, torch.ones((), dtype=torch.int, device=loss.device), logged


def _sum_gradients(model: list[Any], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
    """Megatron's reduction of gradients over its ranks, without its division by tokens.

    This is the one place where Megatron's averaging is undone: the token weights of the global batch already hold
    every denominator, so that gradients are sums.
    """
    finalize_model_grads(model, None, **kwargs)


def _mean(values: Tensor) -> Mean:
    return Mean(values.mean().item() if len(values) else 0.0, len(values))
