"""torch's allocator holds less unused memory with expandable segments, over steps of rows with varying lengths.

A simulation, and no measurement: no GPU takes part. The requests of an update (Qwen3-14B, tp 4, one rank) are replayed
by the rules of torch 2.13's caching allocator (c10/cuda/CUDACachingAllocator.cpp): sizes are rounded up to 512 bytes;
requests up to 1 MiB share segments of 2 MiB; those below 10 MiB share segments of 20 MiB; larger ones get their own
segments, in steps of 2 MiB; the smallest sufficient free block is taken, and split if enough remains. An expandable
segment has one address range, of which 20 MiB (small requests: 2 MiB) are mapped at a time.

Each step trains packed rows, and between steps the optimizer's states leave the GPU and the cache is emptied. There is
a row for each of four cases: with expandable segments or without, rows padded to 1,024 tokens or not. It shows the
memory that the allocator takes at most, the memory that was requested at most, and the share never used. It fails if
expandable segments leave more memory unused.
"""

from __future__ import annotations

import argparse
from bisect import bisect_left, insort
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

DURATION = {"small": "2 s (two steps of four layers)", "full": "32 s"}
SMALL = {"steps": 2, "layers": 4}

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
# Constants of torch's allocator, by its names: kMinBlockSize, kSmallSize, kSmallBuffer, kMinLargeAlloc, kLargeBuffer,
# kRoundLarge.
MIN_BLOCK, SMALL_SIZE, SMALL_BUFFER = 512, MIB, 2 * MIB
MIN_LARGE, LARGE_BUFFER, ROUND_LARGE = 10 * MIB, 20 * MIB, 2 * MIB


@dataclass(eq=False, slots=True)
class Block:
    """A part of a segment. `kind` is used, free, or unmapped: addresses of an expandable segment without memory."""

    segment: int
    start: int
    size: int
    kind: str
    requested: int = 0
    previous: Block | None = None
    next: Block | None = None


