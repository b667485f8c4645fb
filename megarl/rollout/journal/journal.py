"""The journal of agents' attempts. Each answer is on the disk before the agent reads a byte of it.

An answer is one completion of the policy. A try is one run of an attempt's agent program, from its beginning. If the
program is lost, a later try replaces the earlier one. The life of a try, as its records show it:

began --> sampled (one record per answer) --> ended --> step: trained with a step
|          |                                  +-----> dropped: stale, filtered or aborted
|          |                                  +-----> void: its weights are gone after a resume
|          +--> reopened: its program outlived the driver, and goes on
+----------+--> a later try began: its answers are repeated there while the prompts are equal; the rest are lost

An aborted call has no answer. Its tokens are counted with its try (`TokenAccount`). After a loss of an engine or a kill
of a driver, the number of sampled tokens may be unknown.

A run reads the journal when it starts from a checkpoint. It uses ended attempts as they are. An unfinished attempt
begins a new try, unless its program still runs (rollout.agent.outlive_seconds). For these programs the journal has
their requests too. Answers sampled by weights after the checkpoint are lost, and later steps are undone.
"""

from __future__ import annotations

import asyncio
import base64
import os
import secrets
import zlib
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from megarl.files.atomic import raise_storage_errors, replace_bytes
from megarl.rollout.journal.lines import encode_line, make_damage_error, prompt_digest
from megarl.rollout.journal.state import JournalState
from megarl.rollout.journal.token_account import TokenAccount
from megarl.rollout.journal.tries import JournaledTry, refused_record, sampled_record
from megarl.rollout.recording import RecordedCall, load_trajectory
from megarl.rollout.requests.engine_requests import num_sampled
from megarl.rollout.state import DAMAGE
from megarl.types import Archive, FindProblem, Trajectory

_MAX_ARRAYS = 1 << 30
"""Maximum bytes of an attempt's uncompressed arrays. A damaged journal could otherwise expand to any size."""


