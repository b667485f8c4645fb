"""Checkpoints: all file formats of weights that megarl reads or writes, and conversion between them.

The formats are `safetensors` (Hugging Face model folders), `torch_dist` (Megatron-Core's distributed checkpoint) and
`peft` (adapters). A layout lists the parts of the model's tensors held by each file, or by each rank's memory. A plan
lists the copies leading from one layout to another. Loading, exporting and `convert` therefore execute plans, like a
reshard (`megarl.reshard`).

`torch_dist_reader` reads distributed checkpoints without running code from them. `manifest` lists a folder's files with
size and hash. `stored` lists a model folder's tensors from the headers of its files.
"""
