"""vLLM engines inside the rank processes of the trainer.

`engine.RolloutEngine.advance` samples for a while, then returns control to the rank. The first rank of a
tensor-parallel group owns vLLM's scheduler. Through `executor` it sends commands to the other ranks. Optional features,
such as adapters and drafts, are in `parts`.
"""
