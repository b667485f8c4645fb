"""The folder of one run: its lock, its recipe as it was run, its state."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from megarl.config import Recipe
from megarl.recipe import to_yaml
from megarl.tracking.storage import disk_full_named, replace_text, storage_error
from megarl.types import ConfigError, EndedError, MegarlError, RunFolderLockedError, StoppedError, StorageError

State = Literal["starting", "running", "done", "failed", "interrupted", "stopped"]

_STATUS_BYTES = 512
"""Size of status.json until the run ends, padded with spaces: how it ended has room there on a full disk too."""


class RunFolder:
    """`RUNS_FOLDER/NAME/`, owned by this process until it closes the folder or dies.

    Holds `lock`, `config.yaml` (the recipe with every field; secrets hidden), `status.json`, `metrics.jsonl`,
    `tensorboard/`, `samples/`, `checkpoints/`, `hf/` (the trained model) and `logs/` (a folder for each attempt and a
    link to the latest). As a context manager it writes the state the run ended in. `resumed_step` is the step after
    which it was taken up again, 0 for a new run.
    """

    def __init__(self, recipe: Recipe, *, resume: bool = False) -> None:
        """Make and lock the folder. Raises ConfigError where it cannot be made or holds an earlier run already that is
        not to be resumed, RunFolderLockedError where another process owns it, DiskFullError.
        """
        self.path = Path(recipe.runs_folder) / recipe.name
        self.metrics_file = self.path / "metrics.jsonl"
        self.tensorboard_folder = self.path / "tensorboard"
        self.samples_folder = self.path / "samples"
        self.model_folder = self.path / "hf"
        self.checkpoints_folder = self.path / "checkpoints"
        self.resumed_step = 0
        self._status: dict[str, Any] = {"state": "starting", "step": 0, "cause": None, "exit_code": None}
        self._earlier: dict[str, Any] = {}
        with disk_full_named(self.path):
            self._lock = self._acquire()
            self._open(recipe, resume=resume)

    def _open(self, recipe: Recipe, *, resume: bool) -> None:
        """Make what a new start of the run needs in the folder; give it back if that fails."""
        try:
            if resume:
                self._earlier = self._read_status()
                # Known to the next start even if this one does not come to its checkpoint.
                kept = {"resumed_step", "restarts"} & self._earlier.keys()
                self._status |= {field: self._earlier[field] for field in kept}
            else:
                self._refuse_earlier_run()
            self.samples_folder.mkdir(exist_ok=True)
            self.logs_folder = _new_attempt(self.path / "logs")
            replace_text(self.path / "config.yaml", to_yaml(recipe))
            self.set_status()
        except BaseException:
            self.close()
            raise

    def set_status(
        self,
        state: State | None = None,
        *,
        step: int | None = None,
        cause: str | None = None,
        exit_code: int | None = None,
        rank: int | None = None,
    ) -> None:
        """Write status.json, whole or not at all; what is left out stays as it was.

        `cause` says in words why a run ended, `exit_code` what the process returns, `rank` who failed first.
        """
        new = {"state": state, "step": step, "cause": cause, "exit_code": exit_code, "rank": rank}
        self._status |= {field: value for field, value in new.items() if value is not None}
        text = json.dumps(self._status)
        if self._status["state"] in ("starting", "running"):
            text = text.ljust(_STATUS_BYTES - 1)
        replace_text(self.path / "status.json", text + "\n")

    def rewind(self, step: int | None, most_restarts: int | None = None) -> None:
        """Forget what was written after a step, for its checkpoint to be resumed; None forgets all.

        Raises MegarlError if the run was taken up from there more than `most_restarts` times in a row.
        """
        last = -1 if step is None else step
        restarts = self._status.pop("restarts", 0)
        if self._earlier and (step or 0) <= self._status.pop("resumed_step", 0):
            if most_restarts is not None and restarts >= most_restarts:
                self._status |= {"restarts": restarts, "resumed_step": step or 0}
                raise MegarlError(
                    f"{self.path} was taken up {restarts} times from step {step or 0} without a step gained; see "
                    f"logs/ for why it ended. Mend that, then set cluster.max_restarts={restarts + 1}."
                )
            self._status["restarts"] = restarts + 1
        if step is None:
            shutil.rmtree(self.tensorboard_folder, ignore_errors=True)
            self.set_status()
        else:
            self.resumed_step = self._status["resumed_step"] = step
            self.set_status(step=step)
        if self.metrics_file.exists():
            kept = [line for line in self.metrics_file.read_text(encoding="utf-8").splitlines() if _step(line) <= last]
            replace_text(self.metrics_file, "".join(f"{line}\n" for line in kept))
        for path in self.samples_folder.glob("step_*.jsonl"):
            if int(path.stem[5:]) > last:
                path.unlink()

    def close(self) -> None:
        """Let others have the folder."""
        os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Write how the run ended. Raises StorageError in place of an error that the folder or its disk led to."""
        broken = None if error is None else storage_error(self.path, error)
        try:
            self._set_end(broken or error)
        except (OSError, StorageError) as failure:
            try:
                self._overwrite_status()
            except OSError:
                broken = broken or storage_error(self.path, failure)
                if broken is None:
                    raise failure from None
        finally:
            self.close()
        if broken is not None and broken is not error:
            raise broken from error

    def _set_end(self, error: BaseException | None) -> None:
        if error is None:
            self.set_status("done", exit_code=0)
        elif isinstance(error, KeyboardInterrupt):
            self.set_status("interrupted", cause="interrupted from the keyboard", exit_code=130)
        else:
            code = error.exit_code if isinstance(error, MegarlError) else MegarlError.exit_code
            rank = getattr(error, "rank", None)
            ends: dict[type, State] = {StoppedError: "stopped", EndedError: "interrupted"}
            state = ends.get(type(error), "failed")
            self.set_status(state, cause=f"{type(error).__name__}: {error}", exit_code=code, rank=rank)

    def _overwrite_status(self) -> None:
        """Write status.json over itself, with as much of the cause as there is room for: a full disk takes no new file.

        Not atomic: for a moment a reader may find no JSON there.
        """
        with (self.path / "status.json").open("r+b", buffering=0) as file:
            room = os.fstat(file.fileno()).st_size
            content = json.dumps(self._status).encode() + b"\n"
            while len(content) > room and self._status["cause"]:
                self._status["cause"] = self._status["cause"][: room - len(content)]
                content = json.dumps(self._status).encode() + b"\n"
            file.write(content)
            file.truncate()
            os.fsync(file.fileno())

    def _acquire(self) -> int:
        """The descriptor of the locked lock file; the kernel frees the lock when the process ends, however it ends."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(
                f"runs_folder: {self.path} cannot be made ({error.strerror}). Choose another with runs_folder=FOLDER."
            ) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.read(lock, 4096).decode(errors="replace").strip()
            os.close(lock)
            raise RunFolderLockedError(
                f"{self.path}: in use by {owner or 'another process'}. Wait for its end, or choose another name=NAME."
            ) from None
        try:
            os.ftruncate(lock, 0)
            os.write(lock, f"host {socket.gethostname()}, pid {os.getpid()}\n".encode())
        except OSError:
            os.close(lock)
            raise
        return lock

    def _read_status(self) -> dict[str, Any]:
        try:
            return json.loads((self.path / "status.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}

    def _refuse_earlier_run(self) -> None:
        path = self.path / "status.json"
        if not path.exists():
            return
        try:
            earlier = json.loads(path.read_text(encoding="utf-8"))
            told = f"which is {earlier['state']} at step {earlier['step']}"
        except (ValueError, KeyError, TypeError):
            told = "whose status.json cannot be read"
        raise ConfigError(
            f"name: {self.path} already holds a run, {told}. Choose another with name=NAME, continue this one with "
            "--resume, or remove the folder."
        )


def _new_attempt(logs: Path) -> Path:
    """The folder for the logs of this start of a run."""
    logs.mkdir(exist_ok=True)
    folder = logs / f"attempt_{1 + max((int(path.name[8:]) for path in logs.glob('attempt_*')), default=0)}"
    folder.mkdir()
    with suppress(OSError):  # a copy of a run folder may have a folder of that name
        (logs / "latest").unlink(missing_ok=True)
        (logs / "latest").symlink_to(folder.name)
    return folder


def _step(line: str) -> float:
    """The step of a line of metrics.jsonl; of one that a crash cut short, infinite."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")
