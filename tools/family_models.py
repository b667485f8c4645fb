"""Results of trainers, engines and transformers for the models that `tools/checks/families.py` compares.

Most functions run on a rank of a pool. Log-probs are in nats, for the sequences of `sequences`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.config.parallel import ParallelConfig
from megarl.data.token_batch import TokenBatch
from megarl.types import TrainingSequence
from tests.training import invariance

if TYPE_CHECKING:
    from megarl.training.model import ModelShard

LENGTHS = (24, 7, 31, 2)
"""Tokens of the compared sequences."""
ONE_RANK = ParallelConfig(tp=1, pp=1, dp=1, rollout_tp=1)


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
    from megarl.rollout.step.rl_batch import assign_token_weights

    batch = TokenBatch.from_sequences(sequences(vocab_size))
    assign_token_weights(batch, AlgorithmConfig(aggregation="token_mean"), max(LENGTHS))
    return batch


def model_shard(
    folder: str, parallel: ParallelConfig, dtype: str, trainer: Mapping[str, Any] | None = None, **settings: Any
) -> ModelShard:
    """Return this rank's shard of a trainer's model with the weights of a folder.

    `trainer` are fields of the recipe's trainer section.
    """
    import torch.distributed as dist

    from megarl.checkpoint import safetensors
    from megarl.families.shape import padded_vocab_size, read_model_shape
    from megarl.reshard.layouts.megatron import megatron_layouts
    from megarl.training.model import ModelShard

    recipe = invariance.recipe_of(Path(folder), trainer or {})
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"dtype": dtype})})
    shape = read_model_shape(folder)
    pieces = megatron_layouts(shape, parallel, padded_vocab_size=padded_vocab_size(shape.vocab_size, parallel.tp))
    return ModelShard(
        recipe, parallel, shape, lambda tensors: safetensors.load(folder, pieces[dist.get_rank()], tensors), **settings
    )


def logprobs(folder: str, parallel: ParallelConfig, dtype: str, in_one_row: bool) -> list[np.ndarray] | None:
    """Return a trainer's log-probs of each sequence, or a critic's values before each token, on reporting ranks."""
    model = model_shard(folder, parallel, dtype)
    compared = sequences(model.shape.vocab_size)
    groups = [compared] if in_one_row else [[sequence] for sequence in compared]
    rows = [TokenBatch.from_sequences(group) for group in groups]
    logprobs = model.forward(rows)
    if logprobs is None:
        return None
    return np.split(logprobs[0], np.cumsum(LENGTHS)[:-1]) if in_one_row else list(logprobs)


def routed_logprobs(folder: str, dtype: str, replayed: np.ndarray | None) -> tuple[list[np.ndarray], np.ndarray]:
    """Return one rank's log-probs of each sequence, and the experts of each token.

    Experts are int64 [tokens, layers with experts, top_k], ascending. With `replayed`, of the same shape, the model
    uses these experts instead of its routers' choices.
    """
    from megatron.core.transformer.moe.router import TopKRouter

    from megarl.models.experts.replay import expert_layers
    from megarl.training.model_parts import ModelParts
    from megarl.training.routed_experts import StoredExperts, make_route_feed

    model = model_shard(folder, ONE_RANK, dtype, parts=ModelParts(replays_routes=replayed is not None))
    choices: list[np.ndarray] = []
    [chunk] = model.chunks
    for router in (module for module in chunk.modules() if isinstance(module, TopKRouter)):
        # A router returns probabilities and a mask of the chosen experts, both [tokens, experts].
        router.register_forward_hook(lambda _module, _inputs, output: choices.append(chosen_experts(output[1])))
    batch = TokenBatch.from_sequences(sequences(model.shape.vocab_size))
    if replayed is not None:
        # Stored experts have an entry for each layer of the model.
        of_layers = np.zeros((len(replayed), model.shape.num_layers, replayed.shape[2]), np.int64)
        of_layers[:, expert_layers(model.chunks)] = replayed
        stored = StoredExperts(0, 1)
        handles = [stored.store(experts) for experts in np.split(of_layers, np.cumsum(LENGTHS)[:-1])]
        batch = replace(batch, experts=np.array(handles))
        model.feeds.append(make_route_feed(stored, model))
    logprobs = model.forward([batch])
    assert logprobs is not None
    return np.split(logprobs[0], np.cumsum(LENGTHS)[:-1]), np.stack(choices, axis=1)


def chosen_experts(mask: Any) -> np.ndarray:
    """Return the experts [tokens, top_k], ascending, of a mask [tokens, experts]. All tokens have as many."""
    return mask.bool().nonzero()[:, 1].view(len(mask), -1).numpy()


def gradient(folder: str) -> dict[str, Any]:
    """Return what one rank holds of the gradient of each tensor."""
    from dataclasses import replace

    from megarl.training.objective import supervised_loss

    engine, _, pieces = invariance.build(invariance.recipe_of(Path(folder), {}), ONE_RANK, False)
    engine.role = replace(engine.role, objective=supervised_loss)
    engine.update([weighed(engine.shape.vocab_size)])
    # Megatron gives its parameters this attribute.
    gradients: dict[str, Any] = {name: value.main_grad for name, value in engine.parameters.items()}
    # The optimizer has clipped the gradients to a norm.
    return invariance.cut_out([piece for piece in pieces if piece.storage in gradients], gradients)


def engine_logprobs(folder: str) -> list[np.ndarray]:
    """Return the engine's log-probs of each sequence."""
    from megarl.families.shape import read_model_shape

    engine = engine_of(folder)
    compared = sequences(read_model_shape(folder).vocab_size)
    logprobs = [engine.prompt_logprobs(sequence.token_ids) for sequence in compared]
    engine.close()
    return logprobs


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


