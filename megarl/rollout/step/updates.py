"""Updates of critic and policy in a step.

If trainer and engine disagree too much (`train.max_logprob_gap`), the updates are skipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megarl.algorithms.importance import mismatch_metrics
from megarl.cluster.rank_model import RankModel
from megarl.config import Recipe
from megarl.data.token_batch import TokenBatch
from megarl.platform.spans import span
from megarl.rollout.step.rl_batch import RLBatch
from megarl.tracking.metric_rows import MetricRow
from megarl.tracking.metrics import Mean, Metric, merge, values
from megarl.tracking.outcomes import StepOutcome, Update

METRICS = (MetricRow("critic/NAME", "as train/NAME", "the training metric NAME of the critic"),)


class PolicyUpdates:
    """Updates of the policy in one step. Iterate over it for the minibatches, and `add` each update.

    The iteration stops as soon as the policy's log-probs differ too much from the engine's (train.max_logprob_gap).
    """

    def __init__(self, batch: RLBatch, recipe: Recipe, step: int, conversations: TokenBatch | None = None) -> None:
        """`conversations` are spread over the minibatches for an additional loss."""
        # A mismatch above the limit before the first update skips the whole step.
        self._excess = excess_mismatch(batch, recipe.logprob_gap_limit)
        self._minibatches = [] if self._excess is not None else batch.minibatches(recipe, step, conversations)
        self._samples_by_update = batch.samples_by_update(recipe, step)
        self._tokens_with_loss = batch.tokens_with_loss
        self._updates: list[Update] = []

    def __iter__(self) -> Iterator[TokenBatch]:
        for minibatch in self._minibatches:
            yield minibatch
            # Stop: the remaining minibatches would be trained with wrong ratios.
            if self._updates[-1].outcome.is_mismatch_exceeded:
                return

    def add_update(self, update: Update) -> None:
        self._updates.append(update)

    @property
    def trained_tokens(self) -> NDArray[np.int64]:
        """[samples]: number of each sample's tokens with a loss; 0 if no applied update had this sample."""
        is_trained = np.zeros(len(self._tokens_with_loss), bool)
        # Not all planned updates are made: `__iter__` stops after one above train.max_logprob_gap.
        for update, samples in zip(self._updates, self._samples_by_update, strict=False):
            is_trained[samples] |= update.outcome.applied
        return np.where(is_trained, self._tokens_with_loss, 0)

    def add_to(self, outcome: StepOutcome) -> None:
        outcome.add("policy", [update.outcome for update in self._updates])
        if self._excess is not None:
            outcome.excess_mismatch = self._excess.mean

    def metrics(self) -> dict[str, float]:
        """Return the metrics of all updates, or of the mismatch that prevented them."""
        with span("metrics"):
            excess = {} if self._excess is None else self._excess.metrics()
            return excess | update_metrics([update.metrics for update in self._updates])


async def update_critic(batch: RLBatch, critic: RankModel, recipe: Recipe, outcome: StepOutcome) -> dict[str, float]:
    """Update the critic on the batch's `returns`, and add the updates to `outcome`. Return metrics `critic/...`."""
    updates = [await critic.update(minibatch) for minibatch in batch.critic_minibatches(recipe)]
    outcome.add("critic", [update.outcome for update in updates])
    merged = values(merge_updates(update.metrics for update in updates))
    return {name.replace("train/", "critic/", 1): value for name, value in merged.items()}


def merge_updates(updates: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Merge the metrics of one model's updates in a step.

    An update's loss is a sum over its tokens. The step's loss is the mean over its updates.
    """
    return merge({**update, **_loss_of(update)} for update in updates)


def _loss_of(update: Mapping[str, Metric]) -> dict[str, Metric]:
    return {"train/loss": Mean(update["train/loss"].number)} if "train/loss" in update else {}


def update_metrics(updates: Sequence[Mapping[str, Metric]]) -> dict[str, float]:
    """Return the merged metrics of a step's updates, with `logprob_gap/`: the trainer's log-probs minus the engine's.

    Both are computed with the weights that sampled the token. In later updates of a step, and for trajectories of an
    earlier step, the trainer's log-prob is `old_logprobs`. `logprob_gap/measured` is the share of compared tokens. It
    is 1, except with algorithm.old_logprobs = rollout: then only tokens sampled in this step are compared.
    """
    metrics = values(merge_updates(updates))
    if len(updates) == 1:
        # `kl/update` is measured before the optimizer step, so with a single update it is always 0.
        metrics.pop("kl/update", None)
    mismatch = {
        name.removeprefix("logprob_gap/"): metrics.pop(name)
        for name in list(metrics)
        if name.startswith("logprob_gap/")
    }
    if "mean" in mismatch:
        metrics |= {f"logprob_gap/{name}": value for name, value in mismatch_metrics(mismatch).items()}
    unprefixed = ("max", "measured", "bit_equal")
    return metrics | {f"logprob_gap/{name}": mismatch[name] for name in unprefixed if name in mismatch}


def mismatch_before_update(batch: RLBatch) -> NDArray[np.float64] | None:
    """Return the distances of the trainer's and the engine's log-probs, in nats [trained tokens].

    None: only the update computes some of the trainer's log-probs.
    """
    old_logprobs = batch.per_token.get("old_logprobs")
    if old_logprobs is None:
        return None
    # float64: a batch has millions of tokens, and a float32 sum loses small differences.
    distances = np.abs(old_logprobs - batch.per_token["rollout_logprobs"])[batch.loss_mask].astype(np.float64)
    return None if not len(distances) or np.isnan(distances).any() else distances


class ExcessMismatch(NamedTuple):
    """A mismatch of trainer and engine log-probs too large for a step's updates, in nats."""

    mean: float
    max: float
    bit_equal: float
    """Share of equal log-probs."""

    def metrics(self) -> dict[str, float]:
        return {
            "train/gap_exceeded": 1.0,
            "logprob_gap/mean": self.mean,
            "logprob_gap/max": self.max,
            "logprob_gap/bit_equal": self.bit_equal,
        }


def excess_mismatch(batch: RLBatch, limit: float | None) -> ExcessMismatch | None:
    """Return the mismatch of engine and trainer if it prevents an update.

    None: the mismatch is at most `limit`, in nats, or not yet known.
    """
    if limit is None:
        return None
    distances = mismatch_before_update(batch)
    if distances is None or distances.mean() <= limit:
        return None
    return ExcessMismatch(float(distances.mean()), float(distances.max()), float((distances == 0).mean()))


def mismatch_exceeded_message(mismatch: float | None, limit: float | None, step: int) -> str | None:
    """Return the message for a step skipped because of a mismatch of engine and trainer; None: there was none.

    `mismatch` is `StepOutcome.excess_mismatch`, `limit` the recipe's limit, both in nats.
    """
    # A resume may remove the limit before the skipped step is logged.
    if limit is None or mismatch is None:
        return None
    if limit == 0:
        return (
            f"trainer.exact = True: the trainer's log-probs of step {step} were {mismatch:.3g} nats "
            "from the engine's on average, and not equal, so updates were skipped. `tools/check.py exact_operators "
            "--model FOLDER` compares both operator by operator. trainer.exact=false goes on without this requirement"
        )
    return (
        f"train.max_logprob_gap = {limit:g}: the trainer's log-probs of step {step} were "
        f"{mismatch:.3g} nats from the engine's on average, so updates were skipped. Look for the "
        "cause in rollout.vllm, model.dtype and logprob_gap/ of earlier steps; or raise the limit"
    )
