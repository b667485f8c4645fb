"""The service's desk: sessions, models and sampling sessions by owner, and the trainer's work for each request."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import shutil
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megarl.service import wire
from megarl.service.admission import QueueLimits
from megarl.service.checkpoints import Checkpoints
from megarl.service.datums import make_batch, split_values
from megarl.service.ledger import Ledger, Promise, Reply, json_reply
from megarl.service.listing import RunState
from megarl.service.losses import checked_settings
from megarl.service.published import PublishedWeights, Weights
from megarl.service.refusals import MalformedError, NotFoundError, UserError
from megarl.service.requests import (
    AdamSettings,
    CreateModel,
    CreateSampler,
    CreateSession,
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
# The pause between two steps of a loop is its sampling, which takes minutes. A rank reads a state of 2 GB in seconds.
IDLE_SECONDS = 1800.0
"""Default of the seconds until a model without requests moves from host memory to disk."""
# A loop that samples from each step's weights makes one a step.
MOST_SAMPLERS = 10_000
"""Maximum sampling sessions of one session. The oldest one makes room."""
_SEEDS = 2**31


@dataclass(eq=False, slots=True)
class _Model:
    """A client's model. `failure` is the reason why the gradients since the last step are incomplete."""

    model_id: str
    used_at: float
    """Time of its last request."""
    metadata: Mapping[str, str] | None = None
    is_on_disk: bool = False
    failure: str | None = None
    moving_weights: Weights | None = None
    """Weights of the sampling sessions following the model, from its last save for them."""

    def note_skipped(self, number: int) -> None:
        """Fail the next step: the missing request may have had a part of its gradients."""
        self.failure = f"request {number} did not arrive"


@dataclass(eq=False, slots=True)
class _Sampler:
    """A sampling session: its weights, and their path. With `model` it follows the model's saves."""

    sampler_id: str
    fixed_weights: Weights
    path: str | None = None
    model: _Model | None = None

    @property
    def weights(self) -> Weights:
        return self.fixed_weights if self.model is None else self.model.moving_weights or self.fixed_weights


