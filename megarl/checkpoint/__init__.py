"""Checkpoints: all file formats of weights that megarl reads or writes, and conversion between them.

The formats are `safetensors` (Hugging Face model folders), `torch_dist` (Megatron-Core's distributed checkpoint) and
`peft` (adapters). A layout lists the parts of the model's tensors in each file or on each rank. A plan lists the copies
from one layout to another. Loading, exporting and `convert` execute plans, like a reshard (`megarl.reshard`).
"""
