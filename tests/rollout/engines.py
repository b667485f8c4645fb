"""Ranks of this machine that hold vLLM engines and nothing else."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.groups import world
from megarl.platform import device
from megarl.types import ExpertsHandle
from tools.local_group import LocalGroup

CONTEXT_TOKENS = 256


class Engines:
    """The worker of a rank: an engine with a model folder's weights. `log` has all requests it was given.

    With a `top_k` completions come with the tokens that it kept, where a request has one. `recompute_kv` as in recipes.
    It runs `slots` requests at once.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        model_path: str,
        top_k: int | None = None,
        recompute_kv: bool = True,
        slots: int = 32,
    ) -> None:
        from safetensors.torch import load_file

        from megarl.config import RolloutConfig, SamplingConfig
        from megarl.engine.engine import RolloutEngine
        from megarl.engine.parts.choice import EngineFeatures

        world.initialize(600.0)
        has_experts = "num_experts" in Path(model_path, "config.json").read_text()
        vllm = {"enable_return_routed_experts": True} if has_experts else {}
        sampling = SamplingConfig(top_k=top_k) if top_k else SamplingConfig()
        config = RolloutConfig(
            tp=1,
            kv_cache_gib=0.05,
            max_concurrent_requests=slots,
            vllm=vllm,
            sampling=sampling,
            recompute_kv=recompute_kv,
        )
        self._experts: list[NDArray[np.integer]] = []
        self.engine = RolloutEngine(
            model_path,
            config,
            max_model_len=CONTEXT_TOKENS,
            dtype="float32",
            seed=3,
            features=EngineFeatures(store_experts=self._keep_experts),
        )
        self._weights = load_file(f"{model_path}/model.safetensors")
        self.engine.model.load_weights(self._weights.items())
        self.log: list[tuple[str, list[int], int]] = []

    def _keep_experts(self, experts: NDArray[np.integer]) -> ExpertsHandle:
        self._experts.append(experts)
        return ExpertsHandle(0, len(self._experts) - 1)

    def experts(self, number: int) -> NDArray[np.integer]:
        return self._experts[number]

    def update(self, scale: float) -> None:
        """Other weights, the folder's times `scale` but for the norms, as after a reshard."""
        weights = {name: w if w.dim() == 1 else w * scale for name, w in self._weights.items()}
        self.engine.model.load_weights(weights.items())
        self.engine.weights_updated()

    def logprobs(self, token_ids: list[int]) -> NDArray[np.float32] | None:
        return self.engine.prompt_logprobs(np.array(token_ids, np.int64))

    def advance(self, work: Any, budget_seconds: float, leave_after: int) -> list[Any]:
        self.log += [(r.request_id, r.prompt_token_ids.tolist(), r.seed) for r in work[0]]
        return self.engine.advance(*work, budget_seconds, leave_after=leave_after)

    def sampled_so_far(self, _: None) -> dict[str, int]:
        return self.engine.sampled_so_far()

    def unfinished(self) -> int:
        return len(self.engine.sampled_so_far())

    def seen(self) -> list[tuple[str, list[int], int]]:
        log, self.log = self.log, []
        return log

    def close(self) -> None:
        import torch.distributed as dist

        self.engine.close()
        dist.destroy_process_group()


@contextlib.asynccontextmanager
async def engines(model_path: str, world_size: int, **settings: Any) -> AsyncIterator[LocalGroup]:
    """So many ranks, each an engine of its own, with the settings of `Engines`."""
    with tempfile.TemporaryDirectory() as folder:
        group = await LocalGroup(world_size, imports=device.forkable_imports("megarl.worker.colocated")).start(
            "tests.rollout.engines:Engines",
            {"model_path": model_path, **settings},
            log_folder=Path(folder),
            environment={**device.rank_environment(world_size), "OMP_NUM_THREADS": "1"},
        )
        try:
            yield group
        finally:
            await group.close()
