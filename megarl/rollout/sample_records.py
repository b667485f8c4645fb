"""Records of samples and evaluation answers for people, with the prompts as shown to the policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megarl.types import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer


def with_rendered_prompts(
    records: Sequence[Mapping[str, Any]], trajectories: Sequence[Trajectory], tokenizer: Tokenizer
) -> Iterator[dict[str, Any]]:
    """Yield the records of these trajectories, each with `rendered_prompt`: the text of its first prompt's tokens.

    It includes everything added by the chat template: tools, control tokens, and the opening of the assistant's turn. A
    trajectory without sampled tokens has no `rendered_prompt`.
    """
    known: dict[bytes, str] = {}  # Attempts at one problem share their prompt: decode it once.
    for record, trajectory in zip(records, trajectories, strict=True):
        prompt = trajectory.first_prompt
        if prompt is None:
            yield dict(record)
            continue
        key = prompt.tobytes()
        if key not in known:
            # Control tokens are the point here: a wrong chat template shows in them.
            known[key] = str(tokenizer.decode(prompt.tolist(), skip_special_tokens=False))
        yield {**record, "rendered_prompt": known[key]}
