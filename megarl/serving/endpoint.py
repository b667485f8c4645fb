"""HTTP server of the model for agents."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from aiohttp import web

from megarl.config.sections.rollout import EndpointConfig
from megarl.files.strict_json import finite_number
from megarl.processes.open_files import allow_open_files
from megarl.rollout.pool import PoolLoad
from megarl.serving.answer_sender import AnswerSender
from megarl.serving.body import MAX_BODY_BYTES, read_body
from megarl.serving.dialects.chat import Chat, Completions, model, models, read_conversation, read_prompt
from megarl.serving.dialects.dialect import Dialect
from megarl.serving.dialects.messages import Messages
from megarl.serving.dialects.responses import Responses
from megarl.serving.dialects.sampling import RequestParameters
from megarl.serving.http_server import HttpServer
from megarl.serving.keys import is_token, key_of
from megarl.serving.monitor import EndpointMetrics, add_pages
from megarl.serving.refusal import RequestError
from megarl.serving.session import Session
from megarl.serving.sessions import Sessions
from megarl.terminal import FirstOfEachKind
from megarl.types import ConfigError, StorageError

CHAT, COMPLETIONS, MESSAGES, RESPONSES = Chat(), Completions(), Messages(), Responses()
_CONVERSING: tuple[Dialect, ...] = (CHAT, MESSAGES, RESPONSES)
_NO_EFFECT = "it has no effect here"
_SHUTDOWN_SECONDS = 2.0
"""Seconds for open connections to end at shutdown."""
_LINGERING_SECONDS = 1.0
"""Seconds for discarding the body of a refused request. Without them the client gets a reset instead of the answer."""
_CLIENT_LEFT = 499
"""Status counted for a request whose client closed the connection, as in nginx. It is never sent."""
_OTHER_FILES = 512
"""Open files that the driver needs besides the endpoint's connections: ranks, programs, logs, refused clients."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Endpoint:
    """Server of OpenAI's and Anthropic's APIs in front of the engines, on the loopback address or protected by a token.

    A request names its session by its path, `/s/SECRET/v1/...`, or by its key: `Authorization: Bearer SECRET`, or
    `x-api-key: SECRET`. `notice` is called with the first change of each kind made to a client's request.
    """

    def __init__(
        self,
        sessions: Sessions,
        config: EndpointConfig,
        *,
        model: str,
        notice: Callable[[str], object] = lambda text: None,
        load: Callable[[], PoolLoad | None] = lambda: None,
        is_held: bool = False,
    ) -> None:
        """Prepare the server. `load` returns the engines' load for metrics (rollout.endpoint.metrics).

        `is_held`: clients wait until `accept` is called, because an earlier driver's programs may already send
        requests.
        """
        self._is_held = is_held
        self._sessions, self._config, self._model = sessions, config, model
        self._metrics = EndpointMetrics(lambda: sessions.num_open, load) if config.metrics else None
        self._notices = FirstOfEachKind(notice)
        self._server: HttpServer | None = None
        self._sender: AnswerSender | None = None
        self.base_url = ""

    async def start(self) -> None:
        """Start listening. Raises ConfigError if the address is not available, or if too few files may be open."""
        max_connections = self._config.max_connections
        if (max_open_files := allow_open_files(max_connections + _OTHER_FILES)) < max_connections + _OTHER_FILES:
            raise ConfigError(
                f"rollout.endpoint.max_connections = {max_connections}: this process may open {max_open_files} files "
                f"only (ulimit -n), and needs {_OTHER_FILES} of them for other purposes; give at most "
                f"{max(1, max_open_files - _OTHER_FILES)}, or raise the limit of open files"
            )
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._answer_errors])
        for prefix in ("", "/s/{secret}"):
            for dialect in _CONVERSING:
                app.router.add_post(f"{prefix}/v1{dialect.page}", partial(self._answer_conversation, dialect))
            app.router.add_post(f"{prefix}/v1{MESSAGES.page}/count_tokens", self._count_tokens)
            app.router.add_post(f"{prefix}/v1{COMPLETIONS.page}", self._answer_text_prompt)
            app.router.add_get(f"{prefix}/v1/models", self._list_models)
            app.router.add_get(f"{prefix}/v1/models/{{model:.+}}", self._describe_model)
        app.router.add_post("/sessions/{secret}/reward", self._receive_reward)
        if self._metrics is not None:
            add_pages(app, self._metrics.registry, self._metrics.health, self._check_token)
        self._server = HttpServer(
            app,
            section="rollout.endpoint",
            max_connections=max_connections,
            # Off by default in aiohttp. Without it, a disconnected agent's call would sample to its end.
            handler_cancellation=True,
            lingering_time=_LINGERING_SECONDS,
            shutdown_timeout=_SHUTDOWN_SECONDS,
        )
        self._sender = AnswerSender(
            self._server,
            self._sessions.codec,
            self._notices,
            model=self._model,
            max_wait_seconds=self._config.hold_seconds,
        )
        self.base_url = await self._server.start(self._config.host, self._config.port, is_held=self._is_held)

    def accept(self) -> None:
        """Begin to accept connections. Repeated calls have no effect."""
        if self._server is not None:
            self._server.accept()

    async def close(self) -> None:
        await self._sessions.close()
        if self._server is not None:
            await self._server.close()

    @property
    def address(self) -> tuple[str, int]:
        return self._config.host, int(self.base_url.rpartition(":")[2])

    def url_of(self, session: Session) -> str:
        return f"{self.base_url}/s/{session.secret}/v1"

    @web.middleware
    async def _answer_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer a request, with errors in the format of the requested API. If metrics are on, count and time it."""
        start_time = time.monotonic()
        # Stays if the client closes the connection: the handler is then cancelled.
        status = _CLIENT_LEFT
        try:
            response = await self._answer_or_refuse(request, handler)
            status = response.status
            return response
        finally:
            if self._metrics is not None:
                self._metrics.count_request(request, status, time.monotonic() - start_time)

    async def _answer_or_refuse(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Return a request's answer, or the answer for an error of its handler."""
        try:
            self._admit_connection(request)
            await self._sessions.wait_for_expected(_read_secret(request), self._config.hold_seconds)
            return await handler(request)
        except RequestError as error:
            response = _error_response(request, error)
            # The body may be unread. Closing the connection avoids waiting for it.
            is_last = error.status in (401, 408, 413, 503)
        except ConnectionError:
            # The client is gone: aiohttp does not send this.
            return web.Response(status=_CLIENT_LEFT)
        except StorageError:
            # The attempt raises this error itself, which ends the run. A retry of the program would fail too.
            response = _error_response(request, RequestError("the run cannot write its journal, and ends", status=500))
            is_last = True
        except web.HTTPException as error:
            response = _error_response(request, RequestError(error.text or error.reason, status=error.status))
            is_last = True
        if is_last:
            response.force_close()
        return response

    def _admit_connection(self, request: web.Request) -> None:
        """Count the connection of a request with a known key. Raises RequestError if there are too many.

        Connections without a known key are not counted here; the handlers refuse their requests.
        """
        secret = _read_secret(request)
        is_known = self._sessions.find(secret) is not None or self._sessions.is_expected(secret)
        if not is_known and not self._is_token(secret):
            return
        assert self._server is not None, "requests come after the start"
        if not self._server.admit(request):
            raise RequestError(
                f"this endpoint has {self._config.max_connections} connections "
                "(rollout.endpoint.max_connections); retry later",
                status=503,
                retry_after=1,
            )

    async def _answer_conversation(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        """Answer a request of a dialect: convert it to a chat, start or join its model call, and send the reply."""
        session, request_hash, body = await self._read_request(request)
        chat, ignored_names = dialect.convert_to_chat(body)
        parameters = self._read_sampling(chat, session)
        self._report_overridden(session, {name: body.get(name) for name in ignored_names}, _NO_EFFECT)
        conversation, names = self._sessions.codec.drop_unwritten_names(read_conversation(chat))
        if names:
            self._report_overridden(session, {"messages.name": names[0]}, "the chat template writes no names")
        caller = dialect.caller(request.headers)
        call = session.chat(conversation, parameters.sampling, request_hash, caller, is_retry=_is_retry(request))
        assert self._sender is not None, "requests come after the start"
        return await self._sender.send(dialect, request, session, call, parameters, body)

    async def _answer_text_prompt(self, request: web.Request) -> web.StreamResponse:
        session, request_hash, body = await self._read_request(request)
        _, ignored_names = COMPLETIONS.convert_to_chat(body)
        parameters = self._read_sampling(body, session)
        self._report_overridden(session, {name: body[name] for name in ignored_names}, _NO_EFFECT)
        caller = COMPLETIONS.caller(request.headers)
        call = session.complete(
            read_prompt(body), parameters.sampling, request_hash, caller, is_retry=_is_retry(request)
        )
        assert self._sender is not None, "requests come after the start"
        return await self._sender.send(COMPLETIONS, request, session, call, parameters, body)

    async def _count_tokens(self, request: web.Request) -> web.Response:
        session, _, body = await self._read_request(request)
        chat, _ = MESSAGES.convert_to_chat(body)
        conversation, _ = self._sessions.codec.drop_unwritten_names(read_conversation(chat))
        token_ids = await session.answer_sampler.make_prompt(conversation)
        return web.json_response({"input_tokens": len(token_ids)})

    async def _list_models(self, request: web.Request) -> web.Response:
        self._check_key(request)
        return web.json_response(models([self._model]))

    async def _describe_model(self, request: web.Request) -> web.Response:
        self._check_key(request)
        if (name := request.match_info["model"]) != self._model:
            raise self._unknown_model_error(name)
        return web.json_response(model(name))

    def _unknown_model_error(self, name: Any) -> RequestError:
        return RequestError(
            f"no model {name!r:.80} is served here; the only model is {self._model}",
            status=404,
            code="not_found",
        )

    async def _receive_reward(self, request: web.Request) -> web.Response:
        """Take the reward that a program posts, and end its session."""
        session = self._sessions.find(request.match_info["secret"])
        if session is None:
            raise _unknown_key_error()
        _, body = await read_body(request)
        reward = finite_number(body.get("reward"))
        if reward is None:
            raise RequestError(f"reward = {body.get('reward')!r:.40}: give a finite number", param="reward")
        session.turn_rewards = body.get("turn_rewards")
        # The journal does not hold the reward, and a program posts it only once.
        await session.close_journal()
        await self._sessions.end(session, reward)
        return web.json_response({"id": session.secret, "reward": session.reward})

    def _read_sampling(self, body: Mapping[str, Any], session: Session) -> RequestParameters:
        """Return a request's sampling parameters, and report fields overridden by the recipe. Raises RequestError."""
        parameters = RequestParameters.read(body, session.sampling)
        # Every name means the only model: agents send the name that they were written for.
        is_known = body.get("model") in (None, self._model)
        names = [*parameters.overridden, *([] if is_known else ["model"])]
        self._report_overridden(session, {name: body[name] for name in names}, "the recipe's value holds")
        return parameters

    def _report_overridden(self, session: Session, values: Mapping[str, Any], outcome: str) -> None:
        """Count ignored fields of a request, and report the first of each name."""
        for name, value in values.items():
            session.counts["overridden_fields"] += 1
            text = f"a client of the endpoint set {name} = {value!r:.40}; {outcome}"
            self._notices.tell(name, f"{text} (environment/overridden_fields)")

    async def _read_request(self, request: web.Request) -> tuple[Session, bytes, Mapping[str, Any]]:
        """Return a request's session, then its body as `read_body`. Raises RequestError."""
        # Checked twice: without a session no body is read, and the session may end during the read.
        self._find_session(request)
        request_hash, body = await read_body(request)
        session = self._find_session(request)
        self._sessions.restart_timer(session)
        return session, request_hash, body

    def _find_session(self, request: web.Request) -> Session:
        """Return the session of a request's key, or refuse the request."""
        self._check_key(request)
        session = self._sessions.find(_read_secret(request))
        if session is None:
            raise RequestError(
                "this request has no session: use the base URL and the key that the agent was started with "
                "(OPENAI_BASE_URL, OPENAI_API_KEY)",
                status=401,
                code="no_session",
            )
        return session

    def _check_key(self, request: web.Request) -> None:
        # In the path only a session's secret is valid; the token is valid in the header only.
        secret = _read_secret(request)
        if self._sessions.find(secret) is None and ("secret" in request.match_info or not self._is_token(secret)):
            raise _unknown_key_error()

    def _is_token(self, key: str) -> bool:
        return is_token(key, self._config.token)

    def _check_token(self, request: web.Request) -> None:
        """Raise RequestError without the endpoint's token: an agent's session key is not enough."""
        if not self._is_token(key_of(request)):
            raise _unknown_key_error()


def _read_secret(request: web.Request) -> str:
    return request.match_info.get("secret") or key_of(request)


def _is_retry(request: web.Request) -> bool:
    # OpenAI's clients, generated by Stainless, count their retries in this header.
    return request.headers.get("x-stainless-retry-count", "0") not in ("0", "")


def _unknown_key_error() -> RequestError:
    return RequestError(
        "the request's API key does not belong to a session of this endpoint", status=401, code="invalid_api_key"
    )


def _error_response(request: web.Request, error: RequestError) -> web.Response:
    # All other pages, also unknown ones, get OpenAI's form.
    dialect = MESSAGES if f"/v1{MESSAGES.page}" in request.path else CHAT
    return web.json_response(dialect.error(error), status=error.status, headers=error.headers())
