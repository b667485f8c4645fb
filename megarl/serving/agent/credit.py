"""Credit of an attempt with several sequences: trained answers, and rewards of single answers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from megarl.files.strict_json import finite_number
from megarl.serving.answers import Answer

Credit = Literal["attempt", "final_segment", "by_turn"]


def select_trained_answers(answers: Sequence[Answer], credit: Credit, untrained_kinds: Collection[str]) -> list[int]:
    """Return the indices of the answers to train, without those to requests of `untrained_kinds`.

    With credit `final_segment` only the token sequence of the main agent's last answer is trained.
    """
    candidates = [index for index, answer in enumerate(answers) if answer.caller.kind not in untrained_kinds]
    if credit != "final_segment" or not candidates:
        return candidates
    # A background agent may end after the main agent.
    main_agent_indices = [index for index in candidates if answers[index].caller.parent is None]
    last_index = (main_agent_indices or candidates)[-1]
    last_prompt_ids = answers[last_index].call.prompt_token_ids
    # Training segments continue the first of equal answers, so it is taken here too.
    index_by_length: dict[int, int] = {}
    for index in candidates:
        token_ids = answers[index].call.token_ids
        if index < last_index and np.array_equal(last_prompt_ids[: len(token_ids)], token_ids):
            index_by_length.setdefault(len(token_ids), index)
    return [*sorted(index_by_length.values()), last_index]


def read_turn_rewards(
    values: Any, session: str, answers: Sequence[Answer], credit: Credit
) -> tuple[tuple[int, float], ...]:
    """Return an agent's rewards of single answers as (index of the answer, reward). `values` are by response id.

    Raises ValueError without credit `by_turn`, for an id of another attempt, and for a reward that is not a finite
    number.
    """
    if credit != "by_turn":
        raise ValueError(
            f"turn_rewards: rollout.agent.credit is {credit}, so rewards of single turns have no effect; set it to "
            "by_turn, or leave them out"
        )
    if not isinstance(values, Mapping):
        raise ValueError(f"turn_rewards = {values!r:.80}: give an object of response ids and numbers")
    index_by_call = {f"{session}.{answer.number}": index for index, answer in enumerate(answers)}
    rewards: dict[int, float] = {}
    for name, value in values.items():
        # Each dialect puts its own prefix, such as `chatcmpl-`, before the name of a call.
        index = next(
            (index_by_call[call] for call in (name, *_without_first_word(name)) if call in index_by_call), None
        )
        if index is None:
            raise ValueError(f"turn_rewards.{name!s:.80}: is not the id of an answer of this attempt")
        if (reward := finite_number(value)) is None:
            raise ValueError(f"turn_rewards.{name!s:.80} = {value!r:.40}: give a finite number")
        rewards[index] = reward
    return tuple(sorted(rewards.items()))


def _without_first_word(name: str) -> list[str]:
    return [name.partition(mark)[2] for mark in ("-", "_")]
