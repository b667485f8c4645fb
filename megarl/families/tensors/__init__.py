"""Names of tensors in Megatron and in checkpoints, and the rules and stacks that compose parameters of them. No
torch.
"""
