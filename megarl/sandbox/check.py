"""Examination of this machine: supported protection layers, and the CPU time of a run."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from megarl.sandbox import landlock
from megarl.sandbox.layers import LAYERS, Layers
from megarl.sandbox.sandbox import Sandbox, SandboxError, SandboxSettings
from megarl.types import ConfigError

# One run is too short to measure, so take the mean of ten.
_NUM_RUNS = 10


@dataclass(frozen=True, slots=True)
class Examination:
    """Result of the examination: the isolation layers (namespaces, seccomp, ...) that this machine supports.

    `works`: a trial program ran in these layers. `text` describes the trial in a sentence.
    """

    layers: Layers
    works: bool
    text: str
    landlock_version: int | None = None
    """Landlock version of the kernel; None: the kernel has no Landlock."""

    @property
    def notes(self) -> list[str]:
        """Remarks on operations that an active layer cannot restrict here."""
        if "landlock" not in self.layers.active or self.landlock_version is None:
            return []
        operations = landlock.ungoverned_operations(self.landlock_version)
        gap_text = (
            f"; it does not govern {', '.join(operations)}, covered by namespaces and seccomp" if operations else ""
        )
        return [f"Landlock's version is {self.landlock_version}{gap_text}"]

    @property
    def is_complete(self) -> bool:
        return self.works and not set(LAYERS) - self.layers.active

    def as_json(self) -> dict[str, Any]:
        faults = {layer: self.layers.fault_of(layer) for layer in LAYERS if layer not in self.layers.active}
        return {
            "layers": sorted(self.layers.active),
            "missing": faults,
            "works": self.works,
            "text": self.text,
            "landlock_version": self.landlock_version,
            "notes": self.notes,
        }


def examine() -> Examination:
    """Start a sandbox with all available layers, and run a program in it."""
    # With require=() the sandbox starts despite missing layers, so that all are reported.
    sandbox = Sandbox(SandboxSettings(require=(), packages=()))
    version = None
    with contextlib.suppress(OSError):
        version = landlock.version()
    with contextlib.closing(sandbox):
        try:
            sandbox.start()
            seconds = sum(sandbox.run("print(int(input()) + 1)", "1").cpu_seconds for _ in range(_NUM_RUNS)) / _NUM_RUNS
        except (ConfigError, SandboxError) as error:
            layers = sandbox.layers or Layers(frozenset(), {})
            return Examination(layers, False, f"programs do not run here: {error}", version)
        assert sandbox.layers is not None
        return Examination(
            sandbox.layers, True, f"a program takes {1000 * seconds:.1f} ms of CPU time in addition to its own", version
        )
