"""Trees of prefixes train as separate sequences do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megarl.data.token_batch import TokenBatch
from megarl.types import TrainingSequence
from tests.rank_pool import RankPool
from tests.training import invariance, prefix_trees

OBJECTIVES = ("all added", "dpo", "balanced")


def test_every_sampled_token_is_an_edge() -> None:
    import torch

    from megarl.models.trees.row import TreeRow
    from megarl.training.rows.choice import make_microbatch

    random, num_sampled, num_stored = np.random.default_rng(3), 0, 0
    for number in range(200):
        prompt = random.integers(1, 9, int(random.integers(1, 30)))
        # Few tokens: answers of a group often begin alike, and some are equal.
        answers = [random.integers(1, 4, int(random.integers(1, 12))) for _ in range(int(random.integers(2, 9)))]
        batch = TokenBatch.from_sequences(
            [
                TrainingSequence(
                    token_ids=np.concatenate([prompt, answer]),
                    loss_mask=np.arange(len(prompt) + len(answer)) >= len(prompt),
                    token_weights=np.ones(len(prompt) + len(answer), np.float32),
                )
                for answer in answers
            ]
        )
        row = make_microbatch(
            replace(batch, shares_prefixes=True),
            multiple=1 + number % 4,
            qkv_format="packed",
            device=torch.device("cpu"),
        )
        assert isinstance(row.row, TreeRow)
        tree = row.row.tree
        edges = tree.edges[row.mask]
        targets = row.labels[0][edges].tolist()
        tokens = torch.zeros(len(row.labels[0])).index_add_(0, edges, torch.ones(len(edges)))
        assert targets == np.concatenate(answers).tolist()
        assert int(tokens.sum()) == sum(map(len, answers))
        assert (tree.edge_sources < len(tree.positions)).all()
        num_sampled += sum(map(len, answers))
        num_stored += len(tree.positions)
    assert 0 < num_stored < num_sampled * 4


@pytest.mark.parametrize("depths", [(1, 5), pytest.param((1, 2, 3, 4, 5), marks=pytest.mark.long)], ids=["two", "all"])
@pytest.mark.parametrize("model", list(prefix_trees.MODELS))
def test_trees_have_the_gradients_of_separate_sequences(
    tmp_path: Path, ranks: RankPool, model: str, depths: tuple[int, ...]
) -> None:
    folder = prefix_trees.make_model(model, tmp_path / model)
    lines = list(prefix_trees.check_gradients(model, folder, ranks, depths))
    assert len(lines) == len(depths) and all(line["met"] for line in lines), lines


@pytest.mark.parametrize(
    ("model", "layout"),
    [("dense", "pp2 vpp2"), ("dense", "tp2 cp2"), pytest.param("moe", "cp2 ep2", marks=pytest.mark.long)],
)
def test_layouts_train_trees(tiny_model: Callable[..., Path], ranks: RankPool, model: str, layout: str) -> None:
    folder = tiny_model(**invariance.MODELS[model])
    lines = list(prefix_trees.check_layouts(model, folder, ranks, [layout], OBJECTIVES))
    assert {line["layout"] for line in lines} == {"one rank", layout} and all(line["met"] for line in lines), lines


@pytest.mark.long
@pytest.mark.timeout(10_000)
@pytest.mark.parametrize("model", list(invariance.MODELS))
def test_all_layouts_of_up_to_eight_ranks_train_trees(
    tiny_model: Callable[..., Path], distributed_tier: None, model: str
) -> None:
    with RankPool(8) as pool:
        folder = tiny_model(**invariance.MODELS[model])
        lines = list(prefix_trees.check_layouts(model, folder, pool, (), list(invariance.OBJECTIVES)))
    assert {line["layout"] for line in lines} == {name for name, _, _ in invariance.CASES[model]}
    assert [line for line in lines if not line["met"]] == []
