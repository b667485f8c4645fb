"""The engine's arithmetic in the trainer's forward pass (`trainer.exact`).

Some operators of Megatron's local layers and of vLLM round differently; each module here has one of them. Forward
passes round as vLLM 0.30 does on a CPU in bfloat16. Gradients are those of Megatron's operators.
"""
