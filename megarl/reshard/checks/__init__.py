"""Checks of copied and stored weights.

`fingerprint` computes checksums, `ledger` takes them by box. `verify` compares the checksums of both ends of a reshard,
which proves plan and transport. `file_rows` compares rows of the engine with the model folder by name, which proves the
layouts. `probe` compares log-probs where the engine converts weights. `version_checksums` compares checksums of one
version over all ranks while it is in use.
"""
