"""vLLM's asynchronous scheduling on a CPU, and the order in which the steps of an engine are taken."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch


class Instant:
    """A stream or event of a device that has done everything when it was asked to."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, *args: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass


@contextmanager
def scheduled_ahead() -> Iterator[None]:
    """Inside, vLLM's platform for CPUs does not switch asynchronous scheduling off.

    All else is vLLM's own: scheduler, queue of steps, tokens that stay in the runner for the next step. Its outputs
    wait for an event of the device, which here is one that has happened.
    """
    from vllm.platforms.cpu import CpuPlatform

    adapt = CpuPlatform.check_and_update_config

    def adapt_but_for_scheduling(vllm_config: Any) -> None:
        asked = vllm_config.scheduler_config.async_scheduling
        adapt(vllm_config)
        vllm_config.scheduler_config.async_scheduling = asked

    with (
        patch.object(CpuPlatform, "check_and_update_config", staticmethod(adapt_but_for_scheduling)),
        patch.object(torch.cuda, "Event", Instant),
        patch.object(torch.cuda, "current_stream", Instant),
    ):
        yield


@contextmanager
def recorded_steps(engine: Any) -> Iterator[list[tuple[str, int]]]:
    """Record the steps of this rank of a `RolloutEngine`: `scheduled` (on leaders), `begun` and `read`."""
    from vllm.v1.worker.gpu_model_runner import AsyncGPUModelRunnerOutput as Output

    events: list[tuple[str, int]] = []
    begun, scheduled = itertools.count(), itertools.count()
    make, read = Output.__init__, Output.get_output

    def made(output: Any, *args: Any, **kwargs: Any) -> None:
        make(output, *args, **kwargs)
        output.number = next(begun)
        events.append(("begun", output.number))

    def waited_for(output: Any) -> Any:
        events.append(("read", output.number))
        return read(output)

    with patch.object(Output, "__init__", made), patch.object(Output, "get_output", waited_for):
        if not engine.is_leader:
            yield events
            return
        scheduler = engine._engine.engine_core.engine_core.scheduler
        schedule = scheduler.schedule

        def counted(*args: Any) -> Any:
            found = schedule(*args)
            if found.total_num_scheduled_tokens:
                events.append(("scheduled", next(scheduled)))
            return found

        with patch.object(scheduler, "schedule", counted):
            yield events
