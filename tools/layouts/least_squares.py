"""Damped least squares (Levenberg-Marquardt) of few unknowns, with slopes by finite differences."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]


def minimise(residuals: Callable[[Numbers], Numbers], start: Numbers) -> Numbers:
    """Return the values with the least sum of squared residuals, near `start` [values].

    `residuals` takes values [values] and returns at least as many residuals [residuals].
    """
    values, damping = start, 1e-2
    best = residuals(values)
    for _ in range(40):
        step = 1e-4
        slopes = np.array([(residuals(values + step * unit) - best) / step for unit in np.eye(len(values))]).T
        normal = slopes.T @ slopes
        move = -np.linalg.solve(normal + damping * np.eye(len(values)), slopes.T @ best)
        tried = residuals(values + move)
        if tried @ tried < best @ best:
            is_done = best @ best - tried @ tried < 1e-6 * (best @ best)
            values, best, damping = values + move, tried, damping / 3
            if is_done:
                break
        else:
            damping *= 5
    return values
