"""Layouts of live parameters: the index ranges of Hugging Face tensors that each rank has.

Trainers: `megatron`, computed from sizes and coordinates. Engines: `vllm`, recorded from vLLM's own loader, and
`vllm_computed`, computed without vLLM. Layouts of files are in `megarl.checkpoint`.
"""