def train_and_export(folder: str, parallel: ParallelConfig, out: str, has_value_head: bool) -> dict[str, Any]:
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
    from megarl.training.objective import critic_objective, supervised_loss

    recipe = invariance.recipe_of(Path(folder), {})
    # Weights that move further give log-probs so low that float32 rounds them to more than the limit.
    recipe = recipe.model_copy(update={"optimizer": recipe.optimizer.model_copy(update={"learning_rate": 5.0})})
    engine, _, pieces = invariance.build(recipe, parallel, has_value_head)
    objective = critic_objective(CriticConfig(clip=None)) if has_value_head else supervised_loss
    engine.role = replace(engine.role, objective=objective)
    shape = engine.shape
    batch = weighed(shape.vocab_size)
    before = engine.forward([batch])
    engine.update([batch])
    trained = [piece for piece in pieces if piece.storage in engine.parameters]
    # Megatron gives its parameters this attribute.
    gradients: dict[str, Any] = {name: value.main_grad for name, value in engine.parameters.items()}
    layouts = megatron_layouts(shape, parallel, padded_vocab_size=padded_vocab_size(shape.vocab_size, parallel.tp))
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


def split_sequences(values: list[np.ndarray] | None) -> list[np.ndarray] | None:
    """Return one row's values [tokens] as those of each sequence; None on ranks that report nothing."""
    return None if values is None else np.split(values[0], np.cumsum(LENGTHS)[:-1])


def stored_parts(folder: str) -> dict[str, Any]:
    """Return what one rank holds of each tensor after it loaded a folder."""
    from megarl.checkpoint import safetensors
    from megarl.families.shape import padded_vocab_size, read_model_shape
    from megarl.reshard.layouts.megatron import megatron_layouts
    from megarl.training.model import FrozenModel

    shape = read_model_shape(folder)
    [pieces] = megatron_layouts(shape, ONE_RANK, padded_vocab_size=padded_vocab_size(shape.vocab_size, 1))
    recipe = invariance.recipe_of(Path(folder), {})
    model = FrozenModel(recipe, ONE_RANK, shape, lambda tensors: safetensors.load(folder, pieces, tensors))
    return invariance.cut_out(pieces, model.tensors)


def sample(folder: str) -> tuple[list[TrainingSequence], list[np.ndarray]]:
    """Return completions of an engine with their log-probs, and the experts [tokens - 1, layers, top_k] of each."""
    from megarl.engine.parts.choice import EngineFeatures
    from megarl.families.shape import read_model_shape
    from megarl.types import ExpertsHandle, Request, SamplingSettings

    experts: list[np.ndarray] = []

    def keep(choices: np.ndarray) -> ExpertsHandle:
        experts.append(choices)
        return ExpertsHandle(0, len(experts) - 1)

    engine = engine_of(folder, features=EngineFeatures(store_experts=keep), vllm={"enable_return_routed_experts": True})
    prompts = [sequence.token_ids for sequence in sequences(read_model_shape(folder).vocab_size)]
    settings = SamplingSettings(16, 1.0)
    engine.advance([Request(str(i), prompt.astype(np.int32), settings, i) for i, prompt in enumerate(prompts)], (), 0.0)
    done = {completion.request_id: completion for completion in engine.advance((), (), float("inf"))}
    engine.close()
    sampled, choices = [], []
    for number, prompt in enumerate(prompts):
        completion = done[str(number)]
        tokens = np.concatenate([prompt, completion.token_ids])
        past = np.concatenate([np.zeros(len(prompt), np.float32), completion.rollout_logprobs])
        sampled.append(TrainingSequence(tokens, np.arange(len(tokens)) >= len(prompt), rollout_logprobs=past))
        assert completion.routed_experts is not None
        choices.append(experts[completion.routed_experts.number])
    return sampled, choices


