"""Checks of copied and held weights.

`fingerprint` computes checksums, and `ledger` takes them by box. `verify` compares the ledgers of both ends of a
reshard: it proves plan and transport. `file_rows` compares rows of the engine with the model folder by name: it proves
the layouts, of which equal checksums say nothing. `probe` compares log-probs where the engine converts weights.
`version_checksums` compares the checksums of one version over all ranks while it is in use.
"""
