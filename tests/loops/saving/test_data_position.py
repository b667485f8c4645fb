"""Which records a run draws over its starts: every one once an epoch, whatever each start draws per step."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.config import Recipe
from megarl.data.sampler import DataOrder
from megarl.loops.run_data import RunData
from megarl.loops.saving.data_position import DataPosition
from megarl.tracking.draws import LEDGER, account

FIELDS = {"sft": "data.train", "preference": "data.train", "reward_model": "data.train", "rl": "data.ptx"}
"""The data drawn in batches by each loop."""


def recipe_of(loop: str, batch_size: int, *, shuffle: bool = True, has_ptx: bool = True) -> Recipe:
    data: dict[str, Any] = {"train": "t", "shuffle": shuffle}
    algorithm: dict[str, Any] = {}
    train: dict[str, Any] = {"prompts_per_step": batch_size}
    if loop == "rl":
        # The number of prompts of the RL loop has no influence on its conversations.
        train = {"prompts_per_step": 64 // batch_size}
        if has_ptx:
            data["ptx"] = "p"
            algorithm = {"ptx_coefficient": 0.1, "ptx_conversations": batch_size}
    return Recipe.model_validate(
        {"name": "r", "loop": loop, "model": {"path": "m"}, "data": data, "algorithm": algorithm, "train": train}
    )


def saved(position: DataPosition, step: int, recipe: Recipe) -> DataPosition:
    """The position after a step, as a checkpoint of it gives it to the next start."""
    driver = {"drawn": position.after(step, recipe).as_json(), "recipe": {}}
    return DataPosition.from_checkpoint(step, json.loads(json.dumps(driver)))


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("loop", FIELDS)
@pytest.mark.parametrize("seed", range(5))
def test_starts_with_other_batch_sizes_draw_each_record_once(loop: str, seed: int, shuffle: bool) -> None:
    chance = random.Random(seed)
    num_items = chance.randint(3, 40)
    stream: list[int] = []
    position, step = DataPosition(), 0
    for _ in range(6):
        recipe = recipe_of(loop, chance.choice([1, 2, 4, 8, 16]), shuffle=shuffle)
        order = position.order(recipe, FIELDS[loop], num_items)
        ends = []
        drawn = list(stream)
        for number in range(step + 1, step + chance.randint(2, 7)):
            drawn += order.batch(number - 1)
            ends.append((number, len(drawn)))
        # The next start goes on from any of the checkpoints; what came after it is drawn again.
        step, length = chance.choice(ends)
        stream = drawn[:length]
        position = saved(position, step, recipe)
        assert position.drawn[FIELDS[loop]] == length
        assert order.epochs(step - 1) == length / num_items
    whole = DataOrder(num_items, 1, 0, shuffle)
    assert stream == [index for number in range(len(stream)) for index in whole.batch(number)]
    for start in range(0, len(stream) - num_items, num_items):
        assert Counter(stream[start : start + num_items]) == Counter(range(num_items))


def test_conversations_left_out_for_a_while_go_on_where_they_ended() -> None:
    with_ptx, without = recipe_of("rl", 4), recipe_of("rl", 4, has_ptx=False)
    position = saved(saved(DataPosition(), 3, with_ptx), 5, without)
    assert position == DataPosition(5, {"data.ptx": 12})
    assert position.order(with_ptx, "data.ptx", 100).num_drawn_before(5) == 12


@pytest.mark.parametrize(("loop", "expected"), [("sft", {"data.train": 24}), ("rl", {"data.ptx": 9})])
def test_a_checkpoint_of_an_earlier_version_counts_by_its_recipe(loop: str, expected: dict[str, int]) -> None:
    earlier = {"loop": loop, "data": {"train": "t"}, "train": {"prompts_per_step": 8}}
    if loop == "rl":
        earlier |= {"data": {"train": "t", "ptx": "p"}, "algorithm": {"ptx_conversations": 3}}
    position = DataPosition.from_checkpoint(3, {"recipe": earlier})
    assert position == DataPosition(3, expected)
    name = FIELDS[loop]
    assert position.order(recipe_of(loop, 2), name, 100).num_drawn_before(4) == expected[name] + 2


def test_a_step_before_the_start_is_refused() -> None:
    with pytest.raises(ValueError, match="step 1 is before the first one"):
        DataOrder(10, 2, 0, first_step=2, num_drawn=9).batch(1)


def run_data(ledger: Path, notify: Callable[[str], object] = print) -> RunData:
    unused: Any = None
    return RunData(tokenizer=unused, sources=(), dropped=Counter(), draws_file=ledger, notify=notify)


def test_the_ledger_accounts_for_each_record_over_starts_with_other_batch_sizes(tmp_path: Path) -> None:
    data = run_data(tmp_path / LEDGER)
    position, step = DataPosition(), 0
    for batch_size, num_steps in ((4, 3), (8, 2), (1, 5), (16, 2)):
        recipe = recipe_of("sft", batch_size)
        order = position.order(recipe, "data.train", 10)
        for number in range(step + 1, step + num_steps + 1):
            data.write_draws(number, order, order.batch(number - 1))
        step += num_steps
        position = saved(position, step, recipe)
    found = account(tmp_path)
    assert found.faults == [] and sum(epoch.draws.total() for epoch in found.epochs) == 12 + 16 + 5 + 32


def test_a_ledger_cut_or_removed_before_a_resume_is_told(tmp_path: Path) -> None:
    file, notices = tmp_path / LEDGER, list[str]()
    data = run_data(file, notices.append)
    order = DataPosition().order(recipe_of("sft", 4), "data.train", 10)
    for number in (1, 2, 3):
        data.write_draws(number, order, order.batch(number - 1))
    data.rewind_draws(2 * order.num_drawn_before(2))
    assert notices == [] and len(file.read_bytes().splitlines()) == 2
    file.write_bytes(file.read_bytes().splitlines(keepends=True)[0])
    data.rewind_draws(2 * order.num_drawn_before(2))
    file.unlink()
    data.rewind_draws(2 * order.num_drawn_before(2))
    assert [text.split(" events")[0] for text in notices] == [f"{file}: lacks 8 of 16", f"{file}: lacks 16 of 16"]
