"""Newton-Schulz iterations and Muon's rule, against loops in float64 and torch's own Muon."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megarl.algorithms.muon import (
    COEFFICIENTS,
    SCALES,
    add_gradient,
    apply_update,
    newton_schulz,
    newton_schulz_flops,
    orthogonal_update,
)

SHAPES = [(6, 6), (5, 12), (12, 5), (1, 7), (7, 1), (33, 17)]


def by_singular_values(matrix: np.ndarray, coefficients: str) -> np.ndarray:
    """The definition: each polynomial is applied to the singular values; the singular vectors stay."""
    u, singular, v = np.linalg.svd(matrix.astype(np.float64), full_matrices=False)
    singular = singular / max(math.sqrt((singular**2).sum()), 1e-7)
    for a, b, c in COEFFICIENTS[coefficients]:
        singular = a * singular + b * singular**3 + c * singular**5
    return (u * singular) @ v


@pytest.mark.parametrize("coefficients", list(COEFFICIENTS))
def test_singular_values_go_through_the_polynomials(coefficients: str) -> None:
    random = np.random.default_rng(3)
    for number in range(50):
        rows, columns = SHAPES[number % len(SHAPES)]
        matrix = random.normal(size=(rows, columns)) * 10.0 ** random.uniform(-6, 4)
        expected = by_singular_values(matrix, coefficients)
        exact = newton_schulz(torch.from_numpy(matrix), coefficients, torch.float64).numpy()
        assert np.abs(exact - expected).max() < 1e-9
        single = newton_schulz(torch.from_numpy(matrix).float(), coefficients, torch.float32).numpy()
        assert np.abs(single - by_singular_values(matrix.astype(np.float32), coefficients)).max() < 1e-4
        rounded = newton_schulz(torch.from_numpy(matrix).float(), coefficients, torch.bfloat16)
        assert rounded.dtype == torch.float32 and np.abs(rounded.numpy() - expected).max() < 0.15


def test_most_singular_values_become_about_one() -> None:
    matrix = torch.from_numpy(np.random.default_rng(0).normal(size=(24, 64)))
    for name, spread in {"quintic": 0.35, "simple": 0.35, "polar_express": 0.35, "deepseek_v4": 1e-3}.items():
        singular = torch.linalg.svdvals(newton_schulz(matrix, name, torch.float64))
        assert (singular - 1).abs().max() < spread, name


def test_a_matrix_of_zeros_stays_zero() -> None:
    assert not newton_schulz(torch.zeros(3, 4), "quintic", torch.float32).any()


def test_permuted_rows_give_permuted_rows() -> None:
    """So a tensor-parallel rank's rows need no reordering within a matrix."""
    matrix, order = torch.randn(12, 20, dtype=torch.float64), torch.randperm(12)
    found = newton_schulz(matrix[order], "quintic", torch.float64)
    assert torch.allclose(found, newton_schulz(matrix, "quintic", torch.float64)[order], atol=1e-13)


def test_scales_by_shape() -> None:
    assert [SCALES[name](8, 2) for name in ("spectral", "shape", "unit_rms")] == [math.sqrt(8), 2.0, 2.0]
    assert [SCALES[name](2, 8) for name in ("spectral", "shape", "unit_rms")] == [math.sqrt(8), 1.0, 0.5]
    update = orthogonal_update(torch.randn(16, 64), "deepseek_v4", "spectral", 0.2, torch.float32)
    assert float(update.square().mean().sqrt()) == pytest.approx(0.2, rel=1e-3)


def test_the_work_is_that_of_three_products() -> None:
    assert newton_schulz_flops(4, 3, "quintic") == 5 * 2 * (3 * 3 * 4 + 3 * 3 * 3 + 3 * 3 * 4)
    assert newton_schulz_flops(3, 4, "deepseek_v4") == 2 * newton_schulz_flops(4, 3, "quintic")


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_steps_are_those_of_torch(nesterov: bool, shape: tuple[int, int]) -> None:
    """torch multiplies in bfloat16, and clamps the norm of the bfloat16 matrix. The updates differ by its rounding."""
    torch.manual_seed(1)
    weight = torch.nn.Parameter(torch.randn(shape))
    mine, momentum = weight.detach().clone(), torch.zeros(shape)
    theirs = torch.optim.Muon([weight], lr=0.1, weight_decay=0.1, momentum=0.9, nesterov=nesterov)
    for _ in range(3):
        weight.grad = torch.randn(shape)
        gradient, before = weight.grad.clone(), weight.detach().clone()
        theirs.step()
        add_gradient(momentum, gradient, 0.9, nesterov=nesterov)
        apply_update(mine, orthogonal_update(gradient, "simple", "shape", 1.0, torch.bfloat16), 0.1, 0.1)
        assert (mine - weight).norm() < 0.05 * (weight - before).norm()


def test_a_step_is_the_definition_in_float64() -> None:
    random = np.random.default_rng(8)
    weight, momentum = random.normal(size=(9, 14)), np.zeros((9, 14))
    mine, buffer = torch.from_numpy(weight.copy()), torch.zeros(9, 14, dtype=torch.float64)
    for step in range(4):
        gradient = random.normal(size=weight.shape)
        momentum = 0.95 * momentum + 0.05 * gradient
        update = 0.2 * math.sqrt(14) * by_singular_values(momentum, "quintic")
        weight = (1 - 0.3 * 0.1) * weight - 0.3 * update
        matrix = torch.from_numpy(gradient)
        add_gradient(buffer, matrix, 0.95, nesterov=False)
        assert np.abs(buffer.numpy() - momentum).max() < 1e-12, step
        apply_update(mine, orthogonal_update(matrix, "quintic", "spectral", 0.2, torch.float64), 0.3, 0.1)
        assert np.abs(mine.numpy() - weight).max() < 1e-9, step
