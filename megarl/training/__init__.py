"""The trainer of one rank: packed rows in, summed gradients and an optimizer step out.

`engine` holds the model and runs Megatron's schedules, `objective` says what is minimised, `batch` packs sequences
into rows. The loss of a step is a sum of weight x token loss over the global batch, the weights coming with the
data, so a gradient does not depend on how the batch is cut.
"""

from megarl.platform import megatron_on_cpu, transformer_engine

transformer_engine.require_sound()
megatron_on_cpu.prepare()
