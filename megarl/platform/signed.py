"""Collectives of Python objects, pickled and signed with the run's key; only what is signed is unpickled.

Collectives of gloo and NCCL do not authenticate their peers, and unpickling runs the code that a message names. So each
message carries an HMAC over its sender, its number and its content, which is checked first: what somebody without the
run's key wrote, or an old message sent again, is refused and never unpickled. Nor is what was said in another world of
the run: engine replicas are worlds of their own, and one that is started again is none that was there before.
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

from megarl.platform import bridge, rendezvous

_HEAD = struct.Struct("<32sQ")
"""The signature, and the bytes of the pickle that follows."""
_CONTEXT = struct.Struct("<qqQ")
"""The signed context before the content: sender, number, bytes."""
_MOST_BYTES = 1 << 32

Value = TypeVar("Value")


class ForgedMessageError(Exception):
    """A message between ranks whose signature does not match its expected sender, number and content."""


class Conversation:
    """The signed messages among some ranks for one purpose, numbered per sender.

    `purpose` names subject and ranks, and is the same on all of them; a message of another conversation is refused.
    """

    def __init__(self, purpose: str) -> None:
        self._key = rendezvous.derived_key(purpose)
        self._numbers: dict[int, int] = {}

    def seal(self, value: Any, sender: int) -> bytes:
        """The next message of rank `sender`: its head and the pickled value."""
        data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        return _HEAD.pack(self._signature(data, len(data), sender), len(data)) + data

    def size(self, message: bytes | memoryview) -> int:
        """The length of a message in bytes, head included, from its beginning."""
        _, size = _HEAD.unpack_from(message)
        if size > _MOST_BYTES:
            raise ForgedMessageError(f"a message between ranks says that it has {size} bytes")
        return _HEAD.size + size

    def open(self, message: bytes | memoryview, sender: int) -> Any:
        """The value of the next message of rank `sender`; more bytes may follow. Raises ForgedMessageError."""
        signature, size = _HEAD.unpack_from(message)
        data = memoryview(message)[_HEAD.size : _HEAD.size + size]
        if not hmac.compare_digest(signature, self._signature(data, size, sender)):
            raise ForgedMessageError(f"a message in the name of rank {sender} was not signed with this run's key")
        return pickle.loads(data)

    def _signature(self, data: bytes | memoryview, size: int, sender: int) -> bytes:
        number = self._numbers[sender] = self._numbers.get(sender, -1) + 1
        return hmac.digest(self._key, _CONTEXT.pack(sender, number, size) + data, hashlib.sha256)


_conversations: dict[str, Conversation] = {}


def between(purpose: str, members: Sequence[int]) -> Conversation:
    """The process's conversation for a purpose among these ranks of its world; all take part in each message."""
    return _conversation(f"{purpose} in world {rendezvous.world_name()}", members)


def _conversation(purpose: str, members: Sequence[int]) -> Conversation:
    name = f"{purpose} {tuple(members)}"
    if name not in _conversations:
        _conversations[name] = Conversation(name)
    return _conversations[name]


def gather(
    value: Value, group: dist.ProcessGroup | None = None, *, to: int | None = None, purpose: str = "gather"
) -> list[Value]:
    """Every rank's value, by rank of the group; only on the global rank `to`, if given. A collective.

    The group may be a bridge, without `to`: its conversations are its own.
    """
    name = bridge.name_of(group)
    members = range(group.size()) if name and group else dist.get_process_group_ranks(group or dist.group.WORLD)
    own = bridge.rank_in(group) if name else dist.get_rank()
    if len(members) == 1:
        return [value]
    # The ranks of a bridge are of several worlds, and its name was never used before.
    conversation = _conversation(f"{purpose} {name}", members) if name else between(purpose, members)
    is_receiver = to is None or own == to
    message = conversation.seal(value, own)
    device = _device(group)
    longest = torch.tensor(len(message), device=device)
    is_bridge = bool(name)
    bridge.finish(dist.all_reduce(longest, dist.ReduceOp.MAX, group, async_op=is_bridge), group)
    block = torch.frombuffer(bytearray(message.ljust(int(longest))), dtype=torch.uint8).to(device)
    blocks = [torch.empty_like(block) for _ in members] if is_receiver else []
    if to is None:
        bridge.finish(dist.all_gather(blocks, block, group, async_op=is_bridge), group)
    else:
        dist.gather(block, blocks or None, dst=to, group=group)
    return [
        value if rank == own else conversation.open(theirs.cpu().numpy().data, rank)
        for rank, theirs in zip(members, blocks, strict=is_receiver)
    ]


def broadcast(
    conversation: Conversation,
    value: Any,
    group: dist.ProcessGroup | None,
    source: int,
    block_bytes: int,
) -> Any:
    """The value of the global rank `source` on all ranks: a broadcast of fixed size, a second one if it is longer."""
    if dist.get_rank() == source:
        message = bytearray(conversation.seal(value, source))
        size = len(message)
        message.extend(bytes(max(0, block_bytes - size)))
        blocks = torch.frombuffer(message, dtype=torch.uint8)
        dist.broadcast(blocks[:block_bytes], source, group=group)
        if size > block_bytes:
            dist.broadcast(blocks[block_bytes:], source, group=group)
        return value
    first = torch.empty(block_bytes, dtype=torch.uint8)
    dist.broadcast(first, source, group=group)
    size = conversation.size(first.numpy().data)
    if size > block_bytes:
        rest = torch.empty(size - block_bytes, dtype=torch.uint8)
        dist.broadcast(rest, source, group=group)
        first = torch.cat([first, rest])
    return conversation.open(first.numpy().data, source)


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """The device of a group's collectives: the host if it has gloo."""
    has_gloo = bool(bridge.name_of(group)) or "gloo" in str(dist.get_backend_config(group))
    return torch.device("cpu") if has_gloo else torch.device("cuda", torch.cuda.current_device())
