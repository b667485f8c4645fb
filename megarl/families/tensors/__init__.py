"""Names of tensors in Megatron and in checkpoints; rules and stacks that compose parameters from them. No torch."""
