"""Names of a checkpoint's tensors, split into template, layer and expert number."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from operator import attrgetter
from typing import NamedTuple


class TensorName(NamedTuple):
    """Name of a checkpoint's tensor. Without a layer in the name, `layer` is -1; without an expert, `expert` is 0."""

    template: str
    layer: int = -1
    expert: int = 0

    @property
    def name(self) -> str:
        return self.template.format(layer=self.layer, expert=self.expert)


@cache
def parse_name(name: str) -> TensorName:
    """Split a name. The first number after `layers.` is the layer, the first after `experts.` is the expert."""
    layer, expert = re.search(r"\blayers\.(\d+)", name), re.search(r"\bexperts\.(\d+)", name)
    template = name
    # From the right: replacing the layer first would shift the expert's position.
    for match, field in ((expert, "{expert}"), (layer, "{layer}")):
        if match:
            template = template[: match.start(1)] + field + template[match.end(1) :]
    return TensorName(template, int(layer[1]) if layer else -1, int(expert[1]) if expert else 0)


def in_order(tensors: Iterable[TensorName]) -> tuple[TensorName, ...]:
    """Return tensors sorted by layer, template and expert: the order of reshard plans."""
    return tuple(sorted(tensors, key=attrgetter("layer", "template", "expert")))
