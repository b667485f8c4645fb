"""Records of samples/ and of an evaluation's answers, with the prompts as the policy was shown them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megarl.types import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer


def with_rendered_prompts(
    records: Sequence[Mapping[str, Any]], trajectories: Sequence[Trajectory], tokenizer: Tokenizer
) -> Iterator[dict[str, Any]]:
    """The records of these trajectories, each with `rendered_prompt`: the text of its first prompt's tokens.

    It has what the chat template adds to the messages: the tools, control tokens, the opening of the assistant's turn.
    A trajectory that sampled nothing has none.
    """
    known: dict[bytes, str] = {}  # Attempts at a problem share their prompt.
    for record, trajectory in zip(records, trajectories, strict=True):
        prompt = trajectory.first_prompt
        if prompt is None:
            yield dict(record)
            continue
        key = prompt.tobytes()
        if key not in known:
            known[key] = str(tokenizer.decode(prompt.tolist(), skip_special_tokens=False))
        yield {**record, "rendered_prompt": known[key]}
