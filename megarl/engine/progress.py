"""Detection of a stalled engine."""

from __future__ import annotations

from collections.abc import Callable


class Progress:
    """Measures how long an engine with unfinished requests computes no token. `stall_seconds` is the limit."""

    def __init__(self, stall_seconds: float) -> None:
        self.stall_seconds = stall_seconds
        self._stalled_for = 0.0

    def check_stall(self, seconds: float, is_working: bool, *, num_running: int, kv_usage: Callable[[], float]) -> None:
        """Raise TimeoutError if the calls since the last computed token took `stall_seconds`.

        The newest call took `seconds`. `is_working`: it computed a token, or left no request unfinished. `num_running`
        and `kv_usage` (used fraction of the KV cache) are for the message.
        """
        if is_working:
            self._stalled_for = 0.0
            return
        self._stalled_for += seconds
        if self._stalled_for > self.stall_seconds:
            raise TimeoutError(
                f"the engine computed no token for {self._stalled_for:.0f} s (limit: {self.stall_seconds:g} s, "
                f"in a run cluster.verb_timeout_seconds). {num_running} requests are unfinished, but vLLM "
                f"schedules none of them. {kv_usage():.0%} of the KV cache is in use"
            )
