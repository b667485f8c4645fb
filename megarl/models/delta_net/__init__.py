"""Gated delta-nets (arXiv:2412.06464): the layer, and its delta rule in torch."""
