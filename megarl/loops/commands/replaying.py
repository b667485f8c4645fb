"""Replay of a recorded step (`megarl replay`): trainer ranks execute it again, and the result is compared.

Engines do not start. The ranks load the newest checkpoint before the step, or the initial weights, and repeat the
recorded steps since then. A change of the recipe applies only to the replayed step.
"""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.checkpoint.manifest import check_hashes, check_sizes
from megarl.checkpoint.torch_dist_reader import check_harmless
from megarl.cluster.calls.deadlines import run_deadlines
from megarl.cluster.calls.worker_group import WorkerGroup
from megarl.cluster.launchers.run_nodes import start_ranks
from megarl.cluster.rank_model import RankModel
from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.config.reading.override_text import override_text
from megarl.config.recipe import load, recipe_changes
from megarl.data.chat import tokenizer_of
from megarl.data.token_batch import TokenBatch
from megarl.datasets.counts import with_steps
from megarl.datasets.reading import Dropped
from megarl.files.temporary_folder import temporary_folder
from megarl.loops.models import make_rank_models, move_reference
from megarl.loops.observers.step_recorder import layout_values, make_record
from megarl.loops.rl import conversations_of
from megarl.loops.saving.checkpointing import plain_recipe
from megarl.loops.saving.data_position import DataPosition
from megarl.loops.saving.driver_state import read_driver
from megarl.loops.sources import read_data, start_rewards
from megarl.loops.step import StepSamples
from megarl.loops.stopping import leaving_on_signals
from megarl.planner.defaults import with_memory_defaults
from megarl.preflight import check
from megarl.rewards.scoring.calling import Sample
from megarl.rewards.scoring.reward_pool import RewardPool
from megarl.rollout.state import flatten, problem_lookup
from megarl.rollout.step.advantages import weigh_batch
from megarl.rollout.step.rl_batch import RLBatch
from megarl.rollout.step.scoring import complete_logprobs, forward_of, score_groups
from megarl.rollout.step.step_record import (
    COMPARED_METRICS,
    OTHER_LAYOUT_TOLERANCE,
    RECIPE,
    Difference,
    StepRecord,
    find_differences,
    record_folder,
    recorded_steps,
)
from megarl.rollout.step.updates import PolicyUpdates, update_critic
from megarl.tracking.outcomes import StepOutcome
from megarl.tracking.run_folder import RECORDS
from megarl.tracking.run_record import RunRecord, checkpoint_step
from megarl.types import ConfigError, FindProblem, Group, Trajectory

CHANGEABLE = ("algorithm.", "reward.", "train.updates_per_step", "train.epochs_per_step")
"""Prefixes of the fields that `--set` may change for a replayed step."""

EFFECT_COLUMNS = ("prompt", "attempt", "reward", "advantage", "log-prob after, nats per token", "largest at token")
"""Columns of the table of a change's effect, in the order of `SampleEffect.row`."""

LOGS = "logs/replay"
"""Folder in a run folder for the rank logs of the newest replay."""


@dataclass(frozen=True, slots=True)
class Replay:
    """A checked replay. `steps` are executed in order.

    `recipe` is the run's, `changed` that of the last step. `checkpoint` None: the initial weights.
    """

    run: Path
    recipe: Recipe
    parallel: ParallelConfig
    changed: Recipe
    changes: tuple[str, ...]
    checkpoint: Path | None
    steps: range

    @property
    def step(self) -> int:
        return self.steps[-1]


@dataclass(frozen=True, slots=True)
class StepComparison:
    """Differences between a replayed step and its record, in the order of computation. Empty: equal."""

    step: int
    num_tokens: int
    is_same_layout: bool
    differences: tuple[Difference, ...]


@dataclass(frozen=True, slots=True)
class SampleEffect:
    """Values of a sample, each in the run and with the change: reward, advantage, log-prob.

    `advantage` is the mean over trained tokens. `logprob` is the mean after the step's updates, in nats per trained
    token.
    """

    prompt: int
    attempt: int
    reward: tuple[float, float]
    advantage: tuple[float, float]
    logprob: tuple[float, float]
    largest_token: int
    """Trained token whose log-prob changed most, counted from the sample's first token."""

    def row(self) -> dict[str, int | tuple[float, float]]:
        values = (self.prompt, self.attempt, self.reward, self.advantage, self.logprob, self.largest_token)
        return dict(zip(EFFECT_COLUMNS, values, strict=True))


