"""The sending of answers to the endpoint's clients, as a whole or as a stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiohttp import web

from megarl.serving.answers import Answer, ModelCallUnderWay
from megarl.serving.codec import Codec
from megarl.serving.dialects.dialect import Dialect, Reply
from megarl.serving.dialects.sampling import RequestParameters
from megarl.serving.http_server import HttpServer
from megarl.serving.refusal import RequestError
from megarl.serving.session import Session
from megarl.terminal import FirstOfEachKind

KEEP_ALIVE_SECONDS = 2.0
"""Seconds between keep-alive events of a stream whose answer is not ready. Agents with a limit between events allow at
least 3 s.
"""


class AnswerSender:
    """Waits for the answers of model calls, sends them to clients, and records which answers a client has.

    A client without a stream gets an error after `max_wait_seconds`, and then repeats its request.
    """

    def __init__(
        self, server: HttpServer, codec: Codec, notices: FirstOfEachKind, *, model: str, max_wait_seconds: float
    ) -> None:
        self._server, self._codec, self._notices = server, codec, notices
        self._model, self._max_wait_seconds = model, max_wait_seconds

    async def send(
        self,
        dialect: Dialect,
        request: web.Request,
        session: Session,
        call: ModelCallUnderWay,
        parameters: RequestParameters,
        body: Mapping[str, Any],
    ) -> web.StreamResponse:
        """Wait for a model call's answer, and send it to the client, as a whole or as a stream."""
        reply = dialect.reply(f"{session.name}.{call.number}", self._model, parameters, body)
        with session.count_waiting(call):
            if parameters.is_streamed:
                response = await self._stream(request, session, call, parameters, reply)
            else:
                # Answer before the client's timeout (600 s in OpenAI's clients). Its retry then joins the same call.
                answer = await session.wait_for_answer(call, self._max_wait_seconds)
                if answer is None:
                    raise RequestError(
                        "the answer is not ready yet; send the same request again", status=503, retry_after=1
                    )
                tokens = await self._list_tokens(answer, parameters)
                session.remember(call)
                response = web.json_response(reply.make_body(answer, tokens))
                # Written here. aiohttp writes after this method, and would count a lost client as served.
                await response.prepare(request)
                await response.write_eof()
                await self._record_delivery(request, session, call)
        # One example is enough: later forks of a session mostly have the same cause.
        for text in session.fork_texts[:1]:
            change_text = "an agent changed the history that it sent before, so a new sequence begins"
            self._notices.tell("fork", f"{change_text} (environment/forks): {text}")
        return response

    async def _stream(
        self,
        request: web.Request,
        session: Session,
        call: ModelCallUnderWay,
        parameters: RequestParameters,
        reply: Reply,
    ) -> web.StreamResponse:
        """Send a model call's answer as server-sent events.

        An error in the first `KEEP_ALIVE_SECONDS` is sent as an HTTP status, because the stream has not begun.
        """
        answer = await session.wait_for_answer(call, KEEP_ALIVE_SECONDS)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        try:
            await response.write(reply.begin())
            while answer is None:
                # Proxies and clients close silent connections.
                await response.write(reply.waiting())
                answer = await session.wait_for_answer(call, KEEP_ALIVE_SECONDS)
            tokens = await self._list_tokens(answer, parameters)
            session.remember(call)
            for event in reply.events(answer, tokens):
                await response.write(event)
            await response.write(reply.end)
            await response.write_eof()
            await self._record_delivery(request, session, call)
        except RequestError as error:
            await response.write(reply.error_event(error))
            await response.write(reply.end)
            await response.write_eof()
        return response

    async def _record_delivery(self, request: web.Request, session: Session, call: ModelCallUnderWay) -> None:
        """Record an answer as delivered. Undo the record if the client is gone or, as found later, did not read it.

        Raises ConnectionResetError if the client is gone.
        """
        session.record_delivery(call)
        try:
            await self._server.watch_delivery(request, lambda: session.withdraw_delivery(call))
        except ConnectionError:
            session.withdraw_delivery(call)
            raise

    async def _list_tokens(self, answer: Answer, parameters: RequestParameters) -> list[str] | None:
        if not parameters.has_logprobs:
            return None
        return await self._codec.list_token_texts(answer.call.completion.token_ids)
