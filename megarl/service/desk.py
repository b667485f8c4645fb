"""The service's desk: sessions, models and sampling sessions by owner, and the trainer's work for each request."""

from __future__ import annotations

import hashlib
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megarl.service import wire
from megarl.service.admission import QueueLimits
from megarl.service.checkpoints import Checkpoints
from megarl.service.datums import make_batch, split_values
from megarl.service.ledger import Ledger, Promise, Reply, json_reply
from megarl.service.losses import checked_settings
from megarl.service.refusals import MalformedError, NotFoundError, UserError
from megarl.service.requests import (
    AdamSettings,
    CreateModel,
    CreateSampler,
    LoadWeights,
    LoraSettings,
    Numbered,
    OptimStep,
    SampleAddress,
    SampleRequest,
    SampleSettings,
    SaveForSampler,
    SaveWeights,
    count_sampling_tokens,
    read_fields,
)
from megarl.service.trainer import ServedModel, Trainer
from megarl.types import SamplingSettings

# SDK 0.38 sends a heartbeat every 10 seconds, so only a lost client is silent for so long.
SILENT_SECONDS = 600.0
"""Seconds until a session without requests ends: its models, and weights published for it, leave the memory."""
MOST_SESSIONS = 64
"""Maximum sessions of one account."""
# Every idle model keeps its adapters, gradients and moments in host memory.
MOST_MODELS = 16
"""Maximum models of one account in memory."""
_SEEDS = 2**31


@dataclass(eq=False, slots=True)
class _Model:
    """A client's model. `failure` is the reason why the gradients since the last step are incomplete."""

    model_id: str
    failure: str | None = None


@dataclass(eq=False, slots=True)
class _Sampler:
    """A sampling session: the version of its weights (None: the base model), and their path."""

    sampler_id: str
    version: str | None
    path: str | None = None


@dataclass(eq=False, slots=True)
class _Session:
    """A client's session, with its models and samplers."""

    session_id: str
    owner: str
    seen_at: float
    models: dict[str, _Model] = field(default_factory=dict)
    starting: set[str] = field(default_factory=set)
    """Ids of models that the trainer is making. They count for the limit, so that parallel requests cannot exceed it.
    """
    samplers: dict[str, _Sampler] = field(default_factory=dict)


