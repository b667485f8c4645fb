"""Types exchanged between driver and workers: requests, completions, trajectories, sequences, errors.

They are plain data (tuples, numpy arrays), small enough for a control connection. Arrays of a sequence are indexed by
the predicted token: entry t of a log-prob, weight or advantage belongs to the prediction of token t from the tokens
before it. So entry 0 is never trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FinishReason = Literal["stop", "length", "abort", "error"]
Ended = Literal["done", "length", "turns", "calls", "invalid_calls", "seconds", "error"]
"""Reason for a trajectory's end. done: the environment finished. length, turns, calls, invalid_calls, seconds: a limit
of tokens, turns, tool calls, consecutive invalid calls or time was reached. error: the environment raised an exception
or hung, or the engine refused a request.
"""


# Exit codes follow sysexits.h where it fits: 65 data, 70 internal, 73 cannot create, 74 I/O, 75 try again.
class MegarlError(Exception):
    """Error shown to the user: field or file, value and remedy. `exit_code` is the exit code of the process."""

    exit_code = 70


class ConfigError(MegarlError):
    """The recipe cannot run as written."""

    exit_code = 2


class DataError(MegarlError):
    """A data file or model folder is missing, broken or unsuitable."""

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
    """The run saved a checkpoint and stopped, as requested. --resume continues it."""

    exit_code = 75


class UnhealthyError(MegarlError):
    """A rule of `tracking.health` failed with train.on_unhealthy=stop. The run saved a checkpoint and ended."""

    exit_code = 79


# The shell's code for a process ended by SIGINT: 128 + 2.
class EndedError(MegarlError):
    """A signal ended the run without a checkpoint."""

    exit_code = 130


class PeerLostError(MegarlError):
    """A worker, an engine or a reward process died or does not answer."""

    exit_code = 76


class FaultyNodeError(PeerLostError):
    """A rank computes wrong results, so the run must continue on other nodes.

    `nodes` are the faulty nodes; empty: unknown. `rank` is the faulty rank; None: unknown.
    """

    def __init__(self, text: str, *, rank: int | None = None, nodes: tuple[str, ...] = ()) -> None:
        super().__init__(text)
        self.rank, self.nodes = rank, nodes


@dataclass(frozen=True, slots=True)
class Problem:
    """Record of an RL data set, with its prompt as tokens.

    `index` is its position in the data, the same in every epoch. `answer` is the gold answer: a text or another JSON
    value. `record` is the parsed line.
    """

    index: int
    messages: tuple[Mapping[str, Any], ...]
    prompt_token_ids: tuple[int, ...]
    answer: Any
    record: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    """Name of the problem's source in a mixture. Without a mixture: the environment's name."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """The record's tools, JSON schemas in OpenAI's form. The prompt includes them."""


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """Sampling parameters of a completion.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 disable truncation. Training uses `repetition_penalty`
    1. With `ignore_eos`, sampling continues after an end-of-sequence token. `num_top_tokens`: also return this many of
    the most likely tokens at each position.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_top_tokens: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class TopTokens:
    """The k most likely tokens at each of n positions, the most likely first.

    `token_ids` int32 [n, k], `logprobs` float32 [n, k], in nats. An empty cell has log-prob minus infinity.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]


# eq=False: comparing arrays has no single truth value. Requests are compared by identity.
@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """Request to sample a completion from exactly these prompt tokens, int32 [prompt].

    After a pause, the last `num_retained` prompt tokens are tokens sampled before it. A stop string may begin in them.
    """

    request_id: str
    prompt_token_ids: NDArray[np.int32]
    sampling: SamplingSettings
    seed: int
    num_retained: int = 0
    adapter: str | None = None
    """Name of the adapter to sample with; None: the base model."""


@dataclass(frozen=True, slots=True)
class Archive:
    """Arrays and measured times of saved records, by name. Names begin with the record's prefix.

    Both are stored apart from the records' JSON values: arrays are large, and times differ between otherwise equal
    runs.
    """

    arrays: dict[str, Any] = field(default_factory=dict)
    times: dict[str, dict[str, Any]] = field(default_factory=dict)

    def put(self, record: Segment | Completion, names: tuple[str, ...], prefix: str) -> None:
        """Store a record's fields `names` (arrays, not None) and its sampling sets."""
        arrays = {name: getattr(record, name) for name in names}
        if (sets := record.retained_sets) is not None:
            # The key keeps its older name: checkpoints of earlier versions have it.
            arrays |= {"kept_sets.counts": sets.counts, "kept_sets.token_ids": sets.token_ids}
        self.arrays.update({f"{prefix}{name}": array for name, array in arrays.items() if array is not None})

    def fields(self, names: tuple[str, ...], prefix: str) -> dict[str, Any]:
        """Return the array fields of a record that `put` stored."""
        fields = {name: self.arrays[prefix + name] for name in names if prefix + name in self.arrays}
        # `put` stored the handle, a tuple of integers, as an array.
        if "routed_experts" in fields:
            fields["routed_experts"] = ExpertsHandle(*fields["routed_experts"].tolist())
        if f"{prefix}kept_sets.counts" in self.arrays:
            sets = (self.arrays[f"{prefix}kept_sets.{name}"] for name in ("counts", "token_ids"))
            fields["retained_sets"] = RetainedSets(*sets)
        return fields


