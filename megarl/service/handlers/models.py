"""Requests that create, describe and end clients' models."""

from __future__ import annotations

import math
import secrets
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from megarl.service.handlers.request_handlers import RequestHandlers
from megarl.service.handlers.served_checks import check_adapters, check_base, check_optimizer, check_record
from megarl.service.handlers.sessions import Model, Session
from megarl.service.messages.requests import CreateModel, LoadWeights
from megarl.service.queueing.ledger import Promise, Reply, digest_of, json_reply
from megarl.service.refusals import MalformedError, UserError

# Every idle model keeps its adapters, gradients and moments in host memory.
MAX_MODELS = 16
"""Maximum models of one account in memory."""
_SEEDS = 2**31


class Models(RequestHandlers):
    """Creates models in the trainer, and frees their memory."""

    _moved_if_used_before = -math.inf
    """Models last used before this time were already asked to move to disk."""

    def create(self, body: CreateModel, owner: str) -> Promise:
        """Accept a request for a new model, with the id `SESSION:train:MODEL_SEQ_ID`."""
        session = self._sessions.find(body.session_id, owner)
        model_id = f"{session.session_id}:train:{body.model_seq_id}"

        async def create_model() -> Reply:
            """Check the client's settings of the model, then create it in the trainer."""
            check_base(self._trainer.served, body.base_model)
            check_adapters(self._trainer.served, body.lora_config)
            check_optimizer(body.optimizer_config.type)
            # Drawn here, so that a checkpoint's record can name it.
            seed = body.lora_config.seed if body.lora_config else None
            await self._trainer.create_model(model_id, secrets.randbelow(_SEEDS) if seed is None else seed)
            return json_reply(model_id=model_id, type="create_model")

        return self._accept_new_model(session, model_id, digest_of(body), create_model, body.user_metadata)

    def load(self, body: LoadWeights, owner: str) -> Promise:
        """Create a model from a checkpoint, or load a checkpoint into an existing model.

        Raises MalformedError for a request that names no model.
        """
        if body.session_id is not None and body.model_seq_id is not None:
            session = self._sessions.find(body.session_id, owner)
            model_id = f"{session.session_id}:train:{body.model_seq_id}"
            load_new = partial(self._load_checkpoint, body, session, model_id, None)
            return self._accept_new_model(session, model_id, digest_of(body), load_new, body.user_metadata)
        if body.model_id is not None and body.seq_id is not None:
            session, model = self._sessions.find_model(body.model_id, owner)
            self._sessions.record_use(session, model)
            load_existing = partial(self._load_checkpoint, body, session, model.model_id, model)
            return self._ledger.submit(model.model_id, body.seq_id, digest_of(body), load_existing)
        raise MalformedError("load_weights: give session_id and model_seq_id, or model_id and seq_id")

    async def _load_checkpoint(
        self, body: LoadWeights, session: Session, model_id: str, existing_model: Model | None
    ) -> Reply:
        """Check that a checkpoint fits the service, then load it into model `model_id`.

        `existing_model`: the session's model of this id; None: the load creates it.
        """
        if body.weights_access_token is not None:
            raise UserError(
                "weights_access_token: is not supported; leave it out, and connect with the API key that saved the "
                "checkpoint"
            )
        folder, record = self._checkpoints.find_checkpoint(body.path, session.owner)
        if body.base_model is not None:
            check_base(self._trainer.served, body.base_model)
        if body.optimizer_config is not None:
            check_optimizer(body.optimizer_config.type)
        check_record(self._trainer.served, record, body.path)
        if body.optimizer and record["kind"] != "weights":
            raise UserError(f"path = {body.path}: has no optimizer state; load it without")

        async def load_and_tidy() -> None:
            """Load the checkpoint, and free the model again if its session has ended meanwhile."""
            with self._checkpoints.keep_while_reading(folder, record["time"]):
                await self._trainer.load(model_id, folder, with_optimizer=body.optimizer)
            # `_accept_new_model` handles new models.
            if existing_model is None:
                return
            # The load has dropped all gradients of the earlier state.
            existing_model.failure = None
            # `end_session` may have released the model before this load created it again.
            if self._sessions.has_ended(session):
                await self._trainer.forget(models=[model_id], versions=[])

        await self._background.run_to_end(load_and_tidy())
        return json_reply(path=body.path, model_id=model_id, type="load_weights")

    def describe_model(self, model_id: str, owner: str) -> dict[str, Any]:
        """Return the answer to get_info."""
        self._sessions.find_model(model_id, owner)
        served = self._trainer.served
        data = {"arch": served.architecture, "model_name": served.name, "tokenizer_id": served.tokenizer}
        return {
            "type": "get_info",
            "model_id": model_id,
            "model_data": data,
            "is_lora": True,
            "lora_rank": served.rank,
            "model_name": served.name,
        }

    def describe_weights(self, path: str, owner: str) -> dict[str, Any]:
        """Return the adapter settings of a checkpoint."""
        _, record = self._checkpoints.find_checkpoint(path, owner)
        served = self._trainer.served
        return {
            "base_model": record["base_model"],
            "is_lora": True,
            "lora_rank": record["rank"],
            "train_unembed": False,
            "train_mlp": served.trains_mlp,
            "train_attn": served.trains_attention,
        }

    def end_session(self, session: Session) -> None:
        """Refuse further requests of a session, and free its models and published weights soon."""
        self._sessions.remove(session)
        for model_id in session.models:
            self._ledger.close_model(model_id)
        self._ledger.forget_session(session.session_id)
        versions = self._published.end_session(session.session_id)
        # Do not await: the trainer's turn may come after minutes, and the SDK repeats requests without an answer.
        self._background.start(self._trainer.forget(models=list(session.models), versions=versions))

    async def move_idle_models(self, latest: float) -> None:
        idle_models = [
            model.model_id for model in self._sessions.models() if self._moved_if_used_before <= model.used_at < latest
        ]
        # Recorded first: a failed move is not repeated.
        self._moved_if_used_before = latest
        if idle_models:
            await self._trainer.move_to_disk(idle_models)

    def _accept_new_model(
        self,
        session: Session,
        model_id: str,
        digest: bytes,
        work: Callable[[], Awaitable[Reply]],
        metadata: Mapping[str, str] | None = None,
    ) -> Promise:
        """Accept the request for a new model, created by `work`. Its numbered requests begin when the model exists."""
        session.seen_at = self._clock()

        async def register_new_model() -> Reply:
            """Check the account's limit, create the model, and enter it in the session and the ledger."""
            # A promise expires. If the client then repeats its request, the trained model must not be reset.
            if model_id in session.models:
                raise UserError(f"model_seq_id of {model_id}: was used by another request; count on")
            sessions = self._sessions.owned_by(session.owner)
            num_models = sum(len(open_session.models) + len(open_session.starting) for open_session in sessions)
            if num_models >= MAX_MODELS:
                raise UserError(
                    f"this key has {MAX_MODELS} models in memory; close their sessions, or save and stop some"
                )
            session.starting.add(model_id)
            try:
                reply: Reply = await work()
            finally:
                session.starting.discard(model_id)
            # `end_session` releases only models that the session already has.
            if self._sessions.has_ended(session):
                await self._trainer.forget(models=[model_id], versions=[])
                raise UserError(f"session_id = {session.session_id}: ended before its model was made; begin a session")
            model = session.models[model_id] = Model(model_id, self._clock(), metadata)
            self._ledger.open_model(model_id, session.owner, model.record_skipped)
            return reply

        return self._ledger.submit_unordered(
            (session.session_id, "model", model_id), session.owner, digest, register_new_model, model_id=model_id
        )
