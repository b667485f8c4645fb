"""Training on samples of the current policy: the parts shared by on-policy loops."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

from megarl.files.atomic import storage_faults_named
from megarl.loops.models import load_experts
from megarl.loops.performance import Balance
from megarl.loops.session import Session
from megarl.loops.step import Step
from megarl.platform.spans import span
from megarl.rollout.buffer import GroupBuffer
from megarl.rollout.buffer_policy import BufferPolicy
from megarl.rollout.evaluate import failure_metrics
from megarl.rollout.source import served_metrics
from megarl.rollout.state import RLState, flatten
from megarl.rollout.step.step_metrics import step_metrics
from megarl.types import Group


class OnPolicyRun:
    """Run of an on-policy loop. `buffer` samples the groups. `state` is saved with each step."""

    def __init__(self, session: Session, buffer: GroupBuffer) -> None:
        self.buffer, self.state = buffer, buffer.state
        self._session, self._recipe = session, session.recipe
        # Resuming reshards first, so the engines begin with the version of the first step.
        self._engine_version = session.steps.remaining.start
        self._balance = _balance(session)
        # Free the engines' memory as soon as sampling ends, while rewards are still awaited.
        buffer.on_sampled = session.reshard_schedule.sleep_engines

    async def resume_or_evaluate(self) -> None:
        """Continue from the checkpoint and repeat an interrupted evaluation, or evaluate before the first step."""
        session = self._session
        # A signal may have interrupted the evaluation of this step: its other metrics were saved unlogged.
        step = session.origin.unlogged or Step(session.folder.resumed_step, is_trained=True)
        if session.origin.checkpoint is not None:
            await self._resume(step.number)
            if session.origin.unlogged is None:
                return
        elif not self._recipe.evaluates_first:
            return
        async with session.steps.saving_on_stop(step, self.state):
            step.log(await session.evaluate(step.number))
        session.steps.finish(step)

    async def _resume(self, step: int) -> None:
        session, checkpoint = self._session, self._session.origin.checkpoint
        assert checkpoint is not None
        if lacking := self.buffer.load(checkpoint):
            session.tracker.notice(
                f"{checkpoint}: {lacking} trajectories waiting for training have no log-probs of the trainer, because "
                "algorithm.old_logprobs was not trainer when they were sampled. Their importance ratio uses the "
                "engine's log-probs instead"
            )
        # The ledger's last lines may have events of after the save.
        session.rewind_draws(self.state.draws.num_written)
        await load_experts(session.models, self._recipe, self.state, checkpoint)
        # The engines hold the initial weights, not the checkpoint's.
        await session.reshard_schedule.run(step)

    async def sample(self, step: Step) -> list[Group]:
        """Return the groups to train the step on. Colocated engines sleep afterwards.

        Raises MegarlError if too many attempts could not be scored.
        """
        with self._session.tracker.phase("rollout"):
            taking = self.buffer.take(self._recipe.train.prompts_per_step, step.number, self._engine_version)
            groups = await self._session.steps.ranks.watching(taking)
        step.log(self.buffer.metrics())
        step.log(failure_metrics(self.buffer.sampled, self._recipe.reward.max_failed_fraction, "reward/"))
        await self._session.reshard_schedule.sleep_engines()
        return groups

    def log_samples(self, step: Step, groups: Sequence[Group]) -> None:
        """Log the metrics of the step's samples. `groups` are those trained on."""
        with span("metrics"):
            step.log(step_metrics(self.buffer.sampled, groups, self._recipe, weight_version=step.number))
            step.log(served_metrics(self._session.sources))

    async def reshard(self, step: Step) -> None:
        """Reshard if due, then log the engines' metrics. The bottleneck detector reads these."""
        session = self._session
        if self._recipe.reshards_at(step.number):
            with session.tracker.phase("reshard"):
                step.log(await session.reshard_schedule.begin(step.number))
            self._engine_version = step.number + 1
        step.log(session.pool.metrics())
        if self._balance is not None:
            # After the pool's metrics, because it reads `time/engines_idle` from them.
            step.log(self._balance.observe_step(session.tracker.seconds, step.metrics))

    async def write_samples(
        self, step: Step, groups: Sequence[Group], token_records: Sequence[Mapping[str, Any]]
    ) -> None:
        """Write the step's trajectories and token records, if due, and what became of the prompts."""
        session = self._session
        sizes = {source.name: len(source.problems) for source in session.sources}
        with storage_faults_named(session.folder.draws_file):
            self.state.draws.write(
                session.folder.draws_file,
                step.number,
                sizes,
                num_open=len(self.state.started) + len(self.state.waiting),
                too_long=session.dropped.total(),
            )
        # A reward model adds scores to `groups` only, so the sampled trajectories lack them.
        trajectories = flatten(groups) if "reward_model" in self._session.models else self.buffer.sampled
        await self._session.samples.write_step(step.number, trajectories, token_records)


@asynccontextmanager
async def on_policy_run(session: Session) -> AsyncIterator[OnPolicyRun]:
    """Enter the run of an on-policy loop. At the end, groups in flight are cancelled."""
    recipe = session.recipe
    buffer = GroupBuffer(recipe, session.sources, RLState(recipe.algorithm), BufferPolicy.from_recipe(recipe))
    async with aclosing(buffer):
        yield OnPolicyRun(session, buffer)


def _balance(session: Session) -> Balance | None:
    """Return the bottleneck detector, None for colocated engines."""
    recipe = session.recipe
    if recipe.rollout.placement == "colocated":
        return None
    takes_turns = recipe.rollout.staleness_bound == 0
    return Balance(recipe.trainer_ranks, recipe.separate_ranks, session.tracker.notice, takes_turns=takes_turns)
