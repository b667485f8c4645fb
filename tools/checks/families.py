"""Each model family is trained, sampled, resharded and converted as transformers and vLLM compute it.

Tiny random models on CPU ranks, in float32 unless a row says otherwise. A row per family, proof and layout, with the
largest difference found and its limit. To add a family, add its line to `FAMILIES`.

- log-probs: trainer against transformers; in bfloat16 beside transformers' own distance from float32. Rounding also
  flips experts with almost equal scores, and one flip moved a log-prob ten times as far. So the trainer's bfloat16 pass
  replays the experts of transformers' float32 pass, and tokens flipped in transformers do not set the limit. A row of
  its own counts the tokens flipped without replay
- gradient: trainer against transformers in float64, relative to its norm
- engine: trainer's log-probs against vLLM's
- packing: sequences in one row against each alone, also under context parallelism
- conversion: Hugging Face to Megatron and back, bit for bit, with tensors that are not trained
- reshard: live weights and buffers after three updates against vLLM loading the export, bit for bit
- layouts: three policy updates in several layouts against one rank, see the check `invariance`
- drafts: the layer for multi-token prediction: its gradient, the policy with and without its loss, conversion, reshards
  into live drafters, and greedy tokens with drafts
- learning: rise of the reward over 10 steps of a recipe, with replayed routers, beside Qwen3's
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from megarl.config.parallel import ParallelConfig
from megarl.data.token_batch import TokenBatch
from megarl.testing import RankPool
from megarl.types import TrainingSequence
from tools.checks import invariance
from tools.make_dataset import make_dataset
from tools.make_tiny_model import WITH_DELTA_NETS, WITH_MTP, make_tiny_model
from tools.runs import read_metrics, train

if TYPE_CHECKING:
    from megarl.training.model import ModelShard

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
LENGTHS = (24, 7, 31, 2)
LEAST_GAIN = 0.5
"""Share of Qwen3's rise of the reward. Ten steps of 64 samples are noisy."""
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
DRAFTS_LIMIT = 5e-5
"""In nats, in float32: products of several tokens round otherwise than those of one."""
SPARE_FLIPS = 3
"""Tokens of 64 that may flip beyond twice those of transformers. Few flips are a matter of chance."""

_ONE = ParallelConfig(tp=1, pp=1, dp=1, rollout_tp=1)
DENSE_LAYOUTS = (
    _ONE,
    ParallelConfig(tp=2, pp=1, dp=1, rollout_tp=1),
    ParallelConfig(tp=1, pp=2, dp=1, rollout_tp=2),
    ParallelConfig(tp=1, pp=1, dp=2, rollout_tp=2),
    ParallelConfig(tp=1, pp=1, dp=1, cp=2, rollout_tp=2),
    ParallelConfig(tp=2, pp=2, dp=1, rollout_tp=2),
    ParallelConfig(tp=1, pp=2, dp=1, rollout_tp=1, vpp=2),
    ParallelConfig(tp=4, pp=1, dp=1, rollout_tp=2),
)
EXPERT_LAYOUTS = (
    _ONE,
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


def sequences(vocab_size: int) -> list[TrainingSequence]:
    """Return random sequences of `LENGTHS`; every token but the first is trained."""
    # Token 0 is left out: transformers gives the padding token no gradient.
    tokens = np.random.default_rng(7).integers(1, vocab_size, sum(LENGTHS))
    parts = np.split(tokens, np.cumsum(LENGTHS)[:-1])
    return [TrainingSequence(part, np.arange(len(part)) > 0) for part in parts]


def weighed(vocab_size: int) -> TokenBatch:
    """Return the sequences as one row whose loss is the mean over trained tokens."""
    from megarl.config import AlgorithmConfig
    from megarl.rollout.rl_batch import assign_token_weights

    batch = TokenBatch.from_sequences(sequences(vocab_size))
    assign_token_weights(batch, AlgorithmConfig(aggregation="token_mean"), max(LENGTHS))
    return batch


def model_shard(folder: str, layout: ParallelConfig, dtype: str, **settings: Any) -> ModelShard:
    """Return this rank's shard of a trainer's model with the weights of a folder."""
    import torch.distributed as dist

    from megarl.checkpoint import safetensors
    from megarl.families.shape import padded_vocab_size, read_model_shape
    from megarl.reshard.layouts.megatron import megatron_layouts
    from megarl.training.model import ModelShard

    recipe = invariance.recipe_of(Path(folder), {})
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"dtype": dtype})})
    shape = read_model_shape(folder)
    pieces = megatron_layouts(shape, layout, padded_vocab_size=padded_vocab_size(shape.vocab_size, layout.tp))
    return ModelShard(
        recipe, layout, shape, lambda tensors: safetensors.load(folder, pieces[dist.get_rank()], tensors), **settings
    )


