"""Sessions of the service's clients, with their models and sampling sessions, by id and owner."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megarl.service.handlers.listing import RunState
from megarl.service.messages.requests import CreateSession, Numbered, read_fields
from megarl.service.refusals import NotFoundError, UserError
from megarl.service.storage.published import Weights

MAX_SESSIONS = 64
"""Maximum sessions of one account."""
# A loop that samples after each training step opens a sampling session per step.
MAX_SAMPLERS = 10_000
"""Maximum sampling sessions of one session. Above it the oldest one is dropped."""


@dataclass(eq=False, slots=True)
class Model:
    """A client's model. `failure` is the reason why its gradients since the last step are incomplete."""

    model_id: str
    used_at: float
    """Time of its last request."""
    metadata: Mapping[str, str] | None = None
    failure: str | None = None
    moving_weights: Weights | None = None
    """Weights of the sampling sessions that follow the model, from its last save for them."""

    def record_skipped(self, reason: str) -> None:
        """Let the next step fail: the gradients of a skipped request are missing."""
        self.failure = reason


@dataclass(eq=False, slots=True)
class Sampler:
    """A sampling session: its weights and their path. With `model` it follows the model's saves."""

    sampler_id: str
    fixed_weights: Weights
    path: str | None = None
    model: Model | None = None

    @property
    def weights(self) -> Weights:
        return self.fixed_weights if self.model is None else self.model.moving_weights or self.fixed_weights


@dataclass(eq=False, slots=True)
class Session:
    session_id: str
    owner: str
    seen_at: float
    metadata: Mapping[str, str] | None = None
    display_name: str | None = None
    models: dict[str, Model] = field(default_factory=dict)
    starting: set[str] = field(default_factory=set)
    """Ids of models that the trainer is creating. They count, so that parallel requests cannot exceed the limit."""
    samplers: dict[str, Sampler] = field(default_factory=dict)

    def add_sampler(self, sampler: Sampler) -> None:
        if len(self.samplers) >= MAX_SAMPLERS:
            del self.samplers[next(iter(self.samplers))]
        self.samplers[sampler.sampler_id] = sampler


class Sessions:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._sessions: dict[str, Session] = {}
        # Sessions store monotonic times of their last requests. Clients want calendar times.
        self._epoch = time.time() - clock()

    def open(self, body: CreateSession, owner: str) -> str:
        """Return the id of a new session. Raises UserError if the owner has too many."""
        if len(self.owned_by(owner)) >= MAX_SESSIONS:
            raise UserError(f"this key has {MAX_SESSIONS} open sessions; close some, or wait until silent ones end")
        session = Session(secrets.token_hex(12), owner, self._clock(), body.user_metadata, body.display_name)
        self._sessions[session.session_id] = session
        return session.session_id

    def ids(self, owner: str) -> list[str]:
        return [session.session_id for session in reversed(self.owned_by(owner))]

    def describe(self, session_id: str, owner: str) -> dict[str, Any]:
        """Return the answer to GET sessions/ID."""
        session = self.find(session_id, owner)
        return {
            "training_run_ids": list(session.models),
            "sampler_ids": list(session.samplers),
            "user_metadata": session.metadata,
            "display_name": session.display_name,
        }

    def list_run_states(self, owner: str) -> list[RunState]:
        return [
            RunState(model.model_id, owner, session.seen_at + self._epoch, model.metadata)
            for session in self.owned_by(owner)
            for model in session.models.values()
        ]

    def touch(self, session_id: str, owner: str) -> None:
        """Record that a session's client is alive. Raises NotFoundError."""
        self.find(session_id, owner).seen_at = self._clock()

    def owned_by(self, owner: str) -> list[Session]:
        return [session for session in self._sessions.values() if session.owner == owner]

    def models(self) -> list[Model]:
        return [model for session in self._sessions.values() for model in session.models.values()]

    def silent_since(self, oldest: float) -> list[Session]:
        return [session for session in self._sessions.values() if session.seen_at < oldest]

    def remove(self, session: Session) -> None:
        self._sessions.pop(session.session_id, None)

    def has_ended(self, session: Session) -> bool:
        return self._sessions.get(session.session_id) is not session

    def read_address(self, values: dict[str, Any], owner: str) -> tuple[Numbered, Model]:
        """Return a request's number and model.

        Its other fields are read later: a fault in them then fails only the promise, and the number counts as used.
        """
        address = read_fields(Numbered, values)
        session, model = self.find_model(address.model_id, owner)
        self.record_use(session, model)
        return address, model

    def record_use(self, session: Session, model: Model) -> None:
        session.seen_at = model.used_at = self._clock()

    def find(self, session_id: str, owner: str) -> Session:
        """Return an owner's session. Raises NotFoundError."""
        session = self._sessions.get(session_id)
        if session is None or session.owner != owner:
            raise NotFoundError(f"session_id = {session_id:.100}: does not exist")
        return session

    def find_model(self, model_id: str, owner: str) -> tuple[Session, Model]:
        """Return an owner's model, and its session. Raises NotFoundError."""
        for session in self.owned_by(owner):
            if model_id in session.models:
                return session, session.models[model_id]
        raise NotFoundError(f"model_id = {model_id:.100}: does not exist")

    def find_sampler(self, sampler_id: str, owner: str) -> tuple[Session, Sampler]:
        """Return an owner's sampling session, and its session. Raises NotFoundError."""
        for session in self.owned_by(owner):
            if sampler_id in session.samplers:
                return session, session.samplers[sampler_id]
        raise NotFoundError(f"sampling_session_id = {sampler_id:.100}: does not exist")
