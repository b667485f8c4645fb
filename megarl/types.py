"""Types that driver and workers exchange: requests, completions, trajectories, sequences, errors.

They are plain data (tuples, numpy arrays), small enough for a control connection. Arrays of a sequence are indexed by
the predicted token: entry t of a log-prob, weight or advantage belongs to predicting token t from the tokens before it,
so entry 0 is never trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FinishReason = Literal["stop", "length", "abort", "error"]
Ended = Literal["done", "length", "turns", "calls", "invalid_calls", "seconds", "error"]
"""Why a trajectory ended: the environment was done; the limit of tokens, of turns, of tool calls, of invalid calls in a
row or of time was reached; the environment raised or hung, or the engine refused a request."""


class MegarlError(Exception):
    """An error for the user: one message with field or file, value and remedy; `exit_code` is the process's."""

    exit_code = 70


class ConfigError(MegarlError):
    """The recipe cannot be run as it is written."""

    exit_code = 2


class DataError(MegarlError):
    """A data file or model folder is missing, broken or does not fit."""

    exit_code = 65


class RunFolderLockedError(MegarlError):
    """Another run owns the run folder."""

    exit_code = 73


class StorageError(MegarlError):
    """A file or folder cannot be read or written: permissions, a broken disk, a lost file system."""

    exit_code = 74


class DiskFullError(StorageError):
    """A file system is full."""


class StoppedError(MegarlError):
    """The run was asked to stop, saved and stopped; --resume continues it."""

    exit_code = 75


class UnhealthyError(MegarlError):
    """A rule of `tracking.health` was broken under train.on_unhealthy stop; the run saved and ended."""

    exit_code = 79


class EndedError(MegarlError):
    """The run was stopped by a signal, without a save."""

    exit_code = 130


class PeerLostError(MegarlError):
    """A worker, an engine or a reward process died or does not answer."""

    exit_code = 76


@dataclass(frozen=True, slots=True)
class Problem:
    """A record of an RL data set, with its prompt rendered to tokens.

    `index` is its index in the data (the same in every epoch), `answer` the gold answer, a text or another JSON value,
    `record` the parsed line.
    """

    index: int
    messages: tuple[Mapping[str, Any], ...]
    prompt_token_ids: tuple[int, ...]
    answer: Any
    record: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    """The source that it is from, by its name in the recipe's mixture; without one, the name of the environment."""


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """Sampling parameters of a completion.

    `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 disable truncation. A `repetition_penalty` other than
    1 is for completions that are not trained on.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A completion to sample from exactly these prompt tokens, int32 [prompt], with a seed of its own.

    The last `num_kept` tokens of the prompt are the beginning of the completion, sampled before it was parked: a stop
    string may begin in them.
    """

    request_id: str
    prompt_token_ids: NDArray[np.int32]
    sampling: SamplingSettings
    seed: int
    num_kept: int = 0


class ExpertsHandle(NamedTuple):
    """A handle of the routed experts of a completion, which stay on the rank that sampled it, under a number."""

    rank: int
    number: int


@dataclass(frozen=True, slots=True)
class KeptSets:
    """The tokens that top-p, top-k and min-p left to sample from, for each token of a completion, sequence or batch.

    `counts` int32 [tokens] are the sizes of the sets, 0 where nothing was cut off or nothing was sampled; `token_ids`
    int32 [sum of counts] the sets, one after the other.
    """

    counts: NDArray[np.int32]
    token_ids: NDArray[np.int32]

    @property
    def nbytes(self) -> int:
        return self.counts.nbytes + self.token_ids.nbytes


