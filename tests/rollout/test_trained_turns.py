"""Conversations of several turns: every sampled token is trained once, in its context, and nothing else counts.

Samples random conversations with the real engine: random turns, replies (users' and tools', with special tokens written
out), tools, truncated turns, and histories that a template rewrites. Every sampled token must be trained in exactly one
place, after exactly the prompt that the engine was sent. The trainer's log-probs of sampled tokens must be the engine's
within 1e-5 nats in float32. Loss and gradient must stay equal in every bit when log-probs, advantages and weights of
all other tokens are scrambled.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.config.sections.rollout import BudgetConfig
from megarl.data.dialogue import Dialogue
from megarl.data.token_batch import TokenBatch
from megarl.environments import Start, Step, Turn
from megarl.rewards.scoring.calling import Sample
from megarl.rewards.scoring.reward_process import Scored
from megarl.rollout.attempt_messages import History
from megarl.rollout.groups import GroupSampler
from megarl.rollout.pool import EnginePool
from megarl.rollout.step.rl_batch import RLBatch, assign_token_weights
from megarl.rollout.stitch import ModelCall, stitch
from megarl.types import Completion, Problem, Request, Reward, SamplingSettings, Trajectory
from tests.rank_pool import RankPool

GAP_LIMIT = 1e-5
MODEL: dict[str, Any] = {"num_layers": 2, "vocab_size": 433, "tie_word_embeddings": False, "initializer_range": 0.1}
PROMPT_TOKENS, NEW_TOKENS = 900, 12
WORDS = (
    "sort",
    "7",
    "é",
    "\u4e2d",
    "\n\n",
    "<|im_end|>",
    "<|im_start|>assistant\n",
    "</tool_call>",
    "  ",
    "the answer",
)
FORGETFUL = (
    "{% if tools %}{{ tools | tojson + '\\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{{ m.content[:2] if m.role == 'assistant' else m.content }}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Shows two characters of each earlier answer."""
TOOL = {"type": "function", "function": {"name": "f", "description": "Of x.", "parameters": {"type": "object"}}}


class RandomTalk:
    """One to five turns of random replies."""

    async def reset(self, problem: Problem, seed: int) -> Start:
        self._random = np.random.default_rng(seed)
        self._num_turns = int(self._random.integers(1, 6))
        tools = (TOOL,) if self._random.random() < 0.5 else ()
        return Start((*problem.messages, self._said("user")), tools)

    async def step(self, turn: Turn) -> Step:
        if turn.number + 1 == self._num_turns:
            return Step(reward=float(self._random.normal()), done=True)
        roles = ["tool"] * int(self._random.integers(0, 3)) + ["user"] * int(self._random.integers(0, 2))
        return Step(tuple(self._said(role) for role in roles or ["user"]))

    async def close(self) -> None:
        pass

    def _said(self, role: str) -> dict[str, Any]:
        content = " ".join(self._random.choice(WORDS, self._random.integers(1, 9)))
        return {"role": role, "content": content} | (
            {"name": "f", "tool_call_id": "call00000"} if role == "tool" else {}
        )


