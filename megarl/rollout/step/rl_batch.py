"""The batch of a training step, and its minibatches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megarl.algorithms.reduction import token_weights
from megarl.config import AlgorithmConfig, Recipe
from megarl.data.token_batch import TokenBatch, borders, concatenate, join_retained
from megarl.types import NO_EXPERTS, MegarlError, Segment, Trajectory


@dataclass(slots=True, kw_only=True)
class RLBatch(TokenBatch):
    """Training batch: the concatenated segments of all trajectories. A sample is a trajectory with all its segments.

    Arrays per trajectory are [samples]. `rewards` is float64. `groups` has the prompts' numbers. `num_sampled` counts
    the policy's tokens, `num_turns` the completions. Unscored trajectories are excluded from group statistics. A loss
    without rewards (distillation) still trains on them.
    """

    weight_versions: NDArray[np.int32]
    """[tokens]: version of the engine's weights (number of weight updates so far) at sampling; -1 if not sampled."""
    turns: NDArray[np.int16]
    """[tokens]: number of the completion containing the token, from 0; -1 if not sampled."""
    turn_rewards: NDArray[np.float64]
    """[samples, turns]: rewards of the environment or agent for single turns. `rewards` includes them."""
    state_groups: NDArray[np.int64]
    """[samples, turns]: number of the turn's step group; -1 without a group. The turns of a step group act in the same
    state of the same prompt.
    """
    rewards: NDArray[np.float64]
    groups: NDArray[np.int64]
    num_sampled: NDArray[np.int64]
    num_turns: NDArray[np.int64]
    is_correct: NDArray[np.bool_]
    is_scored: NDArray[np.bool_]
    environments: tuple[str, ...] = ()
    roles: tuple[str | None, ...] = ()
    """Role that the policy played in each trajectory; None: the environment named none."""
    sample_ids: tuple[tuple[int, int], ...] = ()
    """(number of the prompt in the run, number of the attempt in its group) of each trajectory."""
    scores: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    """Unweighted scores [samples] by reward function; NaN: the function gave none."""
    environment_scores: NDArray[np.float64] | None = None
    """[samples]: sum of the environment's turn rewards; NaN without such rewards. None: all samples lack them."""
    model_scores: NDArray[np.float64] | None = None
    """[samples]: unweighted scores of the reward model; None: there is no reward model, or it has not scored yet."""
    entropies: NDArray[np.float32] | None = None
    """[tokens]: entropies of the trainer's distributions before the update, in nats; 0 if not sampled."""

    @classmethod
    def from_groups(
        cls,
        groups: Sequence[Sequence[Trajectory]],
        *,
        mask_truncated: bool = False,
        needs_rewards: bool = True,
        replays_routes: bool = True,
    ) -> RLBatch:
        """Return the batch made of these groups (one group per prompt).

        `mask_truncated` excludes trajectories ended by a limit from training, `needs_rewards` unscored ones.
        `replays_routes` False: the engine's experts are left out. Groups that waited since before a resume can have
        them though `trainer.router_replay` is off now.
        `old_logprobs` exist if any segment has them. In other segments they are NaN on sampled tokens.
        """
        trajectories = [trajectory for group in groups for trajectory in group]
        segments = [segment for trajectory in trajectories for segment in trajectory.segments]
        num_segments = np.array([len(trajectory.segments) for trajectory in trajectories])
        rewards = [trajectory.reward for trajectory in trajectories]
        is_scored = np.array([reward is not None for reward in rewards])
        is_trained = np.array([_is_trained(trajectory, mask_truncated, needs_rewards) for trajectory in trajectories])
        lengths = np.array([len(segment) for segment in segments])
        is_sampled = np.concatenate([segment.loss_mask for segment in segments])
        per_token = {"rollout_logprobs": np.concatenate([segment.rollout_logprobs for segment in segments])}
        if any(segment.old_logprobs is not None for segment in segments):
            per_token["old_logprobs"] = np.concatenate([_fill_old_logprobs(segment) for segment in segments])
        return cls(
            token_ids=np.concatenate([segment.token_ids for segment in segments]),
            loss_mask=is_sampled & np.repeat(np.repeat(is_trained, num_segments), lengths),
            cu_seqlens=borders(lengths),
            samples=np.repeat(np.arange(len(trajectories)), num_segments),
            per_token=per_token,
            experts=_collect_experts(segments) if replays_routes else None,
            expert_digests=_collect_expert_digests(segments) if replays_routes else None,
            retained_sets=join_retained([(len(segment), segment.retained_sets) for segment in segments]),
            temperatures=np.repeat([trajectory.temperature for trajectory in trajectories], num_segments),
            weight_versions=np.concatenate([segment.weight_versions for segment in segments]),
            turns=np.concatenate([segment.turns for segment in segments]),
            turn_rewards=_collect_turn_rewards(trajectories),
            state_groups=_number_state_groups(groups),
            rewards=np.array([0.0 if reward is None else reward.score for reward in rewards], np.float64),
            groups=np.repeat(np.arange(len(groups)), [len(group) for group in groups]),
            num_sampled=np.array([trajectory.num_sampled for trajectory in trajectories]),
            num_turns=np.array([trajectory.num_turns for trajectory in trajectories]),
            is_correct=np.array([reward is not None and bool(reward.answer_correct) for reward in rewards]),
            is_scored=is_scored,
            environments=tuple(trajectory.environment for trajectory in trajectories),
            roles=tuple(trajectory.role for trajectory in trajectories),
            sample_ids=tuple((trajectory.group, trajectory.number) for trajectory in trajectories),
            scores=_collect_scores_by_function(trajectories),
            environment_scores=_collect_environment_scores(trajectories),
            entropies=_concatenate_all([segment.entropies for segment in segments]),
        )

    @property
    def tokens_with_loss(self) -> NDArray[np.int64]:
        """[samples]: number of tokens with a loss."""
        return np.diff(np.concatenate([[0], np.cumsum(self.loss_mask)])[self.cu_samples])

    @property
    def longest_turns(self) -> NDArray[np.int64]:
        """[samples]: number of sampled tokens in the longest turn of each trajectory."""
        is_sampled = self.turns >= 0
        token_samples = np.repeat(self.samples, self.lengths)[is_sampled]
        counts = np.zeros((len(self.groups), int(self.turns.max(initial=0)) + 1), np.int64)
        # Not `counts[...] += 1`: it counts an index occurring twice only once.
        np.add.at(counts, (token_samples, self.turns[is_sampled]), 1)
        return counts.max(axis=1)

    def use_engine_logprobs_as_old(self, weight_version: int) -> None:
        """Use the engine's log-probs as the old log-probs of the importance ratio, also for tokens of old weights.

        `weight_version` is the trainer's.
        """
        self.per_token["old_logprobs"] = self.per_token["rollout_logprobs"]
        self.forget_stale_logprobs(weight_version)

    def forget_stale_logprobs(self, weight_version: int) -> None:
        """Set `rollout_logprobs` to NaN on tokens sampled before `weight_version`.

        Afterwards metrics compare engine and trainer only where both had the same weights.
        """
        is_stale = (self.weight_versions >= 0) & (self.weight_versions < weight_version)
        logprobs = self.per_token["rollout_logprobs"]
        self.per_token["rollout_logprobs"] = np.where(is_stale, np.float32(np.nan), logprobs)

    def minibatches(self, recipe: Recipe, step: int, conversations: TokenBatch | None = None) -> list[TokenBatch]:
        """Return the minibatches of a step, one per optimizer update, with token weights set.

        Each of `train.epochs_per_step` passes visits all samples, in `train.updates_per_step` updates. The first pass
        keeps the order of the samples. Later passes are shuffled with the seed, the step and the pass number.
        `conversations` are distributed over the updates for an additional loss (`algorithm.ptx_coefficient`). Steps
        training only the critic (`critic.warmup_steps`) have no minibatches.
        """
        num_updates, longest_trajectory = recipe.train.updates_per_step, recipe.longest_trajectory
        minibatches: list[TokenBatch] = []
        for update, samples in enumerate(self.samples_by_update(recipe, step)):
            minibatch = self.select_samples(samples)
            assign_token_weights(minibatch, recipe.algorithm, longest_trajectory)
            if conversations is not None:
                update_in_pass = update % num_updates
                update_conversations = conversations.select_samples(
                    np.arange(update_in_pass, len(conversations.num_segments), num_updates)
                )
                minibatch = _add_conversations(minibatch, update_conversations, recipe.algorithm.ptx_coefficient)
            minibatches.append(minibatch)
        if recipe.algorithm.old_logprobs == "rollout" or not recipe.has_advantages:
            # From the second update on, trainer and engine have different weights. A comparison would mean nothing.
            for minibatch in minibatches[1:]:
                minibatch.per_token["rollout_logprobs"] = np.full(len(minibatch.token_ids), np.nan, np.float32)
        return minibatches

    def samples_by_update(self, recipe: Recipe, step: int) -> list[NDArray[np.int64]]:
        """Return the indices of the samples of each of a step's minibatches."""
        if step <= recipe.frozen_steps:
            return []
        orders = [
            _make_pass_order(len(self.groups), recipe.seed, step, pass_number)
            for pass_number in range(recipe.train.epochs_per_step)
        ]
        return [samples for order in orders for samples in split_evenly(order, recipe.train.updates_per_step)]

    def critic_minibatches(self, recipe: Recipe) -> list[TokenBatch]:
        """Return the minibatch of each critic update of a step. The critic's loss is the mean over tokens."""
        algorithm = recipe.algorithm.model_copy(update={"aggregation": "token_mean"})
        # Send only these two arrays to the ranks: the critic reads no others.
        batch = self.with_arrays({name: self.per_token[name] for name in ("values", "returns")})
        samples = np.arange(len(self.groups))
        minibatches = [batch.select_samples(part) for part in split_evenly(samples, recipe.critic.updates_per_step)]
        for minibatch in minibatches:
            assign_token_weights(minibatch, algorithm)
        return minibatches


