"""Resharding: every weight holder is a layout, every movement of weights is a plan.

A layout (`layouts/`) lists which box (`boxes.py`) of which Hugging Face tensor lies where in whose storage; `world.py`
lists it for all ranks at once, by kinds of tensors. A plan (`plan.py`) is the intersection of source layouts with
destination layouts (`overlap.py`, kind by kind): plain data that can be printed, counted (`cost_model.py`) and proved
complete. A transport (`transport.py`) carries it out. Loading, exporting (`checkpoint/`) and the live reshard from
Megatron to vLLM (`live.py`) are the same three lines with other layouts.
"""
