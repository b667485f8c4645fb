"""Records of samples have the prompt as the policy was shown it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from megarl.data.chat import load_tokenizer
from megarl.data.dialogue import Dialogue
from megarl.environments.calculator import Calculator
from megarl.rollout.step.sample_records import with_rendered_prompts
from megarl.types import Problem, Segment, Trajectory


def test_the_prompt_has_the_tools_and_the_template_s_tokens(tiny_model: Callable[..., Path]) -> None:
    tokenizer = load_tokenizer(tiny_model())
    question = ({"role": "user", "content": "What is 6 times 7?"},)
    dialogue = Dialogue(tokenizer, None)
    prompt = dialogue.opening(question, Calculator().tools)
    tokens = np.concatenate([prompt, prompt[:3]]).astype(np.int64)
    is_sampled = np.arange(len(tokens)) >= len(prompt)
    zeros = np.zeros(len(tokens), np.float32)
    turns = np.where(is_sampled, 0, -1).astype(np.int16)
    segment = Segment(tokens, is_sampled, zeros, turns.astype(np.int32), turns)
    problem = Problem(1, question, (), "42")
    found = [Trajectory("calculator", problem, 0, number, (segment,), None) for number in range(2)]
    failed = Trajectory("calculator", problem, 0, 2, (), None, failure="ValueError: no")
    trajectories = [*found, failed]
    first, second, third = with_rendered_prompts([t.record() for t in trajectories], trajectories, tokenizer)
    text = first["rendered_prompt"]
    assert text == second["rendered_prompt"] == dialogue.render_opening(question, Calculator().tools)
    assert "Tools: calculator" in text and "<|im_start|>" in text and "What is 6 times 7?" in text
    assert "rendered_prompt" not in third and third["prompt"] == question
