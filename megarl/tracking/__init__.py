"""Tracking of a run: its folder, metrics and samples.

`run_folder` manages the run folder: lock, `config.yaml`, `status.json`, facts and warnings of each attempt (versions
and machine: `environment`). `run_record` reads any run folder, `step_lines` the lines of `metrics.jsonl`. `metrics`
define their reduction over ranks. `tracker` logs a step to `metrics.jsonl`, the console, sample files and the recipe's
trackers (`trackers`; TensorBoard by default). `display` prints a run's progress, `trace` writes a step's profile.

A metric's name is `group/what[/mean|max|min]`. Its unit and meaning are in METRICS of the module computing it.
`metric_table` collects them all (`megarl metrics`). Groups: `reward/` `rollout/` `train/` `kl/` `logprob_gap/`
`staleness/` `distillation/` `perf/` `time/` `memory/`, and `val/SET/` for each validation set. Units are suffixes:
`_seconds`, `_bytes`, `_tokens`.
"""
