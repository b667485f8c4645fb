"""Models that Megatron-Core builds from a Hugging Face model's sizes, with log-probs as output.

`configuration` makes Megatron's config, `policy` the model. It uses Transformer Engine's layers if installed. Otherwise
it uses Megatron's local layers with `norm` and `attention` of this package. The output is log-probs of given tokens
instead of logits. `logprobs` computes them chunk by chunk, over a vocabulary split across ranks.
"""

from megarl.platform import libraries, transformer_engine

# Both must precede any import of Megatron-Core: it imports Transformer Engine itself, and it needs patches on a CPU.
transformer_engine.require_sound()
libraries.prepare_megatron()
