"""What a run leaves behind for people and programs to read.

`run_folder` owns the folder of a run: one owner at a time, `config.yaml`, `status.json`. `storage` writes files
whole or not at all and names faults of the disk. `metrics` are numbers that know how they combine over ranks. `tracker`
writes a step: TensorBoard, `metrics.jsonl`, a console line, sample texts.

A metric's name is `group/what[/mean|max|min]`, documented where it is made. Groups: `reward/` `rollout/` `train/` `kl/`
`logprob_gap/` `staleness/` `perf/` `time/` `memory/`, and `val/SET/` for each validation set. Units end a name:
`_seconds`, `_bytes`, `_tokens`.
"""
