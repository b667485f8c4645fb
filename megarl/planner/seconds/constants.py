"""Constants of the cost model: fitted or measured."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megarl.planner.seconds.gpus import GpuSpeeds


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """Constants fitted to step times that others published."""

    gemm_efficiency: float
    """Share of the peak FLOPs reached by matrix products and attention of long rows."""
    half_tokens: float
    """Tokens of a row on a rank at which matrix products reach half of `gemm_efficiency`."""
    expert_half_tokens: float
    """Tokens per expert in a row at which its matrix products reach half of `gemm_efficiency`."""
    layer_seconds: float
    """Seconds of a layer's forward pass over a row outside matrix products: norms, kernel launches."""
    expert_layer_seconds: float
    """Additional seconds to route tokens in a layer with experts: sorting, permutation, counts read by the host."""
    link_efficiency: float
    """Share of a link's bandwidth reached by collectives of tensor, context and expert parallelism."""
    decode_bandwidth: float
    """Share of the memory bandwidth reached while an engine decodes."""
    decode_layer_seconds: float
    """Seconds of a layer in a decoding step, without reading weights and KV cache."""
    decode_expert_layer_seconds: float
    """Additional seconds of a layer with experts in a decoding step."""
    reduce_seconds: float
    """Seconds of a small all-reduce over tensor-parallel ranks connected by NVLink."""
    network_reduce_seconds: float
    """Seconds of a small all-reduce over tensor-parallel ranks on several nodes."""
    engine_step_seconds: float
    """Seconds of a decoding step outside the model: scheduler, sampling."""
    sample_seconds: float
    """Seconds per sample outside all phases of a step: the driver's work, rewards, packing."""
    blackwell_efficiency: float
    """Factor of `gemm_efficiency` and `decode_bandwidth` on Blackwell GPUs: their data sheet values are harder to
    reach.
    """
    grace_seconds: float
    """Factor of all fixed times on hosts with a Grace CPU."""

    def for_gpu(self, gpu: GpuSpeeds) -> Constants:
        """Return the constants with the factors for a kind of GPU applied."""
        efficiency_factor = self.blackwell_efficiency if gpu.is_blackwell else 1.0
        seconds_factor = self.grace_seconds if gpu.has_grace else 1.0
        return replace(
            self,
            gemm_efficiency=efficiency_factor * self.gemm_efficiency,
            decode_bandwidth=efficiency_factor * self.decode_bandwidth,
            layer_seconds=seconds_factor * self.layer_seconds,
            expert_layer_seconds=seconds_factor * self.expert_layer_seconds,
            decode_layer_seconds=seconds_factor * self.decode_layer_seconds,
            decode_expert_layer_seconds=seconds_factor * self.decode_expert_layer_seconds,
            engine_step_seconds=seconds_factor * self.engine_step_seconds,
            sample_seconds=seconds_factor * self.sample_seconds,
        )


PRIOR = Constants(
    gemm_efficiency=0.62,
    half_tokens=600.0,
    expert_half_tokens=400.0,
    layer_seconds=100e-6,
    expert_layer_seconds=800e-6,
    link_efficiency=0.6,
    decode_bandwidth=0.65,
    decode_layer_seconds=40e-6,
    decode_expert_layer_seconds=40e-6,
    reduce_seconds=15e-6,
    network_reduce_seconds=80e-6,
    engine_step_seconds=2.5e-3,
    sample_seconds=1e-3,
    blackwell_efficiency=0.8,
    grace_seconds=1.3,
)
"""Expected values before a fit: measurements of megarl on one H200, and typical latencies of NCCL. The fit uses these
measurements; none is held out. `sample_seconds` is an order of magnitude.
"""

FITTED = Constants(
    gemm_efficiency=0.5323,
    half_tokens=1300.0,
    expert_half_tokens=521.7,
    layer_seconds=9.539e-05,
    expert_layer_seconds=0.00091,
    link_efficiency=0.378,
    decode_bandwidth=0.649,
    decode_layer_seconds=3.564e-05,
    decode_expert_layer_seconds=2.874e-05,
    reduce_seconds=2.149e-05,
    network_reduce_seconds=4.968e-05,
    engine_step_seconds=0.001692,
    sample_seconds=0.0009894,
    blackwell_efficiency=0.7321,
    grace_seconds=1.529,
)
"""Fitted by `tools/check.py plan_search --print-constants`. A test compares them with a new fit."""

HELD_OUT_ERROR = 0.188
"""Median relative error of the predictions for held-out published steps, by `tools/check.py plan_search`. These systems
update weights more slowly than megarl's predicted reshard.
"""
