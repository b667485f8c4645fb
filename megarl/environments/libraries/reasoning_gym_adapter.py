"""Adapter of reasoning-gym, run in the child process: makes problems and scores answers."""

import functools
import hashlib
import importlib
import json
import re
import warnings

HELD_OUT_PARTS = 64
"""Share of all questions reserved for validation, in units of 1/256."""
MAX_DRAWS = 2000
DRAW_STEP = 1_000_005
"""Stride between the seeds tried for one problem."""
MAX_SEED = 1 << 32


class Library:
    is_forked = False

    def __init__(self, settings, load_file):
        self.introduction = {}
        warnings.simplefilter("ignore")
        importlib.import_module("reasoning_gym")
        self.scoring = load_file("rewards/functions/harmless.py")

    def make_episode(self, settings):
        return Problem(settings, self.scoring)


class Problem:
    """A problem of a reasoning-gym task, given by its seed. The task's own scorer scores the answer.

    A hash of the question assigns it to training or validation, so that they never share a question. `is_heldout`
    selects validation questions. `scoring` is the module with `score_safely`.
    """

    def __init__(self, settings, scoring):
        self.settings = settings
        self.scoring = scoring

    def reset(self, seed, is_heldout):
        task, config = self.settings["task"], self.settings["config"]
        self.dataset, self.entry = make_problem(task, json.dumps(config), seed, is_heldout)
        prompt = self.settings["system"]
        return {"text": self.entry["question"], "system": prompt and system_prompt(prompt)}

    def step(self, text):
        answer = read_answer(text, self.settings["answer"])
        score = self.scoring.score_safely(self.settings["task"], self.dataset, answer, self.entry)
        return {"text": "", "reward": score, "done": True, "correct": score >= self.scoring.CORRECT_FROM}

    def close(self):
        pass


def read_answer(text, place):
    """Return the last answer at a completion's `place` (tags, boxed or text), or None.

    Listing many candidates gains nothing, because only the last one counts.
    """
    if place == "text":
        return text.strip()
    pattern = r"<answer>\s*(.*?)\s*</answer>" if place == "tags" else r"\\boxed\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}"
    answers = re.findall(pattern, text, re.DOTALL)
    return answers[-1] if answers else None


def system_prompt(name):
    from reasoning_gym.utils import SYSTEM_PROMPTS

    if name not in SYSTEM_PROMPTS:
        raise ValueError(
            f"system = {name!r}: is not a system prompt of reasoning-gym; choose one of {', '.join(SYSTEM_PROMPTS)}"
        )
    return SYSTEM_PROMPTS[name]


@functools.lru_cache(maxsize=256)
def make_problem(task, config, seed, is_heldout):
    """Make one problem of a reasoning-gym task. Returns a dataset of size 1, and its entry.

    Each problem gets its own dataset, because some tasks generate a whole dataset from one seed.
    """
    import reasoning_gym

    # Draw seeds until the question's hash falls into the wanted split.
    for draw_number in range(MAX_DRAWS):
        dataset = reasoning_gym.create_dataset(
            task, seed=(seed + draw_number * DRAW_STEP) % MAX_SEED, size=1, **json.loads(config)
        )
        entry = dataset[0]
        digest = hashlib.sha256(entry["question"].encode()).digest()
        if is_heldout is None or (digest[0] < HELD_OUT_PARTS) == is_heldout:
            return dataset, entry
    raise ValueError(
        f"{task} has too few different questions to reserve some for validation; choose settings that generate more"
    )
