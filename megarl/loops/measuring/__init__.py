"""Measurement of a run's steps: speed, idle ranks, peak memory, balance of trainers and engines, profiles."""
