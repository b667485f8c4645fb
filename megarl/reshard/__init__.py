"""Resharding: copying weights between ranks or files that split them differently, such as Megatron's and vLLM's ranks.

A layout (`layouts/`) lists where each box (`boxes.py`, an index range of a Hugging Face tensor) is stored. `world.py`
has the layouts of all ranks at once. A plan (`plan.py`) is the intersection of source and destination layouts
(`overlap.py`). It is plain data: it can be printed, counted (`forecast/`) and proved complete. A transport
(`transport.py`) executes it. Loading, exporting (`checkpoint/`) and the live reshard from Megatron to vLLM (`live.py`)
differ only in their layouts.
"""
