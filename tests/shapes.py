"""Shapes of small models, with sizes given by name."""

from __future__ import annotations

import dataclasses
from typing import Any

from megarl.families.config_json.rotary import Rotary
from megarl.families.delta_net import DeltaNet
from megarl.families.parts import GroupedQuery, Latent, LayerKind, Router
from megarl.families.shape import ModelShape

_PARTS = {"attention": (GroupedQuery, Latent), "router": (Router,), "linear_attention": (DeltaNet,)}

SIGMOID = ("glm4_moe", "deepseek_v3", "glm4_moe_lite")
"""Families with sigmoid routers, shared experts and dense first layers."""
_HYBRID = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
"""Families with delta-nets in the first three of four layers."""


def with_sizes(shape: ModelShape, **sizes: Any) -> ModelShape:
    """Return a shape with other sizes. A size of a part (`num_heads`, `top_k`, `key_dim`) changes that part.

    Sizes of another kind of attention have no effect.
    """
    for part, kinds in _PARTS.items():
        names = {field.name for kind in kinds for field in dataclasses.fields(kind)} & sizes.keys()
        own = {name: sizes.pop(name) for name in sorted(names)}
        if own:
            known = {field.name for field in dataclasses.fields(getattr(shape, part))}
            here = {name: value for name, value in own.items() if name in known}
            sizes[part] = dataclasses.replace(getattr(shape, part), **here)
    return dataclasses.replace(shape, **sizes)


def small_shape(family: str = "qwen3", **sizes: Any) -> ModelShape:
    """Return a small model of a family, with other sizes as in `with_sizes`.

    The first layer of families with sigmoid routers is dense. GLM-4.7-Flash has no query latent here.
    """
    gated = Router(8, 2, 8, shared_intermediate_size=8, has_shared_gate=True)
    routers = {
        "qwen3_next": gated,
        "qwen3_5_moe": gated,
        "qwen3_5_moe_text": gated,
        "qwen2_moe": Router(8, 2, 8, norm_topk_prob=False, shared_intermediate_size=8, has_shared_gate=True),
        "qwen3_moe": Router(8, 2, 8),
        "gpt_oss": Router(8, 2, 16),
    }
    if family in SIGMOID:
        routers[family] = Router(8, 2, 8, shared_intermediate_size=8, score="sigmoid", has_bias=True, scale=2.5)
    latent = {"deepseek_v3": Latent(8, 6, 12, 3, 2, 5), "glm4_moe_lite": Latent(8, 0, 12, 3, 2, 5)}
    has_bias = family in ("qwen2", "qwen2_moe", "glm4_moe", "gpt_oss", "seed_oss")
    shape = ModelShape(
        family=family, hidden_size=8, intermediate_size=16, num_layers=4, vocab_size=37, tie_word_embeddings=False,
        norm_epsilon=1e-6, max_position_embeddings=64, initializer_range=0.02, rotary=Rotary(1e4),
        attention=latent.get(family)
        or GroupedQuery(
            8, 2, 4, qkv_bias=has_bias, qk_norm=family.startswith("qwen3"), has_output_gate=family in _HYBRID
        ),
        router=routers.get(family), has_zero_centered_norms=family in _HYBRID,
        linear_attention=DeltaNet(8, 16, 2, 3, 4) if family in _HYBRID else None,
    )  # fmt: skip
    shape = with_sizes(shape, **sizes)
    if family in SIGMOID and shape.num_layers > 1:
        kinds = tuple(LayerKind(has_experts=layer > 0) for layer in range(shape.num_layers))
        return dataclasses.replace(shape, kinds=kinds)
    if family in _HYBRID:
        mixers = (("attention" if layer % 4 == 3 else "linear_attention") for layer in range(shape.num_layers))
        kinds = tuple(LayerKind(mixer=mixer, has_experts=shape.router is not None) for mixer in mixers)
        return dataclasses.replace(shape, kinds=kinds)
    return shape
