"""The vocabulary that driver and workers exchange: requests, completions, sequences.

All of it is plain data (tuples, numpy arrays), small enough to travel over a control connection.
Arrays of a sequence are indexed by the token they speak of: entry t of a log-prob, weight or advantage belongs
to predicting token t from the tokens before it, so entry 0 is never trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FinishReason = Literal["stop", "length", "abort", "error"]
Ended = Literal["done", "length", "turns", "error"]
"""Why a trajectory has no further turn: its environment was done; the limit of tokens or of turns was met; the
environment raised or the engine refused its request."""


class MegarlError(Exception):
    """An error for the person at the terminal: one message that names field or file, value and remedy."""

    exit_code = 70


class ConfigError(MegarlError):
    """The recipe cannot be run as written."""

    exit_code = 2


class DataError(MegarlError):
    """A data file or model folder is missing, broken or does not fit."""

    exit_code = 65


class RunFolderLockedError(MegarlError):
    """Another run owns the run folder."""

    exit_code = 73


class StorageError(MegarlError):
    """A file or folder cannot be read or written: no permission, a broken disk, a file system that went away."""

    exit_code = 74


class DiskFullError(StorageError):
    """A file system has no room for what is to be written."""


class StoppedError(MegarlError):
    """The run was asked to stop and did; started again with --resume it goes on."""

    exit_code = 75


class EndedError(MegarlError):
    """The run was ended from outside without a save."""

    exit_code = 130


class PeerLostError(MegarlError):
    """A worker, an engine or a reward process died or stopped answering."""

    exit_code = 76


@dataclass(frozen=True, slots=True)
class Problem:
    """One line of an RL data set, rendered to prompt tokens.

    `index` is its place in the file (stable over epochs), `answer` the gold answer, `record` the line as read.
    """

    index: int
    messages: tuple[Mapping[str, Any], ...]
    prompt_token_ids: tuple[int, ...]
    answer: str
    record: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How to sample one completion. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 keep the whole vocabulary."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One completion to sample, from exactly these prompt tokens [prompt], with a seed of its own."""

    request_id: str
    prompt_token_ids: NDArray[np.int32]
    sampling: SamplingSettings
    seed: int


class ExpertsHandle(NamedTuple):
    """Where the experts are that an engine chose for a completion: with the rank that sampled it, under a number."""

    rank: int
    number: int


@dataclass(frozen=True, slots=True)
class Completion:
    """What the engine sampled for one request.

    Shapes: `token_ids` and `rollout_logprobs` are [new_tokens]; log-probs are those of the sampled tokens under the
    sampling distribution (after temperature). The end-of-sequence token, if sampled, is the last token.
    `weight_version` counts the reshards the engine had seen when the completion began. `routed_experts`, if asked for,
    are those of every token that went through the model: prompt and new tokens but the last. A request that the engine
    refused has no tokens, the finish reason `error`, and why in `error`.
    """

    request_id: str
    token_ids: NDArray[np.int64]
    rollout_logprobs: NDArray[np.float32]
    finish_reason: FinishReason
    weight_version: int
    routed_experts: ExpertsHandle | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Reward:
    """A completion's reward: the score that is trained on, and two flags whose rates are logged.

    A reward function returns one, with the first three fields; the sum over functions has each one's own score too.
    """

    score: float
    format_valid: bool
    answer_correct: bool
    scores: Mapping[str, float | None] = field(default_factory=dict)
    """Score of each function by its name in metrics, without its weight; None where it has no opinion."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens of a trajectory that one forward pass reads: prompt, completions and what was observed between them.

    All arrays are [tokens]. `loss_mask` is True where a token was sampled. `weight_versions` are the reshards that the
    engine had seen when a token's completion began, `turns` the number of the model call that sampled it, from 0.
    """

    token_ids: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    rollout_logprobs: NDArray[np.float32]
    """Of the sampled tokens under the distribution that sampled them, in nats; 0 elsewhere."""
    weight_versions: NDArray[np.int32]
    """-1 where not sampled."""
    turns: NDArray[np.int16]
    """-1 where not sampled."""
    old_logprobs: NDArray[np.float32] | None = None
    """The trainer's under the weights that sampled, where they were computed; 0 where not sampled."""
    routed_experts: ExpertsHandle | None = None
    """Of the segment's last completion, whose prompt is all that stands before: so they are those of all tokens."""

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One attempt at a problem: what was sampled, and what it earned.

    `group` numbers the prompts of a step, `number` the attempts at one prompt. `turn_rewards` are pairs of model call
    and reward, `metrics` the environment's own numbers.
    """

    environment: str
    problem: Problem
    group: int
    number: int
    segments: tuple[Segment, ...]
    reward: Reward | None
    """None: not scored. It takes no part in its group's statistics, and its tokens are not trained."""
    failure: str | None = None
    """Why the reward functions gave no reward, `error` or `timeout`, `reward` is zero then; or, where the attempt
    ended with an error, the error's kind, a colon and its text."""
    text: str = ""
    """The completions as text, without special tokens, an empty line between two."""
    ended: Ended = "done"
    turn_rewards: tuple[tuple[int, float], ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy sampled."""
        return sum(int(segment.loss_mask.sum()) for segment in self.segments)

    @property
    def num_turns(self) -> int:
        """Completions that the policy sampled."""
        return max((int(segment.turns.max()) + 1 for segment in self.segments), default=0)

    @property
    def oldest_version(self) -> int:
        """The weight version of the oldest sampled token. Raises ValueError where none was sampled."""
        sampled = [segment.weight_versions[segment.loss_mask] for segment in self.segments]
        return min(int(versions.min()) for versions in sampled if len(versions))

    def record(self) -> dict[str, object]:
        """The line of samples/."""
        return {
            "prompt": self.problem.messages,
            "completion": self.text,
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
    """Tokens to train on, and what is known of each (see the module docstring for the indexing).

    All arrays are [tokens]; `loss_mask` is True where a token's prediction is trained. `token_weights` are the
    weights of the global batch (`algorithms.reduction.token_weights`), zero where the mask is False.
    """

    token_ids: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    token_weights: NDArray[np.float32] | None = None
    advantages: NDArray[np.float32] | None = None
    old_logprobs: NDArray[np.float32] | None = None
    """Where the ratio starts. NaN, or None for all tokens: at the log-probs of the update's own forward pass."""
    rollout_logprobs: NDArray[np.float32] | None = None
    """The engine's, of the weights that sampled. NaN where no trainer's log-probs of those weights are at hand."""
    reference_logprobs: NDArray[np.float32] | None = None
    importance_weights: NDArray[np.float32] | None = None
    """What the policy loss counts for the gap between trainer and engine (`algorithms.importance`)."""
    values: NDArray[np.float32] | None = None
    """The critic's, before the update: what it expects to come when this token is about to be chosen."""
    returns: NDArray[np.float32] | None = None
    """What the critic's values shall become."""
    desirable: NDArray[np.float32] | None = None
    """1 on the trained tokens of an answer that was judged good (KTO), else 0."""
    supervised: NDArray[np.float32] | None = None
    """1 where a token is learnt by likelihood amid a policy's (ptx), else 0."""

    def __len__(self) -> int:
        return len(self.token_ids)


PER_TOKEN = (
    "token_weights", "advantages", "old_logprobs", "rollout_logprobs", "reference_logprobs", "importance_weights",
    "values", "returns", "desirable", "supervised",
)  # fmt: skip
"""The optional arrays of a TrainingSequence that hold a number a token."""
