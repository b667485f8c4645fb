"""The service's trainer on a recipe's ranks. Their Megatron models train, their vLLM engines sample."""

from __future__ import annotations

import asyncio
import itertools
from collections import ChainMap
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from megarl.checkpoint.manifest import complete_manifest
from megarl.checkpoint.torch_dist_reader import check_intact
from megarl.cluster.rank_model import RankModel
from megarl.cluster.reshard_calls import ReshardCalls
from megarl.cluster.run_ranks import RunRanks
from megarl.data.token_batch import TokenBatch, borders
from megarl.rollout.pool import EnginePool
from megarl.service.background import Background
from megarl.service.messages.requests import AdamSettings
from megarl.service.messages.wire import Sample
from megarl.service.queueing.turns import Engines, Turns
from megarl.service.ranks.model_memory import ModelMemory
from megarl.service.refusals import UserError
from megarl.service.trainer import ServedModel
from megarl.types import Completion, MegarlError, Request, SamplingSettings, StorageError, TopTokens

Result = TypeVar("Result")


class RankEngines(Engines):
    """The engines of a service, and the trainer that sends them adapters.

    `num_slots` is the number of their slots. 0: an adapter is merged into their only set of weights.
    """

    def __init__(self, ranks: RunRanks, pool: EnginePool, reshard_calls: ReshardCalls, num_slots: int) -> None:
        self._ranks, self._pool, self._reshard_calls, self._num_slots = ranks, pool, reshard_calls, num_slots
        # Version 1 is the model folder's.
        self._reshard_numbers = itertools.count(2)

    async def free_device(self) -> None:
        # Pause the pool first: it must not step a sleeping engine.
        await self._pool.pause()
        await self._ranks.trainers.call("sleep_engine")

    async def wake(self) -> None:
        await self._ranks.trainers.call("wake_engine")
        self._pool.resume()

    async def load(self, version: str | None, index: int) -> None:
        """Reshard a version's weights to all engines. With adapter slots, install them in slot `index`."""
        # In separate engines, requests for other versions stay. Engines that slept have none.
        pausing_task = asyncio.create_task(self._pool.pause(aborts=False))
        await self._ranks.trainers.call("adapters.show", version)
        await pausing_task
        await self._reshard_calls.run(verify=False, version=next(self._reshard_numbers))
        if self._num_slots:
            await self._ranks.call_engines("install_adapter", version, index)
        # Waiting requests start only now: every engine has the adapter.
        self._pool.resume()


