"""An engine with `lora.sync: adapter` keeps its base weights; its slots are what vLLM makes of the exported adapter.

The oracle of the slots is vLLM's own loader of PEFT folders, that of the log-probs is an engine with merged weights.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.reshard.adapters import AdapterReshard
from tests.distributed.test_reshard import MODELS, recipe_of
from tests.distributed.weight_updates import update
from tests.rank_pool import RankPool

pytestmark = pytest.mark.distributed

PROMPT = np.random.default_rng(5).integers(0, 400, 16)
ONE = ParallelConfig(tp=1, pp=1, dp=1, rollout_tp=1)
UNTIED = "qwen3 kv equal tp, untied"


def adapted(model: Path, parallel: ParallelConfig, sync: str, **lora: Any) -> Recipe:
    recipe = recipe_of(model, parallel)
    return Recipe.model_validate(recipe.model_dump() | {"lora": {"rank": 4, "sync": sync, **lora}})


def test_base_weights_are_verified_with_the_adapter() -> None:
    base, adapter = Mock(), Mock()
    base.self_test.return_value, adapter.self_test.return_value = 1, 2
    reshard = AdapterReshard(base, lambda: adapter)
    assert reshard.self_test() == 3
    base.release.assert_called_once_with()
    reshard.verify()
    base.verify.assert_called_once_with()
    adapter.verify.assert_called_once_with()
    for base.is_computed, adapter.is_computed in product([True, False], repeat=2):
        assert reshard.is_computed == (base.is_computed and adapter.is_computed)


def logprobs(recipe: Recipe, parallel: ParallelConfig) -> tuple[Any, Any]:
    """The engine's log-probs of a prompt, before an update and after it."""
    import torch.distributed as dist

    from megarl.worker.colocated import Worker

    worker = Worker(dist.get_rank(), parallel.world_size, recipe, parallel, [("here",)] * parallel.world_size)
    assert worker.engine is not None
    before = worker.engine.prompt_logprobs(PROMPT)
    update(worker, parallel)
    worker.reshard(True, worker.weight_version + 1)
    after = worker.engine.prompt_logprobs(PROMPT)
    worker.close()
    return before, after


def train_and_load(recipe: Recipe, parallel: ParallelConfig, exported: str) -> dict[str, Any]:
    """Slots and base weights that differ from vLLM's own of the export, after an update; and the bytes of the copy."""
    import torch
    import torch.distributed as dist
    from safetensors.torch import load_file
    from vllm.lora.request import LoRARequest

    from megarl.engine.parts.trained_adapter import TrainedAdapter
    from megarl.families.lora_rules import adapter_shapes
    from megarl.families.shape import read_model_shape
    from megarl.reshard.layouts.vllm import DirectWriteError
    from megarl.reshard.layouts.vllm_adapters import VllmAdapterLayouts
    from megarl.reshard.layouts.vllm_computed import VllmLayouts
    from megarl.reshard.layouts.vllm_slots import live_parameters, without_adapters
    from megarl.worker.colocated import Worker

    worker = Worker(dist.get_rank(), parallel.world_size, recipe, parallel, [("here",)] * parallel.world_size)
    assert worker.engine and worker.rank_reshard and isinstance(worker.rank_reshard.live_reshard, AdapterReshard)
    assert worker.rank_reshard.live_reshard.is_computed, "vLLM's layout is not as computed"
    adapter = worker.engine.find_part(TrainedAdapter)
    assert adapter is not None
    slots = adapter.slots
    assert slots is not None
    addresses = {name: slot.data_ptr() for name, slot in slots.tensors.items()}
    zeros = [name for name, slot in slots.tensors.items() if not slot.any()]
    shape, lora = read_model_shape(recipe.model.folder), recipe.lora
    computed = VllmAdapterLayouts(VllmLayouts(shape, parallel.rollout_tp, parallel.world_size), lora.targets, lora.rank)
    # A matrix of a fused layer that is left out leaves a part of its slots empty.
    shapes = adapter_shapes(shape, lora.targets, lora.rank)
    matrices = {tensor.name: shapes[tensor.name] for tensor in computed.tensors}
    refused = ""
    for name in matrices:
        if ".k_proj.lora_B" in name or ".up_proj.lora_B" in name:
            try:
                slots.record_layout({other: shapes[other] for other in matrices if other != name}, torch.float32)
            except DirectWriteError as error:
                refused = str(error)
            break
    update(worker, parallel)
    report = worker.reshard(True, worker.weight_version + 1)
    assert addresses == {name: slot.data_ptr() for name, slot in slots.tensors.items()}
    written = {name: slot.clone() for name, slot in slots.tensors.items()}
    base = {name: parameter.detach().clone() for name, parameter in live_parameters(worker.engine.model).items()}
    worker.export(Path(exported))
    dist.barrier()
    for slot in slots.tensors.values():
        slot.fill_(float("nan"))
    manager = worker.engine._worker.model_runner.lora_manager
    manager.add_adapter(LoRARequest("exported", 2, str(Path(exported).with_name("adapter"))))
    model: Any = worker.engine.model
    with torch.no_grad(), without_adapters(model):
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
        files = sorted(Path(recipe.model.folder).glob("*.safetensors"))
        model.load_weights(pair for file in files for pair in load_file(file).items())
    found = {
        "different slots": [name for name, slot in slots.tensors.items() if not torch.equal(slot, written[name])],
        "different weights": [
            name for name, parameter in live_parameters(model).items() if not torch.equal(parameter, base[name])
        ],
        "zero at the start": zeros,
        "zero": [name for name, slot in written.items() if not slot.any()],
        "slots": list(written),
        "refused": refused,
        "moved": report.num_bytes["local"] + report.num_bytes["received"],
        "floor": computed.adapter_bytes_on(dist.get_rank(), 4),
        "slot bytes": sum(slot.nbytes for slot in slots.tensors.values()),
        "computed bytes": computed.bytes_on(dist.get_rank(), 4),
    }
    worker.close()
    return found


