"""Checkpoints: weights in all file formats that megarl reads or writes, and conversion between them.

`safetensors` (Hugging Face model folders), `torch_dist` (Megatron-Core's distributed checkpoint; read by
`torch_dist_reader`, which runs none of its code) and `peft` (adapters) are layouts like those of memory, so that
loading, exporting and `convert` are plans. `manifest` lists a folder's files with size and hash, `stored` a model
folder's tensors from the headers of its files.
"""
