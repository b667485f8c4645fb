"""Errors of the training service: the client's faults."""

from __future__ import annotations


class UserError(Exception):
    """Raised to refuse a request. The client's call fails, without retries."""


class NotFoundError(Exception):
    """Raised for an unknown id, or one of another key. Both have the same answer, status 404."""


class BusyError(Exception):
    """Raised for a request above the limits of waiting work. Its answer has status 429, so the SDK repeats it."""


class MalformedError(Exception):
    """Raised for an unreadable request. Its answer has status 400."""
