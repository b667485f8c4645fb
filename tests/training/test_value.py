"""Critics and reward models: values against transformers' sequence classification, updates, export, checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.data.kinds.preferences import with_score_masks
from megarl.data.token_batch import TokenBatch
from megarl.tracking.metrics import merge, values
from megarl.types import DataError, TrainingSequence
from tests.rank_pool import RankPool
from tests.rounding import allowed_error
from tests.token_batches import own_rows, row_batches

LENGTHS = (5, 12, 7, 9)
ROLES = ("policy", "critic")
LAYOUTS = {
    "one rank": {},
    "tp2": {"tp": 2},
    "tp2 without sp": {"tp": 2},
    "pp2": {"pp": 2},
    "cp2 dp2": {"cp": 2, "dp": 2},
}


def recipe_of(folder: Path, **sections: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "values",
            "loop": "rl",
            "model": {"path": str(folder), "dtype": "float32"},
            "data": {"train": "unused"},
            "trainer": {"max_tokens_per_microbatch": 64},
            "optimizer": {"learning_rate": 3e-3},
            "critic": {"optimizer": {"learning_rate": 5e-3}, "clip": None},
            "algorithm": {"advantage": "gae"},
            "train": {"steps": 10},
        }
        | sections
    )


def parallel_of(name: str) -> ParallelConfig:
    return ParallelConfig(**{"tp": 1, "pp": 1, "dp": 1, "rollout_tp": 1, **LAYOUTS[name]})


def answers(vocab_size: int) -> list[TrainingSequence]:
    random = np.random.default_rng(3)
    made = []
    for length in LENGTHS:
        mask = np.arange(length) >= 2
        made.append(
            TrainingSequence(
                random.integers(1, vocab_size, size=length),
                mask,
                token_weights=mask / np.float32(sum(LENGTHS) - 2 * len(LENGTHS)),
                values=random.normal(size=length).astype(np.float32),
                returns=random.normal(size=length).astype(np.float32),
            )
        )
    return made


def build(
    recipe: Recipe, parallel: ParallelConfig, folder: Path, role: Any, memory_owner: Any = None
) -> tuple[Any, Any]:
    from megarl.checkpoint import safetensors
    from megarl.families.shape import padded_vocab_size, read_model_shape
    from megarl.reshard.layouts.megatron import check_shapes, megatron_layouts, parameter_shapes
    from megarl.training.training_engine import TrainingEngine

    shape = read_model_shape(folder)
    shape = shape.with_value_head() if role == "critic" else shape
    layouts = megatron_layouts(shape, parallel, padded_vocab_size=padded_vocab_size(shape.vocab_size, parallel.tp))

    def load(parameters: Mapping[str, torch.Tensor]) -> None:
        check_shapes(parameter_shapes(layouts, parallel.coordinates(dist.get_rank())), parameters)
        safetensors.load(folder, layouts[dist.get_rank()], parameters)

    return TrainingEngine(recipe, parallel, shape, load, role=role, memory_owner=memory_owner), layouts


def train_and_export(
    recipe: Recipe, parallel: ParallelConfig, folder: Path, sequences: list[TrainingSequence], out: Path
) -> dict[str, Any]:
    """Two updates of a critic, its values before and after, and its export."""
    from megarl.checkpoint import safetensors

    engine, layouts = build(recipe, parallel, folder, "critic")
    indices = own_rows(LENGTHS, parallel, 64)
    rows = row_batches(sequences, indices)
    before = engine.forward(rows)
    updates = [engine.update(rows).metrics for _ in range(2)]
    ends = with_score_masks(TokenBatch.from_sequences(sequences))
    end_indices = own_rows(ends.lengths, parallel, 64)
    after = engine.forward([ends.select(row) for row in end_indices])
    safetensors.export(
        out,
        folder,
        engine.shape,
        layouts,
        dist.get_rank(),
        engine.parameters,
        dtype=torch.float32,
        bucket_bytes=1 << 20,
    )
    zeros = before is None or all((row == 0).all() for row in before)
    last = {
        index: float(score)
        for row, values in zip(end_indices, after or (), strict=False)
        for index, score in zip(row, values[ends.select(row).cu_seqlens[1:] - 1], strict=True)
    }
    return {"before_is_zero": zeros, "updates": updates, "scores": last}


@pytest.fixture(scope="module")
def alone(
    ranks: RankPool, tiny_model: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, float]], dict[int, float]]:
    folder = tiny_model(num_layers=2, num_kv_heads=2)
    return train_on(ranks, folder, "one rank", tmp_path_factory.mktemp("critic") / "out")


def train_on(
    ranks: RankPool, folder: Path, name: str, out: Path
) -> tuple[Path, list[dict[str, float]], dict[int, float]]:
    parallel = parallel_of(name)
    trainer = {"max_tokens_per_microbatch": 64}
    if name == "tp2 without sp":
        trainer["sequence_parallel"] = False
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    results = ranks.run(
        train_and_export,
        recipe_of(folder, trainer=trainer), parallel, folder, answers(vocab_size), out,
        world_size=parallel.world_size,
    )  # fmt: skip
    assert all(result["before_is_zero"] for result in results), "a new head says nothing"
    updates = [
        values(merge(part for part in step if part)) for step in zip(*(r["updates"] for r in results), strict=True)
    ]
    scores: dict[int, float] = {}
    for result in results:
        scores |= result["scores"]
    return out, updates, scores


def test_the_first_loss_is_that_of_nothing(alone: Any) -> None:
    _, updates, _ = alone
    sequences = answers(10)
    returns = np.concatenate([s.returns[s.loss_mask] for s in sequences if s.returns is not None])
    assert updates[0]["train/loss"] == pytest.approx(float((returns**2 / 2).mean()), rel=1e-5)
    assert updates[1]["train/loss"] < updates[0]["train/loss"] and updates[0]["train/grad_norm"] > 0


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "one rank"])
def test_layouts_train_alike(ranks: RankPool, tiny_model: Any, alone: Any, name: str, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    out, updates, scores = train_on(ranks, tiny_model(num_layers=2, num_kv_heads=2), name, tmp_path / "out")
    for own, reference in zip(updates, alone[1], strict=True):
        for metric in ("train/loss", "train/grad_norm"):
            assert own[metric] == pytest.approx(reference[metric], rel=1e-5)
    # Adam makes much of little gradients: scores follow from the weights, closely, and from the batch, less closely.
    in_float32, exact = classifier_scores(out, torch.float32), classifier_scores(out, torch.float64)
    allowed = allowed_error(torch.cat(in_float32), torch.cat(exact))
    expected = [of_tokens[-1].item() for of_tokens in exact]
    assert [scores[i] for i in range(len(scores))] == pytest.approx(expected, rel=0, abs=allowed)
    assert scores == pytest.approx(alone[2], rel=0, abs=1e-4)
    ours, theirs = load_file(out / "model.safetensors"), load_file(alone[0] / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert np.abs(ours[key] - value).max() < 5e-4, key


@torch.no_grad()
def classifier_scores(folder: Path, dtype: torch.dtype) -> list[torch.Tensor]:
    """transformers' scores of each sequence at each of its tokens; the last is the sequence's."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype).eval()
    tokens = [torch.from_numpy(s.token_ids)[None] for s in answers(model.config.vocab_size)]
    return [model.score(model.model(t).last_hidden_state)[0, :, 0] for t in tokens]