class AttemptJournal:
    """The journal of a run. Open it when the run starts, with the version of the run's first weights.

    Each write returns once its record is on the disk. Concurrent writes share one flush.
    """

    def __init__(
        self,
        file: Path,
        weight_version: int,
        find_problem: FindProblem,
        *,
        max_staleness: int = 0,
        saved_steps: Collection[int] = (),
    ) -> None:
        """Read the journal of the run's earlier starts, and remove tries of no further use.

        Attempts of earlier starts may be used for `max_staleness` steps after the first one. Later they count as lost.
        A later start may go on from the checkpoint of any of the `saved_steps`: numbers of their tries are retained.
        Raises DataError if the journal is damaged, StorageError if it cannot be read or written.
        """
        self._file, self._find_problem = file, find_problem
        self._last_step_of_use = weight_version + max_staleness
        self._is_closed = False
        self._state = JournalState(used_from=weight_version)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="attempt_journal")
        self._pending: list[bytes] = []
        self._num_appended = self._num_durable = 0
        self._flushing: asyncio.Future[None] | None = None
        self._failure: Exception | None = None
        self._is_failure_raised = True
        if file.exists():
            self._state.read(file)
        # Undo later steps first: their attempts can be trained again, and `forget_settled` would remove them.
        self._state.start(weight_version)
        self._state.forget_settled(saved_steps)
        # Attempts of earlier starts are unused until their problems are drawn again.
        self._unused = {t.name for t in self._state.tries.values() if not t.is_replaced and t.settled_step is None}
        tries = (record for agent_try in self._state.tries.values() for record in agent_try.records())
        records = [self._state.totals(), *tries, {"kind": "start", "version": weight_version}]
        # Write a new file, because a kill may have cut the end of the old one.
        with raise_storage_errors(file):
            # Readable by the user only: the file has the texts of attempts and the keys of their sessions.
            replace_bytes(file, b"".join(map(encode_line, records)), is_private=True)
            self._descriptor = os.open(file, os.O_WRONLY | os.O_APPEND)

    def begin(self, attempt_name: str, settings: str) -> AttemptLog:
        """Begin a try of an attempt, or return the log of a try that ended before this start of the run.

        `attempt_name` is unique in the run. Answers with other sampling parameters (`settings`) are not used.
        """
        newest_try = self._state.find_newest_try(attempt_name)
        if newest_try is not None:
            self._unused.discard(newest_try.name)
        if newest_try is not None and newest_try.settings == settings:
            if (trajectory := self._read_trajectory(newest_try)) is not None:
                return AttemptLog(self, newest_try, ended=trajectory)
            if newest_try.can_go_on:
                self.append({"kind": "reopened", "try": newest_try.name})
                return AttemptLog(self, newest_try, is_reopened=True)
        return AttemptLog(self, self.begin_try(attempt_name, settings), earlier=newest_try)

    def begin_try(self, attempt_name: str, settings: str) -> JournaledTry:
        """Begin a try, which replaces all earlier tries of the attempt."""
        # A random suffix: a counter could repeat the name of a try that was removed from the journal.
        name = f"{attempt_name}/{secrets.token_hex(4)}"
        self.append({"kind": "began", "try": name, "attempt": attempt_name, "settings": settings})
        return self._state.tries[name]

    @property
    def expected_keys(self) -> list[str]:
        """API keys of agent programs that may have outlived an earlier driver and can continue their sessions."""
        return [t.opened["key"] for t in self._state.tries.values() if t.opened is not None and t.can_go_on]

    @property
    def orphaned_containers(self) -> list[tuple[str, str]]:
        """(node, name) of each container that may have outlived an earlier driver, and whose program cannot
        continue.
        """
        tries = self._state.tries
        return [
            container
            for name, container in self._state.containers.items()
            if name not in tries or not tries[name].can_go_on
        ]

    def settle(self, step: int, trained_tries: Sequence[tuple[str, int]], live_tries: Collection[str]) -> None:
        """Record the attempts trained in a step, and the attempts no longer used. Return when this is on the disk.

        `trained_tries` has (name of the try, number of trained tokens). `live_tries` has the names of tries that wait
        for a later step.
        """
        trained_names = {name for name, _ in trained_tries}
        # Checkpoints have ended attempts too. These are used without `begin`.
        self._unused -= trained_names | set(live_tries)
        dropped_names = [
            t.name
            for t in self._state.tries.values()
            if t.settled_step is None and not (t.is_open or t.is_replaced or t.name in self._unused)
            and t.name not in trained_names and t.name not in live_tries
        ]  # fmt: skip
        # One flush for both kinds of records: a kill between two flushes would leave attempts without an end.
        self.append({"kind": "step", "step": step, "tries": [list(pair) for pair in trained_tries]})
        self.append({"kind": "dropped", "tries": dropped_names, "step": step})
        if step >= self._last_step_of_use and self._unused:
            self.append({"kind": "lost", "tries": sorted(self._unused), "step": step})
            self._unused.clear()
        self._state.forget_settled()
        # `_flush` writes in this thread too, so records keep their order in the file.
        self._thread.submit(self._write, self._take_pending()).result()

    def account(self) -> TokenAccount:
        return self._state.account()

    async def write(self, values: Mapping[str, Any]) -> None:
        """Append a record, and wait until it is on the disk. Raises StorageError."""
        self.append(values)
        record_number = self._num_appended
        while self._num_durable < record_number:
            if self._flushing is None or self._flushing.done():
                self._flushing = asyncio.ensure_future(self._flush())
            # Shielded: cancelling one caller must not stop the flush awaited by other callers.
            await asyncio.shield(self._flushing)

    def append(self, values: Mapping[str, Any]) -> None:
        """Append a record, to be written by the next flush. Raises the error of an earlier write."""
        self.check_storage()
        self._add(values)

    def check_storage(self) -> None:
        """Raise the error of an earlier write, if any. After an error, nothing more is written."""
        if self._failure is not None:
            self._is_failure_raised = True
            raise self._failure

    def _add(self, values: Mapping[str, Any]) -> None:
        self._state.apply(values)
        self._pending.append(encode_line(values))
        self._num_appended += 1

    def append_unflushed(self, values: Mapping[str, Any]) -> None:
        """Append a record, and pass it to the kernel soon, without waiting for the disk.

        The record survives a kill of this process. A crash of the machine can lose it.
        """
        self.check_storage()
        self._append_unflushed(values)

    def _append_unflushed(self, values: Mapping[str, Any]) -> None:
        self._add(values)
        # `_flush` writes in this thread too, so records keep their order in the file.
        self._thread.submit(self._write, self._take_pending(), is_flushed=False)

    def record_abort(self, name: str, identity: str, num_tokens: int, origin: str | None = None) -> None:
        """Record the number of tokens sampled for an aborted call of the try `name`. `identity` names the call.

        `origin`: the earlier try that sampled these tokens; None: they are new. The record survives a kill of this
        process. Never raises: the error of a failed write is raised by the next write of an answer or an end.
        """
        # An engine may report an aborted call after the end of the run.
        if not self._is_closed:
            self._append_unflushed(
                {"kind": "aborted", "try": name, "id": identity, "tokens": num_tokens, "from": origin}
            )

    def record_call_start(self, identity: str) -> None:
        """Record that a call begins to sample. Never raises."""
        if not self._is_closed:
            self._append_unflushed({"kind": "called", "id": identity})

    def record_loss(self, name: str, num_tokens: int, *, is_all: bool) -> None:
        """Record the tokens that a lost engine had reported for a call. `is_all`: it had sampled no others. Never
        raises.
        """
        if not self._is_closed and (num_tokens or not is_all):
            self._append_unflushed({"kind": "engine_lost", "try": name, "tokens": num_tokens, "is_all": is_all})

    async def write_answer(
        self, name: str, call: RecordedCall, origin: tuple[str, int] | None, *, num_begun_tokens: int, request_id: str
    ) -> None:
        """Write an answer of a try, and return when it is on the disk. Raises StorageError.

        The first `num_begun_tokens` tokens are already written (`record_abort`). `origin` is that of `sampled_record`.
        """
        agent_try = self._state.tries[name]
        is_repeatable = call.parts[0].routed_experts is None
        record_fields = {"is_repeatable": is_repeatable, "num_begun_tokens": num_begun_tokens, "request": request_id}
        await self.write(sampled_record(agent_try, agent_try.num_answers_begun, call, origin, **record_fields))

    async def write_refusal(self, name: str, call: RecordedCall) -> None:
        """Write that an engine has refused a try's call, and return when it is on the disk. Raises StorageError."""
        await self.write(refused_record(self._state.tries[name], call))

    def close(self) -> None:
        """Write the last records. Raises the error of a failed write, unless `check_storage` has raised it."""
        self._is_closed = True
        self._thread.submit(self._write, self._take_pending())
        self._thread.shutdown(wait=True)
        os.close(self._descriptor)
        if not self._is_failure_raised:
            self.check_storage()

    def _read_trajectory(self, agent_try: JournaledTry) -> Trajectory | None:
        """Return the trajectory of a try that has ended, or None. Raises DataError if it is damaged."""
        if not agent_try.ended or agent_try.ended["trajectory"] is None:
            return None
        try:
            return read_trajectory(agent_try.ended, agent_try.num_answered, self._find_problem)
        except DAMAGE as error:
            raise make_damage_error(
                self._file, 1, f"the end of attempt {agent_try.name:.80} is damaged ({error!r:.200})"
            ) from None

    async def _flush(self) -> None:
        # Take the records now. Records appended from here on belong to the next flush.
        content = self._take_pending()
        num_lines = self._num_appended
        await asyncio.get_running_loop().run_in_executor(self._thread, self._write, content)
        self._num_durable = max(self._num_durable, num_lines)

    def _take_pending(self) -> bytes:
        content, self._pending = b"".join(self._pending), []
        return content

    def _write(self, content: bytes, *, is_flushed: bool = True) -> None:
        """Write records to the file, with `is_flushed` down to the disk. After an error nothing more is written."""
        # After a failed write, the file may end within a record. Records appended there could not be read.
        if self._failure is not None:
            raise self._failure
        try:
            with raise_storage_errors(self._file):
                # `os.write` may write only a part of its bytes.
                unwritten = memoryview(content)
                while unwritten:
                    unwritten = unwritten[os.write(self._descriptor, unwritten) :]
                if is_flushed:
                    os.fdatasync(self._descriptor)
        except Exception as error:
            self._failure, self._is_failure_raised = error, False
            raise


