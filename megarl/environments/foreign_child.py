"""Episodes of a library, run in the library's own interpreter.

The file is started by its path. It imports nothing from megarl except `rewards/harmless.py`, also by path.

    python foreign_child.py LIBRARY PARENT_PID [MEMORY_BYTES]

A request is a line of JSON on standard input, its answer a line on standard output, in turn:

    {"id": 1, "session": "a", "do": "reset", "settings": {...}, "index": 7, "is_heldout": null}
    {"id": 1, "value": {"text": "...", "system": null}}
    {"id": 2, "session": "a", "do": "step", "text": "..."}
    {"id": 2, "value": {"text": "...", "reward": 0.5, "done": true, "correct": false}}
    {"session": "a", "do": "close"}

An exception of the library is the `error` of an answer; `close` has no answer. The library's prints go to standard
error. The first line written is {"ready": true}, or {"refused": "..."} if the library cannot be imported.
"""

import ctypes
import functools
import hashlib
import importlib.util
import json
import os
import pathlib
import random
import re
import resource
import signal
import sys
import warnings

# PR_SET_PDEATHSIG of linux/prctl.h: die with the parent.
DEATH_SIGNAL = 1
HELD_OUT_PARTS = 64
"""Parts, of 256 equal ones, of all questions that are reserved for validation."""
MAX_DRAWS = 2000
# A prime stride keeps the problems of neighbouring seeds apart.
SEED_STEP = 1_000_003
MAX_SEED = 1 << 32


class ReasoningGym:
    """Problem of a reasoning-gym task. `index` is its number, and the task's own scorer scores the answer.

    `is_heldout` selects questions by their hash, so training and validation never share one.
    """

    def __init__(self, settings):
        self.settings = settings

    def reset(self, index, is_heldout):
        task, seed, config = self.settings["task"], self.settings["seed"], self.settings["config"]
        self.dataset, self.entry = problem_of(task, json.dumps(config), seed * SEED_STEP + index, is_heldout)
        prompt = self.settings["system"]
        return {"text": self.entry["question"], "system": prompt and system_prompt(prompt)}

    def step(self, text):
        answer = answer_in(text, self.settings["answer"])
        if answer is not None:
            answer = harmless().harmless_answer(self.settings["task"], answer, self.entry)
        score = float(self.dataset.score_answer(answer, self.entry))
        # Scores are sums of floats, so a perfect one may be slightly below 1.
        return {"text": "", "reward": score, "done": True, "correct": score >= 0.99}

    def close(self):
        pass


