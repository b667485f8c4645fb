"""HTTP routes of the training service, below /api/v1."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

from aiohttp import web

from megarl.service.handlers.desk import Desk
from megarl.service.http.accounts import Accounts
from megarl.service.http.rest_routes import RestRoutes
from megarl.service.messages import requests, wire
from megarl.service.messages.requests import (
    CreateModel,
    CreateSampler,
    CreateSession,
    LoadWeights,
    ModelAddress,
    PathAddress,
    RetrieveFuture,
    SessionAddress,
    read_fields,
)
from megarl.service.queueing.admission import BODY_BYTES
from megarl.service.queueing.ledger import Promise
from megarl.service.refusals import BusyError, MalformedError, NotFoundError, UserError
from megarl.serving.body import MAX_BODY_BYTES, parse_json, read_bytes, read_head, read_json
from megarl.serving.http_server import HttpServer
from megarl.serving.refusal import RequestError

HOLD_SECONDS = 30.0
"""Maximum seconds of a poll without a result. The SDK ends a poll after 45 s."""
EXPIRY_SECONDS = 30.0
"""Seconds between searches for silent sessions and old results."""
# A poll holds its connection for up to `HOLD_SECONDS`, so clients with many requests need many.
_MAX_CONNECTIONS = 4096
_SMALL_BYTES = 64 << 10
"""Smaller bodies are read without counting the bytes that an account sends: 4,096 of them have 256 MiB."""
# A model's id has 32 characters. A checkpoint's name, which stands before the number in JSON, has at most 100.
_HEAD_BYTES = 4096
"""First bytes of a numbered request's body. They contain its model and number."""
_BUSY_SECONDS = "2"
"""Seconds after which a client may retry a refused request: the time of a few calls. The SDK retries for five
minutes.
"""
_UNEMBED_NOTICE = (
    "This service trains adapters of attention and MLP layers. train_unembed has no effect: the output layer has no "
    "adapter."
)
_PROJECT_NOTICE = "project_id has no effect: this service has no projects; sessions belong to their key."

Handler = Callable[[web.Request, str], Awaitable[web.StreamResponse]]


def make_server(desk: Desk, accounts: Accounts, *, max_wait_seconds: float = HOLD_SECONDS) -> HttpServer:
    return _Routes(desk, accounts, max_wait_seconds).server


