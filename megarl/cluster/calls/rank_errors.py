"""Errors raised by the driver for failed and lost ranks."""

from __future__ import annotations

from megarl import types
from megarl.cluster.ranks.rank_handle import RankError


class RankFailedError(types.MegarlError):
    """Raised for an unexpected error of a rank. A note has the traceback.

    Its exit code is that of an internal error: a restarted run would most likely fail again.
    """

    def __init__(self, rank: int, cause: str, details: str = "") -> None:
        super().__init__(cause)
        self.rank = rank
        self.cause = cause
        self.is_echo = False
        """Whether the rank failed only because another rank had left a collective."""
        if details:
            self.add_note(details.rstrip())


class RankLostError(RankFailedError, types.PeerLostError):
    """Raised for a rank that died, missed a deadline, or lost its device or peers. A note has its traceback or log."""


def make_rank_error(failure: RankError, method: str, num_ranks: int) -> Exception:
    """Return the driver's exception for a failed rank, one of `num_ranks`."""
    handle, report = failure.handle, failure.report
    rank_text = f"rank {handle.rank} of {num_ranks}"
    if report is None:
        return RankLostError(handle.rank, f"{rank_text} {handle.end} during `{method}`", handle.log_tail())
    if report["megarl_class"]:
        error = getattr(types, report["megarl_class"])(report["message"])
        error.add_note(f"raised by {rank_text} during `{method}`\n{report['traceback']}")
        return error
    cause_text = f"{rank_text} raised {report['class']} during `{method}`: {report['message']}"
    error_class = RankLostError if report["lost"] else RankFailedError
    error = error_class(handle.rank, cause_text, report["traceback"])
    error.is_echo = failure.echo
    return error
