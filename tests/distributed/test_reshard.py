"""After training updates, the engine's live parameters equal, bit for bit, what vLLM's own loader makes of the export.

The oracle is vLLM: the trainer's weights leave through the exported checkpoint and `load_weights`, or through the plan
and the transport; both ways must write the same bytes on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from tests.checkpoint.model_folders import tensors_of
from tests.distributed.weight_updates import update
from tests.models.drafts.eagle3 import make_eagle3
from tests.rank_pool import RankPool

pytestmark = pytest.mark.distributed

MODELS = {
    "qwen3 kv below tp, tied, odd vocabulary": dict(family="qwen3", num_kv_heads=1, vocab_size=433),
    "qwen3 kv equal tp, untied": dict(family="qwen3", num_kv_heads=2, tie_word_embeddings=False),
    "qwen2 kv above tp, tied": dict(family="qwen2", num_kv_heads=4),
    "llama kv equal tp, untied, odd vocabulary": dict(
        family="llama", num_kv_heads=2, tie_word_embeddings=False, vocab_size=421
    ),
    "mistral kv above tp, untied": {"family": "mistral", "num_kv_heads": 4, "tie_word_embeddings": False},
    "qwen3_moe": {"family": "qwen3_moe", "num_kv_heads": 2},
    "qwen2_moe": {"family": "qwen2_moe", "num_kv_heads": 2},
    "gpt_oss": {"family": "gpt_oss", "num_kv_heads": 2, "head_dim": 32},
    "glm4_moe": {"family": "glm4_moe", "num_kv_heads": 2, "tie_word_embeddings": False},
    "deepseek_v3": {"family": "deepseek_v3"},
    "qwen3_next": {"family": "qwen3_next", "num_kv_heads": 2, "num_layers": 4},
    "qwen3_5_text": {"family": "qwen3_5_text", "num_kv_heads": 2, "num_layers": 4},
    "qwen3_5_moe, packed": {"family": "qwen3_5_moe", "num_kv_heads": 2, "num_layers": 4},
}
CASES = [
    pytest.param(ParallelConfig(tp=2, pp=1, dp=1, rollout_tp=2), "qwen3 kv below tp, tied, odd vocabulary"),
    pytest.param(ParallelConfig(tp=1, pp=2, dp=1, rollout_tp=2), "llama kv equal tp, untied, odd vocabulary"),
    pytest.param(
        ParallelConfig(tp=1, pp=2, dp=1, rollout_tp=2),
        "qwen3 kv below tp, tied, odd vocabulary",
        marks=pytest.mark.long,
    ),
    pytest.param(ParallelConfig(tp=1, pp=1, dp=2, rollout_tp=2), "qwen2 kv above tp, tied"),
    pytest.param(ParallelConfig(tp=2, pp=1, dp=1, rollout_tp=1), "qwen3 kv equal tp, untied"),
    pytest.param(ParallelConfig(tp=2, pp=2, dp=1, rollout_tp=2), "qwen3 kv equal tp, untied", marks=pytest.mark.long),
    pytest.param(ParallelConfig(tp=1, pp=2, dp=2, rollout_tp=2, order="tp-cp-ep-pp-dp"), "mistral kv above tp, untied"),
    pytest.param(
        ParallelConfig(tp=2, pp=1, dp=2, rollout_tp=4, rank_permutation=(2, 2)),
        "qwen3 kv below tp, tied, odd vocabulary",
    ),
    pytest.param(
        ParallelConfig(tp=2, pp=1, dp=2, rollout_tp=4),
        "llama kv equal tp, untied, odd vocabulary",
        marks=pytest.mark.long,
    ),
    pytest.param(
        ParallelConfig(tp=4, pp=1, dp=1, rollout_tp=2, rank_permutation=(2, 2)),
        "qwen3 kv below tp, tied, odd vocabulary",
    ),
    pytest.param(ParallelConfig(tp=1, pp=2, dp=1, rollout_tp=2, vpp=2), "qwen3 kv equal tp, untied"),
    pytest.param(ParallelConfig(tp=1, pp=1, dp=1, cp=2, rollout_tp=2), "qwen3 kv equal tp, untied"),
    pytest.param(ParallelConfig(tp=2, pp=1, dp=1, rollout_tp=2, ep=2), "qwen3_moe", marks=pytest.mark.long),
    pytest.param(ParallelConfig(tp=2, pp=1, dp=1, rollout_tp=2, ep=2, rollout_ep=True), "qwen3_moe"),
    pytest.param(ParallelConfig(tp=2, pp=2, dp=1, rollout_tp=2, etp=2, vpp=2, rollout_ep=True), "qwen3_moe"),
    pytest.param(ParallelConfig(tp=1, pp=1, dp=2, rollout_tp=2, ep=2), "qwen2_moe"),
    pytest.param(ParallelConfig(tp=1, pp=2, dp=1, rollout_tp=2, vpp=2), "glm4_moe", marks=pytest.mark.long),
    pytest.param(ParallelConfig(tp=2, pp=1, dp=1, rollout_tp=1, ep=2), "glm4_moe"),
    pytest.param(ParallelConfig(tp=2, pp=1, dp=1, rollout_tp=2, ep=2), "gpt_oss"),
    pytest.param(ParallelConfig(tp=2, pp=1, dp=1, rollout_tp=2, ep=2), "deepseek_v3"),
    pytest.param(ParallelConfig(tp=2, pp=1, dp=1, rollout_tp=2, ep=2), "qwen3_next"),
    pytest.param(ParallelConfig(tp=4, pp=1, dp=1, rollout_tp=2), "qwen3_5_text"),
    pytest.param(ParallelConfig(tp=2, pp=1, dp=1, rollout_tp=2, ep=2, rollout_ep=True), "qwen3_5_moe, packed"),
]


def train_reshard_and_compare(
    recipe: Recipe, parallel: ParallelConfig, exported: str, num_updates: int = 1
) -> list[str]:
    """Updates on random tokens, each with a reshard; the names of live parameters that differ from the loader's."""
    import torch
    import torch.distributed as dist
    from safetensors.torch import load_file

    from megarl.families.shape import read_model_shape
    from megarl.reshard.layouts.packed import checkpoint_tensors
    from megarl.reshard.live import DirectReshard
    from megarl.worker.colocated import Worker

    worker = Worker(dist.get_rank(), parallel.world_size, recipe, parallel, [("here",)] * parallel.world_size)
    assert worker.engine and worker.rank_reshard and isinstance(worker.rank_reshard.live_reshard, DirectReshard)
    assert worker.rank_reshard.live_reshard.is_computed, "vLLM's layout is not as computed"
    live = dict(worker.engine.model.named_parameters())
    before = {name: parameter.detach().clone() for name, parameter in live.items()}
    addresses = {name: parameter.data_ptr() for name, parameter in live.items()}
    for _ in range(num_updates):
        update(worker, parallel)
        worker.reshard(True, worker.weight_version + 1)
    written = {name: parameter.detach().clone() for name, parameter in live.items()}
    assert any(not torch.equal(before[name], written[name]) for name in live), "the update changed nothing"
    assert addresses == {name: parameter.data_ptr() for name, parameter in worker.engine.model.named_parameters()}
    worker.export(Path(exported))
    with torch.no_grad():
        for parameter in live.values():
            parameter.fill_(float("nan"))
    files = sorted(Path(exported).glob("*.safetensors"))
    # Kept tensors, of a vision tower for example, are not the engine's.
    own = checkpoint_tensors(read_model_shape(exported).with_draft_layers(recipe.rollout.drafts_with_model_layers))
    pairs = (pair for file in files for pair in load_file(file).items())
    worker.engine.model.load_weights(pair for pair in pairs if pair[0] in own)
    different = [name for name, parameter in live.items() if not torch.equal(parameter, written[name])]
    worker.close()
    return different