class Desk:
    """Turns requests into promises, and their work into calls of the trainer.

    Every id in a request is checked against the owner of its key: an id of another owner does not exist.
    """

    def __init__(
        self,
        trainer: Trainer,
        checkpoints: Checkpoints,
        report: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
        limits: QueueLimits | None = None,
    ) -> None:
        self._trainer, self._checkpoints, self._clock = trainer, checkpoints, clock
        self.ledger = Ledger(report, clock, limits)
        self._sessions: dict[str, _Session] = {}

    @property
    def served(self) -> ServedModel:
        return self._trainer.served

    def open_session(self, owner: str) -> str:
        """Return the id of a new session. Raises UserError if the owner has too many."""
        if sum(session.owner == owner for session in self._sessions.values()) >= MOST_SESSIONS:
            raise UserError(f"this key has {MOST_SESSIONS} open sessions; close some, or wait until silent ones end")
        session = _Session(secrets.token_hex(12), owner, self._clock())
        self._sessions[session.session_id] = session
        return session.session_id

    def touch_session(self, session_id: str, owner: str) -> None:
        """Note a sign of life of a session's client. Raises NotFoundError."""
        self._session(session_id, owner).seen_at = self._clock()

    async def finish_session(self, session_id: str, owner: str) -> None:
        """End a session, and free its memory. Saved checkpoints stay."""
        await self._end(self._session(session_id, owner))

    async def expire(self) -> None:
        """End silent sessions, forget old results, and delete expired checkpoints."""
        oldest = self._clock() - SILENT_SECONDS
        for session in [session for session in self._sessions.values() if session.seen_at < oldest]:
            await self._end(session)
        self.ledger.expire()
        self._checkpoints.delete_expired()

    def create_model(self, body: CreateModel, owner: str) -> Promise:
        session = self._session(body.session_id, owner)
        model_id = f"{session.session_id}:train:{body.model_seq_id}"

        async def work() -> Reply:
            self._check_base(body.base_model)
            self._check_adapters(body.lora_config)
            _check_optimizer(body.optimizer_config.type)
            # Drawn here, so that the record of a checkpoint can name it.
            seed = body.lora_config.seed if body.lora_config else None
            await self._trainer.create_model(model_id, secrets.randbelow(_SEEDS) if seed is None else seed)
            return json_reply(model_id=model_id, type="create_model")

        return self._begin_model(session, model_id, _digest(body), work)

    def load_weights(self, body: LoadWeights, owner: str) -> Promise:
        """Make a model from a checkpoint. Raises MalformedError for a request without a model."""
        if body.session_id is not None and body.model_seq_id is not None:
            session = self._session(body.session_id, owner)
            model_id = f"{session.session_id}:train:{body.model_seq_id}"
        elif body.model_id is not None and body.seq_id is not None:
            session, model = self._model(body.model_id, owner)
            model_id = model.model_id
        else:
            raise MalformedError("load_weights: give session_id and model_seq_id, or model_id and seq_id")

        async def work() -> Reply:
            folder, record = self._checkpoints.find(body.path, owner)
            if body.base_model is not None:
                self._check_base(body.base_model)
            if body.optimizer_config is not None:
                _check_optimizer(body.optimizer_config.type)
            self._check_record(record, body.path)
            if body.optimizer and record["kind"] != "weights":
                raise UserError(f"path = {body.path}: has no optimizer state; load it without")
            await self._trainer.load(model_id, folder, with_optimizer=body.optimizer)
            return json_reply(path=body.path, model_id=model_id, type="load_weights")

        if body.seq_id is not None and body.model_id is not None:
            return self.ledger.submit(model_id, body.seq_id, _digest(body), work)
        return self._begin_model(session, model_id, _digest(body), work)

    def forward_backward(self, raw: bytes, owner: str) -> Promise:
        """Accept a training call. Raises MalformedError for any other body than the SDK's message."""
        message = wire.parse_training_call(raw)
        session, model = self._model(message.model_id, owner)
        session.seen_at = self._clock()

        async def work() -> Reply:
            try:
                settings = checked_settings(message.loss_fn, wire.loss_settings(message))
                served = self.served
                batch = make_batch(
                    wire.read_datums(message),
                    message.loss_fn,
                    vocab_size=served.vocab_size,
                    max_tokens=served.row_tokens,
                )
                logprobs, losses = await self._trainer.forward_backward(
                    model.model_id, batch, message.loss_fn, settings, is_forward_only=message.forward_only
                )
            except BaseException as error:
                # A cancelled call counts as failed too: the ranks may still add its gradients.
                if not message.forward_only:
                    model.failure = f"forward_backward {message.seq_id} failed: {error}"
                raise
            # The clients' chunks are combined by the names' endings.
            metrics = {"loss:sum": float(losses.astype(np.float64).sum())}
            return Reply(wire.training_reply(split_values(logprobs, batch), metrics), wire.PROTOBUF)

        digest = hashlib.sha256(raw).digest()
        return self.ledger.submit(model.model_id, message.seq_id, digest, work, tokens=wire.count_tokens(message))

    def optim_step(self, values: dict[str, Any], owner: str) -> Promise:
        address, model = self._numbered(values, owner)

        async def work() -> Reply:
            # The failure is reset here, because the gradients are dropped with it.
            failure, model.failure = model.failure, None
            try:
                body = read_fields(OptimStep, values)
                if body.optimizer_params is not None:
                    _check_optimizer(body.optimizer_params.type)
                if failure is not None:
                    raise UserError(
                        f"no step: {failure}. All gradients since the last step were dropped; send them again"
                    )
            except UserError:
                await self._trainer.clear_gradients(model.model_id)
                raise
            metrics = await self._trainer.optim_step(model.model_id, body.adam_params or AdamSettings())
            return json_reply(metrics=metrics)

        return self.ledger.submit(model.model_id, address.seq_id, _digest(values), work)

    def save_weights(self, values: dict[str, Any], owner: str) -> Promise:
        address, model = self._numbered(values, owner)

        async def work() -> Reply:
            body = read_fields(SaveWeights, values)
            path = await self._save(model, "weights", body.path, owner, body.ttl_seconds, overwrite=body.overwrite)
            return json_reply(path=path, type="save_weights")

        return self.ledger.submit(model.model_id, address.seq_id, _digest(values), work)

    def save_for_sampler(self, values: dict[str, Any], owner: str) -> Promise:
        """Keep a model's weights for sampling: on disk with a name, or as a sampling session in memory."""
        address, model = self._numbered(values, owner)
        session, _ = self._model(model.model_id, owner)

        async def work() -> Reply:
            body = read_fields(SaveForSampler, values)
            if body.kind != "snapshot":
                raise UserError(
                    f"kind = {body.kind}: sampling clients with moving weights are not supported; use snapshot"
                )
            if body.path is not None:
                # SDK 0.38 has no field for overwriting in this call, so a name in use is replaced.
                path = await self._save(model, "sampler_weights", body.path, owner, body.ttl_seconds, overwrite=True)
                return json_reply(path=path, type="save_weights_for_sampler")
            sampler = _Sampler(secrets.token_hex(12), secrets.token_hex(8))
            assert sampler.version is not None
            await self._trainer.publish(model.model_id, sampler.version)
            session.samplers[sampler.sampler_id] = sampler
            return json_reply(sampling_session_id=sampler.sampler_id, type="save_weights_for_sampler")

        return self.ledger.submit(model.model_id, address.seq_id, _digest(values), work)

    async def create_sampler(self, body: CreateSampler, owner: str) -> str:
        """Return the id of a sampling session: of a checkpoint, or of the base model.

        Raises UserError or NotFoundError. A repeated request gets the first id.
        """
        session = self._session(body.session_id, owner)
        sampler_id = f"{session.session_id}:sample:{body.sampling_session_seq_id}"
        if sampler_id in session.samplers:
            return sampler_id
        if body.model_path is None:
            self._check_base(body.base_model)
            session.samplers[sampler_id] = _Sampler(sampler_id, None)
            return sampler_id
        folder, record = self._checkpoints.find(body.model_path, owner)
        self._check_record(record, body.model_path)
        version = secrets.token_hex(8)
        await self._trainer.publish_folder(folder, version)
        session.samplers[sampler_id] = _Sampler(sampler_id, version, body.model_path)
        return sampler_id

    def describe_sampler(self, sampler_id: str, owner: str) -> dict[str, Any]:
        _, sampler = self._sampler(sampler_id, owner)
        values = {"sampler_id": sampler_id, "base_model": self.served.name, "model_path": sampler.path}
        return {name: value for name, value in values.items() if value is not None}

    def describe_model(self, model_id: str, owner: str) -> dict[str, Any]:
        self._model(model_id, owner)
        served = self.served
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
        _, record = self._checkpoints.find(path, owner)
        served = self.served
        return {
            "base_model": record["base_model"],
            "is_lora": True,
            "lora_rank": record["rank"],
            "train_unembed": False,
            "train_mlp": served.trains_mlp,
            "train_attn": served.trains_attention,
        }

    def sample(self, values: dict[str, Any], owner: str) -> Promise:
        """Accept a sampling request. Raises UserError for one without an address."""
        address = read_fields(SampleAddress, values)
        session, sampler = self._sampler(address.sampling_session_id, owner)
        session.seen_at = self._clock()

        async def work() -> Reply:
            body = read_fields(SampleRequest, values)
            prompt = _prompt_tokens(body)
            settings = self._sampling_settings(body.sampling_params, len(prompt))
            first_seed = body.sampling_params.seed
            if first_seed is None:
                first_seed = secrets.randbelow(_SEEDS)
            # Equal seeds would give equal samples.
            seeds = [(first_seed + number) % _SEEDS for number in range(body.num_samples)]
            _refuse_unsupported(body)
            samples = await self._trainer.sample(sampler.version, prompt, settings, seeds)
            scores = await self._trainer.score(sampler.version, prompt) if body.prompt_logprobs else None
            return Reply(wire.sampling_reply(samples, scores), wire.PROTOBUF)

        return self.ledger.submit_single(
            (session.session_id, "asample", sampler.sampler_id, address.seq_id),
            owner,
            _digest(values),
            work,
            num_sequences=address.num_samples,
            tokens=count_sampling_tokens(values, address.num_samples, self.served.context_tokens),
        )

    async def close(self) -> None:
        await self.ledger.close()

    def _sampling_settings(self, params: SampleSettings, num_prompt_tokens: int) -> SamplingSettings:
        room = self.served.context_tokens - num_prompt_tokens
        if room < 1:
            raise UserError(
                f"prompt has {num_prompt_tokens} tokens: a prompt with its completion has at most "
                f"{self.served.context_tokens}; cut it"
            )
        stop = params.stop
        if stop == []:
            raise UserError("sampling_params.stop = []: sampling beyond the end-of-sequence token is not supported")
        texts = (stop,) if isinstance(stop, str) else tuple(text for text in stop or () if isinstance(text, str))
        token_ids = () if isinstance(stop, str) else tuple(token for token in stop or () if isinstance(token, int))
        return SamplingSettings(
            max_new_tokens=min(room, params.max_tokens or room),
            temperature=params.temperature,
            top_p=params.top_p,
            # The SDK turns top-k off with -1, megarl with 0.
            top_k=max(0, params.top_k),
            stop=texts,
            stop_token_ids=token_ids,
        )

    async def _save(
        self, model: _Model, kind: str, name: str, owner: str, ttl_seconds: int | None, *, overwrite: bool
    ) -> str:
        partial = self._checkpoints.begin(model.model_id, kind, name, overwrite=overwrite)
        record = {"owner": owner, "kind": kind, "base_model": self.served.name, "rank": self.served.rank}
        try:
            await self._trainer.save(model.model_id, partial)
            self._checkpoints.complete(partial, name, record, ttl_seconds)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        return self._checkpoints.path_of(model.model_id, kind, name)

    def _begin_model(self, session: _Session, model_id: str, digest: bytes, work: Any) -> Promise:
        """Accept the request for a new model. Its numbers begin when it exists."""
        session.seen_at = self._clock()

        async def make() -> Reply:
            sessions = [each for each in self._sessions.values() if each.owner == session.owner]
            num_models = sum(len(each.models) + len(each.starting) for each in sessions)
            if num_models >= MOST_MODELS:
                raise UserError(
                    f"this key has {MOST_MODELS} models in memory; close their sessions, or save and stop some"
                )
            session.starting.add(model_id)
            try:
                reply: Reply = await work()
            finally:
                session.starting.discard(model_id)
            # `_end` releases only the models that the session has.
            if self._sessions.get(session.session_id) is not session:
                await self._trainer.forget(models=[model_id], versions=[])
                raise UserError(f"session_id = {session.session_id}: ended before its model was made; begin a session")
            session.models[model_id] = _Model(model_id)
            self.ledger.open_model(model_id, session.owner)
            return reply

        return self.ledger.submit_single(
            (session.session_id, "model", model_id), session.owner, digest, make, model_id=model_id
        )

    def _numbered(self, values: dict[str, Any], owner: str) -> tuple[Numbered, _Model]:
        """Return the model and number of a request, before its other fields are read.

        A wrong field fails its promise only: a refused request would have used its number.
        """
        address = read_fields(Numbered, values)
        session, model = self._model(address.model_id, owner)
        session.seen_at = self._clock()
        return address, model

    def _session(self, session_id: str, owner: str) -> _Session:
        session = self._sessions.get(session_id)
        if session is None or session.owner != owner:
            raise NotFoundError(f"session_id = {session_id:.100}: does not exist")
        return session

    def _model(self, model_id: str, owner: str) -> tuple[_Session, _Model]:
        for session in self._sessions.values():
            if session.owner == owner and model_id in session.models:
                return session, session.models[model_id]
        raise NotFoundError(f"model_id = {model_id:.100}: does not exist")

    def _sampler(self, sampler_id: str, owner: str) -> tuple[_Session, _Sampler]:
        for session in self._sessions.values():
            if session.owner == owner and sampler_id in session.samplers:
                return session, session.samplers[sampler_id]
        raise NotFoundError(f"sampling_session_id = {sampler_id:.100}: does not exist")

    async def _end(self, session: _Session) -> None:
        # The session leaves before the await below, so that no new request reaches its models.
        self._sessions.pop(session.session_id, None)
        for model_id in session.models:
            self.ledger.close_model(model_id)
        self.ledger.forget_owner_keys(session.session_id)
        versions = [sampler.version for sampler in session.samplers.values() if sampler.version is not None]
        await self._trainer.forget(models=list(session.models), versions=versions)

    def _check_base(self, name: str | None) -> None:
        if name != self.served.name:
            raise UserError(f"base_model = {name}: this service has {self.served.name}")

    def _check_adapters(self, lora: LoraSettings | None) -> None:
        served = self.served
        if lora is None:
            raise UserError("lora_config is missing: this service trains LoRA adapters only")
        if lora.rank != served.rank:
            raise UserError(f"lora_config.rank = {lora.rank}: the adapters of this service have rank {served.rank}")
        kinds = (
            ("train_mlp", lora.train_mlp, served.trains_mlp),
            ("train_attn", lora.train_attn, served.trains_attention),
        )
        for name, wanted, trained in kinds:
            if wanted != trained:
                raise UserError(
                    f"lora_config.{name} = {wanted}: in this service it is {trained} (lora.targets of its recipe)"
                )

    def _check_record(self, record: Mapping[str, Any], path: str) -> None:
        served = self.served
        if (record["base_model"], record["rank"]) != (served.name, served.rank):
            raise UserError(
                f"path = {path}: has rank {record['rank']} and base model {record['base_model']}; this service has "
                f"rank {served.rank} and {served.name}"
            )


