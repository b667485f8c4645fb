"""The batch of a step: its trajectories in flat arrays, and its minibatches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from megarl.algorithms.reduction import token_weights
from megarl.config import Recipe
from megarl.data.batch import TokenBatch, borders, concatenate, join_sets
from megarl.rollout.weights import assign_token_weights
from megarl.types import Segment, Trajectory


@dataclass(slots=True, kw_only=True)
class RLBatch(TokenBatch):
    """The concatenated segments of all trajectories; a sample is a trajectory with all its segments.

    Arrays of trajectories are [samples]: `rewards` float64, `groups` the numbers of their prompts, `num_sampled` the
    tokens that the policy sampled, `num_turns` its completions, `is_correct` that the answer was right. A trajectory
    that was not scored, without `is_scored`, takes no part in its group's statistics; where rewards train, it is not
    trained.
    """

    weight_versions: NDArray[np.int32]
    """[tokens]: the number of reshards before a token was sampled; -1 where not sampled."""
    turns: NDArray[np.int16]
    """[tokens]: the number of the completion that a token was sampled in, from 0; -1 where not sampled."""
    turn_rewards: NDArray[np.float64]
    """[samples, turns]: what the environment gave for each turn; parts of `rewards`."""
    rewards: NDArray[np.float64]
    groups: NDArray[np.int64]
    num_sampled: NDArray[np.int64]
    num_turns: NDArray[np.int64]
    is_correct: NDArray[np.bool_]
    is_scored: NDArray[np.bool_]
    environments: tuple[str, ...] = ()
    """[samples]: the names of their environments."""
    scores: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    """[samples] of each reward function by its name in metrics, without weight; NaN where it has no opinion."""
    environment_scores: NDArray[np.float64] | None = None
    """[samples]: the rewards that environments gave for turns, NaN of other samples; None: they gave none."""
    model_scores: NDArray[np.float64] | None = None
    """[samples]: those of a reward model, without weight; None: there is none, or it has not scored yet."""
    entropies: NDArray[np.float32] | None = None
    """[tokens]: the trainer's entropies before the update, in nats; 0 where not sampled; None: not computed."""

    @classmethod
    def from_groups(
        cls,
        groups: Sequence[Sequence[Trajectory]],
        *,
        mask_truncated: bool = False,
        needs_rewards: bool = True,
    ) -> RLBatch:
        """The trajectories of these groups, one per prompt.

        With `mask_truncated` those that a limit of length or of time ended are not trained, with `needs_rewards` those
        that were not scored.

        `old_logprobs` are there where any segment has them, NaN on sampled tokens of those that do not.
        """
        trajectories = [trajectory for group in groups for trajectory in group]
        segments = [segment for trajectory in trajectories for segment in trajectory.segments]
        num_segments = np.array([len(trajectory.segments) for trajectory in trajectories])
        rewards = [trajectory.reward for trajectory in trajectories]
        is_scored = np.array([reward is not None for reward in rewards])
        is_trained = is_scored | (not needs_rewards)
        if mask_truncated:
            is_trained &= np.array([trajectory.ended not in ("length", "seconds") for trajectory in trajectories])
        lengths = np.array([len(segment) for segment in segments])
        is_sampled = np.concatenate([segment.loss_mask for segment in segments])
        per_token = {"rollout_logprobs": np.concatenate([segment.rollout_logprobs for segment in segments])}
        if any(segment.old_logprobs is not None for segment in segments):
            per_token["old_logprobs"] = np.concatenate([_old_logprobs(segment) for segment in segments])
        return cls(
            token_ids=np.concatenate([segment.token_ids for segment in segments]),
            loss_mask=is_sampled & np.repeat(np.repeat(is_trained, num_segments), lengths),
            cu_seqlens=borders(lengths),
            samples=np.repeat(np.arange(len(trajectories)), num_segments),
            per_token=per_token,
            experts=_experts(segments),
            kept_sets=join_sets([(len(segment), segment.kept_sets) for segment in segments]),
            temperatures=np.repeat([trajectory.temperature for trajectory in trajectories], num_segments),
            weight_versions=np.concatenate([segment.weight_versions for segment in segments]),
            turns=np.concatenate([segment.turns for segment in segments]),
            turn_rewards=_turn_rewards(trajectories),
            rewards=np.array([0.0 if reward is None else reward.score for reward in rewards], np.float64),
            groups=np.repeat(np.arange(len(groups)), [len(group) for group in groups]),
            num_sampled=np.array([trajectory.num_sampled for trajectory in trajectories]),
            num_turns=np.array([trajectory.num_turns for trajectory in trajectories]),
            is_correct=np.array([reward is not None and bool(reward.answer_correct) for reward in rewards]),
            is_scored=is_scored,
            environments=tuple(trajectory.environment for trajectory in trajectories),
            scores=_scores_by_function(trajectories),
            environment_scores=_environment_scores(trajectories),
            entropies=_entropies(segments),
        )

    @property
    def longest_turns(self) -> NDArray[np.int64]:
        """[samples]: tokens that the policy sampled in the longest turn of each trajectory."""
        is_sampled = self.turns >= 0
        sample = np.repeat(self.samples, self.lengths)[is_sampled]
        counts = np.zeros((len(self.groups), int(self.turns.max(initial=0)) + 1), np.int64)
        np.add.at(counts, (sample, self.turns[is_sampled]), 1)
        return counts.max(axis=1)

    def start_from_rollout(self, weight_version: int) -> None:
        """Use the engine's log-probs as old log-probs of the ratio, whatever its weights.

        `weight_version` is that of the trainer's weights before the update: engine and trainer are compared on tokens
        that these weights sampled, the others' `rollout_logprobs` are NaN from now on.
        """
        self.per_token["old_logprobs"] = self.per_token["rollout_logprobs"]
        self.forget_stale_logprobs(weight_version)

    def forget_stale_logprobs(self, weight_version: int) -> None:
        """Set `rollout_logprobs` to NaN where weights before `weight_version` sampled.

        From then on engine and trainer are compared on tokens of the same weights alone.
        """
        is_stale = (self.weight_versions >= 0) & (self.weight_versions < weight_version)
        found = self.per_token["rollout_logprobs"]
        self.per_token["rollout_logprobs"] = np.where(is_stale, np.float32(np.nan), found)

    def minibatches(self, recipe: Recipe, step: int, conversations: TokenBatch | None = None) -> list[TokenBatch]:
        """The minibatch of each update of a step, with the token weights of that update.

        Each of `train.epochs_per_step` passes visits all samples in `train.updates_per_step` updates: the first in the
        given order, each later one in an order drawn from the seed, the step and the pass. `conversations` are dealt
        out to the updates of a pass and learnt beside (`algorithm.ptx_coefficient`). There is no update in the steps
        that train the critic alone (`critic.warmup_steps`).
        """
        if step <= recipe.frozen_steps:
            return []
        updates, longest = recipe.train.updates_per_step, recipe.longest_trajectory
        minibatches: list[TokenBatch] = []
        for number in range(recipe.train.epochs_per_step):
            for update, samples in enumerate(parts(_order(len(self.groups), recipe.seed, step, number), updates)):
                minibatch = self.select_samples(samples)
                assign_token_weights(minibatch, recipe.algorithm, longest)
                if conversations is not None:
                    dealt = np.arange(update, conversations.num_sequences, updates)
                    minibatch = _mixed(minibatch, conversations.select(dealt), recipe.algorithm.ptx_coefficient)
                minibatches.append(minibatch)
        if recipe.algorithm.old_logprobs == "rollout" or not recipe.has_advantages:
            # From the second update on, the weights are not those that sampled.
            for minibatch in minibatches[1:]:
                minibatch.per_token["rollout_logprobs"] = np.full(len(minibatch.token_ids), np.nan, np.float32)
        return minibatches

    def critic_minibatches(self, recipe: Recipe) -> list[TokenBatch]:
        """The minibatch of each of the critic's updates in a step: its loss is the mean over the tokens."""
        algorithm = recipe.algorithm.model_copy(update={"aggregation": "token_mean"})
        batch = self.with_arrays({name: self.per_token[name] for name in ("values", "returns")})
        samples = np.arange(len(self.groups))
        minibatches = [batch.select_samples(part) for part in parts(samples, recipe.critic.updates_per_step)]
        for minibatch in minibatches:
            assign_token_weights(minibatch, algorithm)
        return minibatches


