"""Worker classes of a service's ranks. The trainer has many models' adapters, the engines some of them."""

from __future__ import annotations

from typing import Any

from megarl.engine.engine import RolloutEngine
from megarl.engine.parts.served_adapters import ServedAdapters
from megarl.service.ranks.rank_adapters import Adapters
from megarl.worker.colocated import Worker
from megarl.worker.engine_builder import build_engine
from megarl.worker.engine_worker import EngineWorker
from megarl.worker.trainer_worker import TrainerWorker


class ServiceTrainer(TrainerWorker):
    """Worker of a rank with only a trainer. The driver calls methods of `adapters` by name."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.adapters = Adapters(self.policy, self.parallel)


class ServiceEngine(EngineWorker):
    """Worker of a rank with only an engine. The engine has `num_slots` slots for adapters."""

    def __init__(self, *args: Any, num_slots: int, **kwargs: Any) -> None:
        # Set first: the constructor of the base class builds the engine.
        self._num_slots = num_slots
        super().__init__(*args, **kwargs)

    def install_adapter(self, version: str | None, index: int) -> None:
        install_adapter(self._engine, version, index)

    def _build_engine(self, recipe: Any) -> RolloutEngine:
        return build_engine(recipe, num_slots=self._num_slots)


class ServiceWorker(Worker):
    """Worker of a rank with trainer and engine. The engine has `num_slots` slots for adapters."""

    def __init__(self, *args: Any, num_slots: int, **kwargs: Any) -> None:
        # Set first: the constructor of the base class builds the engine.
        self._num_slots = num_slots
        super().__init__(*args, **kwargs)
        self.adapters = Adapters(self.policy, self.parallel)

    def install_adapter(self, version: str | None, index: int) -> None:
        assert self.engine is not None
        install_adapter(self.engine, version, index)

    def wake_engine(self) -> None:
        """Let the engine sample again, with the weights and adapters from before its sleep."""
        assert self.engine is not None
        # An offload drops gradients: copy the live model's state first.
        self.adapters.copy_live_to_host()
        self.policy.offload()
        self.engine.wake()

    def _build_engine(self) -> RolloutEngine:
        return build_engine(self.recipe, self.state.parts, num_slots=self._num_slots)


def install_adapter(engine: RolloutEngine, version: str | None, index: int) -> None:
    """Write the adapter of the last reshard into slot `index` of an engine, under a version's name."""
    part = engine.find_part(ServedAdapters)
    assert part is not None
    part.install(version, index)