@dataclass(frozen=True, slots=True)
class Effect:
    """Effect of a change on the replayed step. `metrics` of its updates are (in the run, with the change)."""

    metrics: Mapping[str, tuple[float, float]]
    samples: tuple[SampleEffect, ...]


def prepare(run: Path, step: int, overrides: Sequence[str] = (), changes: Sequence[str] = ()) -> Replay:
    """Check the inputs of a replay. Starts no process.

    A replay executes the steps from the newest checkpoint before `step`, or from the beginning, up to `step`. It uses
    the recipe recorded at `step`. `overrides` change the recipe for all these steps, usually its parallel sizes. With
    `changes`, `step` is executed twice from the same state: as in the run, and with these fields changed. Raises
    ConfigError or DataError for a missing record, a damaged checkpoint, or a field that cannot change.
    """
    run_record = RunRecord.open_of_this_version(run)
    checkpoint, steps, recorded_layout = _find_executed_steps(run_record, step)
    run_folder = run.absolute()
    run_fields = [override_text("runs_folder", str(run_folder.parent)), override_text("name", run_folder.name)]

    def load_recorded_recipe(*changes: str) -> Recipe:
        # The run's config.yaml may be newer: a resumed run can change its recipe.
        file = record_folder(run / RECORDS, step) / RECIPE
        return with_memory_defaults(with_steps(load(file, [*run_fields, *changes], is_of_run=True)), is_start=True)

    recipe = load_recorded_recipe(*overrides)
    parallel = check(recipe)
    _refuse_another_rounding(step, recorded_layout, recipe, parallel)
    if not changes:
        return Replay(run, recipe, parallel, recipe, (), checkpoint, steps)
    changed_recipe = load_recorded_recipe(*overrides, *changes)
    changed_fields = tuple(recipe_changes(plain_recipe(recipe), changed_recipe))
    if not changed_fields:
        raise ConfigError(f"--set {changes[0]}: the run already has this value; give another one")
    check(changed_recipe)
    _refuse_other_models(recipe, changed_recipe, changed_fields)
    return Replay(run, recipe, parallel, changed_recipe, changed_fields, checkpoint, steps)


def _find_executed_steps(run_record: RunRecord, step: int) -> tuple[Path | None, range, Mapping[str, Any]]:
    """Return the checkpoint to start from (None: the initial weights), the steps to execute, and the record's layout.

    Raises ConfigError for a step without a record or with another recipe, or DataError for a damaged checkpoint.
    """
    run = run_record.path
    # The replay starts from the newest checkpoint before the step, so all steps since then need records.
    earlier_checkpoints = [folder for folder in run_record.checkpoints if checkpoint_step(folder) < step]
    first_step = checkpoint_step(earlier_checkpoints[0]) + 1 if earlier_checkpoints else 1
    steps = range(first_step, step + 1)
    recorded_numbers = recorded_steps(run / RECORDS)
    if missing_steps := sorted(set(steps) - recorded_numbers):
        recorded_text = (
            f"it has steps {min(recorded_numbers)} to {max(recorded_numbers)}"
            if recorded_numbers
            else "it has no records"
        )
        start_text = f"the checkpoint of step {first_step - 1}" if earlier_checkpoints else "the initial weights"
        raise ConfigError(
            f"--step {step}: a replay starts from {start_text} and needs the records of steps {first_step} to {step}, "
            f"but {run / RECORDS} has none of step {missing_steps[0]}; {recorded_text}. Choose another step; steps are "
            "recorded only with train.record=tokens or all"
        )
    record = StepRecord.load(run / RECORDS, step)
    # Read all records now, to find a damaged one before the ranks start.
    recipes = {earlier_step: StepRecord.load(run / RECORDS, earlier_step).recipe for earlier_step in steps[:-1]}
    if other_recipes := [earlier_step for earlier_step in recipes if recipes[earlier_step] != record.recipe]:
        raise ConfigError(
            f"--step {step}: the recipe was changed after step {other_recipes[-1]}, and the run saved no checkpoint "
            f"from there to step {step}; replay a step up to {other_recipes[-1]}"
        )
    if not earlier_checkpoints:
        return None, steps, record.layout
    # Verify the checkpoint's files, because the ranks load them.
    if expected_sizes := check_sizes(earlier_checkpoints[0]):
        check_hashes(earlier_checkpoints[0], expected_sizes)
    check_harmless(earlier_checkpoints[0])
    return earlier_checkpoints[0], steps, record.layout


