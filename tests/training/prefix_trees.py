"""Trees of prefixes against separate sequences: gradients, layouts, and the number of trained tokens.

Gradients: random trees of 1 to 5 levels in float64, on a dense model, a mixture of experts with all balancing losses,
one with sliding windows and sinks, and one with latent attention. Layouts: three steps of the objectives of
`invariance`, rows as trees on every layout, against separate sequences on one rank.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from megarl.config.parallel import ParallelConfig
from megarl.data.token_batch import TokenBatch
from megarl.tracking.metrics import merge, values
from megarl.types import TrainingSequence
from tests.rank_pool import RankPool
from tests.training import invariance
from tools.make_tiny_model import make_tiny_model

MODELS = {
    **invariance.MODELS,
    "windows": dict(family="gpt_oss", num_layers=4, num_kv_heads=2, vocab_size=433),
    "latent": dict(family="deepseek_v3", num_layers=3, vocab_size=433, experts_per_token=4),
}
"""Models whose gradients are compared. Only those of `invariance` train on layouts."""
WINDOW = 5
"""Tokens of the sliding window. Most sequences are longer."""
GRADIENT_LIMITS = {"latent": 1e-6}
"""Largest relative difference of a gradient, else 1e-10. Routers with sigmoids round their scores to float32."""
GROUP_SIZE = 4
BALANCE = {"aux_loss": 3.0, "seq_aux_loss": 2.0, "z_loss": 0.3}


def make_model(name: str, out: Path) -> Path:
    """The folder of a model of `MODELS`."""
    folder = make_tiny_model(out, **MODELS[name])
    if name == "windows":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"sliding_window": WINDOW}))
    return folder


def random_tree(depth: int, random: np.random.Generator, vocab_size: int, num_leaves: int = 9) -> TokenBatch:
    """Sequences that branch at up to `depth` levels, some of them equal, some a prefix of another one."""
    sequences: list[np.ndarray] = [random.integers(1, vocab_size, int(random.integers(3, 20)))]
    for _ in range(depth):
        parents = [sequences[int(random.integers(len(sequences)))] for _ in range(num_leaves)]
        ends = [int(random.integers(1, len(parent) + 1)) for parent in parents]
        sequences += [
            np.concatenate([parent[:end], random.integers(1, vocab_size, int(random.integers(0, 15)))])
            for parent, end in zip(parents, ends, strict=True)
        ]
    chosen = random.permutation(len(sequences))[: num_leaves + 3]
    drawn = [
        TrainingSequence(
            token_ids=sequences[index],
            loss_mask=random.random(len(sequences[index])) < 0.6,
            token_weights=random.normal(size=len(sequences[index])).astype(np.float32),
            temperature=float(random.choice([0.7, 1.0])) if depth % 2 else 1.0,
        )
        for index in chosen
    ]
    return TokenBatch.from_sequences(drawn)


def gradients(folder: Path, rows: Sequence[TokenBatch], shares_prefixes: bool) -> list[dict[str, np.ndarray]]:
    """One rank: for each row, the log-probs and entropies of its tokens and the gradients of a float64 model."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    from megarl.checkpoint import safetensors
    from megarl.families.shape import padded_vocab_size, read_model_shape
    from megarl.models.configuration import transformer_config
    from megarl.models.experts.balance import ExpertBalance, routers_of
    from megarl.models.policy import PolicyModel
    from megarl.reshard.layouts.megatron import megatron_layouts
    from megarl.training.model import saved_buffers
    from megarl.training.rows.choice import make_microbatch

    shape, parallel = read_model_shape(folder), ParallelConfig(tp=1, pp=1, dp=1, rollout_tp=1)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(1)
    balanced = invariance.BALANCED if shape.family == "qwen3_moe" else {}
    config = transformer_config(shape, parallel, dtype=torch.float32, sequence_parallel=False, overrides=balanced)
    # A router in float32 would show its rounding.
    config.moe_router_dtype = "fp64"
    model = PolicyModel(config, shape, logprob_chunk_tokens=50, trains_entropy=True)
    layouts = megatron_layouts(shape, parallel, padded_vocab_size=padded_vocab_size(shape.vocab_size, 1))
    safetensors.load(folder, layouts[0], dict(model.named_parameters()) | dict(saved_buffers(model)))
    model.double()
    balance, results = ExpertBalance(config, [model]), []
    for row in rows:
        batch = make_microbatch(
            replace(row, shares_prefixes=shares_prefixes),
            multiple=8,
            qkv_format=model.qkv_format,
            device=torch.device("cpu"),
        )

        with wide_softmax():
            balance.begin_update(len(row.token_ids))
            if balance.needs_counts:
                with balance.count_tokens(), torch.no_grad():
                    outputs(model, batch)
            model.zero_grad()
            logprobs, entropies = outputs(model, batch)
            weights = batch.per_token["token_weights"].double() * batch.mask
            (weights * (logprobs + 0.3 * entropies)).sum().backward()
        losses = {f"loss {name}": router.loss_sums[name] for router in routers_of(model) for name in BALANCE}
        tensors = {name: parameter.grad for name, parameter in model.named_parameters()} | losses
        tensors["trained"] = logprobs.detach()[batch.mask]
        results.append({name: tensor.double().numpy().copy() for name, tensor in tensors.items() if tensor is not None})
    # Megatron-Core 0.16.1 keeps the scale of the balancing losses, and its schedules expect another shape.
    MoEAuxLossAutoScaler.main_loss_backward_scale = None
    parallel_state.destroy_model_parallel()
    return results


