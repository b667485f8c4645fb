"""Layouts of live parameters: which index ranges of Hugging Face tensors each rank has.

Trainers: `megatron`, computed from sizes and coordinates. Engines: `vllm`, recorded from vLLM's own loader, and
`vllm_computed`, computed without a vLLM. Layouts of files are in `megarl.checkpoint`.
"""
