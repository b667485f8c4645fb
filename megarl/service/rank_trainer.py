"""The service's trainer on a recipe's ranks: training by their Megatron models, sampling by their vLLM engines."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from megarl.checkpoint.torch_dist_reader import check_harmless
from megarl.cluster.rank_model import RankModel
from megarl.cluster.reshard_calls import ReshardCalls
from megarl.cluster.run_ranks import RunRanks
from megarl.data.token_batch import TokenBatch, borders
from megarl.rollout.pool import EnginePool
from megarl.service.refusals import UserError
from megarl.service.requests import AdamSettings
from megarl.service.trainer import ServedModel
from megarl.service.turns import Turns
from megarl.service.wire import Sample
from megarl.types import Completion, MegarlError, Request, SamplingSettings

Result = TypeVar("Result")


class RankTrainer:
    """Trainer of a service; see the protocol `trainer.Trainer`. `model` is the policy on the ranks.

    `failure` gets the first error of the ranks: the service cannot go on then.
    """

    def __init__(self, served: ServedModel, ranks: RunRanks, pool: EnginePool, model: RankModel) -> None:
        self.served = served
        self._ranks, self._pool, self._model = ranks, pool, model
        self._reshard_calls = ReshardCalls(ranks)
        # The engines' first version is that of the model folder.
        self._reshard_numbers = itertools.count(2)
        # The pool finds requests by id, so ids are unique over all clients.
        self._request_numbers = itertools.count()
        self._turns = Turns(self._free_device, self._send_version)
        self._tasks: set[asyncio.Task[Any]] = set()
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        """Put the engines to sleep: they are awake after their start."""
        await self._free_device()

    async def create_model(self, model_id: str, seed: int) -> None:
        await self._train("create", model_id, seed)

    async def forward_backward(
        self, model_id: str, batch: TokenBatch, loss: str, settings: Mapping[str, float], *, is_forward_only: bool
    ) -> NDArray[np.float32]:
        method = "adapters.measure" if is_forward_only else "adapters.accumulate"

        async def gather() -> NDArray[np.float32]:
            async with self._turns.training():
                return await self._model.gather(method, batch, model_id, loss, dict(settings))

        return await self._shielded(gather)

    async def clear_gradients(self, model_id: str) -> None:
        await self._train("clear", model_id)

    async def optim_step(self, model_id: str, adam: AdamSettings) -> dict[str, float]:
        # Norm and outcome are equal on all ranks, so one answer is enough.
        [(norm, is_applied), *_] = await self._train("step", model_id, adam.model_dump())
        if not is_applied:
            raise UserError(
                f"no step: the norm of the gradients is {norm}. They were dropped; check data and advantages"
            )
        return {"grad_norm:mean": norm}

    async def save(self, model_id: str, folder: Path) -> None:
        await self._train("save", model_id, folder.absolute())

    async def load(self, model_id: str, folder: Path, *, with_optimizer: bool) -> None:
        await asyncio.to_thread(check_harmless, folder)
        await self._train("load", model_id, folder.absolute(), with_optimizer)

    async def publish(self, model_id: str, version: str) -> None:
        await self._train("publish", model_id, version)

    async def publish_folder(self, folder: Path, version: str) -> None:
        await asyncio.to_thread(check_harmless, folder)
        await self._train("publish_folder", folder.absolute(), version)

    async def forget(self, *, models: Sequence[str], versions: Sequence[str]) -> None:
        if models or versions:
            await self._train("forget", list(models), list(versions))

    async def sample(
        self, version: str | None, prompt: NDArray[np.int32], settings: SamplingSettings, seeds: Sequence[int]
    ) -> list[Sample]:
        self._check_prompt(prompt)

        async def generate() -> list[Completion]:
            async with self._turns.sampling(version):
                requests = [Request(f"service-{next(self._request_numbers)}", prompt, settings, seed) for seed in seeds]
                return await asyncio.gather(*map(self._pool.generate, requests))

        completions = await self._shielded(generate)
        for completion in completions:
            if completion.error is not None:
                raise UserError(f"the engine refused the request: {completion.error}")
        return [
            Sample(completion.token_ids, completion.rollout_logprobs, completion.finish_reason == "stop")
            for completion in completions
        ]

    async def score(self, version: str | None, prompt: NDArray[np.int32]) -> NDArray[np.float32]:
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

        async def gather() -> NDArray[np.float32]:
            async with self._turns.training():
                return await self._model.gather("adapters.score", batch, version)

        [logprobs] = await self._shielded(gather)
        # The SDK reads NaN as a position without log-prob.
        logprobs[0] = np.nan
        return logprobs

    def _check_prompt(self, prompt: NDArray[np.int32]) -> None:
        if prompt.max() >= self.served.vocab_size:
            raise UserError(f"prompt has a token outside of the vocabulary: 0 to {self.served.vocab_size - 1}")

    async def _train(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the ranks' adapters in a turn of its own."""

        async def call() -> list[Any]:
            async with self._turns.training():
                return await self._ranks.trainers.call(f"adapters.{method}", *args)

        return await self._shielded(call)

    async def _shielded(self, work: Callable[[], Awaitable[Result]]) -> Result:
        """Run a call of the ranks to its end, even if its request is cancelled: ranks cannot leave a collective."""

        async def run() -> Result:
            try:
                return await work()
            except MegarlError as error:
                # The first error is the cause. Later ones are its consequences.
                if not self.failure.done():
                    self.failure.set_exception(error)
                raise

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _free_device(self) -> None:
        """Put the engines to sleep: the trainer then has the device."""
        # The pool stops first: it must not step an engine that sleeps.
        await self._pool.pause()
        await self._ranks.trainers.call("sleep_engine")

    async def _send_version(self, version: str | None) -> None:
        """Bring a version's adapters into the engines, and let them sample."""
        await self._ranks.trainers.call("adapters.show", version)
        await self._reshard_calls.run(verify=False, version=next(self._reshard_numbers))
        # Waiting requests start only now, when every engine has the new weights.
        self._pool.resume()
