"""Sampling sessions, and their requests."""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np

from megarl.service.handlers.request_handlers import RequestHandlers
from megarl.service.handlers.served_checks import check_base, check_record
from megarl.service.handlers.sessions import Sampler
from megarl.service.messages import wire
from megarl.service.messages.requests import (
    CreateSampler,
    SampleAddress,
    SampleRequest,
    SampleSettings,
    count_sampling_tokens,
    read_fields,
)
from megarl.service.queueing.ledger import Promise, Reply, digest_of
from megarl.service.refusals import UserError
from megarl.service.storage.published import Weights
from megarl.types import SamplingSettings

_SEEDS = 2**31


class Sampling(RequestHandlers):
    """Turns sampling requests into samples of the trainer's engines, in any order."""

    async def open_sampler(self, body: CreateSampler, owner: str) -> str:
        """Return the id of a new sampling session, of a checkpoint or of the base model.

        Raises UserError or NotFoundError. A repeated request gets the first id.
        """
        session = self._sessions.find(body.session_id, owner)
        sampler_id = f"{session.session_id}:sample:{body.sampling_session_seq_id}"
        if sampler_id in session.samplers:
            return sampler_id
        if body.model_path is None or body.base_model is not None:
            check_base(self._trainer.served, body.base_model)
        if body.model_path is None:
            session.add_sampler(Sampler(sampler_id, Weights(owner, session.session_id)))
            return sampler_id
        folder, record = self._checkpoints.find_checkpoint(body.model_path, owner)
        check_record(self._trainer.served, record, body.model_path)
        # The first sampling request reads the weights.
        weights = Weights(owner, session.session_id, folder=folder, saved_at=record["time"])
        session.add_sampler(Sampler(sampler_id, weights, body.model_path))
        return sampler_id

    def describe(self, sampler_id: str, owner: str) -> dict[str, Any]:
        _, sampler = self._sessions.find_sampler(sampler_id, owner)
        values = {"sampler_id": sampler_id, "base_model": self._trainer.served.name, "model_path": sampler.path}
        return {name: value for name, value in values.items() if value is not None}

    def sample(self, values: dict[str, Any], owner: str) -> Promise:
        """Accept a sampling request. Raises UserError if it lacks its address."""
        address = read_fields(SampleAddress, values)
        session, sampler = self._sessions.find_sampler(address.sampling_session_id, owner)
        session.seen_at = self._clock()

        async def sample_prompt() -> Reply:
            """Sample the prompt, score it if the request asks for its log-probs, and return both in one reply."""
            body = read_fields(SampleRequest, values)
            prompt = _read_prompt(body)
            settings = self._make_settings(body.sampling_params, len(prompt), body.topk_sample_logprobs)
            first_seed = body.sampling_params.seed
            if first_seed is None:
                first_seed = secrets.randbelow(_SEEDS)
            # Different seeds, because equal seeds would give equal samples.
            seeds = [(first_seed + number) % _SEEDS for number in range(body.num_samples)]
            _refuse_unsupported(body, len(prompt))
            async with self._published.hold_weights(sampler.weights) as version:
                samples = await self._trainer.sample(version, prompt, settings, seeds)
                prompt_logprobs, top_tokens = None, None
                if body.prompt_logprobs or body.topk_prompt_logprobs:
                    prompt_logprobs, top_tokens = await self._trainer.score(version, prompt, body.topk_prompt_logprobs)
            if prompt_logprobs is not None and top_tokens is not None and body.prompt_logprobs_last_n is not None:
                # The SDK checks that only the last positions have values.
                prompt_logprobs[: -body.prompt_logprobs_last_n] = np.nan
                top_tokens.logprobs[: -body.prompt_logprobs_last_n] = -np.inf
            reply = wire.encode_sampling_reply(
                samples,
                prompt_logprobs if body.prompt_logprobs else None,
                top_tokens if body.topk_prompt_logprobs else None,
            )
            return Reply(reply, wire.PROTOBUF)

        return self._ledger.submit_unordered(
            (session.session_id, "asample", sampler.sampler_id, address.seq_id),
            owner,
            digest_of(values),
            sample_prompt,
            num_sequences=address.num_samples,
            tokens=count_sampling_tokens(values, address.num_samples, self._trainer.served.context_tokens),
        )

    def _make_settings(self, params: SampleSettings, num_prompt_tokens: int, num_top_tokens: int) -> SamplingSettings:
        """Check and translate the SDK's sampling parameters. Raises UserError."""
        served = self._trainer.served
        num_free_tokens = served.context_tokens - num_prompt_tokens
        if num_free_tokens < 1:
            raise UserError(
                f"prompt has {num_prompt_tokens} tokens: a prompt with its completion has at most "
                f"{served.context_tokens}; cut it"
            )
        stop_items = [params.stop] if isinstance(params.stop, str) else params.stop or []
        stop_texts = tuple(stop for stop in stop_items if isinstance(stop, str))
        stop_token_ids = tuple(stop for stop in stop_items if isinstance(stop, int))
        if "" in stop_texts:
            raise UserError("sampling_params.stop has an empty text: leave it out, or give [] to stop at nothing")
        if any(not 0 <= token_id < served.vocab_size for token_id in stop_token_ids):
            raise UserError(f"sampling_params.stop has a token outside of the vocabulary: 0 to {served.vocab_size - 1}")
        return SamplingSettings(
            max_new_tokens=min(num_free_tokens, params.max_tokens or num_free_tokens),
            temperature=params.temperature,
            top_p=params.top_p,
            # The SDK disables top-k with -1, megarl with 0.
            top_k=min(max(0, params.top_k), served.vocab_size),
            stop=stop_texts,
            stop_token_ids=stop_token_ids,
            # The SDK means: an empty list stops nowhere, None at the end of the sequence.
            ignore_eos=params.stop == [],
            num_top_tokens=min(num_top_tokens, served.vocab_size),
        )