class ExpertsHandle(NamedTuple):
    """Reference to the routed experts (MoE) of a completion. The experts are large, so they stay at rank `rank`, stored
    under `number`.
    """

    rank: int
    number: int


NO_EXPERTS = ExpertsHandle(0, -1)
"""Stands for the handle of a sequence without a sampled token, if its batch has experts. Its routes do not matter."""


@dataclass(frozen=True, slots=True)
class RetainedSets:
    """Sampling sets: for each token of a completion, sequence or batch, the tokens left by top-p, top-k and min-p.

    `counts` int32 [tokens] are the sizes of the sets; 0: nothing was excluded, or the token was not sampled.
    `token_ids` int32 [sum of counts] are the sets, one after another.
    """

    counts: NDArray[np.int32]
    token_ids: NDArray[np.int32]

    @property
    def nbytes(self) -> int:
        return self.counts.nbytes + self.token_ids.nbytes


@dataclass(frozen=True, slots=True)
class Completion:
    """Completion of a request.

    `token_ids`, `rollout_logprobs` and `weight_versions` are [new_tokens]. Log-probs, in nats, are under the sampling
    distribution (after temperature, min-p, top-p and top-k). A sampled end-of-sequence token is the last token.
    `weight_versions` count the engine's weight updates before each token. `retained_sets` are the sampling sets of the
    new tokens, in training with truncation only. `routed_experts`, if requested, cover every token read by the model:
    the prompt and all new tokens except the last. `expert_digests` uint32 [read tokens] has a hash of each token's
    experts. A refused request has no tokens, finish reason `error`, and the engine's message in `error`.
    """

    request_id: str
    token_ids: NDArray[np.int64]
    rollout_logprobs: NDArray[np.float32]
    finish_reason: FinishReason
    weight_versions: NDArray[np.int32]
    routed_experts: ExpertsHandle | None = None
    retained_sets: RetainedSets | None = None
    error: str | None = None
    num_cached: int = 0
    """Prompt tokens found in the engine's prefix cache."""
    expert_digests: NDArray[np.uint32] | None = None
    top_tokens: TopTokens | None = None
    """The most likely tokens at each new token's position, under the sampling distribution; None: not requested."""

    def to_json(self, archive: Archive, prefix: str) -> dict[str, Any]:
        """Return JSON values; arrays go to the archive under names beginning with `prefix`."""
        archive.put(self, _COMPLETION_ARRAYS, prefix)
        return {"request_id": self.request_id, "finish_reason": self.finish_reason, "error": self.error}

    @classmethod
    def from_json(cls, values: Mapping[str, Any], archive: Archive, prefix: str) -> Completion:
        return cls(**values, **archive.fields(_COMPLETION_ARRAYS, prefix))


_COMPLETION_ARRAYS = ("token_ids", "rollout_logprobs", "weight_versions", "routed_experts", "expert_digests")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Tool call in a completion: arguments, or an `error` if they are invalid. The reply has the same `id`."""

    id: str
    name: str
    arguments: Mapping[str, Any] | None
    error: str | None = None


Judging = Literal["declared", "by_value", "none"]
"""How answers are judged right or wrong.

