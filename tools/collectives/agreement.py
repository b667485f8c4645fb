"""Comparison of the calls that the members of each process group make."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tools.collectives.programs import EVERY_OTHER, Call, Group, Job, Program


class Member(NamedTuple):
    """A member of a group: its global rank, its program, and the group's number in the program (-1: not called)."""

    rank: int
    program: int
    slot: int


def mismatches(job: Job) -> Iterator[str]:
    """Yield a sentence for each group whose members do not make the same calls with the same sizes.

    A sentence names ranks and calls. Only the first difference of a group is reported, because the ones after it follow
    from it.
    """
    calls = [_CallsByGroup(program) for program in job.programs]
    agrees: dict[tuple[tuple[int, int], ...], bool] = {}
    for number, members in members_by_group(job).items():
        group = job.groups[number]
        # Groups whose members run the same programs give the same result.
        key = tuple((member.program, member.slot) for member in members)
        if agrees.get(key):
            continue
        has_mismatch = False
        for text in _group_mismatches(group, members, calls):
            has_mismatch = True
            yield text
        agrees[key] = not has_mismatch


def members_by_group(job: Job) -> dict[int, list[Member]]:
    """Return the members of each group that any rank calls, in the order of their group ranks."""
    called = [sorted({call.group for call in program.calls}) for program in job.programs]
    slots: dict[int, dict[int, int]] = defaultdict(dict)
    for rank, program in enumerate(job.ranks):
        for slot in called[program.program]:
            slots[program.group(slot)][rank] = slot
    return {
        number: [
            Member(rank, job.ranks[rank].program, slots[number].get(rank, -1)) for rank in job.groups[number].ranks
        ]
        for number in sorted(slots)
    }


class _CallsByGroup:
    """The calls of a program by group: collectives, and messages by peer."""

    def __init__(self, program: Program) -> None:
        self._collectives: dict[tuple[int, bool], list[Call]] = defaultdict(list)
        self._signatures: dict[tuple[int, bool], list[tuple[str, str, int, str]]] = defaultdict(list)
        self.messages: dict[tuple[int, bool, bool], tuple[_Sizes, _Sizes]] = defaultdict(
            lambda: (defaultdict(list), defaultdict(list))
        )
        for call in program.calls:
            if not call.is_message:
                self._collectives[call.group, call.on_host].append(call)
                self._signatures[call.group, call.on_host].append(call.signature)
                continue
            sent, received = self.messages[call.group, call.on_host, call.lane is None]
            for sizes, parts in ((sent, call.sends), (received, call.receives)):
                for peer, numel in parts:
                    sizes[peer].append((numel, call))

    def collectives(self, slot: int, on_host: bool) -> Sequence[Call]:
        """Return the collectives on a group, in their order."""
        return self._collectives.get((slot, on_host), ())

    def signatures(self, slot: int, on_host: bool) -> Sequence[tuple[str, str, int, str]]:
        return self._signatures.get((slot, on_host), ())


_Sizes = dict[int, list[tuple[int, Call]]]
"""Numbers of elements of messages, with their calls, by the peer's group rank."""


def _group_mismatches(group: Group, members: Sequence[Member], calls: Sequence[_CallsByGroup]) -> Iterator[str]:
    for on_host in (False, True):
        sequences = [calls[member.program].signatures(member.slot, on_host) for member in members]
        if any(sequence != sequences[0] for sequence in sequences[1:]):
            collectives = [calls[member.program].collectives(member.slot, on_host) for member in members]
            yield _first_difference(group, members, collectives)
            continue
        yield from _unequal_exchanges(group, members, calls, on_host)
        for is_batch in (False, True):
            yield from _unequal_messages(group, members, calls, (on_host, is_batch))


