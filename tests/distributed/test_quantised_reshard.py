"""An engine with FP8 weights has, bit for bit, what vLLM's quantised loader makes of the exported checkpoint.

Two oracles: vLLM's own loader, which the engine's live parameters are read again with; and the formula, in float32, on
the exported tensors cut as tensor parallelism cuts them. Sizes are no multiples of a block, so that blocks count from
the first row of a rank's own fused weights.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from tests.distributed.weight_updates import update
from tests.rank_pool import RankPool

pytestmark = pytest.mark.distributed

QWEN3 = {
    "family": "qwen3", "num_layers": 2, "hidden_size": 192, "num_heads": 8, "num_kv_heads": 4, "head_dim": 32,
    "intermediate_size": 448,
}  # fmt: skip
QWEN3_MOE = QWEN3 | {"family": "qwen3_moe", "num_experts": 4, "expert_intermediate_size": 96}
"""96 channels of an expert are rounded up to a block, at tp 2 and 4 there are 48 and 24 of them."""


def trainer(rollout_tp: int, **more: Any) -> ParallelConfig:
    return ParallelConfig(tp=2, pp=2, dp=1, rollout_tp=rollout_tp, **more)


def recipe_of(model: Path, parallel: ParallelConfig, quantization: str = "fp8", **vllm: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "quantised",
            "loop": "sft",
            "model": {"path": str(model), "dtype": "bfloat16"},
            "data": {"train": "unused", "validation": {"unused": "unused"}, "max_prompt_tokens": 32},
            "cluster": {"ranks_per_node": parallel.world_size},
            "trainer": {
                **{axis: getattr(parallel, axis) for axis in ("tp", "pp", "vpp", "cp", "ep", "etp")},
                "max_tokens_per_microbatch": 64,
            },
            "optimizer": {"learning_rate": 1e-2},
            "rollout": {
                "tp": parallel.rollout_tp,
                "kv_cache_gib": 0.05,
                "quantization": quantization,
                "sampling": {"max_new_tokens": 16},
                "vllm": vllm | ({"enable_expert_parallel": True} if parallel.rollout_ep else {}),
            },
            # Smaller than a layer: modules are complete at different times, and share the room.
            "weights": {"bucket_mib": 1},
        }
    )


def bits(tensor: Any) -> Any:
    """A copy of a parameter's bytes."""
    import torch

    tensor = tensor.detach().clone()
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def train_reshard_and_compare(recipe: Recipe, parallel: ParallelConfig, exported: str) -> tuple[list[str], list[str]]:
    """After an update and two reshards: live parameters that are not the loader's, and those that are not formula's."""
    import torch
    import torch.distributed as dist
    from safetensors.torch import load_file

    from megarl.reshard.live import DirectReshard
    from megarl.worker.colocated import Worker

    worker = Worker(dist.get_rank(), parallel.world_size, recipe, parallel, [("here",)] * parallel.world_size)
    assert worker.engine and worker.rank_reshard and isinstance(worker.rank_reshard.live_reshard, DirectReshard)
    live = dict(worker.engine.model.named_parameters())
    before = {name: bits(parameter) for name, parameter in live.items()}
    addresses = {name: parameter.data_ptr() for name, parameter in live.items()}
    update(worker, parallel)
    # Quantising the quantised would drift; a second reshard of equal weights changes nothing.
    worker.reshard(True, worker.weight_version + 1)
    first = {name: bits(parameter) for name, parameter in live.items()}
    report = worker.reshard(True, worker.weight_version + 1)
    written = {name: bits(parameter) for name, parameter in live.items()}
    assert report.seconds["quantise"] > 0
    assert all(torch.equal(first[name], written[name]) for name in live)
    quantised = [name for name in live if live[name].dtype == torch.float8_e4m3fn]
    assert all(not torch.equal(before[name], written[name]) for name in quantised) and quantised
    assert addresses == {name: parameter.data_ptr() for name, parameter in worker.engine.model.named_parameters()}
    worker.export(Path(exported))
    tensors = load_file(f"{exported}/model.safetensors")
    with torch.no_grad():
        for parameter in live.values():
            (parameter.view(torch.uint8) if parameter.dtype.itemsize == 1 else parameter).fill_(0)
    worker.engine.load_tensors(iter(tensors.items()))
    reloaded = dict(worker.engine.model.named_parameters())
    different = [name for name in written if not torch.equal(bits(reloaded[name]), written[name])]
    part, rows = dist.get_rank() % parallel.rollout_tp, recipe.rollout.quantization == "fp8_per_channel"
    expected = {
        name: value
        for layer in range(2)
        for name, value in formula(tensors, f"model.layers.{layer}.", parallel.rollout_tp, part, rows).items()
    }
    wrong = [name for name, value in expected.items() if not torch.equal(written[name], value)]
    assert len(expected) >= 4
    worker.close()
    return different, wrong