def test_the_export_is_a_sequence_classifier(alone: Any, tiny_model: Any) -> None:
    from transformers import AutoModelForSequenceClassification

    out, _, scores = alone
    model = AutoModelForSequenceClassification.from_pretrained(out, dtype=torch.float32).eval()
    assert type(model).__name__ == "Qwen3ForSequenceClassification" and model.config.num_labels == 1
    vocab_size = model.config.vocab_size
    sequences = answers(vocab_size)
    padding = model.config.pad_token_id
    assert padding is not None
    rows = torch.full((len(sequences), max(LENGTHS)), padding)
    for row, sequence in zip(rows, sequences, strict=True):
        row[: len(sequence)] = torch.from_numpy(np.where(sequence.token_ids == padding, 1, sequence.token_ids))
    with torch.no_grad():
        found = model(rows, attention_mask=(rows != padding).long()).logits[:, 0]
        alone_found = [model(torch.from_numpy(s.token_ids)[None]).logits[0, 0].item() for s in sequences]
    assert len(set(scores.values())) == len(scores) == len(sequences)
    assert [scores[i] for i in range(len(sequences))] == pytest.approx(alone_found, abs=2e-6)
    kept = [i for i, s in enumerate(sequences) if padding not in s.token_ids]
    assert [scores[i] for i in kept] == pytest.approx([found[i].item() for i in kept], abs=2e-6) and kept


