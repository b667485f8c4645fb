"""An unfinished request in a vLLM engine. It becomes a completion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np

from megarl.engine.scheduler import SampledTokens
from megarl.types import Completion, FinishReason, TopTokens


@dataclass(frozen=True, slots=True)
class RunningRequest:
    internal_id: str
    """Id of the request inside vLLM."""
    sampled: SampledTokens
    """The tokens sampled so far, and their log-probs."""
    versions: list[tuple[int, int]]
    """(index of the first token, weight version) for each weight version that sampled tokens, in order."""

    def make_completion(self, request_id: str, finish_reason: str | None) -> Completion:
        """Return the tokens sampled so far, each with the version of the weights that sampled it."""
        token_ids = self.sampled.token_ids
        # Each later version overwrites the rest of the completion, from its first token on.
        weight_versions = np.empty(len(token_ids), np.int32)
        for start, version in self.versions:
            weight_versions[start:] = version
        return Completion(
            request_id=request_id,
            token_ids=np.asarray(token_ids, dtype=np.int64),
            rollout_logprobs=np.asarray(self.sampled.logprobs, dtype=np.float32),
            finish_reason=cast(FinishReason, finish_reason),
            weight_versions=weight_versions,
            top_tokens=_stack_top_tokens(self.sampled),
        )


def _stack_top_tokens(sampled: SampledTokens) -> TopTokens | None:
    if not sampled.top_tokens:
        return None
    token_ids, logprobs = zip(*sampled.top_tokens, strict=True)
    return TopTokens(np.stack(token_ids), np.stack(logprobs))
