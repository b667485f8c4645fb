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
            if self._keeps_computed_tokens(request, weight_version):
                request.versions.append((len(request.sampled.token_ids), weight_version))
            else:
                request.versions[:] = [(0, weight_version)]

    def _keeps_computed_tokens(self, running: RunningRequest, weight_version: int) -> bool:
        """Return whether a request has a computed KV cache. Without one it switches to the new weights' prefix
        cache.
        """
        request = self._scheduler.requests[running.internal_id]
        if request.num_computed_tokens > 0 or request.num_output_tokens > 0:
            return True
        request.cache_salt = _cache_salt(weight_version)
        # vLLM computed the block hashes, including the salt, when the request was added. Compute them again.
        request.block_hashes.clear()
        request.update_block_hashes()
        return False


def _cache_salt(weight_version: int) -> str:
    return f"version {weight_version}"
