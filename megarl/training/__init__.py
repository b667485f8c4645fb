"""Training on one rank: packed rows of sequences in, summed gradients and an optimizer step out.

`training_engine` holds the model and runs Megatron's schedules. `objective` defines the loss, `rows` packs sequences
into micro-batches. A step's loss is a sum of weight x token loss over the global batch. The weights are data, so a
gradient does not depend on the split of the batch.
"""

from megarl.platform import libraries, transformer_engine

# Both before any import of Megatron-Core, which imports Transformer Engine and needs patches on a CPU.
transformer_engine.require_importable()
libraries.prepare_megatron()