class RecordingPool(EnginePool):
    """The engines, and every call of each attempt in order."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.calls: dict[str | None, list[ModelCall]] = {}

    async def generate(
        self,
        request: Request,
        *,
        affinity: str | None = None,
        **more: Any,
    ) -> Completion:
        completion = await super().generate(request, affinity=affinity, **more)
        self.calls.setdefault(affinity, []).append(ModelCall(request.prompt_token_ids, completion))
        return completion


def recipe_of(folder: Path) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "agents", "loop": "rl", "model": {"path": str(folder), "dtype": "float32"},
            "data": {"train": "unused", "max_prompt_tokens": PROMPT_TOKENS},
            "rollout": {
                "sampling": {"max_new_tokens": NEW_TOKENS}, "kv_cache_gib": 0.2, "max_concurrent_requests": 64,
            },
            "trainer": {"max_tokens_per_microbatch": 4096, "distributed_optimizer": False},
            "algorithm": {"importance_sampling": "tis", "aggregation": "sequence_mean_token_mean"},
            "optimizer": {"name": "sgd", "learning_rate": 1e-30, "clip_grad_norm": 0.0},
        }
    )  # fmt: skip


async def sample(recipe: Recipe, parallel: ParallelConfig, count: int, logs: Path) -> dict[str, Any]:
    """Sample `count` trajectories. Returns them, the number of tokens that differ, and the trainer's log-probs."""
    from megarl.cluster.launchers.run_nodes import start_ranks
    from megarl.data.chat import load_tokenizer
    from megarl.loops.models import make_rank_models

    tokenizer = load_tokenizer(recipe.model.path)
    forgetful = copy.deepcopy(tokenizer)
    forgetful.chat_template = FORGETFUL
    async with AsyncExitStack() as stack:
        ranks = await start_ranks(recipe.cluster, logs)
        stack.push_async_callback(ranks.close)
        settings = {"recipe": recipe, "parallel": parallel, "topology": ranks.topology}
        await ranks.trainers.construct("megarl.worker.colocated:Worker", settings)
        await ranks.call("reshard", False, 1)
        trajectories: list[Trajectory] = []
        num_differing = num_sampled = 0
        kinds: tuple[tuple[Any, History], ...] = ((tokenizer, "append"), (forgetful, "render"))
        for chat_tokenizer, history in kinds:
            dialogue = Dialogue(chat_tokenizer, "hermes")
            pool = RecordingPool(ranks, parallel, max_running=128)
            sampler = GroupSampler(
                pool=pool, dialogue=dialogue, score=unscored, environment="random", make_environment=RandomTalk,
                max_prompt_tokens=PROMPT_TOKENS, max_turns=4, truncated_turn="close",
                history=history, budget=BudgetConfig(sampled_tokens=4 * NEW_TOKENS - 7),
            )  # fmt: skip
            problems = [problem(number) for number in range((count + 1) // 2)]
            half = await sampler.sample(problems, SamplingSettings(NEW_TOKENS), seed=history)
            for trajectory in half:
                calls = pool.calls.get(f"{trajectory.group}.{trajectory.number}", [])
                num_differing += count_differing(trajectory, calls)
                num_sampled += sum(len(call.completion.token_ids) for call in calls)
            trajectories += half
        await ranks.call("sleep_engine")
        batch = RLBatch.from_groups([[trajectory] for trajectory in trajectories])
        trained = await make_rank_models(recipe, parallel, ranks.trainers)["policy"].forward(batch)
    gap = np.abs(trained - batch.per_token["rollout_logprobs"])[batch.loss_mask]
    return {
        "trajectories": trajectories, "differing": num_differing, "sampled": num_sampled,
        "gap": float(gap.max()), "batch": batch, "trained": trained,
    }  # fmt: skip


async def unscored(sample: Sample) -> Scored:
    return Scored(Reward(0.0, True, False))


def problem(number: int) -> Problem:
    messages = ({"role": "system", "content": f"Problem {number}."},)
    return Problem(number, messages, (), f"{number}")


def count_differing(trajectory: Trajectory, calls: Sequence[ModelCall]) -> int:
    """Return the number of sent or sampled tokens that differ in the place where their call is trained."""
    wrong = abs(trajectory.num_sampled - sum(len(call.completion.token_ids) for call in calls))
    for number, call in enumerate(calls):
        start, end = len(call.prompt_token_ids), len(call.token_ids)
        places = [(s, np.flatnonzero((s.turns == number) & s.loss_mask)) for s in trajectory.segments]
        holding = [(segment, place) for segment, place in places if len(place)]
        if len(holding) != 1 or not np.array_equal(holding[0][1], np.arange(start, end)):
            wrong += end - start
            continue
        segment = holding[0][0]
        wrong += int((segment.token_ids[:end] != call.token_ids).sum())
        wrong += int((segment.rollout_logprobs[start:end] != call.completion.rollout_logprobs).sum())
    return wrong


def minibatches(batch: RLBatch, trained: np.ndarray, recipe: Recipe) -> list[TokenBatch]:
    """The batch of an update, and the same with other numbers at all tokens that are not trained."""
    random = np.random.default_rng(3)
    size, mask = len(batch.token_ids), batch.loss_mask
    plain = batch.with_arrays(
        {
            "old_logprobs": trained,
            "rollout_logprobs": batch.per_token["rollout_logprobs"],
            "importance_weights": np.where(mask, random.uniform(0.5, 1.5, size), 0.0).astype(np.float32),
            "advantages": np.where(mask, random.normal(0.0, 1.0, size), 0.0).astype(np.float32),
        }
    )
    assign_token_weights(plain, recipe.algorithm, NEW_TOKENS)
    noise = {name: random.normal(0.0, 9.0, size).astype(np.float32) for name in plain.per_token}
    scrambled = {name: np.where(mask, values, noise[name]) for name, values in plain.per_token.items()}
    return [plain, plain.with_arrays(scrambled)]


def gradients(recipe: Recipe, parallel: ParallelConfig, batches: Sequence[TokenBatch]) -> list[Any]:
    """On a rank: loss and gradient, by parameter, of each batch under the model folder's weights."""
    from megarl.checkpoint import safetensors
    from megarl.data.packing import pack
    from megarl.families.shape import padded_vocab_size, read_model_shape
    from megarl.reshard.layouts.megatron import megatron_layouts
    from megarl.tracking.metrics import values
    from megarl.training.training_engine import TrainingEngine

    shape = read_model_shape(recipe.model.path)
    [pieces] = megatron_layouts(shape, parallel, padded_vocab_size=padded_vocab_size(shape.vocab_size, 1))

    def load(parameters: Mapping[str, Any]) -> None:
        safetensors.load(recipe.model.path, pieces, parameters)

    engine = TrainingEngine(recipe, parallel, shape, load)
    results = []
    parameters: dict[str, Any] = engine.parameters
    for batch in batches:
        [packed] = pack(batch.lengths, max_tokens=recipe.trainer.max_tokens_per_microbatch, num_ranks=1)
        metrics = values(engine.update([batch.select(row) for row in packed]).metrics)
        gradient = {name: p.main_grad.detach().clone().numpy() for name, p in parameters.items()}
        results.append((metrics["train/loss"], gradient))
    return results


@pytest.mark.parametrize(
    "count",
    [100, pytest.param(1000, marks=[pytest.mark.long, pytest.mark.timeout(1200)])],
    ids="{} trajectories".format,
)
def test_what_is_trained_of_conversations_is_what_was_sampled(
    tiny_model: Callable[..., Path], ranks: RankPool, tmp_path: Path, count: int
) -> None:
    recipe, parallel = recipe_of(tiny_model(**MODEL)), ParallelConfig(tp=1, pp=1, dp=1, rollout_tp=1)
    made = asyncio.run(sample(recipe, parallel, count, tmp_path))
    batches = minibatches(made["batch"], made["trained"], recipe)
    [results] = ranks.run(gradients, recipe, parallel, batches, world_size=1, timeout_seconds=600)
    (loss, gradient), (scrambled_loss, scrambled) = results
    trajectories: list[Trajectory] = made["trajectories"]
    assert made["differing"] == 0 and made["gap"] <= GAP_LIMIT
    assert loss == scrambled_loss
    assert [name for name in gradient if not np.array_equal(gradient[name], scrambled[name])] == []
    assert any(values.any() for values in gradient.values())
    # Without these kinds of conversations nothing is proved.
    assert len(trajectories) == count and sum(t.num_turns for t in trajectories) > 2 * count
    assert sum(t.ended == "length" for t in trajectories) > 0
    assert sum(len(t.segments) for t in trajectories) > 1.2 * count, "no history was rewritten"


def test_a_difference_is_seen() -> None:
    completion = Completion("r", np.array([5, 6]), np.float32([-1, -2]), "stop", np.zeros(2, np.int32))
    call = ModelCall(np.array([1, 2, 3], np.int32), completion)
    [segment] = stitch([call])
    trajectory = Trajectory("test", Problem(0, (), (), ""), 0, 0, (segment,), None)

    def changed(**arrays: np.ndarray) -> Trajectory:
        return replace(trajectory, segments=(replace(segment, **arrays),))

    assert count_differing(trajectory, [call]) == 0
    assert count_differing(changed(token_ids=np.array([1, 2, 4, 5, 6])), [call]) == 1
    assert count_differing(changed(loss_mask=np.array([False] * 4 + [True])), [call]) > 0
    assert count_differing(replace(trajectory, segments=(segment, segment)), [call]) > 0
