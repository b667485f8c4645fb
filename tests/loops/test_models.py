"""Which models share prefixes, and why others do not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.cluster.shared_prefixes import SharedPrefixes
from megarl.config import Recipe
from megarl.loops.models import make_rank_models, sharing_notices
from megarl.planner.sizes import parallel_of


@pytest.mark.parametrize(
    ("model", "fields", "reason"),
    [
        pytest.param({}, {}, None, id="dense"),
        pytest.param({"family": "gpt_oss"}, {}, None, id="windows and sinks"),
        pytest.param({}, {"lora": {"rank": 4}}, None, id="adapters"),
        pytest.param({"family": "qwen3_next"}, {}, "linear attention", id="delta-net"),
        pytest.param({"family": "deepseek_v3", "num_kv_heads": 4}, {}, None, id="latent"),
        pytest.param({}, {"lora": {"rank": 4, "dropout": 0.1}}, "lora.dropout = 0.1", id="dropout"),
        pytest.param({}, {"trainer": {"cp": 2}, "cluster": {"ranks_per_node": 2}}, None, id="cp"),
        pytest.param(
            {"family": "glm4_moe", "num_mtp_layers": 1},
            {"trainer": {"mtp_loss_coefficient": 0.1}},
            "trainer.mtp_loss_coefficient",
            id="further predictions",
        ),
        pytest.param({"family": "qwen3_moe"}, {"trainer": {"router_replay": True}}, None, id="replay"),
        pytest.param(
            {}, {"trainer": {"megatron": {"hidden_dropout": 0.1}}}, "trainer.megatron.hidden_dropout = 0.1", id="noise"
        ),
    ],
)
def test_a_model_shares_prefixes_unless_a_reason_is_named(
    tiny_model: Callable[..., Path], model: dict[str, Any], fields: dict[str, Any], reason: str | None
) -> None:
    trainer = {"share_prefixes": "auto"} | fields.get("trainer", {})
    recipe = Recipe.model_validate(
        {"name": "r", "loop": "rl", "data": {"train": "t"}, "algorithm": {"kl_coefficient": 0.1}}
        | fields
        | {"model": {"path": str(tiny_model(**model))}, "trainer": trainer}
    )
    ranks: Any = None
    models = make_rank_models(recipe, parallel_of(recipe), ranks)
    packings = {name: made.packing for name, made in models.items()}
    assert all(isinstance(packing, SharedPrefixes) for packing in packings.values())
    found, notices = packings["policy"].problem, sharing_notices(models)
    if reason is None:
        assert found is None and notices == []
    else:
        assert found is not None and reason in found
        assert len(notices) == 1 and "policy" in notices[0] and reason in notices[0]
    # Noise is in training only.
    is_of_shape = reason is None or "attention" in reason
    assert packings["reference"].problem == (found if is_of_shape else None)
    assert (
        sharing_notices(
            make_rank_models(
                recipe.model_copy(update={"trainer": recipe.trainer.model_copy(update={"share_prefixes": "off"})}),
                parallel_of(recipe),
                ranks,
            )
        )
        == []
    )
