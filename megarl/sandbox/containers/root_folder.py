"""Root folder of a container in namespaces: this machine's system folders, or an image below a layer of new files."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from megarl.processes.process_tree import fork_child, kill_tree
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
    MS_NOSUID,
    MS_PRIVATE,
    MS_RDONLY,
    MS_REC,
    PR_SET_DUMPABLE,
    PR_SET_NO_NEW_PRIVS,
    KernelError,
    clone,
    drop_capabilities,
    mount,
    mount_mapped,
    pivot_root,
    prctl,
    restrict_mount,
)
from megarl.sandbox.namespaces import DEVICES, write_process_file

WORK_FOLDER, HOME_FOLDER = "/workspace", "/home/agent"
"""Folders for the programs. They are writable, and empty at first unless the image has them."""
RELAY_PORT = 11811
"""Port of the endpoint on the container's loopback. It is constant, so that all prompts show the same address."""
_SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/opt")
_NEW_ROOT = "/sys"
"""Mount point of the new root during construction. No program runs from /sys, and only this process sees the mount."""
# From linux/sockios.h and linux/if.h.
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
NAMESPACES = CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP
NETWORK_NAMESPACE = CLONE_NEWNET


@dataclass(frozen=True, slots=True, kw_only=True)
class RootFolder:
    """Parts of a container's root folder."""

    image: str | None
    """Folder with an unpacked image. None: system folders of this machine, read-only."""
    folders: tuple[str, ...]
    """Further folders of this machine, shown read-only under the same path."""
    python: tuple[str, ...]
    """Folders of megarl's own Python, shown besides the system folders."""
    disk_bytes: int

    def build(self, user_namespace: int | None = None) -> None:
        """Mount the root folder, and enter it. Only this process and its children see it. Raises OSError.

        `user_namespace` is the descriptor of a user namespace. Its root then owns the files belonging to root in the
        image and in `folders`.
        """
        # Folders created for mount points must be readable by the container's user.
        os.umask(0o022)
        # Private propagation: no mount below is seen outside this namespace.
        mount("", "/", "", MS_REC | MS_PRIVATE)
        # New files are in memory: they end with the last process, however it ends.
        mount("tmpfs", _NEW_ROOT, "tmpfs", MS_NOSUID | MS_NODEV, f"size={self.disk_bytes},mode=1777")
        root = _NEW_ROOT if self.image is None else _mount_image(self.image, user_namespace)
        for folder in ("/dev", "/dev/pts", "/dev/shm", "/proc", "/tmp", "/var/tmp", WORK_FOLDER, HOME_FOLDER):
            _make_writable(root + folder)
        if self.image is None:
            _mount_system_folders(root, self.python)
        # After the system folders, because one of `folders` may be below them.
        for folder in self.folders:
            _mount_read_only(folder, root, user_namespace=user_namespace)
        for device in DEVICES:
            _mount_read_only(device, root, flags=MS_NOSUID)
        # The kernel allows a new /proc only where the machine's /proc is fully visible. Later the container's /proc
        # covers it.
        mount("/proc", f"{root}/proc", "", MS_BIND | MS_REC)
        # From here on, no path leads to the machine's other folders.
        os.chdir(root)
        pivot_root()


def _mount_image(image: str, user_namespace: int | None) -> str:
    """Mount an image with a writable layer in memory. Returns the path. `user_namespace`: as in `RootFolder.build`."""
    for name in ("image", "root", "new", "work"):
        os.mkdir(f"{_NEW_ROOT}/{name}")
        # `mkdir` applies the umask to its mode, so set the mode again.
        os.chmod(f"{_NEW_ROOT}/{name}", 0o1777)
    root = f"{_NEW_ROOT}/root"
    _bind_mount(image, f"{_NEW_ROOT}/image", user_namespace)
    layers = f"lowerdir={_NEW_ROOT}/image,upperdir={_NEW_ROOT}/new,workdir={_NEW_ROOT}/work"
    # An ordinary user cannot write overlayfs's trusted.* attributes. `userxattr` avoids them, from Linux 5.11 on.
    mount("overlay", root, "overlay", MS_NOSUID | MS_NODEV, f"{layers},userxattr")
    return root


def _mount_system_folders(root: str, python: Sequence[str]) -> None:
    """Mount the system's and megarl's Python folders read-only below `root`. Links remain links."""
    for folder in dict.fromkeys((*_SYSTEM_FOLDERS, *python)):
        # On merged systems /bin is a link to usr/bin. Programs expect this.
        if os.path.islink(folder):
            os.symlink(os.readlink(folder), root + folder)
        elif os.path.isdir(folder) and not os.path.exists(root + folder):
            _mount_read_only(folder, root)


