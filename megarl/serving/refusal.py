"""Error that refuses a client's request."""

from __future__ import annotations

from typing import Any


class RequestError(Exception):
    """Raised to refuse a client's request: HTTP status, message, and OpenAI's fields `code` and `param`.

    `retry_after` is the number of seconds after which the client should retry; 0: it should not.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str | None = None,
        param: str | None = None,
        retry_after: int = 0,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Return the HTTP headers of the error answer. OpenAI's clients obey `x-should-retry`."""
        if self.retry_after:
            return {"Retry-After": str(self.retry_after)}
        return {"x-should-retry": "false"}
