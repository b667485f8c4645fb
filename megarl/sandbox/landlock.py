"""Landlock: restrict a process to files below some folders, and cut off its network (landlock(7))."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence

from megarl.sandbox.kernel import KernelError, syscall

# Access rights of linux/landlock.h. The first version has bits 0 to 12. Later versions add the rights named here.
_READ_FILE, _READ_DIR, _WRITE_FILE = 1 << 2, 1 << 3, 1 << 1
_RIGHTS_OF_VERSION_1 = (1 << 13) - 1
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_NEVER = 1 | 1 << 6 | 1 << 9 | 1 << 11
"""Landlock rights never given: executing files, and making devices and sockets."""
_TCP_BIND_AND_CONNECT = 3
_ABSTRACT_SOCKETS_AND_SIGNALS = 3
_VERSION_FLAG = 1
_PATH_BENEATH = 1


def version() -> int:
    """Return the kernel's version of Landlock. Raises KernelError without Landlock."""
    return syscall("landlock_create_ruleset", None, 0, _VERSION_FLAG)


def ungoverned_operations(landlock_version: int) -> list[str]:
    since = {2: "moving files between folders", 3: "truncating files", 4: "TCP", 5: "devices", 6: "signals"}
    return [operation for first_version, operation in since.items() if landlock_version < first_version]


def restrict(
    *, readable: Sequence[str], listable: Sequence[str], usable: Sequence[str], writable: Sequence[str]
) -> None:
    """Restrict this process to these files, or to folders with everything below. `usable` must be files.

    Needs no_new_privs. Raises KernelError.
    """
    abi_version = version()
    # The kernel rejects rights it does not know, so request only those of its version.
    file_rights = _RIGHTS_OF_VERSION_1 | (_REFER if abi_version >= 2 else 0) | (_TRUNCATE if abi_version >= 3 else 0)
    handled_rights = file_rights | (_IOCTL_DEV if abi_version >= 5 else 0)
    attributes = struct.pack("<QQQ", handled_rights, _TCP_BIND_AND_CONNECT, _ABSTRACT_SOCKETS_AND_SIGNALS)
    # Size by version: file rights (8 bytes), network since version 4 (16), scopes since version 6 (24).
    attribute_bytes = 24 if abi_version >= 6 else 16 if abi_version >= 4 else 8
    rules = syscall("landlock_create_ruleset", attributes, attribute_bytes, 0)
    try:
        for path in readable:
            _add_rule(rules, path, _READ_FILE | (_READ_DIR if os.path.isdir(path) else 0))
        for folder in listable:
            _add_rule(rules, folder, _READ_DIR)
        for file in usable:
            _add_rule(rules, file, _READ_FILE | _WRITE_FILE)
        for folder in writable:
            _add_rule(rules, folder, file_rights & ~_NEVER)
        syscall("landlock_restrict_self", rules, 0)
    finally:
        os.close(rules)


def _add_rule(rules: int, path: str, access: int) -> None:
    """Add a rule to a Landlock ruleset: `access` rights for a path and everything below it."""
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        # A missing path needs no rule, because everything without a rule is denied.
        return
    except OSError as error:
        raise KernelError(error.errno or 0, f"{path}: {error.strerror}") from None
    try:
        rule = ctypes.create_string_buffer(struct.pack("<Qi", access, descriptor), 12)
        syscall("landlock_add_rule", rules, _PATH_BENEATH, rule, 0)
    finally:
        os.close(descriptor)
