"""Fingerprints of a rank's training state, by the names that its tensors have in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.reshard.checks.fingerprint import Fingerprint, fingerprint
from megarl.training.state.checkpoint import Model
from megarl.training.state.parts import state_parts


def state_fingerprints(models: Mapping[str, Model], *, with_optimizer: bool) -> dict[str, Fingerprint]:
    """Return the fingerprints of this rank's parts of the state's tensors, by name.

    `models` are those of a checkpoint, as in `state_parts`. The sum over all ranks does not depend on parallel sizes:
    each element counts on one rank only. `with_optimizer` adds main weights and moments.
    """
    fingerprints: dict[str, Fingerprint] = {}
    for part in state_parts(models):
        if part.is_main and (with_optimizer or "optimizer." not in part.key):
            fingerprints[part.name] = fingerprints.get(part.name, Fingerprint()) + fingerprint(part.values, part.start)
    return fingerprints
