"""Several adapters in one engine: requests of different ones share its steps, and each has what it has alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.types import Completion, Request, SamplingSettings
from tests.distributed.test_adapter_reshard import ONE, UNTIED, adapted
from tests.distributed.test_reshard import MODELS
from tests.distributed.weight_updates import update
from tests.rank_pool import RankPool

pytestmark = pytest.mark.distributed

# Several blocks of vLLM's cache, so that equal prompts could share them.
PROMPT = np.random.default_rng(6).integers(0, 400, 40).astype(np.int32)
SAMPLING = SamplingSettings(max_new_tokens=12, temperature=1.0, top_p=1.0, top_k=0)


def sample_adapters(recipe: Recipe, parallel: ParallelConfig) -> dict[str, Any]:
    """What an engine with two slots samples from three adapters, alone and together; of the first rank."""
    import torch.distributed as dist

    from megarl.service.ranks.rank_worker import ServiceWorker

    world_size = parallel.world_size
    worker = ServiceWorker(dist.get_rank(), world_size, recipe, parallel, [("here",)] * world_size, num_slots=2)
    engine = worker.engine
    assert engine is not None
    numbers = iter(range(1000))
    steps: list[int] = []
    if engine.is_leader:
        core: Any = engine._requests.engine.engine_core
        schedule = core.engine_core.scheduler.schedule

        def noted(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            requests = core.engine_core.scheduler.requests
            steps.append(len({requests[name].lora_request.lora_name for name in output.num_scheduled_tokens}))
            return output

        core.engine_core.scheduler.schedule = noted

    def requests(*names: str | None) -> list[Request]:
        return [Request(str(next(numbers)), PROMPT, SAMPLING, 3, adapter=name) for name in names]

    def sample(*names: str | None) -> list[Completion]:
        asked = requests(*names) if engine.is_leader else []
        done = {completion.request_id: completion for completion in engine.advance(asked, [], 600.0)}
        return [done[request.request_id] for request in asked]

    def install(name: str | None, index: int) -> None:
        worker.reshard(True, worker.weight_version + 1)
        worker.install_adapter(name, index)

    install(None, 0)
    alone = {None: sample(None)}
    update(worker, parallel)
    install("u", 1)
    alone["u"] = sample("u")
    together = sample(None, "u", None, "u")
    # A request of `u` is unfinished while another adapter takes the place of the base model's.
    started = requests("u") if engine.is_leader else []
    completions = engine.advance(started, [], 0.0)
    update(worker, parallel)
    install("v", 0)
    completions += engine.advance([], [], 600.0)
    alone["v"] = sample("v")
    again = sample("u", "v")
    worker.close()
    return {"alone": alone, "together": together, "interrupted": completions, "again": again, "steps": steps}


def equal(one: Completion, other: Completion) -> bool:
    return bool((one.token_ids == other.token_ids).all()) and np.allclose(
        one.rollout_logprobs, other.rollout_logprobs, atol=1e-5
    )


@pytest.mark.parametrize(
    "parallel",
    [pytest.param(ONE, id="one rank"), pytest.param(ParallelConfig(tp=2, pp=1, dp=1, rollout_tp=2), id="tp2")],
)
def test_adapters_share_the_steps_of_an_engine(
    parallel: ParallelConfig, ranks: RankPool, tiny_model: Callable[..., Path]
) -> None:
    recipe = adapted(tiny_model(num_layers=2, **MODELS[UNTIED]), parallel, "adapter")
    first, *_ = ranks.run(sample_adapters, recipe, parallel, world_size=parallel.world_size)
    [base], [u], [v] = first["alone"][None], first["alone"]["u"], first["alone"]["v"]
    assert not equal(base, u) and not equal(u, v), "the adapters sample alike"
    assert [equal(one, other) for one, other in zip(first["together"], (base, u, base, u), strict=True)] == [True] * 4
    assert max(first["steps"]) == 2, "no step had requests of two adapters"
    [interrupted] = first["interrupted"]
    assert equal(interrupted, u)
    assert [equal(one, other) for one, other in zip(first["again"], (u, v), strict=True)] == [True, True]
    # The cache has the prompt for each adapter, and only from this adapter.
    assert base.num_cached == u.num_cached == v.num_cached == 0
    assert all(completion.num_cached > 0 for completion in (*first["again"], *first["together"]))
