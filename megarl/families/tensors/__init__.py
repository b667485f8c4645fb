"""How tensors are named in Megatron and in checkpoints, and the rules and stacks that compose them. No torch."""
