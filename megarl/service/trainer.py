"""Interface between the training service and a trainer, which trains and samples models call by call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megarl.data.token_batch import TokenBatch
from megarl.service.messages.requests import AdamSettings
from megarl.service.messages.wire import Sample
from megarl.types import SamplingSettings, TopTokens


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """The base model of a service, and the limits of adapters and requests."""

    name: str
    """Name of the model in clients' requests."""
    architecture: str
    tokenizer: str
    """Folder or Hub name of the clients' tokenizer."""
    rank: int
    trains_mlp: bool
    trains_attention: bool
    vocab_size: int
    row_tokens: int
    """Maximum tokens of a training sequence."""
    context_tokens: int
    """Maximum tokens of a prompt with its completion."""


class Trainer(Protocol):
    """Trains and samples the adapters of many models. `version` names published weights; None: the base model."""

    @property
    def served(self) -> ServedModel: ...

    async def create_model(self, model_id: str, seed: int) -> None: ...

    async def forward_backward(
        self, model_id: str, batch: TokenBatch, loss: str, settings: Mapping[str, float], *, is_forward_only: bool
    ) -> NDArray[np.float32]:
        """Add a batch's gradients to the model's. Returns log-probs and losses: float32 [2, tokens]."""
        ...

    async def clear_gradients(self, model_id: str) -> None: ...

    async def optim_step(self, model_id: str, adam: AdamSettings) -> dict[str, float]:
        """Run a step with the gradients since the last step, then clear them.

        Raises UserError if there are none, or if they are not finite. Returns metrics named `name:reduction`.
        """
        ...

    async def save(self, model_id: str, folder: Path) -> None:
        """Write the model's adapters and optimizer state into an empty folder.

        Raises StorageError if the disk is full or fails. The folder is then incomplete.
        """
        ...

    async def load(self, model_id: str, folder: Path, *, with_optimizer: bool) -> None:
        """Create a model from a saved one. Without its optimizer state it gets a new optimizer.

        Raises DataError for damaged files: an existing model of this name is unchanged. Raises StorageError if the disk
        fails: an existing model may be lost.
        """
        ...

    async def publish(self, model_id: str, version: str) -> None:
        """Copy the model's adapters for sampling. Later training does not change the copy."""
        ...

    async def publish_folder(self, folder: Path, version: str) -> None:
        """Copy a saved model's adapters for sampling. Raises DataError and StorageError like `load`."""
        ...

    async def move_to_disk(self, models: Sequence[str]) -> None:
        """Free the memory of models without calls. Their next call restores them bit for bit.

        Raises OSError if the disk is full. The remaining models then stay in memory.
        """
        ...

    async def forget(self, *, models: Sequence[str], versions: Sequence[str]) -> None: ...

    async def sample(
        self, version: str | None, prompt: NDArray[np.int32], settings: SamplingSettings, seeds: Sequence[int]
    ) -> list[Sample]:
        """Sample a completion of the prompt [tokens] for each seed. Raises UserError if the engine refuses it."""
        ...

    async def score(
        self, version: str | None, prompt: NDArray[np.int32], num_top_tokens: int
    ) -> tuple[NDArray[np.float32], TopTokens]:
        """Return a prompt's log-probs at temperature 1, float32 [tokens], and the most likely tokens at each position.

        The first log-prob is NaN. The first row of the most likely tokens [tokens, num_top_tokens] is empty.
        """
        ...
