"""Tracking: the run folder, metrics and samples.

`run_folder` owns the folder of a run: its lock, `config.yaml`, `status.json`, what each attempt was and warned of
(versions and machine: `environment`). `metrics` carry their reduction over ranks. `tracker` logs a step:
`metrics.jsonl`, a console line, sample texts, and the trackers that the recipe names (`trackers`),
TensorBoard by default. `display` is what the screen shows of a run, `trace` the form of a step's profile.

A metric's name is `group/what[/mean|max|min]`. Its unit and meaning stand in the METRICS of the module that makes it;
`table` gathers them all (`megarl metrics`). Groups: `reward/` `rollout/` `train/` `kl/` `logprob_gap/` `staleness/`
`distillation/` `perf/` `time/` `memory/`, and `val/SET/` for each validation set. Units end a name: `_seconds`,
`_bytes`, `_tokens`.
"""
