"""Modules that a driver imports before and during a small run. A fork server imports them once for many drivers."""

import aiohttp  # noqa: F401
import numpy.ma
import numpy.random  # noqa: F401
import omegaconf  # noqa: F401
import rich._emoji_codes
import rich.table  # noqa: F401
import torch.utils.tensorboard  # noqa: F401
import transformers.models.auto.tokenization_auto
import transformers.models.qwen3.configuration_qwen3  # noqa: F401
import typer._adapters  # noqa: F401

import megarl.algorithms.trial
import megarl.checkpoint.kept
import megarl.checkpoint.redundant
import megarl.checkpoint.torch_dist_reader
import megarl.cli
import megarl.loops.run
import megarl.preflight.registry
import megarl.report
import megarl.rewards.scoring.http_rewards
import megarl.tracking.trackers.tensorboard

megarl.preflight.registry.load_checks()
