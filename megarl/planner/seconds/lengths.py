"""Distribution of the lengths of sampled sequences: recorded in a run, or log-normal and cut at the limit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from megarl.report.samples import read_records
from megarl.tracking.run_record import RunRecord
from megarl.types import DataError

_NUM_QUANTILES = 512
SIGMA = 0.7
"""Standard deviation of the logarithm of lengths, if no run is named. Completions of reasoning models have 0.6 to 1."""
_ASSUMED_SHARE = 0.25
"""Mean length of completions divided by their limit, if neither a run nor a mean is known."""
_PROMPT_SHARE = 0.1
"""Mean length of prompts divided by data.max_prompt_tokens. Most prompts are far below their limit."""
_STEPS_READ = 8
"""Newest steps whose samples are read, because lengths drift during a run."""
_PROMPT_METRIC = "rollout/prompt_tokens/mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Completion lengths of samples, and the mean length of prompts, in tokens."""

    quantiles: NDArray[np.float64]
    """Quantiles of the lengths at equally spaced probabilities, ascending [quantiles]."""
    limit: int
    """Maximum tokens of a completion."""
    prompt_tokens: float
    source: str
    """Source of the lengths, for messages."""

    @property
    def mean(self) -> float:
        return float(self.quantiles.mean())

    @property
    def sequences(self) -> NDArray[np.float64]:
        return self.quantiles + self.prompt_tokens

    @property
    def mean_age(self) -> float:
        """The mean tokens already decoded by an active request, in an engine that always starts new requests.

        A request is active for a time proportional to its length, so long requests count more.
        """
        return float(np.square(self.quantiles).mean() / (2 * self.quantiles.mean()))

    def survival(self, tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the share of completions longer than each item of `tokens` [n]."""
        return 1 - np.searchsorted(self.quantiles, tokens, side="right") / len(self.quantiles)

    def longest(self, num_samples: float) -> float:
        """Return the expected tokens of the longest of `num_samples` completions.

        Beyond the last quantile, the logarithms of the lengths are extrapolated, up to the limit.
        """
        last_length = self.quantiles[-1]
        # The longest of n samples lies near the quantile of rank 1 - 0.5 / n (Hazen's plotting position).
        if num_samples <= len(self.quantiles):
            return float(np.quantile(self.quantiles, 1 - 0.5 / max(num_samples, 1)))
        normal = NormalDist()
        last_normal_quantile = normal.inv_cdf(1 - 0.5 / len(self.quantiles))
        log_deviation = float(np.log(np.maximum(self.quantiles, 1)).std())
        log_growth = log_deviation * (normal.inv_cdf(1 - 0.5 / num_samples) - last_normal_quantile)
        return float(min(self.limit, last_length * math.exp(log_growth)))


def log_normal(*, mean: float, limit: int, prompt_tokens: float, sigma: float = SIGMA) -> Lengths:
    """Return log-normal lengths cut at `limit` tokens. After the cut their mean is `mean`, at most 98 % of
    the limit.
    """
    mean = min(mean, 0.98 * limit)
    normal = NormalDist()
    quantile_ranks = (np.arange(_NUM_QUANTILES) + 0.5) / _NUM_QUANTILES
    lengths_of_median_1 = np.exp(sigma * np.array([normal.inv_cdf(rank) for rank in quantile_ranks]))
    # Find by bisection the median with which the mean after the cut is `mean`.
    low, high = math.log(1e-3), math.log(1e3 * limit)
    for _ in range(60):
        log_median = (low + high) / 2
        too_short = np.minimum(math.exp(log_median) * lengths_of_median_1, limit).mean() < mean
        low, high = (log_median, high) if too_short else (low, log_median)
    quantiles = np.clip(math.exp(low) * lengths_of_median_1, 1, limit)
    return Lengths(
        quantiles=quantiles,
        limit=limit,
        prompt_tokens=prompt_tokens,
        source=f"log-normal, mean {mean:,.0f}, at most {limit:,} tokens",
    )


def assumed_prompt_tokens(max_prompt_tokens: int) -> float:
    return max(1.0, _PROMPT_SHARE * max_prompt_tokens)


def assumed_lengths(*, limit: int, max_prompt_tokens: int) -> Lengths:
    """Lengths if only the limits of prompts and completions are known."""
    return log_normal(mean=_ASSUMED_SHARE * limit, limit=limit, prompt_tokens=assumed_prompt_tokens(max_prompt_tokens))


def recorded_lengths(tokens: Sequence[float], *, limit: int, prompt_tokens: float, source: str) -> Lengths:
    clipped_tokens = np.clip(np.asarray(tokens, np.float64), 1, limit)
    quantile_ranks = (np.arange(_NUM_QUANTILES) + 0.5) / _NUM_QUANTILES
    quantiles = np.asarray(np.quantile(clipped_tokens, quantile_ranks), np.float64)
    return Lengths(quantiles=quantiles, limit=limit, prompt_tokens=prompt_tokens, source=source)


def lengths_of_run(folder: Path, *, limit: int, prompt_tokens: float) -> Lengths:
    """Return the lengths of completions in the newest steps of a run's samples/.

    The mean length of prompts is the run's metric, else `prompt_tokens`. Raises ConfigError for a folder without a run,
    DataError if it has no samples.
    """
    run = RunRecord.open(folder)
    records = [record for step, path in run.sample_files[-_STEPS_READ:] for record in read_records(path, step)]
    logged_prompt_tokens = [
        row[_PROMPT_METRIC] for _, row in run.rows if math.isfinite(row.get(_PROMPT_METRIC, math.nan))
    ]
    prompt_tokens = logged_prompt_tokens[-1] if logged_prompt_tokens else prompt_tokens
    # A record of a validation set has the set's name.
    training_records = [record for record in records if "set" not in record]
    completion_tokens = [
        float(record["tokens"]) for record in training_records if isinstance(record.get("tokens"), int | float)
    ]
    if not completion_tokens:
        raise DataError(f"{folder}: has no samples with lengths in samples/; give a run with samples_every_steps")
    source = f"{len(completion_tokens):,} samples of {folder}"
    return recorded_lengths(completion_tokens, limit=limit, prompt_tokens=prompt_tokens, source=source)