def _refuse_another_rounding(
    step: int, recorded_layout: Mapping[str, Any], recipe: Recipe, parallel: ParallelConfig
) -> None:
    """Raise ConfigError for an optimizer other than the recorded run's, or for other parallel sizes below float32."""
    if recipe.trainer.distributed_optimizer != recorded_layout["trainer"]["distributed_optimizer"]:
        raise ConfigError(
            f"--step {step}: trainer.distributed_optimizer = {recipe.trainer.distributed_optimizer}: the run's "
            "checkpoints have the state of the other optimizer; leave this override out"
        )
    if layout_values(recipe, parallel) != recorded_layout and recipe.model.dtype != "float32":
        raise ConfigError(
            f"--step {step}: with model.dtype = {recipe.model.dtype}, rounding in another parallel layout differs by "
            f"far more than the tolerance of {OTHER_LAYOUT_TOLERANCE:g}, so the step can be replayed only in the run's "
            "own layout; remove the overrides of trainer.* and cluster.*"
        )


def _refuse_other_models(recipe: Recipe, changed_recipe: Recipe, fields: Sequence[str]) -> None:
    """Raise ConfigError for changes beyond a step's objective and rewards. `fields` are `field: old -> new`."""
    for text in fields:
        if not text.startswith(CHANGEABLE) or text.startswith(("algorithm.ptx", "reward.model")):
            raise ConfigError(
                f"--set {text}: a replayed step can change algorithm.*, reward.* (not reward.model), "
                "train.updates_per_step and train.epochs_per_step; use an override (SECTION.FIELD=VALUE without --set) "
                "for the layout, or `megarl fork` for other changes"
            )
    # The record lacks what a model or a loss needs that the run did not have.
    needs_of_recipes: dict[str, Callable[[Recipe], bool]] = {
        "a reference model": lambda candidate: candidate.has_reference,
        "a critic": lambda candidate: candidate.has_critic,
        "a loss of entropies": lambda candidate: candidate.algorithm.entropy_coefficient > 0,
    }
    for model_part, is_needed_by in needs_of_recipes.items():
        if is_needed_by(recipe) != is_needed_by(changed_recipe):
            verb, has = ("needs", "has none") if is_needed_by(changed_recipe) else ("runs without", "has one")
            raise ConfigError(
                f"--set {fields[0]}: the new value {verb} {model_part}, and the recorded run {has}; to try it, use "
                "`megarl fork`"
            )
    if any(text.startswith("reward.") for text in fields):
        _refuse_unscorable(changed_recipe)


def _refuse_unscorable(recipe: Recipe) -> None:
    """Raise ConfigError if a record does not suffice to compute a step's rewards again."""
    if recipe.mixture:
        raise ConfigError("--set reward: the run has a mixture; rewards of one source can be replayed")
    if recipe.rollout.environment != "single_turn":
        raise ConfigError(
            f"--set reward: rollout.environment = {recipe.rollout.environment} gives rewards of its own; rewards of "
            "the environment single_turn can be replayed"
        )


async def replay(prepared: Replay, notify: Callable[[str], object]) -> tuple[list[StepComparison], Effect | None]:
    """Execute the steps on trainer ranks. Return a comparison per step, and the changes' effect, if any.

    `notify` gets a line per executed step.
    """
    recipe, parallel, run = prepared.recipe, prepared.parallel, prepared.run
    async with AsyncExitStack() as stack:
        stack.enter_context(leaving_on_signals("the replay was stopped before its end; the run is unchanged"))
        # In the run folder: its disk has room for checkpoints, and all nodes see it.
        folder = stack.enter_context(temporary_folder(run, ".replay_"))
        tokenizer = tokenizer_of(recipe.model)
        dropped_counts: Dropped = Counter()
        data = read_data(recipe, tokenizer, dropped_counts, folder, with_validation=False)
        conversations_at = conversations_of(recipe, tokenizer, dropped_counts, _read_position(prepared.checkpoint))
        problems = {source: train for source, (train, _) in data.items()}
        find_problem = problem_lookup(problems, "the record", "restore the run's data")
        trainers = await _start_trainers(recipe, parallel, run / LOGS, stack)
        executor = _StepExecutor(prepared, trainers, conversations_at, find_problem)
        if prepared.checkpoint is not None:
            await trainers.call("load_checkpoint", prepared.checkpoint)
        # Execute the steps before the replayed one, and compare each with its record.
        comparisons = []
        for earlier_step in prepared.steps[:-1]:
            comparisons.append(await executor.compare_step(earlier_step))
            notify(f"step {earlier_step}: executed")
        if not prepared.changes:
            comparisons.append(await executor.compare_step(prepared.step))
            return comparisons, None
        pools: Mapping[str, RewardPool] = {}
        if any(text.startswith("reward.") for text in prepared.changes):
            pools = start_rewards(prepared.changed, stack, run / LOGS, notify)
        comparison, effect = await executor.compare_changed_step(prepared.step, folder / "state", pools)
        return [*comparisons, comparison], effect


