"""Ranks of this machine that hold vLLM engines and nothing else."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from megarl.cluster.local import LocalGroup

CONTEXT_TOKENS = 256


class Engines:
    """The worker of a rank: an engine with a model folder's weights. `log` has all requests it was given."""

    def __init__(self, rank: int, world_size: int, model_path: str) -> None:
        from safetensors.torch import load_file

        from megarl.config import RolloutConfig
        from megarl.engine.engine import RolloutEngine
        from megarl.platform import device

        device.init_world(600.0)
        config = RolloutConfig(tp=1, kv_cache_gib=0.05, max_concurrent_requests=32)
        self.engine = RolloutEngine(model_path, config, max_model_len=CONTEXT_TOKENS, dtype="float32", seed=3)
        self.engine.model.load_weights(load_file(f"{model_path}/model.safetensors").items())
        self.log: list[tuple[str, list[int], int]] = []

    def advance(self, work: Any, budget_seconds: float, leave_after: int) -> list[Any]:
        self.log += [(r.request_id, r.prompt_token_ids.tolist(), r.seed) for r in work[0]]
        return self.engine.advance(*work, budget_seconds, leave_after=leave_after)

    def unfinished(self) -> int:
        return len(self.engine._running)

    def seen(self) -> list[tuple[str, list[int], int]]:
        log, self.log = self.log, []
        return log

    def close(self) -> None:
        import torch.distributed as dist

        self.engine.close()
        dist.destroy_process_group()


@contextlib.asynccontextmanager
async def engines(model_path: str, world_size: int) -> AsyncIterator[LocalGroup]:
    """So many ranks, each an engine of its own."""
    with tempfile.TemporaryDirectory() as folder:
        group = await LocalGroup(world_size).start(
            "tests.rollout.engines:Engines",
            {"model_path": model_path},
            log_folder=Path(folder),
            environment={"OMP_NUM_THREADS": "1"},
        )
        try:
            yield group
        finally:
            await group.close()
