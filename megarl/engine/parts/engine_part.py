"""The interface of an optional feature of a vLLM engine, such as drafts or adapters."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from megarl.tracking.metrics import Metric
from megarl.types import Completion, Request

if TYPE_CHECKING:
    from megarl.engine.running_request import RunningRequest


class EnginePart:
    """An optional feature of a `RolloutEngine`. A method does nothing unless a part overrides it.

    The methods stand in the order in which an engine calls them, on all ranks of a replica. Those that say so are
    called on the leader only, the replica's first rank.
    """

    sleep_reason: str = ""
    """Why a sleeping engine must keep its weights, as the end of a notice; empty: it need not."""
    keeps_cache: bool = False
    """Whether running requests continue with keys and values computed by earlier weights."""

    def prepare(self) -> None:
        """Change vLLM's code before anything of the engine is built."""

    def arguments(self) -> Mapping[str, Any]:
        """Return vLLM's arguments for this feature. Values of `rollout.vllm` replace them."""
        return {}

    def revised_arguments(self, vllm_config: Any) -> Mapping[str, Any]:
        """Return arguments to change after vLLM has completed its configuration for the first time."""
        return {}

    def refused_field(self, text: str) -> str | None:
        """Return "FIELD = VALUE: remedy" if vLLM's error with this text is about this feature, else None."""
        return None

    def build(self, worker: Any, *, is_leader: bool) -> None:
        """Change the model of a vLLM worker, before vLLM captures CUDA graphs."""

    def start(self, scheduler: Any) -> None:
        """Connect to the scheduler of the complete engine. Called on the leader only."""

    def activate(self, worker: Any) -> None:
        """Finish the start on a rank, after vLLM has warmed up."""

    def wrap_model(self, worker: Any, model: torch.nn.Module) -> torch.nn.Module:
        """Return the module that a reshard writes, made of the model's."""
        return model

    def extend_tensors(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterable[tuple[str, torch.Tensor]]:
        """Return the full checkpoint tensors [any shape], by name, for vLLM's loader of the model."""
        return tensors

    def further_tensors(self) -> Iterable[torch.Tensor]:
        """Return device tensors [any shape] of this feature outside of the engine's model."""
        return ()

    def extend_request(self, arguments: dict[str, Any], request: Request | None, weight_version: int) -> None:
        """Change the arguments of `LLMEngine.add_request`. Called on the leader only.

        `request` None: the engine scores a prompt. `weight_version` is the version of the live weights.
        """

    def complete_step(self, output: Any) -> Any:
        """Return the output of an engine step with what vLLM left out. Called on the leader only."""
        return output

    def extend_completion(self, completion: Completion, output: Any) -> Completion:
        """Return a completion with further values of vLLM's output of it. Called on the leader only."""
        return completion

    def extend_aborted(self, completion: Completion, state: Any) -> Completion:
        """Return an aborted completion with further values of vLLM's output state. Called on the leader only."""
        return completion

    def update_weights(self, running: Collection[RunningRequest], weight_version: int) -> None:
        """Note that the live weights have a new version. `running` are the leader's unfinished requests."""

    def take_metrics(self) -> dict[str, Metric]:
        """Return the metrics since the last call. Called on the leader only."""
        return {}
