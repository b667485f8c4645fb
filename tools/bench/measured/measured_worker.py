"""The worker of a colocated rank that also measures: ceilings of its device, requests, engine steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megarl.types import Completion, Request
from megarl.worker.colocated import Worker
from tools.bench.measured.trainer_settings import set_offload, set_recomputation
from tools.bench.parts.device_parts import Gemm, copy_rates


class MeasuredWorker(Worker):
    """A worker whose trainer's settings may change between steps, and that measures on its own device."""

    _requests: list[Request] | None = None
    """Requests since `begin_round`; None: they are not recorded."""
    _tokens: list[int]

    def change_settings(self, offload: Sequence[str], recompute: str) -> None:
        """Set trainer.offload and trainer.recompute for the steps from now on."""
        set_offload(self.policy, offload)
        set_recomputation(self.policy, recompute)

    def gemm_tflops(self, width: int, rounds: int) -> list[float]:
        """Return the TFLOP/s of each round of bfloat16 products of this width."""
        return Gemm(width).tflops(rounds)

    def copy_rates(self, num_bytes: int, rounds: int) -> list[float]:
        """Return GB/s, read and written, of copies within the device's memory."""
        return copy_rates(num_bytes, rounds)

    def begin_round(self) -> None:
        """Forget cached prompts and the requests of earlier rounds."""
        assert self.engine is not None
        self.engine.reset_prefix_cache()
        self.engine.metrics()
        self._requests, self._tokens = [], []

    def round_requests(self) -> list[Request]:
        """Return the requests since `begin_round`, in their order."""
        return self._requests or []

    def round_tokens(self) -> list[int]:
        """Return the sampled tokens of each completion since `begin_round`."""
        return self._tokens

    def round_steps(self) -> int:
        """Return the engine's steps since `begin_round`."""
        engine: Any = self.engine
        return engine._executor.num_steps

    def advance(
        self,
        requests_and_aborts: tuple[Sequence[Request], Sequence[str]],
        budget_seconds: float,
        leave_after: int | None,
    ) -> list[Completion]:
        completions = super().advance(requests_and_aborts, budget_seconds, leave_after)
        if self._requests is not None:
            self._requests += requests_and_aborts[0]
            self._tokens += [len(completion.token_ids) for completion in completions]
        return completions
