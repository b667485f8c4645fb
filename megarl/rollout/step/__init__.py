"""From a training step's groups to its updates, metrics and records, on the driver.

In order: `rl_batch` flattens the groups into arrays. `scoring` adds log-probs, values and scores, `teachers` the scores
for distillation. `advantages` computes advantages and importance weights. `updates` trains policy and critic.
`step_metrics` measures the step. `step_record` stores its inputs and results, `sample_records` samples for people to
read.
"""
