"""Linux system calls for which Python has no function."""

from __future__ import annotations

import ctypes
import errno
import os
import platform

_LIBC = ctypes.CDLL(None, use_errno=True)
# PyDLL does not release the interpreter's lock: the child of a raw clone continues at the same place, and needs the
# lock.
_HOLDING_LIBC = ctypes.PyDLL(None, use_errno=True)

_NUMBERS = {
    "x86_64": {"clone": 56, "pivot_root": 155, "seccomp": 317},
    "aarch64": {"clone": 220, "pivot_root": 41, "seccomp": 277},
}
_SINCE_5 = {
    "open_tree": 428, "move_mount": 429, "mount_setattr": 442,
    "landlock_create_ruleset": 444, "landlock_add_rule": 445, "landlock_restrict_self": 446,
}  # fmt: skip
"""Numbers of system calls since Linux 5.0. They are the same on all processors."""

CLONE_NEWTIME, CLONE_NEWNS, CLONE_NEWCGROUP = 0x80, 0x00020000, 0x02000000
CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER = 0x04000000, 0x08000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET, CLONE_THREAD = 0x20000000, 0x40000000, 0x00010000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
# statvfs and mount have different bits for relatime: 4096 is MS_BIND, and MS_RELATIME is 1 << 21.
_MOUNT_FLAG_OF_STATVFS = {os.ST_NOATIME: 1024, os.ST_NODIRATIME: 2048, os.ST_RELATIME: 1 << 21}
PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 4, 24, 38
# With SIGCHLD as termination signal `wait` works for a cloned child as for a forked one.
_SIGCHLD = 17
_CAPABILITY_VERSION = 0x20080522
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_MOUNT_ATTR = {MS_RDONLY: 1, MS_NOSUID: 2, MS_NODEV: 4, MS_NOEXEC: 8}
# Flags of open_tree(2), mount_setattr(2) and move_mount(2).
_OPEN_TREE_CLONE, _O_CLOEXEC, _MOUNT_ATTR_IDMAP = 1, 0o2000000, 1 << 20
_AT_EMPTY_PATH, _MOVE_MOUNT_F_EMPTY_PATH = 0x1000, 4


class KernelError(OSError):
    """Raised if a system call fails. The text names the system call."""


def processor_name() -> str:
    """Return the processor's name in system call tables. Raises KernelError for an unsupported processor."""
    name = platform.machine()
    if name not in _NUMBERS:
        raise KernelError(0, f"the sandbox knows the system calls of {', '.join(_NUMBERS)}, not of {name}")
    return name


def _check_result(result: int, call: str) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise KernelError(error, f"{call}: {os.strerror(error)}")
    return result


def syscall(name: str, *arguments: int | bytes | ctypes.Array[ctypes.c_char] | None) -> int:
    number = _SINCE_5.get(name) or _NUMBERS[processor_name()][name]
    c_arguments = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    return _check_result(_LIBC.syscall(ctypes.c_long(number), *c_arguments), name)


def clone(flags: int) -> int:
    """Fork into new namespaces; return 0 in the child. Only `os.fork` initialises Python's state in the child."""
    zero = ctypes.c_long(0)
    number = ctypes.c_long(_NUMBERS[processor_name()]["clone"])
    return _check_result(
        _HOLDING_LIBC.syscall(number, ctypes.c_long(flags | _SIGCHLD), zero, zero, zero, zero), "clone"
    )


def unshare(flags: int) -> None:
    _check_result(_LIBC.unshare(ctypes.c_int(flags)), "unshare")


def setns(descriptor: int) -> None:
    _check_result(_LIBC.setns(ctypes.c_int(descriptor), ctypes.c_int(0)), "setns")


def prctl(option: int, value: int) -> None:
    zero = ctypes.c_ulong(0)
    _check_result(_LIBC.prctl(ctypes.c_int(option), ctypes.c_ulong(value), zero, zero, zero), f"prctl {option}")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    texts = [text.encode() or None for text in (source, target, kind)]
    _check_result(_LIBC.mount(*texts, ctypes.c_ulong(flags), options.encode() or None), f"mount at {target}")


def mount_mapped(source: str, target: str, user_namespace: int) -> None:
    """Mount a folder at `target`, with owners mapped as in the user namespace of the descriptor `user_namespace`.

    Needs Linux 5.12 and a file system that supports mapped mounts. Raises KernelError.
    """
    tree = syscall("open_tree", _AT_FDCWD, source.encode(), _OPEN_TREE_CLONE | _O_CLOEXEC)
    try:
        # struct mount_attr: flags to set, flags to clear, propagation, user namespace.
        attributes = b"".join(number.to_bytes(8, "little") for number in (_MOUNT_ATTR_IDMAP, 0, 0, user_namespace))
        attribute_buffer = ctypes.create_string_buffer(attributes, 32)
        syscall("mount_setattr", tree, b"", _AT_EMPTY_PATH, attribute_buffer, 32)
        syscall("move_mount", tree, b"", _AT_FDCWD, target.encode(), _MOVE_MOUNT_F_EMPTY_PATH)
    finally:
        os.close(tree)


def restrict_mount(target: str, flags: int, *, recursive: bool = False) -> None:
    """Add flags like MS_RDONLY to a mount, without removing others. Raises KernelError.

    `recursive` includes the mounts below it, and needs Linux 5.12.
    """
    attributes = sum(attribute for flag, attribute in _MOUNT_ATTR.items() if flags & flag)
    attribute_buffer = ctypes.create_string_buffer(attributes.to_bytes(8, "little") + bytes(24), 32)
    try:
        syscall("mount_setattr", _AT_FDCWD, target.encode(), _AT_RECURSIVE if recursive else 0, attribute_buffer, 32)
    except KernelError as error:
        if error.errno != errno.ENOSYS:  # Linux before 5.12 has no mount_setattr.
            raise
        if recursive:
            raise KernelError(errno.ENOSYS, f"{target} cannot be made read-only: Linux 5.12 or newer can") from None
        # A remount replaces all flags, so repeat the present ones.
        statvfs_flags = os.statvfs(target).f_flag
        present_flags = statvfs_flags & (MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC)
        present_flags |= sum(flag for bit, flag in _MOUNT_FLAG_OF_STATVFS.items() if statvfs_flags & bit)
        mount("", target, "", MS_BIND | MS_REMOUNT | flags | present_flags)


def pivot_root() -> None:
    syscall("pivot_root", b".", b".")
    _check_result(_LIBC.umount2(b".", ctypes.c_int(MNT_DETACH)), "umount of the old root")
    os.chdir("/")


def drop_capabilities() -> None:
    """Drop all capabilities of this process, including those gained by running another program."""
    capability = 0
    while True:
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except KernelError as error:
            if error.errno == errno.EINVAL:  # Beyond the last capability.
                break
            if error.errno != errno.EPERM:  # Otherwise the process has no capability to drop.
                raise
            break
        capability += 1
    header = _CAPABILITY_VERSION.to_bytes(4, "little") + bytes(4)
    _check_result(_LIBC.capset(header, bytes(24)), "capset")
