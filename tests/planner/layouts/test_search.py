"""The search of layouts: its ranking is that of all combinations, what it names fits and passes the recipe's checks."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from typer.testing import CliRunner

from megarl.cli import app
from megarl.config import Recipe
from megarl.config.recipe import load
from megarl.planner.layouts import search as module
from megarl.planner.layouts.candidates import Candidates, EngineSizes, Placement, vllm_with
from megarl.planner.layouts.overrides import overrides_between, placement_values
from megarl.planner.layouts.search import LayoutSearch, make_layout_search
from megarl.planner.predictions import table_of
from megarl.planner.search import with_field_values
from megarl.planner.seconds.gpus import GPUS
from megarl.planner.seconds.lengths import log_normal
from megarl.planner.sizes import find_batch_faults, find_length_faults, parallel_of
from megarl.planner.verdict import verdict_of
from megarl.preflight import check_plan
from megarl.preflight.recipe_file import RecipeFile
from megarl.preflight.registry import Cost, faults
from megarl.types import ConfigError
from tests.planner.memory.conftest import RECIPES, large

__all__ = ["large"]


def _search(recipe: Recipe, max_staleness: int | None = None) -> LayoutSearch:
    limit = recipe.rollout.sampling.max_new_tokens
    return make_layout_search(recipe, log_normal(mean=limit / 4, limit=limit, prompt_tokens=200.0), max_staleness)


SEARCHED = (
    "qwen3_0_6b_gsm8k", "qwen3_1_7b_gsm8k", "qwen3_4b_gsm8k", "qwen3_8b_gsm8k", "qwen3_8b_tools", "qwen3_14b_agent",
    "qwen3_14b_dapo", "qwen3_14b_dapo_h200", "qwen3_32b_grpo", "qwen3_30b_a3b_gspo", "qwen3_235b_a22b_gspo",
)  # fmt: skip
"""Recipes of launch/recipes that --search covers."""


def _field_faults(recipe: Recipe) -> set[str]:
    facts = {"recipe": recipe, "dp": parallel_of(recipe).dp, "is_start": False, "is_trained": True, "has_model": False}
    found = [*faults(facts, (Cost.FIELDS,)), *faults(facts, (Cost.FIELDS,), per_run=True)]
    return set(map(str, found))


def test_every_recipe_is_searched_or_refused(large: Callable[..., Recipe]) -> None:
    searched = []
    for path in RECIPES.glob("*.yaml"):
        with contextlib.suppress(ConfigError):
            _search(large(path.stem))
            searched.append(path.stem)
    assert sorted(searched) == sorted(SEARCHED)


# A dense and an MoE model. Each search takes many seconds of CPU time.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("qwen3_4b_gsm8k", "qwen3_30b_a3b_gspo") else pytest.mark.long)
        for name in SEARCHED
    ],
)
@pytest.mark.parametrize("staleness", [None, 2])
def test_printed_overrides_are_accepted_by_a_start(
    large: Callable[..., Recipe], name: str, staleness: int | None
) -> None:
    recipe, path = large(name), RECIPES / f"{name}.yaml"
    limit = recipe.rollout.sampling.max_new_tokens
    search = make_layout_search(
        recipe, log_normal(mean=limit / 4, limit=limit, prompt_tokens=200.0), staleness, RecipeFile(path).refusal
    )
    result = search.search(20)
    assert result.layouts and not any("does nothing" in reason for reason in result.refused)
    for found in result.layouts:
        # As a shell passes the printed line on.
        pasted = shlex.split(shlex.join(found.overrides))
        other = load(path, pasted)
        parallel = check_plan(other)[1]
        assert _field_faults(other) <= _field_faults(recipe), pasted
        assert verdict_of(other, parallel, table_of(other, parallel)).fits, pasted
        # Every override is needed, so each dropped value is named.
        assert other.notices == (), other.notices
        assert (other.rollout.placement == "separate") == bool(found.placement.ranks)


def test_fields_of_the_old_placement_are_removed(large: Callable[..., Recipe]) -> None:
    separate = (
        "rollout.placement=separate", "rollout.ranks=4", "rollout.max_staleness=1", "weights.overlap=true",
        "algorithm.importance_sampling=tis", "rollout.sync_every=1",
    )  # fmt: skip
    recipe = large("qwen3_14b_dapo_h200", *separate)
    overrides = overrides_between(recipe, placement_values(recipe, Placement(ranks=0, staleness=0)))
    path = RECIPES / "qwen3_14b_dapo_h200.yaml"
    other = load(path, (*separate, *overrides))
    assert not other.weights.overlap and other.rollout.placement == "colocated"
    assert "weights.overlap=default" in overrides and "rollout.sync_every=default" in overrides
    with pytest.raises(ConfigError, match=r"weights\.overlap = True: does nothing"):
        load(path, (*separate, *(text for text in overrides if not text.startswith("weights"))))


def test_stale_samples_get_a_correction(large: Callable[..., Recipe]) -> None:
    recipe, separate = large("qwen3_14b_dapo_h200"), Placement(ranks=4, staleness=1)
    overrides = overrides_between(recipe, placement_values(recipe, separate))
    assert "algorithm.importance_sampling=tis" in overrides
    file = RecipeFile(RECIPES / "qwen3_14b_dapo_h200.yaml")
    assert file.refusal(overrides) is None
    without = [text for text in overrides if "importance" not in text]
    assert "nothing corrects for it" in str(file.refusal(without))
    # A choice of the user stays.
    chosen = large("qwen3_14b_dapo_h200", "algorithm.importance_sampling=icepop")
    assert "algorithm.importance_sampling" not in placement_values(chosen, separate)


def test_only_the_choice_of_whole_experts_changes_in_fields_of_vllm(large: Callable[..., Recipe]) -> None:
    own = ("rollout.vllm.enforce_eager=true", "rollout.vllm.enable_expert_parallel=true")
    recipe = large("qwen3_30b_a3b_gspo", *own)
    engines = Candidates(recipe, _search(recipe).shape, Counter()).list_engines(recipe)
    assert any(engine.ep and engine.tp > 1 for engine in engines)
    assert overrides_between(recipe, {"rollout.vllm": vllm_with(recipe, True)}) == ()
    without = overrides_between(recipe, {"rollout.vllm": vllm_with(recipe, False)})
    assert without == ("~rollout.vllm.enable_expert_parallel",)
    other = load(RECIPES / "qwen3_30b_a3b_gspo.yaml", (*own, *without))
    assert other.rollout.vllm["enforce_eager"] and "enable_expert_parallel" not in other.rollout.vllm


def _is_sound(name: str, overrides: tuple[str, ...]) -> bool:
    """Whether a recipe with the overrides of a found layout passes its checks and fits."""
    recipe = load(RECIPES / f"{name}.yaml", overrides)
    parallel = check_plan(recipe)[1]
    assert [*find_length_faults(recipe), *find_batch_faults(recipe, parallel.dp)] == []
    return bool(verdict_of(recipe, parallel, table_of(recipe, parallel)).fits)


@pytest.mark.parametrize(
    "name",
    [
        "qwen3_14b_dapo_h200",
        "qwen3_32b_grpo",
        pytest.param("qwen3_30b_a3b_gspo", marks=pytest.mark.long),
        pytest.param("qwen3_235b_a22b_gspo", marks=pytest.mark.long),
    ],
)
def test_found_layouts_can_be_pasted_and_fit(large: Callable[..., Recipe], name: str) -> None:
    recipe = large(name)
    result = _search(recipe).search(5)
    steps = [found.seconds.step for found in result.layouts]
    assert len(steps) == 5 and steps == sorted(steps) and result.is_complete
    # The recipe has one of these layouts: the first, or a simpler one that is hardly slower.
    sizes, engine = parallel_of(recipe), recipe.rollout.tp
    (own,) = [
        found
        for found in result.layouts
        if all(getattr(sizes, axis) == size for axis, size in found.trainer.by_axis.items())
        and found.engine.tp == engine
    ]
    assert own.seconds.step <= 1.01 * steps[0]
    assert all(_is_sound(name, found.overrides) for found in result.layouts)
    assert len({(found.trainer, found.engine, found.placement) for found in result.layouts}) == 5


def test_the_ranking_is_that_of_all_combinations(large: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = large("qwen3_14b_dapo_h200", "cluster.ranks_per_node=4", "rollout.sampling.max_new_tokens=2048")
    search = _search(recipe)
    quick = search.search(4)
    # Every combination is planned: no bound on time ends the search, and no bound on memory drops a row.
    monkeypatch.setattr(module, "MOST_CHECKED", 10**9)
    monkeypatch.setattr(LayoutSearch, "_is_update_overfull", lambda *_: False)
    monkeypatch.setattr(
        LayoutSearch, "_is_reshard_overfull", lambda self, at, engines, offloads: np.zeros((1, 1, 1), bool)
    )
    whole = search.search(10**9)
    assert quick.is_complete and len(quick.layouts) == 4 and whole.num_planned > 2 * quick.num_planned
    assert [found.overrides for found in quick.layouts] == [found.overrides for found in whole.layouts[:4]]


def test_separate_engines_are_searched_with_their_staleness(large: Callable[..., Recipe]) -> None:
    # With few samples the longest completion decides, and more GPUs would not make it shorter.
    recipe = large("qwen3_14b_dapo_h200", "cluster.nodes=4", "train.prompts_per_step=32")
    result = _search(recipe, 1).search()
    separate = [found for found in result.layouts if found.placement.ranks]
    assert result.layouts[0] in separate and all(found.seconds.is_concurrent for found in separate)
    found = separate[0]
    assert f"rollout.ranks={found.placement.ranks}" in found.overrides
    assert "rollout.placement=separate" in found.overrides and "rollout.max_staleness=1" in found.overrides
    assert found.seconds.step < found.seconds.rollout + found.seconds.train + found.seconds.logprobs


def test_refused_choices_are_counted_by_the_recipes_rules(large: Callable[..., Recipe]) -> None:
    recipe = large("qwen3_14b_dapo_h200")
    refused: Counter[str] = Counter()
    candidates = Candidates(recipe, _search(recipe).shape, refused)
    sizes = candidates.list_trainers(recipe)
    # 40 heads and 8 ranks: every tensor-parallel size divides them, and no size exceeds the node.
    assert {at.tp for at in sizes} == {1, 2, 4, 8}
    assert all(at.tp * at.pp * at.cp * at.dp == 8 and at.ep == at.etp == 1 for at in sizes)
    assert refused["trainer.vpp = N: needs trainer.pp > N, which is N"] > 0


def test_no_layout_fits_a_model_too_large_for_its_gpus(large: Callable[..., Recipe]) -> None:
    recipe = large("qwen3_235b_a22b_gspo", "cluster.nodes=1", "trainer.cp=1", "trainer.tp=1", "trainer.ep=1")
    result = _search(recipe).search()
    assert result.layouts == ()
    assert any(reason.startswith("memory:") for reason in result.refused)


def test_a_recipe_without_known_gpus_is_refused(large: Callable[..., Recipe]) -> None:
    with pytest.raises(ConfigError, match=r"--search needs the kind of the run's GPUs; set cluster.gpu_memory_gib"):
        _search(large("qwen3_14b_dapo_h200", "cluster.gpu_memory_gib=100"))
    with pytest.raises(ConfigError, match="loop = sft: --search ranks layouts of the loop rl only"):
        make_layout_search(large("qwen3_8b_sft"), log_normal(mean=10, limit=100, prompt_tokens=1.0))
    with pytest.raises(ConfigError, match=r"lora\.rank = 32: --search ranks training of all weights only"):
        _search(large("qwen3_8b_lora", "lora.rank=32"))
    with pytest.raises(ConfigError, match=r"trainer\.fp8 = blockwise: --search ranks training in bfloat16 only"):
        _search(large("qwen3_14b_dapo_h200", "trainer.fp8=blockwise"))


SEPARATE = (
    "rollout.placement=separate", "rollout.ranks=4", "rollout.max_staleness=1", "algorithm.importance_sampling=tis",
)  # fmt: skip


def test_engines_of_another_kind_have_its_speed(large: Callable[..., Recipe]) -> None:
    group = ("cluster.groups.engines.nodes=1", "cluster.groups.engines.ranks_per_node=8")
    given = (*SEPARATE[:1], *SEPARATE[2:], *group)
    kinds = [
        _search(large("qwen3_14b_dapo_h200", *given, f"cluster.groups.engines.gpu_memory_gib={kind}"))
        for kind in ("h200", "h100")
    ]
    fast, slow = (
        search.costs.rollout_seconds(Placement(ranks=8, staleness=1), EngineSizes(1, False), 1e6) for search in kinds
    )
    assert fast.seconds < slow.seconds and kinds[1].costs.speeds == GPUS["h200"]
    with pytest.raises(ConfigError, match=r"cluster\.groups\.engines\.gpu_memory_gib = 80: --search needs the kind"):
        _search(large("qwen3_14b_dapo_h200", *given, "cluster.groups.engines.gpu_memory_gib=80"))


def test_a_reward_model_takes_a_forward_pass(large: Callable[..., Recipe]) -> None:
    shortest = []
    for own in ((), ("reward.model=models/Qwen3-8B",)):
        search = _search(large("qwen3_14b_dapo_h200", "train.updates_per_step=4", *own))
        group = search._make_combinations(
            Candidates(search.recipe, search.shape, Counter()), Placement(ranks=0, staleness=0)
        )
        assert group is not None and search.costs.workload.scoring_passes == 0.75
        # Rows of a trainer come with the shortest first.
        first = {at: numbers[0] for at, numbers in group.option_numbers_by_trainer.items()}
        shortest.append(
            {at: (group.scoring_seconds[number], group.offload_seconds[number, 0]) for at, number in first.items()}
        )
    plain, scored = shortest
    assert set(plain) & set(scored)
    for at in set(plain) & set(scored):
        # The reward model has 8 of the policy's 14 billion parameters, and no output layer.
        assert 0.4 < (scored[at][0] - plain[at][0]) / (plain[at][0] / 0.75) < 0.7
        # It waits in host memory.
        assert scored[at][1] > plain[at][1] == 0


def test_engines_ahead_sample_no_surplus(large: Callable[..., Recipe]) -> None:
    recipe = large("qwen3_14b_dapo_h200", "algorithm.dynamic_sampling=[0,1]")
    one, two = (_search(with_field_values(recipe, {"algorithm.oversampling": surplus})) for surplus in (1.0, 2.0))
    for placement, is_longer in (
        (Placement(ranks=0, staleness=0), True),
        (Placement(ranks=4, staleness=0), True),
        (Placement(ranks=4, staleness=1), False),
    ):
        few, many = (
            search.costs.rollout_seconds(placement, EngineSizes(1, False), 1e6).seconds for search in (one, two)
        )
        assert (many > few) == is_longer


def test_the_command_prints_overrides_and_seconds(large: Callable[..., Recipe]) -> None:
    large("qwen3_14b_dapo_h200")
    arguments = ["plan", str(RECIPES / "qwen3_14b_dapo_h200.yaml"), "--search", "--most", "3", "--mean-tokens", "3000"]
    printed = CliRunner().invoke(app, arguments)
    assert printed.exit_code == 0, printed.output
    assert "1: " in printed.output and "trainer." in printed.output and "median error" in printed.output
    answer = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output)
    assert len(answer["layouts"]) == 3 and answer["lengths"].startswith("log-normal, mean 3,000")
    assert answer["layouts"][0]["seconds"]["step"] <= answer["layouts"][1]["seconds"]["step"]
    alone = CliRunner().invoke(app, ["plan", arguments[1], "--most", "3", "--mean-tokens", "3000"])
    assert "--most, --mean-tokens: does nothing without --search" in str(alone.exception)
    refused = CliRunner().invoke(app, [*arguments[:-1], "99999"])
    assert isinstance(refused.exception, ConfigError) and "--mean-tokens 99999" in str(refused.exception)
