"""Requests that keep their KV cache over a weight update (`rollout.recompute_kv = false`)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from megarl.engine.parts.engine_part import EnginePart
from megarl.engine.running_request import RunningRequest
from megarl.types import Request


class RetainedKV(EnginePart):
    """Lets running requests keep their KV cache when the weights change. Requests added later do not reuse it."""

    keeps_cache = True

    def __init__(self) -> None:
        self._scheduler: Any = None

    def start(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def extend_request(self, arguments: dict[str, Any], request: Request | None, weight_version: int) -> None:
        if request is not None:
            arguments["prompt"]["cache_salt"] = _cache_salt(weight_version)

    def update_weights(self, running: Collection[RunningRequest], weight_version: int) -> None:
        # Later requests have another salt: they do not reuse blocks of old weights.
        for request in running:
            scheduled_request = self._scheduler.requests[request.internal_id]
            if scheduled_request.num_computed_tokens > 0 or scheduled_request.num_output_tokens > 0:
                request.versions.append((len(request.sampled.token_ids), weight_version))
            else:
                # Nothing is computed yet, so the request can use the new weights' prefix cache.
                _change_cache_salt(scheduled_request, weight_version)
                request.versions[:] = [(0, weight_version)]


def _change_cache_salt(scheduled_request: Any, weight_version: int) -> None:
    """Compute a request's block hashes again: vLLM did it, with the salt, when the request was added."""
    scheduled_request.cache_salt = _cache_salt(weight_version)
    scheduled_request.block_hashes.clear()
    scheduled_request.update_block_hashes()


def _cache_salt(weight_version: int) -> str:
    return f"version {weight_version}"
