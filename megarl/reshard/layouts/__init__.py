"""Layouts of live parameters: which boxes of which Hugging Face tensors a rank has.

Trainers: `megatron`, computed from sizes and coordinates. Engines: `vllm`, recorded from vLLM's own
loader, and `vllm_computed`, the same without a vLLM. Layouts of files are in `megarl.checkpoint`.
"""
