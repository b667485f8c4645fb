"""Pages of the SDK's RestClient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from megarl.service.messages.requests import Page
from megarl.service.refusals import NotFoundError
from megarl.service.storage.checkpoints import Checkpoints, Stored
from megarl.service.trainer import ServedModel

_TYPES = {"weights": "training", "sampler_weights": "sampler"}
"""The SDK's types of checkpoints, by their kind."""


class RunState(NamedTuple):
    """A model in memory: its account, time of last use (seconds since 1970), and the client's metadata."""

    run: str
    owner: str
    used_at: float
    metadata: Mapping[str, str] | None


class Listing:
    """Descriptions of an account's runs, checkpoints and sessions, in the SDK's form."""

    def __init__(self, served: ServedModel, checkpoints: Checkpoints) -> None:
        self._served, self._checkpoints = served, checkpoints

    def list_checkpoints(self, owner: str, page: Page) -> dict[str, Any]:
        stored_checkpoints = self._checkpoints.list_stored(owner)
        checkpoints, cursor = _cut_page(stored_checkpoints, page)
        return {"checkpoints": [_describe_checkpoint(checkpoint) for checkpoint in checkpoints], "cursor": cursor}

    def list_run_checkpoints(self, run: str, owner: str, in_memory: Sequence[RunState]) -> dict[str, Any]:
        """Return a run's checkpoints, newest first. Raises NotFoundError unless some exist or it is `in_memory`."""
        stored_checkpoints = self._checkpoints.list_stored(owner, run)
        if not stored_checkpoints and all(state.run != run for state in in_memory):
            raise _unknown_run(run)
        return {"checkpoints": [_describe_checkpoint(checkpoint) for checkpoint in stored_checkpoints]}

    def list_runs(self, owner: str, page: Page, in_memory: Sequence[RunState]) -> dict[str, Any]:
        """Return one page of an account's runs in memory or with checkpoints, most recently used first."""
        runs, cursor = _cut_page(self._describe_runs(owner, in_memory), page)
        return {"training_runs": runs, "cursor": cursor}

    def describe_run(self, run: str, owner: str, in_memory: Sequence[RunState]) -> dict[str, Any]:
        for description in self._describe_runs(owner, in_memory):
            if description["training_run_id"] == run:
                return description
        raise _unknown_run(run)

    def _describe_runs(self, owner: str, in_memory: Sequence[RunState]) -> list[dict[str, Any]]:
        """Return all runs of an account, most recently used first: in memory, on disk, or both."""
        states = {state.run: state for state in in_memory}
        checkpoints_by_run: dict[str, list[Stored]] = {run: [] for run in states}
        for stored in self._checkpoints.list_stored(owner):
            checkpoints_by_run.setdefault(stored.run, []).append(stored)
        runs = [
            self._describe_run(states.get(run) or _run_of_checkpoints(checkpoints), checkpoints)
            for run, checkpoints in checkpoints_by_run.items()
        ]
        return sorted(runs, key=lambda run: str(run["last_request_time"]), reverse=True)

    def _describe_run(self, state: RunState, checkpoints: Sequence[Stored]) -> dict[str, Any]:
        """Return a run as the SDK's TrainingRun. `checkpoints` are the run's, newest first."""
        fields = {
            "training_run_id": state.run,
            "base_model": checkpoints[0].record["base_model"] if checkpoints else self._served.name,
            "model_owner": state.owner,
            "is_lora": True,
            "lora_rank": checkpoints[0].record["rank"] if checkpoints else self._served.rank,
            "last_request_time": _calendar_time(state.used_at),
            "user_metadata": state.metadata,
        }
        for name, kind in (("last_checkpoint", "weights"), ("last_sampler_checkpoint", "sampler_weights")):
            newest_checkpoint = next((stored for stored in checkpoints if stored.kind == kind), None)
            fields[name] = None if newest_checkpoint is None else _describe_checkpoint(newest_checkpoint)
        return fields


def _run_of_checkpoints(checkpoints: Sequence[Stored]) -> RunState:
    newest = checkpoints[0]
    return RunState(newest.run, newest.record["owner"], newest.record["time"], newest.record.get("run_metadata"))


def _describe_checkpoint(stored: Stored) -> dict[str, Any]:
    expiry_time = stored.record.get("expires")
    return {
        "checkpoint_id": f"{stored.kind}/{stored.name}",
        "checkpoint_type": _TYPES[stored.kind],
        "time": _calendar_time(stored.record["time"]),
        "tinker_path": stored.path,
        "size_bytes": stored.record["size_bytes"],
        "public": False,
        "user_metadata": stored.record.get("user_metadata"),
        "expires_at": None if expiry_time is None else _calendar_time(expiry_time),
    }


def _cut_page(items: Sequence[Any], page: Page) -> tuple[Sequence[Any], dict[str, int]]:
    cursor = {"offset": page.offset, "limit": page.limit, "total_count": len(items)}
    return items[page.offset : page.offset + page.limit], cursor


def _calendar_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _unknown_run(run: str) -> NotFoundError:
    return NotFoundError(f"training_run_id = {run:.100}: does not exist")