def _is_trained(trajectory: Trajectory, mask_truncated: bool, needs_rewards: bool) -> bool:
    # Overlong filtering of DAPO (arXiv 2503.14476): the reward of a truncated answer is noise.
    is_left_out = mask_truncated and trajectory.ended in ("length", "seconds")
    return not is_left_out and (trajectory.reward is not None or not needs_rewards)


def assign_token_weights(batch: TokenBatch, algorithm: AlgorithmConfig, constant_length: int | None = None) -> None:
    """Set a minibatch's `token_weights` [tokens]: the factor of each token's loss in the total loss.

    All segments of a sample count as one sequence.
    """
    # Compute them for the whole minibatch, so the loss does not depend on its split into ranks and micro-batches.
    weights = token_weights(
        torch.from_numpy(batch.cu_samples),
        torch.from_numpy(batch.loss_mask),
        algorithm.aggregation,
        constant_length=constant_length,
        count_masked_sequences=algorithm.count_masked_sequences,
    )
    batch.per_token["token_weights"] = weights.numpy()


def split_evenly(samples: NDArray[np.int64], num_parts: int) -> list[NDArray[np.int64]]:
    """Split sample indices, int64 [samples], into `num_parts` arrays. Sizes differ by at most 1, the larger first.

    Sizes differ if groups waited since before a resume with another train.samples_per_prompt. Raises MegarlError if
    there are fewer samples than arrays: each update needs a sample.
    """
    if len(samples) < num_parts:
        raise MegarlError(
            f"the step has {len(samples)} samples for {num_parts} updates, because its groups were sampled before a "
            "resume with another train.samples_per_prompt; set train.updates_per_step and critic.updates_per_step "
            f"to at most {len(samples)}"
        )
    return np.array_split(samples, num_parts)


