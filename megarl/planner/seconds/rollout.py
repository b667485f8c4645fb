"""Seconds of a rollout: the decoding steps of an engine until its longest request ends.

A decoding step reads the weights once and the KV cache of all requests. While requests wait, an engine decodes as many
as fit. Then requests end one by one: steps get shorter, but not fewer. This is the tail.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megarl.planner.seconds.constants import Constants
from megarl.planner.seconds.gpus import GpuSpeeds
from megarl.planner.seconds.lengths import Lengths
from megarl.planner.seconds.work import ModelWork

Numbers = NDArray[np.float64]

_ITEM_BYTES = 2
_POINTS = 96
"""Moments of the tail at which the time of a step is computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLayout:
    """Number and parallel size of a run's engines, and the requests that each engine can decode."""

    tp: int
    num_engines: int
    max_requests: int
    cache_tokens: float
    """Tokens that fit into the KV cache of an engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSeconds:
    """Seconds of a rollout's three parts."""

    prefill: float
    """Seconds to prefill all prompts."""
    full: float
    """Seconds of decoding while requests wait for a place in an engine."""
    tail: float
    """Seconds of decoding from the start of the last request to the end of the longest request."""
    requests: float
    """Requests that an engine decodes at once before the tail."""
    limited_by_cache: bool
    """Whether the KV cache limits `requests`, not the number of samples or the recipe."""

    @property
    def seconds(self) -> float:
        return self.prefill + self.full + self.tail


