"""The engine's arithmetic in the trainer's forward pass (`trainer.exact`).

Megatron's local layers and vLLM round differently in some operators. Each module here has one such operator. Forward
passes round as vLLM 0.30 does on a CPU in bfloat16. Gradients are those of Megatron's operators.
"""
