"""Messages between ranks: whole, in order, and never unpickled unless the run's key has signed them."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megarl.groups import rendezvous, signed
from megarl.groups.signed import ForgedMessageError, SignedChannel
from tests.rank_pool import RankPool


class Trap:
    """Unpickled, it makes a folder."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous._ProcessState, "rendezvous", rendezvous.Rendezvous(b"k" * 32, file="nowhere"))


def test_messages_are_opened_in_their_order() -> None:
    ours, theirs = SignedChannel("steps"), SignedChannel("steps")
    for value in ("one", {"two": [2, None]}, b"3" * 1000):
        assert theirs.open(ours.seal(value, 0) + b"padding", 0) == value


@pytest.mark.parametrize(
    "forgery", ["other key", "other world", "changed", "sent again", "other rank", "other subject", "length"]
)
def test_a_forged_message_is_refused_and_not_unpickled(forgery: str, tmp_path: Path) -> None:
    trap = str(tmp_path / "sprung")
    ours, theirs = SignedChannel("steps"), SignedChannel("steps")
    message = ours.seal(Trap(trap), 0)
    sender = 0
    if forgery == "other key":
        rendezvous.set_rendezvous(rendezvous.Rendezvous(b"x" * 32, file="nowhere"))
        message = SignedChannel("steps").seal(Trap(trap), 0)
    elif forgery == "other world":
        # A replica's leader before it was lost, and a follower of the one in its place: the same key, ranks and number.
        def commands(world: str) -> SignedChannel:
            rendezvous.set_rendezvous(rendezvous.Rendezvous(b"k" * 32, file="nowhere", world=world))
            signed._channels.clear()
            return signed.channel_between("commands", (0, 1))

        message, theirs = commands("before").seal(Trap(trap), 0), commands("after")
        assert theirs.open(commands("after").seal("its own", 0), 0) == "its own"
        theirs = commands("after")
    elif forgery == "changed":
        message = message.replace(b"sprung", b"sprang")
    elif forgery == "sent again":
        first = ours.seal("first", 1)
        assert theirs.open(first, 1) == "first"
        message, sender = first, 1
    elif forgery == "other rank":
        sender = 1
    elif forgery == "other subject":
        theirs = SignedChannel("results")
    else:
        message = message[:32] + (1 << 40).to_bytes(8, "little") + message[40:]
        with pytest.raises(ForgedMessageError, match="bytes"):
            theirs.size(message)
    with pytest.raises(ForgedMessageError, match=f"rank {sender}"):
        theirs.open(message, sender)
    assert list(tmp_path.iterdir()) == []


def exchanged(folder: str) -> dict[str, Any]:
    rank = dist.get_rank()
    found: dict[str, Any] = {"all": signed.gather(("of", rank, "x" * rank * 1000))}
    pair: Any = dist.new_group([1, 2])
    if rank:
        found["pair"] = signed.gather(rank, pair, to=1)
        channel = signed.channel_between("commands", (1, 2))
        values = ["short", "long" * 100, None]
        found["commands"] = [signed.broadcast(channel, v if rank == 1 else None, pair, 1, 256) for v in values]
        # A stranger takes the leader's place.
        forged = bytearray((b"\0" * 32 + (100).to_bytes(8, "little") + pickle.dumps(Trap(folder))).ljust(256))
        if rank == 1:
            dist.broadcast(torch.frombuffer(forged, dtype=torch.uint8), 1, group=pair)
        else:
            try:
                signed.broadcast(channel, None, pair, 1, 256)
            except ForgedMessageError as error:
                found["refused"] = str(error)
    return found


def test_ranks_exchange_objects(ranks: RankPool, tmp_path: Path) -> None:
    trap = tmp_path / "sprung"
    found = ranks.run(exchanged, str(trap), world_size=3)
    assert all(of_rank["all"] == [("of", r, "x" * r * 1000) for r in range(3)] for of_rank in found)
    assert found[1]["pair"] == [1, 2] and found[2]["pair"] == []
    assert found[1]["commands"] == found[2]["commands"] == ["short", "long" * 100, None]
    assert "not signed" in found[2]["refused"] and not trap.exists()
