"""Adapter of GEM (gem-llm), run in the child process: makes environments and plays their episodes."""

import importlib


class Library:
    is_forked = False

    def __init__(self, settings, load_file):
        self.introduction = {}
        importlib.import_module("gem")

    def make_episode(self, settings):
        return Gem(settings)


class Gem:
    def __init__(self, settings):
        for module in settings["modules"]:
            importlib.import_module(module)
        self.environment = importlib.import_module("gem").make(settings["name"], **settings["config"])

    def reset(self, seed, is_heldout):
        observation, info = self.environment.reset(seed=seed)
        return {"text": observed_text(observation, info), "system": None}

    def step(self, text):
        """Return a step's observation, reward, end, and verdict (None: no verdict yet)."""
        observation, reward, terminated, truncated, info = self.environment.step(text)
        is_done = bool(terminated or truncated)
        verdicts = [info[name] for name in ("correct", "is_correct", "success") if isinstance(info.get(name), bool)]
        # GEM rewards a won game with 1, and a lost game with less.
        correct = verdicts[0] if verdicts else float(reward) >= 1.0 if is_done else None
        return {
            "text": observed_text(observation, info),
            "reward": float(reward),
            "done": is_done,
            "correct": correct,
        }

    def close(self):
        close = getattr(self.environment, "close", None)
        if close is not None:
            close()


def observed_text(observation, info):
    """Return an observation as the policy sees it: with prefix and suffix."""
    parts = [info.get("prefix"), observation, info.get("suffix")]
    return "\n".join(str(part).strip("\n") for part in parts if part)
