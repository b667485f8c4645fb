"""Reward from a reward model on another server, over HTTP."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from megarl.config.sections.http_rewards import RemoteModelConfig
from megarl.files.strict_json import finite_number
from megarl.rewards.scoring.calling import Sample
from megarl.rewards.scoring.http_rewards import ServedReward


class RemoteModel(ServedReward[RemoteModelConfig]):
    """Reward model on a server with slime's, OpenRLHF's or vLLM's protocol. The score is the number in the answer."""

    config_class = RemoteModelConfig

    def __init__(self, name: str, config: RemoteModelConfig) -> None:
        if config.protocol == "vllm":
            # /pooling is at vLLM's root, not below /v1, so a url ending with /v1 is accepted.
            self.path, self.left_out_path = "/pooling", "/v1"
        super().__init__(name, config)

    def request(self, sample: Sample) -> Mapping[str, Any]:
        messages = [dict(message) for message in sample.prompt_messages]
        if self.config.protocol == "vllm":
            completion = {"role": "assistant", "content": sample.completion_text}
            return {
                "model": self.config.model,
                "messages": [*messages, completion],
                "add_generation_prompt": False,
            }
        label = sample.answer if isinstance(sample.answer, str) else json.dumps(sample.answer, ensure_ascii=False)
        prompt = "\n".join(str(message.get("content") or "") for message in messages)
        if self.config.protocol == "openrlhf":
            return {"query": [prompt + sample.completion_text], "prompts": [prompt], "labels": [label]}
        return {"prompt": prompt, "messages": messages, "response": sample.completion_text, "label": label}

    def read(self, answer: Any) -> float:
        """Return the one score in a server's answer, clipped. Raises ValueError for none or several."""
        value = answer
        if isinstance(value, Mapping):
            names = ("data",) if self.config.protocol == "vllm" else ("score", "reward", "rewards", "scores")
            if self.config.protocol == "openrlhf" and "rewards" in value:
                # OpenRLHF trains on the rewards. Its `scores` choose the groups to train.
                names = ("rewards",)
            values = [value[name] for name in names if name in value]
            # Several different values: which one is the score is not guessed.
            value = values[0] if values and values.count(values[0]) == len(values) else None
        # Unwrap lists of one. vLLM may return a reward per token: take the last token's.
        while isinstance(value, list | dict) and value:
            if isinstance(value, list) and len(value) > 1 and self.config.protocol != "vllm":
                break
            value = value.get("data") if isinstance(value, dict) else value[-1]
        score = finite_number(value)
        if score is None:
            raise ValueError(f"the server's answer has no score, or several: {answer!r:.200}")
        clip = self.config.clip
        return score if clip is None else max(-clip, min(clip, score))
