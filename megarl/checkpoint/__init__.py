"""Checkpoints: weights in files, in every format that megarl reads or writes, and the conversion between them.

`safetensors` (Hugging Face model folders), `torch_dist` (Megatron-Core's distributed checkpoint; read by
`torch_dist_reader`, which runs none of its code) and `peft` (adapters) are layouts like those of memory, so that
loading, exporting and `convert` are plans. `manifest` knows a folder's files by size and hash, `stored` a model
folder's tensors by the headers of its files.
"""
