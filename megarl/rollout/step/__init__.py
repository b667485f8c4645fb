"""From a training step's groups to its updates, metrics and records, on the driver.

`rl_batch` flattens the groups into arrays. `scoring` adds the log-probs, values and scores of the run's models, and
`teachers` those of distillation. `advantages` weighs the batch. `updates` trains policy and critic on its minibatches.
`step_metrics` measures the step. `step_record` stores its inputs and results, `sample_records` its samples for readers.
"""
