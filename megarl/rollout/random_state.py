"""The engine and the trainer share a process but not their random numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from megarl.platform import device


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Leave the generators of Python, NumPy, torch and this rank's GPU as they were: vLLM reseeds and uses them."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    here = device.current()
    with torch.random.fork_rng(devices=[here] if here.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
