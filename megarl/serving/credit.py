"""Credit of an attempt with several sequences: trained answers, and rewards of single answers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from megarl.files.strict_json import finite_number
from megarl.serving.answers import Answer

Credit = Literal["attempt", "final_segment", "by_turn"]


def trained_answers(answers: Sequence[Answer], credit: Credit, untrained_kinds: Collection[str]) -> list[int]:
    """Return the indices of the answers to train, in ascending order.

    Answers to requests of the kinds `untrained_kinds` are left out. With credit `final_segment` only the token sequence
    of the main agent's last answer is trained.
    """
    places = [place for place, answer in enumerate(answers) if answer.caller.kind not in untrained_kinds]
    if credit != "final_segment" or not places:
        return places
    # A background agent may end after the main agent.
    mains = [place for place in places if answers[place].caller.parent is None]
    last = (mains or places)[-1]
    prompt = answers[last].call.prompt_token_ids
    # Training segments continue the first of equal answers, so it is taken here too.
    by_length: dict[int, int] = {}
    for place in places:
        token_ids = answers[place].call.token_ids
        if place < last and np.array_equal(prompt[: len(token_ids)], token_ids):
            by_length.setdefault(len(token_ids), place)
    return [*sorted(by_length.values()), last]


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
    places = {f"{session}.{answer.number}": place for place, answer in enumerate(answers)}
    rewards: dict[int, float] = {}
    for name, value in values.items():
        # Each dialect puts its own prefix, such as `chatcmpl-`, before the name of a call.
        place = next((places[call] for call in (name, *_without_first_word(name)) if call in places), None)
        if place is None:
            raise ValueError(f"turn_rewards.{name!s:.80}: is not the id of an answer of this attempt")
        if (reward := finite_number(value)) is None:
            raise ValueError(f"turn_rewards.{name!s:.80} = {value!r:.40}: give a finite number")
        rewards[place] = reward
    return tuple(sorted(rewards.items()))


def _without_first_word(name: str) -> list[str]:
    return [name.partition(mark)[2] for mark in ("-", "_")]
