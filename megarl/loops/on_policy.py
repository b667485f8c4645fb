"""Sampling shared by all on-policy loops."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, closing, nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.files.atomic import raise_storage_errors
from megarl.loops.measuring.balance import Balance
from megarl.loops.models import load_experts
from megarl.loops.started_run import Run
from megarl.loops.step import Step
from megarl.platform.spans import span
from megarl.rollout.buffer import GroupBuffer
from megarl.rollout.buffer_policy import BufferPolicy
from megarl.rollout.evaluate import failure_metrics
from megarl.rollout.journal.journal import AttemptJournal
from megarl.rollout.source import served_metrics
from megarl.rollout.state import RLState, flatten, problem_lookup
from megarl.rollout.step.step_metrics import step_metrics
from megarl.tracking.run_record import RunRecord, checkpoint_step
from megarl.types import Group


class OnPolicyRollout:
    """Samples for an on-policy loop's steps. `buffer` samples groups. `state` is saved with each step."""

    def __init__(self, run: Run, buffer: GroupBuffer, journal: AttemptJournal | None = None) -> None:
        """`journal` records the attempts of agent programs; None: there are no agents."""
        self._journal = journal
        self.buffer, self.state = buffer, buffer.state
        self._run, self._recipe = run, run.recipe
        # A resume reshards first, so the engines begin with the version of the first step.
        self._engine_version = run.remaining_steps.start
        self._balance = _make_balance(run)

    async def resume(self) -> None:
        """Load the run's checkpoint, if it starts from one, and reshard its weights."""
        run, checkpoint = self._run, self._run.origin.checkpoint
        if checkpoint is None:
            return
        if num_without_logprobs := self.buffer.load(checkpoint):
            run.tracker.notice(
                f"{checkpoint}: {num_without_logprobs} trajectories waiting for training have no log-probs of the "
                "trainer, because algorithm.old_logprobs was not trainer when they were sampled. Their importance "
                "ratio uses the engine's log-probs instead"
            )
        # The ledger may end with events after the checkpoint.
        run.data.rewind_draws(self.state.draws.num_written)
        await load_experts(run.models, self._recipe, self.state, checkpoint)
        # Replace the initial weights in the engines by the checkpoint's.
        await run.reshard_schedule.run_reshard(run.folder.resumed_step)

    async def sample(self, step: Step) -> list[Group]:
        """Return the groups to train the step on, and let colocated engines sleep.

        Raises MegarlError if too many attempts could not be scored.
        """
        with self._run.tracker.phase("rollout"):
            groups_call = self.buffer.take(self._recipe.train.prompts_per_step, step.number, self._engine_version)
            groups = await self._run.ranks.watching(groups_call)
        step.log(self.buffer.metrics())
        step.log(failure_metrics(self.buffer.sampled, self._recipe.reward.max_failed_fraction, "reward/"))
        await self._run.reshard_schedule.sleep_engines()
        return groups

    def log_samples(self, step: Step, groups: Sequence[Group], trained_tokens: NDArray[np.int64]) -> None:
        """Log the metrics of the step's samples. `groups` are those of its batch.

        `trained_tokens` [trajectories] counts their tokens with a loss in an applied update.
        """
        with span("metrics"):
            step.log(step_metrics(self.buffer.sampled, groups, self._recipe, weight_version=step.number))
            step.log(served_metrics(self._run.data.sources))
        if self._journal is not None:
            # Before the checkpoint, so that the journal has all attempts trained until then.
            trained_counts = [
                (trajectory.journaled_as, num_trained)
                for trajectory, num_trained in zip(flatten(groups), trained_tokens.tolist(), strict=True)
                if trajectory.journaled_as
            ]
            self._journal.settle(step.number, trained_counts, self.state.journaled_names)

    async def reshard(self, step: Step) -> None:
        """Reshard if due, then log the engines' metrics and observe the bottleneck."""
        run = self._run
        if self._recipe.reshards_at(step.number):
            with run.tracker.phase("reshard"):
                step.log(await run.reshard_schedule.begin_reshard(step.number))
            self._engine_version = step.number + 1
        step.log(run.pool.metrics())
        if self._balance is not None:
            # After the pool's metrics, because this reads `time/engines_idle` from them.
            step.log(self._balance.observe_step(run.tracker.seconds, step.metrics))

    async def write_samples(
        self, step: Step, groups: Sequence[Group], token_records: Sequence[Mapping[str, Any]]
    ) -> None:
        """Write the step's trajectories and token records, if due, and the ledger of its prompts."""
        run = self._run
        sizes = {source.name: len(source.problems) for source in run.data.sources}
        with raise_storage_errors(run.data.draws_file):
            self.state.draws.write(
                run.data.draws_file,
                step.number,
                sizes,
                num_open=len(self.state.started) + len(self.state.waiting),
                too_long=run.data.dropped.total(),
            )
        # Only `groups` have a reward model's scores. The buffer's trajectories lack them.
        trajectories = flatten(groups) if "reward_model" in self._run.models else self.buffer.sampled
        await self._run.samples.write_step(step.number, trajectories, token_records)


@asynccontextmanager
async def open_rollout(run: Run) -> AsyncIterator[OnPolicyRollout]:
    """Context of an on-policy loop's sampling. Groups in flight at its end are cancelled.

    Agent programs of an earlier driver continue if the journal has their attempts. Containers of all others are ended.
    """
    recipe, sources = run.recipe, run.data.sources
    with closing(_open_journal(run)) if _has_agents(run) else nullcontext() as journal:
        if journal is not None:
            for source in sources:
                if source.sampler.expect_programs is not None:
                    source.sampler.expect_programs(journal.expected_keys, journal.orphaned_containers)
        state, policy = RLState(recipe.algorithm), BufferPolicy.from_recipe(recipe)
        # Free the engines' memory as soon as sampling ends, while rewards are still awaited.
        sleep_engines = run.reshard_schedule.sleep_engines
        buffer = GroupBuffer(recipe, sources, state, policy, journal, on_sampled=sleep_engines)
        async with aclosing(buffer):
            yield OnPolicyRollout(run, buffer, journal)


def _has_agents(run: Run) -> bool:
    return any(source.sampler.agent is not None for source in run.data.sources)


def _open_journal(run: Run) -> AttemptJournal:
    find_problem = problem_lookup({source.name: source.problems for source in run.data.sources})
    return AttemptJournal(
        run.folder.journal_file,
        run.remaining_steps.start,
        find_problem,
        max_staleness=run.recipe.rollout.staleness_bound,
        saved_steps=[checkpoint_step(folder) for folder in RunRecord.read(run.folder.path).checkpoints],
    )


def _make_balance(run: Run) -> Balance | None:
    """Return the detector of the bottleneck, or None if trainer and engines share their ranks."""
    recipe = run.recipe
    if recipe.rollout.placement == "colocated":
        return None
    takes_turns = recipe.rollout.staleness_bound == 0
    return Balance(recipe.trainer_ranks, recipe.separate_ranks, run.tracker.notice, takes_turns=takes_turns)
