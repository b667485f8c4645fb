"""The engine's arithmetic in the trainer's forward pass (`trainer.exact`).

Each module has one operator in which Megatron's local layers and vLLM round differently. Forward passes round as vLLM
0.30 does on a CPU in bfloat16. Gradients are those of the usual operators.
"""
