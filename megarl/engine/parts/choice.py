"""The only place that names and chooses the optional features of a vLLM engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from megarl.config import LoraConfig, RolloutConfig
from megarl.engine.parts.engine_part import EnginePart
from megarl.families.eagle3 import drafter_folder
from megarl.families.model_tensors import is_read_by_drafter
from megarl.families.shape import read_model_shape
from megarl.platform import libraries

libraries.prepare_vllm()

from megarl.engine.parts.drafts import Drafts, FrozenDrafts, TrainedDrafts  # noqa: E402
from megarl.engine.parts.exact_rounding import ExactRounding  # noqa: E402
from megarl.engine.parts.quantised_values import QuantisedCache, QuantisedWeights  # noqa: E402
from megarl.engine.parts.retained_kv import RetainedKV  # noqa: E402
from megarl.engine.parts.retained_tokens import RetainedTokens  # noqa: E402
from megarl.engine.parts.routed_experts import RoutedExperts, StoreExperts  # noqa: E402
from megarl.engine.parts.served_adapters import ServedAdapters  # noqa: E402
from megarl.engine.parts.trained_adapter import TrainedAdapter  # noqa: E402


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFeatures:
    """Features of an engine outside the recipe's section `rollout`."""

    store_experts: StoreExperts | None = None
    """Stores a completion's routed experts; None: they are not stored."""
    adapter: LoraConfig | None = None
    """The trained LoRA adapter, used by all requests."""
    num_slots: int = 0
    """Number of slots for copies of the adapter. Above 0, each request names its copy."""
    trains_drafter: bool = False
    """Whether reshards write the EAGLE-3 drafter of `rollout.vllm.speculative_config`."""
    exact_blocks: int = 0
    """Number of blocks of a product over all ranks. Above 0, the engine rounds as `models.exact` does."""


def build_parts(
    model_path: str, config: RolloutConfig, override: Mapping[str, Any] | None, features: EngineFeatures
) -> Iterator[EnginePart]:
    """Build the parts of an engine, in the order in which they change it."""
    if config.quantization != "none":
        yield QuantisedWeights(config.quantization)
    if config.kv_cache_dtype != "auto":
        yield QuantisedCache(config.kv_cache_dtype)
    if features.adapter is not None:
        is_served = features.num_slots > 0
        yield ServedAdapters(features.adapter, features.num_slots) if is_served else TrainedAdapter(features.adapter)
    if features.exact_blocks:
        yield ExactRounding(features.exact_blocks)
    if config.sampling.is_truncated:
        yield RetainedTokens(config.async_scheduling)
    if features.store_experts is not None:
        yield RoutedExperts(features.store_experts)
    speculative_config = config.vllm.get("speculative_config")
    if speculative_config is not None and drafter_folder(speculative_config) is not None:
        yield (TrainedDrafts if features.trains_drafter else FrozenDrafts)(speculative_config)
    elif speculative_config is not None:
        yield Drafts(partial(is_read_by_drafter, read_model_shape(model_path, override)))
    if not config.recompute_kv:
        yield RetainedKV()
