"""Layouts: which boxes of which Hugging Face tensors a holder of weights has.

`megatron`: a trainer rank's shards, computed from sizes and coordinates; `vllm`: an engine rank's live parameters,
recorded from vLLM's own loader; `safetensors`: files. A plan joins any two of them.
"""
