"""The buffer between sampling and training. It draws prompts, samples a group of answers each, and feeds the steps.

The life of a group, with the functions moving it (`_sample` is that of `GroupTasks`):

    problem --_start_new_group--> started --_sample--> complete --_collect_complete_groups--> waiting --take--> trained
                                     |                  |                                |  ^              |
                                     |                  | filtered                       |  +- forget_step-+
                                     +- stale, aborted -+--------------------------------+--> dropped

`state.started` holds the groups in flight, `state.waiting` the complete groups for a later step. Checkpoints contain
both.

The training loop calls `load` before its first step. In each step it calls `take`, then `metrics`, and
`add_old_logprobs` before the update. If a stop signal abandons the step before its update, the loop calls
`state.forget_step`. At the end it calls `aclose`.

Groups start and complete within `take`. With sampling ahead they also do so between two calls, where `_wake_and_refill`
replaces a filtered-out group. Only `take` drops stale or surplus groups.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from megarl.config import Recipe
from megarl.data.mixture import Mixture, Positions
from megarl.rollout.buffer_policy import BufferPolicy, StepDemand, passes_filter, refuse_unjudged, starved_message
from megarl.rollout.group_tasks import GroupTasks
from megarl.rollout.journal.journal import AttemptJournal
from megarl.rollout.pool import BUDGET_SECONDS, AbandonedError
from megarl.rollout.recording import StartedGroup
from megarl.rollout.source import Source, make_mixture
from megarl.rollout.state import RLState, draw_of, flatten, problem_lookup
from megarl.rollout.step.scoring import Forward, complete_logprobs, lacks_logprobs, with_logprobs
from megarl.tracking.metric_rows import SINCE_RUN_BEGAN, MetricRow
from megarl.types import Group, MegarlError, Trajectory

METRICS = (
    MetricRow(
        "rollout/prompt_batches",
        "count",
        "batches of prompts drawn to fill the step",
        condition="algorithm.dynamic_sampling",
    ),
    MetricRow("environment/SOURCE/epoch", "epochs", "passes over a source's training data so far, in a mixture"),
    MetricRow("data/epoch", "epochs", "passes over the training data so far"),
    MetricRow(
        "rollout/groups_passing_filter", "share", "groups passing the filter", condition="algorithm.dynamic_sampling"
    ),
    MetricRow(
        "time/rollout_late_rewards_seconds",
        "seconds",
        "from a batch's last completion until all its rewards are computed; if the batch fills the step, also until "
        "colocated engines are asleep",
    ),
    MetricRow("partial/share", "share", "trajectories with tokens of several weight versions"),
    MetricRow("staleness/old_tokens", "tokens", "tokens of earlier weight versions"),
    MetricRow(
        "staleness/span/{mean,max}", "versions", "weight versions from a trajectory's oldest token to its newest"
    ),
    MetricRow("staleness/dropped", "count", "groups dropped for exceeding the staleness bound"),
    MetricRow("staleness/waited_seconds", "seconds", "how long the step waited only for groups at the staleness bound"),
    MetricRow("rollout/aborted", "count", "groups dropped as surplus"),
    MetricRow("rollout/in_flight", "count", "groups continuing into the next step"),
    MetricRow("rollout/ready", "count", "complete groups waiting for a later step"),
    MetricRow("rollout/drawn", "count", "groups started", SINCE_RUN_BEGAN),
    MetricRow("rollout/used", "count", "groups trained on", SINCE_RUN_BEGAN),
    MetricRow(
        "rollout/dropped_groups",
        "count",
        "groups dropped, aborted or filtered out since the run began; every other group drawn is used, in flight or "
        "ready",
    ),
)

_CANCEL_SECONDS = 5.0


class GroupBuffer:
    """Samples groups, and holds each from the draw of its prompt until a step trains on it or it is dropped.

    `policy` selects one of three modes:

    - Synchronous: prompts are drawn in batches, and one weight version samples a whole batch. Surplus groups wait for
      the next step.
    - Continuing or aborting stragglers: prompts are drawn one by one, `algorithm.oversampling` times as many as a step
      needs. The step takes the first groups to complete. A group's oldest token may be at most `rollout.max_staleness`
      weight versions old. At this limit, the step waits for the group or drops it (`rollout.on_stale`).
    - Sampling ahead: groups are sampled during training, and used in the order of drawing. With at most
      `StepDemand.max_live_groups` groups at a time, no group exceeds the limit.

    `sampled` are the trajectories completed for the last step.
    """

    def __init__(
        self,
        recipe: Recipe,
        sources: Sequence[Source],
        state: RLState,
        policy: BufferPolicy | None = None,
        journal: AttemptJournal | None = None,
        *,
        on_sampled: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`journal` records agents' attempts. `on_sampled` is called after a synchronous step's last completion."""
        self.state, self.policy = state, policy or BufferPolicy()
        self.sampled: list[Trajectory] = []
        self._recipe = recipe
        self._sources = {source.name: source for source in sources}
        self._mixture = make_mixture(sources, recipe.seed)
        self._demand = StepDemand(self.policy, recipe, recipe.train.prompts_per_step, step=1, engine_version=1)
        self._tasks = GroupTasks(
            recipe,
            self._sources,
            journal,
            is_synchronous=self.policy.is_synchronous,
            on_end=self._wake_and_refill,
            on_sampled=on_sampled,
        )
        self._wake_event = asyncio.Event()
        self._counts: dict[str, float] = {}
        self._collected: list[Group] = []
        """Groups completed since a step last took groups, including the filtered-out ones."""
        self._num_surplus = 0
        self._num_started = 0
        self._replaces_filtered_groups = False
        """Whether a filtered-out group is replaced at once: True between two `take` calls, until an attempt fails."""
        self._late_reward_seconds = 0.0

    def load(self, folder: Path) -> int:
        """Restore the buffer's state from a checkpoint folder.

        Returns the number of waiting trajectories without the trainer's log-probs. Their weights are gone, so the
        engine's log-probs take their place.
        """
        self.state.load(folder, problem_lookup({name: source.problems for name, source in self._sources.items()}))
        # Groups sampled by several weight versions get log-probs only in the step that trains on them.
        if self._recipe.algorithm.old_logprobs != "trainer" or not self.policy.is_synchronous:
            return 0
        trajectories = [t for t in flatten(self.state.waiting) if lacks_logprobs(t)]
        self.state.waiting = [
            [with_logprobs(t, [s.rollout_logprobs for s in t.segments]) if lacks_logprobs(t) else t for t in group]
            for group in self.state.waiting
        ]
        return len(trajectories)

    async def take(self, num_groups: int, weight_version: int, engine_version: int | None = None) -> list[Group]:
        """Return the groups for a training step, in the order in which their prompts were drawn.

        `weight_version` is that of the trainer, and also the number of the step. `engine_version` is that of the
        engines; None: the same.

        Raises MegarlError if too few groups pass the filter in `algorithm.max_attempts` batches of prompts. Raises
        AbandonedError if the run must stop, and the error of a failed attempt.
        """
        self._replaces_filtered_groups = False
        engine_version = weight_version if engine_version is None else engine_version
        self._demand = StepDemand(self.policy, self._recipe, num_groups, weight_version, engine_version)
        self._counts = {"staleness/dropped": 0.0, "staleness/waited_seconds": 0.0, "rollout/aborted": 0.0}
        self._num_surplus, self._late_reward_seconds = len(self.state.waiting), 0.0
        # Remember the state before the draws, so that `forget_step` can undo them.
        self.state.begin_step(repeats_draws=self.policy.is_synchronous)
        if self.policy.is_synchronous:
            groups = await self._sample_or_cancel_step()
        else:
            self._drop_stale_groups()
            groups = await self._sample_groups_for_step()
        # If the step is undone, `forget_step` makes these groups wait again, so nothing is sampled twice.
        self.state.use_groups(groups)
        if self.policy.stragglers == "abort":
            self._abort_remaining_groups()
        self._set_metrics(groups)
        self._replaces_filtered_groups = self.policy.steps_ahead > 0
        return _renumber(groups)

    async def aclose(self) -> None:
        """Cancel all groups in flight. An environment that ignores its cancellation is abandoned after 5 seconds."""
        self._replaces_filtered_groups = False
        self._tasks.cancel_all()
        await self._tasks.wait_until_cancelled(_CANCEL_SECONDS)

    def metrics(self) -> dict[str, float]:
        return self._counts | _compute_position_metrics(
            self._mixture, self.state.positions, is_mixture=bool(self._recipe.mixture)
        )

    async def add_old_logprobs(self, groups: Sequence[Group], forward: Forward) -> list[Group]:
        """Return the groups with the trainer's `old_logprobs` where needed. Call this before the step's update.

        In synchronous training, groups waiting for a later step get log-probs too: the trainer still has the weights
        that sampled them. In other modes a group gets them just before its own update.
        """
        if self.policy.is_synchronous:
            completed, self.state.waiting = await complete_logprobs(groups, self.state.waiting, self._recipe, forward)
        else:
            # Groups may complete and join `state.waiting` during the forward pass, so do not replace that list.
            completed, _ = await complete_logprobs(groups, [], self._recipe, forward)
        return completed

    async def _sample_groups_for_step(self) -> list[Group]:
        """Start groups until enough are complete for the step, and return these."""
        while True:
            self._collect_complete_groups()
            self._start_groups(self._demand.max_live_groups)
            # Replace filtered-out groups before each check.
            if (groups := self._demand.choose_groups(self.state)) is not None:
                return groups
            self._refuse_starved_step()
            # With enough complete groups, the step waits only for groups at the staleness limit.
            waits_for_stale = len(self.state.waiting) >= self._demand.num_groups
            wait_began = time.monotonic()
            await self._wait_for_a_group()
            self._counts["staleness/waited_seconds"] += waits_for_stale * (time.monotonic() - wait_began)
            if any(source.sampler.is_abandoned() for source in self._sources.values()):
                raise AbandonedError

    async def _sample_or_cancel_step(self) -> list[Group]:
        """Return the groups of a synchronous step. On an error, cancel all groups and their requests."""
        try:
            groups = await self._sample_groups_for_step()
            # An agent may end before a request of its own has left the engine.
            await self._tasks.wait_until_drained()
        except BaseException:
            self._tasks.cancel_all()
            await self._tasks.wait_until_cancelled()
            await self._tasks.wait_until_drained()
            raise
        finally:
            # Await this after an error too: the handler of the error must know whether the engines sleep.
            await self._tasks.wait_until_engines_sleep()
        return groups

    def _start_groups(self, num_live: int) -> None:
        """Continue the unfinished groups of a checkpoint, then start new groups.

        A synchronous step starts one batch of `num_live` prompts. In other modes, groups start until `num_live` are in
        flight or waiting.
        """
        state = self.state
        # Only groups drawn one by one are in flight in a checkpoint, so their seed number is `draw` + 1, as below.
        for group in state.started.values():
            if not self._tasks.is_started(group.draw):
                self._start_attempts(group, group.draw + 1)
        if not self.policy.is_synchronous:
            while len(state.started) + len(state.waiting) < num_live and not self._has_drawn_enough:
                state.drawn += 1
                self._start_new_group(state.drawn - 1, state.drawn)
        elif not state.started and len(state.waiting) < self._demand.num_groups and not self._has_drawn_enough:
            # A whole batch counts as one draw, with one seed number. Its groups are numbered after those that wait.
            state.drawn += 1
            first_draw = self._num_surplus + self._num_started
            problem_counts: Counter[tuple[str, int]] = Counter()
            for draw in range(first_draw, first_draw + num_live):
                self._start_new_group(draw, state.drawn, problem_counts)

    def _start_new_group(
        self, draw: int, seed_number: int, problem_counts: Counter[tuple[str, int]] | None = None
    ) -> None:
        """Draw a problem and start its group. `problem_counts` counts the batch's problems by source and index."""
        problem, positions = self._mixture.draw(self.state.positions)
        # All attempts of a group share one temperature, even if its schedule moves on during a long group.
        temperature = self._sources[problem.source].sampling(self._demand.step).temperature
        group = StartedGroup(draw, problem, temperature)
        self.state.start_group(group, positions)
        self._num_started += 1
        problem_counts = Counter() if problem_counts is None else problem_counts
        self._start_attempts(group, seed_number, repeat=problem_counts[problem.source, problem.index])
        problem_counts[problem.source, problem.index] += 1

    def _start_attempts(self, group: StartedGroup, seed_number: int, *, repeat: int = 0) -> None:
        """Start the unfinished attempts of a group. `repeat` is how often the batch drew this problem before."""
        seed = f"{self._recipe.seed} {seed_number}"
        if self._recipe.mixture:
            # Two sources may have problems with the same index.
            seed = f"{seed} {group.problem.source}"
        if repeat:
            # All groups of a batch share one seed number. A problem drawn twice would get equal completions.
            seed = f"{seed} repeat {repeat}"
        self._tasks.start_group(group, seed)

    def _wake_and_refill(self, task: asyncio.Future[None]) -> None:
        """Wake `take` after a sampling task ended, and replace a group filtered out during training."""
        self._wake_event.set()
        if task.cancelled() or task.exception() is not None:
            self._replaces_filtered_groups = False  # the next `take` raises it
        if self._replaces_filtered_groups:
            self._collect_complete_groups()
            # This step's groups were taken already, but `max_live_groups` still counts them.
            self._start_groups(self._demand.max_live_groups - self._demand.num_groups)

    async def _wait_for_a_group(self) -> None:
        """Wait until a group completes or fails, at most 1 second, so that the caller can check for a stop."""
        self._wake_event = asyncio.Event()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake_event.wait(), BUDGET_SECONDS)

    def _collect_complete_groups(self) -> None:
        """Add complete groups to the waiting groups if they pass the filter. Raises the error of a failed attempt."""
        state, recipe = self.state, self._recipe
        ended_draws = self._tasks.find_ended()
        if self.policy.is_synchronous and ended_draws:
            self._late_reward_seconds += time.monotonic() - self._tasks.sampled_at
        for draw in ended_draws:
            finished_attempts = state.started[draw].finished
            group = [finished_attempts[attempt_number] for attempt_number in range(recipe.train.samples_per_prompt)]
            # Report before removing the group: if this raises during training, the next `take` must raise it again.
            self._report_to_curriculum(group)
            self._tasks.remove_group(draw)
            del state.started[draw]
            self._collected.append(group)
            if passes_filter(group, recipe.algorithm):
                state.waiting = [*state.waiting, group]
            else:
                state.drop_groups("filtered", [group[0].problem])

    def _report_to_curriculum(self, group: Group) -> None:
        """Report a complete group's share of right answers to the curriculum.

        Raises MegarlError if the recipe needs right-or-wrong verdicts and the group has none.
        """
        problem = group[0].problem
        refuse_unjudged(group, self._sources[problem.source].recipe)
        # Failed attempts have no reward. They show nothing about the problem's difficulty.
        verdicts = [bool(t.reward.answer_correct) for t in group if t.reward is not None]
        if verdicts:
            self.state.positions = self._mixture.update_solve_rate(
                self.state.positions, problem, sum(verdicts) / len(verdicts)
            )

    @property
    def _has_drawn_enough(self) -> bool:
        """Whether this step has started as many groups as `algorithm.max_attempts` batches of prompts."""
        algorithm = self._recipe.algorithm
        return (
            bool(algorithm.dynamic_sampling)
            and self._num_started >= algorithm.max_attempts * self._demand.max_live_groups
        )

    def _refuse_starved_step(self) -> None:
        """Raise MegarlError if all allowed prompts were drawn, and too few groups passed the filter."""
        state = self.state
        if self._has_drawn_enough and len(state.started) + len(state.waiting) < self._demand.max_live_groups:
            summary = f"{self._num_started} prompts gave {len(state.waiting)} of {self._demand.num_groups} groups"
            raise MegarlError(starved_message(self._recipe.algorithm, summary, self._collected))

    def _drop_stale_groups(self) -> None:
        """Drop all groups with tokens older than the staleness limit, and cancel those in flight."""
        state, stale_draws = self.state, self._demand.stale_draws(self.state)
        self._counts["staleness/dropped"] += len(stale_draws)
        started_problems = [group.problem for draw, group in state.started.items() if draw in stale_draws]
        waiting_problems = [group[0].problem for group in state.waiting if draw_of(group) in stale_draws]
        state.drop_groups("stale", started_problems + waiting_problems)
        self._tasks.cancel_groups([draw for draw in state.started if draw in stale_draws], is_dropped=True)
        state.started = {draw: group for draw, group in state.started.items() if draw not in stale_draws}
        state.waiting = [group for group in state.waiting if draw_of(group) not in stale_draws]

    def _abort_remaining_groups(self) -> None:
        """Drop all groups in flight and waiting: the step has its groups, and stragglers are aborted."""
        state = self.state
        surplus = [*(group.problem for group in state.started.values()), *(group[0].problem for group in state.waiting)]
        self._counts["rollout/aborted"] += len(surplus)
        state.drop_groups("aborted", surplus)
        self._tasks.cancel_all(is_dropped=True)
        state.started.clear()
        state.waiting = []

    def _set_metrics(self, groups: Sequence[Group]) -> None:
        """Set the metrics of the step that trains on `groups`. Restart the counts for the next step."""
        state, algorithm = self.state, self._recipe.algorithm
        collected_groups, self._collected = self._collected, []
        num_started, self._num_started = self._num_started, 0
        self.sampled = flatten(collected_groups)
        # A synchronous step counts its batches, other modes the groups in flight, waiting and used.
        if self.policy.is_synchronous:
            state.waiting = _renumber(state.waiting)
            self._counts = {"time/rollout_late_rewards_seconds": self._late_reward_seconds}
            if algorithm.dynamic_sampling is not None:
                self._counts["rollout/prompt_batches"] = num_started / self._demand.max_live_groups
        else:
            self._counts |= _compute_span_metrics(groups, self._demand.step) | _count_groups(state)
        if algorithm.dynamic_sampling is not None:
            num_passed = sum(passes_filter(group, algorithm) for group in collected_groups)
            self._counts["rollout/groups_passing_filter"] = num_passed / max(len(collected_groups), 1)


