"""Updates on real ranks: against transformers and torch in float64, and alike however batch and model are cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megarl.config import OptimizerConfig, Recipe
from megarl.config.parallel import ParallelConfig
from megarl.data.packing import pack
from megarl.families.shape import read_model_shape
from megarl.tracking.metrics import merge, values
from megarl.types import MegarlError, RetainedSets, TrainingSequence
from tests.rank_pool import RankPool
from tests.rounding import MARGIN
from tests.token_batches import by_sequence, row_batches, weighed
from tests.training.invariance import cut_out, join

LENGTHS = [5, 9, 14, 2, 11, 7, 8, 16, 4, 13]
NUM_UPDATES = 3
LEARNING_RATE, DECAY, BETAS, EPSILON, CLIP = 3e-3, 0.1, (0.9, 0.95), 1e-3, 0.02
CLIP_LOW, CLIP_HIGH, DUAL_CLIP, KL = 0.2, 0.3, 2.5, 0.3
BETA = 0.05
LOGPROBS = ("before", "after", "reference")


def recipe_of(folder: Path, loop: str, **trainer: Any) -> Recipe:
    """The gradient of `rl` is clipped to a norm it always exceeds; that of `sft` is left."""
    return Recipe.model_validate(
        {
            "name": "engine",
            "loop": loop,
            "model": {"path": str(folder), "dtype": "float32"},
            "data": {"train": "unused"},
            "trainer": {"max_tokens_per_microbatch": 128, "logprob_chunk_tokens": 10, **trainer},
            "optimizer": {
                "learning_rate": LEARNING_RATE,
                "weight_decay": DECAY,
                "betas": BETAS,
                "epsilon": EPSILON,
                "clip_grad_norm": CLIP if loop == "rl" else 0.0,
            },
            "algorithm": {
                "clip_low": CLIP_LOW,
                "clip_high": CLIP_HIGH,
                "dual_clip": DUAL_CLIP,
                "kl_coefficient": KL,
                "aggregation": "sequence_mean_token_mean" if loop == "rl" else "token_mean",
            },
            "preference": {"beta": BETA, "margin": 0.2, "label_smoothing": 0.1},
            "train": {"steps": NUM_UPDATES},
        }
    )


def make_updates(recipe: Recipe, vocab_size: int) -> list[list[TrainingSequence]]:
    """Random tokens; log-probs of the past within reach of the model's, so that ratios fall on both sides of the clip.

    Token 0 is not among them: transformers gives the padding token no gradient. In RL two thirds of the tokens were
    sampled from a part of the vocabulary, as top-p and top-k leave it, and each sequence at a temperature of its own.
    """
    random = np.random.default_rng(11)
    updates = []
    for _ in range(NUM_UPDATES):
        sequences = []
        for length in LENGTHS:
            made = {
                name: random.normal(mean, spread, length).astype(np.float32)
                for name, mean, spread in (
                    ("advantages", 0.0, 1.0),
                    ("old_logprobs", -6.0, 0.7),
                    ("rollout_logprobs", -6.0, 0.7),
                    ("reference_logprobs", -6.0, 0.7),
                )
            }
            prompt = int(random.integers(1, length))
            token_ids = random.integers(1, vocab_size, size=length)
            sampled: dict[str, Any] = {}
            if recipe.loop == "rl":
                sampled = {"retained_sets": retained_sets(token_ids, vocab_size), "temperature": 0.6 + length % 5 / 5}
            mask = np.arange(length) >= prompt
            sequences.append(TrainingSequence(token_ids=token_ids, loss_mask=mask, **made, **sampled))
        aggregation = "sequence_mean_token_sum" if recipe.loop == "preference" else recipe.algorithm.aggregation
        updates.append(weighed(sequences, recipe.algorithm.model_copy(update={"aggregation": aggregation})))
    return updates


def retained_sets(token_ids: np.ndarray, vocab_size: int) -> RetainedSets:
    """Return sets of 1 to all ids for tokens [tokens]. Each holds its token; every third token has none."""
    random = np.random.default_rng(int(token_ids.sum()))
    sets = []
    for number, token in enumerate(token_ids.tolist()):
        others = random.permutation(vocab_size)[: 0 if number == 4 else random.integers(vocab_size // 4, vocab_size)]
        sets.append(np.union1d(others, [token]) if number % 3 else np.zeros(0))
    counts = np.array([len(kept) for kept in sets], np.int32)
    return RetainedSets(counts, np.concatenate(sets).astype(np.int32))


def build(recipe: Recipe, parallel: ParallelConfig, arena: Any = None) -> tuple[Any, Any, Any]:
    from megarl.checkpoint import safetensors
    from megarl.families.shape import padded_vocab_size
    from megarl.models.configuration import uses_transformer_engine
    from megarl.reshard.layouts.megatron import megatron_layouts
    from megarl.training.model import FrozenModel
    from megarl.training.training_engine import TrainingEngine

    shape = read_model_shape(recipe.model.path)
    layouts = megatron_layouts(
        shape,
        parallel,
        padded_vocab_size=padded_vocab_size(shape.vocab_size, parallel.tp),
        transformer_engine=uses_transformer_engine(),
    )
    pieces = layouts[dist.get_rank()]

    def load(parameters: Mapping[str, torch.Tensor]) -> None:
        safetensors.load(recipe.model.path, pieces, parameters)

    reference = FrozenModel(recipe, parallel, shape, load) if recipe.has_reference else None
    return TrainingEngine(recipe, parallel, shape, load, arena=arena), reference, pieces


def rows_of(recipe: Recipe, parallel: ParallelConfig, sequences: Sequence[TrainingSequence]) -> list[Any]:
    rows = pack(
        [len(s) for s in sequences],
        max_tokens=recipe.trainer.max_tokens_per_microbatch,
        num_ranks=parallel.dp,
        multiple=parallel.tp,
        together=recipe.sequences_per_example,
    )
    return rows[parallel.coordinates(dist.get_rank()).dp]


def train(recipe: Recipe, parallel: ParallelConfig, updates: list[list[TrainingSequence]]) -> dict[str, Any]:
    """One rank's metrics of every update, gradient of the first, parameters at the end, and log-probs."""
    engine, reference, pieces = build(recipe, parallel)
    indices = rows_of(recipe, parallel, updates[0])
    first = row_batches(updates[0], indices)
    result: dict[str, Any] = {"indices": indices, "before": engine.forward(first), "metrics": []}
    for sequences in updates:
        rows = row_batches(sequences, rows_of(recipe, parallel, sequences))
        result["metrics"].append(engine.update(rows).metrics)
        if "gradient" not in result:
            result["gradient"] = cut_out(pieces, {n: p.main_grad for n, p in engine.parameters.items()})
    result["parameters"] = cut_out(pieces, engine.parameters)
    result["after"] = engine.forward(first)
    result["reference"] = reference.forward(first) if reference else None
    both = engine.forward_with_entropies(first)
    result["both"], result["entropies"] = (None if both is None else [row[place] for row in both] for place in (0, 1))
    return result


