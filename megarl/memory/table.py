"""The memory table of a run: what each kind of memory takes on a rank, phase by phase. Plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Use:
    """Bytes that one kind of memory takes on one rank: of its GPU, and of the host's memory."""

    kind: str
    device_bytes: int = 0
    host_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Phase:
    """The fullest moment of a phase, on the rank that has the most then.

    `name` is the phase's as metrics have it, with the model that works in it where that is not the policy:
    `train critic`; or with `engine` where engines' own ranks have it too: `reshard engine`.
    """

    name: str
    rank: int
    uses: tuple[Use, ...]
    part: Literal["", "trainer", "engine"] = ""
    """The kind of rank, where each is only one of both (rollout.placement separate)."""

    @property
    def device_bytes(self) -> int:
        return sum(use.device_bytes for use in self.uses)

    @property
    def host_bytes(self) -> int:
        return sum(use.host_bytes for use in self.uses)

    @property
    def place(self) -> str:
        """The rank, and what it is: `engine rank 4`."""
        return f"{self.part} rank {self.rank}".strip()

    @property
    def metric(self) -> str:
        """The phase of `memory/PHASE_gib` that this is a part of."""
        first = self.name.partition(" ")[0]
        return "checkpoint" if first == "save" else first

    def of(self, kind: str) -> Use:
        """The use of one kind; zero where there is none."""
        return next((use for use in self.uses if use.kind == kind), Use(kind))


@dataclass(frozen=True, slots=True)
class CacheRoom:
    """How many requests the KV cache of one engine really holds."""

    tokens: int
    longest: int
    """Tokens of the longest request: prompt and completion."""
    max_concurrent_requests: int
    under_way: int
    """Requests that a training step gives an engine to decode at once: all of its share, or as many as may be."""

    @property
    def mean_requests(self) -> int:
        """Requests that fit together while they have half of the longest's tokens: all grow to it, evenly spread."""
        return 2 * self.tokens // self.longest

    @property
    def warning(self) -> str | None:
        """A line if the cache holds less than a quarter of the requests under way at their mean length."""
        if 4 * self.mean_requests >= self.under_way:
            return None
        return (
            f"an engine's KV cache of {self.tokens:,} tokens holds {self.mean_requests} of {self.under_way} requests "
            f"under way at a mean length of {self.longest // 2:,} tokens, the others wait; raise rollout.kv_cache_gib "
            "(left out: what a GPU has left) or rollout.tp, or offload more (trainer.offload)"
        )

    @property
    def longest_requests(self) -> int:
        """Requests of the longest kind that fit together."""
        return self.tokens // self.longest

    @property
    def mean_length(self) -> int:
        """Tokens that a request may have on average for all to fit that may be decoded together."""
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
    """All phases of a run, and the room of its engines' KV caches; None without an engine."""

    phases: tuple[Phase, ...]
    cache: CacheRoom | None
    is_gpu: bool
    """Else ranks are on a CPU, and all memory is the host's."""

    @property
    def fullest(self) -> Phase:
        """The phase that takes the most of a GPU's memory."""
        return max(self.phases, key=lambda phase: phase.device_bytes)

    @property
    def fullest_host(self) -> tuple[Phase, ...]:
        """The phase that takes the most host memory of a rank: of one that trains, then of an engine's own."""
        parts = dict.fromkeys(phase.part for phase in self.phases)
        return tuple(
            max((phase for phase in self.phases if phase.part == part), key=lambda phase: phase.host_bytes)
            for part in parts
        )

    def host_bytes(self, num_trainers: int, num_engines: int = 0) -> int:
        """Bytes of host memory of so many ranks that train, and so many of engines' own, each at its fullest."""
        counts = (num_trainers, num_engines)
        return sum(count * phase.host_bytes for count, phase in zip(counts, self.fullest_host, strict=False))

    @property
    def kinds(self) -> tuple[str, ...]:
        """All kinds that take anything in some phase, in the order of the phases."""
        return tuple(
            dict.fromkeys(use.kind for phase in self.phases for use in phase.uses if use.device_bytes or use.host_bytes)
        )

    def predicted(self) -> dict[str, int]:
        """Bytes of a GPU, or on a CPU of a rank's process, by the phases of `memory/PHASE_gib`."""
        found: dict[str, int] = {}
        for phase in self.phases:
            taken = phase.device_bytes if self.is_gpu else phase.host_bytes
            found[phase.metric] = max(found.get(phase.metric, 0), taken)
        return found

    def as_json(self) -> dict[str, Any]:
        """JSON values: bytes by phase and kind, and the room of the cache."""
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