def _check_optimizer(kind: str) -> None:
    if kind != "adamw":
        raise UserError(f"optimizer type = {kind}: this service has adamw only")


def _prompt_tokens(body: SampleRequest) -> np.ndarray:
    token_ids: list[int] = []
    for number, chunk in enumerate(body.prompt.chunks):
        if chunk.type != "encoded_text":
            raise UserError(f"prompt.chunks[{number}].type = {chunk.type}: this service samples from text only")
        token_ids += chunk.tokens
    if not token_ids:
        raise UserError("prompt is empty: give at least one token")
    # Ids of a request have any size, and int32 has not. A clipped one is still refused, outside the vocabulary.
    return np.array([min(max(token_id, -1), 2**31 - 1) for token_id in token_ids], np.int32)


def _refuse_unsupported(body: SampleRequest) -> None:
    """Raise UserError for unsupported values of a sampling request."""
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k"):
        if value := getattr(body, name):
            raise UserError(f"{name} = {value}: is not supported; leave it at 0")
    for name in ("target_prompt_logprobs", "prompt_logprobs_last_n"):
        if getattr(body, name) is not None:
            raise UserError(f"{name}: is not supported; leave it out")
    if body.record_stability_info:
        raise UserError("record_stability_info = true: stable_reinforce is not supported; leave it out")


def _digest(values: Any) -> bytes:
    """Return an identity of a request's values, equal for a repeated request."""
    return hashlib.sha256(repr(values).encode(errors="surrogatepass")).digest()
