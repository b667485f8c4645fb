"""Muon for the matrices of a model, Adam for its other parameters."""