def logprobs(folder: str, layout: ParallelConfig, dtype: str, in_one_row: bool) -> list[np.ndarray] | None:
    """Return a trainer's log-probs of each sequence, on reporting ranks."""
    model = model_shard(folder, layout, dtype)
    own = sequences(model.shape.vocab_size)
    rows = [TokenBatch.from_sequences(own)] if in_one_row else [TokenBatch.from_sequences([one]) for one in own]
    found = model.forward(rows)
    if found is None:
        return None
    return np.split(found[0], np.cumsum(LENGTHS)[:-1]) if in_one_row else list(found)


def routed_logprobs(folder: str, dtype: str, replayed: np.ndarray | None) -> tuple[list[np.ndarray], np.ndarray]:
    """Return one rank's log-probs of each sequence, and the experts of each token.

    Experts are int64 [tokens, layers with experts, top_k], ascending. With `replayed`, of the same shape, the model
    uses these experts instead of its routers' choices.
    """
    import torch
    from megatron.core.transformer.moe.router import TopKRouter

    model = model_shard(folder, _ONE, dtype, router_replay=replayed is not None)
    chosen: list[np.ndarray] = []
    [chunk] = model.chunks
    for router in (module for module in chunk.modules() if isinstance(module, TopKRouter)):
        # A router returns probabilities and a mask of the chosen experts, both [tokens, experts].
        router.register_forward_hook(lambda _module, _inputs, output: chosen.append(chosen_experts(output[1])))
    if replayed is not None:
        chunk.replay_routes(torch.from_numpy(replayed), model.expert_layers)
    found = model.forward([TokenBatch.from_sequences(sequences(model.shape.vocab_size))])
    assert found is not None
    return np.split(found[0], np.cumsum(LENGTHS)[:-1]), np.stack(chosen, axis=1)


def chosen_experts(mask: Any) -> np.ndarray:
    """Return the experts [tokens, top_k], ascending, of a mask [tokens, experts]. All tokens have as many."""
    return mask.bool().nonzero()[:, 1].view(len(mask), -1).numpy()


def gradient(folder: str) -> dict[str, Any]:
    """Return what one rank holds of the gradient of each tensor."""
    from dataclasses import replace

    from megarl.training.objective import supervised

    engine, _, pieces = invariance.build(invariance.recipe_of(Path(folder), {}), _ONE, False)
    engine.role = replace(engine.role, objective=supervised)
    engine.update([weighed(engine.shape.vocab_size)])
    # Megatron gives its parameters this attribute.
    gradients: dict[str, Any] = {name: value.main_grad for name, value in engine.parameters.items()}
    # The optimizer has clipped the gradients to a norm.
    return invariance.cut_out([piece for piece in pieces if piece.storage in gradients], gradients)


def engine_logprobs(folder: str) -> list[np.ndarray]:
    """Return the engine's log-probs of each sequence."""
    from safetensors.torch import load_file

    from megarl.config import RolloutConfig
    from megarl.engine.engine import RolloutEngine
    from megarl.families.shape import read_model_shape
    from megarl.reshard.layouts.packed import checkpoint_tensors

    config = RolloutConfig(kv_cache_gib=0.05)
    engine = RolloutEngine(folder, config, max_model_len=64, dtype="float32", seed=0)
    shape = read_model_shape(folder)
    stored = load_file(f"{folder}/model.safetensors")
    # Kept tensors, of a vision tower for example, are not the engine's.
    engine.load_tensors((name, stored[name]) for name in checkpoint_tensors(shape))
    found = []
    for one in sequences(shape.vocab_size):
        found.append(engine.prompt_logprobs(one.token_ids))
    engine.close()
    return found


