"""Modules that a driver imports before and during a small run. A fork server imports them once for many drivers."""

import aiohttp  # noqa: F401
import transformers.models.auto.tokenization_auto  # noqa: F401

import megarl.checkpoint.torch_dist_reader
import megarl.cli
import megarl.loops.run
import megarl.preflight
import megarl.report  # noqa: F401