def whole(parts: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Whole tensors from all ranks' cuts; what two ranks hold must be equal."""
    return {name: torch.from_numpy(value) for name, value in join(parts).items()}


def trained(ranks: RankPool, recipe: Recipe, sizes: tuple[int, int, int]) -> dict[str, Any]:
    """All ranks' results as those of one."""
    tp, pp, dp = sizes
    parallel = ParallelConfig(tp, pp, dp, 1)
    updates = make_updates(recipe, read_model_shape(recipe.model.path).vocab_size)
    results = ranks.run(train, recipe, parallel, updates, world_size=parallel.world_size)
    reporting = [results[parallel.rank(0, replica, pp - 1)] for replica in range(dp)]
    logprobs = {
        name: {i: value for r in reporting for i, value in by_sequence(updates[0], r["indices"], r[name]).items()}
        for name in (*LOGPROBS, "both", "entropies")
    }
    return {
        "metrics": [values(merge(r["metrics"][step] for r in results)) for step in range(NUM_UPDATES)],
        "parameters": whole([r["parameters"] for r in results]),
        "num_rows": [len(r["indices"]) for r in results],
        **{name: [found[i] for i in sorted(found)] for name, found in logprobs.items()},
        **({} if recipe.trainer.distributed_optimizer else {"gradient": whole([r["gradient"] for r in results])}),
    }


def distance(got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """Norm of the difference over the norm, of all tensors together."""
    assert got.keys() == expected.keys()
    gap = sum((got[n].double() - expected[n].double()).square().sum() for n in expected)
    return float((gap / sum(expected[n].double().square().sum() for n in expected)) ** 0.5)


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[..., Path]) -> Callable[..., Path]:
    def make(**shape: Any) -> Path:
        sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 48}
        return tiny_model(**(sizes | {"vocab_size": 431, "initializer_range": 0.15} | shape))

    return make


