"""One rank's shard of a model, and Megatron's schedules over packed rows."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.utils import get_attr_wrapped_model
from numpy.typing import NDArray
from torch import Tensor

from megarl import faults
from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.data.token_batch import TokenBatch
from megarl.families.logprob_chunks import logprob_chunk_tokens
from megarl.families.shape import ModelShape
from megarl.groups.megatron_ranks import permuted_ranks, require_gpu_backends
from megarl.models.layer_caches import drop_weight_copies
from megarl.models.policy import PackedModel, evaluation_mode
from megarl.platform import device
from megarl.reshard.layouts.megatron import chunk_prefix
from megarl.training.host.host_arena import HostArena
from megarl.training.model_parts import ModelParts
from megarl.training.replica import Replica
from megarl.training.rows.choice import make_microbatch
from megarl.training.rows.feeds import RowFeed, build_feeds
from megarl.training.rows.microbatch import Microbatch, unpack_row, whole_row
from megarl.training.stage_shapes import StageCommunicator, stage_groups

LoadWeights = Callable[[Mapping[str, Tensor]], None]
"""Function that fills a model's parameters, a mapping by name, in place."""

NO_PARTS = ModelParts()


class ModelShard:
    """One rank's shard of a model: the chunks of its pipeline stage, one or `parallel.vpp` (virtual pipeline) of them.

    All ranks build it together; the first model also creates Megatron's process groups. Every method is a collective
    over the trainer's ranks. `load_weights` fills the parameters. With a `replica`, only its first rank passes rows to
    the methods; other ranks pass None.
    """

    def __init__(
        self,
        recipe: Recipe,
        parallel: ParallelConfig,
        shape: ModelShape,
        load_weights: LoadWeights,
        *,
        replica: Replica | None = None,
        arena: HostArena | None = None,
        parts: ModelParts = NO_PARTS,
    ) -> None:
        """Create process groups, build this rank's chunks, and load their weights."""
        self.recipe, self.parallel, self.shape = recipe, parallel, shape
        self._replica = replica
        self.arena = arena or HostArena(0)
        """Host memory for the model's tensors while they are not on the device."""
        self.device = device.current()
        self.dtype = getattr(torch, recipe.model.dtype)
        self.parts = parts
        self.sequence_parallel = parallel.tp > 1 and recipe.trainer.sequence_parallel is not False
        _create_process_groups(recipe.seed, parallel, shape)
        self.config = parts.megatron_config(
            recipe, shape, parallel, dtype=self.dtype, sequence_parallel=self.sequence_parallel
        )
        self.chunks = [self._build_chunk(index).to(self.device) for index in range(parallel.vpp)]
        for name, parameter in self.parameters.items():
            if ".experts." in name:
                # Without expert parallelism, Megatron-Core 0.16.1 treats experts as replicated over the dense
                # data-parallel ranks. This is wrong if experts have another tensor-parallel size.
                parameter.allreduce = False  # pyright: ignore[reportAttributeAccessIssue]  (a mark of Megatron's)
                if "bias" in name:
                    _mark_expert_bias(parameter)
        load_weights(self.tensors)
        self.feeds = list(build_feeds(self.chunks, self.token_parts))
        """Feeds (`RowFeed`) of all forward passes: data that a pass needs beyond tokens."""
        self.update_feeds: list[RowFeed] = []
        """Further feeds, of forward passes with gradients only."""

    def _build_chunk(self, index: int) -> PackedModel:
        return self.parts.build_chunk(
            self.recipe, self.config, self.shape, vp_stage=self._vp_stage(index), **self._head_settings()
        )

    def _head_settings(self) -> dict[str, Any]:
        recipe, is_gpu = self.recipe, self.device.type == "cuda"
        return {
            "logprob_chunk_tokens": logprob_chunk_tokens(recipe, self.shape, self.parallel, is_gpu=is_gpu),
            "keeps_logits": bool(recipe.trainer.keep_logits),
            "trains_entropy": recipe.loop == "rl" and recipe.algorithm.entropy_coefficient > 0,
        }

    def _vp_stage(self, index: int) -> int | None:
        return index if self.parallel.vpp > 1 else None

    @property
    def models(self) -> Sequence[torch.nn.Module]:
        """Model chunks, or Megatron's wrappers of chunks."""
        return self.chunks

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The live parameters [*shape] on this rank, by Megatron's names."""
        return {
            chunk_prefix(index, len(self.chunks)) + name: parameter
            for index, chunk in enumerate(self.chunks)
            for name, parameter in chunk.named_parameters()
        }

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Parameters and saved buffers [*shape] on this rank, by Megatron's names."""
        return self.parameters | {
            chunk_prefix(index, len(self.chunks)) + name: buffer
            for index, chunk in enumerate(self.chunks)
            for name, buffer in saved_buffers(chunk)
        }

    @property
    def returns_results(self) -> bool:
        """Whether this rank returns results of its replica: on the last stage, the first tensor-parallel rank of each
        context-parallel part.
        """
        return parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0

    def forward(self, rows: Sequence[TokenBatch] | None) -> list[NDArray[np.float32]] | None:
        """Compute log-probs of every token of this replica's rows, or a critic's values before each token.

        Returns float32 [tokens] per row, in nats, or None on ranks that do not report.
        """
        outputs = self._compute_outputs(rows, 1)
        return None if outputs is None else [values for [values] in outputs]

    def _compute_outputs(self, rows: Sequence[TokenBatch] | None, count: int) -> list[NDArray[np.float32]] | None:
        """Return the first `count` output values of each token, float32 [count, tokens] per row; else as in
        `forward`.
        """
        return self.unpack_outputs(self.run_forward(self.share_rows(rows), partial(_select_outputs, count=count)))

    def unpack_outputs(self, outputs: Sequence[tuple[Tensor, Microbatch]]) -> list[NDArray[np.float32]] | None:
        """Return output values in the order of the batch's tokens, float32 [count, tokens] per row; None on ranks that
        do not report.

        `outputs`: the values [count, positions] of each padded row, and its microbatch.
        """
        if not self.returns_results:
            return None
        values_of_rows = [whole_row(values.T, batch.row) for values, batch in outputs]
        # One copy for all rows, so that the host waits for the device once.
        host_values = torch.cat(values_of_rows).float().cpu().numpy()
        row_ends = np.cumsum([len(values) for values in values_of_rows])
        return [
            np.stack([unpack_row(token_values, batch.lengths, batch.padded_lengths) for token_values in values.T])
            for values, (_, batch) in zip(np.split(host_values, row_ends[:-1]), outputs, strict=True)
        ]

    def run_forward(self, rows: Sequence[TokenBatch], process_row: Callable[..., Any]) -> list[Any]:
        """Run the rows through the model in evaluation mode, without gradients.

        Returns `process_row(output, batch=Microbatch, non_loss_data=True)` of each row; an empty list before the last
        stage.
        """
        faults.reach("logprobs")
        with torch.no_grad(), evaluation_mode(self.chunks):
            return get_forward_backward_func()(**self.schedule_arguments(rows, process_row, forward_only=True))

    def share_rows(self, rows: Sequence[TokenBatch] | None) -> Sequence[TokenBatch]:
        """Return this replica's rows. With a `replica`, its first rank broadcasts them."""
        if self._replica is not None:
            return self._replica.share_rows(rows)
        assert rows is not None
        return rows

    @property
    def token_parts(self) -> int:
        """Tensor-parallel ranks that share a row's tokens (sequence parallelism)."""
        return self.parallel.tp if self.sequence_parallel else 1

    def _pipeline_arguments(self, batches: Sequence[Microbatch], *, forward_only: bool) -> dict[str, Any]:
        """Return the schedule's arguments for sending hidden states between pipeline stages."""
        if self.parallel.pp == 1:
            return {}
        hidden_size = self.config.hidden_size
        shapes = [(batch.input_ids.shape[1] // self.token_parts, 1, hidden_size) for batch in batches]
        # Passes without gradients send hidden states only: all carried states serve a loss.
        carriers = [None if forward_only else chunk.carrier for chunk in self.chunks]
        return {
            "p2p_communicator": StageCommunicator(self.config, shapes, carriers),
            "pg_collection": stage_groups(),
        }

    def _make_microbatches(self, rows: Sequence[TokenBatch]) -> list[Microbatch]:
        return [
            make_microbatch(
                row,
                multiple=self.token_parts * self.recipe.trainer.token_block,
                qkv_format=self.chunks[0].qkv_format,
                device=self.device,
                cp=self.parallel.cp,
                cp_rank=parallel_state.get_context_parallel_rank(),
            )
            for row in rows
        ]

    def release_feeds(self) -> None:
        for feed in (*self.feeds, *self.update_feeds):
            feed.release()

    def schedule_arguments(
        self, rows: Sequence[TokenBatch], process_row: Callable[..., Any], *, forward_only: bool = False
    ) -> dict[str, Any]:
        """Return the arguments of Megatron's forward and backward schedule for these rows.

        On the last stage, the schedule returns `process_row(output, batch=Microbatch)` per row: a `RowLoss`, or
        anything with `forward_only`.
        """
        batches = self._make_microbatches(rows)
        feeds = self.feeds if forward_only else [*self.feeds, *self.update_feeds]
        feed_values_by_row = zip(*[feed.fetch(rows, batches) for feed in feeds], strict=True)
        rows_with_values = list(zip(batches, feed_values_by_row if feeds else [()] * len(rows), strict=True))

        def forward_step(
            iterator: Iterator[tuple[Microbatch, Sequence[Any]]], chunk: torch.nn.Module
        ) -> tuple[Tensor, Callable[..., Any]]:
            """Run the next row through a chunk of the model. Return its output [*shape], and the function for the loss.

            The feeds first give the chunk their values for the row.
            """
            batch, values = next(iterator)
            model: Any = get_attr_wrapped_model(chunk, "post_process", return_model_obj=True)
            for feed, value in zip(feeds, values, strict=True):
                feed.apply(model, value)
            output = chunk(
                input_ids=batch.input_ids,
                position_ids=None,
                attention_mask=None,
                labels=batch.labels,
                packed_seq_params=batch.row,
            )
            if not forward_only:
                faults.reach("backward", lambda: [output])
            return output, partial(process_row, batch=batch)

        return self._pipeline_arguments(batches, forward_only=forward_only) | {
            "forward_step_func": forward_step,
            # An interleaved schedule (vpp) reads one iterator per chunk.
            "data_iterator": [iter(rows_with_values) for _ in self.models],
            "model": list(self.models),
            "num_microbatches": len(rows),
            "seq_length": self.recipe.trainer.max_tokens_per_microbatch,
            "micro_batch_size": 1,
            "forward_only": forward_only,
            "collect_non_loss_data": forward_only,
        }


class FrozenModel(ModelShard):
    """A model that is never trained, such as a reference or a reward model. Between passes it is in host memory.

    `has_moved`: the policy's weights were mixed into the model, so it differs from its folder.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.has_moved = False
        if self.device.type != "cpu":
            self._move_to_host()
        for chunk in self.chunks:
            chunk.cpu()

    def _chunk_parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for chunk in self.chunks for parameter in chunk.parameters()]

    def _move_to_host(self) -> None:
        """Move the parameters into the page-locked arena: copying them back is fast."""
        parameters = self._chunk_parameters()
        copies = self.arena.take_copies([parameter.nbytes for parameter in parameters])
        for parameter, copy in zip(parameters, copies, strict=True):
            self.arena.wait_for(copy)
            values = copy.memory.view(parameter.dtype).view(parameter.shape)
            parameter.data = values.copy_(parameter.data)

    @contextmanager
    def on_device(self, *, is_changed: bool = False) -> Iterator[None]:
        """Context in which the model is on the device. `is_changed`: copy the parameters back to the host at
        the end.
        """
        # The host copies stay valid, so only the device copies are dropped. This saves a copy back per pass.
        host_values = [(parameter, parameter.data) for parameter in self._chunk_parameters()]
        for parameter, values in host_values:
            parameter.data = values.to(self.device, non_blocking=True)
        for chunk in self.chunks:
            chunk.to(self.device)
        yield
        for parameter, values in host_values:
            if is_changed:
                values.copy_(parameter.data)
            parameter.data = values
        drop_weight_copies(self.chunks)
        for chunk in self.chunks:
            chunk.cpu()

    def forward(self, rows: Sequence[TokenBatch] | None) -> list[NDArray[np.float32]] | None:
        with self.on_device():
            return super().forward(rows)

    def move_towards(self, tensors: Mapping[str, Tensor], share: float) -> None:
        """Mix other weights into the model, in float32: each tensor becomes share * other + (1 - share) * itself.

        `tensors` [*shape]: the other weights by name, split alike. Source: TR-DPO (Gorbatovski et al. 2024, arXiv
        2404.09656, eq. 3 and 4: soft update, and hard update at share 1).
        """
        with torch.no_grad():
            for name, values in self.tensors.items():
                target = tensors[name]
                values.copy_(torch.lerp(values.to(target.device).float(), target.float(), share))
        self.has_moved = True


def saved_buffers(chunk: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers [*shape] of a chunk that its checkpoint contains, with their names."""
    for path, module in chunk.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}".lstrip("."), buffer


def _create_process_groups(seed: int, parallel: ParallelConfig, shape: ModelShape) -> None:
    """Create Megatron's process groups and seed random numbers, once per rank for all its models."""
    if parallel_state.model_parallel_is_initialized():
        return
    with permuted_ranks(parallel.rank_of_part):
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tp,
            pipeline_model_parallel_size=parallel.pp,
            virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
            context_parallel_size=parallel.cp,
            expert_model_parallel_size=parallel.ep,
            expert_tensor_parallel_size=parallel.etp if shape.num_experts else None,
            order=parallel.order,
            create_gloo_process_groups=False,
        )
    require_gpu_backends(device.current())
    model_parallel_cuda_manual_seed(seed)
    # Only libraries draw from these two generators; the seed makes their draws reproducible.
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _mark_expert_bias(bias: Any) -> None:
    """Mark an expert's bias [channels] as whole on its rank, like the expert's weights.

    Megatron-Core 0.16.1 marks it as shared by tensor-parallel ranks. It would add up gradients of different experts,
    and leave some out of the gradient's norm.
    """
    bias.sequence_parallel = False
    bias.tensor_model_parallel = True


def _select_outputs(output: Tensor, batch: Microbatch, non_loss_data: bool, *, count: int) -> tuple[Tensor, Microbatch]:
    return output[:count], batch
