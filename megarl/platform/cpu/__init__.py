"""Runs the unmodified Megatron-Core and vLLM on a CPU. `platform.libraries` installs this package without CUDA.

`megatron_patches` lets Megatron-Core train over gloo. `vllm_patches` keeps vLLM's weights unpacked. The other modules
replace what is missing on a CPU: Triton, kernels of linear attention, speculative decoding, media libraries.
"""
