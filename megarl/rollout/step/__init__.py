"""From a training step's groups to its updates, metrics and records, on the driver.

`rl_batch` flattens the groups into arrays. `scoring` adds the models' log-probs, values and scores, and `teachers` the
scores for distillation. `advantages` weighs the batch. `updates` trains policy and critic. `step_metrics` measures the
step. `step_record` stores inputs and results, `sample_records` samples for people to read.
"""