def replay(
    folder: str, parallel: ParallelConfig, sampled: list[TrainingSequence], experts: list[np.ndarray] | None
) -> tuple[list[np.ndarray] | None, dict[int, np.ndarray]]:
    """Return log-probs of each sequence with these experts, or without the router's own, with its choices recorded.

    The choices are int64 [tokens of all sequences, top_k], by layer. Without `experts` the layout is one rank.
    """
    from dataclasses import replace

    import torch.distributed as dist
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    from megarl.models.experts.replay import expert_layers
    from megarl.training.routed_experts import StoredExperts, make_route_feed

    recipe = invariance.recipe_of(Path(folder), {"router_replay": True})
    RouterReplay.clear_global_router_replay_instances()
    engine, _, _ = invariance.build(recipe, parallel, False)
    batch = TokenBatch.from_sequences(sampled)
    if experts is None:
        RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
    else:
        # The first rank sampled all; the others count the same handles.
        stored = StoredExperts(0, parallel.world_size)
        batch = replace(batch, experts=np.array([stored.store(choices) for choices in experts]))
        stored = StoredExperts(dist.get_rank(), parallel.world_size) if dist.get_rank() else stored
        engine.feeds.append(make_route_feed(stored, engine))
    logprobs = engine.forward([batch])
    recorded = [router.get_recorded_indices() for router in RouterReplay.global_router_replay_instances]
    by_layer = {
        layer: choices.numpy()
        for layer, choices in zip(expert_layers(engine.chunks), recorded, strict=True)
        if choices is not None
    }
    ends = np.cumsum([len(sequence) for sequence in sampled])[:-1]
    return None if logprobs is None else np.split(logprobs[0], ends), by_layer


def oracle(folder: Path, dtype: str) -> tuple[list[np.ndarray], np.ndarray]:
    """Return transformers' log-probs of each sequence, the first of each 0, and the experts of each token.

    Experts are int64 [tokens, layers with experts, top_k], ascending. A model without experts has none: [tokens, 0].
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    choices: dict[str, list[np.ndarray]] = {}
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            # Arguments of transformers' experts: hidden states, chosen experts [tokens, top_k], their weights.
            module.register_forward_pre_hook(
                lambda _module, inputs, name=name: choices.setdefault(name, []).append(inputs[1].sort(-1)[0].numpy())
            )
    logprobs = oracle_logprobs(model, sequences(model.config.vocab_size), torch.float32)
    layers = [np.concatenate(of_sequences) for of_sequences in choices.values()]
    return logprobs, np.stack(layers, axis=1) if layers else np.zeros((sum(LENGTHS), 0))


def oracle_logprobs(model: Any, of: Sequence[TrainingSequence], dtype: Any) -> list[np.ndarray]:
    """Return a transformers model's log-probs of each sequence, the first of each 0. `dtype` is the softmax's."""
    import torch

    logprobs = []
    for sequence in of:
        tokens = torch.from_numpy(sequence.token_ids)
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, :-1].to(dtype)
        logprobs.append(np.concatenate([[0.0], logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0].numpy()]))
    return logprobs


def oracle_gradient(folder: Path, work: Path, head: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """Return transformers' gradient of the same loss in float64, by the checkpoint's names.

    With a value head [1, hidden_size] it is the loss of critics, and the head's gradient is `score.weight`.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from megarl.families.model_tensors import float32_tensors
    from megarl.families.shape import read_model_shape

    # The eager implementation of experts: grouped products have no float64 kernel.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager").eval()
    total = sum(LENGTHS) - len(LENGTHS)
    score = None if head is None else torch.from_numpy(head).double().requires_grad_()
    for sequence in sequences(model.config.vocab_size):
        tokens = torch.from_numpy(sequence.token_ids)
        if score is None:
            logits = model(tokens[None]).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="sum") / total
        else:
            values = (model.model(tokens[None]).last_hidden_state[0, :-1] @ score.T)[:, 0]
            loss = (values - torch.from_numpy(sequence.returns)[1:]).square().sum() / 2 / total
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


def largest_distance(first: list[np.ndarray], second: list[np.ndarray], without: np.ndarray | None = None) -> float:
    """Return the largest distance of log-probs; the first of each sequence does not count.

    Log-probs computed at the tokens `without`, bool [tokens of all sequences], do not count either.
    """
    ends = np.cumsum([len(values) for values in first])
    left_out = np.split(np.zeros(ends[-1], bool) if without is None else without, ends[:-1])
    # The log-prob of a token is computed at the token before it.
    pairs = zip(first, second, left_out, strict=True)
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
    values = []
    for sequence in sequences(shape.vocab_size):
        with torch.no_grad():
            hidden = model(torch.from_numpy(sequence.token_ids)[None]).last_hidden_state[0, :-1]
        values.append(np.concatenate([[0.0], (hidden @ score.T)[:, 0].detach().numpy()]))
    return values


def reported(results: list[list[np.ndarray] | None]) -> list[np.ndarray]:
    return next(result for result in results if result is not None)
