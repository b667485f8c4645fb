"""Linux namespaces for sandbox runs: a root folder with only Python, no network, no other users or processes."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from megarl.sandbox.kernel import (
    CLONE_NEWCGROUP,
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    CLONE_NEWUTS,
    MS_BIND,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_RDONLY,
    MS_REC,
    PR_SET_DUMPABLE,
    clone,
    mount,
    pivot_root,
    prctl,
    restrict_mount,
    unshare,
)

DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
HOST_NAME = "sandbox"
_TMP = "/tmp"
_OUTSIDE_TMP = "/.tmp"
"""Mount point of folders below the machine's /tmp. At their own path, each run's /tmp would cover them. A symbolic link
in the run's /tmp leads here. If they were mounted in /tmp, Landlock would allow writing to them.
"""
_NEW_ROOT = "/sys"
"""Mount point of the new root during construction. No Python runs from /sys, and only this process sees the mount."""
# The spawner enters the first set once. Each run gets a new second set.
_SPAWNER_NAMESPACES = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP
_RUN_NAMESPACES = CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC
# Files in a run's /tmp, and user ids: the first is far above ids in use, the second is `nobody`.
_MAX_FILES = 4096
_FIRST_USER = 1_000_000_000
_NOBODY = 65534


def become_unprivileged() -> None:
    """Change this root process irrevocably to a user without files or rights. Raises OSError if that fails."""
    for user in unprivileged_users():
        try:
            become_user(user)
        except OSError:
            continue
        return
    raise PermissionError("setresuid: this process cannot change to an unprivileged user")


def unprivileged_users() -> tuple[int, int]:
    """Return two users without rights. `nobody` is second: services may run as that user."""
    return _FIRST_USER + os.getpid(), _NOBODY


def become_user(user: int) -> None:
    """Change this root process irrevocably to the user. Raises OSError."""
    # Groups first, because after setresuid the process may not change them.
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def enter_namespaces(trees: Sequence[str], is_root: bool) -> None:
    """Move this process into namespaces with a root of only `trees` (read-only), some devices and an empty /tmp.

    With `is_root` it builds the root folder before it drops root's rights: perhaps only root can read Python. Raises
    OSError with the failed step; the process is then useless.
    """
    # Open it first, because the new root has no /proc.
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if is_root:
            unshare(CLONE_NEWNS)
            _build_root(trees)
            become_unprivileged()
        user, group = os.geteuid(), os.getegid()
        unshare(_SPAWNER_NAMESPACES)
        socket.sethostname(HOST_NAME)
        prctl(PR_SET_DUMPABLE, 1)  # Otherwise root owns its files in /proc.
        # Linux requires denying setgroups before an unprivileged process may write gid_map.
        write_process_file(proc, "self/setgroups", "deny")
        write_process_file(proc, "self/uid_map", f"{user} {user} 1")
        write_process_file(proc, "self/gid_map", f"{group} {group} 1")
        if not is_root:
            _build_root(trees)
    finally:
        os.close(proc)


def fork_run() -> int:
    """Fork the first process of a sandbox run, and return 0 in it. It sees no other process."""
    return clone(_RUN_NAMESPACES)


def mount_private_tmp(size_bytes: int) -> None:
    """Mount an empty /tmp for a run, with the links of the spawner's /tmp. Raises OSError."""
    links = {name: os.readlink(f"{_TMP}/{name}") for name in os.listdir(_TMP)}
    options = f"size={size_bytes},nr_inodes={_MAX_FILES},mode=700"
    mount("tmpfs", _TMP, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, options)
    for name, target in links.items():
        os.symlink(target, f"{_TMP}/{name}")


def write_process_file(proc: int, name: str, text: str) -> None:
    """Write a file of /proc, such as `self/uid_map`. `proc`: descriptor of /proc."""
    file = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=proc)
    try:
        os.write(file, text.encode())
    except OSError as error:
        raise OSError(error.errno, f"/proc/{name}: {error.strerror}") from None
    finally:
        os.close(file)


def _build_root(trees: Sequence[str]) -> None:
    """Mount a new root folder with `trees`, devices and /tmp, and make it this process's read-only root."""
    # Private propagation: no mount below is seen outside this namespace.
    mount("", "/", "", MS_REC | MS_PRIVATE)
    mount("tmpfs", _NEW_ROOT, "tmpfs", MS_NOSUID, "size=1m,mode=755")
    os.umask(0o022)
    os.makedirs(f"{_NEW_ROOT}{_TMP}")
    for tree in trees:
        if os.path.isfile(tree):
            _mount_file(tree)
        elif os.path.isdir(tree):
            _mount_folder(tree)
    os.makedirs(f"{_NEW_ROOT}/dev", exist_ok=True)
    for device in DEVICES:
        os.close(os.open(_NEW_ROOT + device, os.O_WRONLY | os.O_CREAT, 0o644))
        mount(device, _NEW_ROOT + device, "", MS_BIND)
    os.chdir(_NEW_ROOT)
    pivot_root()
    # Last, because the folders above must be created first.
    restrict_mount("/", MS_RDONLY | MS_NOSUID | MS_NODEV)


def _mount_folder(path: str) -> None:
    mount_point = _make_mount_point(path)
    os.makedirs(mount_point, exist_ok=True)
    mount(path, mount_point, "", MS_BIND | MS_REC)
    restrict_mount(mount_point, MS_RDONLY | MS_NOSUID | MS_NODEV, recursive=True)


def _mount_file(path: str) -> None:
    """Mount a single file into the new root, unless its folder is already mounted."""
    mount_point = _make_mount_point(path)
    if os.path.exists(mount_point):
        return
    os.makedirs(os.path.dirname(mount_point), exist_ok=True)
    os.close(os.open(mount_point, os.O_WRONLY | os.O_CREAT, 0o644))
    mount(path, mount_point, "", MS_BIND)
    restrict_mount(mount_point, MS_RDONLY | MS_NOSUID | MS_NODEV)


def _make_mount_point(path: str) -> str:
    """Return a folder's mount point in the new root. A folder below /tmp also gets a link."""
    if not path.startswith(f"{_TMP}/"):
        return _NEW_ROOT + path
    path_below_tmp = path.removeprefix(f"{_TMP}/")
    # Link the top folder in /tmp, not the tree itself, because libraries find each other through `..`.
    top_folder = path_below_tmp.partition("/")[0]
    if not os.path.lexists(f"{_NEW_ROOT}{_TMP}/{top_folder}"):
        os.symlink(f"{_OUTSIDE_TMP}/{top_folder}", f"{_NEW_ROOT}{_TMP}/{top_folder}")
    return f"{_NEW_ROOT}{_OUTSIDE_TMP}/{path_below_tmp}"
