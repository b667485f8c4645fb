"""Parallel layouts train as one rank does: loss, gradient norm and every parameter of the same batches are equal.

Three steps of plain gradient descent in float32 on real ranks, one step for the `STEEP` objectives. A dense and a
mixture-of-experts model are trained by each loss: the supervised one; the clipped policy loss in every aggregation;
every other policy loss; one with all that may be added to it (KL, entropy bonus, corrected tokens); one renormalised
over what top-p and top-k kept; one with conversations besides; pairs; critic and reward model; the balancing losses
of experts. Gradients are clipped to one
small norm, so that every loss moves the weights equally far, and far enough to stand clear of float32's grain. A
parameter's difference, less one rounding, counts relative to how far training moved it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.data.token_batch import TokenBatch
from megarl.types import RetainedSets, TrainingSequence
from tests.rank_pool import RankPool
from tests.token_batches import own_rows

LOSS_LIMIT, PARAMETER_LIMIT = 1e-5, 1e-4
NUM_STEPS, NUM_SEQUENCES, LONGEST = 3, 24, 40
CLIPS = {"clip_low": 0.2, "clip_high": 0.3}
BY_SEQUENCE = {"aggregation": "sequence_mean_token_mean"}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "sft": {},
    "token_mean": {**CLIPS, "dual_clip": 2.5, "aggregation": "token_mean"},
    "sequence_mean_token_mean": {**CLIPS, "dual_clip": 2.5, **BY_SEQUENCE},
    "sequence_mean_token_sum": {**CLIPS, "dual_clip": 2.5, "aggregation": "sequence_mean_token_sum"},
    "constant_length": {**CLIPS, "dual_clip": 2.5, "aggregation": "constant_length"},
    "policy_gradient": {"policy_loss": "policy_gradient"},
    "gspo": {"policy_loss": "gspo", "clip_low": 0.4, "clip_high": 0.7, **BY_SEQUENCE},
    "gmpo": {"policy_loss": "gmpo", "clip_low": 0.6, "clip_high": 0.6, **BY_SEQUENCE},
    "cispo": {"policy_loss": "cispo", **CLIPS},
    "sapo": {"policy_loss": "sapo", **BY_SEQUENCE},
    "unclipped": {"policy_loss": "unclipped"},
    "dro": {"policy_loss": "dro", "policy_loss_kwargs": {"beta": 0.1}},
    "dppo_tv": {"policy_loss": "dppo_tv", "clip_low": 0.001, "clip_high": 0.001},
    "dppo_kl": {"policy_loss": "dppo_kl", "clip_low": 0.001, "clip_high": 0.001, "log_ratio_penalty": 0.05},
    "vespo": {"policy_loss": "vespo", "policy_loss_kwargs": {"decay_positive": 0.01, "decay_negative": 0.01}},
    "sequences dropped": {**CLIPS, "off_policy_limit": 0.2, "kl_coefficient": 0.1, "kl_unbiased": True},
    "drift penalised": {**CLIPS, "dual_clip": 2.5},
    "all added": {**CLIPS, "kl_coefficient": 0.1, "entropy_coefficient": 0.05},
    "kept sets": {**CLIPS, "dual_clip": 2.5, "kl_coefficient": 0.1, "entropy_coefficient": 0.05},
    "ptx": {**CLIPS, "ptx_coefficient": 0.4},
    "dpo": {"aggregation": "sequence_mean_token_sum"},
    "critic": {},
    "reward model": {"aggregation": "sequence_mean_token_sum"},
    "balanced": {**CLIPS},
}
"""Name to fields of the recipe's algorithm section."""
BALANCED = {
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
    "moe_aux_loss_coeff": [3.0, 2.0],
    "moe_z_loss_coeff": 0.3,
}
"""Megatron's fields in the objective `balanced`, which models without experts lack."""
WITH_VALUE_HEAD, IN_PAIRS = ("critic", "reward model"), ("dpo", "reward model")
STEEP = ("sapo", "unclipped", "vespo")
"""Objectives that are compared after one step: their weights depend steeply on ratios, so later steps amplify rounding.

Three steps of vespo on one rank, with other rows only, end with gradient norms 3.4e-5 apart; one step with 5e-8.
"""
MODELS: dict[str, dict[str, Any]] = {
    "dense": dict(family="qwen3", num_layers=4, num_kv_heads=2, vocab_size=433, tie_word_embeddings=False),
    "moe": dict(family="qwen3_moe", num_layers=4, num_kv_heads=2, vocab_size=433, tie_word_embeddings=True),
}
Case = tuple[str, dict[str, int], dict[str, Any]]
"""Name, parallel sizes, fields of the recipe's trainer section."""

