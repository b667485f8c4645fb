"""Resharding: copying weights between ranks or files that split them differently, such as Megatron's and vLLM's ranks.

A box (`boxes.py`) is an index range of a Hugging Face tensor. A layout (`layouts/`) lists the boxes of a rank and their
places in memory. `world.py` has the layouts of all ranks. A plan (`plan.py`) intersects source and destination layouts
(`overlap.py`). It is plain data: it can be printed, counted (`forecast/`) and proved complete. A transport
(`transport.py`) executes it. Loading, exporting (`checkpoint/`) and the live reshard from Megatron to vLLM (`live.py`)
differ only in their layouts.
"""
