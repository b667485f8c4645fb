"""Episodes of a library, run in the library's own interpreter.

The file is started by its path. It imports nothing from megarl except two files, also by path.

    python foreign_child.py LIBRARY DESCRIPTOR

The descriptor is a socket with messages of `processes/frames.py`. The first one has `memory_bytes`, the limit of the
address space or null. Requests and their answers:

    {"id": 1, "session": "a", "closed": [], "do": "reset", "settings": {...}, "index": 7, "is_heldout": null}
    {"id": 1, "value": {"text": "...", "system": null}}
    {"id": 2, "session": "a", "closed": [], "do": "step", "text": "..."}
    {"id": 2, "value": {"text": "...", "reward": 0.5, "done": true, "correct": false}}

An exception of the library is the `error` of an answer. Sessions in `closed` are closed before the request.
"""

import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import pathlib
import random
import re
import resource
import socket
import sys
import warnings

HELD_OUT_PARTS = 64
"""Share of all questions reserved for validation, in units of 1/256."""
MAX_DRAWS = 2000
# A prime stride keeps the problems of neighbouring seeds apart.
SEED_STEP = 1_000_003
MAX_SEED = 1 << 32


class ReasoningGym:
    """A problem of a reasoning-gym task, given by its number `index`. The task's own scorer scores the answer.

    Questions are split by a hash, so training and validation never share one. `is_heldout` selects validation
    questions.
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
            answer = megarl_module("rewards/functions", "harmless").harmless_answer(
                self.settings["task"], answer, self.entry
            )
        score = float(self.dataset.score_answer(answer, self.entry))
        # Scores are sums of floats, so a perfect one may be slightly below 1.
        return {"text": "", "reward": score, "done": True, "correct": score >= 0.99}

    def close(self):
        pass


@functools.cache
def megarl_module(folder, name):
    """Import a file of megarl by its path, because this interpreter need not have megarl.

    `folder` is the subfolder of megarl, `name` the file without its extension.
    """
    path = pathlib.Path(__file__).parents[1] / folder / (name + ".py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def answer_in(text, place):
    """Return the answer in a completion; None: there is none.

    Only the last answer counts, so that listing many candidates does not score.
    """
    if place == "text":
        return text.strip()
    pattern = r"<answer>\s*(.*?)\s*</answer>" if place == "tags" else r"\\boxed\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}"
    found = re.findall(pattern, text, re.DOTALL)
    return found[-1] if found else None


def system_prompt(name):
    from reasoning_gym.utils import SYSTEM_PROMPTS

    if name not in SYSTEM_PROMPTS:
        raise ValueError(
            f"system = {name!r}: is not a system prompt of reasoning-gym; choose one of {', '.join(SYSTEM_PROMPTS)}"
        )
    return SYSTEM_PROMPTS[name]


@functools.lru_cache(maxsize=256)
def problem_of(task, config, seed, is_heldout):
    """Make one problem of a reasoning-gym task. Returns a dataset of size 1, and its entry.

    Some tasks generate their whole dataset from one seed, so every problem gets a dataset of its own.
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
    raise ValueError(
        f"{task} has too few different questions to reserve some for validation; choose settings that generate more"
    )


class Gem:
    """An environment of GEM, made by `gem.make`. Its seed is computed from the problem's number."""

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
        verdicts = [info[name] for name in ("correct", "is_correct", "success") if isinstance(info.get(name), bool)]
        # GEM rewards a won game with 1. A lost one may get partial reward.
        correct = verdicts[0] if verdicts else float(reward) >= 1.0 if is_done else None
        return {"text": shown(observation, info), "reward": float(reward), "done": is_done, "correct": correct}

    def close(self):
        close = getattr(self.environment, "close", None)
        if close is not None:
            close()


def shown(observation, info):
    """Return an observation with the environment's prefix and suffix: the text that the policy sees."""
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
    """An episode with its own state of the global random generators. Libraries use these, so episodes would
    interfere.
    """

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


class Episodes:
    """Episodes in progress, by session name."""

    def __init__(self, library):
        self.library = library
        self.sessions = {}

    def answer(self, request):
        """Carry out a request, and return its answer."""
        for name in request["closed"]:
            session = self.sessions.pop(name, None)
            # An episode that cannot be closed must not fail the request of another one.
            with contextlib.suppress(Exception):
                if session is not None:
                    session.call("close")
        try:
            value = self.value(request)
            json.dumps(value, allow_nan=False)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"[:2000]}
        return {"value": value}

    def value(self, request):
        if request["do"] == "step":
            return self.sessions[request["session"]].call("step", request["text"])
        # Libraries may draw from global generators while they make an episode, so seed them by the problem.
        random.seed(request["index"])
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(request["index"] % MAX_SEED)
        session = self.sessions[request["session"]] = Session(self.library(request["settings"]))
        return session.call("reset", request["index"], request["is_heldout"])


def limit_address_space(limit):
    """Limit the address space of this process, in bytes.

    Raises MemoryError if the process already uses more: the limit would then hardly refuse any allocation.
    """
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    used = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    if used > limit:
        raise MemoryError(
            f"the Python process with the imported library alone already takes {used >> 20} MiB of address space; "
            "raise the memory limit"
        )


def main():
    # Error messages of the driver show standard error alone, so everything printed goes there.
    os.dup2(2, 1)
    frames = megarl_module("processes", "frames")
    connection = socket.socket(fileno=int(sys.argv[2]))
    # Programs started by the library must not get it.
    connection.set_inheritable(False)
    # Modules next to this file have names of libraries. The user's own modules are in the current folder.
    here = os.path.dirname(os.path.realpath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != here] + [os.getcwd()]

    def start(settings):
        try:
            library = LIBRARIES[sys.argv[1]]()
            if settings["memory_bytes"] is not None:
                limit_address_space(settings["memory_bytes"])
        except Exception as error:
            text = f"{sys.argv[1]} cannot be imported: {type(error).__name__}: {error}"
            raise frames.RefusedError(text) from error
        return {}, Episodes(library).answer

    frames.answer_requests(connection, start)


if __name__ == "__main__":
    main()
