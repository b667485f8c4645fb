"""Models that take turns on one trainer: each has the bits of the same program alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.data.token_batch import TokenBatch
from megarl.service.messages.datums import make_batch
from megarl.service.messages.requests import AdamSettings
from megarl.service.messages.wire import Datum
from megarl.training.state.exchange import trained_parameters
from tests.rank_pool import RankPool
from tests.training.parts.test_lora import DENSE, SETTINGS, build, lora_recipe

VOCABULARY = 431
ADAM = AdamSettings(learning_rate=3e-3, weight_decay=0.01, grad_clip_norm=1.0).model_dump()


def rows_for(model: int, call: int, parallel: ParallelConfig) -> list[TokenBatch]:
    """This replica's row of a call of one model's program."""
    random = np.random.default_rng([model, call])
    datums = [
        Datum(
            random.integers(1, VOCABULARY, length),
            {
                "target_tokens": random.integers(1, VOCABULARY, length),
                "logprobs": random.normal(-6, 0.5, length).astype(np.float32),
                "advantages": random.normal(0, 1, length).astype(np.float32),
            },
        )
        for length in (9, 5, 12, 7)
    ]
    batch = make_batch(datums, "importance_sampling", vocab_size=VOCABULARY, max_tokens=64)
    replica = parallel.coordinates(dist.get_rank()).dp
    return [batch.select(list(range(replica, 4, parallel.dp)))]


def run_call(adapters: Any, model: int, call: int, parallel: ParallelConfig) -> None:
    """Run one call of a model's program: two passes, then a step, three times."""
    assert adapters.read_back(str(model)) is None
    if call % 3 < 2:
        adapters.accumulate(rows_for(model, call, parallel), str(model), "importance_sampling", {})
    else:
        adapters.step(str(model), ADAM)


def train(recipe: Recipe, parallel: ParallelConfig, orders: Sequence[Sequence[int]], folder: Path) -> list[Any]:
    """Return, for each order of the models' calls, the models' states: adapters, moments and steps."""
    from megarl.service.ranks.rank_adapters import Adapters

    engine, *_ = build(recipe, parallel)
    adapters = Adapters(engine, parallel)
    states = []
    for number, order in enumerate(orders):
        calls = dict.fromkeys(order, 0)
        for model in calls:
            adapters.create(str(model), 100 + model)
        for place, model in enumerate(order):
            run_call(adapters, model, calls[model], parallel)
            calls[model] += 1
            if number and place == 4:
                # Between two calls of a model another one is sampled, saved and loaded.
                adapters.publish(str(model), "version")
                # Those without pending gradients go to disk, and their next calls bring them back.
                names = [str(other) for other in calls]
                _, failure = adapters.move_to_disk(names, folder / "missing")
                assert bool(failure) == (len(calls) > 1) and not adapters._files_on_disk
                adapters.move_to_disk(names, folder)
                assert bool(adapters._files_on_disk) == (len(calls) > 1)
                adapters.show("version")
                assert adapters.read_back(str(model)) is None
                adapters.save(str(model), folder / "saved")
                adapters.load("loaded", folder / "saved", True)
        # Each exchange holds the state of the model before.
        adapters.show(None)
        states.append({model: adapters._states_in_memory.pop(str(model)) for model in calls})
    return [
        {
            # Sorted: a save before the first step allocates the moments in another order than the step.
            model: [
                *state.tensors,
                *(values[name] for part in state.moments for values in part for name in sorted(values)),
            ]
            for model, state in by_model.items()
        }
        for by_model in states
    ]


DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": lambda file: file.write_bytes(b""),
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-100]),
    "another file": lambda file: file.write_bytes(b"x" * 1000),
    "other contents": lambda file: torch.save({"tensors": []}, file),
}
"""Name to a function that damages the file of an idle model."""


