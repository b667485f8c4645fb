"""Experts of an engine on a CPU. Results depend neither on the other tokens nor on the ranks (`trainer.exact`).

An expert's products are those of `block_products`, rounded to the model's dtype. A token's experts are weighted and
added in float32, in ascending order of their numbers, and the sum is rounded once. The trainer does the same.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megarl.platform.exact.block_products import block_product, row_product, sum_over_ranks


def weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of each token's experts, [tokens, hidden_size], in the dtype of `values`.

    Shapes: values [tokens, top_k, hidden_size], weights float32 [tokens, top_k], both by ascending expert.
    """
    total, *terms = (values.float() * weights[..., None]).unbind(1)
    for term in terms:
        total = total + term
    return total.to(values.dtype)


def round_experts(modules: Sequence[Any], num_blocks: int) -> None:
    """Replace the computation of the experts in a live vLLM model by `_compute_experts`.

    Layers without experts in `modules` are skipped. Products over the intermediate channels have `num_blocks` blocks
    over all ranks.
    """
    from vllm.distributed import get_tp_group
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    for layer in modules:
        if not hasattr(layer, "w13_weight"):
            continue
        # In vLLM 0.30, plain objects, not modules, lie between a layer's weights and the code using them.
        kernel = layer.quant_method.moe_kernel
        experts = kernel.fused_experts
        assert isinstance(experts, CPUUnquantizedExperts), type(experts).__name__
        assert experts.w1_bias is None and experts.w2_bias is None
        # With expert parallelism a rank has whole experts, and so all their blocks.
        own_blocks = num_blocks // experts.moe_config.tp_size
        experts.apply = functools.partial(_compute_experts, own_blocks, get_tp_group().device_group)
        kernel.output_is_reduced = lambda: True


def _compute_experts(
    num_blocks: int,
    group: dist.ProcessGroup,
    output: Tensor,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: Any,
    global_num_experts: int,
    expert_map: Tensor | None,
    *args: Any,
    apply_router_weight_on_input: bool = False,
    **kwargs: Any,
) -> None:
    """Write the output of a layer of experts, complete over all ranks of the group, into `output`.

    Shapes: output and hidden_states [tokens, hidden_size], w1 [experts, 2 * intermediate, hidden_size], w2 [experts,
    hidden_size, intermediate], topk_weights and topk_ids [tokens, top_k]. A rank may have a part of the experts
    (`expert_map` holds -1 for the others) or of their intermediate channels.
    """
    assert activation.value == "silu" and not apply_router_weight_on_input
    expert_ids, order = topk_ids.sort(dim=1)
    products = hidden_states.new_zeros(*expert_ids.shape, w2.size(1), dtype=torch.float32)
    for expert in expert_ids.unique().tolist():
        local_expert = expert if expert_map is None else int(expert_map[expert])
        if local_expert < 0:
            continue
        tokens, slots = torch.where(expert_ids == expert)
        gate, up = row_product(hidden_states[tokens], w1[local_expert]).chunk(2, dim=-1)
        products[tokens, slots] = block_product(F.silu(gate) * up, w2[local_expert], num_blocks)
    values = sum_over_ranks(products, group).to(hidden_states.dtype)
    output.copy_(weighted_sum(values, topk_weights.gather(1, order)))
