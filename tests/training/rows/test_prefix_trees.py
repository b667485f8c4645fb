"""Trees of prefixes train as separate sequences do."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megarl.data.prefixes import prefix_tree
from megarl.data.token_batch import TokenBatch
from megarl.rollout.stitch import ModelCall, stitch
from megarl.types import Completion, TrainingSequence
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
            replace(batch, shares_prefixes=True, temperatures=None),
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
        # A batch without temperatures has that of 1.
        assert row.temperature == 1.0
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


def test_the_tree_of_an_agents_attempt_has_the_loss_of_its_sequences(tmp_path: Path, ranks: RankPool) -> None:
    """The attempt was recorded at the endpoint: two sub-agents, a rewind, and a compaction with its new root."""
    calls = [
        ModelCall(np.array(call["prompt"], np.int32), completion(call["sampled"]))
        for call in json.loads(Path(__file__).with_name("agents_attempt.json").read_text())
    ]
    segments, random = stitch(calls), np.random.default_rng(5)
    sequences = [
        TrainingSequence(
            token_ids=segment.token_ids,
            loss_mask=segment.loss_mask,
            token_weights=random.normal(size=len(segment.token_ids)).astype(np.float32),
        )
        for segment in segments
    ]
    row = TokenBatch.from_sequences(sequences)
    assert int(row.loss_mask.sum()) == sum(len(call.completion.token_ids) for call in calls)
    num_stored = len(prefix_tree(row.token_ids, row.cu_seqlens).parent)
    assert (len(calls), len(segments), len(row.token_ids), num_stored) == (12, 5, 330, 251)

    folder = prefix_trees.make_model("dense", tmp_path / "model")
    [[apart]], [[shared]] = (
        ranks.run(prefix_trees.gradients, folder, [row], flag, world_size=1) for flag in (False, True)
    )
    weights = np.concatenate([sequence.token_weights[sequence.loss_mask] for sequence in sequences])
    losses = [float(weights @ results["trained"]) for results in (apart, shared)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    for name, gradient in apart.items():
        assert np.linalg.norm(shared[name] - gradient) <= 1e-6 * np.linalg.norm(gradient), name


def completion(token_ids: list[int]) -> Completion:
    zeros = np.zeros(len(token_ids))
    return Completion("r", np.array(token_ids, np.int64), zeros.astype(np.float32), "stop", zeros.astype(np.int32))


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
