"""The engine's arithmetic for `trainer.exact`: results that depend neither on the other rows nor on the ranks.

`block_products` and `experts` are computed by trainer and engine alike. `engine` puts them into a live vLLM model.
`attention` and `rotary` give the trainer vLLM's own kernels. Engines compute exactly on a CPU only.
"""