def test_a_classifier_of_several_labels_is_refused(alone: Any, tmp_path: Path) -> None:
    from megarl.families.shape import read_model_shape

    config = json.loads((alone[0] / "config.json").read_text())
    assert read_model_shape(alone[0]).has_value_head
    config["id2label"] = {"0": "a", "1": "b"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match="with 2 labels is not supported; a reward model has one"):
        read_model_shape(tmp_path)


def pass_in_lent_memory(
    recipe: Recipe, parallel: ParallelConfig, folder: Path, sequences: list[TrainingSequence]
) -> tuple[list[int], bool]:
    """Bytes of the critic's and the policy's parameters after passes of the critic in the policy's memory.

    The second result: whether the policy computes as before.
    """
    policy, _ = build(recipe, parallel, folder, "policy")
    rows = row_batches(sequences, own_rows(LENGTHS, parallel, 64))
    before = policy.forward(rows)
    policy.offload()
    critic, _ = build(recipe, parallel, folder, "critic", memory_owner=policy)
    critic.offload()
    policy.onload()
    critic.forward(rows)
    critic.update(rows)
    held = [
        sum(tensor.untyped_storage().nbytes() for tensor in engine.parameters.values()) for engine in (critic, policy)
    ]
    after = policy.forward(rows) if held[1] else ()
    return held, all(np.array_equal(*pair) for pair in zip(before, after, strict=True))


def test_a_critic_returns_the_memory_of_the_policy(ranks: RankPool, tiny_model: Any) -> None:
    folder = tiny_model(num_layers=2, num_kv_heads=2)
    trainer = {"max_tokens_per_microbatch": 64, "offload": ["parameters", "gradients", "optimizer"]}
    recipe, parallel = recipe_of(folder, trainer=trainer), parallel_of("one rank")
    [(held, is_equal)] = ranks.run(
        pass_in_lent_memory, recipe, parallel, folder, answers(recipe_vocab(folder)), world_size=1
    )
    assert held[0] == 0 and held[1] > 0 and is_equal


def save_or_restore(
    recipe: Recipe, parallel: ParallelConfig, folders: tuple[Path, Path], into: Path | None, out: Path
) -> Any:
    """Policy and critic, trained and saved; or restored from there and trained on."""
    from megarl.training.state import checkpoint

    policy, critic = (build(recipe, parallel, folder, role)[0] for folder, role in zip(folders, ROLES, strict=True))
    engines = {"": policy, "critic": critic}
    sequences = answers(recipe_vocab(folders[0]))
    rows = row_batches(sequences, own_rows(LENGTHS, parallel, 64))
    policy_rows = [
        row.with_arrays({name: row.per_token[of] for name, of in (("token_weights",) * 2, ("advantages", "returns"))})
        for row in rows
    ]

    def update() -> list[dict[str, Any]]:
        return [policy.update(policy_rows).metrics, critic.update(rows).metrics]

    if into is not None:
        update()
        save = checkpoint.plan_save(into, engines, str(parallel))
        save.write(asynchronous=False)
        save.finish()
    else:
        checkpoint.restore_models(out, engines, str(parallel))
    metrics = update()
    return metrics, {
        name: {n: p.detach().numpy().copy() for n, p in e.parameters.items()} for name, e in engines.items()
    }


def recipe_vocab(folder: Path) -> int:
    return json.loads((folder / "config.json").read_text())["vocab_size"]


@pytest.mark.parametrize("second", ["tp2", "pp2"])
def test_policy_and_critic_share_a_checkpoint(
    ranks: RankPool, tiny_model: Any, alone: Any, tmp_path: Path, second: str
) -> None:
    folders = tiny_model(num_layers=2, num_kv_heads=2), alone[0]
    recipe, parallel = recipe_of(folders[0]), parallel_of("tp2")
    home = tmp_path / "checkpoint"
    home.mkdir()
    saved = ranks.run(save_or_restore, recipe, parallel, folders, home, home, world_size=2)
    restored = ranks.run(save_or_restore, recipe, parallel_of(second), folders, None, home, world_size=2)
    both = []
    for results in (saved, restored):
        both.append([values(merge(r[0][i] for r in results if r[0][i])) for i in range(2)])
    for own, reference in zip(*both, strict=True):
        assert own["train/grad_norm"] == pytest.approx(reference["train/grad_norm"], rel=1e-5)
        assert own["train/loss"] == pytest.approx(reference["train/loss"], rel=1e-5, abs=1e-6)
    if second == "tp2":
        for (_, own), (_, reference) in zip(saved, restored, strict=True):
            for name, parameters in reference.items():
                assert all(np.array_equal(own[name][n], value) for n, value in parameters.items()), name
