"""Values of other programs by recipe field, in lower case, with the recipe's own value for each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from megarl.config.formulas import formula_fields, formulas
from megarl.config.schema import field_at, recipe_field
from megarl.files.nearest import nearest

VALUES: dict[str, dict[str, str]] = {
    "loop": {
        "grpo": "rl", "ppo": "rl", "dapo": "rl", "rlhf": "rl", "dpo": "preference", "kto": "preference",
        "simpo": "preference", "orpo": "preference", "rm": "reward_model", "opd": "distillation", "gkd": "distillation",
    },
    # float16 is not supported. bfloat16 has the same size and, unlike float16, does not overflow.
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
"""Recipe field to {foreign value: own value}."""


def nearest_value(place: str, value: object) -> str | None:
    """Return the probably intended value for a refused one, or None."""
    if not isinstance(value, str):
        return None
    field, known = recipe_field(place), _choices(place)
    meant = VALUES.get(field, {}).get(value.lower().replace("-", "_"))
    return meant if meant in known else nearest(value, known)


def _choices(place: str) -> list[str]:
    """Return the words accepted by a field, or by each item of a list."""
    name = recipe_field(place)
    if name in formula_fields():
        return list(formulas(name))
    field = field_at(name) or field_at(name.rpartition(".")[0])
    return [] if field is None else list(_words(field.annotation))


def _words(kind: Any) -> Iterator[str]:
    for argument in get_args(kind):
        if get_origin(kind) is Literal:
            yield from [argument] if isinstance(argument, str) else []
        else:
            yield from _words(argument)
