"""Sampling parameters of training and evaluation."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from megarl.config.section import Section

# vLLM 0.30 refuses a temperature above 2.
Temperature = Annotated[float, Field(ge=0.0, le=2.0)]
StopString = Annotated[str, Field(min_length=1)]


class SamplingConfig(Section):
    max_new_tokens: PositiveInt = 1024
    """Maximum length of a completion in tokens."""
    temperature: Temperature = 1.0
    """Sampling temperature, at most 2; that of the first step where it has a schedule; 0 is greedy. The trainer takes
    log-probs of a completion at the temperature that it was sampled at, however late it trains. Metric:
    rollout/temperature."""
    temperature_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the temperature goes from `temperature` to `end_temperature`; then it stays there."""
    end_temperature: Annotated[float, Field(gt=0.0, le=2.0)] = 1.0
    """Temperature from step `temperature_steps` on (linear, cosine)."""
    temperature_steps: PositiveInt | None = None
    """Step that is the first at `end_temperature` (linear, cosine); default: train.steps, the last."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus sampling (top-p); 1 keeps all tokens. In loop rl it is replayed: the engine records which tokens were
    kept, and log-probs and entropy of policy and reference are renormalised over them at the weights of each. (The
    reference's too: renormalised alone, the policy would have a KL to an equal reference.)"""
    top_k: NonNegativeInt = 0
    """Top-k sampling; 0 keeps all tokens. In loop rl it is replayed as top_p is."""
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Min-p sampling: keeps the tokens at least min_p times as probable as the most probable one, before top-p and
    top-k; 0 keeps all tokens. In loop rl it is replayed as top_p is."""
    stop: tuple[StopString, ...] = ()
    """Stop strings; they stay part of the completion."""
    stop_token_ids: tuple[NonNegativeInt, ...] = ()
    """Token ids that end a completion beside the model's own end of sequence; they stay part of it."""

    @property
    def is_truncated(self) -> bool:
        """Whether top-p, top-k or min-p cuts tokens off."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    def temperature_at(self, step: int, num_steps: int) -> float:
        """The temperature of a step, from 1, of a run of so many."""
        if self.temperature_schedule == "constant":
            return self.temperature
        last = self.temperature_steps or num_steps
        progress = min(1.0, (step - 1) / max(1, last - 1))
        if self.temperature_schedule == "cosine":
            progress = (1 - math.cos(math.pi * progress)) / 2
        return self.temperature + (self.end_temperature - self.temperature) * progress


class EvaluationSamplingConfig(Section):
    max_new_tokens: PositiveInt | None = None
    """Maximum length of a completion in tokens; default: that of `rollout.sampling`."""
    temperature: Temperature | None = None
    """Sampling temperature, at most 2; 0 is greedy. Default: 0 for one attempt at each problem, that of
    `rollout.sampling` for several (evaluation.samples_per_prompt)."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus sampling (top-p); 1 keeps all tokens."""
    top_k: NonNegativeInt = 0
    """Top-k sampling; 0 keeps all tokens."""
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Min-p sampling: keeps the tokens at least min_p times as probable as the most probable one; 0 keeps all."""
    repetition_penalty: PositiveFloat = 1.0
    """Divides the logits above zero of tokens that prompt or completion have already, and multiplies those below; 1:
    no penalty. In evaluation alone: it makes the distribution depend on the tokens before, which the trainer could not
    repeat."""
    stop: tuple[StopString, ...] | None = None
    """Stop strings; default: those of `rollout.sampling`."""
    stop_token_ids: tuple[NonNegativeInt, ...] | None = None
    """Token ids that end a completion; default: those of `rollout.sampling`."""
