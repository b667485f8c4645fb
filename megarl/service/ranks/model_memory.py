"""Clients' models and versions in the memory of the trainer's ranks, and the models moved to disk to make room."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from megarl.cluster.run_ranks import RunRanks
from megarl.service.ranks.memory_limits import MemoryLimits
from megarl.service.refusals import UserError
from megarl.types import ConfigError


class ModelMemory:
    """Records which models and versions the ranks have, and where. Moves models between host memory and disk.

    `idle_folder`, `max_bytes` and `report` as in `RankTrainer`. Call `bring_to_memory`, `add_version` and
    `write_to_disk` in a turn of training.
    """

    def __init__(
        self, ranks: RunRanks, idle_folder: Path, *, max_bytes: int | None, report: Callable[[str], object]
    ) -> None:
        self._ranks, self._idle_folder, self._report = ranks, idle_folder, report
        self._models: dict[str, None] = {}
        """Models on the ranks, least recently used first. A request of an ended session may name a model that is
        gone.
        """
        self._models_on_disk: set[str] = set()
        """Models whose state is on the disks of all ranks, and not in host memory."""
        self._models_with_files: set[str] = set()
        """Models with a state on any rank's disk. A rank with a full disk keeps its part in memory."""
        self._versions: set[str] = set()
        """Versions on the ranks."""
        self._max_bytes = max_bytes
        self._limits = MemoryLimits((), max_bytes)

    async def measure(self) -> str:
        """Measure the hosts' memory. Returns a line about it. Raises ConfigError if it has no room for one model."""
        self._limits = MemoryLimits(await self._ranks.trainers.call("adapters.measure_memory"), self._max_bytes)
        if self._limits.find_full_host(num_models=1, num_copies=1) is not None:
            raise ConfigError(
                f"{self._limits.describe()}: there is no room for one model with a copy; raise --host-memory-gib, or "
                "use a smaller lora.rank or more nodes"
            )
        return self._limits.describe()

    def check_model(self, model_id: str) -> None:
        if model_id not in self._models:
            raise UserError(
                f"model {model_id}: its session ended before the request ran, or a checkpoint could not be read into "
                "it. Load another checkpoint, or begin a session"
            )

    def check_version(self, version: str | None) -> None:
        if version is not None and version not in self._versions:
            raise UserError("the sampling session ended before the request ran")

    def select_movable(self, models: Sequence[str]) -> list[str]:
        """Return those of `models` that are not yet on the disks of all ranks."""
        return [model_id for model_id in models if model_id not in self._models_on_disk]

    def remove(self, *, models: Collection[str] = (), versions: Collection[str] = ()) -> None:
        """Remove models and versions from the records, so that their waiting calls fail. The models' files stay."""
        for model_id in models:
            self._models.pop(model_id, None)
        self._models_on_disk.difference_update(models)
        self._versions.difference_update(versions)

    def forget_files(self, models: Collection[str]) -> None:
        self._models_with_files.difference_update(models)

    async def bring_to_memory(self, model_id: str, *, is_replaced: bool = False) -> None:
        """Make room for a model, and bring it into memory. Raises UserError.

        `is_replaced`: the call loads another state of the model, so its present state is not needed.
        """
        if model_id not in self._models or model_id in self._models_on_disk:
            await self._make_room(num_models=1, needed_model=model_id)
        # The last model is the most recently used one.
        self._models.pop(model_id, None)
        self._models[model_id] = None
        if model_id in self._models_with_files and not is_replaced:
            await self._read_back(model_id)
        self._models_on_disk.discard(model_id)
        self._models_with_files.discard(model_id)

    async def add_version(self, version: str, model_id: str | None = None) -> None:
        """Make room for a version's weights, copied from `model_id` (None: from a folder), and record it."""
        if model_id is not None:
            await self.bring_to_memory(model_id)
        await self._make_room(num_copies=1, needed_model=model_id)
        self._versions.add(version)

    async def write_to_disk(self, models: Sequence[str]) -> str | None:
        """Move models to disk. Returns the disk's error."""
        answers = await self._ranks.trainers.call("adapters.move_to_disk", list(models), self._idle_folder)
        # A rank with a full disk still has the model in memory.
        models_by_rank = [set(names) for names, _ in answers]
        self._models_on_disk |= set.intersection(*models_by_rank) & self._models.keys()
        self._models_with_files |= set.union(*models_by_rank)
        return next((error for _, error in answers if error is not None), None)

    async def _read_back(self, model_id: str) -> None:
        """Read a model's state from the disks of the ranks to their memory.

        Raises UserError if a disk fails. The files stay, so a later call may succeed.
        """
        faults = list(filter(None, await self._ranks.trainers.call("adapters.read_back", model_id)))
        if faults:
            # Ranks without a fault have read their parts. Move them back, so that the model needs no memory.
            if fault := await self.write_to_disk([model_id]):
                faults.append(fault)
            self._report(f"model {model_id} stays on the disk: {'; '.join(faults)}; check this disk")
            # The client must not see folders of the service.
            file = f"{self._idle_folder.name}/{model_id}"
            raise UserError(
                f"model {model_id}: its state on the disk of the service ({file}) cannot be read now. Send the request "
                "again later. If it fails again, load its last checkpoint (load_state_with_optimizer)"
            )

    async def _make_room(self, *, num_models: int = 0, num_copies: int = 0, needed_model: str | None) -> None:
        """Move models to disk, least recently used first, until this many more models and copies fit in memory.

        Raises UserError if they do not fit: models with gradients since their last step stay in memory.
        """
        movable_models = [name for name in self._models if name not in self._models_on_disk and name != needed_model]
        while host := self._limits.find_full_host(
            num_models=len(self._models) - len(self._models_on_disk) + num_models,
            num_copies=len(self._versions) + num_copies,
        ):
            if not movable_models:
                raise UserError(
                    f"the host memory of the service is full: {host.num_bytes / 2**30:.2f} GiB for models and copies "
                    "of weights. End sessions that you do not need, or try again when other programs have finished "
                    "their steps"
                )
            if fault := await self.write_to_disk([movable_models.pop(0)]):
                # The client learns only that memory is full. This text names folders of the service.
                self._report(f"a model stays in host memory: {fault}")
