"""Arithmetic of engines for `trainer.exact`: results depend neither on other rows nor on the number of ranks.

Trainer and engine both use `block_products` and `experts`. `engine` puts them into a live vLLM model. `attention` and
`rotary` give the trainer vLLM's own kernels. Engines compute exactly only on a CPU.
"""