def parts(samples: NDArray[np.int64], count: int) -> list[NDArray[np.int64]]:
    """Split samples, int64 [samples], into `count` parts of equal size."""
    size = len(samples) // count
    return [samples[start : start + size] for start in range(0, len(samples), size)]


def _turn_rewards(trajectories: Sequence[Trajectory]) -> NDArray[np.float64]:
    rewards = np.zeros((len(trajectories), max(trajectory.num_turns for trajectory in trajectories)))
    for sample, trajectory in enumerate(trajectories):
        for turn, reward in trajectory.turn_rewards:
            rewards[sample, turn] = reward
    return rewards


def _scores_by_function(trajectories: Sequence[Trajectory]) -> dict[str, NDArray[np.float64]]:
    rewards = [trajectory.reward for trajectory in trajectories]
    names = dict.fromkeys(name for reward in rewards if reward is not None for name in reward.scores)
    found = {name: np.full(len(rewards), np.nan) for name in names}
    for sample, (trajectory, reward) in enumerate(zip(trajectories, rewards, strict=True)):
        if reward is None or trajectory.turn_rewards:
            continue
        judged = any(score is not None for score in reward.scores.values())
        for name in names:
            # One that nothing judged, or whose functions failed, has a reward of zero: so it has from each.
            score = reward.scores.get(name) if judged else 0.0
            found[name][sample] = np.nan if score is None else score
    return found


