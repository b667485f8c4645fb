"""vLLM engines inside the rank processes of the trainer.

`engine.RolloutEngine.advance` samples for a while, then returns control to the rank. The first rank of a
tensor-parallel group owns vLLM's scheduler, and commands the other ranks through `executor`. `parts` has optional
features, such as adapters and drafts.
"""