def _collect_turn_rewards(trajectories: Sequence[Trajectory]) -> NDArray[np.float64]:
    rewards = np.zeros((len(trajectories), _count_turns(trajectories)))
    for sample, trajectory in enumerate(trajectories):
        for turn, reward in trajectory.turn_rewards:
            rewards[sample, turn] = reward
    return rewards


def _count_turns(trajectories: Sequence[Trajectory]) -> int:
    """Return the largest number of turns, with later ones that are rewarded but not trained (agents)."""
    num_rewarded = [turn + 1 for trajectory in trajectories for turn, _ in trajectory.turn_rewards]
    return max(*(trajectory.num_turns for trajectory in trajectories), *num_rewarded, 0)


def _number_state_groups(groups: Sequence[Sequence[Trajectory]]) -> NDArray[np.int64]:
    """Return the array `RLBatch.state_groups`: equal states of one group's turns get one number."""
    grouped_trajectories = [
        (group_number, trajectory) for group_number, group in enumerate(groups) for trajectory in group
    ]
    num_turns = _count_turns([trajectory for _, trajectory in grouped_trajectories])
    state_numbers = np.full((len(grouped_trajectories), num_turns), -1, np.int64)
    number_of_state: dict[tuple[int, str], int] = {}
    for sample, (group, trajectory) in enumerate(grouped_trajectories):
        for turn, state in enumerate(trajectory.turn_states[: trajectory.num_turns]):
            if state is not None:
                state_numbers[sample, turn] = number_of_state.setdefault((group, state), len(number_of_state))
    return state_numbers