@pytest.mark.parametrize(
    ("parallel", "model", "lora"),
    [
        pytest.param(ONE, UNTIED, {}, id="one rank"),
        pytest.param(ParallelConfig(tp=2, pp=1, dp=1, rollout_tp=1), UNTIED, {}, id="tp2 to tp1"),
        pytest.param(
            ParallelConfig(tp=1, pp=2, dp=1, rollout_tp=2, vpp=2), "qwen3 kv below tp, tied, odd vocabulary",
            {"rank": 8}, id="pp2 vpp2 to tp2",
        ),
        pytest.param(
            ParallelConfig(tp=1, pp=1, dp=2, rollout_tp=2), "qwen2 kv above tp, tied", {"alpha": 8}, id="dp2 to tp2"
        ),
        pytest.param(
            ParallelConfig(tp=2, pp=1, dp=1, rollout_tp=2), "llama kv equal tp, untied, odd vocabulary",
            {"targets": ["o_proj", "down_proj"], "rank": 8, "rank_stabilised": True},
            id="tp2 to tp2, row-parallel layers, rank-stabilised",
        ),
        pytest.param(
            ParallelConfig(tp=2, pp=1, dp=1, rollout_tp=2), "mistral kv above tp, untied",
            {"targets": ["qkv_proj", "gate_up_proj"]}, id="tp2 to tp2, fused layers",
        ),
        pytest.param(
            ParallelConfig(tp=2, pp=1, dp=1, rollout_tp=2, ep=2, rollout_ep=True), "qwen3_moe",
            {"targets": ["qkv_proj", "o_proj"]}, id="experts without adapters",
        ),
    ],
)  # fmt: skip
def test_slots_are_what_vllm_loads_and_base_weights_stay(
    parallel: ParallelConfig,
    model: str,
    lora: dict[str, Any],
    ranks: RankPool,
    tiny_model: Callable[..., Path],
    tmp_path: Path,
) -> None:
    folder = tiny_model(**{"num_layers": 2 * parallel.vpp, **MODELS[model]})
    recipe = adapted(folder, parallel, "adapter", **lora)
    found = ranks.run(train_and_load, recipe, parallel, str(tmp_path / "hf"), world_size=parallel.world_size)
    for rank in found:
        assert rank["different slots"] == rank["different weights"] == []
        # Every B starts at zero, and the update changes each of them.
        assert rank["zero at the start"] == [name for name in rank["slots"] if "lora_b" in name]
        assert rank["zero"] == []
        is_fused = {"qkv_proj", "gate_up_proj"} & {*recipe.lora.targets}
        assert ("elements come from the adapter" in rank["refused"]) == bool(is_fused)
        assert rank["moved"] == rank["floor"] > 0
        assert rank["slot bytes"] == rank["computed bytes"] >= rank["floor"]


@pytest.mark.parametrize(
    ("parallel", "model", "lora"),
    [
        pytest.param(ONE, UNTIED, {}, id="one rank"),
        pytest.param(ParallelConfig(2, 1, 1, 2), UNTIED, {}, id="tp2 to tp2"),
        pytest.param(ONE, "qwen3_moe", {"targets": ["qkv_proj", "o_proj"]}, id="experts without adapters"),
    ],
)
def test_log_probs_are_those_of_merged_weights(
    parallel: ParallelConfig, model: str, lora: dict[str, Any], ranks: RankPool, tiny_model: Callable[..., Path]
) -> None:
    folder = tiny_model(**{"num_layers": 2, **MODELS[model]})
    (before, by_adapter), (_, by_merged) = (
        ranks.run(logprobs, adapted(folder, parallel, sync, **lora), parallel, world_size=parallel.world_size)[0]
        for sync in ("adapter", "merged")
    )
    assert np.abs(by_adapter - by_merged).max() <= 1e-5
    # The limit is far below what the update changes.
    assert np.abs(by_adapter - before).max() > 1e-2
