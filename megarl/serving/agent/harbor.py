"""Attempts at Harbor's tasks."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.data.sources.harbor import FIELD
from megarl.files.strict_json import finite_number, make_object
from megarl.sandbox.containers.container import ContainerError
from megarl.serving.agent.containers import AttemptContainer
from megarl.types import Problem

_TESTS, _LOGS = "/tests", "/logs/verifier"
_MAX_REWARD_BYTES = 64 << 10
# In base64 these bytes still fit in one message (`requests.MAX_MESSAGE_BYTES`).
_MAX_TEST_BYTES = 64 << 20
_TAIL_CHARACTERS = 400


class VerifierError(Exception):
    """Raised if a verifier gives no reward. Its text has the form `KIND: reason`."""


@dataclass(frozen=True, slots=True)
class HarborTask:
    """A Harbor task, from a record's field `harbor` (`data.sources.harbor`)."""

    fields: Mapping[str, Any]

    @classmethod
    def of(cls, problem: Problem) -> HarborTask | None:
        fields = problem.record.get(FIELD)
        return cls(fields) if isinstance(fields, dict) and "folder" in fields else None

    @property
    def workdir(self) -> str | None:
        return self.fields["workdir"]

    def limit_seconds(self, seconds: float) -> float:
        return min(seconds, self.fields["agent_seconds"] or seconds)

    @property
    def container_limits(self) -> dict[str, float]:
        """The task's limits by fields of `Limits`. They replace the recipe's."""
        limits = {"cpus": "cpus", "memory_bytes": "memory_bytes", "disk_bytes": "storage_bytes"}
        return {name: self.fields[field] for name, field in limits.items() if self.fields[field] is not None}

    async def verify(self, container: AttemptContainer) -> float:
        """Run the verifier and return its reward. Raises VerifierError.

        The tests are copied into the container now, so that the agent has not seen them.
        """
        try:
            await container.put(_TESTS, _read_files(Path(self.fields["folder"], "tests")))
            # Remove the agent's files: they must not pass for a verdict.
            await container.put(_LOGS, {})
            # At the timeout the cancelled `AttemptContainer.execute` kills the tests.
            async with asyncio.timeout(self.fields["verifier_seconds"]):
                tests_end = await container.execute(["bash", f"{_TESTS}/test.sh"], {}, folder=self.workdir)
            if tests_end.outcome or tests_end.refused:
                raise VerifierError(f"VerifierError: {tests_end.outcome or tests_end.refused}")
            return await self._read_reward(container, tests_end.stdout + tests_end.stderr)
        except TimeoutError:
            seconds = self.fields["verifier_seconds"]
            raise VerifierError(f"VerifierError: the tests did not end within {seconds:g} s") from None
        except (ContainerError, OSError, ValueError, RecursionError) as error:
            raise VerifierError(f"VerifierError: {error}") from error

    async def _read_reward(self, container: AttemptContainer, output: str) -> float:
        """Return the reward from the verifier's log folder. Raises VerifierError if there is none, or
        ContainerError.
        """
        reward: object
        try:
            content = await container.get(f"{_LOGS}/reward.json", _MAX_REWARD_BYTES)
            reward = json.loads(content, object_pairs_hook=make_object)
            if isinstance(reward, dict):
                # A task with one number may give it any name.
                reward = reward.get("reward", next(iter(reward.values())) if len(reward) == 1 else None)
        except ContainerError:
            try:
                reward_text = (await container.get(f"{_LOGS}/reward.txt", _MAX_REWARD_BYTES)).decode()
            except ContainerError:
                tail = " ".join(output.split())[-_TAIL_CHARACTERS:]
                raise VerifierError(f"VerifierError: neither reward.json nor reward.txt in {_LOGS}: {tail}") from None
            reward = float(reward_text)
        finite_reward = finite_number(reward)
        if finite_reward is None:
            raise VerifierError(f"VerifierError: the reward is {reward!r:.80}, not a finite number")
        return finite_reward


def _read_files(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return a folder's regular files: relative path to (mode, content). Raises OSError above `_MAX_TEST_BYTES`."""
    files: dict[str, tuple[int, bytes]] = {}
    num_bytes = 0
    for path in sorted(folder.rglob("*")):
        # A link could point outside the task.
        if path.is_symlink() or not path.is_file():
            continue
        num_bytes += path.stat().st_size
        if num_bytes > _MAX_TEST_BYTES:
            raise OSError(f"{folder} has more than {_MAX_TEST_BYTES >> 20} MiB")
        files[os.fspath(path.relative_to(folder))] = path.stat().st_mode & 0o777, path.read_bytes()
    return files
