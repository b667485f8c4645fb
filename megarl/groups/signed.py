"""Collectives of Python objects, pickled and signed with the run's secret key. Only signed data is unpickled.

gloo and NCCL do not authenticate their peers, and unpickling can run arbitrary code. Each message therefore has an HMAC
over its sender, its number and its content. Forged and replayed messages are refused, and messages of another torch
world, such as an engine replica's. A restarted replica is a new world.
"""

from __future__ import annotations

import hashlib
import hmac
import pickle
import struct
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megarl.groups import cross_world, rendezvous

_HEAD = struct.Struct("<32sQ")
"""Header of a message: HMAC-SHA256 signature, then the length of the pickle in bytes."""
_CONTEXT = struct.Struct("<qqQ")
"""Signed together with the content: sender, message number, length in bytes."""
_MOST_BYTES = 1 << 32
"""Maximum bytes of an accepted message. A message states its length before its signature can be checked."""

Value = TypeVar("Value")


class ForgedMessageError(Exception):
    """Raised for a message between ranks with a signature that does not match its sender, number and content."""


class SignedChannel:
    """Signed messages among a set of ranks for one purpose, numbered per sender.

    `purpose` names the subject and the ranks, equal on all of them. Messages of another purpose are refused.
    """

    def __init__(self, purpose: str) -> None:
        self._key = rendezvous.derived_key(purpose)
        self._numbers: dict[int, int] = {}

    def seal(self, value: Any, sender: int) -> bytes:
        """Return the next message of rank `sender`: the header and the pickled value."""
        data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        return _HEAD.pack(self._signature(data, len(data), sender), len(data)) + data

    def size(self, message: bytes | memoryview) -> int:
        """Return the length of a message in bytes, header included. Needs only the message's first bytes.

        Raises ForgedMessageError if the stated length exceeds 4 GiB.
        """
        _, size = _HEAD.unpack_from(message)
        if size > _MOST_BYTES:
            raise ForgedMessageError(f"a message between ranks states a length of {size} bytes, which is too long")
        return _HEAD.size + size

    def open(self, message: bytes | memoryview, sender: int) -> Any:
        """Check a message of rank `sender` and return its value. Bytes after the message's end are ignored.

        Raises ForgedMessageError if the signature is wrong.
        """
        signature, size = _HEAD.unpack_from(message)
        data = memoryview(message)[_HEAD.size : _HEAD.size + size]
        if not hmac.compare_digest(signature, self._signature(data, size, sender)):
            raise ForgedMessageError(f"a message in the name of rank {sender} was not signed with this run's key")
        return pickle.loads(data)

    def _signature(self, data: bytes | memoryview, size: int, sender: int) -> bytes:
        # Numbers count per sender on both sides, so a replayed message fails the check.
        number = self._numbers[sender] = self._numbers.get(sender, -1) + 1
        return hmac.digest(self._key, _CONTEXT.pack(sender, number, size) + data, hashlib.sha256)


_channels: dict[str, SignedChannel] = {}


def channel_between(purpose: str, members: Sequence[int]) -> SignedChannel:
    """Return this process's channel for a purpose among ranks of its torch world. All these ranks must take part."""
    return _find_channel(f"{purpose} in world {rendezvous.world_name()}", members)


def _find_channel(purpose: str, members: Sequence[int]) -> SignedChannel:
    name = f"{purpose} {tuple(members)}"
    if name not in _channels:
        _channels[name] = SignedChannel(name)
    return _channels[name]


def gather(
    value: Value, group: dist.ProcessGroup | None = None, *, to: int | None = None, purpose: str = "gather"
) -> list[Value]:
    """Gather the values of all ranks, ordered by rank in the group.

    A collective. `value` may be any picklable object. With `to`, not for cross-world groups, all other ranks return an
    empty list. Raises ForgedMessageError.
    """
    name = cross_world.group_name(group)
    members = range(group.size()) if name and group else dist.get_process_group_ranks(group or dist.group.WORLD)
    own_rank = cross_world.rank_in(group) if name else dist.get_rank()
    if len(members) == 1:
        return [value]
    # The world names of a cross-world group's ranks differ. The group's own name, never reused, separates messages.
    channel = _find_channel(f"{purpose} {name}", members) if name else channel_between(purpose, members)
    # 1. Sign this rank's value.
    is_receiver = to is None or own_rank == to
    message = channel.seal(value, own_rank)
    device = _device(group)
    # 2. Exchange the messages. Collectives need equal sizes, so all ranks pad to the longest message.
    longest_bytes = torch.tensor(len(message), device=device)
    is_cross_world = bool(name)
    cross_world.finish(dist.all_reduce(longest_bytes, dist.ReduceOp.MAX, group, async_op=is_cross_world), group)
    padded_message = torch.frombuffer(bytearray(message.ljust(int(longest_bytes))), dtype=torch.uint8).to(device)
    padded_messages = [torch.empty_like(padded_message) for _ in members] if is_receiver else []
    if to is None:
        cross_world.finish(dist.all_gather(padded_messages, padded_message, group, async_op=is_cross_world), group)
    else:
        dist.gather(padded_message, padded_messages or None, dst=to, group=group)
    # 3. Check the signatures of the others.
    return [
        value if rank == own_rank else channel.open(message_of_rank.cpu().numpy().data, rank)
        for rank, message_of_rank in zip(members, padded_messages, strict=is_receiver)
    ]


def broadcast(
    channel: SignedChannel,
    value: Any,
    group: dist.ProcessGroup | None,
    source: int,
    block_bytes: int,
) -> Any:
    """Broadcast the value of the global rank `source`, and return it on all ranks.

    The first broadcast has `block_bytes` bytes. A longer message needs a second one. Raises ForgedMessageError.
    """
    # The first broadcast has a fixed size, so that a short message needs no broadcast of its length.
    if dist.get_rank() == source:
        message = bytearray(channel.seal(value, source))
        message_size = len(message)
        message.extend(bytes(max(0, block_bytes - message_size)))
        message_bytes = torch.frombuffer(message, dtype=torch.uint8)
        dist.broadcast(message_bytes[:block_bytes], source, group=group)
        if message_size > block_bytes:
            dist.broadcast(message_bytes[block_bytes:], source, group=group)
        return value
    received_bytes = torch.empty(block_bytes, dtype=torch.uint8)
    dist.broadcast(received_bytes, source, group=group)
    message_size = channel.size(received_bytes.numpy().data)
    if message_size > block_bytes:
        second_part = torch.empty(message_size - block_bytes, dtype=torch.uint8)
        dist.broadcast(second_part, source, group=group)
        received_bytes = torch.cat([received_bytes, second_part])
    return channel.open(received_bytes.numpy().data, source)


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device for a group's collectives: the CPU with gloo, else this rank's GPU."""
    has_gloo = bool(cross_world.group_name(group)) or "gloo" in str(dist.get_backend_config(group))
    return torch.device("cpu") if has_gloo else torch.device("cuda", torch.cuda.current_device())