@pytest.fixture(scope="module")
def baseline(ranks: RankPool, folder: Callable[..., Path]) -> dict[str, dict[str, Any]]:
    """One rank, the whole batch in one row."""
    return {
        loop: trained(ranks, recipe_of(folder(), loop, distributed_optimizer=False), (1, 1, 1))
        for loop in ("sft", "rl")
    }


SHORT = ("one rank, many rows", "tp2 pp2", "pp2 dp2, distributed optimizer")
"""Cuts at which fine-tuning is compared by default: only its loss differs from reinforcement learning."""
CASES = [
    pytest.param((1, 1, 1), {"max_tokens_per_microbatch": 16}, id="one rank, many rows"),
    pytest.param((2, 1, 1), {"max_tokens_per_microbatch": 40}, id="tp2"),
    pytest.param((2, 1, 1), {"sequence_parallel": False}, id="tp2 without sequence parallelism"),
    pytest.param((1, 2, 1), {"max_tokens_per_microbatch": 20}, id="pp2"),
    pytest.param((1, 1, 2), {"max_tokens_per_microbatch": 30}, id="dp2"),
    pytest.param((2, 2, 1), {"max_tokens_per_microbatch": 32}, id="tp2 pp2"),
    pytest.param((2, 1, 2), {"max_tokens_per_microbatch": 18}, id="tp2 dp2"),
    pytest.param((1, 2, 2), {"distributed_optimizer": True}, id="pp2 dp2, distributed optimizer"),
    pytest.param((2, 1, 2), {"distributed_optimizer": True}, id="tp2 dp2, distributed optimizer"),
]


def both_loops() -> Iterator[Any]:
    for case in CASES:
        yield pytest.param(*case.values, "rl", id=f"{case.id}-rl")
        marks = () if case.id in SHORT else pytest.mark.long
        yield pytest.param(*case.values, "sft", id=f"{case.id}-sft", marks=marks)


@pytest.mark.parametrize(("sizes", "trainer", "loop"), [*both_loops()])
def test_updates_do_not_depend_on_the_cut(
    ranks: RankPool,
    folder: Callable[..., Path],
    baseline: dict[str, dict[str, Any]],
    sizes: tuple[int, int, int],
    trainer: dict[str, Any],
    loop: str,
) -> None:
    recipe = recipe_of(folder(), loop, **({"distributed_optimizer": False} | trainer))
    got, expected = trained(ranks, recipe, sizes), baseline[loop]
    for step, (mine, theirs) in enumerate(zip(got["metrics"], expected["metrics"], strict=True), 1):
        assert mine.keys() == theirs.keys()
        assert mine == pytest.approx(theirs, rel=1e-5 if step == 1 else 1e-4), f"update {step}"
    if "gradient" in got:
        assert distance(got["gradient"], expected["gradient"]) <= 1e-5
    assert distance(got["parameters"], expected["parameters"]) <= 1e-5
    for name in (*LOGPROBS, "entropies"):
        assert len(got[name]) == len(expected[name])
        for mine, theirs in zip(got[name], expected[name], strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=2e-4 if name in ("after", "entropies") else 1e-5)


def test_the_baseline_is_worth_comparing_with(baseline: dict[str, dict[str, Any]]) -> None:
    sft, rl = baseline["sft"], baseline["rl"]
    assert sft["num_rows"] == rl["num_rows"] == [1]
    assert 0.2 < rl["metrics"][0]["train/clip_fraction"] < 0.8 and rl["metrics"][0]["train/dual_clip_fraction"] > 0.02
    assert rl["metrics"][0]["train/grad_norm"] > 2 * CLIP
    assert max(np.abs(b - a).max() for b, a in zip(rl["before"], rl["after"], strict=True)) > 1e-2
    assert all(np.array_equal(b, r) for b, r in zip(rl["before"], rl["reference"], strict=True)) and rl["reference"]
    assert sft["reference"] == []