class RankTrainer:
    """Trainer of a service; see the protocol `trainer.Trainer`. `model` is the policy on the ranks.

    The engines have `num_slots` slots for adapters (0: none, they get merged weights), and sample at most
    `num_sequences` at once. `idle_folder` exists on every node, for idle models. `max_bytes` is the room for models
    and copies of weights in the memory of each host; None: a share of it. `report` is called with disk faults.
    `failure` gets the ranks' first error: then the service cannot continue.
    """

    def __init__(
        self,
        served: ServedModel,
        ranks: RunRanks,
        pool: EnginePool,
        model: RankModel,
        *,
        idle_folder: Path,
        num_slots: int,
        num_sequences: int,
        report: Callable[[str], object],
        max_bytes: int | None = None,
    ) -> None:
        self.served = served
        self._ranks, self._pool, self._model = ranks, pool, model
        self._reshard_calls = ReshardCalls(ranks)
        self._engines = RankEngines(ranks, pool, self._reshard_calls, num_slots)
        # The pool finds requests by id: ids must be unique over all clients.
        self._request_numbers = itertools.count()
        self._turns = Turns(
            self._engines, is_shared=not ranks.is_separate, num_slots=num_slots or 1, num_sequences=num_sequences
        )
        self._memory = ModelMemory(ranks, idle_folder.absolute(), max_bytes=max_bytes, report=report)
        self._background = Background()
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def start(self) -> str:
        """Send separate engines their first weights. Put engines on shared ranks to sleep: they start awake.

        Returns a line about the memory for models. Raises ConfigError if it has no room for one.
        """
        summary = await self._memory.measure()
        if self._ranks.is_separate:
            # Only this reshard compares the base weights. Later ones do not send them.
            await self._reshard_calls.run(verify=True, version=1)
        else:
            await self._engines.free_device()
        return summary

    async def create_model(self, model_id: str, seed: int) -> None:
        await self._call_adapters("create", model_id, seed, prepare=partial(self._memory.bring_to_memory, model_id))

    async def forward_backward(
        self, model_id: str, batch: TokenBatch, loss: str, settings: Mapping[str, float], *, is_forward_only: bool
    ) -> NDArray[np.float32]:
        """Run a batch on the ranks, in a turn of training with the model in memory."""
        method = "adapters.measure" if is_forward_only else "adapters.accumulate"

        async def run_in_turn() -> NDArray[np.float32]:
            async with self._turns.training_turn(len(batch.token_ids), partial(self._memory.check_model, model_id)):
                await self._memory.bring_to_memory(model_id)
                return await self._model.gather(method, batch, model_id, loss, dict(settings))

        return await self._run_to_end(run_in_turn)

    async def clear_gradients(self, model_id: str) -> None:
        await self._call_for_model("clear", model_id)

    async def optim_step(self, model_id: str, adam: AdamSettings) -> dict[str, float]:
        # Norm and outcome are equal on all ranks: one answer is enough.
        [(norm, is_applied), *_] = await self._call_for_model("step", model_id, adam.model_dump())
        if not is_applied and norm == 0:
            raise UserError(
                "no step: the model has no gradients, because no forward_backward ran since its last step; send "
                "forward_backward before optim_step"
            )
        if not is_applied:
            raise UserError(
                f"no step: the norm of the gradients is {norm}. They were dropped; check data and advantages"
            )
        return {"grad_norm:mean": norm}

    async def save(self, model_id: str, folder: Path) -> None:
        answers = await self._call_for_model("save", model_id, folder.absolute())
        # Raise here: an error raised on the ranks would end the service.
        if fault := next((fault for _, fault in answers if fault is not None), None):
            raise StorageError(fault)
        files = dict(ChainMap(*(files for files, _ in answers)))
        await asyncio.to_thread(complete_manifest, folder, files, {"format": "torch_dist"})

    async def load(self, model_id: str, folder: Path, *, with_optimizer: bool) -> None:
        """Load a checkpoint into a model. If a rank cannot read its part, the model is gone."""
        await asyncio.to_thread(check_intact, folder)
        faults = await self._call_adapters(
            "load",
            model_id,
            folder.absolute(),
            with_optimizer,
            prepare=partial(self._memory.bring_to_memory, model_id, is_replaced=True),
        )
        if fault := next(filter(None, faults), None):
            self._memory.remove(models=[model_id])
            raise StorageError(fault)

    async def publish(self, model_id: str, version: str) -> None:
        check = partial(self._memory.check_model, model_id)
        prepare = partial(self._memory.add_version, version, model_id)
        await self._call_adapters("publish", model_id, version, check=check, prepare=prepare)

    async def publish_folder(self, folder: Path, version: str) -> None:
        """Copy a checkpoint's weights into memory, under the name of a version."""
        await asyncio.to_thread(check_intact, folder)
        prepare = partial(self._memory.add_version, version)
        faults = await self._call_adapters("publish_folder", folder.absolute(), version, prepare=prepare)
        if fault := next(filter(None, faults), None):
            self._memory.remove(versions=[version])
            raise StorageError(fault)

    async def move_to_disk(self, models: Sequence[str]) -> None:
        # Some may have moved already, to make room. An empty turn would put engines on shared ranks to sleep.
        in_memory = self._memory.select_movable(models)
        if not in_memory:
            return

        async def move_in_turn() -> str | None:
            async with self._turns.training_turn(1):
                return await self._memory.write_to_disk(in_memory)

        if error := await self._run_to_end(move_in_turn):
            raise OSError(f"idle models stay in memory: {error}")

    async def forget(self, *, models: Sequence[str], versions: Sequence[str]) -> None:
        """Free models and versions on the ranks. Their waiting calls fail."""

        async def remove_again() -> None:
            """Remove them once more when the trainer's turn comes, and forget the models' files."""
            # A call that was making room has recorded its model or version only after the first removal.
            self._memory.remove(models=models, versions=versions)
            # Not earlier: that call still reads its model's state from disk.
            self._memory.forget_files(models)

        # Remove at once: calls of these models and versions that still wait for their turn then fail.
        self._memory.remove(models=models, versions=versions)
        if models or versions:
            await self._call_adapters("forget", list(models), list(versions), prepare=remove_again)

    async def sample(
        self, version: str | None, prompt: NDArray[np.int32], settings: SamplingSettings, seeds: Sequence[int]
    ) -> list[Sample]:
        self._check_prompt(prompt)

        async def generate() -> list[Completion]:
            """Sample one completion per seed, in a turn of sampling with this version."""
            # The turn is paid for the longest possible completions. Unused tokens are refunded at its end.
            max_turn_tokens = len(prompt) + len(seeds) * settings.max_new_tokens
            check = partial(self._memory.check_version, version)
            async with self._turns.sampling_turn(
                version, tokens=max_turn_tokens, num_sequences=len(seeds), check=check
            ) as refund:
                requests = [
                    Request(f"service-{next(self._request_numbers)}", prompt, settings, seed, adapter=version)
                    for seed in seeds
                ]
                completions = await asyncio.gather(*map(self._pool.generate, requests))
                num_sampled = sum(len(completion.token_ids) for completion in completions)
                refund(max_turn_tokens - len(prompt) - num_sampled)
                return completions

        completions = await self._run_to_end(generate)
        for completion in completions:
            if completion.error is not None:
                raise UserError(f"the engine refused the request: {completion.error}")
        return [
            Sample(
                completion.token_ids,
                completion.rollout_logprobs,
                completion.finish_reason == "stop",
                completion.top_tokens,
            )
            for completion in completions
        ]

    async def score(
        self, version: str | None, prompt: NDArray[np.int32], num_top_tokens: int
    ) -> tuple[NDArray[np.float32], TopTokens]:
        self._check_prompt(prompt)
        if len(prompt) > self.served.row_tokens:
            raise UserError(
                f"prompt has {len(prompt)} tokens: prompt_logprobs takes at most {self.served.row_tokens} "
                "(trainer.max_tokens_per_microbatch)"
            )
        batch = TokenBatch(
            token_ids=prompt.astype(np.int64),
            loss_mask=np.arange(len(prompt)) > 0,
            cu_seqlens=borders([len(prompt)]),
            samples=np.zeros(1, np.int64),
        )

        async def score_prompt() -> NDArray[np.float32]:
            async with self._turns.training_turn(len(prompt), partial(self._memory.check_version, version)):
                return await self._model.gather("adapters.score", batch, version, num_top_tokens)

        score_rows = await self._run_to_end(score_prompt)
        # Rows: the log-probs, then `num_top_tokens` rows of ids, and as many of their log-probs.
        logprobs, top_ids, top_logprobs = np.split(score_rows, [1, 1 + num_top_tokens])
        # Nothing predicts the first token. The SDK reads NaN as a missing log-prob.
        logprobs[:, 0], top_logprobs[:, 0] = np.nan, -np.inf
        return logprobs[0], TopTokens(top_ids.T.astype(np.int32), top_logprobs.T)

    def _check_prompt(self, prompt: NDArray[np.int32]) -> None:
        if prompt.max() >= self.served.vocab_size:
            raise UserError(f"prompt has a token outside of the vocabulary: 0 to {self.served.vocab_size - 1}")

    async def _call_for_model(self, method: str, model_id: str, *args: Any) -> list[Any]:
        check = partial(self._memory.check_model, model_id)
        prepare = partial(self._memory.bring_to_memory, model_id)
        return await self._call_adapters(method, model_id, *args, check=check, prepare=prepare)

    async def _call_adapters(
        self,
        method: str,
        *args: Any,
        check: Callable[[], object] = lambda: None,
        prepare: Callable[[], Awaitable[None]] | None = None,
    ) -> list[Any]:
        """Call a method of the ranks' adapters in a separate turn, which costs one token.

        `prepare` is called first, in the same turn.
        """

        async def call_in_turn() -> list[Any]:
            async with self._turns.training_turn(1, check):
                if prepare is not None:
                    await prepare()
                return await self._ranks.trainers.call(f"adapters.{method}", *args)

        return await self._run_to_end(call_in_turn)

    async def _run_to_end(self, work: Callable[[], Awaitable[Result]]) -> Result:
        """Run a call of the ranks to its end, even if its request is cancelled: ranks cannot leave a collective."""

        async def run_and_record_failure() -> Result:
            """Run the work. Its first error ends the service, through `failure`."""
            try:
                return await work()
            except MegarlError as error:
                # The first error is the cause. Later ones are consequences.
                if not self.failure.done():
                    self.failure.set_exception(error)
                raise

        return await self._background.run_to_end(run_and_record_failure())