def recipe_of(model: Path, parallel: ParallelConfig, **vllm: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "reshard",
            "loop": "sft",
            "model": {"path": str(model), "dtype": "float32"},
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
                "sampling": {"max_new_tokens": 16},
                "vllm": vllm | ({"enable_expert_parallel": True} if parallel.rollout_ep else {}),
            },
            # Smaller than the model: several buckets travel.
            "weights": {"bucket_mib": 1},
        }
    )


@pytest.mark.parametrize(("parallel", "model"), CASES)
def test_live_parameters_equal_what_the_loader_makes(
    parallel: ParallelConfig,
    model: str,
    ranks: RankPool,
    tiny_model: Callable[..., Path],
    tmp_path: Path,
) -> None:
    recipe = recipe_of(tiny_model(**{"num_layers": 2 * parallel.vpp, **MODELS[model]}), parallel)
    results = ranks.run(
        train_reshard_and_compare, recipe, parallel, str(tmp_path / "hf"), world_size=parallel.world_size
    )
    assert results == [[]] * parallel.world_size


@pytest.mark.parametrize(
    ("parallel", "model", "dtype"),
    [
        pytest.param(
            ParallelConfig(tp=2, pp=1, dp=1, rollout_tp=1), "qwen3 kv below tp, tied, odd vocabulary", "float32"
        ),
        pytest.param(ParallelConfig(tp=1, pp=2, dp=1, rollout_tp=2, vpp=2), "qwen3 kv equal tp, untied", "bfloat16"),
        pytest.param(ParallelConfig(tp=2, pp=1, dp=1, rollout_tp=2, ep=2), "qwen2_moe", "float32"),
        # The float32 bias of the second stage's router travels among weights of 16 bits.
        pytest.param(ParallelConfig(tp=1, pp=2, dp=1, rollout_tp=2), "glm4_moe", "bfloat16"),
        pytest.param(ParallelConfig(tp=2, pp=1, dp=1, rollout_tp=1), "qwen3_5_text", "bfloat16"),
        pytest.param(ParallelConfig(tp=2, pp=1, dp=1, rollout_tp=2, ep=2), "qwen3_5_moe, packed", "float32"),
    ],
)
def test_an_engine_gets_weights_with_adapters_merged_in(
    parallel: ParallelConfig,
    model: str,
    dtype: str,
    ranks: RankPool,
    tiny_model: Callable[..., Path],
    tmp_path: Path,
) -> None:
    recipe = recipe_of(tiny_model(**{"num_layers": 2 * parallel.vpp, **MODELS[model]}), parallel)
    offload = {"offload": ("optimizer", "gradients", "parameters")}
    changed = {"lora": {"rank": 4}, "trainer": recipe.trainer.model_dump() | offload}
    changed["model"] = recipe.model.model_dump() | {"dtype": dtype}
    recipe = Recipe.model_validate(recipe.model_dump() | changed)
    results = ranks.run(
        train_reshard_and_compare, recipe, parallel, str(tmp_path / "hf"), world_size=parallel.world_size
    )
    assert results == [[]] * parallel.world_size
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }


