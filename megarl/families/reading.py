"""Functions that read config.json, shared by several model families. They import no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from megarl.families.config_json import windows as sliding
from megarl.families.config_json.config_values import COPY_AGAIN, flag, positive, quote, size
from megarl.families.config_json.rotary import read_rotary
from megarl.families.parts import GroupedQuery, LayerKind, Parts, Router
from megarl.types import DataError

DEFAULT_EXPERTS = {
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "norm_topk_prob": False,
    "shared_expert_intermediate_size": 0,
}
"""Values of missing fields in transformers' classes of Qwen's mixtures of experts."""

DEFAULT_SIGMOID = {
    "first_k_dense_replace": 1,
    "n_group": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
}
"""Values of missing fields in transformers' class of GLM-4.5."""

_BIASES = frozenset({"attention_bias", "mlp_bias"})


def read_dense(
    config: Mapping[str, Any],
    *,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    windows: sliding.Windows = sliding.none,
    ignored: Collection[str] = (),
) -> Parts:
    """Return the parts of a dense model with grouped-query attention.

    Raises DataError for biases in config.json, except the fields in `ignored`, which the family does not read.
    """
    refuse_biases(config, ignored)
    layer_windows = sliding.read(config, windows)
    kinds = tuple(LayerKind(window=window) for window in layer_windows)
    return Parts(grouped_query(config, qkv_bias=qkv_bias, qk_norm=qk_norm), read_rotary(config), kinds=kinds)


def read_experts(
    config: Mapping[str, Any],
    *,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    windows: sliding.Windows = sliding.none,
) -> Parts:
    """Return the parts of a Qwen model with softmax-routed experts in all or some layers."""
    dense = read_dense(config, qkv_bias=qkv_bias, qk_norm=qk_norm, windows=windows)
    layer_windows = [kind.window for kind in dense.kinds] or [0] * size(config, "num_hidden_layers")
    has_experts = experts_of_layers(config, len(layer_windows))
    kinds = tuple(
        LayerKind(has_experts=is_moe, window=window) for is_moe, window in zip(has_experts, layer_windows, strict=True)
    )
    return dense._replace(router=softmax_router(config), kinds=layer_kinds_or_empty(kinds))


def layer_kinds_or_empty(kinds: tuple[LayerKind, ...]) -> tuple[LayerKind, ...]:
    """Return each layer's kind; () if all have the default kind: experts, no window."""
    return () if set(kinds) == {LayerKind(has_experts=True)} else kinds


