"""The platform: CUDA, or a CPU with replacements for the parts of CUDA that Megatron-Core and vLLM need.

`libraries` prepares both libraries for this process's device. `cpu` has the replacements, `exact` the arithmetic of
`trainer.exact`. Code outside this package distinguishes CPU and CUDA only by `device.current()`.
"""
