"""Choice of the optional parts of a model chunk: no other place adds them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from megatron.core.transformer import TransformerConfig

from megarl.families.shape import ModelShape
from megarl.models.drafts.mtp import attach_mtp
from megarl.models.exact_chunk import complete_exact_model
from megarl.models.layer_specs import block_spec
from megarl.models.policy import PolicyModel

Policy = TypeVar("Policy", bound=PolicyModel)


def build_policy(
    chunk_class: Callable[..., Policy],
    config: TransformerConfig,
    shape: ModelShape,
    *,
    exact_blocks: int = 0,
    drafts_learn_distribution: bool = False,
    vp_stage: int | None = None,
    **settings: Any,
) -> Policy:
    """Build a chunk of a language model with its optional parts. A collective over all ranks.

    `chunk_class` is the chunk's class, `settings` are its further arguments. With `exact_blocks` above 0 the chunk
    rounds like the engine (`models.exact`); a product has this many blocks over all ranks. `drafts_learn_distribution`:
    MTP layers learn the policy's whole distribution instead of the next tokens.
    """
    make_block_spec = partial(block_spec, exact=True) if exact_blocks else block_spec
    model = chunk_class(config, shape, block=make_block_spec, vp_stage=vp_stage, **settings)
    if exact_blocks:
        complete_exact_model(model, shape, exact_blocks)
    if shape.num_draft_layers and model.post_process:
        attach_mtp(model, shape, vp_stage, learns_distribution=drafts_learn_distribution)
    return model
