"""The content of a journal, built record by record."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.rollout.journal.lines import (
    decode_tokens,
    make_damage_error,
    prompt_digest,
    read_completion,
    read_count,
    read_lines,
)
from megarl.rollout.journal.token_account import TokenAccount
from megarl.rollout.journal.tries import JournaledAnswer, JournaledTry
from megarl.rollout.recording import RecordedCall
from megarl.rollout.state import DAMAGE
from megarl.tracking.run_folder import JOURNAL

if TYPE_CHECKING:
    from numpy.typing import NDArray


_LOST_ENGINES = "lost engines"
"""Key of a try's tokens in lost engines, among those of its aborted calls."""


def account_tokens(run: Path) -> TokenAccount | None:
    """Count the tokens sampled for a run's agents; None: the run has no journal.

    Raises DataError if the journal is damaged, StorageError if it cannot be read.
    """
    file = run / JOURNAL
    if not file.exists():
        return None
    state = JournalState(used_from=None)
    state.read(file)
    return state.account()


class JournalState:
    """The contents of a journal, built record by record. Reader and writer of a journal use the same methods."""

    def __init__(self, used_from: int | None) -> None:
        """Tokens of steps before `used_from` are removed from memory. None: all tokens are, because the caller only
        counts them.
        """
        self.tries: dict[str, JournaledTry] = {}
        self._tries_by_attempt: dict[str, dict[str, JournaledTry]] = {}
        """The same tries by attempt and name: a run has many more attempts than an attempt has tries."""
        self.containers: dict[str, tuple[str, str]] = {}
        """(node, container) of each program that can outlive the driver, by the name of its try, until it ends."""
        self._used_from = used_from
        self._token_counts = TokenAccount()
        """Counts of removed tries. `sampled` includes the tries in `tries`."""
        self._calls_under_way: set[str] = set()
        """Identities of calls without an answer or a report of their abort."""
        self._last_step = 0

    def read(self, file: Path) -> None:
        """Apply all records of a file. Raises DataError if it is damaged, StorageError if it cannot be read."""
        for line_number, values in read_lines(file):
            try:
                self.apply(values)
            except DAMAGE as error:
                raise make_damage_error(
                    file, line_number, f"the record is not one of a journal ({error!r:.200})"
                ) from None

    def apply(self, record: Mapping[str, Any]) -> None:
        """Apply a record. Raises an error of `DAMAGE` if it is not a valid record of a journal."""
        appliers: dict[str, Callable[[Mapping[str, Any]], None]] = {
            "totals": self._token_counts.add_totals,
            "start": lambda start_record: self.start(read_count(start_record["version"])),
            "began": self._apply_began,
            "opened": self._apply_opened,
            "asked": self._apply_asked,
            "called": self._apply_called,
            "sampled": self._apply_sampled,
            "counted": self._apply_counted,
            "refused": self._apply_refused,
            "aborted": self._apply_aborted,
            "engine_lost": self._apply_engine_lost,
            "received": self._apply_received,
            "closed": self._apply_closed,
            "reopened": self._apply_reopened,
            "ended": self._apply_ended,
            "dropped": self._apply_dropped,
            "lost": self._apply_lost,
            "step": self._apply_step,
        }
        appliers[record["kind"]](record)

    def account(self) -> TokenAccount:
        """Return the numbers of sampled tokens so far, and the contradictions found in the records."""
        return self._token_counts.complete(self.tries.values(), num_under_way=len(self._calls_under_way))

    def start(self, version: int) -> None:
        """Start from a checkpoint with weights of `version`: undo later steps, remove later answers, close
        all tries.
        """
        # Their driver was killed, else it would have reported their tokens.
        self._token_counts.unreported_calls += len(self._calls_under_way)
        self._calls_under_way.clear()
        self._token_counts.lose_steps(version)
        for agent_try in self.tries.values():
            if agent_try.settled_step is not None and agent_try.settled_step >= version:
                agent_try.step = agent_try.dropped_step = agent_try.lost_step = None
                agent_try.num_trained = 0
            self._token_counts.lost += agent_try.forget_after(version) if agent_try.settled_step is None else 0
            agent_try.is_open = False
        self._last_step = version - 1

    def forget_settled(self, saved_steps: Collection[int] = ()) -> None:
        """Count and remove all trained, dropped and lost tries.

        Tries that the checkpoints of `saved_steps` may have stay, without their tokens: a start from such a checkpoint
        undoes the steps that settled them.
        """
        newest_tries = {agent_try.attempt_name: agent_try for agent_try in self.tries.values()}
        for name, agent_try in list(self.tries.items()):
            settled_step = agent_try.settled_step
            if self._is_unused(agent_try):
                # A checkpoint may have its calls. The newest try then knows that they are counted.
                newest_tries[agent_try.attempt_name].remember_calls_of(agent_try)
            elif settled_step is None:
                continue
            elif any(agent_try.first_step <= step + 1 <= settled_step for step in saved_steps):
                agent_try.forget_tokens()
                continue
            self._token_counts.add_try(agent_try)
            del self.tries[name], self._tries_by_attempt[agent_try.attempt_name][name]
            if not self._tries_by_attempt[agent_try.attempt_name]:
                del self._tries_by_attempt[agent_try.attempt_name]

    def totals(self) -> dict[str, Any]:
        """Return the record summarising all removed tries."""
        return self._token_counts.totals(self.tries.values())

    def find_newest_try(self, attempt_name: str) -> JournaledTry | None:
        tries = [
            t
            for t in self._tries_by_attempt.get(attempt_name, {}).values()
            if not t.is_replaced and t.settled_step is None
        ]
        return tries[-1] if tries else None

    def _is_unused(self, agent_try: JournaledTry) -> bool:
        """Return whether a later try has replaced this one, and repeats none of its answers any more."""
        return agent_try.is_replaced and not any(
            t.is_open for t in self._tries_by_attempt[agent_try.attempt_name].values()
        )

    def _apply_began(self, record: Mapping[str, Any]) -> None:
        """Begin a try. It replaces the attempt's earlier tries."""
        name, attempt_name, settings = (str(record[field_name]) for field_name in ("try", "attempt", "settings"))
        if name in self.tries:
            raise ValueError(f"the start of try {name} is recorded twice")
        # Only a rewritten record has it: a new try begins in the step after the newest settled one.
        first_step = read_count(record["step"]) if "step" in record else self._last_step + 1
        tries_of_attempt = self._tries_by_attempt.setdefault(attempt_name, {})
        for earlier_try in tries_of_attempt.values():
            first_step = min(first_step, earlier_try.first_step)
            if earlier_try.settled_step is None:
                # Keep its answers, because the later try may repeat them.
                earlier_try.is_open, earlier_try.is_replaced = False, True
        self.tries[name] = tries_of_attempt[name] = JournaledTry(name, attempt_name, settings, first_step)

    def _apply_called(self, record: Mapping[str, Any]) -> None:
        self._calls_under_way.add(str(record["id"]))

    def _apply_sampled(self, record: Mapping[str, Any]) -> None:
        """Add an answer to a try. A repeated answer moves from the earlier try, so that its tokens count once."""
        agent_try, answer_number = self.tries[record["try"]], read_count(record["call"])
        if answer_number < agent_try.num_answers_begun or not agent_try.is_open:
            raise ValueError("an answer of a try that is over, or an answer twice")
        completion = read_completion(f"{agent_try.name}.{answer_number}", record)
        num_tokens, versions = len(completion.token_ids), completion.weight_versions
        identity = str(record.get("id", ""))
        self._calls_under_way.discard(identity)
        call = None
        if self._used_from is not None:
            call = RecordedCall(_read_prompt(agent_try, record), [completion], is_done=True, identity=identity)
        newest_version = int(versions.max(initial=0))
        # Earlier versions of megarl write no ids of requests and calls.
        request_id = str(record.get("request", ""))
        answer = JournaledAnswer(num_tokens, newest_version, call, record["repeatable"] is True, request_id, identity)
        agent_try.add_answer(answer_number, answer)
        if record["from"] is None:
            # Earlier versions of megarl do not count the tokens of unfinished calls.
            num_begun_tokens = read_count(record.get("begun", 0))
            agent_try.take_aborted(identity or record["prompt"], num_begun_tokens)
            self._token_counts.sampled += num_tokens - num_begun_tokens
            return
        # Move the tokens from the earlier try, so that they are counted once.
        origin_try, origin_number = record["from"]
        if self.tries[origin_try].answers.pop(read_count(origin_number)).num_tokens != num_tokens:
            raise ValueError("an answer taken from an earlier try has another number of tokens there")

    def _apply_counted(self, record: Mapping[str, Any]) -> None:
        """Add an answer of a settled try to its numbers. Its tokens are removed from the journal."""
        num_tokens, newest_version = read_count(record["tokens"]), read_count(record["version"])
        answer = JournaledAnswer(num_tokens, newest_version, None, is_repeatable=False, identity=str(record["id"]))
        self.tries[record["try"]].add_answer(read_count(record["call"]), answer)
        self._token_counts.sampled += num_tokens

    def _apply_refused(self, record: Mapping[str, Any]) -> None:
        agent_try = self.tries[record["try"]]
        completion = read_completion(agent_try.name, record, ("error",))
        if not isinstance(record["error"], str | None):
            raise TypeError("the reason of a refusal is not text")
        completion = replace(completion, error=record["error"])
        # Without `_used_from` the journal is only counted, and needs no calls.
        if self._used_from is not None:
            prompt = _read_prompt(agent_try, record)
            call = RecordedCall(prompt, [completion], is_done=True, identity=str(record["id"]))
            agent_try.refused.append((agent_try.num_answers_begun, call))

    def _apply_aborted(self, record: Mapping[str, Any]) -> None:
        """Count the tokens of a call that ended without an answer."""
        # Earlier versions of megarl write the prompt's digest instead of the call's id.
        identity, num_tokens = str(record["id"] if "id" in record else record["prompt"]), read_count(record["tokens"])
        self._calls_under_way.discard(identity)
        if record["from"] is not None:
            self.tries[record["from"]].take_aborted(identity, num_tokens)
        else:
            self._token_counts.sampled += num_tokens
        self._add_unanswered_tokens(record["try"], identity, num_tokens)

    def _apply_engine_lost(self, record: Mapping[str, Any]) -> None:
        num_tokens = read_count(record["tokens"])
        self._token_counts.sampled += num_tokens
        self._token_counts.unreported_calls += record["is_all"] is not True
        # Not by the call's identity: the call goes on in another engine, without these tokens.
        self._add_unanswered_tokens(record["try"], _LOST_ENGINES, num_tokens)

    def _add_unanswered_tokens(self, try_name: str, identity: str, num_tokens: int) -> None:
        # The try may be gone: an engine can report an aborted call's tokens after the try was dropped.
        agent_try = self.tries.get(try_name)
        if agent_try is None:
            self._token_counts.dropped += num_tokens
        else:
            agent_try.aborted[identity] += num_tokens

    def _apply_opened(self, record: Mapping[str, Any]) -> None:
        agent_try = self.tries[record["try"]]
        if not all(isinstance(record[name], str) for name in ("session", "key", "node", "container")):
            raise TypeError("a field of a session is not text")
        # Without `_used_from` the journal is only counted, and needs no session.
        if self._used_from is not None:
            agent_try.opened = record
            self.containers[agent_try.name] = record["node"], record["container"]

    def _apply_asked(self, record: Mapping[str, Any]) -> None:
        agent_try = self.tries[record["try"]]
        if read_count(record["number"]) < 1 or not all(isinstance(message, dict) for message in record["messages"]):
            raise ValueError("a request lacks its id, or its message is not an object")
        if self._used_from is not None and agent_try.opened is not None:
            agent_try.asked[str(record["request"])] = record

    def _apply_received(self, record: Mapping[str, Any]) -> None:
        # -1 corrects an earlier +1: the client had read nothing.
        if record["clients"] not in (1, -1):
            raise ValueError("a number of clients is neither one more nor one less")
        self.tries[record["try"]].received[str(record["request"])] += record["clients"]

    def _apply_closed(self, record: Mapping[str, Any]) -> None:
        self.tries[record["try"]].opened = None

    def _apply_reopened(self, record: Mapping[str, Any]) -> None:
        agent_try = self.tries[record["try"]]
        is_over = agent_try.is_replaced or agent_try.ended is not None or agent_try.settled_step is not None
        if agent_try.is_open or is_over:
            raise ValueError("a try that is not interrupted is opened again")
        agent_try.is_open = True

    def _apply_ended(self, record: Mapping[str, Any]) -> None:
        """End a try with its trajectory, still as JSON values."""
        agent_try = self.tries[record["try"]]
        if not agent_try.is_open:
            raise ValueError("a try ended twice, or after a later one began")
        # Decode the trajectory only when it is used. Most attempts of a file were trained or dropped.
        agent_try.ended, agent_try.is_open = record, False
        # The container ended before the attempt.
        self.containers.pop(agent_try.name, None)
        if self._used_from is None:
            # For counting, numbers are enough, and a long run has billions of tokens.
            agent_try.forget_tokens()

    def _apply_dropped(self, record: Mapping[str, Any]) -> None:
        """Drop tries that no step will train."""
        # Some are dropped in the middle of a step. Earlier versions of megarl never write the step.
        step = read_count(record["step"]) if "step" in record else self._last_step + 1
        for name in record["tries"]:
            agent_try = self.tries[name]
            if agent_try.step is not None or agent_try.dropped_step is not None:
                raise ValueError("a try that was trained or dropped is dropped")
            agent_try.dropped_step, agent_try.is_open, agent_try.opened = step, False, None
            # A run that goes on before this step has its calls again.
            if self._used_from is None or step < self._used_from:
                agent_try.forget_tokens()

    def _apply_lost(self, record: Mapping[str, Any]) -> None:
        # Earlier versions of megarl never write the step: it is the newest one.
        step = read_count(record["step"]) if "step" in record else self._last_step
        for name in record["tries"]:
            agent_try = self.tries[name]
            agent_try.lost_step, agent_try.is_open = step, False

    def _apply_step(self, record: Mapping[str, Any]) -> None:
        """Note the step that trained these tries, and how many of their tokens. Contradictions become faults.

        Tokens of steps before `used_from` are removed.
        """
        self._last_step = step = read_count(record["step"])
        for name, num_trained in record["tries"]:
            agent_try = self.tries.get(name)
            if agent_try is None or agent_try.step is not None:
                self._token_counts.faults.append(
                    f"step {step}: attempt {name!s:.80} was trained before, or never began"
                )
            elif (
                agent_try.ended is None
                or agent_try.lost_step is not None
                or read_count(num_trained) > agent_try.num_answered
            ):
                self._token_counts.faults.append(
                    f"step {step}: attempt {name!s:.80} did not end, or trains too many tokens"
                )
            else:
                agent_try.step, agent_try.num_trained = step, num_trained
                if self._used_from is None or step < self._used_from:
                    agent_try.forget_tokens()


def _read_prompt(agent_try: JournaledTry, record: Mapping[str, Any]) -> NDArray[np.int32]:
    """Return the prompt of a record: int32 [prompt]. Raises an error of `DAMAGE` for damaged tokens."""
    prompt = decode_tokens(record["new"])
    if record["base"] is not None and (base := agent_try.answers[record["base"]].call) is not None:
        prompt = np.concatenate([base.prompt_token_ids, base.parts[0].token_ids.astype(np.int32), prompt])
    if prompt_digest(prompt) != record["prompt"]:
        raise ValueError("the prompt's tokens have another hash")
    return prompt
