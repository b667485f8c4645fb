"""Lines and sizes as text, and the error ending a command."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megarl.terminal import printable
from megarl.types import MegarlError, PeerLostError

if TYPE_CHECKING:
    from megarl.config import Recipe


def print_error(error: MegarlError) -> None:
    """Print the error ending a command. For an internal error or a lost process, stacks and logs of ranks come
    first.
    """
    from rich.text import Text

    from megarl.terminal import Terminal

    console = Terminal(stderr=True, soft_wrap=True, highlight=False)
    # Notes are stacks and logs of ranks. They do not explain the other exit codes: mistakes in a recipe or data.
    if error.exit_code in (MegarlError.exit_code, PeerLostError.exit_code):
        for note in getattr(error, "__notes__", ()):
            console.print(Text(printable(note), style="dim"))
    # The terminal may be gone, or the disk behind stderr full. The exit code must not change because of it.
    with contextlib.suppress(OSError):
        console.print(Text("error: ", style="bold red") + Text(printable(str(error))))


def print_lines(lines: Sequence[str]) -> None:
    """Print lines unchanged, without wrapping long ones."""
    from megarl.terminal import Console

    Console(soft_wrap=True, highlight=False, markup=False).print("\n".join(lines))


def size_text(num_bytes: float, sign: str = "") -> str:
    """Return a number of bytes in a suitable unit: `470.2 GB`, `81.9 KB`, `0 bytes`. `sign` "+" always shows a sign."""
    # Decimal units, as network and disk sizes are given.
    units = ("bytes", "KB", "MB", "GB", "TB")
    power = sum(abs(num_bytes) >= 1000**power for power in range(1, 5))
    return f"{num_bytes / 1000**power:{sign}.{1 if power else 0}f} {units[power]}"


def nodes_text(recipe: Recipe) -> str:
    """Return the nodes of a run and the ranks on each, in words."""
    cluster, engines = recipe.cluster, recipe.cluster.groups.engines
    trainers = f"{cluster.nodes} of {cluster.ranks_per_node} ranks"
    return trainers if engines is None else f"{trainers}, {engines.nodes} of {engines.ranks_per_node} for engines"
