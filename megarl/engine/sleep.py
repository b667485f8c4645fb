"""Sleep of a vLLM engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from megarl.engine.parts.engine_part import EnginePart

_MOST_NAMED = 5
"""Maximum number of tensor names in a notice. Each layer has tensors of the same names."""


class EngineSleep:
    """Puts a rank's part of an engine to sleep, so that the trainer can use its GPU memory, and wakes it.

    `can_sleep` is False on a CPU. Level 2 drops all weights. A reshard rewrites the parameters, and vLLM restores the
    buffers, but other tensors are lost. Level 1 copies everything to the host.
    """

    def __init__(self, worker: Any, model: torch.nn.Module, parts: Sequence[EnginePart], *, can_sleep: bool) -> None:
        """Choose vLLM's sleep level: 2 drops the weights, 1 copies them to the host if a reshard cannot restore all
        tensors.
        """
        self._worker, self._can_sleep = worker, can_sleep
        self._asleep: set[str] = set()
        unrestored = unrestored_tensors(model)
        sleep_reasons = [part.sleep_reason for part in parts if part.sleep_reason]
        self._level = 1 if unrestored or sleep_reasons else 2
        self.notices: list[str] = []
        """Notices for the user about the costs of the engine's sleep."""
        if self._level == 1 and can_sleep:
            part_tensors = [tensor for part in parts for tensor in part.further_tensors()]
            self.notices.append(sleep_copies_notice(model, unrestored, sleep_reasons, part_tensors))

    def release_memory(self) -> None:
        if self._can_sleep and not self._asleep:
            self._worker.sleep(level=self._level)
            self._asleep = {"weights", "kv_cache"}

    def allocate_memory(self, tags: Iterable[str]) -> None:
        if woken := self._asleep.intersection(tags):
            self._worker.wake_up(tags=sorted(woken))
            self._asleep -= woken


def unrestored_tensors(model: torch.nn.Module) -> list[str]:
    """Return the names of a model's tensors lost by sleep level 2: neither parameters nor buffers.

    The KV cache is skipped, because it may be lost. So are scalars on the host, because sleep releases no host memory.
    """
    return [
        f"{path}.{name}".removeprefix(".")
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name != "kv_cache" and isinstance(value, torch.Tensor) and value.numel() > 0
        if not (value.is_cpu and value.dim() == 0)
    ]


def sleep_copies_notice(
    model: torch.nn.Module,
    unrestored: Sequence[str],
    reasons: Sequence[str] = (),
    part_tensors: Iterable[torch.Tensor] = (),
) -> str:
    """Return the notice that a model's weights, and `part_tensors` [any shape], are copied to host memory during sleep.

    The cause is `unrestored` tensors, or the `reasons` of the engine's parts.
    """
    num_bytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers(), *part_tensors))
    remainder = f" and {len(unrestored) - _MOST_NAMED} more" if len(unrestored) > _MOST_NAMED else ""
    cost_text = (
        f"a sleeping engine copies its weights to pinned host memory every step ({num_bytes / 2**30:.1f} GiB a rank)"
    )
    if not unrestored:
        return f"{cost_text}, because {' and '.join(reasons)}"
    return (
        f"{cost_text}, because vLLM would not restore {', '.join(unrestored[:_MOST_NAMED])}{remainder}: these are "
        "not parameters or buffers"
    )
