"""Predicted memory of a run as plain data: bytes on a rank by phase and use."""

from __future__ import annotations

from dataclasses import KW_ONLY, asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes that one rank needs for one purpose (weights, gradients, ...), on its GPU and on its host."""

    kind: str
    _: KW_ONLY
    device_bytes: int = 0
    host_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A phase of a run, with its peak memory on the fullest rank.

    `name` is the phase's name in metrics. A model other than the policy is appended (`train critic`), and so is
    `engine` for separate engines (`reshard engine`).
    """

    name: str
    rank: int
    uses: tuple[MemoryUse, ...]
    part: Literal["", "trainer", "engine"] = ""
    """Kind of rank with separate engines. Empty: each rank is trainer and engine."""

    @property
    def device_bytes(self) -> int:
        return sum(use.device_bytes for use in self.uses)

    @property
    def host_bytes(self) -> int:
        return sum(use.host_bytes for use in self.uses)

    @property
    def place(self) -> str:
        """The kind and number of the rank: `engine rank 4`."""
        return f"{self.part} rank {self.rank}".strip()

    @property
    def metric(self) -> str:
        """PHASE of the metric `memory/PHASE_gib` that measures this phase."""
        first_word = self.name.partition(" ")[0]
        return "checkpoint" if first_word == "save" else first_word

    def use(self, kind: str) -> MemoryUse:
        return next((use for use in self.uses if use.kind == kind), MemoryUse(kind))


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCapacity:
    """Requests that fit into the KV cache of one engine."""

    tokens: int
    longest: int
    """Tokens of the longest possible request: prompt and completion."""
    max_concurrent_requests: int
    decoding_requests: int
    """Requests that one engine decodes at once in a training step."""

    @property
    def mean_requests(self) -> int:
        """Requests that fit at half of the longest length: the mean length of requests during decoding."""
        return 2 * self.tokens // self.longest

    @property
    def warning(self) -> str | None:
        """A warning if fewer than a quarter of the concurrent requests fit at their mean length, else None."""
        if 4 * self.mean_requests >= self.decoding_requests:
            return None
        return (
            f"an engine's KV cache of {self.tokens:,} tokens holds only {self.mean_requests} of "
            f"{self.decoding_requests} concurrent requests at their mean length of {self.longest // 2:,} tokens; the "
            "others wait"
        )

    @property
    def longest_requests(self) -> int:
        return self.tokens // self.longest

    @property
    def mean_length(self) -> int:
        """The mean length in tokens up to which the maximum number of concurrent requests fits."""
        return self.tokens // self.max_concurrent_requests

    def __str__(self) -> str:
        text = (
            f"KV cache of an engine: {self.tokens:,} tokens, enough for {self.longest_requests} requests of the "
            f"maximum length of {self.longest:,}"
        )
        if self.longest_requests >= self.max_concurrent_requests:
            return f"{text}; rollout.max_concurrent_requests {self.max_concurrent_requests} always fit"
        return (
            f"{text}; rollout.max_concurrent_requests {self.max_concurrent_requests} requests fit up to a mean length "
            f"of {self.mean_length:,} tokens; beyond it vLLM preempts requests"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTable:
    """Predicted memory of all phases of a run, and the capacity of an engine's KV cache; None: no engine."""

    phases: tuple[Phase, ...]
    cache: CacheCapacity | None
    is_gpu: bool
    """False: ranks run on CPUs, so all memory is host memory."""

    @property
    def fullest(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.device_bytes)

    @property
    def fullest_host(self) -> tuple[Phase, ...]:
        """The phase with the most host memory by kind of rank: trainer, then engine."""
        parts = dict.fromkeys(phase.part for phase in self.phases)
        return tuple(
            max((phase for phase in self.phases if phase.part == part), key=lambda phase: phase.host_bytes)
            for part in parts
        )

    def host_bytes(self, *, num_trainers: int = 0, num_engines: int = 0) -> int:
        """Return the host memory of `num_trainers` and `num_engines` ranks, each rank at its maximum."""
        counts = (num_trainers, num_engines)
        return sum(count * phase.host_bytes for count, phase in zip(counts, self.fullest_host, strict=False))

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of all uses above zero, in the order of the phases."""
        return tuple(
            dict.fromkeys(use.kind for phase in self.phases for use in phase.uses if use.device_bytes or use.host_bytes)
        )

    def bytes_by_metric(self) -> dict[str, int]:
        """Return the peak bytes of a GPU (on CPUs: of a rank's process), keyed by PHASE of `memory/PHASE_gib`."""
        peak_bytes: dict[str, int] = {}
        for phase in self.phases:
            num_bytes = phase.device_bytes if self.is_gpu else phase.host_bytes
            peak_bytes[phase.metric] = max(peak_bytes.get(phase.metric, 0), num_bytes)
        return peak_bytes

    def as_json(self) -> dict[str, Any]:
        phases = [
            {
                "phase": phase.name,
                "rank": phase.rank,
                "part": phase.part,
                "device_bytes": phase.device_bytes,
                "host_bytes": phase.host_bytes,
                "kinds": {use.kind: [use.device_bytes, use.host_bytes] for use in phase.uses},
            }
            for phase in self.phases
        ]
        return {"phases": phases, "kv_cache": None if self.cache is None else asdict(self.cache)}
