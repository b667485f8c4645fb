"""Products of bfloat16 matrices on CPUs without kernels for them: the same values, much faster."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from megarl.platform.cpu.bfloat16_products import batched_product, install, product

HAS_KERNELS = torch.ops.mkldnn._is_mkldnn_bf16_supported()


def is_row_major(number: int) -> bool:
    return number % 2 == 0


@pytest.mark.parametrize("layout", range(4))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_are_those_of_torch(layout: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(3, 5, 7).to(dtype), torch.randn(3, 7, 4).to(dtype)
    a = a if is_row_major(layout) else a.mT.contiguous().mT
    b = b if is_row_major(layout // 2) else b.mT.contiguous().mT
    exact = a.double() @ b.double()
    torch.testing.assert_close(batched_product(a, b), exact.to(dtype))
    for index in range(3):
        torch.testing.assert_close(product(a[index], b[index]), exact[index].to(dtype))
    # The gradient of a sum has one value in all places, and strides of 0.
    torch.testing.assert_close(
        product(a[0][:, :1].expand(5, 7), b[0]), (a[0][:, :1].expand(5, 7).double() @ b[0].double()).to(dtype)
    )


@pytest.mark.skipif(HAS_KERNELS, reason="needs a CPU without AVX-512: with it, torch's own products are fast")
def test_row_major_products_are_faster() -> None:
    install()
    a, b = torch.randn(256, 1024).bfloat16(), torch.randn(1024, 256).bfloat16()
    # The operator with `out` stays torch's own.
    out = torch.empty(256, 256, dtype=torch.bfloat16)

    def seconds(function: Callable[[], object]) -> float:
        found = []
        for _ in range(3):
            started = time.process_time()
            function()
            found.append(time.process_time() - started)
        return min(found)

    assert seconds(lambda: torch.mm(a, b, out=out)) > 3 * seconds(lambda: a @ b)
    batched = torch.empty(1, 256, 256, dtype=torch.bfloat16)
    assert seconds(lambda: torch.bmm(a[None], b[None], out=batched)) > 3 * seconds(lambda: a[None] @ b[None])
