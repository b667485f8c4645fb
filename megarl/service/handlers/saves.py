"""Requests that save a model's weights, on disk or for sampling."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megarl.service.handlers.request_handlers import RequestHandlers
from megarl.service.handlers.sessions import Model, Sampler
from megarl.service.messages.requests import SaveForSampler, SaveWeights, read_fields
from megarl.service.queueing.ledger import Promise, Reply, digest_of, json_reply
from megarl.service.refusals import UserError
from megarl.types import StorageError


class Saves(RequestHandlers):
    def save_weights(self, values: dict[str, Any], owner: str) -> Promise:
        """Accept a request to save a model's weights and optimizer state as a checkpoint."""
        address, model = self._sessions.read_address(values, owner)

        async def save() -> Reply:
            body = read_fields(SaveWeights, values)
            path = await self._save_checkpoint(model, "weights", body, owner, overwrite=body.overwrite)
            return json_reply(path=path, type="save_weights")

        return self._ledger.submit(model.model_id, address.seq_id, digest_of(values), save)

    def save_for_sampler(self, values: dict[str, Any], owner: str) -> Promise:
        """Save a model's weights for sampling: on disk with a name, or as a sampling session in memory."""
        address, model = self._sessions.read_address(values, owner)
        session, _ = self._sessions.find_model(model.model_id, owner)

        async def save_or_copy() -> Reply:
            """Save the weights on disk if the request has a name. Otherwise copy them, and begin a sampling session."""
            body = read_fields(SaveForSampler, values)
            if body.kind not in ("snapshot", "inflight"):
                raise UserError(f"kind = {body.kind:.50}: is not a kind of sampling client; use snapshot or inflight")
            if body.path is not None and body.kind == "inflight":
                raise UserError("kind = inflight: a named save has fixed weights; leave out path, or use snapshot")
            if body.path is None and body.ttl_seconds is not None:
                raise UserError(
                    f"ttl_seconds = {body.ttl_seconds}: weights without a name end with their session; give path, or "
                    "leave this out"
                )
            if body.path is not None:
                # In SDK 0.38 this call has no field for overwriting: a name in use is replaced.
                path = await self._save_checkpoint(model, "sampler_weights", body, owner, overwrite=True)
                return json_reply(path=path, type="save_weights_for_sampler")
            weights = await self._published.copy_model(model.model_id, owner, session.session_id)
            sampler = Sampler(secrets.token_hex(12), weights)
            if body.kind == "inflight":
                # Earlier requests finish with the weights that they began with.
                earlier_weights = model.moving_weights
                model.moving_weights, sampler.model = weights, model
                if earlier_weights is not None:
                    await self._published.end_weights(earlier_weights)
            session.add_sampler(sampler)
            return json_reply(sampling_session_id=sampler.sampler_id, type="save_weights_for_sampler")

        return self._ledger.submit(model.model_id, address.seq_id, digest_of(values), save_or_copy)

    async def _save_checkpoint(
        self, model: Model, kind: str, body: SaveWeights | SaveForSampler, owner: str, *, overwrite: bool
    ) -> str:
        """Save a model in a checkpoint of this kind, and return the SDK's name of the checkpoint."""
        name = body.path
        assert name is not None
        with _refuse_disk_faults(name):
            unfinished_folder = self._checkpoints.begin_checkpoint(
                model.model_id, kind, name, owner, overwrite=overwrite
            )
        record = {
            "owner": owner,
            "kind": kind,
            "base_model": self._trainer.served.name,
            "rank": self._trainer.served.rank,
            "user_metadata": body.user_metadata,
            "run_metadata": model.metadata,
        }

        async def write_checkpoint() -> None:
            """Write the model into `unfinished_folder`, then rename this folder. A fault deletes it."""
            try:
                with _refuse_disk_faults(name):
                    await self._trainer.save(model.model_id, unfinished_folder)
                    self._checkpoints.complete_checkpoint(unfinished_folder, name, record, body.ttl_seconds)
            except BaseException:
                self._checkpoints.discard(unfinished_folder)
                raise

        await self._background.run_to_end(write_checkpoint())
        return self._checkpoints.path_of(model.model_id, kind, name)


@contextmanager
def _refuse_disk_faults(name: str) -> Iterator[None]:
    """Refuse a client's save if the disk is full or fails. The ledger reports the cause."""
    try:
        yield
    except (OSError, StorageError) as error:
        # The error's text names folders of the service.
        raise UserError(
            f"path = {name}: was not saved, because the disk of the service is full or fails. The model is as "
            "before; delete checkpoints (RestClient.delete_checkpoint) and save again, or ask the operator for room"
        ) from error
