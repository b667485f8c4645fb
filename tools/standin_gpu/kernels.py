"""Kernels of vLLM, FlashAttention and torch's flash attention, computed on the host.

The functions `after_...` register kernels; start.py calls them after the import of the libraries. Each kernel is the
CPU kernel of its operator; the CUDA tensors of a call reach it as CPU tensors over the same memory. Sums are taken in
float32, as the CUDA kernels do, in another order. Other uses of a kernel are a NotImplementedError with its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

_libraries: list[torch.library.Library] = []
"""Registrations end with their library object, so the objects are kept."""


def register(name: str, kernel: Callable[..., Any]) -> None:
    """Make `kernel` the kernel of the operator `name` for CUDA tensors: "namespace::operator", or with ".overload"."""
    namespace, _, operator = name.partition("::")
    library = torch.library.Library(namespace, "IMPL")
    library.impl(operator, kernel, "CPU")
    _libraries.append(library)
    base, _, overload = name.partition(".")
    torch.ops.standin_gpu.replace_operator(base, overload)


def refuse(name: str, **features: Any) -> None:
    """Raise NotImplementedError for the first feature with a value other than None, False and 0."""
    for feature, value in features.items():
        if value is not None and value is not False and (isinstance(value, Tensor) or value != 0):
            raise NotImplementedError(f"{name} with {feature} is not imitated (stand-in)")


# ---- attention


class Settings(NamedTuple):
    """How queries see keys. `left` and `right` are window sizes in tokens, -1 means no limit."""

    scale: float
    left: int = -1
    right: int = -1
    softcap: float = 0.0
    sinks: Tensor | None = None
    """[heads] logits that take a share of each softmax."""


def scores(q: Tensor, k: Tensor, settings: Settings) -> Tensor:
    """Return float32 logits [heads, queries, keys] of one sequence, -inf where a query does not see a key.

    `q` is [queries, heads, dim], `k` is [keys, groups, dim]. The last query is that of the last key.
    """
    k = k.float().repeat_interleave(q.size(1) // k.size(1), dim=1)
    logits = torch.einsum("qhd,khd->hqk", q.float(), k) * settings.scale
    if settings.softcap > 0:
        logits = settings.softcap * torch.tanh(logits / settings.softcap)
    # [queries, keys]: how far each key lies behind the query, in tokens.
    distance = (torch.arange(q.size(0)) + k.size(0) - q.size(0))[:, None] - torch.arange(k.size(0))
    is_hidden = torch.zeros_like(distance, dtype=torch.bool)
    if settings.left >= 0:
        is_hidden |= distance > settings.left
    if settings.right >= 0:
        is_hidden |= distance < -settings.right
    return logits.masked_fill(is_hidden, float("-inf"))


def attend(q: Tensor, k: Tensor, v: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    """Return the attention of one sequence, [queries, heads, dim] in float32, and log-sum-exps [heads, queries].

    Shapes as in `scores`; `v` is [keys, groups, dim]. A query without keys gets zeros.
    """
    logits = scores(q, k, settings)
    if settings.sinks is not None:
        logits = torch.cat([logits, settings.sinks.float()[:, None, None].expand(-1, q.size(0), 1)], dim=-1)
    sums = logits.logsumexp(-1)
    weights = (logits - sums[..., None]).exp().nan_to_num(0.0)[..., : k.size(0)]
    v = v.float().repeat_interleave(q.size(1) // v.size(1), dim=1)
    return torch.einsum("hqk,khd->qhd", weights, v), sums


def attend_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, settings: Settings
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the float32 gradients of q, k and v. Shapes as in `attend`; `gradient` is that of `out`."""
    heads, groups = q.size(1), k.size(1)
    weights = (scores(q, k, settings) - sums[..., None]).exp().nan_to_num(0.0)
    gradient, wide_v = gradient.float(), v.float().repeat_interleave(heads // groups, dim=1)
    of_weights = torch.einsum("qhd,khd->hqk", gradient, wide_v)
    shares = (gradient * out.float()).sum(-1).t()[..., None]
    of_scores = weights * (of_weights - shares) * settings.scale
    wide_k = k.float().repeat_interleave(heads // groups, dim=1)
    of_q = torch.einsum("hqk,khd->qhd", of_scores, wide_k)
    of_k = torch.einsum("hqk,qhd->khd", of_scores, q.float())
    of_v = torch.einsum("hqk,qhd->khd", weights, gradient)
    return of_q, of_k.unflatten(1, (groups, -1)).sum(2), of_v.unflatten(1, (groups, -1)).sum(2)


def spans(cumulative: Tensor) -> Iterator[slice]:
    """Yield the tokens of each sequence. `cumulative` [sequences + 1] counts the tokens before each."""
    ends = cumulative.tolist()
    return (slice(first, last) for first, last in pairwise(ends))


def torch_forward(
    query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int,
    max_k: int, dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None, **further: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute `aten::_flash_attention_forward` of packed sequences: output, log-sum-exps, and three unused tensors."""
    name = "aten::_flash_attention_forward"
    further.pop("num_splits", None)
    refuse(name, dropout_p=dropout_p, return_debug_mask=return_debug_mask, **further)
    if cum_seq_q is None or cum_seq_k is None:
        raise NotImplementedError(f"{name} without cum_seq_q and cum_seq_k is not imitated (stand-in)")
    settings = torch_settings(query, is_causal, scale, window_size_left, window_size_right)
    out, sums = torch.zeros_like(query), query.new_zeros(query.size(1), query.size(0), dtype=torch.float32)
    for q, k in zip(spans(cum_seq_q), spans(cum_seq_k), strict=True):
        output, sums[:, q] = attend(query[q], key[k], value[k], settings)
        out[q] = output.to(out.dtype)
    nothing = query.new_zeros(0)
    return out, sums, query.new_zeros(2, dtype=torch.uint64), nothing, nothing.clone()


def torch_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, cum_seq_q: Tensor,
    cum_seq_k: Tensor, max_q: int, max_k: int, dropout_p: float, is_causal: bool, rng_state: Tensor, unused: Tensor, *,
    scale: float | None = None, window_size_left: int | None = None, window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute `aten::_flash_attention_backward` of packed sequences: the gradients of query, key and value."""
    refuse("aten::_flash_attention_backward", dropout_p=dropout_p)
    settings = torch_settings(query, is_causal, scale, window_size_left, window_size_right)
    of_q, of_k, of_v = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for q, k in zip(spans(cum_seq_q), spans(cum_seq_k), strict=True):
        gradients = attend_backward(grad_out[q], query[q], key[k], value[k], out[q], logsumexp[:, q], settings)
        of_q[q], of_k[k], of_v[k] = (x.to(query.dtype) for x in gradients)
    return of_q, of_k, of_v


def torch_settings(
    query: Tensor, is_causal: bool, scale: float | None, left: int | None, right: int | None
) -> Settings:
    width = -1 if left is None else left
    return Settings(scale or query.size(-1) ** -0.5, width, 0 if is_causal else -1 if right is None else right)


def rms_norm_backward(
    gradient: Tensor, x: Tensor, shape: list[int], rstd: Tensor, weight: Tensor | None, output_mask: list[bool]
) -> tuple[Tensor, Tensor]:
    """Compute `aten::_fused_rms_norm_backward`: the gradients of x [..., *shape] and weight [*shape].

    `rstd` holds one over the root mean square, [..., 1]. torch has no kernel of this operator for the CPU.
    """
    normed_dims = tuple(range(x.dim() - len(shape), x.dim()))
    normed, of_normed = x.float() * rstd, gradient.float()
    of_weight = (of_normed * normed).sum(tuple(range(x.dim() - len(shape))))
    if weight is not None:
        of_normed = of_normed * weight.float()
    of_x = rstd * (of_normed - normed * (of_normed * normed).mean(normed_dims, keepdim=True))
    return of_x.to(x.dtype), of_weight.to(x.dtype if weight is None else weight.dtype)


def flash_attention_3(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute `fwd` of vLLM's FlashAttention 3 for packed queries, with packed or paged keys.

    Returns the output [tokens, heads, dim] and log-sum-exps [heads, tokens]; two more tensors are empty.
    """
    schema = torch.ops._vllm_fa3_C.fwd.default._schema
    names = [argument.name for argument in schema.arguments]
    call = SimpleNamespace(**dict(zip(names, arguments, strict=True)))
    refuse(
        "FlashAttention 3", k_new=call.k_new, q_v=call.q_v, seqused_q=call.seqused_q, leftpad_k=call.leftpad_k,
        rotary_cos=call.rotary_cos, kv_batch_idx=call.kv_batch_idx, context_parallelism=call.cp_world_size > 1,
    )  # fmt: skip
    if call.q.element_size() < 2 or call.k.element_size() < 2:
        raise NotImplementedError("FlashAttention 3 of FP8 values is not imitated (stand-in)")
    q = call.q
    right = 0 if call.is_causal else call.window_size_right
    settings = Settings(
        call.softmax_scale or q.size(-1) ** -0.5, call.window_size_left, right, call.softcap, call.s_aux
    )
    out = torch.empty_like(q) if call.out is None else call.out
    sums = q.new_zeros(q.size(1), q.size(0), dtype=torch.float32)
    for number, tokens in enumerate(spans(call.cu_seqlens_q)):
        if tokens.stop == tokens.start:
            continue
        if call.page_table is None:
            keys = slice(*call.cu_seqlens_k[number : number + 2].tolist())
            k, v = call.k[keys], call.v[keys]
        else:
            length = int(call.seqused_k[number])
            pages = call.page_table[number, : -(-length // call.k.size(1))].long()
            k, v = (cache[pages].flatten(0, 1)[:length] for cache in (call.k, call.v))
        output, sums[:, tokens] = attend(q[tokens], k, v, settings)
        out[tokens] = output.to(out.dtype)
    nothing = q.new_zeros(0, dtype=torch.float32)
    return out, sums, nothing, nothing.clone()


def flash_attention_3_plan(*_: Any) -> Tensor:
    """Return a plan for `flash_attention_3`, whose contents only its CUDA kernel knows: one int32."""
    return torch.zeros(1, dtype=torch.int32)


# ---- vLLM's kernels of a dense model


def normalise(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    """Return the RMS norm of the last dimension, of x's shape and type."""
    wide = x.float()
    result = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)).to(x.dtype)
    return result if weight is None else result * weight


def rms_norm(result: Tensor, x: Tensor, weight: Tensor | None, epsilon: float) -> None:
    result.copy_(normalise(x, weight, epsilon).view_as(result))


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, epsilon: float) -> None:
    residual.add_(x)
    x.copy_(normalise(residual, weight, epsilon))


def silu_and_mul(result: Tensor, x: Tensor) -> None:
    gate, value = x.chunk(2, dim=-1)
    result.copy_(torch.nn.functional.silu(gate) * value)


def rotary_embedding(
    positions: Tensor, query: Tensor, key: Tensor | None, head_size: int, cache: Tensor, is_neox: bool,
    rope_dim_offset: int = 0, inverse: bool = False,
) -> None:  # fmt: skip
    """Rotate query and key [tokens, heads * head_size] in place.

    `cache` [positions, 2 * pairs] has the cosines, then the sines.
    """
    cosines, sines = cache[positions.flatten()].float().chunk(2, dim=-1)
    sines = -sines if inverse else sines
    cosines, sines = cosines[:, None], sines[:, None]
    for tensor in (query, key):
        if tensor is None:
            continue
        heads = tensor.view(positions.numel(), -1, head_size)
        rotated = heads[..., rope_dim_offset : rope_dim_offset + cache.size(-1)]
        wide = rotated.float()
        first, second = wide.chunk(2, dim=-1) if is_neox else (wide[..., ::2], wide[..., 1::2])
        parts = first * cosines - second * sines, second * cosines + first * sines
        rotated.copy_(torch.cat(parts, dim=-1) if is_neox else torch.stack(parts, dim=-1).flatten(-2))


def reshape_and_cache_flash(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, kind: str, k_scale: Tensor,
    v_scale: Tensor,
) -> None:  # fmt: skip
    """Store key and value [tokens, groups, dim] in the cache [blocks, block tokens, groups, dim] at their slots.

    `slots` [tokens] number the tokens of the cache; a negative one stores nothing.
    """
    if "fp8" in kind:
        raise NotImplementedError(f"reshape_and_cache_flash of kind {kind} is not imitated (stand-in)")
    is_stored = slots >= 0
    used, block_tokens = slots[is_stored], key_cache.size(1)
    for cache, values in ((key_cache, key), (value_cache, value)):
        cache[used // block_tokens, used % block_tokens] = values[: slots.size(0)][is_stored].to(cache.dtype)


def vocab_parallel_embedding(
    result: Tensor, token_ids: Tensor, weight: Tensor, org_start: int, org_end: int, num_org_padding: int,
    added_start: int, added_end: int,
) -> None:  # fmt: skip
    """Write the rows of this rank's tokens to `result` [tokens, dim], zeros for the tokens of other ranks.

    `weight` [rows, dim] has the rows of the model's own tokens from `org_start` on, padding, and the rows of added
    tokens from `added_start` on.
    """
    is_own = (token_ids >= org_start) & (token_ids < org_end)
    is_added = (token_ids >= added_start) & (token_ids < added_end)
    added_row = token_ids - added_start + org_end - org_start + num_org_padding
    row = torch.where(is_own, token_ids - org_start, torch.where(is_added, added_row, 0))
    result.copy_(weight[row.long()] * (is_own | is_added)[:, None])


def per_token_group_fp8_quant(
    x: Tensor, result: Tensor, scales: Tensor, group_size: int, epsilon: float, smallest: float, largest: float,
    scale_ue8m0: bool, *_: bool,
) -> None:  # fmt: skip
    """Quantise each token of x [*tokens, dim] to FP8 `result`, with float32 `scales` [*tokens, dim / group_size]."""
    refuse("per_token_group_fp8_quant", scale_ue8m0=scale_ue8m0)
    groups = x.float().unflatten(-1, (-1, group_size))
    group_scales = groups.abs().amax(-1).clamp_min(epsilon) / largest
    scales.copy_(group_scales)
    result.copy_((groups / group_scales[..., None]).clamp(smallest, largest).flatten(-2))


VLLM_KERNELS = {
    "_C::rms_norm": rms_norm,
    "_C::fused_add_rms_norm": fused_add_rms_norm,
    "_C::silu_and_mul": silu_and_mul,
    "_C::per_token_group_fp8_quant": per_token_group_fp8_quant,
    "_C::rotary_embedding": rotary_embedding,
    "_C::vocab_parallel_embedding": vocab_parallel_embedding,
    "_C_cache_ops::reshape_and_cache_flash": reshape_and_cache_flash,
}


def add_wide_product(
    total: Tensor, left: Tensor, right: Tensor, dtype: torch.dtype, *, beta: float = 1, alpha: float = 1, out: Tensor
) -> Tensor:
    """Compute `aten::addmm.dtype_out`: the product of narrow matrices is added in the wider `dtype`, unrounded."""
    return out.copy_(torch.addmm(total.to(dtype), left.to(dtype), right.to(dtype), beta=beta, alpha=alpha))


# ---- called after imports


def after_torch(module: ModuleType) -> None:
    register("aten::addmm.dtype_out", add_wide_product)
    register("aten::_flash_attention_forward", torch_forward)
    register("aten::_flash_attention_backward", torch_backward)
    register("aten::_fused_rms_norm_backward", rms_norm_backward)


def after_vllm_kernels(module: ModuleType) -> None:
    for name, kernel in VLLM_KERNELS.items():
        register(name, kernel)


def after_flash_attention(module: ModuleType) -> None:
    register("_vllm_fa3_C::fwd", flash_attention_3)
    register("_vllm_fa3_C::get_scheduler_metadata", flash_attention_3_plan)


def after_top_k(module: ModuleType) -> None:
    # Triton's interpreter (3.7) cannot run the kernel: a loop's counter is an int there, and has no `.to`.
    def apply(logits: Tensor, k: Tensor | None, p: Tensor | None, *_: Any, **__: Any) -> Tensor:
        return module.apply_top_k_top_p_pytorch(logits, k, p)

    module.__dict__["apply_top_k_top_p_triton"] = apply


def after_gumbel(module: ModuleType) -> None:
    # Triton's interpreter has no libdevice.
    def log1p(x: Any) -> Any:
        import numpy
        from triton import language  # pyright: ignore[reportMissingImports]
        from triton.runtime.interpreter import TensorHandle  # pyright: ignore[reportMissingImports]

        return language.tensor(TensorHandle(numpy.log1p(x.handle.data), x.handle.dtype), x.type)

    module.__dict__["tldevice"] = SimpleNamespace(log1p=log1p)


def after_warmup(module: ModuleType) -> None:
    # vLLM 0.30 compiles its Triton kernels at an engine's start. Interpreted ones have nothing to compile.
    module._DecoratedTritonJitKernel.get_warmup_keys = lambda self, *, vllm_config=None, **_: []


def after_interpreter(module: ModuleType) -> None:
    # Triton's interpreter (3.7) copies each argument to the host and back, also those that a kernel only reads. Device
    # memory is the host's here, so the kernel gets the tensors themselves.
    def tensors_of(values: Any) -> list[Tensor]:
        tensors = []
        for value in values:
            if isinstance(value, tuple):
                tensors += tensors_of(value)
            elif isinstance(value, Tensor):
                tensors.append(value)
        return tensors

    def pass_on(self: Any, arguments: Any, named: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        torch.ops.standin_gpu.use(tensors_of([*arguments, *named.values()]), f"Triton's {self.fn.__name__}")
        return list(arguments), dict(named)

    module.GridExecutor._init_args_hst = pass_on
    module.GridExecutor._restore_args_dev = lambda *_: None
