"""Options of one or a few letters, used without a section: ColossalRL's `-tbs`, `r` of a LoRA configuration.

As endings of longer names they are ambiguous, so `migration.counterpart` does not know them.
"""

from __future__ import annotations

from megarl.config.migration import Counterpart, counterpart

_LONG = {
    "ed": "eval_dataset", "d": "dataset", "p": "project", "e": "num_episodes", "t": "num_trainers",
    "i": "num_inferencer", "g": "num_generations", "ibs": "inference_batch_size", "imbs": "inference_microbatch_size",
    "tbs": "train_batch_size", "tMbs": "train_minibatch_size", "tmbs": "train_microbatch_size", "zero": "zero_stage",
    "b": "backend", "ptp": "producer_tensor_parallel_size", "a": "algo", "kl": "kl_coeff", "rt": "reward_type",
    "cv": "code_verifier_api_url", "ei": "eval_interval", "nb": "n_behind", "si": "save_interval", "sd": "save_dir",
    "esd": "eval_save_dir", "rsd": "rollout_save_dir", "gmu": "gpu_memory_utilization", "m": "model_name_or_path",
    "cp": "checkpoint_path", "pdp": "producer_data_parallel_size", "ct": "custom_tools", "r": "lora_r",
}  # fmt: skip
"""Long form of each short option, with a counterpart. `tMbs` and `tmbs` differ."""

_FIELDS = {
    "temp": "rollout.sampling.temperature", "topk": "rollout.sampling.top_k", "topp": "rollout.sampling.top_p",
    "s": "data.system_prompt", "mnt": "rollout.sampling.max_new_tokens", "mpt": "data.max_prompt_tokens",
    "sp": "trainer.cp",
}  # fmt: skip
"""Recipe field of each short option without a foreign long form."""


def of_short_option(name: str) -> Counterpart | None:
    """Return the recipe's counterpart of a short option (without dash), or None if it is not listed."""
    if name in _FIELDS:
        return Counterpart((name,), (_FIELDS[name],))
    return counterpart(_LONG[name]) if name in _LONG else None