def _first_difference(group: Group, members: Sequence[Member], collectives: Sequence[Sequence[Call]]) -> str:
    """Return a sentence about the first call that differs. The ranks with the rarer call are named."""
    place = next(
        place
        for place in range(max(map(len, collectives)))
        if len({calls[place].signature if place < len(calls) else None for calls in collectives}) > 1
    )
    signatures = [calls[place].signature if place < len(calls) else None for calls in collectives]
    [(usual, _), *_] = Counter(signatures).most_common(1)
    texts: dict[str, list[int]] = {}
    for member, calls, signature in zip(members, collectives, signatures, strict=True):
        if signature != usual:
            text = str(calls[place]) if place < len(calls) else f"no call after {len(calls)}"
            texts.setdefault(text, []).append(member.rank)
    usual_calls = next(calls for calls, signature in zip(collectives, signatures, strict=True) if signature == usual)
    expected = str(usual_calls[place]) if place < len(usual_calls) else f"no call after {len(usual_calls)}"
    deviating = "; ".join(f"{_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} {t}" for t, ranks in texts.items())
    return f"{group}: collective {place} differs: {deviating}; the others have {expected}"


def _unequal_exchanges(
    group: Group, members: Sequence[Member], calls: Sequence[_CallsByGroup], on_host: bool
) -> Iterator[str]:
    """Yield a sentence for the first exchange of all with all in which a pair sends and receives unequal sizes."""
    collectives = [calls[member.program].collectives(member.slot, on_host) for member in members]
    for place, member_calls in enumerate(zip(*collectives, strict=True)):
        exchanged = {call.sends for call in member_calls} | {call.receives for call in member_calls}
        if exchanged == {()} or (len(exchanged) == 1 and not member_calls[0].names_peers):
            continue
        size = len(members)
        sent = {(a, b): n for a, call in enumerate(member_calls) for b, n in _expand(call.sends, a, size)}
        received = {(a, b): n for b, call in enumerate(member_calls) for a, n in _expand(call.receives, b, size)}
        if sent == received:
            continue
        a, b = next(pair for pair in sorted(sent | received) if sent.get(pair, 0) != received.get(pair, 0))
        yield (
            f"{group}: collective {place}, {member_calls[a].operation}: rank {members[a].rank} sends "
            f"{sent.get((a, b), 0)} "
            f"elements to rank {members[b].rank}, which receives {received.get((a, b), 0)}, at {member_calls[a].place}"
        )
        return


def _expand(parts: Sequence[tuple[int, int]], rank: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield each peer and its number of elements, without those of no elements."""
    for peer, numel in parts:
        if numel:
            yield from ((peer, numel),) if peer != EVERY_OTHER else ((p, numel) for p in range(size) if p != rank)


def _unequal_messages(
    group: Group, members: Sequence[Member], calls: Sequence[_CallsByGroup], kind: tuple[bool, bool]
) -> Iterator[str]:
    """Yield a sentence for each pair of ranks whose messages do not meet receives of the same size and type."""
    nothing: tuple[_Sizes, _Sizes] = {}, {}
    sides = [calls[member.program].messages.get((member.slot, *kind), nothing) for member in members]
    pairs = {(a, b) for a, (sent, _) in enumerate(sides) for b in sent}
    pairs |= {(a, b) for b, (_, received) in enumerate(sides) for a in received}
    for a, b in sorted(pairs):
        sent, received = sides[a][0].get(b, []), sides[b][1].get(a, [])
        if [(numel, call.dtype) for numel, call in sent] == [(numel, call.dtype) for numel, call in received]:
            continue
        for place in range(max(len(sent), len(received))):
            sent_part = _message(sent, place)
            received_part = _message(received, place)
            if sent_part[:2] != received_part[:2]:
                yield (
                    f"{group}: message {place} from rank {members[a].rank} to rank {members[b].rank}: sent "
                    f"{sent_part[0]} "
                    f"{sent_part[1]}{sent_part[2]}, received {received_part[0]} {received_part[1]}{received_part[2]}"
                )
                break


def _message(messages: Sequence[tuple[int, Call]], place: int) -> tuple[int | str, str, str]:
    """Return the size of a message, its type and its place in the source."""
    if place >= len(messages):
        return "nothing", f"after {len(messages)} messages", ""
    numel, call = messages[place]
    return numel, call.dtype, f" at {call.place}" if call.place else ""


def _ranks(ranks: Sequence[int]) -> str:
    numbers = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"
