"""Each model family is trained, sampled, resharded and converted as transformers and vLLM compute it.

Tiny random models on CPU ranks, in float32 unless a row says otherwise. A row per family, proof and layout, with the
largest difference found and its limit. To add a family, add its line to `FAMILIES`.

- log-probs: trainer against transformers; the limit in bfloat16 is 1.5 times transformers' own distance from float32.
  Rounding also flips experts with almost equal scores, and one flip moved a log-prob ten times as far. So the trainer's
  bfloat16 pass replays the experts of transformers' float32 pass, and tokens flipped in transformers do not set the
  limit. A row of its own counts the tokens flipped without replay
- rotary: log-probs again, with each scaling of rotary embeddings and several fractions of rotated channels
- gradient: trainer against transformers in float64, relative to its norm
- engine: trainer's log-probs against vLLM's
- packing: sequences in one row against each alone, also under context parallelism
- conversion: Hugging Face to Megatron and back, bit for bit, with tensors that are not trained
- reshard: live weights and buffers after three updates against vLLM loading the export, bit for bit
- layouts: three policy updates in several layouts against one rank, see `tests/training/invariance.py`
- drafts: the layer for multi-token prediction: its gradient, the policy with and without its loss, conversion, reshards
  into live drafters, and greedy tokens with drafts
- learning: rise of the reward over 10 steps of a recipe, with replayed routers, beside Qwen3's
- replay: the engine's experts are those that the trainer would choose; replaying them, or others, the trainer's
  log-probs are the engine's, or equal in all layouts
- critic: values against transformers, relative to the largest; gradient; export read back; layouts, also of the reward
  model's loss
- preference: a DPO step and an SFT step in several layouts against one rank
- lora: one rank against several; the merged export and the adapter's folder, loaded by PEFT, against the trainer. With
  experts, PEFT loads adapters of attention alone
- export: a trained model's folder, loaded by transformers and by vLLM, against the trainer
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.families.shape import read_model_shape
from megarl.types import DataError, TrainingSequence
from tests.rank_pool import RankPool
from tests.training import invariance
from tools.family_models import (
    ONE_RANK,
    engine_logprobs,
    gradient,
    largest_distance,
    logprobs,
    oracle,
    oracle_gradient,
    oracle_logprobs,
    oracle_values,
    replay,
    reported,
    routed_logprobs,
    sample,
    stored_parts,
    tensors_in,
    train_and_export,
)
from tools.make_dataset import make_dataset
from tools.make_tiny_model import WITH_DELTA_NETS, WITH_MTP, make_tiny_model
from tools.runs import read_metrics, train

if TYPE_CHECKING:
    pass

DURATION = {"small": "minutes: one family (not timed)", "full": "an hour or more: all families (not timed)"}
SMALL = {"only": ["glm4_moe"], "proof": ["log-probs", "gradient", "engine", "packing", "conversion"]}


class Row(NamedTuple):
    """A family's tiny model, and what of it the CPU's kernels can show."""

    fields: Mapping[str, Any] = {}
    """Arguments of `make_tiny_model` other than the common ones."""
    has_experts: bool = False
    has_expert_biases: bool = False
    """Such experts cannot be split over ranks."""
    engine_limit: float = 1e-5
    """Largest distance of the engine's log-probs, in nats."""


FAMILIES: dict[str, Row] = {
    "llama": Row(),
    "mistral": Row(),
    "qwen2": Row(),
    "qwen3": Row(),
    "seed_oss": Row({"head_dim": 32}),
    "qwen2_moe": Row(has_experts=True),
    "qwen3_moe": Row(has_experts=True),
    "glm4_moe": Row(has_experts=True),
    # vLLM copies none of its key-value heads, so four ranks need four.
    "gpt_oss": Row({"head_dim": 32, "num_heads": 8, "num_kv_heads": 4}, has_experts=True, has_expert_biases=True),
    "deepseek_v3": Row(fields={"experts_per_token": 4}, has_experts=True),
    "glm4_moe_lite": Row(fields={"query_rank": None}, has_experts=True),
    "qwen3_next": Row(has_experts=True),
    "qwen3_5_text": Row(),
    "qwen3_5_moe_text": Row(has_experts=True),
    # With a vision tower, and experts packed in files.
    "qwen3_5": Row(),
    "qwen3_5_moe": Row(has_experts=True),
}
"""Families by `model_type`."""

