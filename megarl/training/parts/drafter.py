"""Training of an EAGLE-3 drafter (arXiv 2503.01840) from the policy's hidden states: its loss and learning rate.

A drafter is a small model that proposes tokens, which the engine then checks with the policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from megatron.core.optimizer import ChainedOptimizer, ParamKey, get_standard_config_overrides
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.optimizer_config import ParamPredicate
from torch import Tensor

from megarl.checkpoint.drafter_files import load_drafter, target_token_ids
from megarl.config import OptimizerConfig, Recipe
from megarl.data.token_batch import TokenBatch
from megarl.families.eagle3 import PARAMETERS, read_drafter_shape
from megarl.files.model_folder import find_folder
from megarl.models.drafts.aux_states import AuxStates
from megarl.models.drafts.drafter import DrafterHead, DrafterRow, attach_drafter
from megarl.models.drafts.embeddings import copy_embedding_to_last_stage
from megarl.models.policy import PolicyModel
from megarl.tracking.metric_rows import MetricRow
from megarl.training.model import ModelShard
from megarl.training.objective import Objective, RowLoss, StepNumbers
from megarl.training.parts.engine_part import EnginePart
from megarl.training.rows.feeds import RowFeed
from megarl.training.rows.metrics import Signal, mean_of
from megarl.training.rows.microbatch import Microbatch, tokens_ahead

METRICS = (
    MetricRow(
        "drafter/loss",
        "nats",
        "mean KL from the policy's distribution over the drafter's vocabulary to the drafter's, over trained tokens "
        "and steps",
        condition="trainer.drafter_learning_rate",
    ),
)

DRAFTER_LOSS = Signal("drafter/loss", is_loss=True)


class DrafterFeed(RowFeed):
    """Gives the drafter the tokens of each whole row, and each microbatch the values for the drafter's loss.

    At position t, the drafter's step k predicts the sequence's token t + 2 + k. `drafter_mask` is True where this token
    is trained. Elsewhere `drafter_weights` are zero. Both are [tokens, steps].
    """

    def __init__(self, head: DrafterHead | None, num_steps: int, step_decay: float, device: torch.device) -> None:
        """`head`: the drafter's head on the last pipeline stage; None on the other stages."""
        self._head, self._num_steps, self._step_decay, self._device = head, num_steps, step_decay, device

    def fetch(self, rows: Sequence[TokenBatch], batches: Sequence[Microbatch]) -> Sequence[DrafterRow | None]:
        if self._head is None:
            # Stages before the last only collect states.
            return [None] * len(rows)
        return [self._add_weights(row, batch) for row, batch in zip(rows, batches, strict=True)]

    def _add_weights(self, row: TokenBatch, batch: Microbatch) -> DrafterRow:
        """Add mask and weights to a microbatch. Returns the tokens and sequence starts of its row on all ranks."""
        assert batch.row.host_local is not None
        lengths, padded_lengths, rank_indices = batch.lengths, batch.padded_lengths, batch.row.host_local
        masks, weights = (
            np.stack(
                [tokens_ahead(values, lengths, padded_lengths, distance=2 + step) for step in range(self._num_steps)],
                axis=1,
            )
            for values in (row.loss_mask, row.per_token["token_weights"])
        )
        decays = self._step_decay ** np.arange(self._num_steps, dtype=np.float32)
        step_weights = np.where(masks, weights * decays, 0.0).astype(np.float32)
        batch.per_token["drafter_mask"] = torch.from_numpy(masks[rank_indices]).to(self._device)
        batch.per_token["drafter_weights"] = torch.from_numpy(step_weights[rank_indices]).to(self._device)
        tokens = tokens_ahead(row.token_ids, lengths, padded_lengths, distance=0)
        sequence_starts = np.repeat(padded_lengths.cumsum() - padded_lengths, padded_lengths)
        return DrafterRow(torch.from_numpy(tokens).to(self._device), sequence_starts)

    def apply(self, chunk: torch.nn.Module, values: DrafterRow | None) -> None:
        assert isinstance(chunk, PolicyModel) and isinstance(chunk.carrier, AuxStates)
        chunk.carrier.is_collecting = True
        if chunk.post_process:
            assert self._head is not None
            self._head.row = values