@functools.lru_cache(maxsize=1)
def harmless():
    """Import megarl's rules about safe answers from the path of their file."""
    path = pathlib.Path(__file__).parents[1] / "rewards" / "harmless.py"
    spec = importlib.util.spec_from_file_location("harmless", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def answer_in(text, place):
    """Return the answer of a completion, or None. Listing all candidates must not score, so the last one counts."""
    if place == "text":
        return text.strip()
    pattern = r"<answer>\s*(.*?)\s*</answer>" if place == "tags" else r"\\boxed\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}"
    found = re.findall(pattern, text, re.DOTALL)
    return found[-1] if found else None


def system_prompt(name):
    from reasoning_gym.utils import SYSTEM_PROMPTS

    if name not in SYSTEM_PROMPTS:
        raise ValueError(f"system {name!r} is not a prompt of reasoning-gym: {', '.join(SYSTEM_PROMPTS)}")
    return SYSTEM_PROMPTS[name]


@functools.lru_cache(maxsize=256)
def problem_of(task, config, seed, is_heldout):
    """Return the dataset of one problem, and the problem.

    Tasks make all their problems at once or each from its seed, so every problem gets a dataset of size 1.
    """
    import reasoning_gym

    # Draw seeds until the question's hash falls into the wanted part.
    for draw in range(MAX_DRAWS):
        dataset = reasoning_gym.create_dataset(
            task, seed=(seed + draw * (SEED_STEP + 2)) % MAX_SEED, size=1, **json.loads(config)
        )
        entry = dataset[0]
        digest = hashlib.sha256(entry["question"].encode()).digest()
        if is_heldout is None or (digest[0] < HELD_OUT_PARTS) == is_heldout:
            return dataset, entry
    raise ValueError(f"{task} has too few questions to keep some for validation; use settings that make more")


class Gem:
    """Environment of GEM, made by `gem.make`. Its seed follows from the problem's number."""

    def __init__(self, settings):
        for module in settings["modules"]:
            importlib.import_module(module)
        self.seed = settings["seed"] * SEED_STEP
        self.environment = importlib.import_module("gem").make(settings["name"], **settings["config"])

    def reset(self, index, is_heldout):
        observation, info = self.environment.reset(seed=(self.seed + index) % MAX_SEED)
        return {"text": shown(observation, info), "system": None}

    def step(self, text):
        observation, reward, terminated, truncated, info = self.environment.step(text)
        is_done = bool(terminated or truncated)
        told = [info[name] for name in ("correct", "is_correct", "success") if isinstance(info.get(name), bool)]
        # GEM rewards a won game with 1. A lost one may get partial reward.
        correct = told[0] if told else float(reward) >= 1.0 if is_done else None
        return {"text": shown(observation, info), "reward": float(reward), "done": is_done, "correct": correct}

    def close(self):
        close = getattr(self.environment, "close", None)
        if close is not None:
            close()


def shown(observation, info):
    """Return an observation with the environment's prefix and suffix, as shown to the policy."""
    parts = [info.get("prefix"), observation, info.get("suffix")]
    return "\n".join(str(part).strip("\n") for part in parts if part)


def import_reasoning_gym():
    warnings.simplefilter("ignore")
    importlib.import_module("reasoning_gym")
    return ReasoningGym


def import_gem():
    importlib.import_module("gem")
    return Gem


LIBRARIES = {"reasoning_gym": import_reasoning_gym, "gem": import_gem}


class Session:
    """Episode with its own state of the global random generators, because libraries share these."""

    def __init__(self, episode):
        self.episode = episode
        self.states = None

    def call(self, method, *given):
        if self.states is not None:
            set_random_states(self.states)
        value = getattr(self.episode, method)(*given)
        self.states = random_states()
        return value


def random_states():
    numpy = sys.modules.get("numpy")
    return random.getstate(), numpy.random.get_state() if numpy else None


def set_random_states(states):
    random.setstate(states[0])
    if states[1] is not None:
        sys.modules["numpy"].random.set_state(states[1])


def answer(request, sessions, library):
    """Carry out a request, and return the answer's value."""
    name, action = request["session"], request["do"]
    if action == "reset":
        # Libraries may draw from global generators while they make an episode, so seed them by the problem.
        random.seed(request["index"])
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(request["index"] % MAX_SEED)
        sessions[name] = Session(library(request["settings"]))
        return sessions[name].call("reset", request["index"], request["is_heldout"])
    if action == "step":
        return sessions[name].call("step", request["text"])
    session = sessions.pop(name, None)
    if session is not None:
        session.call("close")
    return None


def serve(requests, answers, library):
    sessions = {}
    for line in requests:
        request = json.loads(line)
        told = {"id": request.get("id")}
        try:
            told["value"] = answer(request, sessions, library)
            text = json.dumps(told, allow_nan=False)
        except Exception as error:
            told.pop("value", None)
            told["error"] = f"{type(error).__name__}: {error}"[:2000]
            text = json.dumps(told)
        if "id" in request:
            print(text, file=answers, flush=True)


def main():
    library, parent = sys.argv[1], int(sys.argv[2])
    ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGKILL)
    # The parent may have died before prctl took effect.
    if os.getppid() != parent:
        return
    if len(sys.argv) > 3:
        resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[3]), resource.RLIM_INFINITY))
    # Modules next to this file have names of libraries. The user's own modules are in the current folder.
    here = os.path.dirname(os.path.realpath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != here] + [os.getcwd()]
    # The library may print. Keep the real descriptors for the protocol, and send its prints to standard error.
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    try:
        found = LIBRARIES[library]()
    except Exception as error:
        print(json.dumps({"refused": f"{type(error).__name__}: {error}"[:2000]}), file=answers, flush=True)
        return
    print(json.dumps({"ready": True}), file=answers, flush=True)
    serve(requests, answers, found)


if __name__ == "__main__":
    main()