class AttemptLog:
    """The journal of one attempt. `ended` is its trajectory if it ended before this start of the run.

    `calls` are an earlier try's answers, to be repeated in this try. `reopened` is the session of a program that may
    have outlived the driver. That program already has these answers.
    """

    def __init__(
        self,
        journal: AttemptJournal,
        agent_try: JournaledTry,
        *,
        ended: Trajectory | None = None,
        earlier: JournaledTry | None = None,
        is_reopened: bool = False,
    ) -> None:
        """`earlier` is the attempt's previous try, with answers to repeat."""
        self.ended = ended
        self.reopened: ReopenedSession | None = ReopenedSession.of(agent_try) if is_reopened else None
        self.calls: list[RecordedCall] = []
        self._journal, self._try, self._is_dropped = journal, agent_try, False
        self._origins: defaultdict[tuple[str, bytes], list[tuple[str, int]]] = defaultdict(list)
        self._earlier = agent_try if is_reopened else earlier
        """The try with the tokens of a checkpoint's calls."""
        if is_reopened:
            self.calls = [answer.call for answer in agent_try.answers.values() if answer.call is not None]
        elif earlier is not None:
            self._repeat_answers_of(earlier)

    @property
    def name(self) -> str:
        return self._try.name

    @property
    def num_aborted(self) -> int:
        """Sampled tokens of this try without an answer. A call restored from a checkpoint may continue some of them."""
        return self._try.aborted.total()

    def _repeat_answers_of(self, earlier: JournaledTry) -> None:
        """Let this try repeat the answers of an `earlier` try with the same sampling parameters."""
        self._earlier = earlier
        self.calls = []
        self._origins.clear()
        if earlier.settings != self._try.settings:
            return
        refused_calls = list(earlier.refused)
        for answer_number, answer in earlier.answers.items():
            # In their order: a refused prompt may have been asked again.
            while refused_calls and refused_calls[0][0] <= answer_number:
                self.calls.append(refused_calls.pop(0)[1])
            if answer.call is not None:
                self._origins[_digest(answer.call)].append((earlier.name, answer_number))
                if answer.is_repeatable:
                    self.calls.append(answer.call)
        self.calls += [call for _, call in refused_calls]

    def begin_again(self) -> None:
        """Begin another try, which may repeat the answers of the current try."""
        if self._is_dropped:
            raise asyncio.CancelledError
        previous_try, self.reopened = self._try, None
        self._try = self._journal.begin_try(previous_try.attempt_name, previous_try.settings)
        self._repeat_answers_of(previous_try)

    def open_session(self, session: str, key: str, node: str, container: str) -> None:
        """Record how a later driver can reach the attempt's program. Written by the next flush, with the first
        answer.
        """
        if not self._is_dropped:
            session_values = {"session": session, "key": key, "node": node, "container": container}
            self._journal.append({"kind": "opened", "try": self.name, **session_values})

    def record_request(self, request_id: str, values: Mapping[str, Any]) -> None:
        """Record a request. Written by the next flush, with the request's answer."""
        if not self._is_dropped and self._try.opened is not None:
            self._journal.append({"kind": "asked", "try": self.name, "request": request_id, **values})

    def record_received(self, request_id: str, clients: int) -> None:
        """Record that one more client has read an answer (`clients` = 1), or that a recorded client had not (-1)."""
        if not self._is_dropped and self._try.opened is not None:
            self._journal.append_unflushed(
                {"kind": "received", "try": self.name, "request": request_id, "clients": clients}
            )

    async def close_session(self) -> None:
        """Record that a later driver cannot continue with the attempt's program."""
        if not self._is_dropped and self._try.opened is not None:
            await self._journal.write({"kind": "closed", "try": self.name})

    def merge_into(self, calls: list[RecordedCall]) -> None:
        """Add the earlier try's answers to the model calls of a checkpoint, without duplicates.

        Removes answers that this try cannot use, because their tokens are counted as lost. Refused calls stay, because
        journals of earlier versions of megarl do not have them.
        """
        journaled = Counter(map(_digest, self.calls))
        for call in [call for call in calls if call.is_done]:
            if journaled[_digest(call)]:
                journaled[_digest(call)] -= 1
                calls.remove(call)
            elif not call.is_refused and self._is_lost(call):
                calls.remove(call)
        for call in calls:
            # Earlier versions of megarl identify calls by their prompts, in checkpoints and in journals.
            call.identity = call.identity or prompt_digest(call.prompt_token_ids)
        calls += self.calls

    def drop(self) -> None:
        if not self._is_dropped:
            self._is_dropped = True
            self._journal.append({"kind": "dropped", "tries": [self.name]})

    def _is_lost(self, call: RecordedCall) -> bool:
        """Return whether the tokens of a checkpoint's answer are counted, and this try cannot repeat it."""
        is_known = self._earlier is not None and self._earlier.has_counted(call.identity)
        return is_known and not self._origins.get(_digest(call))

    def admit_call(self, call: RecordedCall) -> bool:
        """Count the tokens that a checkpoint has of an unfinished call. Return whether this try may continue the call.

        It may not if the sampling parameters have changed, or if an earlier driver that started from the same
        checkpoint has finished the call: its tokens are then counted with that answer.
        """
        identity, num_tokens = call.identity, num_sampled(call.parts)
        earlier_try = self._earlier or self._try
        has_same_settings = earlier_try.settings == self._try.settings
        if not earlier_try.has_counted(identity):
            # Its driver was killed, so no try has its tokens.
            if num_tokens:
                self._journal.record_abort(self.name if has_same_settings else earlier_try.name, identity, num_tokens)
            return has_same_settings
        num_counted = earlier_try.aborted[identity]
        if 0 < num_counted < num_tokens:
            # Its driver continued it from an earlier checkpoint, and was killed.
            self._journal.record_abort(earlier_try.name, identity, num_tokens - num_counted)
        # If no tokens are counted here, an answer has taken them over.
        can_continue = (
            has_same_settings and not earlier_try.has_answer(identity) and (num_counted > 0 or not num_tokens)
        )
        if earlier_try is not self._try:
            # Record 0 tokens otherwise, so that the next driver does not count them either.
            self._journal.record_abort(self.name, identity, num_tokens if can_continue else 0, origin=earlier_try.name)
        return can_continue

    def check_storage(self) -> None:
        self._journal.check_storage()

    def record_abort(self, try_name: str, call: RecordedCall, num_tokens: int) -> None:
        self._journal.record_abort(try_name, call.identity, num_tokens)

    def record_call_start(self, call: RecordedCall) -> None:
        self._journal.record_call_start(call.identity)

    def record_loss(self, try_name: str, num_tokens: int, *, is_all: bool) -> None:
        self._journal.record_loss(try_name, num_tokens, is_all=is_all)

    async def write_call(
        self, call: RecordedCall, *, is_repeated: bool, num_begun_tokens: int = 0, request_id: str = ""
    ) -> None:
        """Write an answer before its agent may read it. Raises StorageError.

        `is_repeated`: an earlier try sampled the answer. The first `num_begun_tokens` tokens of the answer come from a
        checkpoint.
        """
        if self._is_dropped:
            # A cancelled agent may ignore its cancellation. Its further answers belong to no try.
            if not is_repeated:
                self.record_abort(self.name, call, num_sampled(call.parts) - num_begun_tokens)
            raise asyncio.CancelledError
        if call.is_refused:
            # Count the tokens sampled before a pause. Tokens of an earlier try stay with that try.
            if not is_repeated:
                self.record_abort(self.name, call, num_sampled(call.parts) - num_begun_tokens)
            if call.parts[0].routed_experts is None:
                await self._journal.write_refusal(self.name, call)
        else:
            origins = self._origins[_digest(call)] if is_repeated else []
            origin = origins.pop(0) if origins else None
            await self._journal.write_answer(
                self.name, call, origin, num_begun_tokens=num_begun_tokens, request_id=request_id
            )

    async def end(self, trajectory: Trajectory) -> Trajectory:
        """Write the end of the attempt. Return its trajectory with the try's name in the journal."""
        if self._is_dropped:
            return trajectory
        trajectory = replace(trajectory, journaled_as=self.name)
        await self._journal.write({"kind": "ended", "try": self.name, **trajectory_values(trajectory)})
        return trajectory


