"""The training state of one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.reshard.plan import RankTopology
from megarl.training.state import checkpoint
from megarl.training.training_engine import TrainingEngine
from megarl.worker.trainer_part import TrainerPart


class RankState:
    """Models, other contents of a checkpoint, and weight version of one rank.

    The worker sets `policy`, `critic` and `parts` while it is built. `parallel` and `topology` (nodes and switches) are
    the trainer's.
    """

    policy: TrainingEngine

    def __init__(self, recipe: Recipe, parallel: ParallelConfig, rank: int, topology: RankTopology) -> None:
        self.recipe, self.parallel, self.rank, self.topology = recipe, parallel, rank, topology
        self.critic: TrainingEngine | None = None
        self.parts: dict[str, TrainerPart] = {}
        """Optional features of this rank, by the name under which the driver calls them."""
        self.weight_version = 0
        """Version of the engines' weights: the number of reshards so far."""
        self.report_version: Callable[[int], None] = lambda version: None
        """Function to call with the version of a loaded state."""

    def version_to_save(self, is_resharded: bool) -> int:
        """Return the version of the engines' weights to save; 0 without engines.

        `is_resharded`: the engines already have these weights. The saved version is then one less, because a resumed
        run copies the weights once more.
        """
        # `is_resharded` counts as 0 or 1.
        return self.weight_version - is_resharded if self.recipe.has_engine else 0

    def set_version(self, version: int) -> None:
        """Set the version of the engines' weights after loading a state. The next reshard adds 1."""
        self.weight_version = version
        self.report_version(version)

    def load(self, folder: Path) -> None:
        """Load a checkpoint already checked for harmful pickles. Afterwards the engines need the weights again."""
        with self.saved_models() as models:
            driver = checkpoint.restore_models(folder, models, str(self.parallel))
        self.set_version(driver["weight_version"])

    @contextmanager
    def saved_models(self) -> Iterator[dict[str, checkpoint.Model]]:
        """Context with the models of a checkpoint in device memory, by the beginning of their tensor names.

        This is empty for the policy, whose tensors have Megatron's own names.
        """
        models: dict[str, checkpoint.Model] = {"": self.policy}
        with ExitStack() as stack:
            if self.critic is not None:
                self.critic.onload()
                stack.callback(self.critic.offload)
                models["critic"] = self.critic
            for part in self.parts.values():
                models |= part.saved_models()
            yield models
