"""Reshard of a LoRA adapter alone: the engine keeps the base weights and receives only the matrices A and B."""

from __future__ import annotations

from megarl.reshard.live import Reshard


class AdapterReshard:
    """Copies the base weights once, with `base`. Each later reshard copies the adapter's matrices, with `adapter`."""

    def __init__(self, base: Reshard, adapter: Reshard) -> None:
        self._base, self._adapter = base, adapter

    @property
    def is_computed(self) -> bool:
        """Whether the recorded layouts of weights and slots are as computed on every rank."""
        return self._base.is_computed and self._adapter.is_computed

    def run(self) -> dict[str, float]:
        """Copy the adapter, together with the other ranks. Returns seconds and bytes by stage."""
        return self._adapter.run()

    def verify(self) -> None:
        """Compare checksums of the engine's base weights and slots with the trainer's.

        Raises MegarlError naming the first difference.
        """
        self._base.verify()
        self._adapter.verify()

    def self_test(self) -> dict[str, float]:
        """Fill base weights and slots with NaN, copy both, and compare. Returns the sums of seconds and bytes.

        Base weights cannot be copied again afterwards: their staging memory is released. Raises MegarlError naming the
        first difference.
        """
        first, second = self._base.self_test(), self._adapter.self_test()
        self._base.release()
        return {name: first.get(name, 0.0) + second.get(name, 0.0) for name in first | second}
