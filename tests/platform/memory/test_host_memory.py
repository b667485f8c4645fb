"""Host memory that a process may use: the machine's, or what a cgroup allows."""

from __future__ import annotations

import os
from pathlib import Path

from megarl.platform.memory.host_memory import cgroup_limits, machine_bytes


def made(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


def test_the_limits_of_all_cgroups_around_a_process_count(tmp_path: Path) -> None:
    """Slurm limits a job's cgroup, and often not the step's in it."""
    root = made(
        tmp_path / "v2",
        {
            "memory.max": "max",
            "slurm/memory.max": "max",
            "slurm/job_7/memory.max": "68719476736",
            "slurm/job_7/step_0/memory.max": "max",
            "slurm/job_8/memory.max": "1",
        },
    )
    own = made(tmp_path, {"cgroup": "0::/slurm/job_7/step_0"}) / "cgroup"
    assert list(cgroup_limits(own, root)) == [64 << 30]


def test_of_cgroups_of_the_first_version_memory_alone_counts(tmp_path: Path) -> None:
    root = made(
        tmp_path / "v1",
        {
            "memory/memory.limit_in_bytes": "9223372036854771712",
            "memory/docker/a/memory.limit_in_bytes": "1073741824",
            "cpu/docker/a/memory.limit_in_bytes": "1",
        },
    )
    own = made(tmp_path, {"cgroup": "11:cpu,cpuacct:/docker/a\n4:memory:/docker/a\n1:name=systemd:/x"}) / "cgroup"
    assert min(cgroup_limits(own, root)) == 1 << 30


def test_without_cgroups_all_of_the_machine_is_there(tmp_path: Path) -> None:
    assert list(cgroup_limits(tmp_path / "absent", tmp_path)) == []
    assert 0 < machine_bytes() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
