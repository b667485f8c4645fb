"""Arithmetic for `trainer.exact`: trainer and engine get bitwise equal log-probs.

A result depends neither on the other rows of its batch nor on the number of ranks. Trainer and engine both use
`block_products` and `experts`. `engine` puts them into a running vLLM model. `attention` and `rotary` let the trainer
call vLLM's own kernels. Engines compute exactly only on a CPU.
"""