class DrafterPart(EnginePart):
    """The engines' drafter, in the last chunk of the policy's last stage. It must be the last part with a loss.

    It starts with the weights in its folder. Its gradient is scaled by the policy's clipping, and is not part of the
    clipped norm.
    """

    def __init__(self, shard: ModelShard) -> None:
        """Attach the drafter to the last stage. All stages carry states for it."""
        recipe, trainer = shard.recipe, shard.recipe.trainer
        assert recipe.drafter is not None
        folder = find_folder(recipe.drafter)
        self.shape = read_drafter_shape(folder, shard.shape)
        self._shard, self._num_steps = shard, trainer.drafter_steps
        self._head: DrafterHead | None = None
        for chunk in shard.chunks:
            assert isinstance(chunk, PolicyModel)
            chunk.carrier = aux_states = AuxStates(chunk, self.shape.aux_layers)
            if chunk.post_process:
                target_ids = target_token_ids(folder, self.shape).to(shard.device)
                self._head = attach_drafter(chunk, self.shape, target_ids, aux_states, num_steps=self._num_steps)
                drafter: Any = chunk.drafter
                load_drafter(folder, self.shape, dict(drafter.named_parameters()))
        shard.update_feeds.append(DrafterFeed(self._head, self._num_steps, trainer.drafter_step_decay, shard.device))

    def prepare_update(self, rows: Sequence[TokenBatch]) -> None:
        copy_embedding_to_last_stage(self._shard.chunks)

    def extend_objective(self, objective: Objective, recipe: Recipe) -> Objective:
        """Return the objective plus the drafter's KL: weighted by token and by `trainer.drafter_step_decay` ** step.

        The last rows of the model's output are the KL of each step. Metric: `drafter/loss`.
        """

        def objective_and_drafter(output: Tensor, batch: Microbatch, numbers: StepNumbers) -> RowLoss:
            # The last rows of `output` are the drafter's losses, [steps, tokens].
            total, count, logged = objective(output[: -self._num_steps], batch, numbers)
            mask, weights = batch.per_token["drafter_mask"].T, batch.per_token["drafter_weights"].T
            losses = torch.where(mask, output[-self._num_steps :], 0.0)
            return total + (losses * weights).sum(), count, logged | {DRAFTER_LOSS: mean_of(losses, mask)}

        return objective_and_drafter


class DrafterRate:
    """Update rule with another learning rate for the drafter, on the policy's schedule."""

    def __init__(self, shard: ModelShard, config: OptimizerConfig) -> None:
        """Find the drafter's parameters, and compute their learning rates."""
        rate = shard.recipe.trainer.drafter_learning_rate
        assert rate is not None
        # The names of a stage with several chunks begin with the chunk's. Stages before the last have no such
        # parameters.
        self._parameters = {id(value) for name, value in shard.parameters.items() if PARAMETERS in name}
        # The schedule decays the drafter's rate by the same factor as the policy's.
        self._rates = {"max_lr": rate, "min_lr": rate * config.min_learning_rate / config.learning_rate}

    def param_group_overrides(self, settings: MegatronOptimizerConfig) -> Mapping[ParamKey, Any]:
        is_of_drafter = ParamPredicate("drafter", lambda parameter: id(parameter) in self._parameters)
        # Megatron-Core 0.16.1 identifies groups in a checkpoint by a few keys, such as `is_decoupled_lr`.
        overrides: Any = {"is_decoupled_lr": True, **self._rates}
        return {**get_standard_config_overrides(settings), ParamKey(predicate=is_of_drafter): overrides}

    def replace_adam(self, optimizer: ChainedOptimizer) -> None:
        """Do nothing: the drafter uses Megatron's optimizer."""
