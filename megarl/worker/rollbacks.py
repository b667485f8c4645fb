"""Returns to a checkpoint in the middle of a run, after an unstable update (`train.on_spike`)."""

from __future__ import annotations

from pathlib import Path

from megarl.worker.rank_state import RankState
from megarl.worker.trainer_part import TrainerPart


class Rollbacks(TrainerPart):
    def __init__(self, state: RankState) -> None:
        self._state = state

    def roll_back(self, folder: Path) -> None:
        """Load a checkpoint's weights and optimizer, and keep the run's versions and learning rates.

        The folder must have been checked for harmful pickles.
        """
        state = self._state
        trained_models = [state.policy] if state.critic is None else [state.policy, state.critic]
        version, update_counts = state.weight_version, [model.schedule.num_steps for model in trained_models]
        state.load(folder)
        state.set_version(version)
        for model, update_count in zip(trained_models, update_counts, strict=True):
            # The schedule counts all updates of the run, including those rolled back.
            model.schedule.step(increment=update_count - model.schedule.num_steps)