@dataclass(frozen=True, kw_only=True)
class RolloutCost:
    """Predicts rollouts of a model on one kind of GPU."""

    work: ModelWork
    gpu: GpuSpeeds
    constants: Constants
    item_bytes: float = _ITEM_BYTES
    """Bytes of a weight in the engine: 2, or 1 if it is quantised."""
    activation_bytes: float = _ITEM_BYTES
    """Bytes of an activation: 2 in bfloat16, 4 in float32."""
    cache_item_bytes: float = _ITEM_BYTES
    """Bytes of a number in the KV cache: 2, 4 in float32, 1 in FP8."""

    def rollout_seconds(
        self, engines: EngineLayout, lengths: Lengths, *, num_samples: float, samples_per_prompt: int
    ) -> RolloutSeconds:
        """Return the seconds until all samples of a step are complete."""
        # Requests that an engine decodes at once: limited by its samples, by the recipe, or by the KV cache.
        engine_samples = num_samples / engines.num_engines
        mean_sampled_tokens = lengths.mean_age
        requests_in_cache = engines.cache_tokens / (lengths.prompt_tokens + mean_sampled_tokens)
        requests = max(1.0, min(engine_samples, engines.max_requests, requests_in_cache))
        # While requests wait for a place, the engine always decodes `requests`, each of the mean sampled length.
        full_seconds = 0.0
        if engine_samples > requests:
            decode_seconds = self.step_seconds(
                engines.tp,
                requests=np.array([requests]),
                context=np.array([lengths.prompt_tokens + mean_sampled_tokens]),
            )
            full_seconds = float((engine_samples - requests) * lengths.mean / requests * decode_seconds[0])
        # Then no request waits. Integrate the steps' seconds over the tokens until the longest request ends.
        tail_tokens, share_running = self._sample_tail(
            lengths, waits=engine_samples > requests, num_samples=requests * engines.num_engines
        )
        running_requests = np.maximum(requests * share_running, 1.0)
        context_tokens = lengths.prompt_tokens + np.minimum(
            tail_tokens + (mean_sampled_tokens if engine_samples > requests else 0.0), lengths.limit
        )
        decode_seconds_in_tail = self.step_seconds(engines.tp, requests=running_requests, context=context_tokens)
        tail_seconds = float(np.trapezoid(decode_seconds_in_tail, tail_tokens))
        num_prompts = num_samples / samples_per_prompt / engines.num_engines
        flops_per_second = self.constants.gemm_efficiency * self.gpu.flops * engines.tp
        prefill_seconds = (
            num_prompts * lengths.prompt_tokens * (self.work.layer_flops + self.work.expert_flops) / flops_per_second
        )
        return RolloutSeconds(
            prefill=prefill_seconds,
            full=full_seconds,
            tail=tail_seconds,
            requests=requests,
            limited_by_cache=requests_in_cache < min(engine_samples, engines.max_requests),
        )

    def steady_seconds(
        self, engines: EngineLayout, lengths: Lengths, *, num_samples: float, samples_per_prompt: int, staleness: int
    ) -> RolloutSeconds:
        """Return the seconds between two steps if engines sample ahead of the trainer.

        The samples of `staleness` steps are in flight at once. A step's tail overlaps the next steps.
        """
        num_batches = max(1, staleness)
        all_batches = self.rollout_seconds(
            engines, lengths, num_samples=num_samples * num_batches, samples_per_prompt=samples_per_prompt
        )
        return replace(
            all_batches,
            prefill=all_batches.prefill / num_batches,
            full=all_batches.full / num_batches,
            tail=all_batches.tail / num_batches,
        )

    def step_seconds(self, tp: int, *, requests: Numbers, context: Numbers) -> Numbers:
        """Return the seconds of a decoding step for `requests` with `context` mean tokens: all [n]."""
        work, constants, gpu = self.work, self.constants, self.gpu
        shape = work.shape
        # An engine rank reads its part of the weights, and the keys and values of its heads.
        expert_weights = work.expert_weights * self._chosen_share(requests)
        head_weights = shape.vocab_size * shape.hidden_size
        weight_bytes = (work.layer_weights + expert_weights + head_weights) * self.item_bytes / tp
        cached_bytes_per_token = shape.attention.cached_numbers(tp) * self.cache_item_bytes
        bytes_per_second = constants.decode_bandwidth * gpu.memory
        flops = requests * (work.layer_flops + work.expert_flops + work.head_flops) / tp
        compute_seconds = flops / (constants.gemm_efficiency * gpu.flops)
        seconds = (
            np.maximum(weight_bytes / bytes_per_second, compute_seconds)
            + requests * work.attended_tokens(context) * cached_bytes_per_token / bytes_per_second
        )
        seconds = seconds + constants.engine_step_seconds + constants.decode_layer_seconds * work.num_layers
        seconds = seconds + constants.decode_expert_layer_seconds * work.num_expert_layers
        if tp > 1:
            is_near = tp <= gpu.nvlink_gpus
            latency = constants.reduce_seconds if is_near else constants.network_reduce_seconds
            link_bytes_per_second = constants.link_efficiency * (gpu.nvlink if is_near else gpu.network)
            sent_bytes = 2 * requests * shape.hidden_size * self.activation_bytes * (tp - 1) / tp
            # Two all-reduces per layer. In a ring, a rank sends 2 (tp - 1) / tp of the reduced bytes.
            seconds = seconds + 2 * work.num_layers * (latency + sent_bytes / link_bytes_per_second)
        return seconds

    def _chosen_share(self, requests: Numbers) -> Numbers | float:
        """Return the share of experts chosen by at least one of the requests [n], if each request chooses at random."""
        shape = self.work.shape
        if not shape.num_experts:
            return 0.0
        return 1 - (1 - shape.top_k / shape.num_experts) ** requests

    @staticmethod
    def _sample_tail(lengths: Lengths, *, waits: bool, num_samples: float) -> tuple[Numbers, Numbers]:
        """Return moments of the tail, in decoded tokens from its start, and the share of requests active then: both
        [points].

        `waits`: the requests began at different times, so their remaining lengths count. The tail ends with the longest
        sample of all engines.
        """
        longest_tokens = lengths.longest(num_samples)
        token_points = np.linspace(0.0, longest_tokens, _POINTS)
        share_longer = lengths.survival(token_points)
        if not waits:
            return token_points, share_longer
        # Share of requests with more than this many tokens left: the integral of the survival from this point on.
        areas = np.diff(token_points) * (share_longer[1:] + share_longer[:-1]) / 2
        area_beyond = np.append(np.cumsum(areas[::-1])[::-1], 0.0)
        return token_points, area_beyond / max(area_beyond[0], 1e-9)
