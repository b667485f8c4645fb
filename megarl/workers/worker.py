"""One rank: the trainer's shard, the engine's shard, and the plan that copies one into the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

from megarl.config import Recipe
from megarl.model_shape import padded_vocab_size, read_model_shape
from megarl.models.policy import uses_transformer_engine
from megarl.parallel_layout import ParallelLayout
from megarl.platform import device
from megarl.rollout.engine import RolloutEngine
from megarl.tracking.metrics import Metric
from megarl.training import checkpoint
from megarl.training.engine import Row, TrainingEngine
from megarl.types import Completion, Request
from megarl.weights.families import hf_tensors
from megarl.weights.layouts import safetensors
from megarl.weights.layouts.megatron import check_against, megatron_layouts, parameter_shapes
from megarl.weights.layouts.vllm import record_layout, zero_padding
from megarl.weights.layouts.vllm_computed import VllmLayouts
from megarl.weights.ledger import disk_full_named
from megarl.weights.reshard import Reshard


class Worker:
    """What the driver calls, on all ranks at once; see each part's own description."""

    def __init__(self, rank: int, world_size: int, recipe: Recipe, layout: ParallelLayout) -> None:
        self.recipe, self.layout, self.rank = recipe, layout, rank
        device.init_world(recipe.cluster.collective_timeout_seconds)
        self.shape = read_model_shape(recipe.model.path)
        self.megatron_layouts = megatron_layouts(
            self.shape,
            layout,
            padded_vocab_size=padded_vocab_size(self.shape.vocab_size, layout.tp),
            transformer_engine=uses_transformer_engine(),
        )
        # The engine first: what it needs of memory must be free before the trainer takes its share.
        self.engine = self._build_engine() if recipe.loop == "rl" or recipe.data.validation else None
        self.trainer = TrainingEngine(recipe, layout, self.shape, self._load_weights)
        self.reshard_plan = self._plan_reshard(self.engine) if self.engine else None
        if self.engine:
            self.reshard()

    def advance(self, work: tuple[Sequence[Request], Sequence[str]], budget_seconds: float) -> list[Completion]:
        """Sample for a while: new requests and aborts in, finished completions out (leaders only)."""
        assert self.engine is not None
        return self.engine.advance(*work, budget_seconds)

    def sleep_engine(self) -> None:
        """Hand the engine's memory to the trainer until the next reshard."""
        if self.engine:
            self.engine.sleep()

    def logprobs(self, rows: Sequence[Row], of: str) -> list[list[np.ndarray]] | None:
        """Log-probs of this replica's rows; see `TrainingEngine.logprobs`."""
        return self.trainer.logprobs(rows, of=of)

    def update(self, rows: Sequence[Row]) -> dict[str, Metric]:
        """One optimizer step; see `TrainingEngine.update`."""
        return self.trainer.update(rows)

    def reshard(self) -> dict[str, float]:
        """Copy the trainer's weights into the engine's live parameters. Returns seconds and bytes by stage."""
        assert self.engine is not None and self.reshard_plan is not None
        self.engine.wake(["weights"])
        zero_padding(self.engine.model)
        report = self.reshard_plan.run()
        self.engine.wake(["kv_cache"])
        self.engine.weights_updated()
        return report

    def export(self, folder: Path) -> None:
        """Write the trainer's weights as a Hugging Face model folder."""
        parameters = self.trainer.parameters
        with disk_full_named(folder, sum(parameter.nbytes for parameter in parameters.values())):
            safetensors.export(
                folder,
                self.recipe.model.path,
                self.shape,
                self.megatron_layouts,
                self.rank,
                parameters,
                dtype=self.trainer.dtype,
                bucket_bytes=self.recipe.weights.bucket_mib << 20,
            )

    def save_checkpoint(self, folder: Path, asynchronous: bool) -> None:
        """Write the trainer's state into an empty folder; if `asynchronous`, only begin to."""
        version = self.engine.weight_version if self.engine else 0
        self._save = checkpoint.stage(folder, self.trainer, str(self.layout), weight_version=version)
        self._save.write(asynchronous=asynchronous)

    def finish_checkpoint(self, wait: bool) -> dict[str, dict[str, Any]] | None:
        """Bring the save to its end; see `training.checkpoint.Save.finish`."""
        return self._save.finish(wait=wait)

    def load_checkpoint(self, folder: Path) -> None:
        """Go on from a checkpoint that was found harmless. The engine needs a reshard then."""
        driver = checkpoint.restore(folder, self.trainer, str(self.layout))
        if self.engine:
            self.engine.weight_version = driver["weight_version"]

    def _build_engine(self) -> RolloutEngine:
        recipe = self.recipe
        longest = max(recipe.rollout.sampling.max_new_tokens, recipe.evaluation_sampling.max_new_tokens)
        return RolloutEngine(
            recipe.model.path,
            recipe.rollout,
            max_model_len=recipe.data.max_prompt_tokens + longest,
            dtype=recipe.model.dtype,
            seed=recipe.seed,
        )

    def _load_weights(self, parameters: Mapping[str, Tensor]) -> None:
        shapes = parameter_shapes(
            self.shape,
            self.layout,
            self.layout.coordinates(self.rank),
            padded_vocab_size=padded_vocab_size(self.shape.vocab_size, self.layout.tp),
            transformer_engine=uses_transformer_engine(),
        )
        check_against(shapes, parameters)
        safetensors.load(self.recipe.model.path, self.shape, self.megatron_layouts[self.rank], parameters)

    def _plan_reshard(self, engine: RolloutEngine) -> Reshard:
        tensors = {name: (shape, self.trainer.dtype) for name, shape in hf_tensors(self.shape).items()}
        live = dict(engine.model.named_parameters())
        return Reshard(
            self.megatron_layouts,
            VllmLayouts(self.shape, self.layout.rollout_tp, self.layout.world_size, self.layout.rollout_ep),
            record_layout(engine.model, tensors),
            self.trainer.parameters,
            live,
            dtype=self.trainer.dtype,
            bucket_bytes=self.recipe.weights.bucket_mib << 20,
            ranks_per_node=self.recipe.cluster.ranks_per_node,
        )

    def close(self) -> None:
        """End the engine and leave the world."""
        if self.engine:
            self.engine.close()
        dist.destroy_process_group()
