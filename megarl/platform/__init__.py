"""The platform: CUDA, or a CPU with replacements for what Megatron-Core and vLLM need of CUDA.

`megatron_on_cpu` lets the unmodified Megatron-Core train over gloo. `vllm_on_cpu` keeps vLLM's CPU weights unpacked.
The same trainer, engine and weight transfer therefore run on a laptop. Code outside this package distinguishes CPU and
CUDA only through `device.current()`.
"""
