"""The table of model families. A new family is one file in `pages` and one line in this table."""

from __future__ import annotations

from megarl.families.family import Family
from megarl.families.pages import (
    deepseek_v3,
    glm4_moe,
    glm4_moe_lite,
    gpt_oss,
    llama,
    mistral,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_next,
    seed_oss,
)

FAMILIES: dict[str, Family] = {
    "deepseek_v3": deepseek_v3.FAMILY,
    "glm4_moe": glm4_moe.FAMILY,
    "glm4_moe_lite": glm4_moe_lite.FAMILY,
    "gpt_oss": gpt_oss.FAMILY,
    "llama": llama.FAMILY,
    "mistral": mistral.FAMILY,
    "qwen2": qwen2.FAMILY,
    "qwen2_moe": qwen2_moe.FAMILY,
    "qwen3": qwen3.FAMILY,
    "qwen3_5": qwen3_5.DENSE,
    "qwen3_5_moe": qwen3_5.EXPERTS,
    "qwen3_5_moe_text": qwen3_5.EXPERTS_TEXT,
    "qwen3_5_text": qwen3_5.DENSE_TEXT,
    "qwen3_moe": qwen3_moe.FAMILY,
    "qwen3_next": qwen3_next.FAMILY,
    "seed_oss": seed_oss.FAMILY,
}
"""Families by the `model_type` of config.json."""
