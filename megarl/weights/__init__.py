"""Weights: every holder is a layout, every movement is a plan.

A layout (`layouts/`) says which box (`boxes.py`) of which Hugging Face tensor lies where in whose storage; `world.py`
says it for all ranks at once, by kinds of tensors. A plan (`plan.py`) is the intersection of source layouts with
destination layouts (`join.py`, kind by kind): plain data that can be printed, counted (`forecast.py`) and proved
complete. A transport (`transport.py`) carries it out. Loading, exporting and the live reshard from
Megatron to vLLM are the same three lines with other layouts; `families/` knows how Megatron names and cuts each
model's tensors.
"""