def _collect_scores_by_function(trajectories: Sequence[Trajectory]) -> dict[str, NDArray[np.float64]]:
    """Return the samples' scores by each reward function, [samples]; NaN: the function did not score the sample."""
    rewards = [trajectory.reward for trajectory in trajectories]
    names = dict.fromkeys(name for reward in rewards if reward is not None for name in reward.scores)
    scores = {name: np.full(len(rewards), np.nan) for name in names}
    for sample, (trajectory, reward) in enumerate(zip(trajectories, rewards, strict=True)):
        if reward is None or trajectory.turn_rewards:
            continue
        is_judged = any(score is not None for score in reward.scores.values())
        for name in names:
            # If nothing scored the sample, or all functions failed, its reward is 0, and so is each function's score.
            score = reward.scores.get(name) if is_judged else 0.0
            scores[name][sample] = np.nan if score is None else score
    return scores


def _collect_environment_scores(trajectories: Sequence[Trajectory]) -> NDArray[np.float64] | None:
    scores = [t.reward.score if t.reward is not None and t.turn_rewards else np.nan for t in trajectories]
    return None if np.isnan(scores).all() else np.array(scores)


def _fill_old_logprobs(segment: Segment) -> NDArray[np.float32]:
    if segment.old_logprobs is not None:
        return segment.old_logprobs
    # NaN marks missing log-probs: any use of them makes the loss NaN.
    return np.where(segment.loss_mask, np.float32(np.nan), np.float32(0))


def _concatenate_all(arrays: Sequence[NDArray[Any] | None]) -> NDArray[Any] | None:
    known_arrays = [array for array in arrays if array is not None]
    return np.concatenate(known_arrays) if len(known_arrays) == len(arrays) else None


def _collect_experts(segments: Sequence[Segment]) -> NDArray[np.int64] | None:
    """Return the handles of the segments' routed experts (MoE), or None if no segment has some.

    A segment without a sampled token, as of an attempt that failed at its start, has `NO_EXPERTS`. Raises MegarlError
    if only some of the segments with sampled tokens have experts.
    """
    if all(segment.routed_experts is None for segment in segments):
        return None
    if any(segment.routed_experts is None and segment.loss_mask.any() for segment in segments):
        raise MegarlError(
            "trainer.router_replay = True: some sampled tokens of the step have no experts from an engine, as in "
            "groups that were sampled before the field was set, and in completions that a resume cut by a lower "
            "rollout.sampling.max_new_tokens; set trainer.router_replay=false"
        )
    return np.array([segment.routed_experts or NO_EXPERTS for segment in segments], np.int64)


def _collect_expert_digests(segments: Sequence[Segment]) -> NDArray[np.uint32] | None:
    """Return the digests of all tokens' experts, 0 in segments without experts. None: no segment has digests, or one
    with experts lacks them.
    """
    if all(segment.expert_digests is None for segment in segments):
        return None
    return _concatenate_all(
        [
            np.zeros(len(segment), np.uint32) if segment.routed_experts is None else segment.expert_digests
            for segment in segments
        ]
    )


def _make_pass_order(num_samples: int, seed: int, step: int, pass_number: int) -> NDArray[np.int64]:
    if pass_number == 0:
        return np.arange(num_samples)
    return np.random.default_rng([seed, step, pass_number]).permutation(num_samples)


def _add_conversations(minibatch: TokenBatch, conversations: TokenBatch, share: float) -> TokenBatch:
    """Return a policy minibatch joined with conversations. These get the fraction `share` of the total loss."""
    policy = minibatch.with_arrays(minibatch.per_token)
    policy.per_token["token_weights"] = (1 - share) * policy.per_token["token_weights"]
    policy.per_token["supervised"] = np.zeros(len(policy.token_ids), np.float32)
    # `concatenate` needs equal sets of arrays, so fill the policy's arrays with zeros for the conversations.
    zeros = np.zeros(len(conversations.token_ids), np.float32)
    supervised = conversations.with_arrays(dict.fromkeys(policy.per_token, zeros))
    weights = token_weights(
        torch.from_numpy(supervised.cu_samples), torch.from_numpy(supervised.loss_mask), "token_mean"
    )
    supervised.per_token["token_weights"] = (share * weights).numpy()
    supervised.per_token["supervised"] = np.ones(len(conversations.token_ids), np.float32)
    return concatenate([policy, supervised])
