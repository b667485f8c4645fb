"""Fingerprints of a rank's training state, by the names that its tensors have in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.reshard.checks.fingerprint import Fingerprint, fingerprint
from megarl.training.checkpoint import Model
from megarl.training.state_parts import state_parts


def state_fingerprints(models: Mapping[str, Model], *, with_optimizer: bool) -> dict[str, Fingerprint]:
    """Return the fingerprints of this rank's parts of the state's tensors, by name.

    `models` are those of a checkpoint, by the prefix of their tensors; frozen models with their first weights are left
    out. The sum over all ranks does not depend on the layout: each element counts on one rank only. `with_optimizer`
    adds main weights and moments.
    """
    found: dict[str, Fingerprint] = {}
    for part in state_parts(models):
        if part.is_main and (with_optimizer or "optimizer." not in part.key):
            found[part.name] = found.get(part.name, Fingerprint()) + fingerprint(part.values, part.start)
    return found