def formula(tensors: Any, layer: str, tp: int, part: int, rows: bool) -> dict[str, Any]:
    """FP8 weights (bytes) and scales of a layer's dense projections on one rank of `tp`."""
    import torch

    def cut(name: str, dim: int) -> Any:
        return tensors[layer + name].chunk(tp, dim)[part]

    attention = [cut(f"self_attn.{letter}_proj.weight", 0) for letter in "qkv"]
    fused = {"self_attn.qkv_proj": torch.cat(attention), "self_attn.o_proj": cut("self_attn.o_proj.weight", 1)}
    if f"{layer}mlp.gate_proj.weight" in tensors:
        fused["mlp.gate_up_proj"] = torch.cat([cut(f"mlp.{name}_proj.weight", 0) for name in ("gate", "up")])
        fused["mlp.down_proj"] = cut("mlp.down_proj.weight", 1)
    found = {}
    for name, weight in fused.items():
        whole = tensors.get(f"{layer}{name}.weight", weight)
        values, scales = by_rows(weight, whole) if rows else by_blocks(weight)
        found[f"{layer}{name}.weight"] = values.t() if rows else values
        found[f"{layer}{name}.weight_scale{'' if rows else '_inv'}"] = scales
    return found


def by_blocks(weight: Any) -> tuple[Any, Any]:
    """Bytes [out, in] and float32 scales [out / 128, in / 128]: the largest of a block becomes 448."""
    import torch

    values = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-weight.shape[0] // 128), -(-weight.shape[1] // 128))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            scales[i, j] = weight[block].float().abs().max().clamp(min=1e-4) / 448
            values[block] = (weight[block].float() * (1 / scales[i, j])).to(torch.float8_e4m3fn)
    return values.view(torch.uint8), scales


def by_rows(weight: Any, whole: Any) -> tuple[Any, Any]:
    """Bytes [out, in] and float32 scales [out, 1]: the largest of a row of the `whole` weight becomes 448."""
    import torch

    scales = (whole.float().abs().amax(1, keepdim=True) / 448).clamp(min=1 / (448 * 512))
    return (weight.float() / scales).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8), scales


