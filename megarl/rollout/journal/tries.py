"""Tries of agents' attempts as a journal has them: their answers, and the records that rebuild them."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.rollout.journal.lines import completion_values, encode_tokens, prompt_digest
from megarl.rollout.recording import RecordedCall
from megarl.rollout.stitch import Chain, longest_prefix

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(slots=True, eq=False)
class JournaledAnswer:
    """An answer of a try: one completion of the policy.

    `call` has the tokens; None: only their number and newest weight version are known. `is_repeatable`: a later try may
    get this answer again. Answers with routed experts are not repeatable: the experts are stored on their rank, and are
    lost with a kill. `request` is the id of the answer's request, `identity` that of its call.
    """

    num_tokens: int
    newest_version: int
    call: RecordedCall | None
    is_repeatable: bool
    request: str = ""
    identity: str = ""


@dataclass(slots=True, eq=False)
class JournaledTry:
    """A try of an attempt: one run of its agent program, from the beginning.

    `answers` are by number. `num_answers_begun` counts them, including answers moved to a later try. `ended` has the
    trajectory as JSON values. `is_open`: the agent may still make calls. `opened` says how to reach the program after a
    kill; None: the program cannot outlive the driver. `asked` has the requests by id. `received` has the number of
    clients that read each answer. `aborted` has the numbers of sampled tokens without an answer, by the call's
    identity. A call with 0 tokens there has passed them to an answer. `refused` has the calls that an engine refused,
    each with the number of answers begun before. A later try is refused too, so that it can repeat the answers that
    follow.

    `first_step` was in progress when the attempt's first try began. A try is settled by the step that trained it
    (`step`), or dropped it, or lost it because no start of the run used it any more.
    """

    name: str
    attempt_name: str
    settings: str
    first_step: int
    answers: dict[int, JournaledAnswer] = field(default_factory=dict)
    chains: list[Chain] = field(default_factory=list)
    num_answers_begun: int = 0
    ended: Mapping[str, Any] | None = None
    step: int | None = None
    num_trained: int = 0
    is_open: bool = True
    is_replaced: bool = False
    dropped_step: int | None = None
    lost_step: int | None = None
    opened: Mapping[str, Any] | None = None
    asked: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    received: Counter[str] = field(default_factory=Counter)
    aborted: Counter[str] = field(default_factory=Counter)
    refused: list[tuple[int, RecordedCall]] = field(default_factory=list)

    @property
    def settled_step(self) -> int | None:
        steps = [step for step in (self.step, self.dropped_step, self.lost_step) if step is not None]
        return steps[0] if steps else None

    @property
    def num_answered(self) -> int:
        return sum(answer.num_tokens for answer in self.answers.values())

    @property
    def num_sampled(self) -> int:
        return self.num_answered + self.aborted.total()

    @property
    def can_go_on(self) -> bool:
        """Whether the program, if it still runs, can continue from its last complete request."""
        can_repeat_all = all(
            a.call is not None and a.is_repeatable and a.request in self.asked for a in self.answers.values()
        )
        is_unfinished = self.ended is None and self.settled_step is None and not self.is_replaced
        return self.opened is not None and is_unfinished and can_repeat_all

    def forget_after(self, version: int) -> int:
        """Remove answers with tokens sampled by later weights than `version`. Return the number of removed tokens.

        Their first tokens, sampled by other weights, count like those of an aborted call: a checkpoint may have them.
        """
        stale_numbers = [
            answer_number for answer_number, answer in self.answers.items() if answer.newest_version > version
        ]
        if stale_numbers:
            # Trajectory and program already contain the removed tokens, so neither can be used.
            self.ended = self.opened = None
            self.refused = [(num_before, call) for num_before, call in self.refused if num_before <= min(stale_numbers)]
        num_removed = 0
        for answer in map(self.answers.pop, stale_numbers):
            num_removed += answer.num_tokens
            if answer.call is not None:
                num_retained = int((answer.call.parts[0].weight_versions <= version).sum())
                self.aborted[answer.identity] += num_retained
                num_removed -= num_retained
            else:
                # Their versions are unknown. Only remember that the tokens of this call are counted.
                self.aborted[answer.identity] += 0
        return num_removed

    def has_answer(self, identity: str) -> bool:
        return any(answer.identity == identity for answer in self.answers.values())

    def has_counted(self, identity: str) -> bool:
        """Return whether the journal has counted tokens of this call. `identity` is empty in old checkpoints."""
        return identity in self.aborted or (bool(identity) and self.has_answer(identity))

    def remember_calls_of(self, earlier_try: JournaledTry) -> None:
        """Remember that the tokens of an earlier try's calls are counted, and lost. A checkpoint may have the calls."""
        for identity in [*earlier_try.aborted, *(answer.identity for answer in earlier_try.answers.values())]:
            self.aborted[identity] += 0

    def take_aborted(self, identity: str, num_tokens: int) -> None:
        """Subtract a call's unanswered tokens. An answer or a later try has them now."""
        if (num_aborted := self.aborted[identity]) < num_tokens:
            raise ValueError(f"a call continues after {num_tokens} aborted tokens, but only {num_aborted} are recorded")
        if num_tokens:
            self.aborted[identity] -= num_tokens

    def forget_tokens(self) -> None:
        """Remove everything except numbers of tokens and identities, so that a settled try needs little memory."""
        if self.ended is not None:
            # Not None: this still shows that the try ended. `_apply_step` checks this.
            self.ended = {"kind": "ended", "try": self.name, "trajectory": None}
        self.chains, self.opened, self.refused = [], None, []
        self.asked.clear()
        for answer in self.answers.values():
            answer.call = None

    def add_answer(self, answer_number: int, answer: JournaledAnswer) -> None:
        """Add an answer. `find_base_answer` finds it by a hash of its prompt and tokens, if a prompt continues it."""
        self.answers[answer_number] = answer
        self.num_answers_begun = answer_number + 1
        if (call := answer.call) is not None:
            token_ids = np.concatenate([call.prompt_token_ids.astype(np.int64), call.parts[0].token_ids])
            self.chains.append(Chain([answer_number], len(token_ids), hashlib.blake2b(token_ids.tobytes()).digest()))

    def find_base_answer(self, prompt: NDArray[np.int32]) -> tuple[int | None, int]:
        """Return the number of the answer that a prompt [prompt] continues, and the number of tokens up to its end.

        Returns (None, 0) if the prompt continues no answer.
        """
        chain = longest_prefix(self.chains, prompt.astype(np.int64))
        return (None, 0) if chain is None else (chain.numbers[-1], chain.num_tokens)

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the records of this try (one run of its attempt's agent program), in the order of reading.

        The record of an answer has only the prompt's tokens after `base`, the number of an earlier answer.
        """
        identity_fields = {"try": self.name, "attempt": self.attempt_name, "settings": self.settings}
        yield {"kind": "began", **identity_fields, "step": self.first_step}
        if self.can_go_on:
            yield from (dict(record) for record in (self.opened, *self.asked.values()) if record is not None)
        # Repeat the try answer by answer, because `base` must name an answer written before.
        rebuilt_try = JournaledTry(self.name, self.attempt_name, self.settings, self.first_step)
        refused_calls = list(self.refused)
        for answer_number, answer in sorted(self.answers.items()):
            while refused_calls and refused_calls[0][0] <= answer_number:
                yield refused_record(rebuilt_try, refused_calls.pop(0)[1])
            if answer.call is None:
                counts = {"tokens": answer.num_tokens, "version": answer.newest_version}
                yield {"kind": "counted", "try": self.name, "call": answer_number, "id": answer.identity, **counts}
            else:
                yield sampled_record(
                    rebuilt_try, answer_number, answer.call, is_repeatable=answer.is_repeatable, request=answer.request
                )
            rebuilt_try.add_answer(answer_number, answer)
            if self.received[answer.request] > 0 and self.can_go_on:
                yield {"kind": "received", "try": self.name, "request": answer.request, "clients": 1}
        for _, refused_call in refused_calls:
            yield refused_record(rebuilt_try, refused_call)
        for identity, num_tokens in self.aborted.items():
            yield {"kind": "aborted", "try": self.name, "id": identity, "tokens": num_tokens, "from": None}
        if self.ended is not None:
            yield dict(self.ended)
        if self.step is not None:
            yield {"kind": "step", "step": self.step, "tries": [[self.name, self.num_trained]]}
        elif self.dropped_step is not None:
            yield {"kind": "dropped", "step": self.dropped_step, "tries": [self.name]}
        elif self.lost_step is not None:
            yield {"kind": "lost", "step": self.lost_step, "tries": [self.name]}


def sampled_record(
    agent_try: JournaledTry,
    answer_number: int,
    call: RecordedCall,
    origin: tuple[str, int] | None = None,
    *,
    is_repeatable: bool,
    num_begun_tokens: int = 0,
    request: str = "",
) -> dict[str, Any]:
    """Return the record of an answer of a try.

    `origin` is set for a repeated answer: the earlier try's name, and the answer's number there. The try's `aborted`
    already has `num_begun_tokens` tokens of the answer. `request` is the request's id.
    """
    return {
        "kind": "sampled",
        "try": agent_try.name,
        "call": answer_number,
        "from": None if origin is None else list(origin),
        "repeatable": is_repeatable,
        "begun": num_begun_tokens,
        "request": request,
        **_call_fields(agent_try, call),
    }


def refused_record(agent_try: JournaledTry, call: RecordedCall) -> dict[str, Any]:
    """Return the record of a call that an engine refused. Its tokens are counted by another record (`aborted`)."""
    call_fields = _call_fields(agent_try, call)
    return {"kind": "refused", "try": agent_try.name, "error": call.parts[0].error, **call_fields}


def _call_fields(agent_try: JournaledTry, call: RecordedCall) -> dict[str, Any]:
    """Return a call's fields in a record. `new` has the prompt's tokens after the answer `base`."""
    base_answer, num_shared = agent_try.find_base_answer(call.prompt_token_ids)
    return {
        "id": call.identity,
        "base": base_answer,
        "prompt": prompt_digest(call.prompt_token_ids),
        "new": encode_tokens(call.prompt_token_ids[num_shared:]),
        **completion_values(call.parts[0]),
    }