CASES: dict[str, tuple[Case, ...]] = {
    "dense": (
        ("one rank", {}, {}),
        ("rows of 64", {}, {"max_tokens_per_microbatch": 64}),
        ("a sequence a row", {}, {"max_tokens_per_microbatch": LONGEST}),
        ("recompute selective", {}, {"recompute": "selective"}),
        ("recompute modules", {}, {"recompute": "selective", "recompute_modules": ("mlp", "core_attn")}),
        ("recompute full", {}, {"recompute": "full"}),
        ("logits kept", {}, {"keep_logits": True}),
        ("tp2", {"tp": 2}, {}),
        ("tp2 logits kept", {"tp": 2}, {"keep_logits": True}),
        ("tp2 without sp", {"tp": 2}, {"sequence_parallel": False}),
        ("tp4", {"tp": 4}, {}),
        ("pp2", {"pp": 2}, {}),
        ("pp4", {"pp": 4}, {}),
        ("pp2 vpp2", {"pp": 2, "vpp": 2}, {"max_tokens_per_microbatch": 128}),
        ("cp2", {"cp": 2}, {}),
        ("cp4", {"cp": 4}, {}),
        ("dp2", {"dp": 2}, {}),
        ("dp4 rows of 64", {"dp": 4}, {"max_tokens_per_microbatch": 64}),
        ("tp2 pp2", {"tp": 2, "pp": 2}, {}),
        ("tp2 cp2", {"tp": 2, "cp": 2}, {}),
        ("tp2 dp2", {"tp": 2, "dp": 2}, {}),
        ("pp2 cp2", {"pp": 2, "cp": 2}, {}),
        ("cp2 dp2", {"cp": 2, "dp": 2}, {}),
        ("tp2 pp2 cp2", {"tp": 2, "pp": 2, "cp": 2}, {}),
        ("tp2 pp2 dp2", {"tp": 2, "pp": 2, "dp": 2}, {"recompute": "full"}),
        ("tp2 pp2 vpp2 dp2", {"tp": 2, "pp": 2, "vpp": 2, "dp": 2}, {}),
        ("pp2 vpp2 cp2 dp2", {"pp": 2, "vpp": 2, "cp": 2, "dp": 2}, {"max_tokens_per_microbatch": 128}),
    ),
    "moe": (
        ("one rank", {}, {}),
        ("recompute modules", {}, {"recompute": "selective", "recompute_modules": ("moe",)}),
        ("rows of 64", {}, {"max_tokens_per_microbatch": 64}),
        ("tp2", {"tp": 2}, {}),
        ("etp2 dp2", {"etp": 2, "dp": 2}, {}),
        ("etp2 cp2", {"etp": 2, "cp": 2}, {}),
        ("tp2 etp4 dp2", {"tp": 2, "etp": 4, "dp": 2}, {}),
        ("ep2 dp2", {"ep": 2, "dp": 2}, {}),
        ("ep4 dp4", {"ep": 4, "dp": 4}, {}),
        ("tp2 etp2", {"tp": 2, "etp": 2}, {}),
        ("tp2 ep2", {"tp": 2, "ep": 2}, {}),
        ("tp2 etp2 ep2 dp2", {"tp": 2, "etp": 2, "ep": 2, "dp": 2}, {}),
        ("cp2 ep2", {"cp": 2, "ep": 2}, {}),
        ("pp2 ep2 dp2", {"pp": 2, "ep": 2, "dp": 2}, {}),
        ("pp2 vpp2", {"pp": 2, "vpp": 2}, {"max_tokens_per_microbatch": 128}),
        ("tp2 pp2 cp2 ep4", {"tp": 2, "pp": 2, "cp": 2, "ep": 4}, {}),
        ("tp2 pp2 vpp2 etp2 ep2 dp2", {"tp": 2, "pp": 2, "vpp": 2, "etp": 2, "ep": 2, "dp": 2}, {}),
    ),
}


