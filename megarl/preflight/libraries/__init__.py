"""Checks against installed libraries: their fields, limits of vLLM, number formats, signatures of functions."""
