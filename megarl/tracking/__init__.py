"""Tracking of a run: its folder, metrics and samples.

`run_folder` writes the run folder: lock, `config.yaml`, `status.json`, facts and warnings of each start. `run_record`
reads any run folder, `step_lines` the lines of `metrics.jsonl`. `metrics` define how numbers of several ranks are
combined. `tracker` logs a step to `metrics.jsonl`, the console, sample files and the recipe's trackers (`trackers`;
TensorBoard by default). `display` prints a run's progress, `trace` writes a step's profile.

A metric's name is `group/what[/mean|max|min]`. The module that computes it lists its unit and meaning in METRICS;
`metric_table` collects them (`megarl metrics`). Groups: `reward/` `rollout/` `train/` `kl/` `logprob_gap/` `staleness/`
`distillation/` `perf/` `time/` `memory/`, and `val/SET/` for each validation set. Units are suffixes: `_seconds`,
`_bytes`, `_tokens`.
"""