@pytest.mark.parametrize(
    ("parallel", "model", "quantization"),
    [
        pytest.param(trainer(1), QWEN3, "fp8", id="qwen3 tp 1"),
        pytest.param(trainer(2), QWEN3, "fp8", id="qwen3 tp 2", marks=pytest.mark.long),
        pytest.param(trainer(4), QWEN3, "fp8", id="qwen3 tp 4"),
        pytest.param(trainer(1), QWEN3_MOE, "fp8", id="qwen3_moe tp 1"),
        pytest.param(trainer(2), QWEN3_MOE, "fp8", id="qwen3_moe tp 2", marks=pytest.mark.long),
        pytest.param(trainer(4), QWEN3_MOE, "fp8", id="qwen3_moe tp 4"),
        pytest.param(trainer(2, etp=1, ep=2, rollout_ep=True), QWEN3_MOE, "fp8", id="qwen3_moe whole experts"),
        pytest.param(trainer(2), QWEN3, "fp8_per_channel", id="qwen3 tp 2 by channel"),
    ],
)
def test_fp8_weights_equal_what_vllm_makes_of_the_checkpoint(
    parallel: ParallelConfig,
    model: dict[str, Any],
    quantization: str,
    ranks: RankPool,
    tiny_model: Callable[..., Path],
    tmp_path: Path,
) -> None:
    recipe = recipe_of(tiny_model(**model), parallel, quantization)
    results = ranks.run(train_reshard_and_compare, recipe, parallel, str(tmp_path / "hf"), world_size=4)
    assert results == [([], [])] * 4


def spoil_and_verify(recipe: Recipe, parallel: ParallelConfig) -> list[str]:
    """Return the errors of verification after one byte, and one scale, of an engine was changed and restored."""
    import torch
    import torch.distributed as dist

    from megarl.checkpoint.mapped import MappedFolder
    from megarl.reshard.checks.file_rows import check_rows
    from megarl.reshard.live import DirectReshard
    from megarl.types import MegarlError
    from megarl.worker.colocated import Worker

    worker = Worker(dist.get_rank(), parallel.world_size, recipe, parallel, [("here",)] * parallel.world_size)
    assert worker.engine and worker.rank_reshard and isinstance(worker.rank_reshard.live_reshard, DirectReshard)
    live = dict(worker.engine.model.named_parameters())
    said = []
    for name in ("mlp.gate_up_proj.weight", "self_attn.o_proj.weight_scale_inv", "input_layernorm.weight", None):
        if name is not None and dist.get_rank() == 1:
            parameter = live[f"model.layers.1.{name}"].data
            parameter = parameter.view(torch.uint8) if parameter.dtype.itemsize == 1 else parameter
            parameter.view(-1)[-1] += 1
        try:
            worker.reshard(
                False, worker.weight_version + 1
            ) if name is None else worker.rank_reshard.live_reshard.verify()
            said.append("equal")
        except MegarlError as error:
            said.append(str(error))
    # A reshard by a layout that is a row off: checksums and bytes agree, and the rows are in wrong places.
    for quantised, wrong in (("o_proj", 1), ("norm", 0)):
        folder = MappedFolder(recipe.model.folder)
        names = [name for name in folder.names if quantised in name]
        weights = live["model.layers.1.self_attn.o_proj.weight"].data.view(torch.uint8)
        weights.copy_(weights.roll(wrong, 0))
        try:
            check_rows(worker.engine.model, sorted(names), folder.tensor, dtype=torch.bfloat16, seed=0)
            said.append("equal")
        except MegarlError as error:
            said.append(str(error))
    worker.close()
    return said


def test_verification_finds_a_changed_byte_scale_and_norm(ranks: RankPool, tiny_model: Callable[..., Path]) -> None:
    parallel = ParallelConfig(tp=2, pp=1, dp=1, rollout_tp=1)
    recipe = recipe_of(tiny_model(**QWEN3), parallel)
    for weight, scale, norm, mended, *rows in ranks.run(spoil_and_verify, recipe, parallel, world_size=2):
        assert "rank 1: the engine's parameter model.layers.1.mlp.gate_up_proj.weight does not hold" in weight
        assert "as vLLM quantises them" in weight
        # What is complete first is told first.
        assert "model.layers.1.self_attn.o_proj.weight_scale_inv" in scale
        assert "(2 of this rank's tensors differ)" in scale
        assert "model.layers.1.input_layernorm.weight does not hold the trainer's" in norm
        assert mended == "equal"
        assert rows[0].startswith("rank 0: the engine's parameter model.layers.1.self_attn.o_proj.weight does not hold")
        assert rows[1] == "equal"
