"""Training of an EAGLE-3 drafter from the policy's hidden states (arXiv 2503.01840): its loss and learning rate."""

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
from megarl.families.eagle3 import read_drafter_shape
from megarl.files.model_folder import find_folder
from megarl.models.drafter import PREFIX, DrafterHead, DrafterRow, attach_drafter
from megarl.tracking.metric_rows import MetricRow
from megarl.training.model import ModelShard
from megarl.training.objective import Objective, RowLoss, StepNumbers
from megarl.training.parts.engine_part import EnginePart
from megarl.training.rows.feeds import RowFeed
from megarl.training.rows.metrics import Signal, mean_of
from megarl.training.rows.microbatch import Microbatch, is_predicted, places_in_row

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
"""The loss of the drafter."""


class DrafterFeed(RowFeed):
    """Gives the drafter the whole rows, and its loss the weights of the tokens that it predicts.

    Step k at position t predicts the sequence's token t + 2 + k. Each microbatch gets the arrays `drafter_mask`, False
    where this token is not trained, and `drafter_weights`, zero there: [tokens, steps] each.
    """

    def __init__(self, head: DrafterHead, num_steps: int, step_decay: float, device: torch.device) -> None:
        self._head, self._num_steps, self._step_decay, self._device = head, num_steps, step_decay, device

    def fetch(self, rows: Sequence[TokenBatch], batches: Sequence[Microbatch]) -> Sequence[DrafterRow]:
        """Return the whole row of each microbatch."""
        return [self._add_weights(row, batch) for row, batch in zip(rows, batches, strict=True)]

    def _add_weights(self, row: TokenBatch, batch: Microbatch) -> DrafterRow:
        """Give a microbatch its mask and weights. Returns its row."""
        assert batch.row.host_local is not None
        num_places = int(batch.padded.sum())
        places = places_in_row(batch.lengths, batch.padded)
        tokens, weights = np.zeros(num_places, np.int64), np.zeros(num_places, np.float32)
        is_trained = np.zeros(num_places, np.bool_)
        tokens[places] = row.token_ids
        is_trained[places] = row.loss_mask & is_predicted(row.cu_seqlens)
        weights[places] = row.per_token["token_weights"]
        starts = np.repeat(batch.padded.cumsum() - batch.padded, batch.padded)
        mask = np.zeros((num_places, self._num_steps), np.bool_)
        for step in range(self._num_steps):
            predicted = np.arange(num_places) + 2 + step
            inside = np.minimum(predicted, num_places - 1)
            # The last positions of a sequence would predict tokens of the next one.
            mask[:, step] = (predicted < num_places) & (starts[inside] == starts) & is_trained[inside]
        decays = self._step_decay ** np.arange(self._num_steps, dtype=np.float32)
        ahead = np.minimum(np.arange(num_places)[:, None] + 2 + np.arange(self._num_steps), num_places - 1)
        step_weights = np.where(mask, weights[ahead] * decays, 0.0).astype(np.float32)
        local = batch.row.host_local
        batch.per_token["drafter_mask"] = torch.from_numpy(mask[local]).to(self._device)
        batch.per_token["drafter_weights"] = torch.from_numpy(step_weights[local]).to(self._device)
        return DrafterRow(torch.from_numpy(tokens).to(self._device), starts)

    def apply(self, chunk: torch.nn.Module, values: DrafterRow) -> None:
        self._head.row = values


class DrafterPart(EnginePart):
    """The drafter of the engines, in the policy's only pipeline stage. It must be the last part with a loss.

    It begins with the weights in its folder. Its gradient does not change how the policy's is clipped, and is scaled by
    the policy's clipping.
    """

    def __init__(self, shard: ModelShard) -> None:
        recipe, trainer = shard.recipe, shard.recipe.trainer
        assert recipe.drafter is not None
        folder = find_folder(recipe.drafter)
        self.shape = read_drafter_shape(folder, shard.shape)
        chunk: Any = shard.chunks[-1]
        target_ids = target_token_ids(folder, self.shape).to(shard.device)
        head = attach_drafter(chunk, self.shape, target_ids, num_steps=trainer.drafter_steps)
        load_drafter(folder, self.shape, dict(chunk.drafter.named_parameters()))
        self._num_steps = trainer.drafter_steps
        shard.update_feeds.append(DrafterFeed(head, self._num_steps, trainer.drafter_step_decay, shard.device))

    def extend_objective(self, objective: Objective, recipe: Recipe) -> Objective:
        """Return the objective with the drafter's loss added: the sum of its KL, by the token weights of the policy's
        loss and `trainer.drafter_step_decay` to the power of the step.

        The KL of each step are the last rows of the model's output. Metric: `drafter/loss`.
        """

        def objective_and_drafter(output: Tensor, batch: Microbatch, numbers: StepNumbers) -> RowLoss:
            # The last rows of `output` are the drafter's losses, [steps, tokens].
            total, count, logged = objective(output[: -self._num_steps], batch, numbers)
            mask, weights = batch.per_token["drafter_mask"].T, batch.per_token["drafter_weights"].T
            losses = torch.where(mask, output[-self._num_steps :], 0.0)
            return total + (losses * weights).sum(), count, logged | {DRAFTER_LOSS: mean_of(losses, mask)}

        return objective_and_drafter


class DrafterRate:
    """The policy's optimizer for all parameters, with a learning rate of the drafter's own on the policy's schedule."""

    def __init__(self, shard: ModelShard, config: OptimizerConfig) -> None:
        rate = shard.recipe.trainer.drafter_learning_rate
        assert rate is not None
        self._parameters = {id(value) for name, value in shard.parameters.items() if name.startswith(PREFIX)}
        # The schedule decays the drafter's rate by the same factor as the policy's.
        self._rates = {"max_lr": rate, "min_lr": rate * config.min_learning_rate / config.learning_rate}

    def param_group_overrides(self, settings: MegatronOptimizerConfig) -> Mapping[ParamKey, Any]:
        is_drafters = ParamPredicate("drafter", lambda parameter: id(parameter) in self._parameters)
        # Megatron-Core 0.16.1 identifies groups in a checkpoint by a few keys; the first of these is one of them.
        overrides: Any = {"is_decoupled_lr": True, **self._rates}
        return {**get_standard_config_overrides(settings), ParamKey(predicate=is_drafters): overrides}

    def replace_adam(self, optimizer: ChainedOptimizer) -> None:
        """Keep the optimizer that Megatron built."""
