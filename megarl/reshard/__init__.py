"""Resharding: copying weights between ranks or files that split them differently, such as Megatron's and vLLM's ranks.

A box (`boxes.py`) is an index range of a Hugging Face tensor. A layout (`layouts/`) lists a rank's boxes and their
places in memory; `world.py` has the layouts of all ranks. A plan (`plan.py`) is the overlap (`overlap.py`) of source
and destination layouts, as plain data: it can be printed, counted (`forecast/`) and proved complete. A transport
(`transport.py`) executes it. Loading, exporting (`checkpoint/`) and the live reshard to vLLM (`live.py`) differ only in
their layouts.
"""