@dataclass(frozen=True, slots=True)
class Completion:
    """The completion of a request.

    Shapes: `token_ids`, `rollout_logprobs` and `weight_versions` are [new_tokens]; log-probs, in nats, are those of the
    sampled tokens under the sampling distribution (after temperature, min-p, top-p and top-k). The end-of-sequence
    token, if sampled, is the last token. `weight_versions` are the numbers of reshards before a token was sampled; they
    differ where the completion was parked over a reshard. `kept_sets`, where these cut anything off in training, are
    those of the new tokens. `routed_experts`, if requested, are those of every token that the model read: prompt and
    new tokens but the last. A refused request has no tokens, the finish reason `error`, and the engine's message in
    `error`.
    """

    request_id: str
    token_ids: NDArray[np.int64]
    rollout_logprobs: NDArray[np.float32]
    finish_reason: FinishReason
    weight_versions: NDArray[np.int32]
    routed_experts: ExpertsHandle | None = None
    kept_sets: KeptSets | None = None
    error: str | None = None
    num_cached: int = 0
    """Tokens of the prompt whose keys and values the engine had in its prefix cache."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool that a completion makes. One that cannot be carried out has no arguments, and an `error`.

    `id` names the call in the messages that answer it; each call gets exactly one answer.
    """

    id: str
    name: str
    arguments: Mapping[str, Any] | None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Reward:
    """The reward of a completion: the score that is trained on, and two flags whose rates are logged.

    A reward function returns one, with the first three fields and perhaps `metrics`; the sum over functions has each
    one's own score too, and their metrics as FUNCTION/NAME. `answer_correct` None: nothing judged the answer.
    """

    score: float
    format_valid: bool
    answer_correct: bool | None
    scores: Mapping[str, float | None] = field(default_factory=dict)
    """Score of each function by its name in metrics, without its weight; None where it has no opinion."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """A function's own numbers, each logged as reward/FUNCTION/NAME: its mean over the samples that have it."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A sequence of a trajectory's tokens: prompt, completions and the observations between them.

    All arrays are [tokens]. `loss_mask` is True where a token was sampled, and not in an earlier segment, of which this
    one begins with a copy. `weight_versions` are the numbers of reshards before a token was sampled, `turns` the index
    of the model call that sampled it.
    """

    token_ids: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    rollout_logprobs: NDArray[np.float32]
    """Log-probs of the sampled tokens under the sampling distribution, in nats; 0 elsewhere."""
    weight_versions: NDArray[np.int32]
    """-1 where not trained."""
    turns: NDArray[np.int16]
    """-1 where not trained."""
    old_logprobs: NDArray[np.float32] | None = None
    """The trainer's log-probs under the weights that sampled, in nats; 0 where not sampled; None: not computed."""
    entropies: NDArray[np.float32] | None = None
    """The trainer's entropies under the weights that sampled, in nats; 0 where not sampled; None: not computed."""
    routed_experts: ExpertsHandle | None = None
    """Those of the segment's last completion, whose prompt is the rest of the segment: so of all tokens."""
    kept_sets: KeptSets | None = None
    """The sets that the tokens were sampled from, where top-p, top-k or min-p cut anything off."""

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Trajectory:
    """An attempt at a problem: sampled segments and their reward.

    `group` is the index of the prompt in the step, `number` that of the attempt in its group. `turn_rewards` are pairs
    of the model call's index and its reward, `metrics` the environment's own.
    """

    environment: str
    problem: Problem
    group: int
    number: int
    segments: tuple[Segment, ...]
    reward: Reward | None
    """None: not scored; then it is left out of its group's statistics, and its tokens are not trained."""
    failure: str | None = None
    """Why the reward functions gave no reward, `error`, `timeout` or `parse_error` (`reward` is zero or None then); or
    the error that ended the attempt: its kind, a colon and its text."""
    texts: tuple[str, ...] = ()
    """The completions as text, without special tokens, one for each model call."""
    messages: tuple[tuple[Mapping[str, Any], ...], ...] = ()
    """The messages that were new before each completion, and those after the last: JSON values, for people to read.
    The first are the prompt; of one that does not go on from the completion before, all that it answers."""
    ended: Ended = "done"
    turn_rewards: tuple[tuple[int, float], ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    restarts: int = 0
    """How often the attempt was begun anew, since the environment could not be had."""
    temperature: float = 1.0
    """The temperature that all of its tokens were sampled at."""
    engine_seconds: float = 0.0
    """How long its completions were waited for, but for the time in which the engines were held."""
    environment_seconds: float = 0.0
    """How long its environment was waited for, tools and the wait for a free process included; of an agent's attempt
    the time in which no completion was waited for."""

    @property
    def text(self) -> str:
        """The completions as text, an empty line between two."""
        return "\n\n".join(self.texts)

    @property
    def first_prompt(self) -> NDArray[np.int64] | None:
        """Tokens of the first model call's prompt, [tokens]; None where nothing was sampled."""
        if not self.segments or not self.segments[0].loss_mask.any():
            return None
        first = self.segments[0]
        return first.token_ids[: int(first.loss_mask.argmax())]

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens."""
        return sum(int(segment.loss_mask.sum()) for segment in self.segments)

    @property
    def num_observed(self) -> int:
        """Number of tokens between two completions: what environment and tools said, as the chat template writes it.

        What a segment begins with is not among them, in a fork neither: there it is not told from the history.
        """
        places = [segment.loss_mask.nonzero()[0] for segment in self.segments]
        return sum(int(found[-1] - found[0]) + 1 - len(found) for found in places if len(found))

    @property
    def num_turns(self) -> int:
        """Number of completions, one per model call."""
        return max((int(segment.turns.max()) + 1 for segment in self.segments), default=0)

    @property
    def turn_tokens(self) -> list[int]:
        """Number of tokens of each completion that has any."""
        turns = [segment.turns[segment.loss_mask].tolist() for segment in self.segments]
        return list(Counter(turn for of_segment in turns for turn in of_segment).values())

    @property
    def oldest_version(self) -> int:
        """The weight version of the oldest sampled token. Raises ValueError if none was sampled."""
        sampled = [segment.weight_versions[segment.loss_mask] for segment in self.segments]
        return min(int(versions.min()) for versions in sampled if len(versions))

    def record(self) -> dict[str, object]:
        """The trajectory as a JSON object of the run folder's samples/.

        One of several turns has them in `turns`, in place of `completion`: of each its completion, its reward, the
        messages that answered it.
        """
        rewards = dict(self.turn_rewards)
        observations = dict(enumerate(self.messages[1:]))
        turns = [
            {"completion": text, "reward": rewards.get(number), "observation": observations.get(number, ())}
            for number, text in enumerate(self.texts)
        ]
        has_turns = len(turns) > 1 or (len(turns) == 1 and any(observations.values()))
        return {
            "source": self.environment,
            "problem": self.problem.index,
            "prompt": next(iter(self.messages), ()) or self.problem.messages,
            **({"turns": turns} if has_turns else {"completion": self.text}),
            "answer": self.problem.answer,
            "reward": self.reward and self.reward.score,
            "reward_failure": self.failure,
            "answer_correct": self.reward and self.reward.answer_correct,
            "format_valid": self.reward and self.reward.format_valid,
            "finish_reason": "stop" if self.ended == "done" else self.ended,
            "tokens": self.num_sampled,
        }


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """A sequence to train on, with optional values per token (indexed as the module docstring says).

    All arrays are [tokens]; `loss_mask` is True where a token's prediction is trained. `token_weights` are the
    weights of the global batch (`algorithms.reduction.token_weights`), zero where the mask is False.
    """

    token_ids: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    token_weights: NDArray[np.float32] | None = None
    advantages: NDArray[np.float32] | None = None
    old_logprobs: NDArray[np.float32] | None = None
    """Denominator of the policy ratio, in nats. NaN, or None for all: log-probs of the update's own forward pass."""
    rollout_logprobs: NDArray[np.float32] | None = None
    """The engine's log-probs. NaN where the trainer's log-probs under the same weights are not available."""
    reference_logprobs: NDArray[np.float32] | None = None
    importance_weights: NDArray[np.float32] | None = None
    """Factors of the policy loss: importance-sampling weights between trainer and engine (`algorithms.importance`);
    zero where only tokens of higher entropy learn from the reward (`algorithms.entropy_share`)."""
    values: NDArray[np.float32] | None = None
    """The critic's values before the update, of the state before each token."""
    returns: NDArray[np.float32] | None = None
    """Returns: the targets of the critic's values."""
    desirable: NDArray[np.float32] | None = None
    """1 on the trained tokens of desirable answers (KTO), else 0."""
    supervised: NDArray[np.float32] | None = None
    """1 on tokens that are trained by likelihood beside the policy loss (ptx), else 0."""
    kept_sets: KeptSets | None = None
    """The sets that log-probs are renormalised over; None: all of them over the whole vocabulary."""
    temperature: float = 1.0
    """The temperature that log-probs are taken at."""

    def __len__(self) -> int:
        return len(self.token_ids)


PER_TOKEN = (
    "token_weights", "advantages", "old_logprobs", "rollout_logprobs", "reference_logprobs", "importance_weights",
    "values", "returns", "desirable", "supervised",
)  # fmt: skip
"""The optional arrays [tokens] of a TrainingSequence."""
