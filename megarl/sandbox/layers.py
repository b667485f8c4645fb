"""Protection layers of the sandbox: the purpose of each, and remedies for missing ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from megarl.types import ConfigError

Layer = Literal["namespaces", "landlock", "seccomp", "limits", "unprivileged"]
LAYERS: tuple[Layer, ...] = get_args(Layer)

PURPOSES: Mapping[str, str] = {
    "namespaces": "no network, no other process, a read-only root with Python alone, a private /tmp (user namespaces)",
    "landlock": "no file but Python's and the private /tmp, no TCP, no signal to others (Landlock)",
    "seccomp": "system calls from a list: no process, no program, no socket, no tracing (seccomp)",
    "limits": "CPU time, memory, size and number of files (rlimits)",
    "unprivileged": "a user without rights, whoever starts the run (setresuid)",
}
REMEDIES: Mapping[str, str] = {
    "namespaces": (
        "let users make namespaces (sysctl user.max_user_namespaces=10000; Debian: kernel.unprivileged_userns_clone=1; "
        "Ubuntu: kernel.apparmor_restrict_unprivileged_userns=0; Docker: --security-opt seccomp=unconfined)"
    ),
    "landlock": "take a kernel of 5.13 or newer with Landlock among its security modules (lsm=landlock,...)",
    "seccomp": "take a kernel with CONFIG_SECCOMP_FILTER",
    "limits": "take a Linux kernel",
    "unprivileged": "start megarl as a user other than root, or in a container that lets root change its user id",
}


@dataclass(frozen=True, slots=True)
class Layers:
    """Protection layers that this machine supports, and the reason for each missing layer."""

    active: frozenset[str]
    faults: Mapping[str, str]

    def fault_of(self, layer: str) -> str:
        return self.faults.get(layer) or "not tried"

    def require(self, required: Collection[str]) -> None:
        """Raise ConfigError with remedies if one of these layers is missing."""
        if missing_layers := [layer for layer in LAYERS if layer in required and layer not in self.active]:
            reasons = "; ".join(f"{layer}: {self.fault_of(layer)}: {REMEDIES[layer]}" for layer in missing_layers)
            other_layers = ", ".join(layer for layer in required if layer not in missing_layers)
            # Never offer to run programs as root, whatever the recipe requires.
            weaker_choice = f"or with less, at your own risk: sandbox.require=[{other_layers}]; "
            raise ConfigError(
                "sandbox.require: this machine lacks isolation layers for running programs: "
                f"{', '.join(missing_layers)} ({reasons}); "
                f"{'' if 'unprivileged' in missing_layers else weaker_choice}or run programs on another machine, with "
                "sandbox.url"
            )

    def require_minimum(self) -> None:
        """Raise ConfigError if the user is privileged, or if this machine has neither namespaces nor seccomp.

        Without namespaces and seccomp, processes started by a program would outlive it and its limits.
        """
        if "unprivileged" not in self.active:
            self.require(("unprivileged",))
        alternatives = ("namespaces", "seccomp")
        if not self.active & set(alternatives):
            reasons = "; ".join(f"{layer}: {self.fault_of(layer)}: {REMEDIES[layer]}" for layer in alternatives)
            raise ConfigError(
                "sandbox.require: this machine has neither namespaces nor seccomp, so child processes of a program "
                f"could outlive its limits ({reasons}); enable one of them, or run programs on another machine, with "
                "sandbox.url"
            )

    def notice(self, required: Collection[str]) -> str | None:
        """Return a notice that programs run without some layers; None: no layer is missing."""
        missing_layers = [layer for layer in LAYERS if layer not in self.active and layer not in required]
        if not missing_layers:
            return None
        missing_purposes = "; ".join(f"{layer}: {PURPOSES[layer]}" for layer in missing_layers)
        return f"sandbox.require leaves out what this machine lacks; programs run without {missing_purposes}"