def _read_prompt(body: SampleRequest) -> np.ndarray:
    """Return a request's prompt tokens. Raises UserError for images and for an empty prompt."""
    token_ids: list[int] = []
    for number, chunk in enumerate(body.prompt.chunks):
        if chunk.type != "encoded_text":
            raise UserError(f"prompt.chunks[{number}].type = {chunk.type:.50}: this service samples from text only")
        token_ids += chunk.tokens
    if not token_ids:
        raise UserError("prompt is empty: give at least one token")
    # A request's ids may exceed int32. A clipped id is outside the vocabulary, and still refused.
    return np.array([min(max(token_id, -1), 2**31 - 1) for token_id in token_ids], np.int32)


def _refuse_unsupported(body: SampleRequest, num_prompt_tokens: int) -> None:
    """Raise UserError for unsupported values of a sampling request."""
    for name in ("base_model", "model_path"):
        if (model := getattr(body, name)) is not None:
            raise UserError(f"{name} = {model:.200}: the sampling session has chosen the model; leave this out")
    if body.target_prompt_logprobs is not None:
        raise UserError("target_prompt_logprobs: is not supported; leave it out, or ask for topk_prompt_logprobs")
    if value := body.prompt_alt_tokens_k:
        raise UserError(f"prompt_alt_tokens_k = {value}: is not supported; leave it at 0")
    if body.record_stability_info:
        raise UserError(
            "record_stability_info = true: the loss stable_reinforce is not supported; leave it out, and use the loss "
            "importance_sampling or cispo"
        )
    if (num_last_positions := body.prompt_logprobs_last_n) is not None:
        if not body.prompt_logprobs:
            raise UserError(f"prompt_logprobs_last_n = {num_last_positions}: needs prompt_logprobs; set it to true")
        if num_last_positions >= num_prompt_tokens:
            raise UserError(
                f"prompt_logprobs_last_n = {num_last_positions}: the prompt has {num_prompt_tokens} tokens, and the "
                "first has no log-prob; leave it out"
            )
