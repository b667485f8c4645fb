"""Layouts of live parameters: the boxes of Hugging Face tensors held by each rank.

Trainers: `megatron`, computed from sizes and coordinates. Engines: `vllm`, recorded from vLLM's own loader, and
`vllm_computed`, computed without a vLLM. Layouts of files are in `megarl.checkpoint`.
"""
