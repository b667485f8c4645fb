"""Models as Megatron-Core builds them, from a Hugging Face folder's shape to log-probs.

`configuration` makes Megatron's config, `policy` the model: Transformer Engine's layers where they are installed, else
Megatron's local ones with `norm` and `attention` of ours. Its output is not logits but `logprobs`: of the given
tokens, chunk by chunk, over a vocabulary that stays split.
"""

from megarl.platform import megatron_on_cpu, transformer_engine

transformer_engine.require_sound()
megatron_on_cpu.prepare()
