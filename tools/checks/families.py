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
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
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
LEAST_CHANGE = 1e-3
"""Nats by which other experts change some log-prob, at least."""

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
SPLIT = {
    False: ParallelConfig(tp=2, pp=2, dp=1, rollout_tp=1),
    True: ParallelConfig(tp=2, pp=2, dp=1, rollout_tp=1, ep=2),
}
"""The layout of proofs with one split layout, by whether the family has experts."""


def sequences(vocab_size: int) -> list[TrainingSequence]:
    """Return random sequences of `LENGTHS`, with returns for critics; every token but the first is trained."""
    random, ends = np.random.default_rng(7), np.cumsum(LENGTHS)[:-1]
    # Token 0 is left out: transformers gives the padding token no gradient.
    tokens = np.split(random.integers(1, vocab_size, sum(LENGTHS)), ends)
    returns = np.split(random.normal(size=sum(LENGTHS)).astype(np.float32), ends)
    return [
        TrainingSequence(part, np.arange(len(part)) > 0, values=goal, returns=goal)
        for part, goal in zip(tokens, returns, strict=True)
    ]


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
    """Return a trainer's log-probs of each sequence, or a critic's values before each token, on reporting ranks."""
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
    from megarl.families.shape import read_model_shape

    engine = engine_of(folder)
    found = [engine.prompt_logprobs(one.token_ids) for one in sequences(read_model_shape(folder).vocab_size)]
    engine.close()
    return found


def engine_of(folder: str, **settings: Any) -> Any:
    """Return an engine with the weights in a folder, loaded by vLLM's own loader."""
    from megarl.config import RolloutConfig
    from megarl.engine.engine import RolloutEngine
    from megarl.families.shape import read_model_shape
    from megarl.reshard.layouts.packed import checkpoint_tensors

    config = RolloutConfig(kv_cache_gib=0.05, vllm=settings.pop("vllm", {}))
    engine = RolloutEngine(folder, config, max_model_len=64, dtype="float32", seed=0, **settings)
    stored = tensors_in(folder)
    # Kept tensors, of a vision tower for example, are not the engine's.
    engine.load_tensors((name, stored[name]) for name in checkpoint_tensors(read_model_shape(folder)))
    return engine


def tensors_in(folder: str | Path) -> dict[str, Any]:
    """Return all tensors [any shape] of a model folder, by name."""
    from safetensors.torch import load_file

    return {
        name: value for file in sorted(Path(folder).glob("*.safetensors")) for name, value in load_file(file).items()
    }


def train_and_export(folder: str, layout: ParallelConfig, out: str, has_value_head: bool) -> dict[str, Any]:
    """Return what a rank computes and holds around a step of one of `sequences`' losses, and export the result.

    `before` and `after` are log-probs (or values) of each sequence, `gradient` and `tensors` parts of whole tensors.
    """
    from dataclasses import replace

    import torch
    import torch.distributed as dist

    from megarl.checkpoint import safetensors
    from megarl.config import CriticConfig
    from megarl.families.shape import padded_vocab_size
    from megarl.reshard.layouts.megatron import megatron_layouts
    from megarl.training.objective import critic_objective, supervised

    recipe = invariance.recipe_of(Path(folder), {})
    # Weights that move further give log-probs so low that float32 rounds them to more than the limit.
    recipe = recipe.model_copy(update={"optimizer": recipe.optimizer.model_copy(update={"learning_rate": 5.0})})
    engine, _, pieces = invariance.build(recipe, layout, has_value_head)
    objective = critic_objective(CriticConfig(clip=None)) if has_value_head else supervised
    engine.role = replace(engine.role, objective=objective)
    shape = engine.shape
    batch = weighed(shape.vocab_size)
    before = engine.forward([batch])
    engine.update([batch])
    trained = [piece for piece in pieces if piece.storage in engine.parameters]
    # Megatron gives its parameters this attribute.
    gradients: dict[str, Any] = {name: value.main_grad for name, value in engine.parameters.items()}
    layouts = megatron_layouts(shape, layout, padded_vocab_size=padded_vocab_size(shape.vocab_size, layout.tp))
    safetensors.export(
        out, folder, shape, layouts, dist.get_rank(), engine.tensors, dtype=torch.float32, bucket_bytes=1 << 20
    )
    return {
        # Copies: the next pass may reuse the memory.
        "gradient": invariance.cut_out(trained, gradients),
        "tensors": invariance.cut_out(pieces, engine.tensors),
        "before": split_sequences(before),
        "after": split_sequences(engine.forward([batch])),
    }


