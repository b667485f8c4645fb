"""Errors of the training service that clients cause."""

from __future__ import annotations


class UserError(Exception):
    """Raised to refuse a request. The client's call fails, without retries."""


class NotFoundError(Exception):
    """Raised for an unknown id, and for another key's id: both get the same answer, status 404."""


class BusyError(Exception):
    """Raised for a request above the limits of waiting work. The SDK repeats it after the answer's status 429."""


class MalformedError(Exception):
    """Raised for an unreadable request. The answer has status 400."""
