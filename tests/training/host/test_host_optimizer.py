"""An optimizer that works in host memory, in part or in whole: the same numbers, the same checkpoints, as planned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megarl.checkpoint.torch_dist_reader import check_harmless
from megarl.config import Recipe
from tests.rank_pool import RankPool
from tests.training.state.test_checkpoint import build, load_and_go_on, parallel_of, recipe_of, save_and_go_on, update

SIZES = (1, 1, 2)
FRACTIONS = (0.0, 0.4, 1.0)


Parameters = dict[str, torch.Tensor]


def host_recipe(model: Path, fraction: float) -> Recipe:
    return recipe_of(model, dtype="bfloat16", optimizer_offload_fraction=fraction)


def distance(some: Parameters, others: Parameters) -> float:
    """Root of the sum of squares of all differences: torch's fused Adam rounds otherwise than its plain one."""
    return sum(float((some[name].double() - others[name].double()).square().sum()) for name in others) ** 0.5


def learnt(recipes: list[Recipe], sizes: tuple[int, int, int]) -> list[tuple[list[float], Parameters, Parameters]]:
    """Gradient norms of three steps of each recipe, clipped to 1, and the parameters before and after."""
    found = []
    for recipe in recipes:
        parallel = parallel_of(sizes)
        engine = build(recipe, parallel)
        start = {name: value.detach().clone() for name, value in engine.parameters.items()}
        steps = [update(engine, parallel, step) for step in range(3)]
        norms = [step["train/grad_norm"].number for step in steps if step]
        found.append((norms, start, {name: value.detach().clone() for name, value in engine.parameters.items()}))
    return found


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_the_same_is_learnt_wherever_the_optimizer_works(
    ranks: RankPool, tiny_model: Callable[..., Path], family: str
) -> None:
    """Experts have an optimizer of their own."""
    # Rows that pad the vocabulary are what memory had: there are none.
    model = tiny_model(family=family, num_layers=1 if family == "qwen3_moe" else 2, vocab_size=512)
    recipes = [host_recipe(model, fraction) for fraction in FRACTIONS]
    for (norms, start, expected), *others in ranks.run(learnt, recipes, SIZES, world_size=2):
        for other_norms, _, parameters in others:
            assert other_norms == pytest.approx(norms, rel=1e-3)
            assert distance(parameters, expected) < 0.02 * distance(start, expected)


@pytest.mark.parametrize(("saved", "read"), [(0.5, 0.0), (0.0, 1.0)])
def test_a_checkpoint_is_that_of_any_fraction(
    ranks: RankPool, tiny_model: Callable[..., Path], tmp_path: Path, saved: float, read: float
) -> None:
    """Saved with one fraction and read with another: the next steps are the same."""
    model = tiny_model(num_layers=1)
    recipes = [host_recipe(model, fraction) for fraction in (saved, read)]
    before = ranks.run(save_and_go_on, recipes[0], SIZES, tmp_path, True, world_size=2)
    check_harmless(tmp_path)
    after = ranks.run(load_and_go_on, recipes[1], SIZES, tmp_path, world_size=2)
    for mine, other in zip(after, before, strict=True):
        start, end, expected = (
            {name: value for name, value in state.items() if not name[0].isdigit()}
            for state in (other["state"], mine["end"], other["end"])
        )
        assert distance(end, expected) < 0.02 * distance(start, expected)


def host_tensors(inner: Any) -> Iterator[torch.Tensor]:
    """The tensors that are in host memory all the time: main weights, moments, gradients."""
    for part in inner.cpu_optimizers:
        yield from (parameter for group in part.param_groups for parameter in group["params"])
        yield from (value for state in part.state.values() for value in state.values() if torch.is_tensor(value))
    yield from inner.cpu_copy_map_grad.values()


def held(recipe: Recipe, sizes: tuple[int, int, int]) -> dict[str, int]:
    """Bytes of one rank's optimizer after a step: on the host, and what is on the device."""
    parallel = parallel_of(sizes)
    engine = build(recipe, parallel)
    update(engine, parallel, 0)
    weights = {value.untyped_storage()._cdata for value in engine.parameters.values()}

    def size(tensors: Any) -> int:
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if t.ndim}
        return sum(number for key, number in storages.items() if key not in weights)

    inner: Any = engine.optimizer.chained_optimizers[0].optimizer
    part = inner.gpu_optimizer
    main = [p for group in part.param_groups for p in group["params"]] if part else []
    moments = [state[name] for state in part.state.values() for name in ("exp_avg", "exp_avg_sq")] if part else []
    on_host = size(host_tensors(inner))
    return {"rank": dist.get_rank(), "on_host": on_host, "main_weights": size(main), "moments": size(moments)}


@pytest.mark.parametrize("fraction", [0.3, 1.0])
def test_what_is_where_is_what_was_planned(ranks: RankPool, tiny_model: Callable[..., Path], fraction: float) -> None:
    from megarl.families.shape import padded_vocab_size, read_model_shape
    from megarl.planner.memory.trainer_bytes import trainer_states
    from megarl.reshard.layouts.megatron import megatron_layouts

    model = tiny_model(num_layers=3, tie_word_embeddings=False)
    recipe = host_recipe(model, fraction)
    shape = read_model_shape(model)
    layouts = megatron_layouts(shape, parallel_of(SIZES), padded_vocab_size=padded_vocab_size(shape.vocab_size, 1))
    for found in ranks.run(held, recipe, SIZES, world_size=2):
        planned = trainer_states(
            layouts, found["rank"], itemsize=2, is_distributed=True, optimizer="adam", is_pinned=False,
            host_fraction=fraction,
        )  # fmt: skip
        num_elements = found["on_host"] // 16 + found["main_weights"] // 4
        assert planned.on_host // 16 + planned.main_weights // 4 == pytest.approx(num_elements, rel=1e-3)
        assert planned.moments == 2 * planned.main_weights and found["moments"] == 2 * found["main_weights"]
        # To one parameter.
        largest = 2 * shape.intermediate_size * shape.hidden_size
        assert 0 <= found["on_host"] // 16 - fraction * num_elements <= largest
        assert abs(planned.on_host - found["on_host"]) <= 16 * largest
