"""The platform: CUDA, or a CPU with replacements for what Megatron-Core and vLLM need of CUDA.

`libraries` prepares both libraries for the device of this process. `cpu` has the replacements, `exact` the arithmetic
of `trainer.exact`. The same trainer, engine and reshard therefore run on a laptop. Code outside this package
distinguishes CPU and CUDA only through `device.current()`.
"""