SIZES = dict(num_layers=4, num_kv_heads=2, vocab_size=433, tie_word_embeddings=False)
LEAST_GAIN = 0.5
"""Share of Qwen3's rise of the reward. Ten steps of 128 samples are noisy."""
NUMBER_OF_DIGITS = '''"""Reward for the number of digits in an answer, up to 20."""

from megarl.types import Reward


def digits(completion_text: str, answer: str, *, correct_score: float) -> Reward:
    score = min(1.0, sum(character.isdigit() for character in completion_text) / 20)
    return Reward(score=score, format_valid=True, answer_correct=score == 1.0)
'''
"""Content of the file of the reward in the proof `learning`. Answers in the format of SFT reach its maximum.

The share of digits, other checks' reward, is largest in an endless row of digits. Its rise shows how loosely a student
holds the format. Qwen3 gained 0.35 after 100 steps of SFT and 0.26 after 120. Delta-nets learn the format faster:
Qwen3.5 gained 0.17 after 80 steps and 0.15 after 100. The loop is not the cause. From the same students, sampling and
training with transformers and torch's Adam gave the same rewards: in step 10, 0.77 for Qwen3 and 0.47 for Qwen3.5.
"""
LOGPROB_LIMIT, GRADIENT_LIMIT, PACKING_LIMIT = 1e-5, 1e-6, 1e-6
ROTARY_LIMIT = 1e-4
"""In nats, in float32. Wider weights make larger log-probs, which round to more."""
DRAFTS_LIMIT = 5e-5
"""In nats, in float32: products of several tokens round otherwise than those of one."""
SPARE_FLIPS = 3
"""Tokens of 64 that may flip beyond twice those of transformers. Few flips are a matter of chance."""
LEAST_CHANGE = 1e-3
"""Nats by which other experts change some log-prob, at least."""

DENSE_LAYOUTS = (
    ONE_RANK,
    ParallelConfig(tp=2, pp=1, dp=1, rollout_tp=1),
    ParallelConfig(tp=1, pp=2, dp=1, rollout_tp=2),
    ParallelConfig(tp=1, pp=1, dp=2, rollout_tp=2),
    ParallelConfig(tp=1, pp=1, dp=1, cp=2, rollout_tp=2),
    ParallelConfig(tp=2, pp=2, dp=1, rollout_tp=2),
    ParallelConfig(tp=1, pp=2, dp=1, rollout_tp=1, vpp=2),
    ParallelConfig(tp=4, pp=1, dp=1, rollout_tp=2),
)
EXPERT_LAYOUTS = (
    ONE_RANK,
    ParallelConfig(tp=2, pp=1, dp=1, rollout_tp=2, ep=2),
    ParallelConfig(tp=2, pp=1, dp=1, rollout_tp=2, ep=2, rollout_ep=True),
    ParallelConfig(tp=1, pp=2, dp=1, rollout_tp=2, vpp=2),
    ParallelConfig(tp=1, pp=1, dp=2, rollout_tp=1, ep=2),
    ParallelConfig(tp=1, pp=1, dp=1, cp=2, rollout_tp=2, ep=2),
    ParallelConfig(tp=2, pp=2, dp=1, rollout_tp=2, etp=2, rollout_ep=True),
    ParallelConfig(tp=2, pp=2, dp=1, rollout_tp=4, ep=2),
)
INVARIANCE = {
    False: ("tp2", "pp2", "cp2", "dp2", "tp2 pp2", "pp2 vpp2"),
    True: ("tp2", "etp2 dp2", "ep2 dp2", "cp2 ep2", "pp2 ep2 dp2", "pp2 vpp2"),
}
"""Layouts of `invariance`, by whether the family has experts."""
SPLIT = {
    False: ParallelConfig(tp=2, pp=2, dp=1, rollout_tp=1),
    True: ParallelConfig(tp=2, pp=2, dp=1, rollout_tp=1, ep=2),
}
"""The layout of proofs with one split layout, by whether the family has experts."""