def oracle(folder: Path, dtype: str) -> tuple[list[np.ndarray], np.ndarray]:
    """Return transformers' log-probs of each sequence, the first of each 0, and the experts of each token.

    Experts are int64 [tokens, layers with experts, top_k], ascending. A model without experts has none: [tokens, 0].
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    chosen: dict[str, list[np.ndarray]] = {}
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            # Arguments of transformers' experts: hidden states, chosen experts [tokens, top_k], their weights.
            module.register_forward_pre_hook(
                lambda _module, inputs, name=name: chosen.setdefault(name, []).append(inputs[1].sort(-1)[0].numpy())
            )
    found = []
    for one in sequences(model.config.vocab_size):
        tokens = torch.from_numpy(one.token_ids)
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, :-1].float()
        own = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0].numpy()
        found.append(np.concatenate([[0.0], own]))
    layers = [np.concatenate(of_sequences) for of_sequences in chosen.values()]
    return found, np.stack(layers, axis=1) if layers else np.zeros((sum(LENGTHS), 0))


def oracle_gradient(folder: Path, work: Path) -> dict[str, np.ndarray]:
    """Return transformers' gradient of the same loss in float64, by the checkpoint's names."""
    import torch
    from transformers import AutoModelForCausalLM

    from megarl.families import float32_tensors
    from megarl.families.shape import read_model_shape

    # The eager implementation of experts: grouped products have no float64 kernel.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager").eval()
    total = sum(LENGTHS) - len(LENGTHS)
    for one in sequences(model.config.vocab_size):
        tokens = torch.from_numpy(one.token_ids)
        logits = model(tokens[None]).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="sum") / total
        loss.backward()
    for parameter in model.parameters():
        # An expert that no token chose has no gradient.
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    # Saving renames packed parameters to those of the checkpoint.
    model.save_pretrained(work / "gradient")
    saved = invariance.stored_tensors(work / "gradient" / "model.safetensors", folder)
    # Buffers have no gradient, but they are saved too.
    return {name: value for name, value in saved.items() if name not in float32_tensors(read_model_shape(folder))}


def apart(one: list[np.ndarray], other: list[np.ndarray], without: np.ndarray | None = None) -> float:
    """Return the largest distance of log-probs; the first of each sequence does not count.

    Log-probs computed at the tokens `without`, bool [tokens of all sequences], do not count either.
    """
    left_out = np.split(np.zeros(sum(LENGTHS), bool) if without is None else without, np.cumsum(LENGTHS)[:-1])
    # The log-prob of a token is computed at the token before it.
    pairs = zip(one, other, left_out, strict=True)
    return float(max(np.abs(a[1:] - b[1:])[~out[:-1]].max(initial=0.0) for a, b, out in pairs))


def reported(results: list[list[np.ndarray] | None]) -> list[np.ndarray]:
    return next(result for result in results if result is not None)


Found = Iterator[dict[str, Any]]


def prove_logprobs(name: str, folder: Path, pool: RankPool, work: Path) -> Found:
    exact, experts = oracle(folder, "float32")
    own = reported(pool.run(logprobs, str(folder), _ONE, "float32", True, world_size=1))
    yield limited("log-probs", apart(own, exact), LOGPROB_LIMIT)
    oracle_rounded, oracle_experts = oracle(folder, "bfloat16")
    oracle_flips = flips(oracle_experts, experts)
    if FAMILIES[name].has_experts:
        [(_, own_experts)] = pool.run(routed_logprobs, str(folder), "bfloat16", None, world_size=1)
        [(rounded, _)] = pool.run(routed_logprobs, str(folder), "bfloat16", experts, world_size=1)
        num_flips = int(flips(own_experts, experts).sum())
        yield limited("log-probs, flips", num_flips, 2 * int(oracle_flips.sum()) + SPARE_FLIPS)
    else:
        rounded = reported(pool.run(logprobs, str(folder), _ONE, "bfloat16", True, world_size=1))
    allowed = apart(oracle_rounded, exact, without=oracle_flips)
    # Rounding is random: half as much again is not another model.
    yield limited("log-probs, bfloat16", apart(rounded, exact), 1.5 * allowed)


def flips(experts: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Return the tokens with other experts than `exact` in some layer, bool [tokens].

    Both arguments are [tokens, layers, top_k].
    """
    return (experts != exact).reshape(len(exact), -1).any(axis=1)