class _Routes:
    """Handlers of the routes, and their server. A wrong key gets 401, an unknown or foreign id 404, a bad body 400.

    Every other fault of a request fails its promise. A bad body with a readable model and number fails its promise too,
    because later requests of the model wait for the number. The SDK retries the statuses 408, 409, 429 and 5xx, so a
    client's fault never gets them. A request above the limits of waiting work gets 429.
    """

    def __init__(self, desk: Desk, accounts: Accounts, max_wait_seconds: float) -> None:
        self._desk, self._accounts, self._max_wait_seconds = desk, accounts, max_wait_seconds
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.add_routes(self._list_routes())
        app.cleanup_ctx.append(self._expire_while_running)
        self.server = HttpServer(app, section="service", max_connections=_MAX_CONNECTIONS)

    def _list_routes(self) -> list[web.RouteDef]:
        """Return all routes. Handlers of numbered requests get a body with the model's sequence number (`seq_id`)."""
        post_handlers: dict[str, Handler] = {
            "client/config": self._client_config,
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "sessions/{session_id}/finish": self._finish_session,
            "telemetry": self._telemetry,
            "create_model": self._create_model,
            "get_info": self._get_info,
            "create_sampling_session": self._create_sampler,
            "asample": self._sample,
            "retrieve_future": self._retrieve_result,
            "weights_info": self._weights_info,
        }
        numbered_handlers: dict[str, Handler] = {
            "load_weights": self._make_numbered_handler(self._load_weights),
            "forward_backward": self._forward_backward,
            "optim_step": self._make_numbered_handler(self._desk.training.optim_step, is_training=True),
            "save_weights": self._make_numbered_handler(self._desk.saves.save_weights),
            "save_weights_for_sampler": self._make_numbered_handler(self._desk.saves.save_for_sampler),
            "save_weights_external": self._make_numbered_handler(self._desk.training.save_weights_external),
        }
        get_handlers: dict[str, Handler] = {
            "get_server_capabilities": self._capabilities,
            "samplers/{sampler_id}": self._describe_sampler,
        }
        return [
            *(web.post(f"/api/v1/{path}", self._add_checks(handler)) for path, handler in post_handlers.items()),
            *(
                web.post(f"/api/v1/{path}", self._add_checks(handler, is_numbered=True))
                for path, handler in numbered_handlers.items()
            ),
            *(web.get(f"/api/v1/{path}", self._add_checks(handler)) for path, handler in get_handlers.items()),
            *(
                web.route(method, f"/api/v1/{path}", self._add_checks(handler))
                for (method, path), handler in RestRoutes(self._desk).handlers().items()
            ),
            # Health probes have no key: this is the only route without a check.
            web.get("/api/v1/healthz", _healthz),
        ]

    async def _expire_while_running(self, app: web.Application) -> AsyncIterator[None]:
        """Context of the running server: a task ends silent sessions and drops old results. Then close the desk."""

        async def expire_again_and_again() -> None:
            while True:
                await asyncio.sleep(EXPIRY_SECONDS)
                try:
                    await self._desk.expire()
                except Exception as error:
                    # A file that cannot be deleted must not keep sessions and results for ever.
                    self._desk.report(f"search for old sessions and results: {type(error).__name__}: {error}")

        task = asyncio.create_task(expire_again_and_again())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await self._desk.close()

    def _add_checks(
        self, handler: Handler, *, is_numbered: bool = False
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """Wrap a handler: check the key first, and answer its errors.

        Handlers of numbered requests check their bodies themselves, after they have read the number.
        """

        async def handle_checked(request: web.Request) -> web.StreamResponse:
            """Call `handler` with the request and the account of its key. Errors become answers with a status."""
            # Check the key before the body is read, so that strangers cannot fill the memory.
            owner = self._accounts.find_owner(request.headers.get("X-API-Key", ""))
            if owner is None:
                return _error_response("X-API-Key: this key is not known to the service", 401)
            # The server soon closes a connection without an admitted request, but a poll waits longer.
            if not self.server.admit(request):
                return _error_response(f"the service has {_MAX_CONNECTIONS} connections; retry later", 503)
            BODY_BYTES.set(_body_bytes(request))
            try:
                if is_numbered:
                    return await handler(request, owner)
                with self._count_body_bytes(request, owner):
                    return await handler(request, owner)
            except NotFoundError as error:
                return _error_response(str(error), 404)
            except MalformedError as error:
                return _error_response(str(error), 400)
            except RequestError as error:
                # The SDK would repeat a request with status 408, and a late body would be late again.
                return _error_response(str(error), 400 if error.status == 408 else error.status)
            except BusyError as error:
                # SDK 0.38 waits this long before it repeats the request. Its number stays free meanwhile.
                return web.json_response({"error": str(error)}, status=429, headers={"Retry-After": _BUSY_SECONDS})
            except UserError as error:
                return _error_response(str(error), 422)

        return handle_checked

    @contextlib.contextmanager
    def _count_body_bytes(self, request: web.Request, owner: str) -> Iterator[None]:
        """Context in which a request's body is read. Meanwhile its bytes count for the account.

        Raises RequestError for a compressed body, and BusyError above the account's limit.
        """
        if encoding := request.headers.get("Content-Encoding"):
            raise RequestError(f"Content-Encoding = {encoding:.50}: send the body uncompressed", status=415)
        # Small bodies do not count: a poll has one, and waits here for a long time.
        if BODY_BYTES.get() < _SMALL_BYTES:
            yield
            return
        with self._desk.ledger.admission.count_while_reading(owner, BODY_BYTES.get()):
            yield

    def _make_numbered_handler(
        self, accept: Callable[[dict[str, Any], str], Promise], *, is_training: bool = False
    ) -> Handler:
        """Return the handler of a model's numbered requests in JSON. `accept` gets the JSON values and the account.

        `is_training`: if a request is refused, the model's next step fails too.
        """

        async def handle(request: web.Request, owner: str) -> web.StreamResponse:
            async def accept_body(raw: bytes) -> Promise:
                return accept(dict(await parse_json(raw)), owner)

            return await self._accept_numbered(
                request, owner, requests.find_model_and_number, accept_body, is_training=is_training
            )

        return handle

    async def _accept_numbered(
        self,
        request: web.Request,
        owner: str,
        find_model_and_number: Callable[[bytes], tuple[str, int] | None],
        accept_body: Callable[[bytes], Awaitable[Promise]],
        *,
        is_training: bool,
    ) -> web.StreamResponse:
        """Answer a numbered request with the promise that `accept_body` returns.

        An unreadable request gets a failed promise. A request above the limits gets it after the SDK's repetitions.
        """
        body_start = bytearray()
        try:
            # Read the number first: after a refusal without it, later requests would wait for it.
            await read_head(request, body_start, _HEAD_BYTES)
            with self._count_body_bytes(request, owner):
                return _promise_response(await accept_body(bytes(body_start) + await read_bytes(request)))
        except (RequestError, MalformedError, UserError, BusyError) as error:
            model_and_number = find_model_and_number(bytes(body_start))
            # After a broken connection the client sends the request again.
            if model_and_number is None or request.transport is None:
                raise
            failed_promise = self._desk.training.fail_in_turn(*model_and_number, error, owner, is_training=is_training)
            return _promise_response(failed_promise)

    async def _client_config(self, request: web.Request, owner: str) -> web.StreamResponse:
        # Clients must not compress bodies, because `_add_checks` refuses them. All else has the SDK's defaults.
        return web.json_response({"parallel_fwdbwd_chunks": True, "proto_compress_fwdbwd": False})

    async def _create_session(self, request: web.Request, owner: str) -> web.StreamResponse:
        body = read_fields(CreateSession, await _read_json(request))
        notices = [_UNEMBED_NOTICE] if body.project_id is None else [_UNEMBED_NOTICE, _PROJECT_NOTICE]
        values = {"session_id": self._desk.sessions.open(body, owner), "info_message": " ".join(notices)}
        return web.json_response({"type": "create_session", **values})

    async def _heartbeat(self, request: web.Request, owner: str) -> web.StreamResponse:
        """Record that a session's client is alive. Status 410: the session has ended."""
        body = read_fields(SessionAddress, await _read_json(request))
        try:
            self._desk.sessions.touch(body.session_id, owner)
        except NotFoundError as error:
            # At this status the SDK stops its heartbeat.
            return _error_response(str(error), 410)
        return web.json_response({"type": "session_heartbeat"})

    async def _finish_session(self, request: web.Request, owner: str) -> web.StreamResponse:
        # A 404 would raise an error in the client's program, although the session has only ended by itself.
        with contextlib.suppress(NotFoundError):
            self._desk.finish_session(request.match_info["session_id"], owner)
        return web.json_response({})

    async def _telemetry(self, request: web.Request, owner: str) -> web.StreamResponse:
        return web.json_response({"status": "accepted"})

    async def _create_model(self, request: web.Request, owner: str) -> web.StreamResponse:
        return _promise_response(self._desk.models.create(read_fields(CreateModel, await _read_json(request)), owner))

    async def _get_info(self, request: web.Request, owner: str) -> web.StreamResponse:
        body = read_fields(ModelAddress, await _read_json(request))
        return web.json_response(self._desk.models.describe_model(body.model_id, owner))

    def _load_weights(self, values: dict[str, Any], owner: str) -> Promise:
        return self._desk.models.load(read_fields(LoadWeights, values), owner)

    async def _forward_backward(self, request: web.Request, owner: str) -> web.StreamResponse:
        async def accept_body(raw: bytes) -> Promise:
            return self._desk.training.forward_backward(raw, owner)

        # An unreadable body does not show `forward_only`. If its gradients are missing, the next step must fail.
        return await self._accept_numbered(request, owner, wire.find_model_and_number, accept_body, is_training=True)

    async def _sample(self, request: web.Request, owner: str) -> web.StreamResponse:
        return _promise_response(self._desk.sampling.sample(await _read_json(request), owner))

    async def _create_sampler(self, request: web.Request, owner: str) -> web.StreamResponse:
        body = read_fields(CreateSampler, await _read_json(request))
        sampler_id = await self._desk.sampling.open_sampler(body, owner)
        return web.json_response({"type": "create_sampling_session", "sampling_session_id": sampler_id})

    async def _describe_sampler(self, request: web.Request, owner: str) -> web.StreamResponse:
        return web.json_response(self._desk.sampling.describe(request.match_info["sampler_id"], owner))

    async def _weights_info(self, request: web.Request, owner: str) -> web.StreamResponse:
        body = read_fields(PathAddress, await _read_json(request))
        return web.json_response(self._desk.models.describe_weights(body.tinker_path, owner))

    async def _capabilities(self, request: web.Request, owner: str) -> web.StreamResponse:
        served = self._desk.served
        model = {"model_name": served.name, "max_context_length": served.context_tokens}
        return web.json_response({"supported_models": [{**model, "trainable": True, "sampleable": True}]})

    async def _retrieve_result(self, request: web.Request, owner: str) -> web.StreamResponse:
        body = read_fields(RetrieveFuture, await _read_json(request))
        promise = self._desk.ledger.find(body.request_id, owner)
        reply = await self._desk.ledger.wait_for(promise, self._max_wait_seconds)
        if reply is None:
            return web.json_response({"type": "try_again", "request_id": body.request_id, "queue_state": "active"})
        return web.Response(body=reply.body, content_type=reply.content_type)


async def _healthz(request: web.Request) -> web.StreamResponse:
    return web.json_response({"status": "ok"})


async def _read_json(request: web.Request) -> dict[str, Any]:
    return dict(await read_json(request))


def _body_bytes(request: web.Request) -> int:
    # A body without a length may have any size up to the limit.
    return 0 if not request.can_read_body else request.content_length or MAX_BODY_BYTES


def _promise_response(promise: Promise) -> web.StreamResponse:
    fields: dict[str, Any] = {"request_id": promise.request_id}
    if promise.model_id is not None:
        fields["model_id"] = promise.model_id
    if promise.sequence_ids:
        fields["sample_sequence_ids"] = list(promise.sequence_ids)
    return web.json_response(fields)


def _error_response(message: str, status: int) -> web.StreamResponse:
    return web.json_response({"error": message}, status=status)
