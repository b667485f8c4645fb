"""The default of rollout.kv_cache_gib: what the planner finds left of a GPU, less a margin."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from megarl.cli import main
from megarl.config import Recipe
from megarl.config.recipe import load, to_yaml
from megarl.planner.defaults import with_memory_defaults
from megarl.planner.memory.devices import GPU
from megarl.planner.memory.memory_table import CacheCapacity
from megarl.planner.memory.phases import memory_table
from megarl.planner.predictions import models_of, table_of
from megarl.planner.search import with_field_values
from megarl.planner.sizes import parallel_of
from megarl.preflight import list_resource_warnings, warn_of_small_cache
from megarl.preflight.memory.memory_fit import memory_faults
from tests.planner.memory.conftest import FOUR_WAY, RECIPES

GIB = 2**30
Make = Callable[..., Recipe]


@pytest.fixture
def make(large: Make, tmp_path: Path) -> Make:
    """`make("cluster.gpu_memory_gib=h200", ...)` is a recipe of a 14B model that leaves the cache out."""
    sections = yaml.safe_load((RECIPES / "qwen3_14b_dapo_h200.yaml").read_text())
    for field, value in FOUR_WAY.items():
        section, _, name = field.partition(".")
        sections[section][name] = value
    del sections["rollout"]["kv_cache_gib"], sections["cluster"]["gpu_memory_gib"]
    (tmp_path / "without.yaml").write_text(yaml.safe_dump(sections))
    return lambda *overrides: load(tmp_path / "without.yaml", overrides)


def sampling_gib(recipe: Recipe) -> float:
    """GiB that the fullest phase of an engine takes."""
    table = memory_table(recipe, models_of(recipe, parallel_of(recipe)), GPU)
    return max(phase.device_bytes for phase in table.phases if phase.use("KV cache").device_bytes) / GIB


SEPARATE = ("rollout.placement=separate", "trainer.offload=[]")


@pytest.mark.parametrize(
    ("overrides", "gib"),
    [
        (("cluster.gpu_memory_gib=h200",), 139.8),
        (("cluster.gpu_memory_gib=100", "trainer.offload=[]"), 100.0),
        (("cluster.gpu_memory_gib=h200", "rollout.kv_cache_dtype=fp8", "rollout.quantization=fp8"), 139.8),
        (("cluster.gpu_memory_gib=h200", "rollout.ranks=4", *SEPARATE), 139.8),
        (
            (
                "cluster.gpu_memory_gib=h200",
                "cluster.groups.engines={ranks_per_node: 4, gpu_memory_gib: h100}",
                *SEPARATE,
            ),
            79.1,
        ),
    ],
)
def test_the_cache_takes_all_but_8_gib(make: Make, overrides: tuple[str, ...], gib: float) -> None:
    recipe = with_memory_defaults(make(*overrides))
    assert gib - 8.2 < sampling_gib(recipe) <= gib - 8.0
    more = with_field_values(recipe, {"rollout.kv_cache_gib": recipe.rollout.kv_cache_gib + 0.2})
    assert sampling_gib(more) > gib - 8.0


def test_what_is_given_stays_and_so_does_the_default_of_a_cpu(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.planner.gpus_of_run.runs_on_cpu", lambda: True)
    for overrides in (
        ("cluster.gpu_memory_gib=h200", "rollout.kv_cache_gib=1.0"),
        ("cluster.gpu_memory_gib=h200", "rollout.gpu_memory_utilization=0.5"),
        ("cluster.gpu_memory_gib=h200", "model.path=absent"),
        ("cluster.gpu_memory_gib=h200", "trainer.tp=3"),
        ("cluster.ranks_per_node=8",),
    ):
        assert with_memory_defaults(recipe := make(*overrides)).rollout == recipe.rollout
    named = make("cluster.gpu_memory_gib=h200")
    assert with_memory_defaults(named, is_start=True) is named and named.rollout.kv_cache_gib == 1.0
    # A machine with GPUs: as without a name, by what they have.
    monkeypatch.setattr("megarl.planner.gpus_of_run.runs_on_cpu", lambda: False)
    monkeypatch.setattr("megarl.planner.gpus_of_run.installed_gpu_gib", lambda: 139.8)
    started = with_memory_defaults(make("cluster.launcher=local"), is_start=True)
    assert started.rollout.kv_cache_gib == with_memory_defaults(named).rollout.kv_cache_gib > 100


def test_rows_without_gradients_fill_the_memory_of_an_update(make: Make) -> None:
    given = ("cluster.gpu_memory_gib=h200", "trainer.recompute=full")
    recipe = with_memory_defaults(make(*given))
    most, rows = recipe.trainer.max_tokens_per_forward, recipe.trainer.max_tokens_per_microbatch
    assert most is not None and 2 * rows <= most <= 8 * rows

    def taken(tokens: int) -> dict[str, int]:
        longer = with_field_values(recipe, {"trainer.max_tokens_per_forward": tokens})
        table = memory_table(longer, models_of(longer, parallel_of(longer)), GPU)
        return {phase.name: phase.device_bytes for phase in table.phases}

    assert taken(most)["logprobs"] <= taken(most)["train"] == taken(rows)["train"]
    assert taken(rows)["logprobs"] < taken(most)["logprobs"]
    # The last length within eight rows, or the last within the memory.
    assert most == 8 * rows or taken(most + 1024)["logprobs"] > taken(most)["train"]
    # Fewer rows would leave pipeline stages idle; supervised training has no such pass in its plan.
    assert with_memory_defaults(make(*given, "trainer.pp=2")).trainer.max_tokens_per_forward is None
    own = make(*given, f"trainer.max_tokens_per_forward={rows}")
    assert with_memory_defaults(own).trainer.max_tokens_per_forward == rows


def test_a_resumed_run_keeps_the_cache_that_it_began_with(make: Make, tmp_path: Path) -> None:
    began = with_memory_defaults(make("cluster.gpu_memory_gib=h200"))
    (tmp_path / "config.yaml").write_text(to_yaml(began))
    resumed = load(tmp_path / "config.yaml", ["cluster.gpu_memory_gib=b200"])
    assert with_memory_defaults(resumed).rollout.kv_cache_gib == began.rollout.kv_cache_gib
    assert with_memory_defaults(make("cluster.gpu_memory_gib=h200")) == began


def test_where_nothing_is_left_one_longest_request_decides(make: Make) -> None:
    """Then a start is refused, with a remedy under which the default is larger."""
    given = ("cluster.gpu_memory_gib=60", "trainer.offload=[]", "trainer.max_tokens_per_microbatch=18432")
    recipe = with_memory_defaults(make(*given, "trainer.recompute=full"))
    cache = table_of(recipe, parallel_of(recipe)).cache
    assert cache is not None and cache.longest_requests == 1
    (text,) = memory_faults(recipe, parallel_of(recipe), is_start=False)
    assert "rollout takes " in text and "what fits: trainer.offload=[gradients]" in text
    offloaded = with_memory_defaults(make(*given, "trainer.recompute=full", "trainer.offload=[optimizer,gradients]"))
    assert offloaded.rollout.kv_cache_gib > recipe.rollout.kv_cache_gib
    assert list(memory_faults(offloaded, parallel_of(offloaded), is_start=False)) == []


def test_an_evaluation_has_the_gpu_for_its_engines_alone(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """14.8e9 bytes of weights a rank and 7e9 of libraries, of 79.1 GiB: the trainer's states would leave nothing."""
    given = ("cluster.gpu_memory_gib=h100", "cluster.ranks_per_node=2", "trainer.tp=2", "trainer.offload=[]")
    trained, alone = (
        with_memory_defaults(make(*given), is_trained=flag).rollout.kv_cache_gib for flag in (True, False)
    )
    assert trained < 2 and 79.1 - 8 - alone == pytest.approx((14.8e9 + 7e9) / GIB, abs=1.0)


