"""Protection of a rank's random generators against vLLM."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from megarl.platform import device


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Restore the random generators of Python, NumPy, torch and this rank's GPU at the end of this context.

    Inside it, vLLM may reseed them and draw from them.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()
    current = device.current()
    with torch.random.fork_rng(devices=[current] if current.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