def split_sequences(found: list[np.ndarray] | None) -> list[np.ndarray] | None:
    """Return one row's values [tokens] as those of each sequence; None on ranks that report nothing."""
    return None if found is None else np.split(found[0], np.cumsum(LENGTHS)[:-1])


def stored_parts(folder: str) -> dict[str, Any]:
    """Return what one rank holds of each tensor after it loaded a folder."""
    from megarl.checkpoint import safetensors
    from megarl.families.shape import padded_vocab_size, read_model_shape
    from megarl.reshard.layouts.megatron import megatron_layouts
    from megarl.training.model import FrozenModel

    shape = read_model_shape(folder)
    [pieces] = megatron_layouts(shape, _ONE, padded_vocab_size=padded_vocab_size(shape.vocab_size, 1))
    recipe = invariance.recipe_of(Path(folder), {})
    model = FrozenModel(recipe, _ONE, shape, lambda tensors: safetensors.load(folder, pieces, tensors))
    return invariance.cut_out(pieces, model.tensors)


def sample(folder: str) -> tuple[list[TrainingSequence], list[np.ndarray]]:
    """Return completions of an engine with their log-probs, and the experts [tokens - 1, layers, top_k] of each."""
    from megarl.families.shape import read_model_shape
    from megarl.types import ExpertsHandle, Request, SamplingSettings

    experts: list[np.ndarray] = []

    def keep(chosen: np.ndarray) -> ExpertsHandle:
        experts.append(chosen)
        return ExpertsHandle(0, len(experts) - 1)

    engine = engine_of(folder, keep_experts=keep, vllm={"enable_return_routed_experts": True})
    prompts = [one.token_ids for one in sequences(read_model_shape(folder).vocab_size)]
    settings = SamplingSettings(16, 1.0)
    engine.advance([Request(str(i), prompt.astype(np.int32), settings, i) for i, prompt in enumerate(prompts)], (), 0.0)
    done = {completion.request_id: completion for completion in engine.advance((), (), float("inf"))}
    engine.close()
    made, chosen = [], []
    for number, prompt in enumerate(prompts):
        completion = done[str(number)]
        tokens = np.concatenate([prompt, completion.token_ids])
        past = np.concatenate([np.zeros(len(prompt), np.float32), completion.rollout_logprobs])
        made.append(TrainingSequence(tokens, np.arange(len(tokens)) >= len(prompt), rollout_logprobs=past))
        assert completion.routed_experts is not None
        chosen.append(experts[completion.routed_experts.number])
    return made, chosen


def replay(
    folder: str, layout: ParallelConfig, sampled: list[TrainingSequence], experts: list[np.ndarray] | None
) -> tuple[list[np.ndarray] | None, dict[int, np.ndarray]]:
    """Return log-probs of each sequence with these experts, or without the router's own, with its choices recorded.

    The choices are int64 [tokens of all sequences, top_k], by layer. Without `experts` the layout is one rank.
    """
    from dataclasses import replace

    import torch.distributed as dist
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    from megarl.training.routed_experts import ExpertExchange, StoredExperts

    recipe = invariance.recipe_of(Path(folder), {"router_replay": True})
    RouterReplay.clear_global_router_replay_instances()
    engine, _, _ = invariance.build(recipe, layout, False)
    batch = TokenBatch.from_sequences(sampled)
    if experts is None:
        RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
    else:
        # The first rank sampled all; the others count the same handles.
        held = StoredExperts(0, layout.world_size)
        batch = replace(batch, experts=np.array([held.keep(chosen) for chosen in experts]))
        held = StoredExperts(dist.get_rank(), layout.world_size) if dist.get_rank() else held
        engine.expert_exchange = ExpertExchange(held, engine.expert_layers, engine.shape.top_k)
    found = engine.forward([batch])
    recorded = [router.get_recorded_indices() for router in RouterReplay.global_router_replay_instances]
    own = {
        layer: chosen.numpy()
        for layer, chosen in zip(engine.expert_layers, recorded, strict=True)
        if chosen is not None
    }
    ends = np.cumsum([len(one) for one in sampled])[:-1]
    return None if found is None else np.split(found[0], ends), own


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