def outputs(model: Any, batch: Any) -> Any:
    """The model's log-probs and entropies of a row's tokens, [2, tokens]."""
    from megarl.models.experts.balance import routers_of
    from megarl.models.policy import RowSettings

    model.row_settings = RowSettings(batch.temperature, batch.support)
    for router in routers_of(model):
        router.next_row = batch.make_row_tokens()
    return model(batch.input_ids, None, None, labels=batch.labels, packed_seq_params=batch.row)


@contextmanager
def wide_softmax() -> Iterator[None]:
    """Context in which a softmax of float64 numbers is not rounded to float32, as Megatron-Core's router asks for."""
    import torch

    softmax = torch.softmax

    def unrounded(x: Any, dim: int, dtype: Any = None) -> Any:
        return softmax(x, dim, dtype=x.dtype if x.dtype == torch.float64 else dtype)

    with mock.patch.object(torch, "softmax", unrounded):
        yield


def check_gradients(model: str, folder: Path, pool: RankPool, depths: Sequence[int]) -> Iterator[dict[str, Any]]:
    """One line for each depth of the trees: the largest relative difference of a parameter's gradient."""
    random = np.random.default_rng(11)
    rows = [random_tree(depth, random, MODELS[model]["vocab_size"]) for depth in depths for _ in range(3)]
    [apart], [shared] = (pool.run(gradients, folder, rows, flag, world_size=1) for flag in (False, True))
    for index, depth in enumerate(depths):
        pairs = list(zip(apart, shared, strict=True))[3 * index : 3 * index + 3]
        worst = max(
            float(np.linalg.norm(separate[name] - tree[name]) / max(np.linalg.norm(separate[name]), 1e-300))
            for separate, tree in pairs
            for name in separate
        )
        line = {"depth": depth, "worst": worst}
        yield line | {"met": 0 < worst <= GRADIENT_LIMITS.get(model, 1e-10)}


def check_layouts(
    model: str, folder: Path, pool: RankPool, only: Sequence[str], objectives: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """One line for each layout and objective: trees on the layout against separate sequences on one rank."""
    chosen = [name for name in objectives if name != "balanced" or model == "moe"]
    vocab_size = invariance.MODELS[model]["vocab_size"]
    steps = {name: invariance.make_steps(name, vocab_size, GROUP_SIZE) for name in chosen}
    before = invariance.stored_tensors(folder / "model.safetensors", folder)
    before["score.weight"] = invariance.value_head(before["model.norm.weight"].size)

    def results(parallel: ParallelConfig, trainer: Mapping[str, Any], shares_prefixes: bool) -> dict[str, Any]:
        recipe = invariance.recipe_of(folder, trainer)
        ranks = pool.run(
            invariance.train, recipe, parallel, steps, shares_prefixes,
            timeout_seconds=900, world_size=parallel.world_size,
        )  # fmt: skip
        by_objective = {}
        for name in chosen:
            reported = [
                [part for part in step if part] for step in zip(*(rank[name][0] for rank in ranks), strict=True)
            ]
            metrics = [values(merge(parts)) for parts in reported]
            by_objective[name] = metrics, invariance.join([rank[name][1] for rank in ranks])
        return by_objective

    alone = results(invariance.parallel_of({}), {}, False)
    for name, sizes, trainer in invariance.CASES[model]:
        parallel = invariance.parallel_of(sizes)
        if parallel.world_size > pool.world_size or (only and name not in ("one rank", *only)):
            continue
        trees = results(parallel, trainer, True)
        for objective in chosen:
            line = {"layout": name, "objective": objective}
            compared = invariance.compare(trees[objective], alone[objective], before)
            yield line | compared
