"""Seed-OSS: Llama with biases on the query, key and value projections, and an independent head size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.families.config_json.config_values import quote
from megarl.families.config_json.rotary import rope_settings
from megarl.families.family import DEFAULTS, Family
from megarl.families.pages import qwen2
from megarl.families.parts import Parts
from megarl.families.reading import read_dense
from megarl.types import DataError


def read(config: Mapping[str, Any]) -> Parts:
    """Return the parts of a Seed-OSS model. Raises DataError if its biases differ from vLLM 0.30's fixed biases."""
    for field, value in {"attention_bias": True, "attention_out_bias": False}.items():
        if config.get(field) not in (None, value):
            raise DataError(f"{field} is {quote(config[field])}; in vLLM 0.30 it is always {quote(value)}.")
    if rope_settings(config).get("rope_theta", config.get("rope_theta")) is None:
        raise DataError("rope_theta is missing: transformers and vLLM 0.30 have different defaults; add it.")
    return read_dense(config, qkv_bias=True, ignored=("attention_bias",))


_FIELDS = {
    **DEFAULTS,
    "attention_bias": True,
    "attention_out_bias": False,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 524288,
}
# No default: `read` refuses a missing rope_theta, because transformers and vLLM 0.30 have different defaults.
del _FIELDS["rope_theta"]

FAMILY = Family("SeedOssForCausalLM", read, qwen2.rules, _FIELDS)