def oracle_gradient(folder: Path, work: Path, head: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """Return transformers' gradient of the same loss in float64, by the checkpoint's names.

    With a value head [1, hidden_size] it is the loss of critics, and the head's gradient is `score.weight`.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from megarl.families import float32_tensors
    from megarl.families.shape import read_model_shape

    # The eager implementation of experts: grouped products have no float64 kernel.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager").eval()
    total = sum(LENGTHS) - len(LENGTHS)
    score = None if head is None else torch.from_numpy(head).double().requires_grad_()
    for one in sequences(model.config.vocab_size):
        tokens = torch.from_numpy(one.token_ids)
        if score is None:
            logits = model(tokens[None]).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="sum") / total
        else:
            values = (model.model(tokens[None]).last_hidden_state[0, :-1] @ score.T)[:, 0]
            loss = (values - torch.from_numpy(one.returns)[1:]).square().sum() / 2 / total
        loss.backward()
    for parameter in model.parameters():
        # An expert that no token chose has no gradient.
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    # Saving renames packed parameters to those of the checkpoint.
    model.save_pretrained(work / "gradient")
    saved = invariance.stored_tensors(work / "gradient" / "model.safetensors", folder)
    if score is not None:
        saved = {name: value for name, value in saved.items() if name != "lm_head.weight"}
        saved["score.weight"] = score.grad.numpy()
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


def oracle_values(folder: Path, head: np.ndarray | None = None) -> list[np.ndarray]:
    """Return transformers' values before each token of each sequence, the first of each 0.

    They are those of the folder's classifier, or of its language model with the head [1, hidden_size].
    """
    import torch
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        AutoModel,
        AutoModelForSequenceClassification,
    )

    from megarl.families.shape import read_model_shape

    shape = read_model_shape(folder)
    if head is None and shape.family in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES:
        classifier = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
        model, score = classifier.model, classifier.score.weight
    else:
        # Without a class of classifiers, transformers reads the backbone alone.
        model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
        score = tensors_in(folder)["score.weight"] if head is None else torch.from_numpy(head)
    found = []
    for one in sequences(shape.vocab_size):
        with torch.no_grad():
            hidden = model(torch.from_numpy(one.token_ids)[None]).last_hidden_state[0, :-1]
        found.append(np.concatenate([[0.0], (hidden @ score.T)[:, 0].detach().numpy()]))
    return found


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
    [parts] = pool.run(gradient, str(folder), world_size=1)
    yield gradient_row("gradient", invariance.join([parts]), oracle_gradient(folder, work))


def gradient_row(proof: str, own: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return a row with the distance of two gradients, relative to their norm."""
    norm = np.sqrt(sum(np.square(value).sum() for value in expected.values()))
    # Both are scaled to norm 1: the trainer's is clipped.
    scale = np.sqrt(sum(np.square(value, dtype=np.float64).sum() for value in own.values()))
    distance = np.sqrt(sum(np.square(expected[key] / norm - own[key] / scale).sum() for key in own))
    return limited(proof, float(distance), GRADIENT_LIMIT) | {"tensors": len(own)}


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
    yield from alike("layouts", name, folder, pool, INVARIANCE[FAMILIES[name].has_experts], "token_mean")


def alike(
    proof: str, name: str, folder: Path, pool: RankPool, layouts: Sequence[str], *objectives: str
) -> Iterator[dict[str, Any]]:
    """Yield a row per layout and objective of the check `invariance`."""
    row = FAMILIES[name]
    layouts = [at for at in layouts if "etp" not in at or not row.has_expert_biases]
    model = "moe" if row.has_experts else "dense"
    # Later steps raise rounding of small gradients (dt_bias of delta-nets). Proofs of several losses make one step.
    num_steps = invariance.NUM_STEPS if len(objectives) == 1 else 1
    for found in invariance.check(model, folder, pool, layouts, objectives, num_steps):
        worst = max(found["loss"], found["grad_norm"], found["parameter"])
        title = proof if len(objectives) == 1 else f"{proof}, {found['objective']}"
        one = {"proof": title, "layout": found["layout"], "found": worst, "limit": "invariance", "met": found["met"]}
        yield one | ({} if found["met"] else {"worst": found["worst_parameter"]})


def prove_drafts(name: str, folder: Path, pool: RankPool, work: Path) -> Found:
    if name not in WITH_MTP:
        return
    from tests.distributed.test_reshard import drafting_recipe_of, train_reshard_and_compare
    from tests.engine.test_mtp_drafts import sampled
    from tests.training.test_mtp import COEFFICIENT, oracle, recipe_of, updated

    fields: dict[str, Any] = {**SIZES, **FAMILIES[name].fields, "num_mtp_layers": 1}
    trained = make_tiny_model(work / "trained", family=name, **fields)
    # A wide spread of weights makes decided predictions: rounding does not change the most probable token. Its
    # gradients round more, so those are compared with the usual spread.
    own = make_tiny_model(work / "mtp", family=name, **fields, initializer_range=0.1)
    alone, together = (
        pool.run(updated, recipe_of(trained, coefficient), _ONE, None, world_size=1)[0]
        for coefficient in (None, COEFFICIENT)
    )
    gradients = invariance.join([together["gradients"]])
    _, expected = oracle(trained)
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


def prove_replay(name: str, folder: Path, pool: RankPool, work: Path) -> Found:
    if not FAMILIES[name].has_experts:
        yield refused("replay", "the family has no experts")
        return
    [(sampled, experts)] = pool.run(sample, str(folder), world_size=1)
    [(_, own)] = pool.run(replay, str(folder), _ONE, sampled, None, world_size=1)
    yield limited("replay, choices", differing_choices(sampled, experts, own), 0)
    # Other experts for every token, so that a trainer that ignores them is found out.
    others = [(chosen + 1) % num_experts_of(folder) for chosen in experts]
    results, moved = [], []
    for layout in (_ONE, SPLIT[True]):
        case = str(folder), layout, sampled
        found, changed = (
            reported([own for own, _ in pool.run(replay, *case, given, world_size=layout.world_size)])
            for given in (experts, others)
        )
        distance = max(
            np.abs(own - one.rollout_logprobs)[one.loss_mask].max() for own, one in zip(found, sampled, strict=True)
        )
        yield limited("replay", float(distance), LOGPROB_LIMIT) | {"layout": str(layout)}
        results.append(changed)
        moved.append(apart(found, changed))
    row = limited("replay, others", apart(*results), LOGPROB_LIMIT) | {"layout": str(SPLIT[True])}
    yield row | {"met": row["met"] and min(moved) >= LEAST_CHANGE}


def num_experts_of(folder: Path) -> int:
    from megarl.families.shape import read_model_shape

    return read_model_shape(folder).num_experts


def differing_choices(
    sampled: Sequence[TrainingSequence], experts: Sequence[np.ndarray], own: Mapping[int, np.ndarray]
) -> int:
    """Return for how many tokens and layers engine and trainer chose other experts.

    Shapes: experts [tokens - 1, layers, top_k] for each sequence, own [tokens of all sequences, top_k] by layer.
    """
    starts = np.cumsum([0, *map(len, sampled)])
    count = 0
    for start, chosen in zip(starts, experts, strict=False):
        for layer, numbers in own.items():
            here = numbers[start : start + len(chosen)]
            count += int((np.sort(here, axis=1) != np.sort(chosen[:, layer], axis=1)).any(axis=1).sum())
    return count


def prove_critic(name: str, folder: Path, pool: RankPool, work: Path) -> Found:
    from megarl.families.shape import read_model_shape
    from megarl.types import DataError

    try:
        shape = read_model_shape(folder).with_value_head()
    except DataError as error:
        yield refused("critic", str(error))
        return
    head = invariance.value_head(shape.hidden_size)
    exact = oracle_values(folder, head)
    largest = float(max(np.abs(values).max() for values in exact))
    for layout in (_ONE, SPLIT[FAMILIES[name].has_experts]):
        out = work / f"critic {layout.world_size}"
        ranks = pool.run(train_and_export, str(folder), layout, str(out), True, world_size=layout.world_size)
        values = reported([rank["before"] for rank in ranks])
        yield limited("critic, values", apart(values, exact) / largest, LOGPROB_LIMIT) | {"layout": str(layout)}
        if layout is _ONE:
            own = invariance.join([rank["gradient"] for rank in ranks])
            yield gradient_row("critic, gradient", own, oracle_gradient(folder, work, head))
            continue
        [read] = pool.run(stored_parts, str(out), world_size=1)
        held, loaded = invariance.join([rank["tensors"] for rank in ranks]), invariance.join([read])
        differing = len(held.keys() ^ loaded.keys()) + sum(not np.array_equal(held[k], loaded[k]) for k in held)
        yield limited("critic, export", differing, 0) | {"layout": str(layout), "tensors": len(held)}
        trained = reported([rank["after"] for rank in ranks])
        distance = apart(trained, oracle_values(out)) / largest
        yield limited("critic, export", distance, LOGPROB_LIMIT) | {"layout": "transformers"}
    split = ["pp2 ep2 dp2"] if FAMILIES[name].has_experts else ["tp2 pp2"]
    yield from alike("critic", name, folder, pool, split, "critic", "reward model")


def prove_preference(name: str, folder: Path, pool: RankPool, work: Path) -> Found:
    split = ["pp2 ep2 dp2", "tp2"] if FAMILIES[name].has_experts else ["tp2 pp2", "cp2"]
    yield from alike("preference", name, folder, pool, split, "dpo", "sft")


def prove_lora(name: str, folder: Path, pool: RankPool, work: Path) -> Found:
    from megarl.families.shape import read_model_shape
    from megarl.preflight.learning import adapters
    from tests.training.test_lora import lora_recipe, trained
    from tests.training.test_lora_saved import export
    from tests.training.test_training_engine import distance, make_updates

    shape = read_model_shape(folder)
    attention = {"targets": ["qkv_proj", "o_proj"]}
    lora: dict[str, Any] = {}
    for reason in adapters(lora_recipe(folder), shape):
        yield refused("lora", str(reason))
        lora = attention
    layout = SPLIT[FAMILIES[name].has_experts]
    recipe = lora_recipe(folder, lora=lora)
    sizes = {axis: getattr(layout, axis) for axis in ("tp", "pp", "ep")}
    alone, split = (trained(pool, recipe, given) for given in ({}, sizes))
    step = {key: (split["metrics"][0][key], alone["metrics"][0][key]) for key in ("train/loss", "train/grad_norm")}
    worst = max(abs(own - one) / abs(one) for own, one in step.values())
    found = max(worst, float(distance(split["gradient"], alone["gradient"])))
    row = limited("lora, step", found, invariance.LOSS_LIMIT)
    yield row | {"layout": str(layout), "tensors": len(alone["adapters"])}
    has_peft = importlib.util.find_spec("peft") is not None
    # PEFT 0.21 loads adapters of experts without an error, but computes other log-probs (megarl.checkpoint.peft).
    for targets in [lora, attention] if FAMILIES[name].has_experts and lora != attention else [lora]:
        recipe = lora_recipe(folder, lora=targets, loop="sft")
        updates, out = make_updates(recipe, shape.vocab_size), work / f"adapted {len(targets)}"
        ranks = pool.run(export, recipe, layout, updates, out, world_size=layout.world_size)
        merged = adapted_distance(out / "hf", None, updates[0], ranks)
        yield limited("lora, merged", merged, LOGPROB_LIMIT) | {"layout": str(layout)}
        if has_peft and (targets or not FAMILIES[name].has_experts):
            by_peft = adapted_distance(folder, out / "adapter", updates[0], ranks)
            yield limited("lora, PEFT", by_peft, LOGPROB_LIMIT) | {"layout": " ".join(recipe.lora.targets)}
    if not has_peft:
        yield refused("lora, PEFT", "the package peft is not installed")


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
    own = {i: value for rows, found, _ in ranks for i, value in by_sequence(trained, rows, found).items()}
    exact = []
    for one in trained:
        tokens = torch.from_numpy(one.token_ids)
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, :-1]
        exact.append(np.concatenate([[0.0], logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0].numpy()]))
    return apart([own[number] for number in range(len(trained))], exact)


