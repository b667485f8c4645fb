"""Predictions without a rank: bytes and seconds of a reshard (`cost_model`), bytes of a resize (`resize`)."""
