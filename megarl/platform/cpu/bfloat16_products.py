"""Products of bfloat16 matrices on CPUs without AVX-512, where torch's own are slow.

There torch 2.11 has no oneDNN kernel for bfloat16. Its fallback is fast if the first matrix is column-major. It is 20
times slower for two row-major matrices, as in the gradient of a linear layer's input.
"""

from __future__ import annotations

import warnings

import torch

_library: list[torch.library.Library] = []
"""Replacements of torch's operators, in effect as long as this object exists."""


def install() -> None:
    """Replace torch's products on the CPU by faster ones. Does nothing if the CPU has bfloat16 kernels."""
    if _library or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return
    _library.append(torch.library.Library("aten", "IMPL"))
    with warnings.catch_warnings():
        # Ignore torch's warning about the replaced kernel.
        warnings.filterwarnings("ignore", r"(?s).*Overriding a previously registered kernel", UserWarning)
        _library[0].impl("mm", product, "CPU", allow_override=True)
        _library[0].impl("bmm", batched_product, "CPU", allow_override=True)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    # The variant with `out` has its own kernel, which is not replaced. So this call does not recurse.
    return torch.mm(_fast_layout(a, b), b, out=a.new_empty(a.shape[0], b.shape[1]))


def batched_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.bmm(_fast_layout(a, b), b, out=a.new_empty(a.shape[0], a.shape[1], b.shape[2]))


def _fast_layout(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return `a` in the faster memory layout: column-major if `b` is row-major."""
    if a.dtype != torch.bfloat16 or b.stride(-1) != 1:
        return a
    return a.mT.contiguous().mT
