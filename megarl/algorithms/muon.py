"""Muon: momentum whose matrices are made orthogonal by Newton-Schulz iterations.

With gradient G, momentum B and weight W [rows, columns], at learning rate r and weight decay d:

    B = m B + (1 - m) G        W = (1 - r d) W - r f s(W) NS(B)

NS(B) approximates U V', where B = U S V' is the singular value decomposition. s depends on the shape of W; f is a
constant. Sources: Jordan et al. 2024, kellerjordan.github.io/posts/muon; Liu et al. 2025 (Moonlight), arXiv 2502.16982.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

Polynomial = tuple[float, float, float]
"""Coefficients (a, b, c) of one iteration: each singular value x becomes a x + b x^3 + c x^5."""

_SIMPLE = (3.4445, -4.7750, 2.0315)
COEFFICIENTS: Mapping[str, Sequence[Polynomial]] = {
    # Five different polynomials, found by You Jiacheng (2025).
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    # Jordan et al. 2024: large singular values end between 0.7 and 1.2.
    "simple": (_SIMPLE,) * 5,
    # Amsel et al. 2025, arXiv 2505.16932, algorithm 1, with the division by powers of 1.01 for bfloat16.
    "polar_express": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
    ),
    # DeepSeek-V4: eight iterations that approach 1, and two that stay there.
    "deepseek_v4": (*(_SIMPLE,) * 8, *((2.0, -1.5, 0.5),) * 2),
}
"""The polynomials of the iterations, by name."""

SCALES: Mapping[str, Callable[[int, int], float]] = {
    "spectral": lambda rows, columns: math.sqrt(max(rows, columns)),
    "shape": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "unit_rms": lambda rows, columns: math.sqrt(rows / columns),
}
"""Factor of an update by the shape [rows, columns] of its matrix, by name. rows are outputs, columns inputs.

`spectral` gives every update the root mean square 1. Source: Liu et al. 2025, section 2.2. `shape`: Jordan et al. 2024.
`unit_rms`: an input of root mean square 1 changes the output by at most 1. Source: Bernstein 2025, "Deriving Muon".
"""

_SMALLEST_NORM = 1e-7
"""Lower bound of a matrix's norm in the division. A smaller matrix ends smaller than orthogonal. A zero gradient, as of
an unused expert, stays zero.
"""


@torch.no_grad()
def newton_schulz(matrix: Tensor, coefficients: str, dtype: torch.dtype) -> Tensor:
    """Return a nearly orthogonal matrix [rows, columns] with the singular vectors of `matrix`, in its dtype.

    The iterations multiply matrices of `dtype`. First X = matrix / norm. Then each polynomial sets X = a X + (b Y + c
    Y^2) X, with Y = X X'.
    """
    # The smaller side comes first, so that Y is as small as possible.
    is_tall = matrix.shape[0] > matrix.shape[1]
    # The Frobenius norm bounds every singular value, so all begin in [0, 1], where the polynomials work.
    x = matrix / matrix.norm().clamp_min(_SMALLEST_NORM)
    x = (x.T if is_tall else x).to(dtype)
    for a, b, c in COEFFICIENTS[coefficients]:
        y = x @ x.T
        # addmm scales and adds inside the product, which saves temporary matrices.
        x = torch.addmm(x, torch.addmm(y, y, y, beta=b, alpha=c), x, beta=a)
    return (x.T if is_tall else x).to(matrix.dtype)


def newton_schulz_flops(rows: int, columns: int, coefficients: str) -> int:
    """Return the floating-point operations of `newton_schulz` on a matrix [rows, columns]."""
    small, large = sorted((rows, columns))
    # Y = X X' and the product with X take 2 small^2 large each. Y Y takes 2 small^3.
    return len(COEFFICIENTS[coefficients]) * (4 * small**2 * large + 2 * small**3)


def orthogonal_update(matrix: Tensor, coefficients: str, scale: str, factor: float, dtype: torch.dtype) -> Tensor:
    """Return f s(W) NS(B) for the momentum B, `matrix` [rows, columns]: the step at learning rate 1."""
    rows, columns = matrix.shape
    return newton_schulz(matrix, coefficients, dtype).mul_(factor * SCALES[scale](rows, columns))


@torch.no_grad()
def add_gradient(momentum: Tensor, gradient: Tensor, decay: float, *, nesterov: bool) -> None:
    """Set `momentum` [*shape] to B, and `gradient` [*shape] to the matrix to make orthogonal.

    This matrix is B, or with `nesterov` m B + (1 - m) G. Each operation rounds once. A processor may fuse two
    operations at some places in memory only, and an element's value must not depend on its place.
    """
    gradient.mul_(1 - decay)
    momentum.mul_(decay).add_(gradient)
    if nesterov:
        gradient.add_(momentum * decay)
    else:
        gradient.copy_(momentum)


@torch.no_grad()
def apply_update(weight: Tensor, update: Tensor, learning_rate: float, weight_decay: float) -> None:
    """Set `weight` [*shape] to (1 - r d) W - r `update`, and overwrite `update` [*shape]. Each operation rounds
    once.
    """
    weight.mul_(1 - learning_rate * weight_decay).sub_(update.mul_(learning_rate))
