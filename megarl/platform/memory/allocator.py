"""Setting of torch's GPU allocator."""

from __future__ import annotations

import os

from megarl.platform import device

_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Environment variables with the allocator's settings. The first is torch's name since 2.9."""


def use_expandable_segments() -> bool:
    """Let torch's allocator grow and shrink new segments (expandable_segments).

    Returns whether it does. Rows of varying lengths then leave little memory unused. Call it after an engine is built:
    vLLM's custom all-reduce and its memory pool for sleeping need the ordinary allocator.
    """
    if device.current().type != "cuda" or any("expandable_segments" in os.environ.get(name, "") for name in _VARIABLES):
        return False
    import torch

    # torch 2.13 has no public function for this. The deprecated torch.cuda.memory._set_allocator_settings calls this
    # function.
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    return True
