"""Recipe sections `rollout.sampling` and `evaluation.sampling`: sampling parameters."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from megarl.config.annotations import Decides, OnlyIf
from megarl.config.conditions import MOVING_TEMPERATURE, NOT_GREEDY, ON_POLICY
from megarl.config.section import Section

# vLLM 0.30 refuses a temperature above 2.
Temperature = Annotated[float, Field(ge=0.0, le=2.0)]
StopString = Annotated[str, Field(min_length=1)]


class SamplingConfig(Section):
    """Sampling parameters for training data."""

    max_new_tokens: Annotated[PositiveInt, Decides(vllm="max_model_len")] = 1024
    """Maximum length of a completion in tokens."""
    temperature: Annotated[Temperature, OnlyIf(ON_POLICY)] = 1.0
    """Sampling temperature, at most 2; 0: greedy. With temperature_schedule: the temperature of the first step. The
    trainer computes log-probs at the same temperature. Metric: rollout/temperature."""
    temperature_schedule: Annotated[Literal["constant", "linear", "cosine"], OnlyIf(ON_POLICY)] = "constant"
    """Schedule from `temperature` to `end_temperature`: constant (default), linear or cosine over temperature_steps.
    Later steps stay at end_temperature."""
    end_temperature: Annotated[float, Field(gt=0.0, le=2.0), OnlyIf(ON_POLICY, MOVING_TEMPERATURE)] = 1.0
    """Temperature from step `temperature_steps` on (temperature_schedule linear, cosine)."""
    temperature_steps: Annotated[PositiveInt | None, OnlyIf(ON_POLICY, MOVING_TEMPERATURE)] = None
    """Number of the step that reaches end_temperature (temperature_schedule linear, cosine). Default: train.steps."""
    # The reference is renormalised too. Otherwise a policy equal to its reference would have a KL above 0.
    top_p: Annotated[float, Field(gt=0.0, le=1.0), OnlyIf(ON_POLICY), Decides(vllm="return_sampling_mask")] = 1.0
    """Nucleus sampling (top-p). 1 (default): all tokens. In loop rl the engine records the remaining tokens, and
    log-probs and entropies of policy and reference are normalised over them."""
    top_k: Annotated[NonNegativeInt, OnlyIf(ON_POLICY), Decides(vllm="return_sampling_mask")] = 0
    """Top-k sampling. 0 (default): all tokens. In loop rl, log-probs are normalised over the remaining tokens, as with
    top_p."""
    min_p: Annotated[float, Field(ge=0.0, le=1.0), OnlyIf(ON_POLICY), Decides(vllm="return_sampling_mask")] = 0.0
    """Min-p sampling: drop tokens less probable than min_p times the most probable token, before top-p and top-k. 0
    (default): all tokens. In loop rl, log-probs are normalised over the remaining tokens, as with top_p."""
    stop: tuple[StopString, ...] = ()
    """Stop strings. A completion ends after the first of them, which it keeps."""
    stop_token_ids: tuple[NonNegativeInt, ...] = ()
    """Ids of tokens that end a completion, in addition to the model's end-of-sequence tokens and the chat template's
    ends of turns. The completion keeps the token."""

    @property
    def is_truncated(self) -> bool:
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    def temperature_at(self, step: int, num_steps: int) -> float:
        """Return the temperature of a step (counted from 1) in a run of `num_steps` steps."""
        if self.temperature_schedule == "constant":
            return self.temperature
        last_step = self.temperature_steps or num_steps
        # Step 1 has `temperature`, and step `last_step` has `end_temperature`. max avoids a division by zero if
        # `last_step` is 1.
        progress = min(1.0, (step - 1) / max(1, last_step - 1))
        if self.temperature_schedule == "cosine":
            progress = (1 - math.cos(math.pi * progress)) / 2
        return self.temperature + (self.end_temperature - self.temperature) * progress


class EvaluationSamplingConfig(Section):
    """Sampling parameters of evaluation."""

    max_new_tokens: PositiveInt | None = None
    """Maximum length of a completion in tokens, in evaluations. Default: rollout.sampling.max_new_tokens."""
    temperature: Temperature | None = None
    """Sampling temperature in evaluations, at most 2; 0: greedy. Default: 0 with one attempt per problem, else
    rollout.sampling.temperature (see evaluation.samples_per_prompt)."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0), OnlyIf(NOT_GREEDY)] = 1.0
    """Nucleus sampling (top-p) in evaluations. 1 (default): all tokens."""
    top_k: Annotated[NonNegativeInt, OnlyIf(NOT_GREEDY)] = 0
    """Top-k sampling in evaluations. 0 (default): all tokens."""
    min_p: Annotated[float, Field(ge=0.0, le=1.0), OnlyIf(NOT_GREEDY)] = 0.0
    """Min-p sampling in evaluations: drop tokens less probable than min_p times the most probable token. 0 (default):
    all tokens."""
    # The penalty makes the distribution depend on earlier tokens, and the trainer could not repeat that in training.
    repetition_penalty: PositiveFloat = 1.0
    """Repetition penalty in evaluations: positive logits of tokens in the prompt or completion so far are divided by
    it, negative ones multiplied. 1 (default): none."""
    stop: tuple[StopString, ...] | None = None
    """Stop strings in evaluations. Default: rollout.sampling.stop."""
    stop_token_ids: tuple[NonNegativeInt, ...] | None = None
    """Ids of tokens that end a completion in evaluations. Default: rollout.sampling.stop_token_ids."""
