"""Settings that users pass on to Megatron-Core and vLLM: which are accepted, refused or without effect."""
