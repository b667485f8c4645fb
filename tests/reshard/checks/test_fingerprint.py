"""Fingerprints: parts add up in any layout, each changed element is seen, and distances are estimated."""

from __future__ import annotations

import math
import random

import pytest
import torch

from megarl.reshard.checks.fingerprint import Fingerprint, checksum, fingerprint


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(7,), (6, 10), (4, 6, 5), (2, 3, 4, 5), (1, 3_000_000), (2_000_000,)])
def test_boxes_add_up_to_the_whole(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    whole = random_tensor(shape, dtype)
    expected = fingerprint(whole)
    for dim in range(len(shape)):
        for parts in (2, 3):
            total, first = Fingerprint(), 0
            for part in whole.tensor_split(parts, dim):
                start = [0] * len(shape)
                start[dim] = first
                first += part.shape[dim]
                if part.numel():
                    total += fingerprint(part, start)
            assert (total.checksum, total.numel) == (expected.checksum, expected.numel)
            assert total.squares == pytest.approx(expected.squares, rel=1e-12)
            assert total.sketch == pytest.approx(expected.sketch, rel=1e-9, abs=1e-9 * math.sqrt(expected.squares))


def test_each_flipped_bit_changes_the_checksum() -> None:
    draw = random.Random(0)
    whole = random_tensor((33, 65), torch.bfloat16)
    before = checksum(whole).item()
    bits = whole.view(torch.int16)
    for _ in range(300):
        row, column, bit = draw.randrange(33), draw.randrange(65), draw.randrange(16)
        flipped = bits[row, column].item() ^ ((1 << bit) - (1 << 16) * (bit == 15))
        kept = bits[row, column].clone()
        bits[row, column] = flipped
        assert checksum(whole).item() != before
        bits[row, column] = kept
    assert checksum(whole).item() == before


def test_the_order_of_elements_counts() -> None:
    whole = random_tensor((16, 16), torch.float32)
    for other in (whole.T.contiguous(), whole.flip(0), whole.flip(1), whole.roll(1, 0)):
        assert checksum(other).item() != checksum(whole).item()
    assert checksum(whole, (0, 16)).item() != checksum(whole).item()


def test_a_view_with_strides_has_the_fingerprint_of_its_copy() -> None:
    view = random_tensor((12, 20), torch.bfloat16).T[3:11, ::2]
    assert fingerprint(view) == fingerprint(view.contiguous())


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 0.5])
def test_a_distance_is_estimated(scale: float) -> None:
    """The error of one estimate is about a quarter; the mean over many is close."""
    ratios = []
    for seed in range(200):
        first, noise = (random_tensor((24, 40), torch.float64, 2 * seed + one) for one in range(2))
        second = first + scale * noise
        real = float((first - second).norm() / max(first.norm(), second.norm()))
        ratios.append((fingerprint(first).distance(fingerprint(second)) / real) ** 2)
        assert 0.02 < ratios[-1] < 6
    assert sum(ratios) / len(ratios) == pytest.approx(1.0, abs=0.15)


def test_a_single_changed_element_is_a_distance_and_equality_is_zero() -> None:
    first = random_tensor((24, 40), torch.float64)
    second = first.clone()
    second[3, 5] += 0.01
    assert fingerprint(first).distance(fingerprint(second)) == pytest.approx(
        0.01 / max(float(first.norm()), float(second.norm())), rel=1e-6
    )
    assert fingerprint(first).distance(fingerprint(first.clone())) == 0.0
    second[3, 5] = float("nan")
    assert math.isnan(fingerprint(first).distance(fingerprint(second)))
