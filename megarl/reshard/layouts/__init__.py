"""Layouts of live parameters: the index ranges of Hugging Face tensors on each rank.

Trainers: `megatron` computes them from sizes and coordinates. Engines: `vllm` records them from vLLM's own loader;
`vllm_computed` computes them without vLLM. Layouts of files are in `megarl.checkpoint`.
"""
