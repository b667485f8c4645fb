"""The trainer's shard on one rank: model, gradients, optimizer, and Megatron's schedules over packed rows."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from megarl.algorithms.importance import gap_moments
from megarl.config import Recipe
from megarl.model_shape import ModelShape
from megarl.models.configuration import transformer_config
from megarl.models.policy import PolicyModel
from megarl.parallel_layout import ParallelLayout
from megarl.platform import device
from megarl.platform.megatron_ranks import ranks_dealt
from megarl.tracking.metrics import Max, Mean, Metric, Sum, merge
from megarl.training.batch import Microbatch, pack_row, unpack_row, whole_row
from megarl.training.objective import Objective, policy_objective, preference_objective, supervised
from megarl.training.offload import Lent
from megarl.training.optimizer import build_optimizer, build_schedule, step_if_finite
from megarl.types import MegarlError, TrainingSequence
from megarl.weights.layouts.megatron import chunk_prefix

Row = Sequence[TrainingSequence]
LoadWeights = Callable[[Mapping[str, Tensor]], None]
"""Fills a model's parameters, given by name, in place."""


class TrainingEngine:
    """The policy on this rank, and the reference model if the objective needs one.

    `chunks` are this stage's parts of the policy, one unless `layout.vpp` says otherwise, `models` the same with their
    gradients. Built on all ranks together; every method is a collective over the trainer's ranks. `load_weights` fills
    the parameters before the optimizer copies them.
    """

    def __init__(self, recipe: Recipe, layout: ParallelLayout, shape: ModelShape, load_weights: LoadWeights) -> None:
        self.recipe, self.layout, self.shape = recipe, layout, shape
        self.device = device.current()
        self.dtype = getattr(torch, recipe.model.dtype)
        with ranks_dealt(layout.rank_of_part):
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=layout.tp,
                pipeline_model_parallel_size=layout.pp,
                virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
                context_parallel_size=layout.cp,
                expert_model_parallel_size=layout.ep,
                expert_tensor_parallel_size=layout.etp if shape.num_experts else None,
                order=layout.order,
                create_gloo_process_groups=False,
            )
        model_parallel_cuda_manual_seed(recipe.seed)
        # Nothing here draws from these two; what a library draws shall not differ from run to run.
        random.seed(recipe.seed)
        np.random.seed(recipe.seed % 2**32)
        trainer = recipe.trainer
        self.sequence_parallel = layout.tp > 1 and trainer.sequence_parallel is not False
        self.config = transformer_config(
            shape,
            layout,
            dtype=self.dtype,
            sequence_parallel=self.sequence_parallel,
            recompute=trainer.recompute,
            router_replay=trainer.router_replay,
            overrides=trainer.megatron,
        )
        self.chunks = self._build_chunks(load_weights, self.device)
        self.reference: list[PolicyModel] = []
        if recipe.has_reference:
            # Between its passes the reference waits in host memory.
            self.reference = self._build_chunks(load_weights, torch.device("cpu"))
        self.models = [self._wrap(chunk, index) for index, chunk in enumerate(self.chunks)]
        self.optimizer = build_optimizer(
            recipe.optimizer, self.models, dtype=self.dtype, distributed=trainer.distributed_optimizer
        )
        updates = recipe.train.steps * (recipe.train.updates_per_step if recipe.loop == "rl" else 1)
        self.schedule = build_schedule(recipe.optimizer, self.optimizer, num_updates=updates)
        self.objective = {
            "rl": lambda: policy_objective(recipe.algorithm),
            "sft": lambda: supervised,
            "preference": lambda: preference_objective(recipe.preference),
        }[recipe.loop]()
        self.config.finalize_model_grads_func = _sum_gradients
        self.skipped_in_a_row = 0
        self._lent = {
            "parameters": Lent(lambda: self.parameters.values()),
            "gradients": Lent(self._gradients, keeps_values=False),
            "optimizer": Lent(self._optimizer_state),
        }

    def _build_chunks(self, load_weights: LoadWeights, place: torch.device) -> list[PolicyModel]:
        """This stage's parts of the model, their weights loaded, on a device."""
        recipe, vpp = self.recipe, self.layout.vpp
        chunks = [
            PolicyModel(
                self.config,
                self.shape,
                temperature=recipe.rollout.sampling.temperature if recipe.loop == "rl" else 1.0,
                logprob_chunk_tokens=recipe.trainer.logprob_chunk_tokens,
                trains_entropy=recipe.loop == "rl" and recipe.algorithm.entropy_coefficient > 0,
                vp_stage=index if vpp > 1 else None,
            ).to(self.device)
            for index in range(vpp)
        ]
        for name, parameter in named_parameters(chunks).items():
            if ".experts." in name:
                # Megatron takes experts for replicas over the dense ranks unless expert parallelism splits them, also
                # where their tensor parallelism is another than the rest's.
                parameter.allreduce = False  # type: ignore[attr-defined]
        load_weights(named_parameters(chunks))
        return [chunk.to(place) for chunk in chunks]

    def _wrap(self, chunk: PolicyModel, index: int) -> DistributedDataParallel:
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=False,
            use_distributed_optimizer=self.recipe.trainer.distributed_optimizer,
        )
        return DistributedDataParallel(self.config, settings, chunk, disable_bucketing=index > 0)

    def offload(self, *, but: Collection[str] = ()) -> None:
        """Give the engine what memory `trainer.offload` names, all `but` some of it."""
        self.optimizer.zero_grad()
        for name in self.recipe.trainer.offload:
            if name not in but:
                self._lent[name].give()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def onload(self, names: Iterable[str] = ("parameters", "gradients", "optimizer")) -> None:
        """Take memory back that was given; needed before anything else is asked of the trainer."""
        for name in names:
            self._lent[name].take()

    def _gradients(self) -> Iterator[Tensor]:
        for model in self.models:
            yield from (buffer.grad_data for buffer in (*model.buffers, *model.expert_parallel_buffers))  # type: ignore[misc]

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
    def parameters(self) -> dict[str, Tensor]:
        """The policy's live parameters on this rank, by Megatron's names."""
        return named_parameters(self.chunks)

    @property
    def reports(self) -> bool:
        """Whether this rank holds results of its replica: the last stage's first tensor rank, of every context part."""
        return parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0

    def logprobs(self, rows: Sequence[Row], *, of: str = "policy") -> list[list[np.ndarray]] | None:
        """Log-probs of every token of this replica's rows under the `policy` or the `reference`, before any update.

        Returns, on the ranks that report, one float32 [tokens] array per sequence of each row; elsewhere None.
        """
        models: Sequence[torch.nn.Module] = self.models
        if of == "reference":
            assert self.reference, "the reference model exists where the recipe has one"
            models = [chunk.to(self.device) for chunk in self.reference]
        outputs = self._run(rows, models, lambda output, batch: (output[0], batch), forward_only=True)
        if of == "reference":
            for chunk in self.reference:
                chunk.cpu()
        if not self.reports:
            return None
        return [unpack_row(whole_row(values, batch.row), batch.lengths, batch.padded) for values, batch in outputs]

    def update(self, rows: Sequence[Row], kl: float | None = None) -> dict[str, Metric]:
        """One optimizer step on this replica's share of the global batch. Metrics on the ranks that report.

        `kl` is the coefficient of the KL to the reference, the recipe's unless given; for kto that KL itself.
        `train/update_skipped` is 1 where no parameter changed: loss or gradient was not finite, or the mean ratio above
        `algorithm.skip_ratio`. Raises MegarlError after too many updates in a row that were not finite.
        """
        for model in self.models:
            model.zero_grad_buffer()
        self.optimizer.zero_grad()
        if kl is None:
            kl = self.recipe.algorithm.kl_coefficient
        reduce = partial(_weighted_loss, objective=self.objective, kl=kl)
        losses = self._run(rows, self.models, reduce, forward_only=False)
        self.schedule.step(increment=1)
        learning_rate = self.optimizer.param_groups[0]["lr"]
        finite = self._everywhere(all(np.isfinite(part["train/loss"].number) for part in losses))
        strayed = self._has_strayed(losses)
        grad_norm, applied = step_if_finite(self.optimizer, is_wanted=finite and not strayed)
        self.skipped_in_a_row = 0 if applied or (finite and strayed) else self.skipped_in_a_row + 1
        if self.skipped_in_a_row > self.recipe.optimizer.max_skipped_updates:
            raise MegarlError(
                f"loss or gradient (norm {grad_norm}) of {self.skipped_in_a_row} updates in a row was not finite. "
                "Lower optimizer.learning_rate, look at this step's data, or raise optimizer.max_skipped_updates."
            )
        if not self.reports:
            return {}
        metrics = {
            "train/grad_norm": Max(grad_norm),
            "train/learning_rate": Max(float(learning_rate)),
            "train/update_skipped": Max(float(not applied)),
        }
        return merge([metrics, *losses])

    @property
    def _multiple(self) -> int:
        """A rank's tokens of a row are a multiple of this."""
        return self.layout.tp if self.sequence_parallel else 1

    def _everywhere(self, flag: bool) -> bool:
        """Whether the flag is up on all ranks."""
        flags = torch.tensor([float(flag)], device=self.device)
        torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MIN)
        return bool(flags.item())

    def _has_strayed(self, losses: Sequence[Mapping[str, Metric]]) -> bool:
        """Whether the mean ratio over the global batch is above what the recipe lets pass; the same on all ranks."""
        limit = self.recipe.algorithm.skip_ratio if self.recipe.loop == "rl" else None
        if limit is None:
            return False
        ratios = [part["train/ratio"] for part in losses] if self.reports else []
        sums = [(r.number * r.count, r.count) for r in ratios if isinstance(r, Mean)]
        total = torch.tensor(sums or [(0.0, 0.0)], dtype=torch.float32, device=self.device).sum(0)
        torch.distributed.all_reduce(total)
        return bool(total[0] > limit * total[1])

    def _run(
        self,
        rows: Sequence[Row],
        models: Sequence[torch.nn.Module],
        reduce: Callable[[Tensor, Microbatch], Any],
        *,
        forward_only: bool,
    ) -> list[Any]:
        """Run Megatron's schedule over the rows; on the last stage, one result of `reduce` a row."""
        batches = [
            pack_row(
                row,
                multiple=self._multiple,
                qkv_format=self.chunks[0].qkv_format,
                device=self.device,
                cp=self.layout.cp,
                cp_rank=parallel_state.get_context_parallel_rank(),
            )
            for row in rows
        ]

        of_policy = models is self.models

        def forward_step(iterator: Any, chunk: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
            batch: Microbatch = next(iterator)
            if batch.routes is not None and of_policy:
                parts = self._multiple
                routes = batch.routes.chunk(parts)[parallel_state.get_tensor_model_parallel_rank() % parts]
                get_attr_wrapped_model(chunk, "replay_routes")(routes)  # type: ignore[operator]
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
                data_iterator=[iter(batches) for _ in models],
                model=list(models),
                num_microbatches=len(rows),
                seq_length=self.recipe.trainer.max_tokens_per_microbatch,
                micro_batch_size=1,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )


