"""Training requests: gradients of a batch, and steps of the optimizer."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import numpy as np

from megarl.data.token_batch import TokenBatch
from megarl.service.handlers.request_handlers import RequestHandlers
from megarl.service.handlers.served_checks import check_optimizer
from megarl.service.messages import wire
from megarl.service.messages.datums import make_batch, split_values
from megarl.service.messages.losses import read_settings
from megarl.service.messages.requests import OptimStep, read_fields
from megarl.service.queueing.ledger import Promise, Reply, digest_of, json_reply
from megarl.service.refusals import UserError


class TrainingCalls(RequestHandlers):
    """Turns training requests into calls of the trainer, in the order of their numbers."""

    def forward_backward(self, raw: bytes, owner: str) -> Promise:
        """Accept a training call. Raises MalformedError for any body but the SDK's message."""
        message = wire.parse_training_call(raw)
        session, model = self._sessions.find_model(message.model_id, owner)
        self._sessions.record_use(session, model)

        async def add_gradients() -> Reply:
            """Run the forward and backward pass in the trainer, and return each datum's log-probs.

            If the pass fails, the model's gradients are incomplete, so its next step must fail too.
            """
            try:
                settings = read_settings(message.loss_fn, wire.read_loss_settings(message))
                # In a thread: reading many small tensors takes a second, and other clients would wait.
                batch = await asyncio.to_thread(self._read_batch, message)
                logprobs, losses = await self._trainer.forward_backward(
                    model.model_id, batch, message.loss_fn, settings, is_forward_only=message.forward_only
                )
            except BaseException as error:
                # A cancelled call counts as failed: the ranks may still add its gradients.
                if not message.forward_only:
                    # As in the ledger, the client does not see the text of a service's error.
                    reason = error if isinstance(error, UserError) else type(error).__name__
                    model.failure = f"forward_backward {message.seq_id} failed: {reason}"
                raise
            # The client combines metrics of its chunks by the names' endings, such as `:sum`.
            metrics = {"loss:sum": float(losses.astype(np.float64).sum())}
            return Reply(wire.encode_training_reply(split_values(logprobs, batch), metrics), wire.PROTOBUF)

        digest = hashlib.sha256(raw).digest()
        return self._ledger.submit(
            model.model_id,
            message.seq_id,
            digest,
            add_gradients,
            tokens=wire.count_tokens(message),
            is_training=not message.forward_only,
        )

    def _read_batch(self, message: Any) -> TokenBatch:
        served = self._trainer.served
        return make_batch(
            wire.read_datums(message), message.loss_fn, vocab_size=served.vocab_size, max_tokens=served.row_tokens
        )

    def optim_step(self, values: dict[str, Any], owner: str) -> Promise:
        """Accept an optimizer step."""
        address, model = self._sessions.read_address(values, owner)

        async def run_step() -> Reply:
            """Run a step of the optimizer. After a failed call since the last step, drop the gradients instead."""
            # Reset the failure here: the gradients are dropped with it.
            failure, model.failure = model.failure, None
            try:
                body = read_fields(OptimStep, values)
                if body.optimizer_params is not None:
                    check_optimizer(body.optimizer_params.type)
                # A step with defaults would hide a newer name of the settings.
                if body.adam_params is None:
                    raise UserError("adam_params is missing: give the settings of AdamW, at least learning_rate")
                if failure is not None:
                    raise UserError(
                        f"no optimizer step: {failure}. The gradients of all calls since the last step were dropped; "
                        "send these calls again"
                    )
            except UserError:
                await self._trainer.clear_gradients(model.model_id)
                raise
            metrics = await self._trainer.optim_step(model.model_id, body.adam_params)
            return json_reply(metrics=metrics)

        return self._ledger.submit(model.model_id, address.seq_id, digest_of(values), run_step, is_training=True)

    def fail_in_turn(self, model_id: str, number: int, error: Exception, owner: str, *, is_training: bool) -> Promise:
        """Use the number of an unreadable request, and return a promise that fails with `error`.

        After a refusal SDK 0.38 continues with the next number, and later requests would wait for this one.
        `is_training`: the next step fails too. Raises NotFoundError, and BusyError for a while.
        """
        session, model = self._sessions.find_model(model_id, owner)
        self._sessions.record_use(session, model)
        return self._ledger.fail_in_turn(model_id, number, error, is_training=is_training)

    def save_weights_external(self, values: dict[str, Any], owner: str) -> Promise:
        """Return a promise that fails: external formats are not supported. The request's number counts as used."""
        address, model = self._sessions.read_address(values, owner)

        async def fail() -> Reply:
            raise UserError(
                "save_weights_external: this service writes no external formats; use save_state, and copy the folder "
                "from service/checkpoints in the folder of the run"
            )

        return self._ledger.submit(model.model_id, address.seq_id, digest_of(values), fail)