def test_a_cache_for_few_of_the_requests_under_way_is_a_warning(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """80 KiB a token and rank: 2 GiB are 26,214 tokens, of 9,216 each two requests of 256."""
    few = make("cluster.gpu_memory_gib=h200", "rollout.kv_cache_gib=2", "cluster.launcher=slurm")
    found = [text for text in list_resource_warnings(few, parallel_of(few)) if "KV cache" in text]
    assert (
        len(found) == 1 and "holds only 2 of 256 concurrent requests" in found[0] and "rollout.kv_cache_gib" in found[0]
    )
    own = with_memory_defaults(make("cluster.gpu_memory_gib=h200", "cluster.launcher=slurm"))
    assert not [text for text in list_resource_warnings(own, parallel_of(own)) if "KV cache" in text]

    for override, is_warned in ((["rollout.kv_cache_gib=2"], True), ([], False)):
        with pytest.raises(SystemExit) as caught:
            main(["plan", str(tmp_path / "without.yaml"), "cluster.gpu_memory_gib=h200", *override])
        text = capsys.readouterr().out
        assert caught.value.code == 0
        assert ("warning: an engine's KV cache" in text) is is_warned
        assert (f"rollout.kv_cache_gib = {own.rollout.kv_cache_gib:g} by default" in text) is not is_warned


def test_unknown_gpus_are_a_warning_that_names_their_field(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver on Ray's head node cannot know the other nodes' GPUs. A Slurm job derives the size on its node."""
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    monkeypatch.setattr("megarl.planner.gpus_of_run.runs_on_cpu", lambda: False)

    def found(*overrides: str) -> list[str]:
        recipe = with_memory_defaults(make(*overrides))
        parallel = parallel_of(recipe)
        return list(warn_of_small_cache(recipe, parallel, table_of(recipe, parallel)))

    (text,) = found("cluster.launcher=ray")
    assert text.startswith("rollout.kv_cache_gib = 1: ") and "set cluster.gpu_memory_gib" in text
    assert found("cluster.launcher=ray", "cluster.gpu_memory_gib=h200") == []
    assert found("cluster.launcher=ray", "rollout.kv_cache_gib=100") == []
    assert not any("gpu_memory_gib" in text for text in found("cluster.launcher=slurm"))


def test_the_default_is_a_remedy_only_if_it_is_larger(make: Make) -> None:
    def remedy(*overrides: str) -> str:
        recipe = with_memory_defaults(make("cluster.launcher=slurm", *overrides))
        parallel = parallel_of(recipe)
        (text,) = warn_of_small_cache(recipe, parallel, table_of(recipe, parallel))
        return text.partition("the others wait; ")[2]

    own = with_memory_defaults(make("cluster.gpu_memory_gib=h200")).rollout.kv_cache_gib
    assert f"(left out: {own:g} GiB" in remedy("cluster.gpu_memory_gib=h200", "rollout.kv_cache_gib=2")
    derived = remedy("cluster.gpu_memory_gib=60", "trainer.offload=[]", "trainer.recompute=full")
    assert derived.startswith("raise rollout.kv_cache_gib or ")
    share = remedy("cluster.gpu_memory_gib=h200", "rollout.gpu_memory_utilization=0.16")
    assert share.startswith("raise rollout.gpu_memory_utilization ")


def test_a_quarter_of_the_requests_is_enough() -> None:
    room = CacheCapacity(tokens=16_000, longest=1000, max_concurrent_requests=256, decoding_requests=128)
    assert room.mean_requests == 32 and room.warning is None
    assert (
        CacheCapacity(tokens=15_499, longest=1000, max_concurrent_requests=256, decoding_requests=128).warning
        is not None
    )


def test_a_recipe_in_full_has_the_derived_cache(make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = with_memory_defaults(make("cluster.gpu_memory_gib=h200")).rollout.kv_cache_gib
    with pytest.raises(SystemExit):
        main(["show-config", str(tmp_path / "without.yaml"), "cluster.gpu_memory_gib=h200"])
    assert yaml.safe_load(capsys.readouterr().out)["rollout"]["kv_cache_gib"] == expected > 100