class Pool:
    """The small or the large requests of one stream. Free blocks are sorted by size, then by address."""

    def __init__(self, is_small: bool, is_expandable: bool) -> None:
        self.is_small, self.is_expandable = is_small, is_expandable
        self.free: list[tuple[int, int, int, Block]] = []
        self.first: dict[int, Block] = {}
        """First block of each segment, by the segment's number."""
        self._numbers = count()
        self.unit = SMALL_BUFFER if is_small else LARGE_BUFFER
        """Bytes mapped at a time in an expandable segment."""
        self.reserved = 0
        self.num_driver_calls = 0
        """Number of segments requested from the driver, or of ranges mapped."""
        if is_expandable:
            self.first[0] = Block(0, 0, 1 << 60, "unmapped")

    def add(self, block: Block) -> None:
        insort(self.free, (block.size, block.segment, block.start, block))

    def remove(self, block: Block) -> None:
        place = bisect_left(self.free, (block.size, block.segment, block.start))
        assert self.free[place][3] is block
        del self.free[place]

    def best_fit(self, size: int) -> Block | None:
        """Return the smallest sufficient free block. The one that can grow counts as the largest."""
        growing: Block | None = None
        for place in range(bisect_left(self.free, (size,)), len(self.free)):
            block = self.free[place][3]
            if block.next is None or block.next.kind != "unmapped":
                return block
            growing = growing or block
        return growing

    def new_segment(self, size: int) -> Block:
        self.num_driver_calls += 1
        number = next(self._numbers)
        if self.is_small:
            num_bytes = SMALL_BUFFER
        elif size < MIN_LARGE:
            num_bytes = LARGE_BUFFER
        else:
            num_bytes = round_up(size, ROUND_LARGE)
        self.reserved += num_bytes
        block = self.first[number] = Block(number, 0, num_bytes, "free")
        self.add(block)
        return block

    def grow(self, size: int) -> Block:
        """Map memory behind a free block, or in a gap, until a block of this size is free. Returns the block."""
        block: Block | None = self.first[0]
        while block is not None:
            if block.kind != "used":
                available, end = 0, block
                while available < size and end is not None and end.kind != "used":
                    available, end = available + end.size, end.next
                if available >= size:
                    return self._map(block, size)
            block = block.next
        raise AssertionError("the address range is used up")

    def _map(self, block: Block, size: int) -> Block:
        while block.kind != "free" or block.size < size:
            gap = block if block.kind == "unmapped" else block.next
            assert gap is not None and gap.kind == "unmapped"
            missing = size - (block.size if block.kind == "free" else 0)
            num_bytes = min(gap.size, round_up(gap.start + missing, self.unit) - gap.start)
            self.num_driver_calls += 1
            self.reserved += num_bytes
            if num_bytes < gap.size:
                self._cut(gap, num_bytes)
            gap.kind = "free"
            self.add(gap)
            block = self.merge(gap)
        return block

    def _cut(self, block: Block, size: int) -> Block:
        """Cut a block after `size` bytes. Returns the rest, of the same kind."""
        rest = Block(block.segment, block.start + size, block.size - size, block.kind, 0, block, block.next)
        if block.next is not None:
            block.next.previous = rest
        block.next, block.size = rest, size
        return rest

    def use(self, block: Block, size: int, requested: int) -> None:
        """Take a free block, and split it if enough remains."""
        self.remove(block)
        rest = block.size - size
        if rest >= MIN_BLOCK if self.is_small or self.is_expandable else rest > SMALL_SIZE:
            self.add(self._cut(block, size))
        block.kind, block.requested = "used", requested

    def merge(self, block: Block) -> Block:
        """Join a free block with free neighbours. Returns the joined block."""
        if block.previous is not None and block.previous.kind == "free":
            block = self._join(block.previous)
        if block.next is not None and block.next.kind == "free":
            block = self._join(block)
        return block

    def _join(self, block: Block) -> Block:
        assert block.next is not None
        self.remove(block)
        self.remove(block.next)
        _absorb_next(block)
        self.add(block)
        return block

    def empty(self) -> None:
        """Return memory to the driver: whole free segments, or whole units inside free blocks."""
        for *_, block in list(self.free):
            if self.is_expandable:
                start, end = round_up(block.start, self.unit), (block.start + block.size) // self.unit * self.unit
                if end > start:
                    self._unmap(block, start, end)
            elif block.previous is None and block.next is None:
                self.remove(block)
                del self.first[block.segment]
                self.reserved -= block.size

    def _unmap(self, block: Block, start: int, end: int) -> None:
        self.remove(block)
        if start > block.start:
            inner = self._cut(block, start - block.start)
            self.add(block)
        else:
            inner = block
        if inner.size > end - start:
            self.add(self._cut(inner, end - start))
        inner.kind = "unmapped"
        self.reserved -= end - start
        # Neighbouring gaps are one gap.
        if inner.next is not None and inner.next.kind == "unmapped":
            _absorb_next(inner)
        if inner.previous is not None and inner.previous.kind == "unmapped":
            _absorb_next(inner.previous)


def _absorb_next(block: Block) -> None:
    """Make a block as long as it and its next one together."""
    next_block = block.next
    assert next_block is not None
    block.size += next_block.size
    block.next = next_block.next
    if next_block.next is not None:
        next_block.next.previous = block


