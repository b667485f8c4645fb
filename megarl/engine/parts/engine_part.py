"""Interface of a vLLM engine's optional features."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from megarl.tracking.metrics import Metric
from megarl.types import Completion, Request

if TYPE_CHECKING:
    from megarl.engine.running_request import RunningRequest


class EnginePart:
    """An optional feature of a `RolloutEngine`. By default each method does nothing.

    The engine calls the methods in this order, on all ranks of a replica. Methods "on the leader" are called on the
    replica's first rank only.
    """

    sleep_reason: str = ""
    """Reason for keeping the weights of a sleeping engine, as the end of a notice; empty: no reason."""
    keeps_cache: bool = False
    """Whether running requests keep their KV cache after a weight update."""

    def prepare(self) -> None:
        """Change vLLM's code before the engine is built."""

    def arguments(self) -> Mapping[str, Any]:
        """Return vLLM's arguments for this feature. Values of `rollout.vllm` replace them."""
        return {}

    def revise_arguments(self, vllm_config: Any) -> Mapping[str, Any]:
        """Return arguments to change once vLLM has completed its configuration."""
        return {}

    def find_refused_field(self, text: str) -> str | None:
        """Return "FIELD = VALUE: remedy" if a vLLM error with this text concerns this feature, else None."""
        return None

    def build(self, worker: Any, *, is_leader: bool) -> None:
        """Change the model of a vLLM worker, before vLLM captures CUDA graphs."""

    def start(self, scheduler: Any) -> None:
        """Connect to the scheduler of the complete engine. Called on the leader only."""

    def activate(self, worker: Any) -> None:
        """Finish the start on a rank, after vLLM has warmed up."""

    def wrap_model(self, worker: Any, model: torch.nn.Module) -> torch.nn.Module:
        """Return the module with the parameters that a reshard writes."""
        return model

    def extend_tensors(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterable[tuple[str, torch.Tensor]]:
        """Return the full checkpoint tensors [any shape], by name, to pass to vLLM's loader."""
        return tensors

    def further_tensors(self) -> Iterable[torch.Tensor]:
        """Return this feature's device tensors [any shape] outside the engine's model."""
        return ()

    def extend_request(self, arguments: dict[str, Any], request: Request | None, weight_version: int) -> None:
        """Change the arguments of `LLMEngine.add_request`. Called on the leader only.

        `request` None: the engine scores a prompt. `weight_version` is the version of the live weights.
        """

    def complete_step(self, output: Any) -> Any:
        """Add values to the output of an engine step. Called on the leader only."""
        return output

    def extend_completion(self, completion: Completion, output: Any) -> Completion:
        """Return a finished completion, with this feature's values from vLLM's output. Called on the leader only."""
        return completion

    def extend_aborted(self, completion: Completion, state: Any) -> Completion:
        """Add values of vLLM's output state to an aborted completion. Called on the leader only."""
        return completion

    def update_weights(self, running: Collection[RunningRequest], weight_version: int) -> None:
        """Record a new version of the live weights. `running` are the leader's unfinished requests."""

    def take_metrics(self) -> dict[str, Metric]:
        """Return the metrics since the last call. Called on the leader only."""
        return {}