@dataclass(frozen=True, slots=True)
class ReopenedSession:
    """The session of a program that may have outlived the driver, and its calls in the order of their answers.

    Each of `calls` has the tokens, the request's values, and whether a client has read the answer. `num_started` is the
    highest call number so far, including unanswered calls.
    """

    name: str
    key: str
    node: str
    container: str
    calls: tuple[tuple[RecordedCall, Mapping[str, Any], bool], ...]
    num_started: int

    @classmethod
    def of(cls, agent_try: JournaledTry) -> ReopenedSession:
        """Return the session in which the program of a try still runs, with its answered model calls."""
        assert agent_try.opened is not None, "only tries that can go on are reopened"
        calls = tuple(
            (answer.call, agent_try.asked[answer.request], agent_try.received[answer.request] > 0)
            for answer in agent_try.answers.values()
            if answer.call is not None
        )
        names = ("session", "key", "node", "container")
        num_started = max((request["number"] for request in agent_try.asked.values()), default=0)
        session_values = (agent_try.opened[name] for name in names)
        return cls(*session_values, calls=calls, num_started=num_started)


def _digest(call: RecordedCall) -> tuple[str, bytes]:
    return prompt_digest(call.prompt_token_ids), call.parts[0].token_ids.tobytes()


def trajectory_values(trajectory: Trajectory) -> dict[str, Any]:
    """Return a trajectory as JSON values. Its arrays become compressed text."""
    # Routed experts are stored on their rank, and are lost with a kill. A trajectory without them cannot be trained.
    if any(segment.routed_experts is not None for segment in trajectory.segments):
        return {"trajectory": None}
    archive = Archive()
    values = trajectory.to_json(archive, "")
    arrays = save({name: np.ascontiguousarray(array) for name, array in archive.arrays.items()})
    # Level 1 is fast and enough: tokens are 64-bit numbers, mostly zero bytes.
    packed = base64.b64encode(zlib.compress(arrays, 1)).decode()
    return {"trajectory": values, "times": archive.times, "arrays": packed}


def read_trajectory(values: Mapping[str, Any], num_sampled: int, find_problem: FindProblem) -> Trajectory:
    """Return the trajectory written by `trajectory_values`. Raises an error of `DAMAGE` for invalid values."""
    # Not `zlib.decompress`: it has no size limit, and a short text can expand to any size.
    unpacking = zlib.decompressobj()
    try:
        content = unpacking.decompress(base64.b64decode(values["arrays"], validate=True), _MAX_ARRAYS)
    except zlib.error as error:
        raise ValueError("the arrays are damaged") from error
    if not unpacking.eof:
        raise ValueError("the arrays are cut short, or too large")
    archive = Archive(load(content), values["times"])
    trajectory = load_trajectory(values["trajectory"], archive, "", find_problem)
    for segment in trajectory.segments:
        arrays = segment.loss_mask, segment.rollout_logprobs, segment.weight_versions, segment.turns
        if any(len(array) != len(segment) for array in arrays) or (segment.token_ids < 0).any():
            raise ValueError("the arrays of a segment differ in length, or a token is negative")
    if trajectory.num_sampled > num_sampled:
        raise ValueError(f"the attempt trains {trajectory.num_sampled} tokens of {num_sampled} sampled ones")
    return trajectory
