"""Settings of `trainer.megatron` accepted by Megatron-Core but read by nothing in megarl."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# Megatron-Core 0.16.1 accepts these silently; a user would believe that they act.
_UNREAD = {
    "attention_dropout": "attention over packed rows drops nothing; use hidden_dropout",
    "masked_softmax_fusion": "attention over packed rows has kernels of its own",
    "softmax_type": "attention over packed rows has kernels of its own",
    "window_size": "sequences are attended to as the model's config.json says",
    "window_attn_skip_freq": "sequences are attended to as the model's config.json says",
    "cross_entropy_loss_fusion": "log-probs are computed in chunks, see trainer.logprob_chunk_tokens",
    "cross_entropy_fusion_impl": "log-probs are computed in chunks, see trainer.logprob_chunk_tokens",
    "mtp_num_layers": "layers that predict several tokens are not trained",
    "mtp_loss_scaling_factor": "layers that predict several tokens are not trained",
    "moe_per_layer_logging": "train/moe_* are means over layers",
}

_BALANCING, _COEFFICIENT = "moe_router_load_balancing_type", "moe_aux_loss_coeff"
_UNBALANCED = ("none", "sinkhorn")


def without_effect(settings: Mapping[str, Any], *, has_experts: bool) -> Iterator[str]:
    """Yield one error per setting without effect in a model with or without experts."""
    for name, value in settings.items():
        shown = f"trainer.megatron.{name} = {value!r}"
        if name in _UNREAD and value:
            yield f"{shown}: has no effect: {_UNREAD[name]}; remove it"
        elif name.startswith("moe_") and value and not has_experts:
            yield f"{shown}: has no effect: the model has no experts; remove it"
    if has_experts:
        yield from _unbalanced(settings)


def _unbalanced(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield an error for a balancing type with coefficient zero, or a coefficient without a type."""
    kinds, coefficient = settings.get(_BALANCING), settings.get(_COEFFICIENT)
    if kinds is None:
        return
    is_balanced = any(kind not in _UNBALANCED for kind in ([kinds] if isinstance(kinds, str) else kinds))
    weighs = any(coefficient) if isinstance(coefficient, list | tuple) else bool(coefficient)
    if is_balanced and not weighs:
        yield f"trainer.megatron.{_BALANCING} = {kinds!r}: has no effect: set trainer.megatron.{_COEFFICIENT}, too"
    elif weighs and not is_balanced:
        yield (
            f"trainer.megatron.{_COEFFICIENT} = {coefficient!r}: has no effect with {_BALANCING} = {kinds!r}; "
            "remove one of the two"
        )