def _mount_read_only(
    path: str, root: str, *, flags: int = MS_NOSUID | MS_NODEV, user_namespace: int | None = None
) -> None:
    """Mount a file or folder of the machine read-only under the same path below `root`."""
    mount_point = root + path
    if os.path.isdir(path):
        os.makedirs(mount_point, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(mount_point), exist_ok=True)
        os.close(os.open(mount_point, os.O_WRONLY | os.O_CREAT, 0o644))
    _bind_mount(path, mount_point, user_namespace)
    # A bind mount ignores these flags (mount(2)), so a second call sets them.
    restrict_mount(mount_point, MS_RDONLY | flags, recursive=True)


def _make_writable(folder: str) -> None:
    """Create a folder that any user can write. A folder of the image keeps its mode, except /dev."""
    if not os.path.isdir(folder) or folder.endswith("/dev"):
        os.makedirs(folder, exist_ok=True)
        os.chmod(folder, 0o1777)


def _bind_mount(source: str, target: str, user_namespace: int | None) -> None:
    """Mount a folder at another place. `user_namespace` maps its owners, if the file system supports this."""
    if user_namespace is not None:
        # NFS and older kernels cannot map owners. Programs can then read only files readable by everybody.
        with suppress(KernelError):
            mount_mapped(source, target, user_namespace)
            return
    mount(source, target, "", MS_BIND | MS_REC)


def map_users(proc: int, *, user: int, group: int) -> None:
    """Make this user root of its new user namespace. `proc`: descriptor of the machine's /proc."""
    prctl(PR_SET_DUMPABLE, 1)  # Otherwise root owns its files in /proc.
    # Linux requires denying setgroups before an unprivileged process may write gid_map.
    write_process_file(proc, "self/setgroups", "deny")
    write_process_file(proc, "self/uid_map", f"0 {user} 1")
    write_process_file(proc, "self/gid_map", f"0 {group} 1")


def open_user_namespace(user: int, proc: int) -> int:
    """Return the descriptor of a user namespace with `user` as root. Needs root's rights. Raises OSError."""
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    # The child keeps the namespace alive until the pipe is closed. By then it is open here.
    child = fork_child(lambda: os.read(read_end, 1), lambda: clone(CLONE_NEWUSER))
    try:
        write_process_file(proc, f"{child}/uid_map", f"0 {user} 1")
        write_process_file(proc, f"{child}/gid_map", f"0 {user} 1")
        return os.open(f"{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
    finally:
        os.close(read_end)
        os.close(write_end)
        kill_tree(child)
        os.waitpid(child, 0)


def complete_root_folder() -> None:
    """Complete a container's root file system: host name, /proc, terminals, shared memory, links in /dev.

    The first process of the container's namespaces calls it. Raises OSError.
    """
    # A fixed name: programs write it into prompts, and equal prompts share a cached prefix on all nodes.
    socket.sethostname("container")
    # Mounted by the namespace's first process, because /proc shows the processes of the mounter's namespace.
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV)
    # The container's own terminals. Codex and `script` open one.
    mount("devpts", "/dev/pts", "devpts", MS_NOSUID, "newinstance,ptmxmode=0666,mode=620")
    # Docker's default size of /dev/shm.
    mount("tmpfs", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, "size=64m,mode=1777")
    links = {"ptmx": "pts/ptmx", "fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}
    for name, target in links.items():
        if not os.path.lexists(f"/dev/{name}"):
            os.symlink(target, f"/dev/{name}")
    # Forbid nested user namespaces: there a program would have rights over mounts and networks.
    with open("/proc/sys/user/max_user_namespaces", "w") as file:
        file.write("0")


def open_loopback() -> socket.socket:
    """Start the loopback of this network namespace. Returns a socket listening there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("16sh14x", b"lo", 0)
        (flags,) = struct.unpack("16xh14x", fcntl.ioctl(probe, _SIOCGIFFLAGS, request))
        fcntl.ioctl(probe, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | _IFF_UP))
    return socket.create_server(("127.0.0.1", RELAY_PORT), backlog=256)


def drop_rights() -> None:
    """Drop all rights of the container's root over its namespaces, for child processes too."""
    # No set-user-id program of an image may regain rights.
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    # This process's memory is a copy of the keeper's. Programs of the same user must not read it.
    prctl(PR_SET_DUMPABLE, 0)
    drop_capabilities()
