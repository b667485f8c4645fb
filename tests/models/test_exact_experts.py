"""Mixtures of experts of exact models: the engine's bits in every layout, and the gradient of float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file
from torch import Tensor

from megarl.config.parallel import ParallelConfig
from megarl.platform.exact.experts import weighted_sum
from tests.rank_pool import RankPool
from tests.training.invariance import parallel_of

TOKENS, EXPERTS, TOP_K, BLOCKS = 64, 8, 4, 2
LAYOUTS = {
    "one rank": {},
    "ep2": {"dp": 2, "ep": 2},
    "tp2 ep2": {"tp": 2, "ep": 2},
    "tp2 etp2": {"tp": 2, "etp": 2},
    "dp2 etp2": {"dp": 2, "etp": 2},
}


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model(
        family="qwen3_moe", hidden_size=64, num_layers=1, num_experts=EXPERTS, experts_per_token=TOP_K,
        initializer_range=0.15,
    )  # fmt: skip


def inputs() -> tuple[Tensor, Tensor]:
    """Return hidden states of all ranks and a direction of the output, both bfloat16 [tokens, hidden_size]."""
    generator = torch.Generator().manual_seed(3)
    hidden, direction = torch.randn(2, TOKENS, 64, generator=generator).bfloat16()
    # Several experts have equal logits for a token of zeros.
    hidden[5] = 0
    return hidden, direction


def weights_of(folder: Path) -> dict[str, Tensor]:
    """Return the weights of the layer's router and experts in bfloat16, by their names in the checkpoint."""
    prefix = "model.layers.0.mlp."
    found = load_file(folder / "model.safetensors")
    return {name.removeprefix(prefix): x.bfloat16() for name, x in found.items() if name.startswith(prefix)}


def of_trainer(folder: str, parallel: ParallelConfig) -> dict[str, Tensor]:
    """Return this rank's output and gradients of the layer of experts: of its tokens, and by parameter."""
    from megarl.training.model_parts import ModelParts
    from tools.family_models import model_shard

    model = model_shard(folder, parallel, "bfloat16", trainer={"exact": True}, parts=ModelParts(exact_blocks=BLOCKS))
    experts: Any = model.chunks[0].decoder.layers[0].mlp
    hidden, direction = (x.chunk(dist.get_world_size())[dist.get_rank()] for x in inputs())
    hidden.requires_grad_()
    output = experts(hidden[:, None])[0][:, 0]
    names, parameters = zip(*experts.named_parameters(), strict=True)
    of_hidden, *found = torch.autograd.grad(output, [hidden, *parameters], direction, allow_unused=True)
    own = {name: x for name, x in zip(names, found, strict=True) if x is not None}
    return {"output": output.detach(), "hidden": of_hidden} | own


