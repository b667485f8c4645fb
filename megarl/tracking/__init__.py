"""Tracking of a run: its folder, metrics and samples.

`run_folder` writes the run folder: lock, `config.yaml`, `status.json`, facts and warnings of each start. `run_record`
reads any run folder, and `step_lines` the lines of `metrics.jsonl`. `metrics` combines numbers of several ranks.
`tracker` logs a step to `metrics.jsonl`, the console, sample files and the recipe's `trackers` (TensorBoard by
default). `display` prints progress, `trace` writes a step's profile.

A metric's name is `group/what[/mean|max|min]`. The module computing a metric lists its unit and meaning in METRICS, and
`metric_table` collects these lists (`megarl metrics`). Units are suffixes: `_seconds`, `_bytes`, `_tokens`.
"""
