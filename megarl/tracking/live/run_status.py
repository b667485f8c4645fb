"""The state of a run in its `status.json`, and how a run ends."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from megarl.files.atomic import replace_text
from megarl.tracking.run_record import whole_number
from megarl.types import EndedError, MegarlError, StoppedError

State = Literal["starting", "running", "done", "failed", "interrupted", "stopped"]

_STATUS_BYTES = 512
"""Size of status.json in bytes, padded with spaces. So a final status fits even on a full disk."""


class RunStatus:
    """The file `status.json` of a run folder. `facts` are its values; `write` writes them."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.facts: dict[str, Any] = {"state": "starting", "step": 0, "cause": None, "exit_code": None}

    @property
    def bad_nodes(self) -> list[str]:
        return list(self.facts.get("bad_nodes", ()))

    def add_bad_nodes(self, nodes: Iterable[str]) -> None:
        if all_nodes := list(dict.fromkeys([*self.bad_nodes, *nodes])):
            self.facts["bad_nodes"] = all_nodes

    def write(self) -> None:
        """Replace the file atomically."""
        text = json.dumps(self.facts)
        if self.facts["state"] in ("starting", "running"):
            # Pad now, so that `overwrite` needs no more bytes on a full disk.
            text = text.ljust(_STATUS_BYTES - 1)
        replace_text(self._file, text + "\n")

    def overwrite(self) -> None:
        """Overwrite the file in place, with as much of the cause as fits.

        A full disk has no space for a new file. The write is not atomic, so a reader may briefly see invalid JSON.
        """
        with self._file.open("r+b", buffering=0) as file:
            max_bytes = os.fstat(file.fileno()).st_size
            content = json.dumps(self.facts).encode() + b"\n"
            # JSON escapes lengthen the text, so check the length again after each cut.
            while len(content) > max_bytes and self.facts["cause"]:
                self.facts["cause"] = self.facts["cause"][: max_bytes - len(content)]
                content = json.dumps(self.facts).encode() + b"\n"
            file.write(content)
            file.truncate()
            os.fsync(file.fileno())

    def count_restart(self, earlier: Mapping[str, Any], step: int, most_restarts: int | None) -> None:
        """Count consecutive resumes without a completed step, as `restarts`. Raises MegarlError above the limit.

        `earlier` is the status of the resumed run; empty: nothing is resumed.
        """
        # The new start may be from the beginning, so remove an earlier value.
        self.facts.pop("resumed_step", None)
        if step:
            self.facts["resumed_step"] = step
        # A newer checkpoint than at the last resume means progress, so count from zero again.
        if not earlier or step > whole_number(earlier.get("resumed_step")):
            return
        restarts = whole_number(earlier.get("restarts"))
        if most_restarts is not None and restarts >= most_restarts:
            raise MegarlError(
                f"{self._file.parent}: resumed {restarts} times from step {step} without completing a further step; "
                f"logs/ has the cause. Fix it, then set cluster.max_restarts={restarts + 1}."
            )
        self.facts["restarts"] = restarts + 1


def describe_end(error: BaseException | None) -> dict[str, Any]:
    """Return state, cause, exit code and failed rank of a run that `error` ended; None: it succeeded."""
    if error is None:
        return {"state": "done", "exit_code": 0}
    if isinstance(error, KeyboardInterrupt):
        return {"state": "interrupted", "cause": "interrupted from the keyboard", "exit_code": 130}
    code = error.exit_code if isinstance(error, MegarlError) else MegarlError.exit_code
    state_by_error: dict[type, State] = {StoppedError: "stopped", EndedError: "interrupted"}
    return {
        "state": state_by_error.get(type(error), "failed"),
        "cause": f"{type(error).__name__}: {error}",
        "exit_code": code,
        "rank": getattr(error, "rank", None),
    }
