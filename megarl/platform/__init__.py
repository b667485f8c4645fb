"""The platform: CUDA, or a CPU with replacements for the parts of CUDA that Megatron-Core and vLLM need.

`libraries` prepares both libraries for this process's device. `cpu` has the replacements, `exact` the arithmetic of
`trainer.exact`. So the same trainer, engine and reshard also run on a laptop. Code outside of this package
distinguishes CPU and CUDA only by `device.current()`.
"""
