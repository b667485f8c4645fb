"""Accounts of the service: a file with a name and the SHA-256 of a key in each line."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from pathlib import Path

from megarl.types import ConfigError

# The file holds hashes of keys, so reading it gives no access.
_LINE = re.compile(r"^([A-Za-z0-9._-]{1,64})\s+([0-9a-f]{64})$")
LOCAL = "local"
"""Name of the account that all clients share if the service has no file of keys."""


class Accounts:
    """Accounts by the hashes of their keys. None: every key is accepted, as the account `local`."""

    def __init__(self, hashes: dict[str, str] | None) -> None:
        self._hashes = hashes

    def find_owner(self, key: str) -> str | None:
        """Return the account of a key; None: there is none."""
        if self._hashes is None:
            return LOCAL
        # aiohttp decodes invalid UTF-8 to surrogates, and a strict encode would raise.
        digest = hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()
        # Compare with all hashes, each in constant time: the duration of an answer must reveal nothing.
        owners = [name for name, key_hash in self._hashes.items() if hmac.compare_digest(digest, key_hash)]
        return owners[0] if owners else None


def read_accounts(file: Path | None, host: str) -> Accounts:
    """Return the accounts of a file. Raises ConfigError if it is invalid, or missing for a `host` that others can
    reach.
    """
    if file is None:
        if not _is_loopback(host):
            raise ConfigError(
                f"--host = {host}: other machines can reach this address, and without --keys every client is accepted; "
                "give --keys FILE, or leave --host out"
            )
        return Accounts(None)
    try:
        lines = file.read_text().splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--keys = {file}: cannot be read: {error}") from error
    hashes: dict[str, str] = {}
    for line_number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        match = _LINE.match(text)
        if match is None or match[1] in hashes:
            problem = "is not NAME and the SHA-256 of its key" if match is None else f"names {match[1]} again"
            raise ConfigError(f"{file}:{line_number}: {problem}; make one with: printf %s KEY | sha256sum")
        hashes[match[1]] = match[2]
    if not hashes:
        raise ConfigError(f"--keys = {file}: has no account; add a line with NAME and the SHA-256 of its key")
    return Accounts(hashes)


def _is_loopback(host: str) -> bool:
    try:
        # Other host names may resolve to any address, so they count as open.
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
