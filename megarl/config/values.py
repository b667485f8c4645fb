"""Values that other programs write, by the recipe's field and in lower case, and the recipe's own value for each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from megarl.config.formulas import TABLES, formulas
from megarl.config.schema import field_at, recipe_field
from megarl.files.nearest import nearest

VALUES: dict[str, dict[str, str]] = {
    "loop": {
        "grpo": "rl", "ppo": "rl", "dapo": "rl", "rlhf": "rl", "dpo": "preference", "kto": "preference",
        "simpo": "preference", "orpo": "preference", "rm": "reward_model", "opd": "distillation", "gkd": "distillation",
    },
    # Float16 has no counterpart: bfloat16 is as large and does not overflow.
    "model.dtype": {
        "bf16": "bfloat16", "fp16": "bfloat16", "float16": "bfloat16", "half": "bfloat16", "fp32": "float32",
        "float": "float32",
    },
    "optimizer.schedule": {
        "cosine_with_min_lr": "cosine", "constant_with_warmup": "constant", "linear_with_warmup": "linear",
    },
    "rollout.placement": {"disaggregated": "separate", "async": "separate", "hybrid": "colocated"},
    "algorithm.preset": {
        "reinforce_ppb": "reinforce_plus_plus_baseline", "reinforce++": "reinforce_plus_plus",
        "reinforce++_baseline": "reinforce_plus_plus_baseline",
    },
    "algorithm.advantage": {
        "reinforce_ppb": "reinforce_plus_plus_baseline", "reinforce++": "reinforce_plus_plus",
        "reinforce++_baseline": "reinforce_plus_plus_baseline", "group_norm": "grpo",
    },
    "algorithm.kl_estimator": {"kl": "k1", "mse": "k2", "low_var_kl": "k3", "abs": "absolute"},
    "algorithm.aggregation": {
        "token_level": "token_mean", "seq_mean_token_mean": "sequence_mean_token_mean",
        "seq_mean_token_sum": "sequence_mean_token_sum", "seq_mean_token_sum_norm": "constant_length",
    },
}  # fmt: skip


def nearest_value(place: str, value: object) -> str | None:
    """The value of a field, by dotted name, that a refused one was probably meant to be."""
    if not isinstance(value, str):
        return None
    field, known = recipe_field(place), _choices(place)
    meant = VALUES.get(field, {}).get(value.lower().replace("-", "_"))
    return meant if meant in known else nearest(value, known)


def _choices(place: str) -> list[str]:
    """The words that a field takes, or that each item of a list takes."""
    name = recipe_field(place)
    if name in TABLES:
        return list(formulas(name))
    field = field_at(name) or field_at(name.rpartition(".")[0])
    return [] if field is None else list(_words(field.annotation))


def _words(kind: Any) -> Iterator[str]:
    for argument in get_args(kind):
        if get_origin(kind) is Literal:
            yield from [argument] if isinstance(argument, str) else []
        else:
            yield from _words(argument)
