"""Recipes are refused if their engine takes only whole tensors and a field needs weights written in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.reshard.live import GatheredReshard
from megarl.types import ConfigError
from megarl.worker.reshard import planning
from megarl.worker.reshard.planning import ReshardEnds, plan_reshard

DRAFTS = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The only rank of a world, and no engine that is written in place."""
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    monkeypatch.setattr(planning, "gather_values", lambda value, group: [value])
    monkeypatch.setattr(planning, "record_engine_layout", lambda *_: (None, "rank 0: a layer converts its weights"))
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("rollout", "overlaps", "is_separate", "field"),
    [
        pytest.param({"vllm": DRAFTS}, False, False, "rollout.vllm.speculative_config: ", id="drafts"),
        pytest.param({"quantization": "fp8"}, False, False, "rollout.quantization = fp8: ", id="quantised"),
        pytest.param({"recompute_kv": False}, False, False, "rollout.recompute_kv = false: ", id="kept cache"),
        pytest.param({}, True, True, "weights.overlap = true: ", id="overlap"),
        pytest.param({}, True, False, None, id="overlap, shared ranks"),
        pytest.param({}, False, True, None, id="separate"),
    ],
)
def test_what_needs_an_engine_written_in_place_is_refused(
    tiny_model: Callable[..., Path], rollout: dict[str, Any], overlaps: bool, is_separate: bool, field: str | None
) -> None:
    model = {"path": str(tiny_model()), "dtype": "float32"}
    recipe = Recipe.model_validate({"name": "r", "loop": "rl", "model": model, "data": {"train": "t"}})
    # Without validation: a recipe is refused earlier where an engine's name alone shows that it converts.
    recipe = recipe.model_copy(
        update={
            "rollout": recipe.rollout.model_copy(update=rollout),
            "weights": recipe.weights.model_copy(update={"overlap": overlaps}),
        }
    )
    ends = ReshardEnds(
        recipe=recipe,
        parallel=ParallelConfig(1, 1, 1, 1),
        topology=[("here",)],
        transformer_engine=False,
        group=dist.group.WORLD if is_separate else None,
    )
    if field is None:
        plan = plan_reshard(ends, None)
        assert isinstance(plan.live_reshard, GatheredReshard) and "a layer converts its weights" in plan.notices[0]
        return
    with pytest.raises(ConfigError) as caught:
        plan_reshard(ends, None)
    assert str(caught.value).startswith(field) and "rank 0: a layer converts its weights" in str(caught.value)