def transformers_training(
    recipe: Recipe, updates: list[list[TrainingSequence]], dtype: torch.dtype = torch.float64
) -> dict[str, Any]:
    """The same updates with transformers' model, formulas written out, and torch's AdamW."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(recipe.model.path, dtype=dtype).eval()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}],
        lr=LEARNING_RATE,
        betas=BETAS,
        eps=EPSILON,
    )
    result: dict[str, Any] = {"loss": [], "grad_norm": []}
    for sequences in updates:
        optimizer.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        if recipe.loop == "preference":
            pairs = list(zip(sequences[::2], sequences[1::2], strict=True))
            loss = torch.stack([float64_pair_loss(model, chosen, rejected) for chosen, rejected in pairs]).mean()
        else:
            for s in sequences:
                loss = loss + float64_loss(model, s, recipe)
        loss.backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        norm = torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt()
        if recipe.loop == "rl":
            for grad in grads.values():
                grad.mul_(CLIP / norm)
        result["loss"].append(loss.item())
        result["grad_norm"].append(norm.item())
        result.setdefault("gradient", {n: g.clone() for n, g in grads.items()})
        optimizer.step()
    result["parameters"] = {n: p.detach() for n, p in model.named_parameters()}
    result["model"] = model
    return result


def float64_loss(model: Any, s: TrainingSequence, recipe: Recipe) -> torch.Tensor:
    """Weighted sum over a sequence's trained tokens: minus log-prob, or clipped surrogate plus k3."""
    tokens = torch.from_numpy(s.token_ids)
    logits = model(tokens[None]).logits[0, :-1] / s.temperature
    if (kept := s.retained_sets) is not None:
        sets = torch.from_numpy(kept.token_ids).long().split(kept.counts.tolist())[1:]
        rows = [
            row[ids].logsumexp(-1) if len(ids) else row.logsumexp(-1) for row, ids in zip(logits, sets, strict=True)
        ]
        logprobs = logits.gather(1, tokens[1:, None])[:, 0] - torch.stack(rows)
    else:
        logprobs = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    weights, advantages, old, reference = (
        torch.from_numpy(x).double()[1:]
        for x in (s.token_weights, s.advantages, s.old_logprobs, s.reference_logprobs)
        if x is not None
    )
    if recipe.loop == "sft":
        return -(weights * logprobs).sum()
    ratio = (logprobs - old).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantages)
    surrogate = torch.where(advantages < 0, torch.maximum(surrogate, DUAL_CLIP * advantages), surrogate)
    k3 = (reference - logprobs).exp() - (reference - logprobs) - 1
    return (weights * (KL * k3 - surrogate)).sum()


def test_entropies_are_those_of_what_was_sampled_from(
    ranks: RankPool, folder: Callable[..., Path], baseline: dict[str, dict[str, Any]]
) -> None:
    """Entropies are those of the last parameters, at each sequence's temperature, over its tokens' kept sets."""
    got = baseline["rl"]
    recipe = recipe_of(folder(), "rl")
    model = transformers_training(recipe, make_updates(recipe, 431))["model"]
    for s, found, logprobs, after in zip(
        make_updates(recipe, 431)[0], got["entropies"], got["both"], got["after"], strict=True
    ):
        np.testing.assert_array_equal(logprobs, after)
        with torch.no_grad():
            logits = model(torch.from_numpy(s.token_ids)[None]).logits[0, :-1] / s.temperature
        assert s.retained_sets is not None
        sets = torch.from_numpy(s.retained_sets.token_ids).long().split(s.retained_sets.counts.tolist())[1:]
        rows = [row[ids] if len(ids) else row for row, ids in zip(logits, sets, strict=True)]
        expected = [float(torch.distributions.Categorical(logits=row).entropy()) for row in rows]
        assert found[0] == 0
        np.testing.assert_allclose(found[1:], expected, rtol=0, atol=2e-4)
        assert len(expected) < 5 or np.std(expected) > 0.1