def of_engine(weights: Mapping[str, Tensor], renormalise: bool, batch: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return an engine's output [tokens, hidden_size], weights and choices [tokens, top_k] for a batch of tokens."""
    from megarl.platform import libraries
    from megarl.platform.exact.block_products import row_product
    from megarl.platform.exact.experts import _compute_experts

    libraries.prepare_vllm()
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    hidden = inputs()[0][batch]
    router: Any = CPURouter(top_k=TOP_K, global_num_experts=EXPERTS, renormalize=renormalise)
    chosen_weights, chosen = router._compute_routing(hidden, row_product(hidden, weights["gate.weight"]), None)
    w13, w2 = packed(weights)
    group: Any = dist.group.WORLD
    output, silu = torch.empty_like(hidden), SimpleNamespace(value="silu")
    _compute_experts(BLOCKS, group, output, hidden, w13, w2, chosen_weights, chosen, silu, EXPERTS, None)
    return output, chosen_weights, chosen


def packed(weights: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return gates and ups [experts, 2 * intermediate, hidden_size], and downs [experts, hidden_size, intermediate]."""
    own = [
        {part: weights[f"experts.{e}.{part}_proj.weight"] for part in ("gate", "up", "down")} for e in range(EXPERTS)
    ]
    return torch.stack([torch.cat([x["gate"], x["up"]]) for x in own]), torch.stack([x["down"] for x in own])


def in_one(parts: list[dict[str, Tensor]], parallel: ParallelConfig) -> dict[str, Tensor]:
    """Return the ranks' results as one rank would have them: gates, ups and downs of all experts as `w13` and `w2`."""
    found = {name: torch.cat([part[name] for part in parts]) for name in ("output", "hidden")}
    found["gate.weight"] = torch.stack([part["router.weight"].double() for part in parts]).sum(0)
    first, second = [], []
    for expert in range(EXPERTS):
        local = EXPERTS // parallel.ep
        owners = parts if parallel.etp > 1 else [parts[expert // local]]
        name = f"experts.local_experts.{expert % local}.linear_fc"
        halves = [part[f"{name}1.weight"].chunk(2) for part in owners]
        first.append(torch.cat([half[0] for half in halves] + [half[1] for half in halves]))
        second.append(torch.cat([part[f"{name}2.weight"] for part in owners], dim=1))
    return found | {"w13": torch.stack(first), "w2": torch.stack(second)}


def float64_gradients(weights: Mapping[str, Tensor], chosen: Tensor) -> dict[str, Tensor]:
    """Return the gradients of the layer in float64, for the engine's choices [tokens, top_k]."""
    hidden, direction = (x.double() for x in inputs())
    leaves = {"hidden": hidden, "gate.weight": weights["gate.weight"].double()}
    leaves |= {name: x.double() for name, x in zip(("w13", "w2"), packed(weights), strict=True)}
    for leaf in leaves.values():
        leaf.requires_grad_()
    shares = (hidden @ leaves["gate.weight"].T).gather(1, chosen.long()).softmax(-1)
    gate, up = torch.einsum("th,tkih->tki", hidden, leaves["w13"][chosen.long()]).chunk(2, -1)
    values = torch.einsum("tki,tkhi->tkh", F.silu(gate) * up, leaves["w2"][chosen.long()])
    output = (values * shares[..., None]).sum(1)
    return dict(zip(leaves, torch.autograd.grad(output, list(leaves.values()), direction), strict=True))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_experts_are_those_of_the_engine(ranks: RankPool, folder: Path, layout: dict[str, int]) -> None:
    sizes = parallel_of(layout)
    weights = weights_of(folder)
    [(output, _, chosen)] = ranks.run(of_engine, weights, True, list(range(TOKENS)), world_size=1)
    found = in_one(ranks.run(of_trainer, str(folder), sizes, world_size=sizes.world_size), sizes)
    assert torch.equal(found["output"], output)
    for name, expected in float64_gradients(weights, chosen).items():
        assert (found[name].double() - expected).norm() < 0.02 * expected.norm(), name


@pytest.mark.parametrize("renormalise", [True, False])
def test_a_token_does_not_depend_on_others(ranks: RankPool, folder: Path, renormalise: bool) -> None:
    weights = weights_of(folder)
    [whole] = ranks.run(of_engine, weights, renormalise, list(range(TOKENS)), world_size=1)
    for batch in ([7], [5, 63], list(range(9, 42))):
        [found] = ranks.run(of_engine, weights, renormalise, batch, world_size=1)
        for ours, expected in zip(found, whole, strict=True):
            assert torch.equal(ours, expected[batch])


def of_router(weight: Tensor, renormalise: bool) -> tuple[Tensor, Tensor]:
    """Return a trainer's routing weights and choices, both [tokens, experts]."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig

    from megarl.models.exact.experts import ExactRouter

    config = TransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=4, num_moe_experts=EXPERTS, moe_router_topk=TOP_K,
        params_dtype=torch.bfloat16, add_bias_linear=False, moe_router_dtype="fp32",
        moe_router_load_balancing_type="none", moe_router_pre_softmax=not renormalise,
    )  # fmt: skip
    group: Any = dist.group.WORLD
    groups = ProcessGroupCollection(tp=group, cp=group, tp_cp=group, tp_dp_cp=group)
    router = ExactRouter(config, pg_collection=groups)
    router.weight.data.copy_(weight)
    shares, chosen = router(inputs()[0][:, None])
    return shares.detach(), chosen


@pytest.mark.parametrize("renormalise", [True, False])
def test_routing_is_that_of_the_engine(ranks: RankPool, folder: Path, renormalise: bool) -> None:
    weights = weights_of(folder)
    [(_, expected, engine_choice)] = ranks.run(of_engine, weights, renormalise, list(range(TOKENS)), world_size=1)
    [(shares, chosen)] = ranks.run(of_router, weights["gate.weight"], renormalise, world_size=1)
    assert torch.equal(shares, torch.zeros_like(shares).scatter(1, engine_choice.long(), expected))
    assert torch.equal(chosen, torch.zeros_like(chosen).scatter(1, engine_choice.long(), True))


def test_sums_of_experts_are_rounded_once() -> None:
    torch.manual_seed(0)
    values, shares = torch.randn(40, TOP_K, 64).bfloat16(), torch.rand(40, TOP_K)
    found = weighted_sum(values, shares)
    exact = torch.einsum("tkh,tk->th", values.double(), shares.double())
    assert (found.double() - exact).abs().max() <= 2**-8 * exact.abs().max()
    assert torch.equal(found[3:4], weighted_sum(values[3:4], shares[3:4]))
