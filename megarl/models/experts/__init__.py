"""Layers with experts: balancing losses, dispatch of tokens, and replay of the engine's routes."""
