"""Prompts that only a teacher reads: built by the chat template, joined to the same sampled token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.config import Recipe
from megarl.data.dialogue import Dialogue
from megarl.data.token_batch import TokenBatch
from megarl.families.shape import ModelShape, read_model_shape
from megarl.rollout.step.rl_batch import RLBatch
from megarl.rollout.step.teacher_prompts import Opening, TeacherPrompts, join_openings, replace_opening
from megarl.rollout.step.teachers import Teachers, compute_teacher_advantages
from megarl.rollout.stitch import ModelCall, stitch
from megarl.types import Archive, Completion, MegarlError, Problem, RetainedSets, Reward, Segment, Trajectory
from tests.data.templates import tokenizer_of

TEMPLATE = "{prompt}\nHint: {context}"
QUESTION = "What is 2 + 3?"
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def dialogue() -> Dialogue:
    return Dialogue(tokenizer_of("qwen"))


def answered(
    dialogue: Dialogue,
    number: int,
    text: str,
    *,
    is_correct: bool = False,
    record: dict[str, Any] | None = None,
    system: str | None = None,
    tools: tuple[Any, ...] = (),
    reply: str | None = None,
) -> Trajectory:
    """Return an attempt at one problem, sampled as the text; the environment's `reply` is its last message."""
    messages = ([{"role": "system", "content": system}] if system else []) + [{"role": "user", "content": QUESTION}]
    prompt = dialogue.opening(messages, tools)
    token_ids = dialogue.encode_text(text).astype(np.int64)
    size = len(token_ids)
    completion = Completion("", token_ids, -np.ones(size, np.float32), "stop", np.ones(size, np.int32))
    return Trajectory(
        "sums",
        Problem(0, tuple(messages), tuple(prompt.tolist()), "5", record or {}),
        0,
        number,
        stitch([ModelCall(prompt, completion)]),
        Reward(float(is_correct), True, is_correct),
        texts=(text,),
        messages=(tuple(messages), *(() if reply is None else (({"role": "user", "content": reply},),))),
        tools=tools,
    )


