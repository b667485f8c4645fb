"""One rank's part in copying weights from trainers to engines."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from torch import Tensor

from megarl import faults
from megarl.groups.peer_errors import ReplicaCollectiveError, engine_collectives_marked
from megarl.platform.memory import peak_memory
from megarl.platform.spans import span
from megarl.reshard.checks.ledger import RankChanges
from megarl.reshard.layouts.vllm_slots import live_parameters
from megarl.reshard.reshard_report import ReshardReport
from megarl.reshard.staging import gather_values
from megarl.worker.reshard.checks import ReshardChecks
from megarl.worker.reshard.planning import ReshardEnds, plan_reshard

FIRST_VERSION = 1
"""Version of the weights before the first update: the weights of the model folder."""


class RankReshard:
    """Executes one rank's part of the reshards between its `reshard_ends` and those of other ranks.

    `version` is the version of the current weights; None: one more than the engine's. The constructor plans the copies,
    copies all weights once and verifies them. It is a collective. Raises MegarlError naming the first wrong parameter.
    """

    def __init__(self, reshard_ends: ReshardEnds, *, version: int | None = None) -> None:
        self._reshard_ends = reshard_ends
        with self._weights_on_device(version):
            # Planning and verifying need the live weights of both sides in memory.
            plan = plan_reshard(reshard_ends, None if reshard_ends.engine is None else self._load_tensors)
            self.live_reshard = plan.live_reshard
            self.notices = list(plan.notices)
            """Texts for the user about how the weights are copied."""
            copies = self.live_reshard.self_test()
            self.checks = ReshardChecks(reshard_ends, plan)
            if version in (None, FIRST_VERSION):
                self.checks.compare_with_folder()
            ledger = self.checks.take_ledger(version or FIRST_VERSION)
            self.checks.start_probe()
        probe_started = time.perf_counter()
        # The engine needs its KV cache to compute log-probs. The context above freed memory for it.
        probe_gap = self.checks.finish_probe()
        verify_seconds = copies.seconds.get("verify", 0.0) + time.perf_counter() - probe_started
        self.first_report = ReshardReport(
            seconds={**copies.seconds, "verify": verify_seconds},
            num_bytes=copies.num_bytes,
            probe_gap=probe_gap,
            rounding=reshard_ends.rounding,
            ledger=ledger,
        )

    def run(self, *, verify: bool = False, version: int | None = None) -> ReshardReport:
        """Copy the trainer's weights into the engines. With `verify`, compare them afterwards. A collective.

        Raises MegarlError with the first differing parameter, or with the rank of differing log-probs.
        """
        faults.reach("reshard")
        seconds = self._wait_for_ranks()
        with self._weights_on_device(version):
            with span("move weights"):
                copies = self.live_reshard.run()
            faults.reach("resharded", self._engine_weights)
            check_started = time.perf_counter()
            if verify:
                self.live_reshard.verify()
                self.checks.start_probe()
            verify_seconds = time.perf_counter() - check_started
            ledger = self.checks.take_ledger(version or FIRST_VERSION)
        # The probe prompt needs the KV cache, which exists only after the context above.
        seconds |= copies.seconds
        probe_gap = None
        if verify:
            check_started = time.perf_counter()
            probe_gap = self.checks.finish_probe()
            seconds["verify"] = verify_seconds + time.perf_counter() - check_started
        return ReshardReport(
            seconds=seconds,
            num_bytes=copies.num_bytes,
            probe_gap=probe_gap,
            rounding=self._reshard_ends.rounding,
            ledger=ledger,
        )

    def compare_weights(self) -> RankChanges | None:
        return self.checks.compare_weights()

    def _engine_weights(self) -> Iterable[Tensor]:
        return () if self._reshard_ends.engine is None else live_parameters(self._reshard_ends.engine.model).values()

    def _wait_for_ranks(self) -> dict[str, float]:
        """Wait on the host until all ranks of the group are ready. Return the seconds of stage `meet`.

        A trainer that sends in the background arrives before the engines pause. If it began to send, NCCL kernels would
        wait on its GPU, and occupy 16 to 32 multiprocessors during training.
        """
        if self._reshard_ends.group is None:
            return {}
        started = time.perf_counter()
        with span("meet engines"):
            gather_values(None, self._reshard_ends.group)
        return {"meet": time.perf_counter() - started}

    @contextmanager
    def _weights_on_device(self, version: int | None) -> Iterator[None]:
        """Context with only the weights of trainer and engine in device memory. Afterwards the engine can sample.

        A trainer without an engine on its device leaves everything in place.
        """
        policy, engine = self._reshard_ends.policy, self._reshard_ends.engine
        with ExitStack() as stack:
            if policy is not None:
                if engine is not None:
                    # Colocated: move gradients and optimizer state off the device, so that the engine's weights fit.
                    policy.offload(exceptions=("parameters",))
                    # Until now the device held the update's memory, which belongs to the update's peak.
                    peak_memory.restart_peak()
                policy.onload(("parameters",))
            if engine is not None:
                with engine_collectives_marked(self._reshard_ends.group):
                    engine.wake(["weights"])
            if policy is not None:
                stack.enter_context(self._reshard_ends.open_sent_weights())
            yield
        if engine is not None:
            if policy is not None:
                # Colocated: the trainer leaves the device, because the engine samples next.
                policy.offload()
            # End the reshard's peak here: the KV cache belongs to the rollout.
            peak_memory.fix_peak()
            with engine_collectives_marked(self._reshard_ends.group):
                # Allocate the KV cache last: it fits only after the trainer has left the device.
                engine.wake(["kv_cache"])
                engine.weights_updated(version)

    def _load_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Pass tensors to the engine's weight loader as they arrive. Errors of the copies are raised unchanged."""
        copy_errors: list[Exception] = []

        def yield_tensors() -> Iterator[tuple[str, Tensor]]:
            try:
                yield from tensors
            except Exception as error:
                copy_errors.append(error)
                raise

        assert self._reshard_ends.engine is not None
        try:
            with engine_collectives_marked(self._reshard_ends.group):
                self._reshard_ends.engine.load_tensors(yield_tensors())
        except ReplicaCollectiveError:
            if copy_errors:
                # The engine's error is a consequence of this one. Raise the cause, because it may name a lost rank.
                raise copy_errors[0] from None
            raise
