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
        scheduler = engine._requests.engine.engine_core.engine_core.scheduler
        schedule = scheduler.schedule

        def counted(*args: Any) -> Any:
            found = schedule(*args)
            if found.total_num_scheduled_tokens:
                events.append(("scheduled", next(scheduled)))
            return found

        with patch.object(scheduler, "schedule", counted):
            yield events


@contextmanager
def recorded_schedules(scheduler: Any) -> Iterator[dict[str, Any]]:
    """Record what an engine's scheduler decides: `steps`, each as plain values without vLLM's random ids.

    The numbers of free and of cached blocks follow after each of its calls. `num_short` counts the steps scheduled by
    the short path, `num_outputs` the outputs for vLLM's output processor.
    """
    result: dict[str, Any] = {"steps": [], "num_short": 0, "num_outputs": 0}
    schedule, schedule_short, update = scheduler.schedule, scheduler._schedule_decoding, scheduler.update_from_output
    pool = scheduler.kv_cache_manager.block_pool

    def record_blocks() -> None:
        result["steps"].append((pool.get_num_free_blocks(), len(pool.cached_block_hash_to_block)))

    def recorded(*args: Any) -> Any:
        output = schedule(*args)
        result["steps"].append(_as_values(output))
        record_blocks()
        return output

    def recorded_short(*args: Any) -> Any:
        result["num_short"] += 1
        return schedule_short(*args)

    def recorded_update(*args: Any) -> Any:
        outputs = update(*args)
        result["num_outputs"] += sum(len(one.outputs) for one in outputs.values())
        record_blocks()
        return outputs

    with (
        patch.object(scheduler, "schedule", recorded),
        patch.object(scheduler, "_schedule_decoding", recorded_short),
        patch.object(scheduler, "update_from_output", recorded_update),
    ):
        yield result


def _as_values(output: Any) -> dict[str, Any]:
    """Return the fields of a step's SchedulerOutput, with blocks as their numbers per request."""

    def plain(value: Any) -> Any:
        match value:
            case str():
                return value.rpartition("-")[0] or value
            case dict():
                return {plain(key): plain(item) for key, item in value.items()}
            case set():
                return {plain(item) for item in value}
            case list() | tuple():
                return [plain(item) for item in value]
            case _:
                return value

    fields = {**vars(output), **vars(output.scheduled_cached_reqs)}
    num_blocks = [
        None if blocks is None else [len(group) for group in blocks] for blocks in fields.pop("new_block_ids")
    ]
    new = [(plain(data.req_id), data.num_computed_tokens) for data in fields.pop("scheduled_new_reqs")]
    del fields["scheduled_cached_reqs"]
    return {name: plain(value) for name, value in fields.items()} | {"num_blocks": num_blocks, "new": new}
