"""Shapes of small models, with sizes given by name."""

from __future__ import annotations

import dataclasses
from typing import Any

from megarl.families.parts import GroupedQuery, LayerKind, Router
from megarl.families.rotary import Rotary
from megarl.families.shape import ModelShape

_PARTS = {"attention": GroupedQuery, "router": Router}


def with_sizes(shape: ModelShape, **sizes: Any) -> ModelShape:
    """Return a shape with other sizes. A size of attention or router (`num_heads`, `top_k`) changes that part."""
    for part, kind in _PARTS.items():
        names = {field.name for field in dataclasses.fields(kind)} & sizes.keys()
        own = {name: sizes.pop(name) for name in sorted(names)}
        if own:
            sizes[part] = dataclasses.replace(getattr(shape, part), **own)
    return dataclasses.replace(shape, **sizes)


def small_shape(family: str = "qwen3", **sizes: Any) -> ModelShape:
    """Return a small model of a family, with other sizes as in `with_sizes`. GLM-4.5's first layer is dense."""
    routers = {
        "qwen2_moe": Router(8, 2, 8, norm_topk_prob=False, shared_intermediate_size=8, has_shared_gate=True),
        "qwen3_moe": Router(8, 2, 8),
        "gpt_oss": Router(8, 2, 16),
        "glm4_moe": Router(8, 2, 8, shared_intermediate_size=8, score="sigmoid", has_bias=True, scale=2.5),
    }
    has_bias = family in ("qwen2", "qwen2_moe", "glm4_moe", "gpt_oss", "seed_oss")
    shape = ModelShape(
        family=family, hidden_size=8, intermediate_size=16, num_layers=4, vocab_size=37, tie_word_embeddings=False,
        norm_epsilon=1e-6, max_position_embeddings=64, initializer_range=0.02, rotary=Rotary(1e4),
        attention=GroupedQuery(8, 2, 4, qkv_bias=has_bias, qk_norm=family.startswith("qwen3")),
        router=routers.get(family),
    )  # fmt: skip
    shape = with_sizes(shape, **sizes)
    if family == "glm4_moe" and shape.num_layers > 1:
        kinds = tuple(LayerKind(has_experts=layer > 0) for layer in range(shape.num_layers))
        return dataclasses.replace(shape, kinds=kinds)
    return shape