def grouped_query(config: Mapping[str, Any], *, qkv_bias: bool, qk_norm: bool) -> GroupedQuery:
    """Return the sizes of grouped-query attention. Raises DataError if num_kv_heads does not divide num_heads."""
    num_heads = size(config, "num_attention_heads")
    num_kv_heads = size(config, "num_key_value_heads", null=num_heads)
    if num_heads % num_kv_heads:
        raise DataError(
            f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}. {COPY_AGAIN}"
        )
    return GroupedQuery(
        num_heads,
        num_kv_heads,
        size(config, "head_dim", null=size(config, "hidden_size") // num_heads),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
    )


def refuse_biases(config: Mapping[str, Any], ignored: Collection[str] = ()) -> None:
    """Raise DataError for biases in config.json, except those in `ignored`."""
    for bias in sorted(_BIASES - set(ignored)):
        if config.get(bias):
            raise DataError(f"{bias} is not supported for {config['architectures'][0]}.")


def check_normalised(top_k: int) -> None:
    """Raise DataError if `top_k` is 1 in a softmax router with normalised weights: the weight is then always 1."""
    if top_k == 1:
        raise DataError(
            "num_experts_per_tok 1 with normalised weights is not supported: the weight is then always 1, and "
            "Megatron-Core refuses it."
        )


def top_k(config: Mapping[str, Any], num_experts: int) -> int:
    """Return the number of experts per token. Raises DataError if it exceeds the number of experts."""
    num_chosen = size(config, "num_experts_per_tok")
    if num_chosen > num_experts:
        raise DataError(f"num_experts_per_tok {num_chosen} is more than the {num_experts} experts.")
    return num_chosen


def kinds_with_first_dense(config: Mapping[str, Any], num_layers: int) -> tuple[LayerKind, ...]:
    """Return the layers' kinds: the first `first_k_dense_replace` are dense, all others have experts."""
    num_dense = size(config, "first_k_dense_replace", null=0)
    if num_dense >= num_layers:
        raise DataError(f"first_k_dense_replace {num_dense} leaves none of the {num_layers} layers with experts.")
    return layer_kinds_or_empty(tuple(LayerKind(has_experts=layer >= num_dense) for layer in range(num_layers)))


def require_field(config: Mapping[str, Any], field: str, remedy: str) -> Any:
    """Return a field. Raises DataError, ending in `remedy`, if the field is missing or null."""
    if (value := config.get(field)) is None:
        raise DataError(f"{field} is missing. {remedy}")
    return value


def sigmoid_router(config: Mapping[str, Any]) -> Router:
    """Return a router like DeepSeek-V3's: sigmoid scores, a bias for the choice, groups, shared experts.

    Raises DataError for values that Megatron-Core 0.16.1, transformers and vLLM compute differently.
    """
    num_experts = size(config, "n_routed_experts")
    num_chosen, num_groups, top_groups = (
        top_k(config, num_experts),
        size(config, "n_group", null=1),
        size(config, "topk_group", null=1),
    )
    if config.get("norm_topk_prob", True) is not True:
        raise DataError("norm_topk_prob false is not supported: Megatron-Core always normalises sigmoid scores.")
    if num_chosen == 1:
        raise DataError("num_experts_per_tok 1 is not supported: Megatron-Core does not normalise a single weight.")
    if num_groups > 1 and (num_experts % num_groups or top_groups > num_groups or num_chosen // top_groups != 2):
        # Megatron rates a group by its best num_experts_per_tok // topk_group experts, transformers and vLLM by two.
        raise DataError(
            f"n_group {num_groups}, topk_group {top_groups}, num_experts_per_tok {num_chosen}: Megatron-Core and vLLM "
            "choose different groups unless num_experts_per_tok // topk_group is 2; use another model."
        )
    # The shared experts are computed as one, with the sum of their sizes.
    expert_size = size(config, "moe_intermediate_size")
    return Router(
        num_experts=num_experts,
        top_k=num_chosen,
        moe_intermediate_size=expert_size,
        shared_intermediate_size=expert_size * size(config, "n_shared_experts", null=0),
        score="sigmoid",
        has_bias=True,
        scale=positive(config, "routed_scaling_factor"),
        num_groups=num_groups,
        top_groups=top_groups,
    )


Read = Callable[[Mapping[str, Any]], Parts]


def softmax_router(config: Mapping[str, Any]) -> Router:
    """Return a router like Qwen's: softmax scores, and a gated shared expert if the model has one."""
    # Qwen2-MoE's rules always have QKV biases; transformers makes them optional by this field.
    if config.get("qkv_bias") is False:
        raise DataError("qkv_bias false is not supported.")
    # transformers 5 writes num_local_experts for num_experts.
    num_experts = size(config, "num_experts" if "num_experts" in config else "num_local_experts")
    shared_size = size(config, "shared_expert_intermediate_size", null=0)
    num_chosen, is_normalised = top_k(config, num_experts), flag(config, "norm_topk_prob")
    if is_normalised:
        check_normalised(num_chosen)
    return Router(
        num_experts=num_experts,
        top_k=num_chosen,
        norm_topk_prob=is_normalised,
        moe_intermediate_size=size(config, "moe_intermediate_size"),
        shared_intermediate_size=shared_size,
        has_shared_gate=shared_size > 0,
    )


def experts_of_layers(config: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Return whether each layer has experts, by `mlp_only_layers` and `decoder_sparse_step`.

    Raises DataError if no layer has experts.
    """
    dense_layers = config.get("mlp_only_layers") or []
    if not isinstance(dense_layers, list) or any(
        type(layer) is not int or not 0 <= layer < num_layers for layer in dense_layers
    ):
        raise DataError(f"mlp_only_layers is {quote(dense_layers)}; it must list layers from 0 to {num_layers - 1}.")
    expert_interval = size(config, "decoder_sparse_step")
    has_experts = [layer not in dense_layers and (layer + 1) % expert_interval == 0 for layer in range(num_layers)]
    if not any(has_experts):
        raise DataError("mlp_only_layers and decoder_sparse_step leave no layer with experts.")
    return has_experts
