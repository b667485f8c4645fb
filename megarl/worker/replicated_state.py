"""Copies of the training state in the ranks' host memory (`checkpoint.replicate`)."""

from __future__ import annotations

from megarl.training.state import checkpoint
from megarl.training.state import copies as state_copies
from megarl.training.state.copies import StateCopier, StateCopies
from megarl.worker.rank_state import RankState
from megarl.worker.trainer_part import TrainerPart


class ReplicatedState(TrainerPart):
    """Copies of this rank's training state, and of its partner's on another node."""

    def __init__(self, state: RankState) -> None:
        self._state = state
        self._copies = StateCopies()
        self._copier: StateCopier | None = None

    def begin(self, step: int, is_resharded: bool) -> int:
        """Copy the state after a step to host memory, and start sending it to another node. Returns the bytes.

        `is_resharded` says that the engines already have these weights.
        """
        state = self._state
        if self._copier is None:
            self._copier = StateCopier(self._copies, state.topology)
        version = state.version_to_save(is_resharded)
        with state.saved_models() as models, checkpoint.changed_models_loaded(models):
            return self._copier.begin(step, models, str(state.parallel), weight_version=version)

    def finish(self, wait: bool) -> bool:
        """Return whether the copy that `begin` began is complete on this rank. `wait` blocks until it is."""
        assert self._copier is not None
        return self._copier.finish(wait=wait)

    def restore(self, step: int) -> int:
        """Load the state after a step from copies in host memory. Afterwards the engines need the weights again.

        Returns the bytes received from other ranks.
        """
        state = self._state
        with state.saved_models() as models:
            driver, num_bytes = state_copies.restore(self._copies, step, models, str(state.parallel), state.topology)
        # Later copies, of the lost attempt, must not be mixed with those of the same steps trained again.
        self._copies.keep_only(step)
        state.set_version(driver["weight_version"])
        return num_bytes

    def note_load(self) -> None:
        self._copies.keep_only(None)

    def legacy(self) -> StateCopies:
        return self._copies

    def inherit(self, legacy: StateCopies) -> None:
        self._copies.complete_copies |= legacy.complete_copies
