"""Layers with experts: their balancing losses, the dispatch of tokens to them, and the replay of the engine's
routes.
"""
