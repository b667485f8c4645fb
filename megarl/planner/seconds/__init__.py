"""Predict the seconds of a training step before it starts: rollout, log-probs, updates, reshard.

`gpus` has the speeds of GPUs, `work` a model's FLOPs and weights, `lengths` the distribution of sequence lengths.
`trainer` predicts passes and updates, `rollout` the engines, and `step` adds up. `constants` has the few fitted
numbers: `tools/check.py plan_search` fits them to published steps and prints the errors of held-out steps. No module
imports torch.
"""