DESCENT = {"name": "sgd", "learning_rate": 100.0, "clip_grad_norm": 0.05}
MUON = {
    "name": "muon", "learning_rate": 0.01, "clip_grad_norm": 0.05, "epsilon": 1e-4, "muon": {"products": "float32"},
}  # fmt: skip
"""With a usual epsilon, Adam's first steps are signs of the gradients of norms, also where rounding decides them."""


def recipe_of(model: Path, trainer: Mapping[str, Any], optimizer: Mapping[str, Any] = DESCENT) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "invariance",
            "loop": "rl",
            "model": {"path": str(model), "dtype": "float32"},
            "data": {"train": "unused"},
            "trainer": {
                "max_tokens_per_microbatch": 512,
                "logprob_chunk_tokens": 32,
                "distributed_optimizer": False,
                **trainer,
            },
            "optimizer": dict(optimizer),
            # The model must let gradients through its entropies; each objective has an algorithm of its own.
            "algorithm": {"entropy_coefficient": 0.05},
        }
    )


def parallel_of(sizes: Mapping[str, int]) -> ParallelConfig:
    return replace(ParallelConfig(tp=1, pp=1, dp=1, rollout_tp=1), **sizes)


def make_steps(objective: str, vocab_size: int, group_size: int = 1, num_steps: int = NUM_STEPS) -> list[TokenBatch]:
    """Random tokens, with log-probs of the past on both sides of the clip.

    With a `group_size` above 1, so many sequences in turn begin with the same tokens, each with a part of them.
    """
    from megarl.config import AlgorithmConfig
    from megarl.rollout.step.rl_batch import assign_token_weights

    # With some data, three steps raise rounding above the limits, however separate sequences are packed: a router's tie
    # or a ratio at its clip falls to either side.
    random = np.random.default_rng(5 if group_size == 1 else 11)
    steps = []
    for _ in range(1 if objective in STEEP else num_steps):
        sequences, common = [], np.zeros(0, np.int64)
        for length in random.integers(2, LONGEST - 8, size=NUM_SEQUENCES).tolist():
            prompt = int(random.integers(1, length))
            policy = {
                "advantages": random.normal(0.5, 1.0, length).astype(np.float32),
                "old_logprobs": random.normal(-6.0, 0.7, length).astype(np.float32),
            }
            if objective == "vespo":
                # Its weight has the product of up to 40 ratios, and of their rounding. Farther from the policy
                # a few sequences with weights in the thousands decide the gradient, and rounding in them is all it has.
                policy["old_logprobs"] = np.float32(-6.0) + np.float32(0.1) * (policy["old_logprobs"] + 6)
            if objective == "critic":
                policy = {name: random.normal(0.0, 0.3, length).astype(np.float32) for name in ("values", "returns")}
            if objective in ("all added", "kept sets", "dpo", "sequences dropped"):
                policy["reference_logprobs"] = random.normal(-6.0, 0.3, length).astype(np.float32)
                policy["importance_weights"] = random.uniform(0.0, 2.0, length).astype(np.float32)
            if objective == "drift penalised":
                policy["log_ratio_penalties"] = np.where(random.random(length) < 0.3, 0.5, 0.0).astype(np.float32)
            token_ids = random.integers(1, vocab_size, size=length)
            if group_size > 1:
                common = common if len(sequences) % group_size else random.integers(1, vocab_size, size=LONGEST)
                # Trained tokens common to a pair cancel out, and leave a gradient in which rounding weighs more.
                num_common = int(random.integers(0, (prompt if objective in IN_PAIRS else length) + 1))
                token_ids[:num_common] = common[:num_common]
            retained = retained_sets(token_ids, vocab_size, random) if objective == "kept sets" else None
            if retained is not None:
                # Over a smaller set all log-probs are higher, those of the past too.
                raised = np.log(vocab_size / np.where(retained.counts > 0, retained.counts, vocab_size)).astype(
                    np.float32
                )
                policy["old_logprobs"] += raised
                policy["reference_logprobs"] += raised
            sequences.append(
                TrainingSequence(
                    token_ids=token_ids,
                    loss_mask=np.arange(length) >= prompt,
                    retained_sets=retained,
                    **({} if objective in ("sft", "reward model") else policy),
                )
            )
        batch = TokenBatch.from_sequences(sequences)
        assign_token_weights(batch, AlgorithmConfig.model_validate(OBJECTIVES[objective]), LONGEST)
        if objective == "ptx":
            numbers = np.arange(batch.num_sequences, dtype=np.float32)
            batch.per_token["supervised"] = np.repeat(numbers % 2, batch.lengths)
        steps.append(batch)
    return steps


