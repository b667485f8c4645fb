"""Profiles of steps (`train.profile_steps`): the spans of driver and ranks, on one time axis, in a Chrome trace."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from megarl.cluster.run_ranks import RunRanks
from megarl.files.atomic import replace_text
from megarl.platform.spans import record, seconds_of_a_span
from megarl.tracking.run_folder import RunFolder
from megarl.tracking.trace import Track, chrome_trace, covered
from megarl.tracking.tracker import Tracker

_SAME_CLOCK_SECONDS = 0.1
"""Clocks that seem to differ by less may be one: machines that differ were not started within so short a time."""


@asynccontextmanager
async def profiled(ranks: RunRanks, folder: RunFolder, tracker: Tracker, number: int) -> AsyncIterator[None]:
    """Within, a step is recorded; its trace is in profiles/ afterwards, unless it failed."""
    offsets = await _begin(ranks)
    record(True)
    began = time.monotonic()
    try:
        yield
        whole = (f"step {number}", began, time.monotonic())
    finally:
        own = record(False)
    of_ranks = await ranks.call("__spans__", False)
    if len(of_ranks) != len(offsets):
        tracker.notice(f"step {number} has no profile: an engine was lost or has joined meanwhile")
        return
    tracks = [Track("driver", own)] + [
        Track(f"rank {rank} on {ranks.topology[rank][0]}", spans).moved(offset)
        for rank, ((_, spans), offset) in enumerate(zip(of_ranks, offsets, strict=True))
    ]
    share, of_ranks_alone = covered(tracks, whole), covered(tracks[1:], whole)
    facts = {
        "step": number,
        "covered": share,
        "covered_by_ranks": of_ranks_alone,
        "spans": [len(track.spans) for track in tracks],
        "seconds_of_a_span": seconds_of_a_span(),
    }
    path = folder.profiles_folder / f"step_{number:06d}.json"
    path.parent.mkdir(exist_ok=True)
    replace_text(path, json.dumps(chrome_trace(tracks, whole, facts)))
    tracker.tell(
        f"profile of step {number}: {path}, {share:.1%} of its time in spans, {of_ranks_alone:.1%} in calls of ranks; "
        "open it in ui.perfetto.dev"
    )


async def _begin(ranks: RunRanks) -> list[float]:
    """Have the ranks record. Returns by how many seconds the driver's clock is ahead of each rank's."""
    # The first answers wait for whatever the ranks are busy with; the second tell the time.
    rounds = [await _ask_clocks(ranks) for _ in range(2)]
    asked, answered, clocks = min(rounds, key=lambda told: told[1] - told[0])
    found = [(asked + answered) / 2 - clock for clock in clocks]
    return [0.0 if abs(offset) < max(_SAME_CLOCK_SECONDS, answered - asked) else offset for offset in found]


async def _ask_clocks(ranks: RunRanks) -> tuple[float, float, list[float]]:
    """When the ranks, which now record, were asked for their clocks, when the last answered, and the clocks."""
    asked = time.monotonic()
    clocks = [clock for clock, _ in await ranks.call("__spans__", True)]
    return asked, time.monotonic(), clocks