def float64_pair_loss(model: Any, chosen: TrainingSequence, rejected: TrainingSequence) -> torch.Tensor:
    """DPO with a margin, a tenth of the pairs taken for swapped."""
    ratios = []
    for s in (chosen, rejected):
        tokens = torch.from_numpy(s.token_ids)
        logprobs = model(tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        assert s.reference_logprobs is not None
        ratios.append((logprobs - torch.from_numpy(s.reference_logprobs)[1:])[torch.from_numpy(s.loss_mask)[1:]].sum())
    difference = BETA * (ratios[0] - ratios[1]) - 0.2
    return -0.9 * torch.log(torch.sigmoid(difference)) - 0.1 * torch.log(torch.sigmoid(-difference))


@pytest.mark.parametrize("loop", ["sft", "rl", "preference"])
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param({}, id="qwen3 tied"),
        pytest.param({"family": "qwen2", "tie_word_embeddings": False}, id="qwen2 untied"),
    ],
)
def test_updates_are_those_of_float64(
    ranks: RankPool, folder: Callable[..., Path], loop: str, shape: dict[str, Any]
) -> None:
    recipe = recipe_of(folder(**shape), loop, distributed_optimizer=False, max_tokens_per_microbatch=40)
    got = trained(ranks, recipe, (1, 1, 1))
    expected = transformers_training(recipe, make_updates(recipe, 431))
    in_float32 = transformers_training(recipe, make_updates(recipe, 431), torch.float32)
    assert [m["train/loss"] for m in got["metrics"]] == pytest.approx(expected["loss"], rel=1e-5)
    assert [m["train/grad_norm"] for m in got["metrics"]] == pytest.approx(expected["grad_norm"], rel=1e-5)
    for name in ("gradient", "parameters"):
        rounding = distance(in_float32[name], expected[name])
        assert 0 < rounding < 1e-5
        assert distance(got[name], expected[name]) <= MARGIN * rounding, name


def poisoned(
    recipe: Recipe, parallel: ParallelConfig, sequences: list[TrainingSequence], sound: list[TrainingSequence]
) -> tuple[list[float], bool, int, str]:
    """Whether each update was skipped, whether weights stayed while they were, and the error in the end."""
    engine, *_ = build(recipe, parallel)
    before = {name: value.detach().clone() for name, value in engine.parameters.items()}
    skipped, stayed = [], True
    try:
        for batch in (sequences, sound, sequences, sequences):
            metrics = engine.update(row_batches(batch, rows_of(recipe, parallel, batch))).metrics
            skipped.append(metrics["train/update_skipped"].number)
            if len(skipped) == 1:
                stayed = all(torch.equal(before[name], value) for name, value in engine.parameters.items())
        return skipped, stayed, 0, "no error"
    except MegarlError as error:
        return skipped, stayed, error.exit_code, str(error)


def test_updates_that_are_no_numbers_are_skipped_and_then_end_the_run(
    ranks: RankPool, folder: Callable[..., Path]
) -> None:
    recipe = recipe_of(folder(), "rl")
    recipe = recipe.model_copy(update={"optimizer": recipe.optimizer.model_copy(update={"max_skipped_updates": 1})})
    sequences, sound, _ = make_updates(recipe, 431)
    advantages = sequences[3].advantages
    assert advantages is not None
    advantages[-1] = np.nan
    parallel = ParallelConfig(1, 1, 2, 1)
    for skipped, stayed, code, message in ranks.run(poisoned, recipe, parallel, sequences, sound, world_size=2):
        assert (skipped, stayed, code) == ([1, 0, 1], True, 70)
        assert "loss or gradient of 2 updates in a row was not finite" in message
        assert "from the batch's advantages on trainer rank 1. Lower optimizer.learning_rate" in message


def applied_at_limits(
    recipe: Recipe, parallel: ParallelConfig, sequences: list[TrainingSequence], ratio: float, limits: Sequence[float]
) -> list[bool]:
    """Whether an update is applied at each limit of the mean ratio, where all tokens have the same ratio."""
    engine, *_ = build(recipe, parallel)
    rows = row_batches(sequences, rows_of(recipe, parallel, sequences))
    found = engine.forward(rows)
    for row, logprobs in zip(rows, found, strict=True):
        row.per_token["old_logprobs"] = logprobs - np.float32(np.log(ratio))
    applied = []
    for limit in limits:
        algorithm = recipe.algorithm.model_copy(update={"skip_ratio": limit})
        engine.change_objective(recipe.model_copy(update={"algorithm": algorithm}))
        applied.append(engine.update(rows).outcome.applied)
    return applied


def test_an_update_is_skipped_where_the_mean_ratio_exceeds_its_limit(
    ranks: RankPool, folder: Callable[..., Path]
) -> None:
    recipe = recipe_of(folder(), "rl")
    sequences = make_updates(recipe, 431)[0]
    parallel = ParallelConfig(1, 1, 2, 1)
    found = ranks.run(applied_at_limits, recipe, parallel, sequences, 3.0, (1.5, 2.9, 3.1), world_size=2)
    assert found == [[False, False, True]] * 2