declared: each answer has a verdict. by_value: score 1 means right and 0 wrong, until another score appears.
"""


def strongest(judgings: Iterable[Judging]) -> Judging:
    """Return how several reward functions judge together: the strongest of their kinds."""
    kinds = set(judgings)
    return "declared" if "declared" in kinds else "by_value" if "by_value" in kinds else "none"


@dataclass(frozen=True, slots=True)
class Reward:
    """Reward of a completion. `score` is trained; the rates of the two flags are logged.

    A reward function returns the first three fields, and optionally `metrics`. The sum over functions also has each
    function's score in `scores`, and metrics as FUNCTION/NAME. `answer_correct` None: no function judged the answer.
    """

    score: float
    format_valid: bool
    answer_correct: bool | None
    scores: Mapping[str, float | None] = field(default_factory=dict)
    """Unweighted score by function. None: the function does not apply to the sample."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further numbers, logged as reward/FUNCTION/NAME: means over the samples with a value."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Token sequence of a trajectory: prompt, completions and the observations between them.

    All arrays are [tokens]. `loss_mask` is True for tokens sampled in this segment. A segment may begin with a copy of
    an earlier segment; its mask is False there.
    """

    token_ids: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    rollout_logprobs: NDArray[np.float32]
    """Log-probs of the sampled tokens under the sampling distribution, in nats; 0 elsewhere."""
    weight_versions: NDArray[np.int32]
    """Number of the engine's weight updates before the token was sampled; -1 for untrained tokens."""
    turns: NDArray[np.int16]
    """Index of the model call that sampled the token; -1 for untrained tokens."""
    old_logprobs: NDArray[np.float32] | None = None
    """The trainer's log-probs under the sampling weights, in nats; 0 for tokens not sampled."""
    entropies: NDArray[np.float32] | None = None
    """Entropies of the trainer's token distributions under the sampling weights, in nats; 0 for tokens not sampled."""
    routed_experts: ExpertsHandle | None = None
    """Routed experts of the last completion. Its prompt is the segment up to it, so all tokens are covered."""
    expert_digests: NDArray[np.uint32] | None = None
    """A hash of each token's routed experts; 0 for the last token, which the engine has not read."""
    retained_sets: RetainedSets | None = None
    """Sampling sets of the tokens; None if top-p, top-k and min-p excluded nothing."""

    def __len__(self) -> int:
        return len(self.token_ids)


_SEGMENT_ARRAYS = (
    "token_ids", "loss_mask", "rollout_logprobs", "weight_versions", "turns", "old_logprobs", "entropies",
    "routed_experts", "expert_digests",
)  # fmt: skip


MAIN_AGENT = "main"
"""Name of an attempt's first agent. It starts all other agents."""


