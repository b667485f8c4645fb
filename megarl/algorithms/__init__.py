"""Algorithms: rewards in, loss per token out. Pure functions of tensors and floats.

No config object, no process group, no device decision. Kinship is by composition: the log-ratio, the ratio, the clip,
the KL estimate and the aggregation are functions of their own, and a named loss is a few lines of them.

Reading order: `advantages` (rewards of samples to advantages of samples), `log_ratio`, `policy_losses` and `kl`
(token losses on flat packed tensors), `reduction` (how token losses become one number: a weight per token of the
global batch, so that gradients do not depend on how that batch is split).

Each module ends in a table, name to function; the recipe's choices are the keys of these tables.
"""
