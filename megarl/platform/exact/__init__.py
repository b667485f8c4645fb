"""The engine's arithmetic for `trainer.exact`: results depend neither on other rows nor on the number of ranks.

Trainer and engine both compute `block_products` and `experts`. `engine` puts them into a live vLLM model. `attention`
and `rotary` give the trainer vLLM's own kernels. Engines compute exactly on a CPU only.
"""
