"""Reports of ranks about the outputs of a model's modules. Imports no torch, because the driver reads them too."""

from __future__ import annotations

from typing import NamedTuple


class Place(NamedTuple):
    """Place of an output in a pass. Places sort in the order in which the whole model computes a micro-batch.

    `row` is the number of the micro-batch on this replica. `chunk` is the number of the model chunk over all pipeline
    stages. `call` counts this chunk's outputs for this micro-batch.
    """

    row: int
    chunk: int
    call: int


class Output(NamedTuple):
    """A module's output: its place, the module's name (layers numbered over the whole model), and the output's
    number.
    """

    place: Place
    name: str
    number: int


class CanaryReport(NamedTuple):
    """Checksums of one rank's outputs of the canary batch, a fixed batch computed twice.

    `seconds` is the time of both passes.
    """

    outputs: list[Output]
    repeated: list[int]
    seconds: float


class NotFinite(NamedTuple):
    """The first tensor with NaN or infinity: kind, name, layer from 0 (None: outside of layers), ranks.

    `kind` is weight, output (of a module), loss or gradient. `none`: a repeated pass was finite.
    """

    kind: str
    name: str
    layer: int | None
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        if self.kind == "none":
            return "a second pass over the same rows was finite, so the fault does not repeat: suspect the hardware"
        ranks = f"rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}"
        return f"the first tensor that is not finite is the {self.kind} {self.name} on trainer {ranks}"
