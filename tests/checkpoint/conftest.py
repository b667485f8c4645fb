"""Megatron-Core is imported by these tests, after the patches that it needs on a CPU."""

import megarl.models  # noqa: F401