def named_parameters(chunks: Sequence[torch.nn.Module]) -> dict[str, Tensor]:
    """The parameters of a stage's chunks by the names that Megatron's layout gives them."""
    return {
        chunk_prefix(index, len(chunks)) + name: parameter
        for index, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    }


def _collect(
    output: Tensor, batch: Microbatch, reduce: Callable[[Tensor, Microbatch], Any], non_loss_data: bool = False
) -> Any:
    return reduce(output, batch)


def _weighted_loss(
    output: Tensor, batch: Microbatch, objective: Objective, kl: float
) -> tuple[Tensor, Tensor, dict[str, Metric]]:
    """The row's part of the global loss, a token count that Megatron wants, and the row's metrics."""
    logprobs, entropies = output
    per_token, metrics = objective(logprobs, entropies, batch, kl)
    # Selecting instead of multiplying: what an untrained token's loss is, even inf, must not reach the sum.
    loss = (torch.where(batch.mask, per_token, 0.0) * batch.known["token_weights"]).sum()
    count = int(batch.mask.sum())
    logged: dict[str, Metric] = {"train/loss": Sum(loss.item()), "train/tokens": Sum(float(count))}
    for name, values in metrics.items():
        # What is not per token is per pair.
        logged[name] = _mean(values.detach()[batch.mask] if len(values) == len(batch.mask) else values.detach())
    if (rollout_logprobs := batch.known.get("rollout_logprobs")) is not None and count:
        ours, theirs = logprobs.detach()[batch.mask].double(), rollout_logprobs[batch.mask].double()
        logged["logprob_gap/max"] = Max((ours - theirs).abs().max().item())
        logged |= {f"logprob_gap/{name}": _mean(part) for name, part in gap_moments(ours, theirs).items()}
    return loss, torch.ones((), dtype=torch.int, device=loss.device), logged


def _sum_gradients(model: list[Any], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
    """Megatron's reduction of gradients over its ranks, without its division by tokens.

    This is the one place where Megatron's averaging is undone: the token weights of the global batch already hold
    every denominator, so that gradients are sums.
    """
    finalize_model_grads(model, None, **kwargs)


def _mean(values: Tensor) -> Mean:
    return Mean(values.mean().item() if len(values) else 0.0, len(values))