def _environment_scores(trajectories: Sequence[Trajectory]) -> NDArray[np.float64] | None:
    scores = [t.reward.score if t.reward is not None and t.turn_rewards else np.nan for t in trajectories]
    return None if np.isnan(scores).all() else np.array(scores)


def _old_logprobs(segment: Segment) -> NDArray[np.float32]:
    if segment.old_logprobs is not None:
        return segment.old_logprobs
    return np.where(segment.loss_mask, np.float32(np.nan), np.float32(0))


def _entropies(segments: Sequence[Segment]) -> NDArray[np.float32] | None:
    found = [segment.entropies for segment in segments if segment.entropies is not None]
    return np.concatenate(found) if len(found) == len(segments) else None


def _experts(segments: Sequence[Segment]) -> NDArray[np.int64] | None:
    handles = [segment.routed_experts for segment in segments if segment.routed_experts is not None]
    return np.array(handles, np.int64) if len(handles) == len(segments) else None


def _order(count: int, seed: int, step: int, number: int) -> NDArray[np.int64]:
    """The order of the samples in a pass of a step: int64 [count], a permutation."""
    if number == 0:
        return np.arange(count)
    return np.random.default_rng([seed, step, number]).permutation(count)


def _mixed(minibatch: TokenBatch, conversations: TokenBatch, share: float) -> TokenBatch:
    """A policy's minibatch and conversations learnt by likelihood, which make so large a share of the loss."""
    policy = minibatch.with_arrays(minibatch.per_token)
    policy.per_token["token_weights"] = (1 - share) * policy.per_token["token_weights"]
    policy.per_token["supervised"] = np.zeros(len(policy.token_ids), np.float32)
    # Batches that are put together carry the same arrays.
    nothing = np.zeros(len(conversations.token_ids), np.float32)
    learnt = conversations.with_arrays(dict.fromkeys(policy.per_token, nothing))
    weights = token_weights(torch.from_numpy(learnt.cu_samples), torch.from_numpy(learnt.loss_mask), "token_mean")
    learnt.per_token["token_weights"] = (share * weights).numpy()
    learnt.per_token["supervised"] = np.ones(len(conversations.token_ids), np.float32)
    return concatenate([policy, learnt])