def _read_position(checkpoint: Path | None) -> DataPosition:
    """Return the position in the data at a checkpoint; None: at the beginning."""
    if checkpoint is None:
        return DataPosition()
    return DataPosition.from_checkpoint(checkpoint_step(checkpoint), read_driver(checkpoint))


async def _start_trainers(recipe: Recipe, parallel: ParallelConfig, logs: Path, stack: AsyncExitStack) -> WorkerGroup:
    """Start the ranks as in the run, and construct trainers on them. `stack` closes them."""
    # Remove the logs of an earlier replay.
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    # Start idle ranks of separate engines too, so that cores and threads are divided as in the run.
    ranks = await start_ranks(recipe.cluster, logs, parallel.replica_sizes, trainer=parallel)
    stack.push_async_callback(ranks.close)
    ranks.set_deadlines(lambda: run_deadlines(recipe.cluster))
    topology = ranks.trainers.topology
    settings = {"recipe": recipe, "parallel": parallel, "topology": topology}
    await ranks.trainers.construct("megarl.worker.trainer_worker:TrainerWorker", settings)
    return ranks.trainers


class _StepExecutor:
    """Executes recorded steps one after the other on trainer ranks."""

    def __init__(
        self,
        prepared: Replay,
        trainers: WorkerGroup,
        conversations_at: Callable[[int], TokenBatch | None],
        find_problem: FindProblem,
    ) -> None:
        self._prepared, self._trainers = prepared, trainers
        self._models = make_rank_models(prepared.recipe, prepared.parallel, trainers)
        self._conversations_at, self._find_problem = conversations_at, find_problem

    @property
    def _policy(self) -> RankModel:
        return self._models["policy"]

    async def compare_step(self, step: int) -> StepComparison:
        record = StepRecord.load(self._prepared.run / RECORDS, step, self._find_problem)
        batch, _, metrics = await self._execute_step(record, self._prepared.recipe, self._models, record.groups)
        comparison = await self._compare_record(record, batch, metrics)
        # A run too moves the reference only after it took the fingerprints of the state.
        await move_reference(self._models, self._prepared.recipe, step)
        return comparison

    async def compare_changed_step(
        self, step_number: int, state: Path, pools: Mapping[str, RewardPool]
    ) -> tuple[StepComparison, Effect]:
        """Execute a step twice from the same state: as in the run, then with the changed recipe.

        `state` is a folder for the trainer's state in between. `pools` score completions with the changed rewards.
        """
        prepared = self._prepared
        record = StepRecord.load(prepared.run / RECORDS, step_number, self._find_problem)
        # First execute the step as in the run. Save the state, to return to it.
        state.mkdir()
        await self._trainers.call("save_checkpoint", state, False, False)
        await self._trainers.call("finish_checkpoint", True)
        batch, groups, metrics = await self._execute_step(record, prepared.recipe, self._models, record.groups)
        comparison = await self._compare_record(record, batch, metrics)
        logprobs = await self._policy.forward(batch)
        # Go back to the state before the step, and execute it with the changes.
        await self._trainers.call("load_checkpoint", state)
        for name in ("policy", "critic") if prepared.recipe.has_critic else ("policy",):
            await self._trainers.call(f"{name}.change_objective", prepared.changed)
        rescored = await _rescore(record.groups, pools) if pools else record.groups
        changed_recipe = prepared.changed
        if any(text.startswith("algorithm.kl_coefficient:") for text in prepared.changes):
            # A step uses its record's coefficient, because algorithm.kl_target may adapt it. So change the record too.
            record = replace(record, kl_coefficient=changed_recipe.algorithm.kl_coefficient)
        # Some objectives need all segments of a sample in one microbatch.
        models = make_rank_models(changed_recipe, prepared.parallel, self._trainers)
        changed_batch, changed_groups, other_metrics = await self._execute_step(
            record, changed_recipe, models, rescored
        )
        other_logprobs = await self._policy.forward(changed_batch)
        effect = Effect(
            {
                name: (metrics[name], other_metrics[name])
                for name in COMPARED_METRICS
                if name in metrics and name in other_metrics
            },
            tuple(
                _compute_sample_effects((groups, changed_groups), (batch, changed_batch), (logprobs, other_logprobs))
            ),
        )
        return comparison, effect

    async def _execute_step(
        self, record: StepRecord, recipe: Recipe, models: Mapping[str, RankModel], groups: Sequence[Group]
    ) -> tuple[RLBatch, list[Group], dict[str, float]]:
        """Execute a step from log-probs to updates. Return its batch, groups and update metrics."""
        policy = models["policy"]
        completed, _ = await complete_logprobs(groups, record.waiting, recipe, forward_of(policy, recipe))
        scored, batch, _ = await score_groups(completed, models, recipe, weight_version=record.step)
        weigh_batch(batch, recipe, record.step, record.kl_coefficient, dict(record.role_baselines))
        metrics: dict[str, float] = {}
        if "critic" in models:
            metrics |= await update_critic(batch, models["critic"], recipe, StepOutcome())
        updates = PolicyUpdates(batch, recipe, record.step, self._conversations_at(record.step))
        for minibatch in updates:
            updates.add_update(await policy.update(minibatch, record.kl_coefficient))
        return batch, scored, metrics | updates.metrics()

    async def _compare_record(self, record: StepRecord, batch: RLBatch, metrics: Mapping[str, float]) -> StepComparison:
        samples = StepSamples(record.groups, record.waiting, record.kl_coefficient, record.role_baselines)
        prepared = self._prepared
        replayed = await make_record(
            self._policy, prepared.recipe, prepared.parallel, record.step, samples, batch, metrics,
            is_complete=bool(record.arrays),
        )  # fmt: skip
        return StepComparison(
            record.step, record.num_tokens, replayed.layout == record.layout, tuple(find_differences(record, replayed))
        )


