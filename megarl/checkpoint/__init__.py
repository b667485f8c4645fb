"""Checkpoints: all file formats of weights that megarl reads or writes, and conversion between them.

`safetensors` (Hugging Face model folders), `torch_dist` (Megatron-Core's distributed checkpoint) and `peft` (adapters)
are described as layouts, like weights in memory. So loading, exporting and `convert` are plans. `torch_dist_reader`
reads distributed checkpoints without running code from them. `manifest` lists a folder's files with size and hash.
`stored` lists a model folder's tensors from the headers of its files.
"""
