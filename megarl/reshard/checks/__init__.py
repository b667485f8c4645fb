"""Checks of copied and stored weights.

`fingerprint` computes checksums, `ledger` stores them by box (index range of a tensor). `verify` compares the checksums
of trainer and engine after a reshard. `file_rows` compares rows of the engine with the model folder. `probe` compares
log-probs if the engine converts weights. `version_checksums` compares the ranks' checksums of one version.
"""
