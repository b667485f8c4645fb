"""What a run leaves behind for people and programs to read.

`run_folder` owns the folder of a run: one owner at a time, `config.yaml`, `status.json`. `metrics` are numbers that
know how they combine over ranks. `tracker` writes a step: `metrics.jsonl`, a console line, sample texts, and the
trackers that the recipe names (`trackers`), TensorBoard by default.

A metric's name is `group/what[/mean|max|min]`, documented where it is made. Groups: `reward/` `rollout/` `train/` `kl/`
`logprob_gap/` `staleness/` `perf/` `time/` `memory/`, and `val/SET/` for each validation set. Units end a name:
`_seconds`, `_bytes`, `_tokens`.
"""
