"""A trainer without ranks for tests of the wire: each model is one table of logits, the same for every context."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megarl.data.token_batch import TokenBatch
from megarl.service.messages.requests import AdamSettings
from megarl.service.messages.wire import Sample
from megarl.service.refusals import UserError
from megarl.service.trainer import ServedModel
from megarl.types import SamplingSettings, TopTokens

VOCABULARY = 32


class FakeTrainer:
    """Logits [vocabulary] for each model. A step is plain gradient descent with Adam's learning rate."""

    def __init__(self) -> None:
        self.served = ServedModel(
            name="Qwen/Qwen3-8B", architecture="qwen3", tokenizer="unused", rank=8, trains_mlp=True,
            trains_attention=True, vocab_size=VOCABULARY, row_tokens=64, context_tokens=48,
        )  # fmt: skip
        self.logits: dict[str, NDArray[np.float64]] = {}
        self.gradients: dict[str, NDArray[np.float64]] = {}
        self.versions: dict[str | None, NDArray[np.float64]] = {None: np.zeros(VOCABULARY)}
        self.calls: list[tuple[str, str]] = []
        self.seconds = 0.0
        """Seconds of each training call."""

    async def create_model(self, model_id: str, seed: int) -> None:
        self.calls.append(("create", model_id))
        self.logits[model_id] = np.random.default_rng(seed).normal(size=VOCABULARY) * 0.01
        self.gradients[model_id] = np.zeros(VOCABULARY)

    async def forward_backward(
        self, model_id: str, batch: TokenBatch, loss: str, settings: Mapping[str, float], *, is_forward_only: bool
    ) -> NDArray[np.float32]:
        await asyncio.sleep(self.seconds)
        self.calls.append(("forward" if is_forward_only else "forward_backward", model_id))
        logprobs = _log_softmax(self.logits[model_id])
        assert batch.labels is not None
        of_tokens = logprobs[batch.labels] * batch.loss_mask
        name = "token_weights" if loss == "cross_entropy" else "advantages"
        weights = batch.per_token[name] * batch.loss_mask
        if loss != "cross_entropy":
            weights = weights * np.exp(of_tokens - batch.per_token["old_logprobs"])
        if not is_forward_only:
            one_hot = np.eye(VOCABULARY)[batch.labels]
            self.gradients[model_id] -= (weights[:, None] * (one_hot - np.exp(logprobs))).sum(0)
        return np.stack([of_tokens, -weights * (of_tokens if loss == "cross_entropy" else 1)]).astype(np.float32)

    async def clear_gradients(self, model_id: str) -> None:
        self.calls.append(("clear", model_id))
        self.gradients[model_id][:] = 0

    async def optim_step(self, model_id: str, adam: AdamSettings) -> dict[str, float]:
        self.calls.append(("optim_step", model_id))
        self.logits[model_id] -= adam.learning_rate * self.gradients[model_id]
        norm = float(np.linalg.norm(self.gradients[model_id]))
        self.gradients[model_id] = np.zeros(VOCABULARY)
        return {"grad_norm:mean": norm}

    async def save(self, model_id: str, folder: Path) -> None:
        np.save(folder / "logits.npy", self.logits[model_id])

    async def load(self, model_id: str, folder: Path, *, with_optimizer: bool) -> None:
        self.logits[model_id] = np.load(folder / "logits.npy")
        self.gradients[model_id] = np.zeros(VOCABULARY)

    async def publish(self, model_id: str, version: str) -> None:
        self.versions[version] = self.logits[model_id].copy()

    async def publish_folder(self, folder: Path, version: str) -> None:
        self.versions[version] = np.load(folder / "logits.npy")

    async def move_to_disk(self, models: Sequence[str]) -> None:
        self.calls += [("to disk", name) for name in models]

    async def forget(self, *, models: Sequence[str], versions: Sequence[str]) -> None:
        for name in models:
            del self.logits[name], self.gradients[name]
        for name in versions:
            del self.versions[name]

    async def sample(
        self, version: str | None, prompt: NDArray[np.int32], settings: SamplingSettings, seeds: Sequence[int]
    ) -> list[Sample]:
        if prompt.max() >= VOCABULARY:
            raise UserError("prompt: has a token outside of the vocabulary")
        logprobs = _log_softmax(self.versions[version])
        samples = []
        for seed in seeds:
            tokens = np.random.default_rng(seed).choice(VOCABULARY, settings.max_new_tokens, p=np.exp(logprobs))
            stops = np.flatnonzero(np.isin(tokens, settings.stop_token_ids))
            end = stops[0] + 1 if len(stops) else len(tokens)
            top = _top(logprobs, end, settings.num_top_tokens) if settings.num_top_tokens else None
            samples.append(Sample(tokens[:end], logprobs[tokens[:end]].astype(np.float32), bool(len(stops)), top))
        return samples

    async def score(
        self, version: str | None, prompt: NDArray[np.int32], num_top_tokens: int
    ) -> tuple[NDArray[np.float32], TopTokens]:
        logprobs = _log_softmax(self.versions[version])
        scores, top = logprobs[prompt].astype(np.float32), _top(logprobs, len(prompt), num_top_tokens)
        scores[0], top.logprobs[0] = np.nan, -np.inf
        return scores, top


def _top(logprobs: NDArray[np.float64], count: int, k: int) -> TopTokens:
    """The k most likely tokens, the same at each of `count` positions."""
    best = np.argsort(-logprobs)[:k]
    return TopTokens(np.tile(best, (count, 1)).astype(np.int32), np.tile(logprobs[best], (count, 1)).astype(np.float32))


def _log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    return logits - np.log(np.exp(logits).sum())