def offloading(recipe: Recipe, parallel: ParallelConfig, updates: list[list[TrainingSequence]]) -> dict[str, Any]:
    """Updates with everything given away between them; bytes that stayed; parameters at the end; what was locked."""
    from megarl.worker.arena_size import start_arena

    arena = start_arena(recipe, parallel, dist.get_rank())
    engine, *_ = build(recipe, parallel, arena)
    stayed = 0
    # Before the first update there are no moments.
    engine.offload()
    for sequences in updates:
        engine.onload()
        engine.update(row_batches(sequences, rows_of(recipe, parallel, sequences)))
        engine.offload()
        held = [*engine.parameters.values(), *engine.gradient_buffers(), *engine._optimizer_state()]
        stayed += sum(tensor.untyped_storage().nbytes() for tensor in held)
    away = [size for name in ("parameters", "optimizer") for _, size in engine._offloadable[name]._released]
    engine.onload(["parameters"])
    parameters = {n: v.detach().float().numpy() for n, v in engine.parameters.items()}
    calls, locked = arena.num_calls, arena.num_locked_bytes
    arena.close()
    return {"stayed": stayed, "parameters": parameters, "away": away, "calls": calls, "locked": locked}


@pytest.mark.parametrize(
    ("loop", "dtype"),
    [
        pytest.param("sft", "float32", id="float32, arena that grows"),
        pytest.param("rl", "bfloat16", id="bfloat16, arena of the planned size"),
    ],
)
def test_training_goes_on_as_if_memory_had_never_been_lent(
    ranks: RankPool, folder: Callable[..., Path], loop: str, dtype: str
) -> None:
    """A planned arena is locked by one call, however many copies it has."""
    everything = ("optimizer", "gradients", "parameters")
    results = []
    for offload in ((), everything):
        recipe = recipe_of(folder(), loop, offload=offload)
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"dtype": dtype})})
        updates = make_updates(recipe, 431)
        results.append(ranks.run(offloading, recipe, ParallelConfig(1, 1, 2, 1), updates, world_size=2))
    for kept, lent in zip(*results, strict=True):
        assert kept["stayed"] > 0 and lent["stayed"] == 0
        assert (kept["calls"], kept["locked"]) == (0, 0)
        # Without a plan: weights before the first update, then moments.
        assert lent["calls"] == (1 if loop == "rl" else 2) < len(lent["away"]) / 3
        # Two pages more, for so small a model: whole pages are locked, and copies start at cache lines.
        assert sum(lent["away"]) <= lent["locked"] <= 1.02 * sum(lent["away"]) + 2 * 4096
        for name, value in kept["parameters"].items():
            np.testing.assert_array_equal(value, lent["parameters"][name], err_msg=name)


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        pytest.param({"schedule": "constant", "warmup_steps": 4}, [2, 4, 6, 8, 8, 8], id="warm-up, constant"),
        pytest.param({"schedule": "constant"}, [8, 8, 8, 8, 8, 8], id="constant"),
        pytest.param({"schedule": "linear", "warmup_steps": 2}, [4, 8, 6.4, 4.8, 3.2, 1.6], id="warm-up, linear"),
        pytest.param(
            {"schedule": "linear", "warmup_steps": 2, "min_learning_rate": 2.0},
            [4, 8, 6.8, 5.6, 4.4, 3.2],
            id="minimum",
        ),
        pytest.param(
            {"schedule": "cosine", "warmup_steps": 2},
            [4, 8, 7.236068, 5.236068, 2.763932, 0.763932],
            id="warm-up, cosine",
        ),
        pytest.param({"schedule": "wsd", "warmup_steps": 2, "decay_steps": 4}, [4, 8, 8, 6, 4, 2], id="warm-up, wsd"),
        pytest.param({"schedule": "linear", "warmup_steps": 6}, [8 / 6, 16 / 6, 4, 32 / 6, 40 / 6, 8], id="warm-up"),
    ],
)
def test_learning_rates(settings: dict[str, Any], rates: list[float]) -> None:
    from megarl.training.optimizer import build_schedule

    optimizer: Any = torch.optim.SGD([torch.zeros(1)])
    schedule = build_schedule(OptimizerConfig(learning_rate=8.0, **settings), optimizer, num_updates=6)
    seen = []
    for _ in rates:
        schedule.step(increment=1)
        seen.append(optimizer.param_groups[0]["lr"])
    assert seen == pytest.approx(rates, abs=1e-6)
