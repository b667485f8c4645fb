"""megarl: reinforcement learning for large language models, Megatron-Core trainers colocated with vLLM engines."""