def prove_gradient(name: str, folder: Path, pool: RankPool, work: Path) -> Found:
    expected = oracle_gradient(folder, work)
    [parts] = pool.run(gradient, str(folder), world_size=1)
    own = invariance.join([parts])
    norm = np.sqrt(sum(np.square(value).sum() for value in expected.values()))
    # Both are scaled to norm 1: the trainer's is clipped.
    scale = np.sqrt(sum(np.square(value, dtype=np.float64).sum() for value in own.values()))
    distance = np.sqrt(sum(np.square(expected[key] / norm - own[key] / scale).sum() for key in own))
    yield limited("gradient", float(distance), GRADIENT_LIMIT) | {"tensors": len(own)}


def prove_engine(name: str, folder: Path, pool: RankPool, work: Path) -> Found:
    own = reported(pool.run(logprobs, str(folder), _ONE, "float32", True, world_size=1))
    [sampled] = pool.run(engine_logprobs, str(folder), world_size=1)
    yield limited("engine", apart(own, sampled), FAMILIES[name].engine_limit)


def prove_packing(name: str, folder: Path, pool: RankPool, work: Path) -> Found:
    alone = reported(pool.run(logprobs, str(folder), _ONE, "float32", False, world_size=1))
    for layout in (_ONE, ParallelConfig(tp=1, pp=1, dp=1, cp=2, rollout_tp=1)):
        results = pool.run(logprobs, str(folder), layout, "float32", True, world_size=layout.world_size)
        yield limited("packing", apart(reported(results), alone), PACKING_LIMIT) | {"layout": str(layout)}


def prove_conversion(name: str, folder: Path, pool: RankPool, work: Path) -> Found:
    from safetensors.torch import load_file

    from megarl.checkpoint.convert import to_hf, to_megatron

    sizes: dict[str, Any] = {"tp": 2, "pp": 2, **({"ep": 2} if FAMILIES[name].has_experts else {})}
    to_megatron(folder, work / "megatron", **sizes, verify=True)
    to_hf(work / "megatron", work / "hf", verify=True)
    one, other = (
        {k: v for file in at.glob("*.safetensors") for k, v in load_file(file).items()} for at in (folder, work / "hf")
    )
    differing = sum(k not in other or v.dtype != other[k].dtype or not v.equal(other[k]) for k, v in one.items())
    yield limited("conversion", differing + len(other.keys() - one.keys()), 0) | {"tensors": len(one)}


def prove_reshard(name: str, folder: Path, pool: RankPool, work: Path) -> Found:
    from tests.distributed.test_reshard import recipe_of, train_reshard_and_compare

    row = FAMILIES[name]
    layouts = EXPERT_LAYOUTS if row.has_experts else DENSE_LAYOUTS
    for number, layout in enumerate(at for at in layouts if at.etp == 1 or not row.has_expert_biases):
        exported = str(work / f"export{number}" / "hf")
        results = pool.run(
            train_reshard_and_compare, recipe_of(folder, layout), layout, exported, 3, timeout_seconds=900,
            world_size=layout.world_size,
        )  # fmt: skip
        yield limited("reshard", sum(map(len, results)), 0) | {"layout": str(layout)}


def prove_layouts(name: str, folder: Path, pool: RankPool, work: Path) -> Found:
    has_experts = FAMILIES[name].has_experts
    kind = "moe" if has_experts else "dense"
    layouts = [at for at in INVARIANCE[has_experts] if "etp" not in at or not FAMILIES[name].has_expert_biases]
    for row in invariance.check(kind, folder, pool, layouts, ["token_mean"]):
        worst = max(row["loss"], row["grad_norm"], row["parameter"])
        yield {"proof": "layouts", "layout": row["layout"], "found": worst, "limit": "invariance", "met": row["met"]}


