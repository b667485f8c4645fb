"""The experts (MoE) that an engine chose for each token, stored on the sampling rank for router replay."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.data.prefixes import digests
from megarl.engine.parts.engine_part import EnginePart
from megarl.types import Completion, ExpertsHandle

StoreExperts = Callable[[NDArray[np.integer]], ExpertsHandle]
"""Stores the experts [tokens, layers, top_k] of a completion, and returns their handle."""


class RoutedExperts(EnginePart):
    """Part that stores the experts of each completion, if vLLM returns them (`enable_return_routed_experts`)."""

    def __init__(self, store: StoreExperts) -> None:
        self._store = store

    def extend_completion(self, completion: Completion, output: Any) -> Completion:
        """Store the experts of vLLM's output here. Return the completion with their handle and hashes."""
        if output.routed_experts is None:
            return completion
        experts = output.routed_experts
        return dataclasses.replace(completion, routed_experts=self._store(experts), expert_digests=digests(experts))