class Allocator:
    """torch's caching allocator for one stream, without a limit of memory."""

    def __init__(self, is_expandable: bool) -> None:
        self.pools = [Pool(is_small, is_expandable) for is_small in (True, False)]
        self.requested = self.most_requested = self.most_reserved = 0

    def allocate(self, requested: int) -> Block:
        size = round_up(max(requested, 1), MIN_BLOCK)
        pool = self.pools[0 if size <= SMALL_SIZE else 1]
        block = pool.best_fit(size)
        if block is None:
            block = pool.grow(size) if pool.is_expandable else pool.new_segment(size)
        pool.use(block, size, requested)
        self.requested += requested
        self.most_requested = max(self.most_requested, self.requested)
        self.most_reserved = max(self.most_reserved, self.reserved)
        return block

    def free(self, block: Block) -> None:
        size = round_up(max(block.requested, 1), MIN_BLOCK)
        pool = self.pools[0 if size <= SMALL_SIZE else 1]
        self.requested -= block.requested
        block.kind, block.requested = "free", 0
        pool.add(block)
        pool.merge(block)

    def empty_cache(self) -> None:
        for pool in self.pools:
            pool.empty()

    @property
    def reserved(self) -> int:
        return sum(pool.reserved for pool in self.pools)

    @property
    def num_driver_calls(self) -> int:
        return sum(pool.num_driver_calls for pool in self.pools)


def round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


# Sizes of Qwen3-14B on one rank of tp 4, in channels or rows, and of its head.
HIDDEN, QUERY, KEY, FEED_FORWARD, HEADS, VOCABULARY = 5120, 1280, 256, 4352, 10, 37984
TP, LAYERS = 4, 40
ROW_TOKENS, LONGEST, ROWS_PER_STEP = 24576, 16384, 8
STATES = {"weights": int(7.4e9), "gradients": int(14.8e9), "optimizer": int(22.2e9)}
"""Bytes of the trainer's states. Only the optimizer's leave the GPU between steps."""
BF16, FP32 = 2, 4
LOGITS = 1 << 30