def _renumber(groups: Sequence[Group]) -> list[Group]:
    """Return the groups numbered from 0, as a step's batch numbers its prompts."""
    return [[replace(t, group=group_number) for t in group] for group_number, group in enumerate(groups)]


def _compute_span_metrics(groups: Sequence[Group], weight_version: int) -> dict[str, float]:
    """Return metrics on how many weight versions sampled each trajectory of a step."""
    versions_by_sample = [
        np.concatenate([segment.weight_versions[segment.loss_mask] for segment in trajectory.segments])
        for trajectory in flatten(groups)
        if trajectory.num_sampled
    ]
    version_spans = [int(sample_versions.max() - sample_versions.min()) for sample_versions in versions_by_sample]
    return {
        "partial/share": float(np.mean([span > 0 for span in version_spans])),
        "staleness/old_tokens": float(
            sum((sample_versions < weight_version).sum() for sample_versions in versions_by_sample)
        ),
        "staleness/span/mean": float(np.mean(version_spans)),
        "staleness/span/max": float(max(version_spans)),
    }


def _count_groups(state: RLState) -> dict[str, float]:
    return {
        "rollout/in_flight": float(len(state.started)),
        "rollout/ready": float(len(state.waiting)),
        "rollout/drawn": float(state.drawn),
        "rollout/used": float(state.used),
        "rollout/dropped_groups": float(state.num_dropped),
    }


def _compute_position_metrics(mixture: Mixture, positions: Positions, *, is_mixture: bool) -> dict[str, float]:
    """Return the epochs and the curriculum's metrics of each source."""
    epochs = mixture.epochs(positions)
    metrics = {f"environment/{name}/epoch" if is_mixture else "data/epoch": value for name, value in epochs.items()}
    for name, curriculum_metrics in mixture.metrics(positions).items():
        prefix = f"environment/{name}/" if is_mixture else ""
        metrics |= {f"{prefix}curriculum/{key}": value for key, value in curriculum_metrics.items()}
    return metrics
