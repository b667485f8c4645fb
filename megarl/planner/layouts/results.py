"""Results of a search: the layouts that fit, with their predicted seconds and memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.planner.layouts.candidates import EngineSizes, Placement, TrainerSizes
from megarl.planner.seconds.constants import HELD_OUT_ERROR
from megarl.planner.seconds.rollout import RolloutSeconds
from megarl.planner.seconds.step import StepSeconds


@dataclass(frozen=True, kw_only=True)
class FoundLayout:
    """A layout that fits, with its predictions."""

    overrides: tuple[str, ...]
    """Command-line overrides that turn the recipe into this layout. In a shell they need quotes."""
    trainer: TrainerSizes
    engine: EngineSizes
    placement: Placement
    seconds: StepSeconds
    rollout: RolloutSeconds
    update: Mapping[str, float]
    """Seconds of the updates by cause."""
    gib: Mapping[str, float]
    """Predicted GiB of a GPU in the fullest phase of each kind."""
    kv_cache_gib: float

    @property
    def trainer_text(self) -> str:
        sizes_text = " ".join(f"{name} {size}" for name, size in self.trainer.by_axis.items() if size > 1)
        return sizes_text or "one rank"

    @property
    def engine_text(self) -> str:
        """The engines' size in words: `tp 2 ep on 4 ranks`, or `tp 2 ep` if they share the trainer's ranks."""
        size = f"tp {self.engine.tp}{' ep' if self.engine.ep else ''}"
        return f"{size} on {self.placement.ranks} ranks" if self.placement.ranks else size

    @property
    def limit(self) -> str:
        """Return in words what takes most of a step's time: a phase, or a cause within a phase."""
        phases = {"rollout": self.seconds.rollout, "train": self.seconds.train, "logprobs": self.seconds.logprobs,
                  "offload": self.seconds.offload, "reshard": self.seconds.reshard}  # fmt: skip
        name = max(phases, key=lambda phase: phases[phase])
        if name == "rollout":
            if self.rollout.full > self.rollout.tail:
                return "KV cache" if self.rollout.limited_by_cache else "decoding"
            return "longest completions"
        if name == "train":
            return max(self.update, key=lambda cause: self.update[cause]).replace("_", " ")
        return name

    def as_json(self) -> dict[str, Any]:
        seconds = {
            name: getattr(self.seconds, name)
            for name in ("step", "rollout", "logprobs", "train", "reshard", "offload", "other")
        }
        return {
            "overrides": list(self.overrides),
            "seconds": seconds,
            "rollout_seconds": {name: getattr(self.rollout, name) for name in ("prefill", "full", "tail")},
            "update_seconds": dict(self.update),
            "gib": dict(self.gib),
            "kv_cache_gib": self.kv_cache_gib,
            "limit": self.limit,
        }


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """Result of a search."""

    layouts: tuple[FoundLayout, ...]
    """The layouts that fit, fastest first."""
    num_candidates: int
    """Number of combinations whose seconds were computed."""
    num_planned: int
    """Number of combinations whose memory was predicted."""
    refused: Mapping[str, int]
    """Number of refused choices by reason."""
    search_seconds: float
    is_complete: bool
    """Whether no better layout exists. False: the search stopped after `MOST_CHECKED` layouts."""
    lengths: str
    """Source of the completions' lengths, in words."""
    held_out_error: float = HELD_OUT_ERROR

    def as_json(self) -> dict[str, Any]:
        return {
            "layouts": [layout.as_json() for layout in self.layouts],
            "num_candidates": self.num_candidates,
            "num_planned": self.num_planned,
            "refused": dict(self.refused),
            "search_seconds": self.search_seconds,
            "is_complete": self.is_complete,
            "lengths": self.lengths,
            "held_out_error": self.held_out_error,
        }