Found = Iterator[dict[str, Any]]


def prove_logprobs(name: str, folder: Path, pool: RankPool, work: Path) -> Found:
    exact, experts = oracle(folder, "float32")
    trained = reported(pool.run(logprobs, str(folder), ONE_RANK, "float32", True, world_size=1))
    yield limit_row("log-probs", largest_distance(trained, exact), LOGPROB_LIMIT)
    oracle_rounded, oracle_experts = oracle(folder, "bfloat16")
    oracle_flips = flips(oracle_experts, experts)
    if FAMILIES[name].has_experts:
        [(_, own_experts)] = pool.run(routed_logprobs, str(folder), "bfloat16", None, world_size=1)
        [(rounded, _)] = pool.run(routed_logprobs, str(folder), "bfloat16", experts, world_size=1)
        num_flips = int(flips(own_experts, experts).sum())
        yield limit_row("log-probs, flips", num_flips, 2 * int(oracle_flips.sum()) + SPARE_FLIPS)
    else:
        rounded = reported(pool.run(logprobs, str(folder), ONE_RANK, "bfloat16", True, world_size=1))
    allowed = largest_distance(oracle_rounded, exact, without=oracle_flips)
    # Rounding is random: half as much again is not another model.
    yield limit_row("log-probs, bfloat16", largest_distance(rounded, exact), 1.5 * allowed)


YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 52}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": LLAMA3 | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": YARN,
    "yarn, no truncation": YARN | {"beta_fast": 8.0, "beta_slow": 2.0, "truncate": False},
    "yarn, factor 1.7": YARN | {"attention_factor": 1.7},
    "yarn, factor 0.6": YARN | {"attention_factor": 0.6},
    "yarn, equal mscales": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "yarn, other mscales": YARN | {"mscale": 0.707, "mscale_all_dim": 1.3},
}
"""Scaled rotary embeddings for the at least 2048 positions of the models."""
FRACTIONS = (None, 0.25, 0.5, 0.75, 1.0)
"""Values of partial_rotary_factor; None: the family's."""


def prove_rotary(name: str, folder: Path, pool: RankPool, work: Path) -> Found:
    # With smaller weights all scores are almost equal, so that their scale has little effect.
    wide = make_tiny_model(work / "wide", family=name, **{**SIZES, **FAMILIES[name].fields, "initializer_range": 0.08})
    for scaling, rope in SCALINGS.items():
        for fraction in FRACTIONS:
            partial = {} if fraction is None else {"partial_rotary_factor": fraction}
            scaled = with_rope(wide, work / f"{scaling} {fraction}", {"rope_theta": 1e4, **rope, **partial})
            yield {"layout": f"{scaling}, {fraction}"} | rotary_row(scaled, pool)


def rotary_row(folder: Path, pool: RankPool) -> dict[str, Any]:
    """Return a row comparing a trainer with transformers, or one with the reason why megarl refuses the folder."""
    try:
        read_model_shape(folder)
    except DataError as error:
        return refusal_row("rotary", str(error).partition("config.json: ")[2])
    trained = reported(pool.run(logprobs, str(folder), ONE_RANK, "float32", True, world_size=1))
    row = limit_row("rotary", largest_distance(trained, oracle(folder, "float32")[0]), ROTARY_LIMIT)
    del row["layout"]
    return row


def with_rope(folder: Path, target: Path, rope: Mapping[str, Any]) -> Path:
    """Return a copy of a model folder with other settings of rotary embeddings."""
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    config.get("text_config", config)["rope_parameters"] = rope
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return target