def expected(dialogue: Dialogue, trajectory: Trajectory, context: str) -> list[int]:
    """Return the teacher's sequence, written out: its prompt by transformers, then the sampled ids."""
    messages = [dict(message) for message in trajectory.messages[0]]
    messages[-1]["content"] = f"{QUESTION}\nHint: {context}"
    ids = dialogue.tokenizer.apply_chat_template(
        messages, tools=list(trajectory.tools) or None, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    [segment] = trajectory.segments
    return [*ids, *segment.token_ids[segment.loss_mask].tolist()]


@dataclass
class Lengths:
    """A teacher whose log-prob of a token is minus its place in the teacher's sequence."""

    shape: ModelShape
    asked: TokenBatch | None = None

    async def forward(self, batch: TokenBatch) -> np.ndarray:
        self.asked = batch
        return np.concatenate([-np.arange(length, dtype=np.float32) for length in batch.lengths])


def teachers_of(
    dialogue: Dialogue, tiny_model: Callable[..., Path], *context: str, **fields: Any
) -> tuple[Teachers, Lengths]:
    recipe = Recipe.model_validate(
        {
            "name": "r",
            "loop": "distillation",
            "model": {"path": "m"},
            "data": {"train": "t"},
            "rollout": {"environment": "sums:Sums"},
            "distillation": {"teacher": "policy", "teacher_prompt": TEMPLATE, "context": context, **fields},
        }
    )
    model = Lengths(read_model_shape(tiny_model()))
    prompts = {"sums": TeacherPrompts(TEMPLATE, context, dialogue)}
    recipe_of_source = recipe.model_copy()
    models: Any = {"live_teacher": model}
    teachers = Teachers(recipe_of_source, models, prompts)
    teachers._teacher_numbers = {"sums": 0}
    return teachers, model


def test_the_teacher_reads_the_context_before_the_same_ids(dialogue: Dialogue, tiny_model: Callable[..., Path]) -> None:
    """Contexts of all kinds; a system message and tools stay; special tokens in a context are text."""
    odd = "<|im_end|> {prompt} {context}"
    group = [
        answered(dialogue, 0, "It is 4.", record={"solution": odd}, system="Be brief.", tools=(TOOL,)),
        answered(dialogue, 1, "It is 5.", is_correct=True, record={"solution": {"steps": [2, 3]}}, reply="Well done."),
        answered(dialogue, 2, "5", is_correct=True, record={"solution": ""}, reply="Right."),
    ]
    literal = dialogue.tokenizer.convert_tokens_to_ids("<|im_end|>")
    contexts = {
        "record.solution": ['{"steps": [2, 3]}'],
        "success": ["It is 5.", "5", "It is 5."],
        "feedback": ["Well done.", "Right."],
    }
    trained = {"record.solution": [0, 1], "success": [0, 1, 2], "feedback": [1, 2]}
    for source, texts in contexts.items():
        teachers, model = teachers_of(dialogue, tiny_model, source)
        batch = RLBatch.from_groups([group])
        batch.per_token["old_logprobs"] = np.zeros(len(batch.token_ids), np.float32)
        teachers.assign_teachers(batch)
        metrics = teachers.write_prompts(batch, [group])
        assert metrics["distillation/no_context"] == pytest.approx(1 - len(trained[source]) / 3)
        scores = asyncio.run(teachers.score(batch))
        assert model.asked is not None
        sequences = [part.tolist() for part in np.split(model.asked.token_ids, model.asked.cu_seqlens[1:-1])]
        if source == "record.solution":
            # The template's own special tokens, and none of the context.
            assert sequences.pop(0).count(literal) == group[0].segments[0].token_ids.tolist().count(literal) > 0
        chosen = [group[number] for number in trained[source]][-len(texts) :]
        assert sequences == [expected(dialogue, one, text) for one, text in zip(chosen, texts, strict=True)]
        compute_teacher_advantages(batch, scores, teachers_config())
        # Samples without context have no loss; of the others a token's score is that of its place after x'.
        for number, (start, end) in enumerate(zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)):
            mask = batch.loss_mask[start:end]
            assert mask.any() == (number in trained[source])
            if mask.any():
                place = trained[source].index(number)
                length, size = int(model.asked.lengths[place]), int(mask.sum())
                assert scores[start:end][mask].tolist() == [-float(at) for at in range(length - size, length)]


def teachers_config() -> Any:
    from megarl.config import DistillationConfig

    return DistillationConfig()


def test_samples_too_long_for_the_teacher_have_no_loss(dialogue: Dialogue, tiny_model: Callable[..., Path]) -> None:
    group = [answered(dialogue, number, "4", record={"solution": "x " * size}) for number, size in enumerate((1, 200))]
    teachers, model = teachers_of(dialogue, tiny_model, "record.solution", max_teacher_tokens=150)
    batch = RLBatch.from_groups([group])
    teachers.assign_teachers(batch)
    metrics = teachers.write_prompts(batch, [group])
    assert metrics["distillation/too_long"] == 0.5 and metrics["distillation/no_context"] == 0
    asyncio.run(teachers.score(batch))
    assert model.asked is not None and model.asked.num_sequences == 1
    assert batch.loss_mask[: batch.cu_seqlens[1]].any() and not batch.loss_mask[batch.cu_seqlens[1] :].any()


def test_a_step_without_any_context_trains_nothing(dialogue: Dialogue, tiny_model: Callable[..., Path]) -> None:
    group = [answered(dialogue, 0, "4")]
    teachers, model = teachers_of(dialogue, tiny_model, "success", "feedback")
    batch = RLBatch.from_groups([group])
    batch.per_token["old_logprobs"] = np.zeros(len(batch.token_ids), np.float32)
    teachers.assign_teachers(batch)
    assert teachers.write_prompts(batch, [group])["distillation/no_context"] == 1
    scores = asyncio.run(teachers.score(batch))
    assert model.asked is None and not batch.loss_mask.any()
    assert compute_teacher_advantages(batch, scores, teachers_config()) == {}
    assert not batch.per_token["advantages"].any()


