"""Recipe sections `rollout.sampling` and `evaluation.sampling`: sampling parameters."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from megarl.config.annotations import Decides, Foreign, OnlyIf
from megarl.config.conditions import MOVING_TEMPERATURE, ON_POLICY
from megarl.config.section import Section

# vLLM 0.30 refuses a temperature above 2.
Temperature = Annotated[float, Field(ge=0.0, le=2.0)]
StopString = Annotated[str, Field(min_length=1)]


class SamplingConfig(Section):
    """Sampling parameters for training data."""

    max_new_tokens: Annotated[PositiveInt, Decides(vllm="max_model_len"),
        Foreign("max_response_length generate_max_len max_generation_length response_length",
            "train_sampling_params.max_new_tokens", ColossalChat="--max_seq_len", verl="data.max_response_length",
            slime="--rollout-max-response-len", TRL="max_completion_length"),
        Foreign(example="3584", short="mnt", ColossalRL="--max-new-tokens")] = 1024  # fmt: skip
    """Maximum length of a completion in tokens."""
    temperature: Annotated[Temperature, OnlyIf(ON_POLICY),
        Foreign("train_sampling_params.temperature temp_scheduler.start_temperature",
            RL2="rollout.train_sampling_params.temperature"),
        Foreign(example="0.8", slime="--rollout-temperature"),
        Foreign(remark="log-probs are taken at it too", short="temp", ColossalRL="--temperature",
            verl="actor_rollout_ref.rollout.temperature", TRL="temperature")] = 1.0  # fmt: skip
    """Sampling temperature, at most 2; 0: greedy. With temperature_schedule: the temperature of the first step. The
    trainer computes log-probs at the temperature of the sampling. Metric: rollout/temperature."""
    temperature_schedule: Annotated[Literal["constant", "linear", "cosine"], OnlyIf(ON_POLICY),
        Foreign("temp_scheduler temp_scheduler.type temperature_anneal")] = "constant"  # fmt: skip
    """Schedule from `temperature` to `end_temperature` over the steps: constant (default), linear or cosine. Afterwards
    the temperature stays."""
    end_temperature: Annotated[float, Field(gt=0.0, le=2.0), OnlyIf(ON_POLICY, MOVING_TEMPERATURE),
        Foreign("temp_scheduler.end_temperature")] = 1.0  # fmt: skip
    """Temperature from step `temperature_steps` on (temperature_schedule linear, cosine)."""
    temperature_steps: Annotated[PositiveInt | None, OnlyIf(ON_POLICY, MOVING_TEMPERATURE),
        Foreign("temp_scheduler.total_steps")] = None  # fmt: skip
    """Number of the step that reaches end_temperature (temperature_schedule linear, cosine). Default: train.steps, the
    last step."""
    # The reference is renormalised too. Otherwise a policy equal to its reference would have a KL above 0.
    top_p: Annotated[float, Field(gt=0.0, le=1.0), OnlyIf(ON_POLICY), Decides(vllm="return_sampling_mask"),
        Foreign("train_sampling_params.top_p rollout_top_p", remark="replayed by the trainer", example="0.95",
            short="topp", ColossalRL="--top-p", TRL="top_p")] = 1.0  # fmt: skip
    """Nucleus sampling (top-p). 1 (default): all tokens. In loop rl the engine records the tokens that remain, and
    log-probs and entropies of policy and reference are normalised over them."""
    top_k: Annotated[NonNegativeInt, OnlyIf(ON_POLICY), Decides(vllm="return_sampling_mask"),
        Foreign("train_sampling_params.top_k rollout_top_k", remark="replayed by the trainer; 0 keeps all tokens",
            example="50", short="topk", ColossalRL="--top-k", TRL="top_k")] = 0  # fmt: skip
    """Top-k sampling. 0 (default): all tokens. In loop rl, log-probs are normalised over the remaining tokens, as with
    top_p."""
    min_p: Annotated[float, Field(ge=0.0, le=1.0), OnlyIf(ON_POLICY), Decides(vllm="return_sampling_mask"),
        Foreign("rollout_min_p", remark="replayed by the trainer", example="0.05", TRL="min_p")] = 0.0  # fmt: skip
    """Min-p sampling: drop tokens less probable than min_p times the most probable token, before top-p and top-k. 0
    (default): all tokens. In loop rl, log-probs are normalised over the remaining tokens, as with top_p."""
    stop: Annotated[tuple[StopString, ...], Foreign("rollout_stop stop_strings")] = ()
    """Stop strings: a completion ends after one of them. The completion keeps the string."""
    stop_token_ids: Annotated[tuple[NonNegativeInt, ...], Foreign("rollout_stop_token_ids")] = ()
    """Ids of tokens that end a completion, in addition to the model's end-of-sequence tokens and the chat template's
    ends of turns. The completion keeps the token."""

    @property
    def is_truncated(self) -> bool:
        """Return whether top-p, top-k or min-p excludes some tokens from sampling."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    def temperature_at(self, step: int, num_steps: int) -> float:
        """Return the temperature of a step (counted from 1) in a run of `num_steps` steps."""
        if self.temperature_schedule == "constant":
            return self.temperature
        last = self.temperature_steps or num_steps
        # Step 1 has `temperature` and step `last` has `end_temperature`; max avoids a division by zero for last = 1.
        progress = min(1.0, (step - 1) / max(1, last - 1))
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
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus sampling (top-p) in evaluations. 1 (default): all tokens."""
    top_k: NonNegativeInt = 0
    """Top-k sampling in evaluations. 0 (default): all tokens."""
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Min-p sampling in evaluations: drop tokens less probable than min_p times the most probable token. 0 (default):
    all tokens."""
    # The penalty makes the distribution depend on earlier tokens, and the trainer could not repeat that in training.
    repetition_penalty: Annotated[PositiveFloat,
        Foreign("repetition_penalty",
            note="in evaluations only: the trainer could not repeat a distribution depending on earlier tokens",
            example="1.1", TRL="repetition_penalty")] = 1.0  # fmt: skip
    """Repetition penalty in evaluations, for tokens in the prompt or completion so far: divides positive logits,
    multiplies negative ones. 1 (default): none."""
    stop: tuple[StopString, ...] | None = None
    """Stop strings in evaluations. Default: rollout.sampling.stop."""
    stop_token_ids: tuple[NonNegativeInt, ...] | None = None
    """Ids of tokens that end a completion in evaluations. Default: rollout.sampling.stop_token_ids."""