def retained_sets(token_ids: np.ndarray, vocab_size: int, random: np.random.Generator) -> RetainedSets:
    """Sets of tokens [tokens]: each with itself and a quarter of the vocabulary to nearly all of it, but some none."""
    sets = []
    for token in token_ids.tolist():
        others = random.permutation(vocab_size)[: random.integers(vocab_size // 4, vocab_size)]
        sets.append(np.union1d(others, [token]) if random.random() < 0.8 else np.zeros(0))
    return RetainedSets(np.array([len(tokens) for tokens in sets], np.int32), np.concatenate(sets).astype(np.int32))


def value_head(hidden_size: int) -> np.ndarray:
    """Weights of a value head in no order that a layout could hide: [1, hidden_size]."""
    return 3.0 * np.sin(np.arange(1.0, hidden_size + 1, dtype=np.float32))[None]


def build(recipe: Recipe, parallel: ParallelConfig, has_value_head: bool) -> tuple[Any, Callable[..., None], Any]:
    """A rank's engine, what loads its parameters, and its layout."""
    import torch
    import torch.distributed as dist

    from megarl.checkpoint import safetensors
    from megarl.families.shape import padded_vocab_size, read_model_shape
    from megarl.reshard.layouts.megatron import check_shapes, megatron_layouts, parameter_shapes
    from megarl.training.training_engine import TrainingEngine

    shape = read_model_shape(recipe.model.path)
    if has_value_head:
        # All tokens pull one head the same way: steps as long as a policy's would throw it about.
        shorter = recipe.optimizer.model_copy(update={"learning_rate": 20.0})
        shape, recipe = shape.with_value_head(), recipe.model_copy(update={"optimizer": shorter})
    layouts = megatron_layouts(shape, parallel, padded_vocab_size=padded_vocab_size(shape.vocab_size, parallel.tp))
    rank = dist.get_rank()

    def load(parameters: Mapping[str, Any]) -> None:
        check_shapes(parameter_shapes(layouts, parallel.coordinates(rank)), parameters)
        safetensors.load(recipe.model.path, layouts[rank], parameters)
        for name, parameter in parameters.items():
            if name.endswith("value_head.weight"):
                parameter.data.copy_(torch.from_numpy(value_head(shape.hidden_size)))

    return TrainingEngine(recipe, parallel, shape, load), load, layouts[rank]


Cut = tuple[tuple[int, ...], tuple[int, ...], np.ndarray]


def train(
    recipe: Recipe, parallel: ParallelConfig, steps: Mapping[str, Any], shares_prefixes: bool = False
) -> dict[str, Any]:
    """One rank: by objective, each step's metrics, and what the rank holds of each tensor at the end.

    With `shares_prefixes`, rows are stored as trees.
    """

    from megarl.config import AlgorithmConfig, CriticConfig, PreferenceConfig
    from megarl.training.objective import (
        critic_objective,
        policy_objective,
        preference_objective,
        reward_objective,
        supervised_loss,
    )

    engines, results = {}, {}
    for objective, batches in steps.items():
        kind = has_value_head, is_balanced = objective in WITH_VALUE_HEAD, objective == "balanced"
        if kind not in engines:
            trainer = recipe.trainer.model_copy(update={"megatron": BALANCED if is_balanced else {}})
            engines[kind] = build(recipe.model_copy(update={"trainer": trainer}), parallel, has_value_head)
        engine, load, pieces = engines[kind]
        load(engine.tensors)
        # Buffers are never trained, so they are not compared.
        pieces = [piece for piece in pieces if piece.storage in engine.parameters]
        algorithm = AlgorithmConfig.model_validate(OBJECTIVES[objective])
        objectives = {
            "sft": supervised_loss,
            # So small a beta that no pair is decided already: its gradient would be what cancellation leaves.
            "dpo": preference_objective(PreferenceConfig(beta=0.05)),
            "critic": critic_objective(CriticConfig()),
            "reward model": reward_objective(PreferenceConfig(margin=1000.0)),
        }
        engine.role = replace(engine.role, objective=objectives.get(objective) or policy_objective(algorithm))
        metrics, together = [], 2 if objective in IN_PAIRS else 1
        for batch in batches:
            max_tokens = max(recipe.trainer.max_tokens_per_microbatch, together * LONGEST)
            packed = own_rows(batch.lengths, parallel, max_tokens, together=together)
            rows = [replace(batch.select(row), shares_prefixes=shares_prefixes) for row in packed]
            metrics.append(engine.update(rows, kl_coefficient=algorithm.kl_coefficient).metrics)
        results[objective] = metrics, cut_out(pieces, engine.parameters)
    return results


def cut_out(pieces: Any, stored: Mapping[str, Any]) -> dict[str, list[Cut]]:
    """What a rank holds of each Hugging Face tensor: start, stop and values."""
    cuts: dict[str, list[Cut]] = {}
    for piece in pieces:
        flat = stored[piece.storage].detach().reshape(-1)
        value = flat.as_strided(piece.box.shape, piece.strides, flat.storage_offset() + piece.offset)
        cuts.setdefault(piece.box.name, []).append(
            (piece.box.start, piece.box.stop, value.clone().float().cpu().numpy())
        )
    return cuts


def join(parts: Sequence[Mapping[str, list[Cut]]]) -> dict[str, np.ndarray]:
    """Whole tensors from all ranks' cuts. Raises ValueError for an element that no rank holds, or two hold unalike."""
    whole: dict[str, np.ndarray] = {}
    for name in sorted({name for part in parts for name in part}):
        cuts = [cut for part in parts for cut in part.get(name, ())]
        value = np.full(np.max([stop for _, stop, _ in cuts], axis=0), np.nan, np.float32)
        for start, stop, part_value in cuts:
            place = tuple(slice(a, b) for a, b in zip(start, stop, strict=True))
            if not np.isnan(value[place]).all() and not np.array_equal(value[place], part_value):
                raise ValueError(f"ranks hold different values of {name}")
            value[place] = part_value
        if np.isnan(value).any():
            raise ValueError(f"no rank holds all of {name}")
        whole[name] = value
    return whole


def compare(
    own: tuple[Sequence[Mapping[str, float]], Mapping[str, np.ndarray]],
    alone: tuple[Sequence[Mapping[str, float]], Mapping[str, np.ndarray]],
    before: Mapping[str, np.ndarray],
) -> dict[str, Any]:
    """Return the largest relative differences over the steps, and over the parameters with the name of the worst.

    Rounding in the earlier updates leaves the weights a little apart. A step whose gradient norm is k times that of the
    first step shows k times as much of it, so its differences are divided by k.
    """
    norms = [step["train/grad_norm"] for step in alone[0]]
    steepness = [max(1.0, norm / norms[0]) for norm in norms]

    def worst(metric: str) -> float:
        pairs = [(a[metric], b[metric]) for a, b in zip(own[0], alone[0], strict=True)]
        return max(abs(a - b) / abs(b) / steep for (a, b), steep in zip(pairs, steepness, strict=True))

    def moved_apart(name: str, value: np.ndarray) -> float:
        # However the two were added up, each element was rounded to float32.
        rounding = np.finfo(np.float32).eps / 2 * np.linalg.norm(value)
        apart = max(np.linalg.norm(own[1][name] - value) - rounding, 0)
        # An expert that no token chose does not move, on one rank and on several.
        return float(apart / np.linalg.norm(value - before[name])) if apart else 0.0

    parameters = {name: moved_apart(name, value) for name, value in alone[1].items()}
    name = max(parameters, key=lambda key: parameters[key])
    losses = [key for key in alone[0][0] if key == "train/loss" or key.startswith("train/moe_")]
    loss, grad_norm = max(worst(key) for key in losses), worst("train/grad_norm")
    return {
        "loss": loss,
        "grad_norm": grad_norm,
        "parameter": parameters[name],
        "worst_parameter": name,
        "met": loss <= LOSS_LIMIT and grad_norm <= LOSS_LIMIT and parameters[name] <= PARAMETER_LIMIT,
    }


def stored_tensors(file: Path, folder: Path) -> dict[str, np.ndarray]:
    """Return the tensors in a file of `folder`'s model, by the names of plans: experts of packed tensors apart."""
    import torch
    from safetensors.torch import load_file

    from megarl.families.shape import read_model_shape
    from megarl.reshard.boxes import dense_piece
    from megarl.reshard.layouts.packed import unpack_layout

    stored = load_file(file)
    whole = (dense_piece(name, tuple(value.shape), name, 0) for name, value in stored.items())
    return {
        piece.box.name: torch.as_strided(stored[piece.storage], piece.box.shape, piece.strides, piece.offset).numpy()
        for piece in unpack_layout(whole, read_model_shape(folder))
    }


def check(
    model: str,
    folder: Path,
    pool: RankPool,
    only: Sequence[str],
    objectives: Sequence[str] = tuple(OBJECTIVES),
    num_steps: int = NUM_STEPS,
    optimizer: Mapping[str, Any] = DESCENT,
) -> Iterator[dict[str, Any]]:
    """One line for each layout and objective of one model."""
    from megarl.families.shape import read_model_shape
    from megarl.tracking.metrics import merge, values

    objectives = [name for name in objectives if name != "balanced" or model == "moe"]
    vocab_size = MODELS[model]["vocab_size"]
    steps = {objective: make_steps(objective, vocab_size, num_steps=num_steps) for objective in objectives}
    before = stored_tensors(folder / "model.safetensors", folder)
    before["score.weight"] = value_head(read_model_shape(folder).hidden_size)
    alone: dict[str, Any] = {}
    for name, sizes, trainer in CASES[model]:
        parallel = parallel_of(sizes)
        if parallel.world_size > pool.world_size or (only and name not in ("one rank", *only)):
            continue
        ranks = pool.run(
            train, recipe_of(folder, trainer, optimizer), parallel, steps, timeout_seconds=900,
            world_size=parallel.world_size,
        )  # fmt: skip
        for objective in objectives:
            reported = [[part for part in step if part] for step in zip(*(r[objective][0] for r in ranks), strict=True)]
            own = [values(merge(parts)) for parts in reported], join([r[objective][1] for r in ranks])
            if name == "one rank":
                alone[objective] = own
            else:
                line = {"model": model, "layout": name, "ranks": parallel.world_size, "objective": objective}
                yield line | compare(own, alone[objective], before)