class Rank:
    """Replays the requests of a training rank."""

    def __init__(self, allocator: Allocator, num_layers: int) -> None:
        self.allocator, self.num_layers = allocator, num_layers
        # Megatron-Core keeps weights and gradients in one buffer each, and the optimizer's states by parameter.
        self._held = [allocator.allocate(STATES[name]) for name in ("weights", "gradients")]
        self._optimizer: list[Block] = []

    def step(self, rows: list[int]) -> None:
        """Train on rows of these numbers of tokens, first without gradients for the log-probs."""
        share = STATES["optimizer"] // (7 * LAYERS)
        self._optimizer = [self.allocator.allocate(share) for _ in range(7 * LAYERS)]
        for tokens in rows:
            self._forward(tokens)
        for tokens in rows:
            saved = self._forward(tokens, saves=True)
            self._backward(tokens, saved)
        for block in self._optimizer:
            self.allocator.free(block)
        self.allocator.empty_cache()

    @contextmanager
    def _temporary(self, *sizes: int) -> Iterator[None]:
        blocks = [self.allocator.allocate(size) for size in sizes]
        yield
        for block in blocks:
            self.allocator.free(block)

    def _forward(self, tokens: int, *, saves: bool = False) -> list[list[Block]]:
        """Return the blocks saved by each layer, and last those of the head. Without gradients none are left."""
        allocate = self.allocator.allocate
        part, full = tokens // TP * HIDDEN * BF16, tokens * HIDDEN * BF16
        layers: list[list[Block]] = []
        residual = allocate(part)
        for _ in range(self.num_layers):
            saved = [residual, allocate(tokens // TP * FP32)]
            with self._temporary(part, full):
                saved.append(allocate(tokens * (QUERY + 2 * KEY) * BF16))
            saved += [allocate(tokens * QUERY * BF16), allocate(tokens * KEY * BF16)]
            saved += [allocate(tokens * QUERY * BF16), allocate(tokens * HEADS * FP32)]
            with self._temporary(full):
                projected = allocate(part)
            saved += [allocate(part), allocate(tokens // TP * FP32)]
            self.allocator.free(projected)
            with self._temporary(part, full):
                saved.append(allocate(tokens * 2 * FEED_FORWARD * BF16))
            saved.append(allocate(tokens * FEED_FORWARD * BF16))
            with self._temporary(full):
                projected = allocate(part)
            residual = allocate(part)
            self.allocator.free(projected)
            layers.append(saved)
            if not saves:
                for block in layers.pop():
                    self.allocator.free(block)
        head = [residual, allocate(part), allocate(full), allocate(tokens * 64)]
        blocks = -(-tokens * VOCABULARY * BF16 // LOGITS)
        with self._temporary(tokens * -(-VOCABULARY // blocks) * BF16, *[tokens * FP32] * (2 * blocks)):
            pass
        layers.append(head)
        if not saves:
            for block in layers.pop():
                self.allocator.free(block)
        return layers

    def _backward(self, tokens: int, layers: list[list[Block]]) -> None:
        part, full = tokens // TP * HIDDEN * BF16, tokens * HIDDEN * BF16
        blocks = -(-tokens * VOCABULARY * BF16 // LOGITS)
        with self._temporary(2 * full, VOCABULARY * HIDDEN * BF16, tokens * -(-VOCABULARY // blocks) * BF16):
            for _ in range(blocks):
                with self._temporary(full):
                    pass
        gradient = self.allocator.allocate(part)
        for block in layers.pop():
            self.allocator.free(block)
        while layers:
            saved = layers.pop()
            with (
                self._temporary(full, tokens * FEED_FORWARD * BF16),
                self._temporary(tokens * 2 * FEED_FORWARD * BF16),
                self._temporary(part, full, full),
            ):
                between = self.allocator.allocate(part)
            for block in saved[8:]:
                self.allocator.free(block)
            self.allocator.free(gradient)
            with (
                self._temporary(full, tokens * QUERY * BF16),
                self._temporary(*[tokens * (QUERY + 2 * KEY) * BF16] * 2),
                self._temporary(part, full, full),
            ):
                gradient = self.allocator.allocate(part)
            self.allocator.free(between)
            for block in saved[:8]:
                self.allocator.free(block)
        self.allocator.free(gradient)


def rows_of(steps: int) -> Iterator[list[int]]:
    """Yield the tokens of each step's rows: sequences of log-normal lengths, in turn into the first row with space."""
    random = np.random.default_rng(0)
    for _ in range(steps):
        rows: list[int] = []
        while sum(rows) < ROWS_PER_STEP * ROW_TOKENS * 0.9:
            length = int(np.clip(random.lognormal(np.log(3000), 0.9), 64, LONGEST)) // TP * TP
            place = next((index for index, row in enumerate(rows) if row + length <= ROW_TOKENS), None)
            if place is None:
                rows.append(length)
            else:
                rows[place] += length
        yield rows


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--layers", type=int, default=LAYERS, help="layers of the model")


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    unused: dict[str, float] = {}
    for padding in (1, 1024):
        for kind in ("ordinary", "expandable"):
            allocator = Allocator(kind == "expandable")
            rank = Rank(allocator, options.layers)
            tokens = padded = calls = 0
            for rows in rows_of(options.steps):
                widened = [round_up(row, padding) for row in rows]
                tokens, padded = tokens + sum(rows), padded + sum(widened)
                rank.step(widened)
                # The first step warms up.
                calls = calls or allocator.num_driver_calls
            states = sum(STATES.values())
            share = 1 - allocator.most_requested / allocator.most_reserved
            unused[kind] = share
            line = {
                "segments": kind,
                "rows padded to": padding,
                "taken GiB": allocator.most_reserved / GIB,
                "requested GiB": allocator.most_requested / GIB,
                "unused": share,
                "of activations": (allocator.most_reserved - allocator.most_requested)
                / (allocator.most_requested - states),
                "more tokens": padded / tokens - 1,
                "driver calls a step": (allocator.num_driver_calls - calls) / max(1, options.steps - 1),
            }
            if kind == "expandable":
                line["met"] = unused["expandable"] <= unused["ordinary"]
            yield line