def prove_drafts(name: str, folder: Path, pool: RankPool, work: Path) -> Found:
    if name not in WITH_MTP:
        return
    from tests.distributed.test_reshard import drafting_recipe_of, train_reshard_and_compare
    from tests.engine.test_mtp_drafts import sampled
    from tests.training.test_mtp import COEFFICIENT, oracle, recipe_of, updated

    # A wide spread of weights makes decided predictions: rounding does not change the most probable token.
    fields: dict[str, Any] = {**SIZES, **FAMILIES[name].fields, "initializer_range": 0.1, "num_mtp_layers": 1}
    own = make_tiny_model(work / "mtp", family=name, **fields)
    alone, together = (
        pool.run(updated, recipe_of(own, coefficient), _ONE, None, world_size=1)[0]
        for coefficient in (None, COEFFICIENT)
    )
    gradients = invariance.join([together["gradients"]])
    _, expected = oracle(own)
    # Gradients in `main_grad` are clipped in place, all by one factor.
    norms = [
        np.sqrt(sum(np.square(found[key], dtype=np.float64).sum() for key in expected))
        for found in (gradients, expected)
    ]
    apart_by = [np.square(gradients[key] / norms[0] - value / norms[1]).sum() for key, value in expected.items()]
    yield limited("drafts, gradient", float(np.sqrt(sum(apart_by))), GRADIENT_LIMIT) | {"tensors": len(expected)}
    both = [{**invariance.join([found["weights"]]), **_rows(found["logprobs"])} for found in (alone, together)]
    differing = sum(not np.array_equal(value, both[1][key]) for key, value in both[0].items())
    yield limited("drafts, policy", differing, 0) | {"tensors": len(both[0])}
    for row in prove_conversion(name, own, pool, work):
        yield row | {"proof": "drafts, conversion"}
    layouts = (_ONE, ParallelConfig(tp=2, pp=1, dp=1, rollout_tp=1), ParallelConfig(tp=1, pp=2, dp=1, rollout_tp=2))
    for number, layout in enumerate(layouts):
        exported = str(work / f"drafts{number}" / "hf")
        results = pool.run(
            train_reshard_and_compare, drafting_recipe_of(own, layout), layout, exported, 3, timeout_seconds=900,
            world_size=layout.world_size,
        )  # fmt: skip
        yield limited("drafts, reshard", sum(map(len, results)), 0) | {"layout": str(layout)}
    [found] = pool.run(sampled, str(own), 1, 2, world_size=1)
    plain = found["plain"]["whole"]["whole"]
    for run in ("whole", "fed"):
        drafted = found["drafts"][run][run]
        yield limited("drafts, tokens", int((drafted.token_ids != plain.token_ids).sum()), 0)
        distance = float(np.abs(drafted.rollout_logprobs - plain.rollout_logprobs).max())
        yield limited("drafts, log-probs", distance, DRAFTS_LIMIT)


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


PROOFS: dict[str, Callable[[str, Path, RankPool, Path], Found]] = {
    "log-probs": prove_logprobs,
    "gradient": prove_gradient,
    "engine": prove_engine,
    "packing": prove_packing,
    "conversion": prove_conversion,
    "reshard": prove_reshard,
    "layouts": prove_layouts,
    "drafts": prove_drafts,
    "learning": prove_learning,
}


def limited(proof: str, found: float, limit: float) -> dict[str, Any]:
    """Return a row of the table."""
    return {"proof": proof, "layout": "one rank", "found": found, "limit": limit, "met": found <= limit}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", action="append", choices=FAMILIES, help="check this family; repeatable")
    parser.add_argument("--proof", action="append", choices=PROOFS, help="make this proof; repeatable")


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as work, RankPool(4) as pool:
        for name in options.only or FAMILIES:
            folder = make_tiny_model(Path(work) / name, family=name, **{**SIZES, **FAMILIES[name].fields})
            for proof in options.proof or PROOFS:
                own = Path(work) / f"{name} {proof}"
                own.mkdir()
                for row in PROOFS[proof](name, folder, pool, own):
                    yield {"family": name, **row}
