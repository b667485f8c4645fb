"""Fingerprints of a rank's training state. The keys are the tensors' names in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.reshard.checks.fingerprint import Fingerprint, fingerprint
from megarl.training.state.checkpoint import Model
from megarl.training.state.parts import state_parts


def state_fingerprints(models: Mapping[str, Model], *, with_optimizer: bool) -> dict[str, Fingerprint]:
    """Return the fingerprints of this rank's parts of the state's tensors, by name.

    The sum over all ranks is the same for all parallel sizes: each element counts on one rank only. `models` are by the
    prefix of their tensors, as in `state_parts`. `with_optimizer` adds main weights and moments.
    """
    fingerprints: dict[str, Fingerprint] = {}
    for part in state_parts(models):
        if part.is_main and (with_optimizer or "optimizer." not in part.key):
            fingerprints[part.name] = fingerprints.get(part.name, Fingerprint()) + fingerprint(part.values, part.start)
    return fingerprints