@dataclass(eq=False, slots=True)
class _Session:
    """A client's session, with its models and samplers."""

    session_id: str
    owner: str
    seen_at: float
    metadata: Mapping[str, str] | None = None
    display_name: str | None = None
    models: dict[str, _Model] = field(default_factory=dict)
    starting: set[str] = field(default_factory=set)
    """Ids of models that the trainer is making. They count for the limit, so that parallel requests cannot exceed it.
    """
    samplers: dict[str, _Sampler] = field(default_factory=dict)

    def add_sampler(self, sampler: _Sampler) -> None:
        if len(self.samplers) >= MOST_SAMPLERS:
            del self.samplers[next(iter(self.samplers))]
        self.samplers[sampler.sampler_id] = sampler


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
        *,
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        self._trainer, self.checkpoints, self._clock = trainer, checkpoints, clock
        self._idle_seconds = idle_seconds
        self.report = report
        """Function that is called with errors of the service."""
        self.ledger = Ledger(report, clock, limits)
        self._sessions: dict[str, _Session] = {}
        # Sessions have the monotonic time of their last request, and clients want that of a calendar.
        self._epoch = time.time() - clock()
        self._published = PublishedWeights(trainer, checkpoints)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def served(self) -> ServedModel:
        return self._trainer.served

    def open_session(self, body: CreateSession, owner: str) -> str:
        """Return the id of a new session. Raises UserError if the owner has too many."""
        if sum(session.owner == owner for session in self._sessions.values()) >= MOST_SESSIONS:
            raise UserError(f"this key has {MOST_SESSIONS} open sessions; close some, or wait until silent ones end")
        session = _Session(secrets.token_hex(12), owner, self._clock(), body.user_metadata, body.display_name)
        self._sessions[session.session_id] = session
        return session.session_id

    def session_ids(self, owner: str) -> list[str]:
        """Return the ids of an owner's sessions, newest first."""
        return [name for name, session in reversed(self._sessions.items()) if session.owner == owner]

    def describe_session(self, session_id: str, owner: str) -> dict[str, Any]:
        session = self._session(session_id, owner)
        return {
            "training_run_ids": list(session.models),
            "sampler_ids": list(session.samplers),
            "user_metadata": session.metadata,
            "display_name": session.display_name,
        }

    def run_states(self, owner: str) -> list[RunState]:
        """Return an owner's models in memory."""
        return [
            RunState(model.model_id, owner, session.seen_at + self._epoch, model.metadata)
            for session in self._sessions.values()
            if session.owner == owner
            for model in session.models.values()
        ]

    def touch_session(self, session_id: str, owner: str) -> None:
        """Note a sign of life of a session's client. Raises NotFoundError."""
        self._session(session_id, owner).seen_at = self._clock()

    def finish_session(self, session_id: str, owner: str) -> None:
        """End a session. Its memory is freed soon. Saved checkpoints stay."""
        self._end(self._session(session_id, owner))

    async def expire(self) -> None:
        """End silent sessions, move idle models to disk, forget old results, and delete expired checkpoints."""
        oldest = self._clock() - SILENT_SECONDS
        # First what needs no turn of the trainer: a long call of one model must not keep another one's numbers waiting.
        self.ledger.expire()
        for session in [session for session in self._sessions.values() if session.seen_at < oldest]:
            self._end(session)
        await self._move_idle_models()
        self.checkpoints.delete_expired()

    async def _move_idle_models(self) -> None:
        latest = self._clock() - self._idle_seconds
        models = [model for session in self._sessions.values() for model in session.models.values()]
        idle = [model for model in models if model.used_at < latest and not model.is_on_disk]
        for model in idle:
            model.is_on_disk = True
        if idle:
            await self._trainer.move_to_disk([model.model_id for model in idle])

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

        return self._begin_model(session, model_id, _digest(body), work, body.user_metadata)

    def load_weights(self, body: LoadWeights, owner: str) -> Promise:
        """Make a model from a checkpoint. Raises MalformedError for a request without a model."""
        model: _Model | None = None
        number = 0
        if body.session_id is not None and body.model_seq_id is not None:
            session = self._session(body.session_id, owner)
            model_id = f"{session.session_id}:train:{body.model_seq_id}"
        elif body.model_id is not None and body.seq_id is not None:
            session, model = self._model(body.model_id, owner)
            self._note_use(session, model)
            model_id, number = model.model_id, body.seq_id
        else:
            raise MalformedError("load_weights: give session_id and model_seq_id, or model_id and seq_id")

        async def work() -> Reply:
            folder, record = self.checkpoints.find(body.path, owner)
            if body.base_model is not None:
                self._check_base(body.base_model)
            if body.optimizer_config is not None:
                _check_optimizer(body.optimizer_config.type)
            self._check_record(record, body.path)
            if body.optimizer and record["kind"] != "weights":
                raise UserError(f"path = {body.path}: has no optimizer state; load it without")

            async def read() -> None:
                with self.checkpoints.reading(folder, record["time"]):
                    await self._trainer.load(model_id, folder, with_optimizer=body.optimizer)
                if model is not None:
                    # All gradients were dropped with the earlier state.
                    model.failure = None
                # `_end` may have released the model before this load made it again. `_begin_model` handles new models.
                if model is not None and self._sessions.get(session.session_id) is not session:
                    await self._trainer.forget(models=[model_id], versions=[])

            await self._run_to_end(read())
            return json_reply(path=body.path, model_id=model_id, type="load_weights")

        if model is not None:
            return self.ledger.submit(model_id, number, _digest(body), work)
        return self._begin_model(session, model_id, _digest(body), work, body.user_metadata)

    def forward_backward(self, raw: bytes, owner: str) -> Promise:
        """Accept a training call. Raises MalformedError for any other body than the SDK's message."""
        message = wire.parse_training_call(raw)
        session, model = self._model(message.model_id, owner)
        self._note_use(session, model)

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
                    # As in the ledger, the client does not learn the text of an error of the service.
                    reason = error if isinstance(error, UserError) else type(error).__name__
                    model.failure = f"forward_backward {message.seq_id} failed: {reason}"
                raise
            # The clients' chunks are combined by the names' endings.
            metrics = {"loss:sum": float(losses.astype(np.float64).sum())}
            return Reply(wire.training_reply(split_values(logprobs, batch), metrics), wire.PROTOBUF)

        digest = hashlib.sha256(raw).digest()
        return self.ledger.submit(model.model_id, message.seq_id, digest, work, tokens=wire.count_tokens(message))

    def refuse_numbered(self, values: dict[str, Any], owner: str) -> Promise:
        """Accept an unsupported numbered request. Its promise fails, so its number is used."""
        address, model = self._numbered(values, owner)

        async def work() -> Reply:
            raise UserError(
                "save_weights_external: this service writes no external formats; use save_state, and copy the folder "
                "from service/checkpoints in the folder of the run"
            )

        return self.ledger.submit(model.model_id, address.seq_id, _digest(values), work)

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
            path = await self._save(model, "weights", body, owner, overwrite=body.overwrite)
            return json_reply(path=path, type="save_weights")

        return self.ledger.submit(model.model_id, address.seq_id, _digest(values), work)

    def save_for_sampler(self, values: dict[str, Any], owner: str) -> Promise:
        """Keep a model's weights for sampling: on disk with a name, or as a sampling session in memory."""
        address, model = self._numbered(values, owner)
        session, _ = self._model(model.model_id, owner)

        async def work() -> Reply:
            body = read_fields(SaveForSampler, values)
            if body.kind not in ("snapshot", "inflight"):
                raise UserError(f"kind = {body.kind}: is not a kind of sampling client; use snapshot or inflight")
            if body.path is not None:
                # SDK 0.38 has no field for overwriting in this call, so a name in use is replaced.
                path = await self._save(model, "sampler_weights", body, owner, overwrite=True)
                return json_reply(path=path, type="save_weights_for_sampler")
            weights = await self._published.copy_model(model.model_id, owner, session.session_id)
            sampler = _Sampler(secrets.token_hex(12), weights)
            if body.kind == "inflight":
                # Requests until now finish with the weights that they began with.
                earlier, model.moving_weights, sampler.model = model.moving_weights, weights, model
                if earlier is not None:
                    await self._published.end(earlier)
            session.add_sampler(sampler)
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
            session.add_sampler(_Sampler(sampler_id, Weights(owner, session.session_id)))
            return sampler_id
        folder, record = self.checkpoints.find(body.model_path, owner)
        self._check_record(record, body.model_path)
        # The weights are read by the first request for them.
        weights = Weights(owner, session.session_id, folder=folder, saved_at=record["time"])
        session.add_sampler(_Sampler(sampler_id, weights, body.model_path))
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
        _, record = self.checkpoints.find(path, owner)
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
            settings = self._sampling_settings(body.sampling_params, len(prompt), body.topk_sample_logprobs)
            first_seed = body.sampling_params.seed
            if first_seed is None:
                first_seed = secrets.randbelow(_SEEDS)
            # Equal seeds would give equal samples.
            seeds = [(first_seed + number) % _SEEDS for number in range(body.num_samples)]
            _refuse_unsupported(body, len(prompt))
            async with self._published.used(sampler.weights) as version:
                samples = await self._trainer.sample(version, prompt, settings, seeds)
                scores, top = None, None
                if body.prompt_logprobs or body.topk_prompt_logprobs:
                    scores, top = await self._trainer.score(version, prompt, body.topk_prompt_logprobs)
            if scores is not None and top is not None and body.prompt_logprobs_last_n is not None:
                # The SDK checks that nothing before the last ones has a value.
                scores[: -body.prompt_logprobs_last_n] = np.nan
                top.logprobs[: -body.prompt_logprobs_last_n] = -np.inf
            reply = wire.sampling_reply(
                samples, scores if body.prompt_logprobs else None, top if body.topk_prompt_logprobs else None
            )
            return Reply(reply, wire.PROTOBUF)

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

    def _sampling_settings(
        self, params: SampleSettings, num_prompt_tokens: int, num_top_tokens: int
    ) -> SamplingSettings:
        room = self.served.context_tokens - num_prompt_tokens
        if room < 1:
            raise UserError(
                f"prompt has {num_prompt_tokens} tokens: a prompt with its completion has at most "
                f"{self.served.context_tokens}; cut it"
            )
        stops = [params.stop] if isinstance(params.stop, str) else params.stop or []
        texts = tuple(stop for stop in stops if isinstance(stop, str))
        token_ids = tuple(stop for stop in stops if isinstance(stop, int))
        if "" in texts:
            raise UserError("sampling_params.stop has an empty text: leave it out, or give [] to stop at nothing")
        if any(not 0 <= token_id < self.served.vocab_size for token_id in token_ids):
            raise UserError(
                f"sampling_params.stop has a token outside of the vocabulary: 0 to {self.served.vocab_size - 1}"
            )
        return SamplingSettings(
            max_new_tokens=min(room, params.max_tokens or room),
            temperature=params.temperature,
            top_p=params.top_p,
            # The SDK turns top-k off with -1, megarl with 0.
            top_k=min(max(0, params.top_k), self.served.vocab_size),
            stop=texts,
            stop_token_ids=token_ids,
            # An empty list stops at nothing, and None at the end of the sequence.
            ignore_eos=params.stop == [],
            num_top_tokens=min(num_top_tokens, self.served.vocab_size),
        )

    async def _save(
        self, model: _Model, kind: str, body: SaveWeights | SaveForSampler, owner: str, *, overwrite: bool
    ) -> str:
        name = body.path
        assert name is not None
        partial = self.checkpoints.begin(model.model_id, kind, name, owner, overwrite=overwrite)
        record = {
            "owner": owner,
            "kind": kind,
            "base_model": self.served.name,
            "rank": self.served.rank,
            "user_metadata": body.user_metadata,
            "run_metadata": model.metadata,
        }

        async def write() -> None:
            try:
                await self._trainer.save(model.model_id, partial)
                self.checkpoints.complete(partial, name, record, body.ttl_seconds)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise

        await self._run_to_end(write())
        return self.checkpoints.path_of(model.model_id, kind, name)

    async def _run_to_end(self, work: Coroutine[Any, Any, None]) -> None:
        """Await work of the ranks on a folder, which goes on if the end of a session cancels its request.

        A folder that vanished under the ranks would be an error of theirs, which ends the whole service.
        """
        await asyncio.shield(self._start(work))

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        # asyncio itself keeps only weak references to tasks.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _begin_model(
        self,
        session: _Session,
        model_id: str,
        digest: bytes,
        work: Callable[[], Awaitable[Reply]],
        metadata: Mapping[str, str] | None = None,
    ) -> Promise:
        """Accept the request for a new model. Its numbers begin when it exists."""
        session.seen_at = self._clock()

        async def make() -> Reply:
            # The first promise expires. A copy of its request that comes later must not reset a trained model.
            if model_id in session.models:
                raise UserError(f"model_seq_id of {model_id}: was used by another request; count on")
            sessions = [open_session for open_session in self._sessions.values() if open_session.owner == session.owner]
            num_models = sum(len(open_session.models) + len(open_session.starting) for open_session in sessions)
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
            model = session.models[model_id] = _Model(model_id, self._clock(), metadata)
            self.ledger.open_model(model_id, session.owner, model.note_skipped)
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
        self._note_use(session, model)
        return address, model

    def _note_use(self, session: _Session, model: _Model) -> None:
        session.seen_at = model.used_at = self._clock()
        model.is_on_disk = False

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

    def _end(self, session: _Session) -> None:
        self._sessions.pop(session.session_id, None)
        for model_id in session.models:
            self.ledger.close_model(model_id)
        self.ledger.forget_owner_keys(session.session_id)
        versions = self._published.end_session(session.session_id)
        # Not awaited: its turn may come after minutes, and the SDK repeats a request that has no answer for so long.
        self._start(self._trainer.forget(models=list(session.models), versions=versions))

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


def _refuse_unsupported(body: SampleRequest, num_prompt_tokens: int) -> None:
    """Raise UserError for unsupported values of a sampling request."""
    if body.target_prompt_logprobs is not None:
        raise UserError("target_prompt_logprobs: is not supported; leave it out, or ask for topk_prompt_logprobs")
    if value := body.prompt_alt_tokens_k:
        raise UserError(f"prompt_alt_tokens_k = {value}: is not supported; leave it at 0")
    if body.record_stability_info:
        raise UserError("record_stability_info = true: stable_reinforce is not supported; leave it out")
    if (last := body.prompt_logprobs_last_n) is not None:
        if not body.prompt_logprobs:
            raise UserError(f"prompt_logprobs_last_n = {last}: needs prompt_logprobs; set it to true")
        if last >= num_prompt_tokens:
            raise UserError(
                f"prompt_logprobs_last_n = {last}: the prompt has {num_prompt_tokens} tokens, and the first has no "
                "log-prob; leave it out"
            )


def _digest(values: Any) -> bytes:
    """Return an identity of a request's values, equal for a repeated request."""
    return hashlib.sha256(repr(values).encode(errors="surrogatepass")).digest()