TENSOR = ParallelConfig(tp=2, pp=1, dp=1, rollout_tp=1, ep=2)
PIPELINE = ParallelConfig(tp=1, pp=2, dp=1, rollout_tp=2, vpp=2, rollout_ep=True)


@pytest.mark.parametrize(
    ("parallel", "model", "is_drafting"),
    [
        pytest.param(TENSOR, "glm4_moe", True, id="tensor"),
        pytest.param(PIPELINE, "glm4_moe", True, id="pipeline"),
        pytest.param(TENSOR, "glm4_moe", False, id="tensor, no drafts", marks=pytest.mark.long),
        pytest.param(PIPELINE, "glm4_moe", False, id="pipeline, no drafts"),
        pytest.param(ParallelConfig(tp=1, pp=2, dp=1, rollout_tp=2), "deepseek_v3", True, id="latent attention"),
        pytest.param(ParallelConfig(tp=1, pp=2, dp=1, rollout_tp=2), "qwen3_next", True, id="delta-nets"),
        pytest.param(TENSOR, "qwen3_5_moe, packed", True, id="delta-nets, packed"),
    ],
)
def test_an_engine_gets_the_layers_that_draft(
    parallel: ParallelConfig,
    model: str,
    is_drafting: bool,
    ranks: RankPool,
    tiny_model: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """An engine that does not draft has no such layers, trained or not."""
    folder = tiny_model(**{"num_layers": 2 * parallel.vpp, **MODELS[model], "num_mtp_layers": 1})
    recipe = drafting_recipe_of(folder, parallel, is_drafting)
    results = ranks.run(
        train_reshard_and_compare, recipe, parallel, str(tmp_path / "hf"), world_size=parallel.world_size
    )
    assert results == [[]] * parallel.world_size


def drafting_recipe_of(model: Path, parallel: ParallelConfig, is_drafting: bool = True) -> Recipe:
    """A recipe that trains the model's layer for multi-token prediction, and may draft with it."""
    drafter = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
    recipe = recipe_of(model, parallel, **(drafter if is_drafting else {}))
    trainer = recipe.trainer.model_dump() | {"mtp_loss_coefficient": 0.1}
    return Recipe.model_validate(recipe.model_dump() | {"trainer": trainer})


def train_reshard_and_compare_drafts(recipe: Recipe, parallel: ParallelConfig, exported: str) -> dict[str, Any]:
    """Update the policy with its drafter, then reshard and export both. Returns what the checks of this rank say."""
    import torch
    import torch.distributed as dist

    from megarl.engine.parts.drafts import TrainedDrafts
    from megarl.reshard.checks.version_checksums import engine_differences, merge_checksums
    from megarl.worker.colocated import Worker

    # Parts of the trainer are attributes that the class does not declare.
    worker: Any = Worker(dist.get_rank(), parallel.world_size, recipe, parallel, [("here",)] * parallel.world_size)
    assert worker.engine and worker.rank_reshard
    part = worker.engine.find_part(TrainedDrafts)
    assert part is not None and part.written is not None
    live = dict(part.written.named_parameters())
    before = {name: parameter.detach().clone() for name, parameter in live.items()}
    update(worker, parallel)
    trainer = worker.weight_checks.take_checksums(2)
    engine = worker.reshard(True, 2).ledger
    written = {name: parameter.detach().clone() for name, parameter in live.items()}
    worker.export(Path(exported))
    with torch.no_grad():
        for parameter in live.values():
            parameter.fill_(float("nan"))
    part.written.load_weights(tensors_of(Path(exported).with_name("drafter")).items())
    loaded = {name: parameter.detach().clone() for name, parameter in live.items()}
    assert engine is not None
    ranks: list[Any] = [None] * parallel.world_size
    dist.all_gather_object(ranks, (trainer, engine))
    boxes, differences = merge_checksums([trainer for trainer, _ in ranks])
    assert differences == [] and list(engine_differences(boxes, [engine for _, engine in ranks])) == []
    # A changed element of the engine's drafter is noticed.
    with torch.no_grad():
        live["lm_head.weight"][0, 0] = 0.0
    changes = worker.rank_reshard.checks.compare_weights()
    assert changes is not None
    worker.close()
    return {
        "unchanged": [name for name in live if torch.equal(before[name], written[name])],
        "different": [name for name in live if not torch.equal(loaded[name], written[name])],
        "checked": {box.name for box in engine.boxes if box.name.startswith("drafter.")},
        "noticed": {box.name for box in changes.boxes},
    }


@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(tp=1, pp=2, dp=1, rollout_tp=2, vpp=2),
        pytest.param(ParallelConfig(tp=2, pp=1, dp=1, rollout_tp=1), marks=pytest.mark.long),
    ],
)
def test_an_engine_gets_the_trained_drafter(
    parallel: ParallelConfig, ranks: RankPool, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """From the last pipeline stage. What vLLM's loader makes of the export is equal bit by bit; checksums agree."""
    model = tiny_model(num_layers=8, family="qwen3", num_kv_heads=2, tie_word_embeddings=False)
    drafter = make_eagle3(tmp_path / "files", model)
    config = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": 2}
    recipe = recipe_of(model, parallel, speculative_config=config)
    changed = {"trainer": recipe.trainer.model_dump() | {"drafter_learning_rate": 1e-2, "drafter_steps": 2}}
    changed["weights"] = recipe.weights.model_dump() | {"check_every": 1}
    recipe = Recipe.model_validate(recipe.model_dump() | changed)
    for outcome in ranks.run(
        train_reshard_and_compare_drafts, recipe, parallel, str(tmp_path / "hf"), world_size=parallel.world_size
    ):
        assert outcome["unchanged"] == outcome["different"] == []
        assert len(outcome["checked"]) == len(tensors_of(drafter)) - 2
        assert outcome["noticed"] == {"drafter.lm_head.weight"}


def noted(owner: type, name: str, notes: list[str]) -> Callable[..., Any]:
    """A method that notes its name and first argument before it does its work."""
    method = getattr(owner, name)

    @wraps(method)
    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        notes.append(f"{owner.__name__}.{name} {args[0] if name == 'wake' else ''}".rstrip())
        return method(self, *args, **kwargs)

    return noting


def order_of_start(recipe: Recipe, parallel: ParallelConfig) -> list[str]:
    """Return the steps of a rank's engine, trainer and reshard, in order, until the rank is ready."""
    import torch

    from megarl.engine.engine import RolloutEngine
    from megarl.reshard.live import DirectReshard
    from megarl.training.training_engine import TrainingEngine
    from megarl.worker.colocated import Worker

    notes: list[str] = []
    spied = [(RolloutEngine, name) for name in ("__init__", "sleep", "wake", "weights_updated")]
    spied += [(TrainingEngine, "__init__"), (DirectReshard, "__init__"), (DirectReshard, "self_test")]
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in spied:
            patch.setattr(owner, name, noted(owner, name, notes))
        worker = Worker(torch.distributed.get_rank(), 1, recipe, parallel, [("here",)])
    worker.close()
    return notes


def test_the_engine_sleeps_while_the_trainer_is_built(ranks: RankPool, tiny_model: Callable[..., Path]) -> None:
    parallel = ParallelConfig(tp=1, pp=1, dp=1, rollout_tp=1)
    recipe = recipe_of(tiny_model(num_layers=2, family="qwen3", num_kv_heads=2), parallel)
    [notes] = ranks.run(order_of_start, recipe, parallel, timeout_seconds=300, world_size=1)
    assert notes == [
        "RolloutEngine.__init__",
        "RolloutEngine.sleep",
        "TrainingEngine.__init__",
        "RolloutEngine.wake ['weights']",
        "DirectReshard.__init__",
        "DirectReshard.self_test",
        "RolloutEngine.wake ['kv_cache']",
        "RolloutEngine.weights_updated",
    ]


def spoil_and_verify(recipe: Recipe, parallel: ParallelConfig) -> list[str]:
    """Return the errors of verification after two rows of an engine were exchanged, and after the next reshard."""
    import torch

    from megarl.reshard.live import DirectReshard
    from megarl.types import MegarlError
    from megarl.worker.colocated import Worker

    rank = torch.distributed.get_rank()
    worker = Worker(rank, parallel.world_size, recipe, parallel, [("here",)] * parallel.world_size)
    assert worker.engine and worker.rank_reshard and isinstance(worker.rank_reshard.live_reshard, DirectReshard)
    said = []
    if rank == 1:
        with torch.no_grad():
            parameter = worker.engine.model.get_parameter("model.layers.1.mlp.gate_up_proj.weight")
            parameter[:2] = parameter[[1, 0]]
    for _ in range(2):
        try:
            worker.rank_reshard.live_reshard.verify()
            said.append("equal")
        except MegarlError as error:
            said.append(str(error))
        worker.reshard(True, worker.weight_version + 1)
    worker.close()
    return said


def test_verification_names_the_parameter_that_differs(ranks: RankPool, tiny_model: Callable[..., Path]) -> None:
    parallel = ParallelConfig(tp=2, pp=1, dp=1, rollout_tp=1)
    recipe = recipe_of(tiny_model(num_layers=2, family="qwen3", num_kv_heads=2), parallel)
    for before, after in ranks.run(spoil_and_verify, recipe, parallel, world_size=2):
        assert "rank 1: the engine's parameter model.layers.1.mlp.gate_up_proj.weight does not hold" in before
        assert "model.layers.1.mlp.gate_proj.weight" in before
        assert after == "equal"


def train_and_gather(recipe: Recipe, parallel: ParallelConfig, exported: str) -> dict[str, list[str]]:
    """After an update, live parameters of an engine with adapters that are not the export's; and the notices.

    Also the live parameters without a checksum of this reshard, and those that differ from it after one has changed.
    """
    import torch
    from safetensors.torch import load_file

    from megarl.worker.colocated import Worker

    worker = Worker(
        torch.distributed.get_rank(), parallel.world_size, recipe, parallel, [("here",)] * parallel.world_size
    )
    assert worker.engine is not None and worker.rank_reshard is not None
    update(worker, parallel)
    ledger = worker.reshard(True, worker.weight_version + 1).ledger
    assert ledger is not None and 0 < worker.rank_reshard.first_report.seconds["verify"] < 600
    worker.export(Path(exported))
    tensors = load_file(f"{exported}/model.safetensors")
    attention, mlp = "model.layers.1.self_attn.", "model.layers.1.mlp."
    expected = {
        f"{attention}qkv_proj.base_layer.weight": [f"{attention}{letter}_proj.weight" for letter in "qkv"],
        f"{attention}o_proj.base_layer.weight": [f"{attention}o_proj.weight"],
        f"{mlp}gate_up_proj.base_layer.weight": [f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight"],
        f"{mlp}down_proj.base_layer.weight": [f"{mlp}down_proj.weight"],
        "model.norm.weight": ["model.norm.weight"],
    }
    live = dict(worker.engine.model.named_parameters())
    different = [
        name for name, parts in expected.items() if not torch.equal(live[name], torch.cat([tensors[p] for p in parts]))
    ]
    with torch.no_grad():
        live["model.norm.weight"][0] += 1
    changes = worker.rank_reshard.checks.compare_weights()
    assert changes is not None
    notices = worker.start_notices()
    worker.close()
    return {
        "different": different,
        "notices": notices,
        "unchecked": sorted({name.replace(".base_layer.", ".") for name in live} - {box.name for box in ledger.boxes}),
        "changed": [box.name for box in changes.boxes],
    }


def test_an_engine_that_keeps_other_weights_gets_full_tensors(
    ranks: RankPool, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    parallel = ParallelConfig(tp=2, pp=1, dp=1, rollout_tp=1)
    recipe = recipe_of(tiny_model(num_layers=2, family="qwen3", num_kv_heads=2), parallel, enable_lora=True)
    weights = recipe.weights.model_copy(update={"check_every": 1})
    recipe = recipe.model_copy(update={"weights": weights})
    for found in ranks.run(train_and_gather, recipe, parallel, str(tmp_path / "hf"), world_size=2):
        [notice] = found["notices"]
        assert "full tensors" in notice and "adapters inside vLLM" in notice
        assert found["different"] == found["unchecked"] == []
        assert found["changed"] == ["model.norm.weight"]


def probe_clean_and_spoiled(
    recipe: Recipe, parallel: ParallelConfig, spoiled_rank: int, factor: float
) -> tuple[float, str, float]:
    """The probe's gap after an update; its error where an engine's matrix is times `factor`; its gap after that."""
    import torch

    from megarl.reshard.live import GatheredReshard
    from megarl.types import MegarlError
    from megarl.worker.colocated import Worker

    rank = torch.distributed.get_rank()
    worker = Worker(rank, parallel.world_size, recipe, parallel, [("here",)] * parallel.world_size)
    assert worker.rank_reshard is not None
    resharding, engine = worker.rank_reshard.live_reshard, worker.engine
    assert engine is not None and isinstance(resharding, GatheredReshard)
    assert engine.weight_version == 1
    update(worker, parallel)
    clean = worker.reshard(True, worker.weight_version + 1).probe_gap
    run = resharding.run

    def run_and_spoil() -> Any:
        report = run()
        if rank == spoiled_rank:
            with torch.no_grad():
                dict(engine.model.named_parameters())["model.layers.1.mlp.down_proj.base_layer.weight"].mul_(factor)
        return report

    resharding.run = run_and_spoil
    said = ""
    try:
        worker.reshard(True, worker.weight_version + 1)
    except MegarlError as error:
        said = str(error)
    resharding.run = run
    mended = worker.reshard(True, worker.weight_version + 1).probe_gap
    worker.close()
    return clean, said, mended


@pytest.mark.parametrize(
    ("parallel", "spoiled_rank", "named", "factor"),
    [
        pytest.param(ParallelConfig(tp=2, pp=1, dp=1, rollout_tp=1), 1, "rank 1", 0.0, id="a replica of its own"),
        pytest.param(ParallelConfig(tp=1, pp=2, dp=1, rollout_tp=2), 1, "rank 0", float("nan"), id="part of one"),
    ],
)
def test_the_probe_finds_spoiled_weights_of_an_engine_that_converts_them(
    ranks: RankPool,
    tiny_model: Callable[..., Path],
    parallel: ParallelConfig,
    spoiled_rank: int,
    named: str,
    factor: float,
) -> None:
    model = tiny_model(num_layers=2, family="qwen3", num_kv_heads=2)
    recipe = recipe_of(model, parallel, enable_lora=True)
    # A prompt's log-probs are compared at temperature 1, whatever the one that is trained at.
    sampling = recipe.rollout.sampling.model_copy(update={"temperature": 0.5})
    rollout = recipe.rollout.model_copy(update={"sampling": sampling})
    recipe = recipe.model_copy(update={"loop": "rl", "rollout": rollout})
    for clean, said, mended in ranks.run(probe_clean_and_spoiled, recipe, parallel, spoiled_rank, factor, world_size=2):
        assert 0 < clean < 1e-4 and 0 < mended < 1e-4
        assert f"{named}: after a reshard, the log-probs of the engine" in said and "0.001 is allowed" in said