async def _rescore(groups: Sequence[Group], pools: Mapping[str, RewardPool]) -> list[Group]:
    """Return the groups with rewards computed again. Attempts whose environment failed stay unscored."""

    async def rescore(trajectory: Trajectory) -> Trajectory:
        # Reward functions did not see attempts that ended with an error or a limit of their environment.
        if trajectory.reward is None and trajectory.failure and ":" in trajectory.failure:
            return trajectory
        sample = Sample(
            trajectory.text,
            trajectory.problem.answer,
            trajectory.messages[0] if trajectory.messages else trajectory.problem.messages,
            trajectory.problem.record,
            "length" if trajectory.ended == "length" else "stop",
            trajectory.num_sampled,
            is_in_thoughts=trajectory.is_in_thoughts,
        )
        [pool] = pools.values()
        scored = await pool.score(sample)
        return replace(trajectory, reward=scored.trajectory_reward, failure=scored.failure)

    rescored = iter(await asyncio.gather(*map(rescore, flatten(groups))))
    return [[next(rescored) for _ in group] for group in groups]


def _compute_sample_effects(
    groups: tuple[Sequence[Group], Sequence[Group]],
    batches: tuple[RLBatch, RLBatch],
    logprobs: tuple[NDArray[np.float32], NDArray[np.float32]],
) -> list[SampleEffect]:
    """Return the effect of a change on each sample. `logprobs` [tokens] are those after the updates."""
    effects = []
    recorded_batch, changed_batch = batches
    mask = recorded_batch.loss_mask
    for sample, (recorded_sample, changed_sample) in enumerate(zip(*map(flatten, groups), strict=True)):
        first_token, end_token = recorded_batch.cu_samples[sample : sample + 2]
        trained_indices = first_token + mask[first_token:end_token].nonzero()[0]
        if not len(trained_indices):
            continue
        distances = np.abs(logprobs[1][trained_indices] - logprobs[0][trained_indices])

        def mean(values: NDArray[np.float32], indices: NDArray[np.int64] = trained_indices) -> float:
            return float(values[indices].mean())

        effects.append(
            SampleEffect(
                prompt=recorded_sample.group,
                attempt=recorded_sample.number,
                reward=(_score(recorded_sample), _score(changed_sample)),
                advantage=(
                    mean(recorded_batch.per_token["advantages"]),
                    mean(changed_batch.per_token["advantages"]),
                ),
                logprob=(mean(logprobs[0]), mean(logprobs[1])),
                largest_token=int(trained_indices[distances.argmax()] - first_token),
            )
        )
    return effects


def _score(trajectory: Trajectory) -> float:
    return float("nan") if trajectory.reward is None else trajectory.reward.score
