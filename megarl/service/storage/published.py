"""Weights to sample from."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from megarl.service.refusals import UserError
from megarl.service.storage.checkpoints import Checkpoints
from megarl.service.trainer import Trainer

# A loop that samples after each step makes one copy a step, and never releases one. A copy of rank-32 adapters of a 14B
# model has about 220 MB.
MAX_PUBLISHED = 32
"""Maximum copies of one account in memory. Above it the least recently used copy is dropped."""


@dataclass(eq=False, slots=True)
class Weights:
    """Weights of one or more sampling sessions.

    `version` is their name in the trainer: None for the base model, and for a checkpoint on disk only. `folder` is the
    checkpoint, saved at `saved_at` (seconds since 1970). Weights of a model in memory have no folder, and are lost when
    they leave the memory.
    """

    owner: str
    session_id: str
    version: str | None = None
    folder: Path | None = None
    saved_at: float = 0.0
    num_users: int = 0
    """Requests that use the weights now."""
    is_ended: bool = False
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)


class PublishedWeights:
    """Copies of weights in the trainer's memory, least recently used first. Each account has at most
    `MAX_PUBLISHED`.
    """

    def __init__(self, trainer: Trainer, checkpoints: Checkpoints) -> None:
        self._trainer, self._checkpoints = trainer, checkpoints
        self._published: list[Weights] = []
        self._weights_in_use: set[Weights] = set()
        """Weights of running requests. Weights of a checkpoint may not be in memory yet."""

    async def copy_model(self, model_id: str, owner: str, session_id: str) -> Weights:
        """Copy a model's present weights in memory, for session `session_id`. Returns the copy."""
        version = secrets.token_hex(8)
        # Listed before the copy exists: if the session ends meanwhile, the trainer must forget the copy.
        weights = Weights(owner, session_id, version, num_users=1)
        self._published.append(weights)
        try:
            await self._trainer.publish(model_id, version)
            await self._forget_surplus_copies(owner)
        except BaseException:
            if weights in self._published:
                self._published.remove(weights)
            raise
        finally:
            weights.num_users -= 1
        return weights

    @asynccontextmanager
    async def hold_weights(self, weights: Weights) -> AsyncIterator[str | None]:
        """Mark weights as in use by a sampling request. Yields their version. Raises UserError if they ended."""
        # Counted before the first await: weights in use never leave the memory.
        weights.num_users += 1
        self._weights_in_use.add(weights)
        try:
            yield await self._load_version(weights)
        finally:
            weights.num_users -= 1
            if not weights.num_users:
                self._weights_in_use.discard(weights)
                if weights.is_ended:
                    await self._forget_weights([weights])

    async def end_weights(self, weights: Weights) -> None:
        """End weights: no later request may use them. Running requests continue."""
        weights.is_ended = True
        if not weights.num_users:
            await self._forget_weights([weights])

    def end_session(self, session_id: str) -> list[str]:
        """End a session's weights, and return the versions that the trainer must forget."""
        # If the trainer is still copying a checkpoint, the last request forgets the copy.
        ended_weights = [
            weights for weights in {*self._published, *self._weights_in_use} if weights.session_id == session_id
        ]
        self._published = [weights for weights in self._published if weights not in ended_weights]
        versions = [weights.version for weights in ended_weights if weights.version is not None]
        for weights in ended_weights:
            weights.is_ended, weights.version = True, None
        return versions

    async def _load_version(self, weights: Weights) -> str | None:
        """Mark weights as used last, and return their version. A checkpoint's weights are read from disk if necessary.

        None: the weights of the base model.
        """
        if weights.is_ended:
            raise UserError(
                f"sampling_session_id: its weights were replaced after {MAX_PUBLISHED} newer ones of this key; use "
                "newer ones, or save weights with a name"
            )
        if weights in self._published:
            self._published.remove(weights)
        elif weights.folder is not None:
            # Parallel requests for these weights wait for one copy.
            async with weights.loading:
                if weights.version is None:
                    version = secrets.token_hex(8)
                    # A later save under the same name must not change a sampling session's weights.
                    with self._checkpoints.keep_while_reading(weights.folder, weights.saved_at):
                        await self._trainer.publish_folder(weights.folder, version)
                    weights.version = version
            # A parallel request listed them while this one waited.
            if weights in self._published:
                return weights.version
        else:
            return None
        # The list is ordered by the last use.
        self._published.append(weights)
        # If the session ends during the wait, the weights lose their version. None would mean the base model.
        version = weights.version
        await self._forget_surplus_copies(weights.owner)
        return version

    async def _forget_surplus_copies(self, owner: str) -> None:
        """Drop an account's least recently used copies above MAX_PUBLISHED, except those in use.

        Weights of a checkpoint can be read again. Copies of a model are lost.
        """
        owner_weights = [weights for weights in self._published if weights.owner == owner]
        # The last one is wanted now.
        unused_weights = [weights for weights in owner_weights[:-1] if not weights.num_users]
        surplus_weights = unused_weights[: max(0, len(owner_weights) - MAX_PUBLISHED)]
        for weights in surplus_weights:
            weights.is_ended = weights.folder is None
        await self._forget_weights(surplus_weights)

    async def _forget_weights(self, ended_weights: list[Weights]) -> None:
        """Remove weights from the list, and their versions from the trainer's memory."""
        versions = [weights.version for weights in ended_weights if weights.version is not None]
        self._published = [weights for weights in self._published if weights not in ended_weights]
        for weights in ended_weights:
            weights.version = None
        if versions:
            await self._trainer.forget(models=[], versions=versions)
