"""A vLLM engine on a CPU, rounding each token as `models.exact` does (`trainer.exact`)."""

from __future__ import annotations

import functools
import os
from typing import Any, cast

import torch

from megarl.platform.exact.block_products import block_product, row_product, sum_over_ranks
from megarl.platform.exact.experts import round_experts


def fix_attention_order() -> None:
    """Fix the order in which this process's engine sums a query's attention. Call it before the engine is built."""
    # By default, vLLM 0.30 splits the keys over the threads if there are few queries, then adds the parts.
    os.environ["VLLM_CPU_ATTN_SPLIT_KV"] = "0"


def round_exactly(model: torch.nn.Module, num_blocks: int) -> None:
    """Make linear layers and experts of a live vLLM model round each token as `models.exact` does.

    Row-parallel layers add their products in blocks, `num_blocks` over all ranks.
    """
    from vllm.model_executor.layers.linear import RowParallelLinear

    modules: list[Any] = list(model.modules())
    linears = [module for module in modules if hasattr(module, "cpu_linear")]
    assert linears, "vLLM's linear layers have no attribute cpu_linear any more"
    for module in linears:
        module.cpu_linear = row_product
    for module in modules:
        if isinstance(module, RowParallelLinear):
            assert module.bias is None and module.input_is_parallel and module.reduce_results
            cast(Any, module).forward = functools.partial(_forward_in_blocks, module, num_blocks // module.tp_size)
    round_experts(modules, num_blocks)


def _forward_in_blocks(layer: Any, num_blocks: int, x: torch.Tensor) -> Any:
    """Return the output [tokens, out] of a row-parallel layer without bias, for this rank's input [tokens, in].

    As in vLLM's layer, the result is a pair of output and bias unless `return_bias` is off.
    """
    from vllm.distributed import get_tp_group

    total = sum_over_ranks(block_product(x, layer.weight, num_blocks), get_tp_group().device_group)
    return (total.to(x.dtype), None) if layer.return_bias else total.to(x.dtype)
