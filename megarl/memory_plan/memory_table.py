"""Memory table of a run: bytes of each kind of memory on a rank, by phase. Plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Use:
    """Bytes of one kind of memory on one rank, on its GPU and on the host."""

    kind: str
    device_bytes: int = 0
    host_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Phase:
    """Fullest moment of a phase, on the fullest rank.

    `name` is the phase's name in metrics. It is followed by the working model unless that is the policy (`train
    critic`), or by `engine` for a phase of separate engines (`reshard engine`).
    """

    name: str
    rank: int
    uses: tuple[Use, ...]
    part: Literal["", "trainer", "engine"] = ""
    """Kind of rank under rollout.placement separate; empty if a rank is both."""

    @property
    def device_bytes(self) -> int:
        return sum(use.device_bytes for use in self.uses)

    @property
    def host_bytes(self) -> int:
        return sum(use.host_bytes for use in self.uses)

    @property
    def place(self) -> str:
        """Return the rank and its kind: `engine rank 4`."""
        return f"{self.part} rank {self.rank}".strip()

    @property
    def metric(self) -> str:
        """Return the phase of `memory/PHASE_gib` including this one."""
        first = self.name.partition(" ")[0]
        return "checkpoint" if first == "save" else first

    def of(self, kind: str) -> Use:
        """Return the memory used by one kind of tensors, such as weights; zero bytes if the phase has none."""
        return next((use for use in self.uses if use.kind == kind), Use(kind))


@dataclass(frozen=True, slots=True)
class CacheCapacity:
    """Capacity of one engine's KV cache in requests."""

    tokens: int
    longest: int
    """Tokens of the longest request, prompt and completion."""
    max_concurrent_requests: int
    under_way: int
    """Concurrent requests of one engine in a training step: its share of the step, at most the maximum."""

    @property
    def mean_requests(self) -> int:
        """Return the requests fitting together at half the longest length, the mean of lengths growing evenly."""
        return 2 * self.tokens // self.longest

    @property
    def warning(self) -> str | None:
        """Return a warning if the cache holds less than a quarter of the concurrent requests at their mean length."""
        if 4 * self.mean_requests >= self.under_way:
            return None
        return (
            f"an engine's KV cache of {self.tokens:,} tokens holds {self.mean_requests} of {self.under_way} requests "
            f"under way at a mean length of {self.longest // 2:,} tokens, the others wait"
        )

    @property
    def longest_requests(self) -> int:
        """Return the number of longest requests fitting together."""
        return self.tokens // self.longest

    @property
    def mean_length(self) -> int:
        """Return the average tokens a request may have if the maximum number of requests is decoded together."""
        return self.tokens // self.max_concurrent_requests

    def __str__(self) -> str:
        text = (
            f"KV cache of an engine: {self.tokens:,} tokens, {self.longest_requests} requests of the longest "
            f"{self.longest:,}"
        )
        if self.longest_requests >= self.max_concurrent_requests:
            return f"{text}; rollout.max_concurrent_requests {self.max_concurrent_requests} always fit"
        return (
            f"{text}; of rollout.max_concurrent_requests {self.max_concurrent_requests} all fit while they have "
            f"{self.mean_length:,} tokens on average, beyond that vLLM preempts"
        )


@dataclass(frozen=True, slots=True)
class MemoryTable:
    """All phases of a run, and the KV cache capacity of its engines (None without an engine)."""

    phases: tuple[Phase, ...]
    cache: CacheCapacity | None
    is_gpu: bool
    """False: ranks are on a CPU, so all memory is host memory."""

    @property
    def fullest(self) -> Phase:
        """Return the phase of a step using the most GPU memory."""
        return max(self.phases, key=lambda phase: phase.device_bytes)

    @property
    def fullest_host(self) -> tuple[Phase, ...]:
        """Return the phase with the most host memory for each kind of rank: trainer first, then engine."""
        parts = dict.fromkeys(phase.part for phase in self.phases)
        return tuple(
            max((phase for phase in self.phases if phase.part == part), key=lambda phase: phase.host_bytes)
            for part in parts
        )

    def host_bytes(self, num_trainers: int, num_engines: int = 0) -> int:
        """Return bytes of host memory of given numbers of trainer and engine ranks, each at its fullest."""
        counts = (num_trainers, num_engines)
        return sum(count * phase.host_bytes for count, phase in zip(counts, self.fullest_host, strict=False))

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return all kinds of memory (`Use.kind`) used in some phase, in the order of the phases."""
        return tuple(
            dict.fromkeys(use.kind for phase in self.phases for use in phase.uses if use.device_bytes or use.host_bytes)
        )

    def predicted(self) -> dict[str, int]:
        """Return bytes of a GPU (on a CPU: of a rank's process) by the phases of `memory/PHASE_gib`."""
        found: dict[str, int] = {}
        for phase in self.phases:
            taken = phase.device_bytes if self.is_gpu else phase.host_bytes
            found[phase.metric] = max(found.get(phase.metric, 0), taken)
        return found

    def as_json(self) -> dict[str, Any]:
        """Return the table as JSON values: bytes by phase and kind of memory, and the capacity of the KV cache."""
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
