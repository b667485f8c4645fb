"""Copies of the training state in host memory (`checkpoint.replicate`)."""

from __future__ import annotations

from collections.abc import Mapping

from megarl import faults
from megarl.training.state import checkpoint
from megarl.training.state import copies as state_copies
from megarl.training.state.copies import FileFields, StateCopier
from megarl.worker.rank_state import RankState
from megarl.worker.trainer_part import TrainerPart


class ReplicatedState(TrainerPart):
    """Part with copies of this rank's training state, and of its partner's on another node."""

    def __init__(self, state: RankState) -> None:
        self._state = state
        self._copier: StateCopier | None = None

    def begin(self, step: int, is_resharded: bool) -> int:
        """Copy the state after a step to host memory, and start sending it to another node. Return the bytes.

        `is_resharded`: the engines already have these weights.
        """
        state = self._state
        if self._copier is None:
            self._copier = StateCopier(state.topology)
        version = state.version_to_save(is_resharded)
        with state.saved_models() as models, checkpoint.load_changed_models(models):
            return self._copier.begin_copies(step, models, str(state.parallel), weight_version=version)

    def finish(self, wait: bool) -> Mapping[str, FileFields] | None:
        """Return the files of the copies begun by `begin`, by name; None: they are not complete.

        `wait` blocks until they are.
        """
        assert self._copier is not None
        return self._copier.finish_copies(wait=wait)

    def restore(self, files: Mapping[str, FileFields]) -> int:
        """Load the state after a step from copies in host memory. Afterwards the engines need the weights again.

        `files` are the copies held by this rank's node agent, by name. Returns the bytes received from other ranks.
        """
        faults.reach("restore")
        state, copies = self._state, state_copies.open_copies(files)
        with state.saved_models() as models:
            driver, num_bytes = state_copies.restore_from_copies(copies, models, str(state.parallel), state.topology)
        state.set_version(driver["weight_version"])
        return num_bytes
