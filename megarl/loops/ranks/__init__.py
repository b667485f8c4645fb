"""The rank processes of a run: their start, the loss of one, and changes of their number."""
