"""Models that Megatron-Core builds from a Hugging Face model's sizes, with log-probs as output.

`configuration` makes Megatron's config, `policy` the model. `logprobs` computes its output in chunks, over a vocabulary
split across ranks. Layers are Transformer Engine's if installed, else Megatron's local ones with `norms` and
`attention`.
"""

from megarl.platform import libraries, transformer_engine

# Both before any import of Megatron-Core, which imports Transformer Engine and needs patches on a CPU.
transformer_engine.require_importable()
libraries.prepare_megatron()