def test_a_prompt_that_its_messages_do_not_give_is_an_error(dialogue: Dialogue) -> None:
    prompts = TeacherPrompts(TEMPLATE, ("record.solution",), dialogue)
    sound = answered(dialogue, 0, "4", record={"solution": "5"}, tools=(TOOL,))
    assert prompts.make_openings(sound, [sound]) is not None
    for wrong in (
        replace(sound, tools=()),
        replace(sound, messages=(({"role": "user", "content": "Another?"},),)),
    ):
        with pytest.raises(MegarlError, match=r"distillation\.teacher_prompt: .* of environment sums"):
            prompts.make_openings(wrong, [wrong])
    silent = replace(sound, messages=(({"role": "system", "content": "Begin."},),))
    with pytest.raises(MegarlError, match="no user message"):
        prompts.make_openings(silent, [silent])


def test_every_turn_is_after_one_insertion() -> None:
    """A second turn follows the first; a rendered history lacks the opening of thoughts; an agent's is another."""
    prompt, teacher = np.array([1, 2, 3, 90, 91]), np.array([1, 2, 7, 7, 3, 90, 91])

    def opening(*token_ids: int) -> Any:
        found = replace_opening(np.array(token_ids), prompt=prompt, teacher_prompt=teacher)
        return None if found is None else (found.num_replaced, found.token_ids.tolist())

    assert opening(1, 2, 3, 90, 91) == opening(1, 2, 3, 90, 91, 50, 51, 60) == (5, [1, 2, 7, 7, 3, 90, 91])
    assert opening(1, 2, 3, 90, 50, 51) == (4, [1, 2, 7, 7, 3, 90])
    assert opening(1, 2, 3, 55) == (3, [1, 2, 7, 7, 3])
    assert opening(1, 55, 3, 90, 91) is None and opening(8, 9) is None


def test_kept_sets_and_masks_move_with_their_tokens() -> None:
    mask = np.array([False, False, True, False, True, False, True])
    batch = TokenBatch(np.arange(10, 17), mask, np.array([0, 5, 7]), np.array([0, 1]))
    batch.retained_sets = RetainedSets(np.array([0, 0, 2, 0, 1, 0, 1], np.int32), np.array([4, 5, 6, 7], np.int32))
    openings = [Opening(2, np.array([1, 2, 3])), Opening(0, np.zeros(0, np.int64))]
    joined, places = join_openings(batch, openings)
    assert joined.token_ids.tolist() == [1, 2, 3, 12, 13, 14, 15, 16] and joined.cu_seqlens.tolist() == [0, 6, 8]
    assert places.tolist() == [-1, -1, -1, 2, 3, 4, 5, 6]
    assert joined.loss_mask.tolist() == [False, False, False, True, False, True, False, True]
    assert joined.retained_sets is not None
    assert joined.retained_sets.counts.tolist() == [0, 0, 0, 2, 0, 1, 0, 1]
    assert joined.retained_sets.token_ids.tolist() == [4, 5, 6, 7]


def test_tools_of_a_waiting_attempt_are_saved(dialogue: Dialogue) -> None:
    attempt = answered(dialogue, 0, "4", tools=(TOOL,))
    archive = Archive()
    values = attempt.to_json(archive, "a.")
    assert Trajectory.from_json(values, archive, "a.", lambda source, index: attempt.problem).tools == (TOOL,)
    older = {name: value for name, value in values.items() if name != "tools"}
    assert Trajectory.from_json(older, archive, "a.", lambda source, index: attempt.problem).tools == ()


def test_a_segment_without_sampled_tokens_has_no_opening(dialogue: Dialogue) -> None:
    attempt = answered(dialogue, 0, "4", record={"solution": "5"})
    empty = Segment(
        np.array([7, 8]),
        np.zeros(2, np.bool_),
        np.zeros(2, np.float32),
        np.full(2, -1, np.int32),
        np.full(2, -1, np.int16),
    )
    attempt = replace(attempt, segments=(*attempt.segments, empty))
    openings = TeacherPrompts(TEMPLATE, ("record.solution",), dialogue).make_openings(attempt, [attempt])
    assert openings is not None and openings[0] is not None and openings[1] is None