def flips(experts: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Return the tokens with other experts than `exact` in some layer, bool [tokens].

    Both arguments are [tokens, layers, top_k].
    """
    return (experts != exact).reshape(len(exact), -1).any(axis=1)


def prove_gradient(name: str, folder: Path, pool: RankPool, work: Path) -> Found:
    [parts] = pool.run(gradient, str(folder), world_size=1)
    yield gradient_row("gradient", invariance.join([parts]), oracle_gradient(folder, work))


def gradient_row(proof: str, gradient: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return a row with the distance of two gradients, relative to their norm."""
    norm = np.sqrt(sum(np.square(value).sum() for value in expected.values()))
    # Both are scaled to norm 1: the trainer's is clipped.
    scale = np.sqrt(sum(np.square(value, dtype=np.float64).sum() for value in gradient.values()))
    distance = np.sqrt(sum(np.square(expected[key] / norm - gradient[key] / scale).sum() for key in gradient))
    return limit_row(proof, float(distance), GRADIENT_LIMIT) | {"tensors": len(gradient)}


def prove_engine(name: str, folder: Path, pool: RankPool, work: Path) -> Found:
    trained = reported(pool.run(logprobs, str(folder), ONE_RANK, "float32", True, world_size=1))
    [sampled] = pool.run(engine_logprobs, str(folder), world_size=1)
    yield limit_row("engine", largest_distance(trained, sampled), FAMILIES[name].engine_limit)


def prove_packing(name: str, folder: Path, pool: RankPool, work: Path) -> Found:
    alone = reported(pool.run(logprobs, str(folder), ONE_RANK, "float32", False, world_size=1))
    for parallel in (ONE_RANK, ParallelConfig(tp=1, pp=1, dp=1, cp=2, rollout_tp=1)):
        results = pool.run(logprobs, str(folder), parallel, "float32", True, world_size=parallel.world_size)
        yield limit_row("packing", largest_distance(reported(results), alone), PACKING_LIMIT) | {
            "layout": str(parallel)
        }


def prove_conversion(name: str, folder: Path, pool: RankPool, work: Path) -> Found:
    from safetensors.torch import load_file

    from megarl.checkpoint.convert import to_hf, to_megatron

    sizes: dict[str, Any] = {"tp": 2, "pp": 2, **({"ep": 2} if FAMILIES[name].has_experts else {})}
    to_megatron(folder, work / "megatron", **sizes, verify=True)
    to_hf(work / "megatron", work / "hf", verify=True)
    source, converted = (
        {k: v for file in place.glob("*.safetensors") for k, v in load_file(file).items()}
        for place in (folder, work / "hf")
    )
    differing = sum(
        k not in converted or v.dtype != converted[k].dtype or not v.equal(converted[k]) for k, v in source.items()
    )
    yield limit_row("conversion", differing + len(converted.keys() - source.keys()), 0) | {"tensors": len(source)}


def prove_reshard(name: str, folder: Path, pool: RankPool, work: Path) -> Found:
    from tests.distributed.test_reshard import recipe_of

    row = FAMILIES[name]
    layouts = EXPERT_LAYOUTS if row.has_experts else DENSE_LAYOUTS
    fitting = [layout for layout in layouts if layout.etp == 1 or not row.has_expert_biases]
    yield from live_weights("reshard", lambda parallel: recipe_of(folder, parallel), fitting, pool, work)


def live_weights(
    proof: str, recipe_of: Callable[[ParallelConfig], Recipe], layouts: Sequence[ParallelConfig], pool: RankPool,
    work: Path,
) -> Found:  # fmt: skip
    """Yield a row per layout: the live tensors that differ from vLLM loading the export, after three updates."""
    from tests.distributed.test_reshard import train_reshard_and_compare

    for number, parallel in enumerate(layouts):
        exported = str(work / f"{proof} {number}" / "hf")
        results = pool.run(
            train_reshard_and_compare, recipe_of(parallel), parallel, exported, 3, timeout_seconds=900,
            world_size=parallel.world_size,
        )  # fmt: skip
        yield limit_row(proof, sum(map(len, results)), 0) | {"layout": str(parallel)}


def prove_layouts(name: str, folder: Path, pool: RankPool, work: Path) -> Found:
    yield from alike("layouts", name, folder, pool, INVARIANCE[FAMILIES[name].has_experts], "token_mean")


def alike(
    proof: str, name: str, folder: Path, pool: RankPool, layouts: Sequence[str], *objectives: str
) -> Iterator[dict[str, Any]]:
    """Yield a row per layout and objective of `tests/training/invariance.py`."""
    row = FAMILIES[name]
    layouts = [layout for layout in layouts if "etp" not in layout or not row.has_expert_biases]
    model = "moe" if row.has_experts else "dense"
    # Later steps raise rounding of small gradients (dt_bias of delta-nets). Proofs of several losses make one step.
    num_steps = invariance.NUM_STEPS if len(objectives) == 1 else 1
    for line in invariance.check(model, folder, pool, layouts, objectives, num_steps):
        worst = max(line["loss"], line["grad_norm"], line["parameter"])
        title = proof if len(objectives) == 1 else f"{proof}, {line['objective']}"
        shown = {"proof": title, "layout": line["layout"], "found": worst, "limit": "invariance", "met": line["met"]}
        yield shown | ({} if line["met"] else {"worst": line["worst_parameter"]})


def prove_drafts(name: str, folder: Path, pool: RankPool, work: Path) -> Found:
    if name not in WITH_MTP:
        yield refusal_row("drafts", "the family has no MTP layer")
        return
    from tests.distributed.test_reshard import drafting_recipe_of
    from tests.engine.test_mtp_drafts import sampled
    from tests.training.parts.test_mtp import COEFFICIENT, oracle, recipe_of, updated

    fields: dict[str, Any] = {**SIZES, **FAMILIES[name].fields, "num_mtp_layers": 1}
    trained = make_tiny_model(work / "trained", family=name, **fields)
    # A wide spread of weights makes decided predictions: rounding does not change the most probable token. Its
    # gradients round more, so those are compared with the usual spread.
    with_mtp = make_tiny_model(work / "mtp", family=name, **fields, initializer_range=0.1)
    alone, together = (
        pool.run(updated, recipe_of(trained, coefficient), ONE_RANK, None, world_size=1)[0]
        for coefficient in (None, COEFFICIENT)
    )
    gradients = invariance.join([together["gradients"]])
    _, expected = oracle(trained)
    yield gradient_row("drafts, gradient", {key: gradients[key] for key in expected}, expected)
    both = [{**invariance.join([result["weights"]]), **_rows(result["logprobs"])} for result in (alone, together)]
    differing = sum(not np.array_equal(value, both[1][key]) for key, value in both[0].items())
    yield limit_row("drafts, policy", differing, 0) | {"tensors": len(both[0])}
    for row in prove_conversion(name, with_mtp, pool, work):
        yield row | {"proof": "drafts, conversion"}
    layouts = (ONE_RANK, ParallelConfig(tp=2, pp=1, dp=1, rollout_tp=1), ParallelConfig(tp=1, pp=2, dp=1, rollout_tp=2))
    yield from live_weights("drafts, reshard", lambda layout: drafting_recipe_of(with_mtp, layout), layouts, pool, work)
    for tp, num_drafts in ((1, 2), (2, 3)):
        runs = pool.run(sampled, str(with_mtp), tp, num_drafts, world_size=tp)[0]
        layout = {"layout": f"vLLM tp {tp}, {num_drafts} drafts"}
        plain = runs["plain"]["whole"]["whole"]
        for run in ("whole", "fed"):
            drafted = runs["drafts"][run][run]
            yield limit_row("drafts, tokens", int((drafted.token_ids != plain.token_ids).sum()), 0) | layout
            distance = float(np.abs(drafted.rollout_logprobs - plain.rollout_logprobs).max())
            yield limit_row("drafts, log-probs", distance, DRAFTS_LIMIT) | layout


def _rows(logprobs: list[np.ndarray]) -> dict[str, np.ndarray]:
    return {f"row {number}": row for number, row in enumerate(logprobs)}


def prove_learning(name: str, folder: Path, pool: RankPool, work: Path) -> Found:
    # One folder for all families, so that Qwen3 is trained once.
    runs = work.parent / "learning"
    if not runs.exists():
        make_dataset(runs / "runs/quickstart_input/data", train=600, heldout=64, sft=2000)
        (runs / "number_of_digits.py").write_text(NUMBER_OF_DIGITS)
    gains = {family: _gain(family, runs) for family in dict.fromkeys(("qwen3", name))}
    yield {
        "proof": "learning", "layout": "two ranks", "found": gains[name], "limit": LEAST_GAIN * gains["qwen3"],
        "met": gains[name] >= LEAST_GAIN * gains["qwen3"] > 0,
    }  # fmt: skip


def _gain(name: str, work: Path) -> float:
    """Return the rise of the mean reward over 10 steps, from the first two steps to the last two."""
    run = work / "runs" / f"{name}_rl"
    if not run.exists():
        _warm_up_and_reinforce(name, work)
    rewards = [step["reward/mean"] for step in read_metrics(run) if "reward/mean" in step]
    return float(np.mean(rewards[-2:]) - np.mean(rewards[:2]))


def _warm_up_and_reinforce(name: str, work: Path) -> None:
    """Train a tiny model in the folder `runs` of `work`: 100 steps of SFT, then 10 of reinforcement learning."""
    # A delta-net needs three layers of its kind before the first attention.
    num_layers = 4 if name in WITH_DELTA_NETS else 2
    sizes = {"num_layers": num_layers, "initializer_range": 0.08}
    make_tiny_model(work / "runs" / name, family=name, **{**sizes, **FAMILIES[name].fields})
    split = ("trainer.ep=2", "trainer.router_replay=true") if FAMILIES[name].has_experts else ()
    student = (f"model.path=runs/{name}", f"name={name}_sft", "train.steps=100", *split[:1])
    train("launch/recipes/quickstart_sft.yaml", *student, folder=work)
    policy = (
        f"model.path=runs/{name}_sft/hf",
        f"name={name}_rl",
        "train.steps=10",
        "train.prompts_per_step=16",
        *split,
    )
    train("launch/recipes/tiny_rl.yaml", *policy, "reward.functions=[number_of_digits:digits]", folder=work)


def prove_replay(name: str, folder: Path, pool: RankPool, work: Path) -> Found:
    if not FAMILIES[name].has_experts:
        yield refusal_row("replay", "the family has no experts")
        return
    [(sampled, experts)] = pool.run(sample, str(folder), world_size=1)
    [(_, recorded)] = pool.run(replay, str(folder), ONE_RANK, sampled, None, world_size=1)
    yield limit_row("replay, choices", differing_choices(sampled, experts, recorded), 0)
    # Other experts for every token, so that a trainer that ignores them is found out.
    changed_experts = [(choices + 1) % num_experts_of(folder) for choices in experts]
    results, moved = [], []
    for parallel in (ONE_RANK, SPLIT[True]):
        case = str(folder), parallel, sampled
        replayed, changed = (
            reported(
                [rank_logprobs for rank_logprobs, _ in pool.run(replay, *case, routes, world_size=parallel.world_size)]
            )
            for routes in (experts, changed_experts)
        )
        distance = max(
            np.abs(rank_logprobs - sequence.rollout_logprobs)[sequence.loss_mask].max()
            for rank_logprobs, sequence in zip(replayed, sampled, strict=True)
        )
        yield limit_row("replay", float(distance), LOGPROB_LIMIT) | {"layout": str(parallel)}
        results.append(changed)
        moved.append(largest_distance(replayed, changed))
    row = limit_row("replay, others", largest_distance(*results), LOGPROB_LIMIT) | {"layout": str(SPLIT[True])}
    yield row | {"met": row["met"] and min(moved) >= LEAST_CHANGE}


def num_experts_of(folder: Path) -> int:
    from megarl.families.shape import read_model_shape

    return read_model_shape(folder).num_experts


def differing_choices(
    sampled: Sequence[TrainingSequence], experts: Sequence[np.ndarray], recorded: Mapping[int, np.ndarray]
) -> int:
    """Return for how many tokens and layers engine and trainer chose other experts.

    Shapes: experts [tokens - 1, layers, top_k] for each sequence, recorded [tokens of all sequences, top_k] by layer.
    """
    starts = np.cumsum([0, *map(len, sampled)])
    count = 0
    for start, choices in zip(starts, experts, strict=False):
        for layer, numbers in recorded.items():
            rows = numbers[start : start + len(choices)]
            count += int((np.sort(rows, axis=1) != np.sort(choices[:, layer], axis=1)).any(axis=1).sum())
    return count


def prove_critic(name: str, folder: Path, pool: RankPool, work: Path) -> Found:
    from megarl.families.shape import read_model_shape
    from megarl.types import DataError

    try:
        shape = read_model_shape(folder).with_value_head()
    except DataError as error:
        yield refusal_row("critic", str(error))
        return
    head = invariance.value_head(shape.hidden_size)
    exact = oracle_values(folder, head)
    largest = float(max(np.abs(values).max() for values in exact))
    for parallel in (ONE_RANK, SPLIT[FAMILIES[name].has_experts]):
        out = work / f"critic {parallel.world_size}"
        ranks = pool.run(train_and_export, str(folder), parallel, str(out), True, world_size=parallel.world_size)
        values = reported([rank["before"] for rank in ranks])
        yield limit_row("critic, values", largest_distance(values, exact) / largest, LOGPROB_LIMIT) | {
            "layout": str(parallel)
        }
        if parallel is ONE_RANK:
            gradient = invariance.join([rank["gradient"] for rank in ranks])
            yield gradient_row("critic, gradient", gradient, oracle_gradient(folder, work, head))
            continue
        [read] = pool.run(stored_parts, str(out), world_size=1)
        stored, loaded = invariance.join([rank["tensors"] for rank in ranks]), invariance.join([read])
        differing = len(stored.keys() ^ loaded.keys()) + sum(not np.array_equal(stored[k], loaded[k]) for k in stored)
        yield limit_row("critic, export", differing, 0) | {"layout": str(parallel), "tensors": len(stored)}
        trained = reported([rank["after"] for rank in ranks])
        distance = largest_distance(trained, oracle_values(out)) / largest
        yield limit_row("critic, export", distance, LOGPROB_LIMIT) | {"layout": "transformers"}
    split = ["pp2 ep2 dp2"] if FAMILIES[name].has_experts else ["tp2 pp2"]
    yield from alike("critic", name, folder, pool, split, "critic", "reward model")


def prove_preference(name: str, folder: Path, pool: RankPool, work: Path) -> Found:
    split = ["pp2 ep2 dp2", "tp2"] if FAMILIES[name].has_experts else ["tp2 pp2", "cp2"]
    yield from alike("preference", name, folder, pool, split, "dpo", "sft")


def prove_lora(name: str, folder: Path, pool: RankPool, work: Path) -> Found:
    from megarl.families.shape import read_model_shape
    from megarl.preflight.algorithm.learning import check_adapters
    from tests.training.parts.test_lora import lora_recipe, trained
    from tests.training.parts.test_lora_saved import export
    from tests.training.test_training_engine import distance, make_updates

    shape = read_model_shape(folder)
    attention = {"targets": ["qkv_proj", "o_proj"]}
    lora: dict[str, Any] = {}
    for reason in check_adapters(lora_recipe(folder), shape):
        yield refusal_row("lora", str(reason))
        lora = attention
    parallel = SPLIT[FAMILIES[name].has_experts]
    recipe = lora_recipe(folder, lora=lora)
    sizes = {axis: getattr(parallel, axis) for axis in ("tp", "pp", "ep")}
    alone, split = (trained(pool, recipe, sizes_of_run) for sizes_of_run in ({}, sizes))
    step = {key: (split["metrics"][0][key], alone["metrics"][0][key]) for key in ("train/loss", "train/grad_norm")}
    worst = max(abs(split_value - value) / abs(value) for split_value, value in step.values())
    largest = max(worst, float(distance(split["gradient"], alone["gradient"])))
    row = limit_row("lora, step", largest, invariance.LOSS_LIMIT)
    yield row | {"layout": str(parallel), "tensors": len(alone["adapters"])}
    has_peft = importlib.util.find_spec("peft") is not None
    # PEFT 0.21 loads adapters of experts without an error, but computes other log-probs (megarl.checkpoint.peft).
    for targets in [lora, attention] if FAMILIES[name].has_experts and lora != attention else [lora]:
        recipe = lora_recipe(folder, lora=targets, loop="sft")
        updates, out = make_updates(recipe, shape.vocab_size), work / f"adapted {len(targets)}"
        ranks = pool.run(export, recipe, parallel, updates, out, world_size=parallel.world_size)
        merged = adapted_distance(out / "hf", None, updates[0], ranks)
        yield limit_row("lora, merged", merged, LOGPROB_LIMIT) | {"layout": str(parallel)}
        if has_peft and (targets or not FAMILIES[name].has_experts):
            by_peft = adapted_distance(folder, out / "adapter", updates[0], ranks)
            yield limit_row("lora, PEFT", by_peft, LOGPROB_LIMIT) | {"layout": " ".join(recipe.lora.targets)}
    if not has_peft:
        yield refusal_row("lora, PEFT", "the package peft is not installed")


def adapted_distance(
    folder: Path, adapter: Path | None, trained: Sequence[TrainingSequence], ranks: Sequence[tuple[Any, Any, bool]]
) -> float:
    """Return the largest distance of log-probs of the trainer's ranks from transformers with a PEFT adapter, if any."""
    import json

    import torch
    import transformers

    from tests.token_batches import by_sequence

    # Adapters have the names of the whole model, a vision tower included. AutoModelForCausalLM reads the text alone.
    [architecture] = json.loads((folder / "config.json").read_text())["architectures"]
    model = (
        getattr(transformers, architecture)
        .from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
        .eval()
    )
    if adapter is not None:
        import peft

        model = peft.PeftModel.from_pretrained(model, adapter, autocast_adapter_dtype=False).double().eval()
    by_number = {
        i: value for rows, row_logprobs, _ in ranks for i, value in by_sequence(trained, rows, row_logprobs).items()
    }
    return largest_distance(
        [by_number[number] for number in range(len(trained))], oracle_logprobs(model, trained, torch.float64)
    )


def prove_export(name: str, folder: Path, pool: RankPool, work: Path) -> Found:
    parallel = SPLIT[FAMILIES[name].has_experts]
    ranks = pool.run(train_and_export, str(folder), parallel, str(work / "hf"), False, world_size=parallel.world_size)
    before, after = (reported([rank[when] for rank in ranks]) for when in ("before", "after"))
    row = limit_row("export, transformers", largest_distance(after, oracle(work / "hf", "float32")[0]), LOGPROB_LIMIT)
    yield row | {"layout": str(parallel), "met": row["met"] and largest_distance(before, after) >= LEAST_CHANGE}
    [sampled] = pool.run(engine_logprobs, str(work / "hf"), world_size=1)
    yield limit_row("export, vLLM", largest_distance(after, sampled), LOGPROB_LIMIT) | {"layout": str(parallel)}
    differing = tensors_in(folder).keys() ^ tensors_in(work / "hf").keys()
    yield limit_row("export, names", len(differing), 0) | {"layout": str(parallel)}


PROOFS: dict[str, Callable[[str, Path, RankPool, Path], Found]] = {
    "log-probs": prove_logprobs,
    "rotary": prove_rotary,
    "gradient": prove_gradient,
    "engine": prove_engine,
    "packing": prove_packing,
    "conversion": prove_conversion,
    "reshard": prove_reshard,
    "layouts": prove_layouts,
    "drafts": prove_drafts,
    "learning": prove_learning,
    "replay": prove_replay,
    "critic": prove_critic,
    "preference": prove_preference,
    "lora": prove_lora,
    "export": prove_export,
}


def limit_row(proof: str, difference: float, limit: float) -> dict[str, Any]:
    """Return a row of the table."""
    return {"proof": proof, "layout": "one rank", "found": difference, "limit": limit, "met": difference <= limit}


def refusal_row(proof: str, reason: str) -> dict[str, Any]:
    """Return a row of a proof that a family has no place for."""
    return {"proof": proof, "layout": f"refused: {reason}", "found": "-", "limit": "-"}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", action="append", choices=FAMILIES, help="check this family; repeatable")
    parser.add_argument("--proof", action="append", choices=PROOFS, help="make this proof; repeatable")


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as work, RankPool(4) as pool:
        for name in options.only or FAMILIES:
            folder = make_tiny_model(Path(work) / name, family=name, **{**SIZES, **FAMILIES[name].fields})
            for proof in options.proof or PROOFS:
                proof_folder = Path(work) / f"{name} {proof}"
                proof_folder.mkdir()
                for row in PROOFS[proof](name, folder, pool, proof_folder):
                    yield {"family": name, **row}
