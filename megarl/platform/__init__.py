"""The platform: CUDA as it is, or a CPU behind two small substitutes.

`megatron_on_cpu` lets the unmodified Megatron-Core train over gloo, `vllm_on_cpu` keeps vLLM's CPU weights plain, so
that the same trainer, engine and reshard run on a laptop. Nothing outside this room asks which of the two it is,
beyond `device.current()`.
"""