class Caller(NamedTuple):
    """Agent that made a model call, as named by its client. `parent` is the agent that started it; None: the main
    agent.

    `kind` is the purpose of the call, like `turn` or `compaction`; empty: the client named none.
    """

    agent: str = MAIN_AGENT
    parent: str | None = None
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """Attempt at a problem: sampled segments and their reward.

    `group` is the number of the prompt in the step, `number` the number of the attempt in its group. `turn_rewards` are
    pairs (index of the model call, reward). `metrics` are numbers reported by the environment.
    """

    environment: str
    problem: Problem
    group: int
    number: int
    segments: tuple[Segment, ...]
    reward: Reward | None
    """None: not scored. The trajectory is then neither trained nor part of group statistics."""
    failure: str | None = None
    """Why there is no score: `error`, `timeout` or `parse_error` of the reward functions, or `KIND: text` of the error
    that ended the attempt.
    """
    texts: tuple[str, ...] = ()
    """Completions as text without special tokens, one per model call."""
    messages: tuple[tuple[Mapping[str, Any], ...], ...] = ()
    """New messages before each completion, and after the last one: JSON values for people to read. The first entry is
    the prompt. A completion that does not continue the previous one has its whole history as entry.
    """
    callers: tuple[Caller, ...] = ()
    """Agents that made the model calls, one per call; empty: no agent program, megarl made the calls."""
    ended: Ended = "done"
    turn_rewards: tuple[tuple[int, float], ...] = ()
    turn_states: tuple[str | None, ...] = ()
    """For each turn, the environment's name of the state in which the policy acted. Empty: the environment names no
    states.
    """
    role: str | None = None
    """Role that the policy played, as named by the environment."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    is_in_thoughts: bool = False
    """Whether the last completion ended inside its thoughts, without an answer."""
    restarts: int = 0
    """Number of restarts after the environment was unavailable."""
    temperature: float = 1.0
    tools: tuple[Mapping[str, Any], ...] = ()
    """JSON schemas of the tools in the first prompt."""
    journaled_as: str = ""
    """Name of the attempt's record in the run's journal of attempts; empty: it has no record."""
    engine_seconds: float = 0.0
    """Seconds of waiting for completions, without pauses of the engines."""
    environment_seconds: float = 0.0
    """Seconds of waiting for the environment, its tools and a free process. For an agent program: seconds without a
    pending completion.
    """

    @property
    def text(self) -> str:
        return "\n\n".join(self.texts)

    @property
    def first_prompt(self) -> NDArray[np.int64] | None:
        """The prompt of the first model call, int64 [tokens]. None if nothing was sampled."""
        if not self.segments or not self.segments[0].loss_mask.any():
            return None
        first_segment = self.segments[0]
        return first_segment.token_ids[: int(first_segment.loss_mask.argmax())]

    @property
    def num_sampled(self) -> int:
        return sum(int(segment.loss_mask.sum()) for segment in self.segments)

    @property
    def num_observed(self) -> int:
        """Tokens between completions: texts of the environment and its tools, in the chat template.

        Prefixes of segments do not count: after a rewritten history they repeat earlier tokens.
        """
        sampled_positions = [segment.loss_mask.nonzero()[0] for segment in self.segments]
        return sum(
            int(positions[-1] - positions[0]) + 1 - len(positions) for positions in sampled_positions if len(positions)
        )

    @property
    def num_turns(self) -> int:
        return max((int(segment.turns.max()) + 1 for segment in self.segments), default=0)

    @property
    def turn_tokens(self) -> list[int]:
        """Token counts of non-empty completions."""
        turns = [segment.turns[segment.loss_mask].tolist() for segment in self.segments]
        return list(Counter(turn for segment_turns in turns for turn in segment_turns).values())

    @property
    def oldest_version(self) -> int:
        """Weight version of the oldest sampled token. Raises ValueError if no token was sampled."""
        versions_by_segment = [segment.weight_versions[segment.loss_mask] for segment in self.segments]
        return min(int(versions.min()) for versions in versions_by_segment if len(versions))

    def to_json(self, archive: Archive, prefix: str) -> dict[str, Any]:
        """Return the trajectory as JSON values. Arrays and times go to the archive, under names beginning with
        `prefix`.
        """
        for segment_index, segment in enumerate(self.segments):
            archive.put(segment, _SEGMENT_ARRAYS, f"{prefix}{segment_index}.")
        # An environment's metrics with names that end in `seconds` are times too.
        times = {name for name in self.metrics if name.endswith("seconds")}
        archive.times[prefix] = {
            "engine_seconds": self.engine_seconds,
            "environment_seconds": self.environment_seconds,
            "metrics": {name: value for name, value in self.metrics.items() if name in times},
        }
        return {name: getattr(self, name) for name in _TRAJECTORY_VALUES} | {
            "texts": self.texts,
            "messages": self.messages,
            "callers": self.callers,
            "turn_rewards": self.turn_rewards,
            "turn_states": self.turn_states,
            "role": self.role,
            "is_in_thoughts": self.is_in_thoughts,
            "tools": self.tools,
            "journaled_as": self.journaled_as,
            "problem": self.problem.index,
            "source": self.problem.source,
            "segments": len(self.segments),
            "reward": self.reward and asdict(self.reward),
            "metrics": {name: value for name, value in self.metrics.items() if name not in times},
        }

    @classmethod
    def from_json(
        cls, values: Mapping[str, Any], archive: Archive, prefix: str, find_problem: FindProblem
    ) -> Trajectory:
        """Restore a trajectory from JSON values, and from arrays with names that begin with `prefix`."""
        segment_prefixes = [f"{prefix}{segment_index}." for segment_index in range(values["segments"])]
        times, reward = archive.times[prefix], values["reward"]
        return cls(
            **{name: values[name] for name in _TRAJECTORY_VALUES},
            problem=find_problem(values["source"], values["problem"]),
            segments=tuple(
                Segment(**archive.fields(_SEGMENT_ARRAYS, segment_prefix)) for segment_prefix in segment_prefixes
            ),
            reward=reward and Reward(**reward),
            texts=tuple(values["texts"]),
            messages=tuple(tuple(new_messages) for new_messages in values["messages"]),
            callers=tuple(Caller(*caller) for caller in values.get("callers", ())),
            turn_rewards=tuple((turn, value) for turn, value in values["turn_rewards"]),
            # Records of earlier versions lack these fields, and `callers`.
            role=values.get("role"),
            turn_states=tuple(values.get("turn_states", ())),
            is_in_thoughts=values.get("is_in_thoughts", False),
            tools=tuple(values.get("tools", ())),
            journaled_as=values.get("journaled_as", ""),
            metrics=values["metrics"] | times["metrics"],
            engine_seconds=times["engine_seconds"],
            environment_seconds=times["environment_seconds"],
        )

    def record(self) -> dict[str, object]:
        """Return the trajectory as a JSON object for samples/ in the run folder.

        With several turns, `turns` replaces `completion`. A turn has a completion, its reward, and the messages that
        follow it. A turn of an agent program also has its caller and the index of its training segment; null: not
        trained.
        """
        rewards = dict(self.turn_rewards)
        observations = dict(enumerate(self.messages[1:]))
        callers = [{"agent": c.agent, "parent": c.parent, "kind": c.kind} for c in self.callers]
        segment_of_turn = {
            turn: segment_index
            for segment_index, segment in enumerate(self.segments)
            for turn in segment.turns.tolist()
        }
        turns = [
            {"completion": text, "reward": rewards.get(number), "observation": observations.get(number, ())}
            | ({"state": self.turn_states[number]} if self.turn_states else {})
            | (callers[number] | {"segment": segment_of_turn.get(number)} if callers else {})
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


_TRAJECTORY_VALUES = ("environment", "group", "number", "failure", "ended", "restarts", "temperature")
FindProblem = Callable[[str, int], Problem]
"""Return the problem with this source and index. Raises ConfigError if the run no longer has it."""
Group = list[Trajectory]


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """Sequence to train on, with optional values per token. Entry t belongs to the prediction of token t.

    All arrays are [tokens]. `token_weights` are the weights of the tokens' losses in the global batch; 0 for masked
    tokens.
    """

    token_ids: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    token_weights: NDArray[np.float32] | None = None
    advantages: NDArray[np.float32] | None = None
    old_logprobs: NDArray[np.float32] | None = None
    """Denominator of the policy ratio, in nats. NaN (or None for all tokens): use the log-probs of the update's own
    forward pass.
    """
    rollout_logprobs: NDArray[np.float32] | None = None
    """Log-probs of the engine, in nats. NaN if the trainer has no log-probs under the same weights."""
    reference_logprobs: NDArray[np.float32] | None = None
    importance_weights: NDArray[np.float32] | None = None
    """Factors of the policy loss: importance-sampling weights between trainer and engine. 0 for tokens excluded by
    `algorithm.entropy_top_share` or `algorithm.clip_cov_share`.
    """
    log_ratio_penalties: NDArray[np.float32] | None = None
    """Coefficients of the absolute log-ratio in the policy loss (`algorithm.kl_cov_share`); 0 for most tokens."""
    values: NDArray[np.float32] | None = None
    """Critic's value before the update, for the state before each token."""
    returns: NDArray[np.float32] | None = None
    """Targets of the critic's values."""
    desirable: NDArray[np.float32] | None = None
    """1 for trained tokens of desirable answers (KTO), else 0."""
    supervised: NDArray[np.float32] | None = None
    """1 for tokens of supervised conversations (PPO-ptx), trained with a likelihood loss; else 0."""
    retained_sets: RetainedSets | None = None
    """Sampling sets over which log-probs are normalised. None: over the whole vocabulary."""
    temperature: float = 1.0

    def __len__(self) -> int:
        return len(self.token_ids)


PER_TOKEN = (
    "token_weights", "advantages", "old_logprobs", "rollout_logprobs", "reference_logprobs", "importance_weights",
    "log_ratio_penalties", "values", "returns", "desirable", "supervised",
)  # fmt: skip
"""Names of the optional arrays [tokens] of a TrainingSequence."""
