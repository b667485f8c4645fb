"""Routes of the SDK's RestClient: listings of an account, deletion, lifetimes, and refusals of all others by name."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from megarl.service.handlers.desk import Desk
from megarl.service.handlers.listing import Listing
from megarl.service.messages.requests import Lifetime, Page, read_fields
from megarl.service.refusals import UserError
from megarl.serving.body import read_json

Handler = Callable[[web.Request, str], Awaitable[web.StreamResponse]]
_CHECKPOINT = "training_runs/{run}/checkpoints/{kind}/{name}"
_NO_DOWNLOADS = (
    "download: this service keeps checkpoints on its own disk only; load them by path, or copy their folder from "
    "service/checkpoints in the folder of the run"
)
_NO_PUBLISHING = "publish: checkpoints of this service belong to one key; give the path to programs with the same key"
_NO_PROJECTS = "project: this service has no projects; sessions belong to their key"
REFUSED = {
    ("POST", f"{_CHECKPOINT}/publish"): _NO_PUBLISHING,
    ("DELETE", f"{_CHECKPOINT}/publish"): _NO_PUBLISHING,
    ("GET", f"{_CHECKPOINT}/external_weights_urls"): _NO_DOWNLOADS,
    ("GET", f"{_CHECKPOINT}/archive"): _NO_DOWNLOADS,
    ("POST", "copy_weights"): "copy_weights: a path works for every program with the same key; load it there",
    ("PUT", "sessions/{session_id}/project"): _NO_PROJECTS,
    ("GET", "sessions/{session_id}/trace_export"): "trace_export: this service records no traces of sessions",
    ("POST", "create_custom_loss"): "create_custom_loss: losses on the service are not supported; the SDK computes "
    "forward_backward_custom on the client",
}
"""Texts of refused routes, by method and path."""


class RestRoutes:
    """Handlers of these routes. Each gets a request and the account of its key."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._listing = Listing(desk.served, desk.checkpoints)

    def handlers(self) -> dict[tuple[str, str], Handler]:
        """Return the handlers by method and path below /api/v1/."""
        return {
            ("GET", "training_runs"): self._list_runs,
            ("GET", "training_runs/{run}"): self._describe_run,
            ("GET", "training_runs/{run}/checkpoints"): self._list_checkpoints_of,
            ("GET", "checkpoints"): self._list_checkpoints,
            ("DELETE", _CHECKPOINT): self._delete_checkpoint,
            ("PUT", f"{_CHECKPOINT}/ttl"): self._set_lifetime,
            ("GET", "sessions"): self._list_sessions,
            ("GET", "sessions/{session_id}"): self._describe_session,
            **{route: _make_refusal(text) for route, text in REFUSED.items()},
        }

    async def _list_runs(self, request: web.Request, owner: str) -> web.StreamResponse:
        if "project_id" in request.query:
            raise UserError(_NO_PROJECTS)
        return web.json_response(
            self._listing.list_runs(owner, _page(request), self._desk.sessions.list_run_states(owner))
        )

    async def _describe_run(self, request: web.Request, owner: str) -> web.StreamResponse:
        run = request.match_info["run"]
        return web.json_response(self._listing.describe_run(run, owner, self._desk.sessions.list_run_states(owner)))

    async def _list_checkpoints_of(self, request: web.Request, owner: str) -> web.StreamResponse:
        run = request.match_info["run"]
        return web.json_response(
            self._listing.list_run_checkpoints(run, owner, self._desk.sessions.list_run_states(owner))
        )

    async def _list_checkpoints(self, request: web.Request, owner: str) -> web.StreamResponse:
        return web.json_response(self._listing.list_checkpoints(owner, _page(request)))

    async def _delete_checkpoint(self, request: web.Request, owner: str) -> web.StreamResponse:
        self._desk.checkpoints.delete_checkpoint(_checkpoint_path(request), owner)
        return web.Response(status=204)

    async def _set_lifetime(self, request: web.Request, owner: str) -> web.StreamResponse:
        body = read_fields(Lifetime, dict(await read_json(request)))
        try:
            self._desk.checkpoints.set_lifetime(_checkpoint_path(request), owner, body.ttl_seconds)
        except OSError as error:
            # After a server error's status the SDK would repeat the request for five minutes.
            self._desk.report(f"lifetime of a checkpoint: {type(error).__name__}: {error}")
            raise UserError("ttl_seconds: was not changed, because the disk of the service is full or fails") from error
        return web.Response(status=204)

    async def _list_sessions(self, request: web.Request, owner: str) -> web.StreamResponse:
        page, sessions = _page(request), self._desk.sessions.ids(owner)
        return web.json_response({"sessions": sessions[page.offset : page.offset + page.limit]})

    async def _describe_session(self, request: web.Request, owner: str) -> web.StreamResponse:
        return web.json_response(self._desk.sessions.describe(request.match_info["session_id"], owner))


def _make_refusal(text: str) -> Handler:
    async def handle(request: web.Request, owner: str) -> web.StreamResponse:
        raise UserError(text)

    return handle


def _page(request: web.Request) -> Page:
    page: Page = read_fields(Page, dict(request.query))
    return page


def _checkpoint_path(request: web.Request) -> str:
    parts: Any = request.match_info
    return f"tinker://{parts['run']}/{parts['kind']}/{parts['name']}"