def prove_export(name: str, folder: Path, pool: RankPool, work: Path) -> Found:
    layout = SPLIT[FAMILIES[name].has_experts]
    ranks = pool.run(train_and_export, str(folder), layout, str(work / "hf"), False, world_size=layout.world_size)
    before, after = (reported([rank[when] for rank in ranks]) for when in ("before", "after"))
    row = limited("export, transformers", apart(after, oracle(work / "hf", "float32")[0]), LOGPROB_LIMIT)
    yield row | {"layout": str(layout), "met": row["met"] and apart(before, after) >= LEAST_CHANGE}
    [sampled] = pool.run(engine_logprobs, str(work / "hf"), world_size=1)
    yield limited("export, vLLM", apart(after, sampled), LOGPROB_LIMIT) | {"layout": str(layout)}
    differing = tensors_in(folder).keys() ^ tensors_in(work / "hf").keys()
    yield limited("export, names", len(differing), 0) | {"layout": str(layout)}


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
    "replay": prove_replay,
    "critic": prove_critic,
    "preference": prove_preference,
    "lora": prove_lora,
    "export": prove_export,
}


def limited(proof: str, found: float, limit: float) -> dict[str, Any]:
    """Return a row of the table."""
    return {"proof": proof, "layout": "one rank", "found": found, "limit": limit, "met": found <= limit}


def refused(proof: str, reason: str) -> dict[str, Any]:
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
                own = Path(work) / f"{name} {proof}"
                own.mkdir()
                for row in PROOFS[proof](name, folder, pool, own):
                    yield {"family": name, **row}
