"""The canary on real ranks: wrong weights and wrong kernels of one rank are named, by module and rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.loops.observers.canary import Verdict, find_wrong_ranks
from megarl.tracking.model_outputs import CanaryReport
from tests.rank_pool import RankPool
from tests.token_batches import row_batches
from tests.training.test_training_engine import build, make_updates, recipe_of, rows_of

MODULE = "decoder.layers.1.mlp.linear_fc1"


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model(
        hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=48, vocab_size=431,
    )  # fmt: skip


def faulty(recipe: Recipe, parallel: ParallelConfig, rank: int) -> dict[str, CanaryReport]:
    """One rank's reports of a sound model; with a bit flipped in a weight of `rank`; with an output of its module that
    differs from one pass to the next."""
    from megarl.training.canary import compute_canary

    engine, *_ = build(recipe, parallel)
    is_faulty = dist.get_rank() == rank
    reports = {"sound": compute_canary(engine)}
    # The second of two layers: local number 1, or 0 on the second pipeline stage.
    found = [(name, module) for name, module in engine.chunks[0].named_modules() if name.endswith("mlp.linear_fc1")]
    bits = found[-1][1].weight.detach().view(torch.int32).view(-1)
    if is_faulty:
        bits[5] ^= 1 << 10
    reports["flipped"] = compute_canary(engine)
    if is_faulty:
        bits[5] ^= 1 << 10
    calls: list[int] = []

    def disturb(_module: Any, _inputs: Any, output: Any) -> Any:
        calls.append(1)
        # Only in the first of the two passes.
        return (
            (output[0].index_add(0, torch.tensor([2]), output[0][2:3] * 1e-3), *output[1:])
            if len(calls) == 1
            else output
        )

    # Before the hooks of the trace, as a faulty kernel would be.
    handle = found[-1][1].register_forward_hook(disturb, prepend=True) if is_faulty else None
    reports["unstable"] = compute_canary(engine)
    if handle is not None:
        handle.remove()
    reports["repaired"] = compute_canary(engine)
    return reports


@pytest.mark.parametrize(
    ("sizes", "rank", "flipped"),
    [
        pytest.param((1, 1, 4), 2, Verdict((2,), MODULE, False, True), id="dp4"),
        # Ranks 1 and 3 have the same shard: one of them is wrong.
        pytest.param((2, 1, 2), 3, Verdict((1, 3), MODULE, False, False), id="tp2 dp2"),
        pytest.param((2, 2, 1), 3, None, id="tp2 pp2"),
    ],
)
def test_the_faulty_rank_is_named(
    ranks: RankPool, model: Path, sizes: tuple[int, int, int], rank: int, flipped: Verdict | None
) -> None:
    parallel = ParallelConfig(*sizes, 1)
    found = ranks.run(faulty, recipe_of(model, "sft"), parallel, rank, world_size=4)
    verdicts = {name: find_wrong_ranks([reports[name] for reports in found], parallel) for name in found[0]}
    unstable = Verdict((rank,), MODULE, True, True)
    assert verdicts == {"sound": None, "flipped": flipped, "unstable": unstable, "repaired": None}
    outputs = found[rank]["sound"].outputs
    assert len(outputs) > 10 and len({output.number for output in outputs}) > 5


def updated(recipe: Recipe, parallel: ParallelConfig, updates: list[Any], with_canary: bool) -> dict[str, torch.Tensor]:
    from megarl.training.canary import compute_canary

    engine, *_ = build(recipe, parallel)
    for sequences in updates:
        if with_canary:
            compute_canary(engine)
        engine.update(row_batches(sequences, rows_of(recipe, parallel, sequences)))
    return {name: value.detach().clone() for name, value in engine.parameters.items()}


def test_the_canary_changes_no_weight(ranks: RankPool, model: Path) -> None:
    recipe, parallel = recipe_of(model, "rl"), ParallelConfig(1, 1, 2, 1)
    updates = make_updates(recipe, 431)[:2]
    plain, watched = (ranks.run(updated, recipe, parallel, updates, on, world_size=2)[0] for on in (False, True))
    assert all(torch.equal(plain[name], watched[name]) for name in plain)
