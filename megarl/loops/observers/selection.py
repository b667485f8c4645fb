"""The observers of a run's steps, and their order."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.cluster.rank_model import RankModel
from megarl.cluster.run_ranks import RunRanks
from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.loops.observers.canary import Canary
from megarl.loops.observers.instabilities import Instabilities
from megarl.loops.observers.plan_promise import PlanPromise
from megarl.loops.observers.step_checks import StepChecks
from megarl.loops.observers.step_observer import StepObservers
from megarl.loops.observers.step_recorder import StepRecorder
from megarl.loops.observers.weight_checks import WeightChecks
from megarl.loops.saving.checkpointing import Checkpoints
from megarl.tracking.run_folder import RunFolder
from megarl.tracking.spikes import SpikeDetector
from megarl.tracking.tracker import Tracker


def make_observers(
    recipe: Recipe,
    parallel: ParallelConfig,
    folder: RunFolder,
    tracker: Tracker,
    ranks: RunRanks,
    checkpoints: Checkpoints,
    policy: RankModel,
    *,
    checks: StepChecks,
    weight_checks: WeightChecks,
    spikes: SpikeDetector | None,
    predicted_memory: Mapping[str, int],
) -> StepObservers:
    """Return the observers of a run's steps in order.

    Three orders matter. Step checks come before spikes, because the remedy in their error is more exact. A spike rolls
    weights back before their checksums are taken. Weight checks come before the canary, which would report changed
    weights as a wrong computation.
    """
    return StepObservers(
        [
            checks,
            Instabilities(recipe, folder, tracker, ranks, checkpoints, spikes),
            weight_checks,
            Canary(recipe, parallel, ranks, folder),
            StepRecorder(recipe, parallel, folder.path, policy),
            PlanPromise(recipe, tracker, predicted_memory),
        ]
    )