def damage_models(recipe: Recipe, parallel: ParallelConfig, folder: Path) -> list[list[str | None]]:
    """Damage the files of models on rank 1. Returns each model's faults on this rank: of two reads, and after a repair.

    All models then train like one without a fault.
    """
    from megarl.service.ranks.rank_adapters import Adapters

    engine, *_ = build(recipe, parallel)
    adapters = Adapters(engine, parallel)
    names = [str(number) for number in range(len(DAMAGES) + 1)]
    for name in names:
        adapters.create(name, 7)
    adapters.move_to_disk(names, folder)
    faults, rank = [], dist.get_rank()
    for name, damage in zip(names[1:], DAMAGES.values(), strict=True):
        file = folder / f"{name}_{rank}.pt"
        content = file.read_bytes()
        if rank == 1:
            damage(file)
        faults.append([])
        for _ in range(2):
            faults[-1].append(adapters.read_back(name))
            # The part that was read goes back to the disk.
            assert adapters.move_to_disk([name], folder) == ([name], None)
        if rank == 1:
            file.write_bytes(content)
        faults[-1].append(adapters.read_back(name))
    weights = []
    for name in names:
        adapters.read_back(name)
        adapters.accumulate(rows_for(0, 0, parallel), name, "importance_sampling", {})
        assert adapters.step(name, ADAM)[1]
        weights.append([parameter.clone() for parameter in trained_parameters(engine)])
        # A step without a pass before it would move the weights by momentum and weight decay.
        assert adapters.step(name, ADAM) == (0.0, False)
        assert all(map(torch.equal, weights[-1], trained_parameters(engine)))
    assert all(torch.equal(one, other) for model in weights[1:] for one, other in zip(weights[0], model, strict=True))
    return faults


TOGETHER = [0, 1, 1, 0, 0, 1, 0, 0, 1, 1, 1, 0]
"""Order of the calls of two models."""
EIGHT = np.random.default_rng(8).permutation(np.repeat(np.arange(8), 6)).tolist()


@pytest.mark.parametrize(
    ("sizes", "dtype", "together"),
    [
        *(({name: 2}, dtype, TOGETHER) for name in ("dp", "tp") for dtype in ("float32", "bfloat16")),
        *(
            pytest.param(sizes, dtype, EIGHT, marks=pytest.mark.long)
            for sizes in ({}, {"dp": 2}, {"tp": 2})
            for dtype in ("float32", "bfloat16")
        ),
    ],
)
def test_models_that_take_turns_are_bit_equal_to_each_alone(
    ranks: RankPool,
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    sizes: dict[str, int],
    dtype: str,
    together: list[int],
) -> None:
    folder = tiny_model(**(SETTINGS | DENSE))
    recipe = lora_recipe(folder, overlap_grad_reduce=False)
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"dtype": dtype})})
    parallel = ParallelConfig(**{"tp": 1, "pp": 1, "dp": 1, "rollout_tp": 1, **sizes})
    models = sorted(set(together))
    orders = [*([model] * 6 for model in models), together]
    (tmp_path / "saved").mkdir()
    for *each_alone, both in ranks.run(train, recipe, parallel, orders, tmp_path, world_size=parallel.world_size):
        for model, states in zip(models, each_alone, strict=True):
            alone = states[model]
            assert len(alone) == len(both[model]) and sum(values.numel() for values in alone) > 1000
            assert all(torch.equal(one, other) for one, other in zip(alone, both[model], strict=True))
        assert not all(torch.equal(one, other) for one, other in zip(both[0], both[1], strict=True))


def test_a_file_of_an_idle_model_that_cannot_be_read_is_named_and_can_be_read_later(
    ranks: RankPool, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    recipe = lora_recipe(tiny_model(**(SETTINGS | DENSE)), overlap_grad_reduce=False)
    parallel = ParallelConfig(tp=1, pp=1, dp=2, rollout_tp=1)
    healthy, damaged = ranks.run(damage_models, recipe, parallel, tmp_path, world_size=2)
    assert healthy == [[None] * 3] * len(DAMAGES)
    for number, (name, (fault, again, afterwards)) in enumerate(zip(DAMAGES, damaged, strict=True), 1):
        assert fault is not None and fault.startswith(str(tmp_path / f"{number}_1.pt")), (name, fault)
        assert again == fault and afterwards is None, name
