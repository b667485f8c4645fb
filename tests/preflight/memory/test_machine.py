"""The machine must have the memory, ranks and folder of a recipe."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from megarl.config import Recipe
from megarl.families.shape import read_model_shape
from megarl.planner.gpus_of_run import gpu_gib
from megarl.platform.cuda_extensions import runs_on_cpu
from megarl.platform.visible_gpus import Gpu
from megarl.preflight import check, list_resource_warnings
from megarl.preflight.libraries.number_formats import check_quantisation, device_faults, format_faults
from megarl.preflight.memory import resources
from megarl.types import ConfigError


def test_a_cache_that_holds_no_sequence_says_what_it_needs(recipe: Callable[..., Recipe]) -> None:
    """Two of 6 layers * 2 heads * 32 channels * 2 bytes are 1,536 a token; 64 tokens and vLLM's own block."""
    small = {"rollout": {"kv_cache_gib": 0.00005, "sampling": {"max_new_tokens": 24}}}
    with pytest.raises(ConfigError) as caught:
        check(recipe(**small))
    told = str(caught.value)
    assert "rollout.kv_cache_gib = 5e-05: holds" in told and "one sequence of" in told and "has 64;" in told
    needed = re.search(r"use at least ([0-9.e-]+),", told)
    assert needed is not None
    block = 32 if runs_on_cpu() else 16
    assert float(needed[1]) == pytest.approx((64 + block) * 2 * 6 * 2 * 32 * 2 / 2**30, rel=0.02)
    small["rollout"]["kv_cache_gib"] = float(needed[1])
    check(recipe(**small))


@pytest.mark.parametrize("launcher", ["slurm", "local"])
def test_a_job_for_other_machines_is_checked_on_this_one(
    recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch, launcher: str
) -> None:
    monkeypatch.delenv("SLURM_JOB_NUM_NODES", raising=False)
    made = recipe(cluster={"launcher": launcher, "nodes": 2, "ranks_per_node": 2})
    parallel = check(made, is_start=False)
    assert parallel.world_size == 4
    with pytest.raises(ConfigError, match="megarl slurm submit"):
        check(made)
    warnings = list(list_resource_warnings(made, parallel))
    assert (warnings == []) if launcher == "slurm" else ("megarl slurm submit runs it" in warnings[0])


def test_a_runs_folder_that_cannot_be_made(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"runs_folder = .*file/runs: cannot write in .*file "):
        check(recipe(runs_folder=str(tmp_path / "file/runs")))
    check(recipe(runs_folder=str(tmp_path / "new/runs")))
    assert not (tmp_path / "new").exists() and [path.name for path in tmp_path.iterdir()].count("file") == 1


@pytest.mark.skipif(not runs_on_cpu(), reason="measured on CPUs")
def test_a_model_split_without_need_is_a_warning(
    recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = {"ranks_per_node": 2}
    whole, split = recipe(cluster=ranks), recipe(cluster=ranks, trainer={"tp": 2})
    assert [*resources.warn_of_slower_layout(whole)] == []
    [text] = resources.warn_of_slower_layout(split)
    assert text.startswith("trainer.tp = 2: ") and "set trainer.tp=1 (run" in text
    assert text in [*list_resource_warnings(split, check(split))]
    both = recipe(cluster=ranks, trainer={"tp": 2}, rollout={"tp": 2})
    assert "set trainer.tp=1 rollout.tp=1 (run" in next(resources.warn_of_slower_layout(both))
    monkeypatch.setattr(resources, "machine_bytes", lambda: 1 << 20)
    assert [*resources.warn_of_slower_layout(split)] == []


def test_too_many_ranks_for_this_machine_are_a_warning(recipe: Callable[..., Recipe]) -> None:
    few, many = recipe(), recipe(cluster={"ranks_per_node": 1000}, train={"prompts_per_step": 1000})
    assert list(list_resource_warnings(few, check(few))) == []
    cores, *memory = list_resource_warnings(many, check(many))
    assert cores.startswith("cluster.ranks_per_node = 1000: this machine has ")
    if runs_on_cpu() and os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") < 400 << 30:
        assert "of memory in the phase " in memory[0] and "megarl plan prints what takes it" in memory[0]
        separate = {"cluster": {"ranks_per_node": 1000}, "rollout": {"placement": "separate", "ranks": 500}}
        many = recipe(**separate, train={"prompts_per_step": 1000})
        _, memory = list_resource_warnings(many, check(many))
        assert re.search("of memory in the phase [a-z ]+ and [a-z ]+, but this machine has", memory)


@pytest.mark.skipif(find_spec("fla") is not None, reason="FLA's kernels are installed")
def test_delta_nets_without_kernels_or_prefix_cache_are_warnings(
    recipe: Callable[..., Recipe], tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {"path": str(tiny_model(family="qwen3_next", num_kv_heads=2, hidden_size=64, head_dim=32, num_layers=4))}
    hybrid = recipe(model=model, rollout={"kv_cache_gib": 0.5})
    assert [text for text in list_resource_warnings(hybrid, check(hybrid)) if "delta-nets" in text] == []
    monkeypatch.setattr(resources, "runs_on_cpu", lambda: False)
    warnings = [text for text in list_resource_warnings(hybrid, check(hybrid)) if "delta-nets" in text]
    assert "pip install flash-linear-attention" in warnings[0] and "rollout.vllm.enable_prefix_caching" in warnings[1]
    chosen = recipe(model=model, rollout={"kv_cache_gib": 0.5, "vllm": {"enable_prefix_caching": False}})
    assert len([text for text in list_resource_warnings(chosen, check(chosen)) if "delta-nets" in text]) == 1
    plain = recipe()
    assert [text for text in list_resource_warnings(plain, check(plain)) if "delta-nets" in text] == []


def test_a_recipe_that_does_not_fit_its_gpus_is_refused(recipe: Callable[..., Recipe]) -> None:
    """CUDA takes 2.5 GiB, graphs of six layers 0.1 to 0.2; the KV cache 1 GiB, of which half fits."""
    check(recipe(cluster={"gpu_memory_gib": 6.0}))
    with pytest.raises(ConfigError) as caught:
        check(recipe(cluster={"gpu_memory_gib": 3.2}))
    title, line = str(caught.value).split("\n")
    assert title == "recipe small: 1 error"
    assert line.strip().startswith("cluster.gpu_memory_gib = 3.2") and "rollout takes " in line
    fits = re.search(r"what fits: rollout\.kv_cache_gib=([0-9.]+)", line)
    assert fits is not None and 0 < float(fits[1]) < 1
    check(recipe(cluster={"gpu_memory_gib": 3.2}, rollout={"kv_cache_gib": float(fits[1])}))


@pytest.mark.skipif(not runs_on_cpu(), reason="vLLM is the build for GPUs")
def test_a_cpu_has_no_memory_to_take_a_share_of(recipe: Callable[..., Recipe]) -> None:
    with pytest.raises(
        ConfigError, match=r"gpu_memory_utilization = 0.5: the ranks run on CPUs.*set rollout.kv_cache_gib"
    ):
        check(recipe(rollout={"gpu_memory_utilization": 0.5}))
    check(recipe(rollout={"gpu_memory_utilization": 0.5}, cluster={"gpu_memory_gib": "h100"}))


@pytest.mark.skipif(not runs_on_cpu(), reason="vLLM is the build for GPUs")
def test_a_cpu_begins_no_step_ahead(recipe: Callable[..., Recipe]) -> None:
    with pytest.raises(
        ConfigError,
        match=r"rollout.async_scheduling = True: vLLM has no asynchronous scheduling on a CPU; leave it out",
    ):
        check(recipe(rollout={"async_scheduling": True}))
    check(recipe(rollout={"async_scheduling": False}))


@pytest.mark.parametrize(
    ("launcher", "node", "is_cpu", "gib"),
    [
        pytest.param("local", None, False, 8.0, id="this machine"),
        pytest.param("local", None, True, None, id="environment for CPUs"),
        pytest.param("slurm", None, False, None, id="login node"),
        pytest.param("slurm", "n1", False, 8.0, id="node of the job"),
        pytest.param("ray", None, False, None, id="Ray"),
    ],
)
def test_a_gpu_counts_where_the_run_is(
    recipe: Callable[..., Recipe],
    monkeypatch: pytest.MonkeyPatch,
    launcher: str,
    node: str | None,
    is_cpu: bool,
    gib: float | None,
) -> None:
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    if node is not None:
        monkeypatch.setenv("SLURMD_NODENAME", node)
    monkeypatch.setattr("megarl.planner.gpus_of_run.installed_gpu_gib", lambda: 8.0)
    monkeypatch.setattr("megarl.planner.gpus_of_run.runs_on_cpu", lambda: is_cpu)
    assert gpu_gib(recipe(cluster={"launcher": launcher})) == gib
    assert gpu_gib(recipe(cluster={"launcher": launcher, "gpu_memory_gib": 6.0})) == 6.0


MXFP8 = {"trainer": {"megatron": {"fp8": "e4m3", "fp8_recipe": "mxfp8"}}}


@pytest.mark.parametrize(("kind", "needed"), [("h100", "10.0 (Blackwell)"), ("h200", "10.0 (Blackwell)"), ("b200", "")])
def test_the_generation_is_that_of_the_named_gpu(recipe: Callable[..., Recipe], kind: str, needed: str) -> None:
    """Without a GPU here: Hopper has no MXFP8."""
    made = recipe(cluster={"gpu_memory_gib": kind}, **MXFP8)
    if not needed:
        check(made, is_start=False)
        return
    with pytest.raises(ConfigError) as caught:
        check(made, is_start=False)
    title, line = str(caught.value).split("\n")
    assert title == "recipe small: 1 error" and f"cluster.gpu_memory_gib = {kind} has compute capability 9.0" in line
    assert f"it needs {needed}" in line and "remove trainer.megatron.fp8 and fp8_recipe" in line


@pytest.mark.skipif(not runs_on_cpu(), reason="vLLM is the build for GPUs")
def test_fp8_is_planned_for_named_gpus_and_started_on_none(recipe: Callable[..., Recipe]) -> None:
    made = recipe(cluster={"gpu_memory_gib": "b200"}, **MXFP8)
    with pytest.raises(ConfigError, match=r"trainer.megatron.fp8 = e4m3: needs GPUs and Transformer Engine, which"):
        check(made)
    with pytest.raises(ConfigError, match=r"trainer.megatron.fp8 = e4m3: needs GPUs and Transformer Engine, which"):
        check(recipe(**MXFP8), is_start=False)


@pytest.mark.parametrize(
    ("chosen", "is_cpu", "environment"), [("cpu", False, "setup.sh cpu"), ("cuda", True, "setup.sh gpu")]
)
def test_an_environment_of_the_other_device_is_refused(
    recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch, chosen: str, is_cpu: bool, environment: str
) -> None:
    monkeypatch.setattr("megarl.preflight.libraries.number_formats.runs_on_cpu", lambda: is_cpu)
    made = recipe(cluster={"device": chosen})
    [fault] = device_faults(made, is_start=True)
    assert fault.startswith(f"cluster.device = {chosen}: ") and environment in fault
    assert [*device_faults(made, is_start=False)] == []
    assert [*device_faults(recipe(cluster={"device": chosen, "launcher": "ray"}), is_start=True)] == []


def test_a_driver_that_is_too_old_is_refused_before_a_start(
    recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megarl.platform.chosen_device.installed_gpus", lambda: (Gpu("NVIDIA H100", (9, 0)),))
    monkeypatch.setattr("megarl.platform.chosen_device.library_versions", lambda: {"CUDA": "13.0"})
    monkeypatch.setattr("megarl.platform.chosen_device.driver_version", lambda: "570.86.15")
    monkeypatch.setattr("megarl.platform.chosen_device.supported_cuda", lambda: None)
    with pytest.raises(ConfigError, match=r"cluster.device = auto: .*driver 570.86.15 is too old.* 580"):
        check(recipe())
    check(recipe(cluster={"device": "cpu"}))


@pytest.mark.parametrize(
    ("sizes", "rollout", "expected"),
    [
        pytest.param(
            {"intermediate_size": 448}, {"tp": 1}, ["intermediate_size = 448 over 1 ranks gives 448"], id="whole"
        ),
        pytest.param(
            {"intermediate_size": 1216}, {"tp": 2}, ["intermediate_size = 1216 over 2 ranks gives 608"], id="split"
        ),
        pytest.param({"intermediate_size": 512}, {"tp": 2}, [], id="whole groups"),
        pytest.param({"intermediate_size": 448}, {"tp": 1, "quantization": "fp8_per_channel"}, [], id="by channel"),
    ],
)
def test_fp8_needs_whole_groups_of_columns_on_a_gpu(
    recipe: Callable[..., Recipe],
    tiny_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    sizes: dict[str, int],
    rollout: dict[str, Any],
    expected: list[str],
) -> None:
    monkeypatch.setattr("megarl.preflight.libraries.number_formats.runs_on_cpu", lambda: False)
    shape = read_model_shape(tiny_model(hidden_size=256, num_heads=4, head_dim=64, **sizes))
    given = recipe(model={"dtype": "bfloat16"}, rollout={"quantization": "fp8"} | rollout)
    found = [*check_quantisation(given, shape)]
    assert len(found) == len(expected) and all(part in fault for part, fault in zip(expected, found, strict=True))


@pytest.mark.parametrize(("launcher", "is_told"), [("local", True), ("slurm", False)])
def test_the_generation_is_that_of_the_gpus_that_run_it(
    recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch, launcher: str, is_told: bool
) -> None:
    """The GPUs of a login node are not queried."""
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    monkeypatch.setattr("megarl.planner.gpus_of_run.runs_on_cpu", lambda: False)
    monkeypatch.setattr(
        "megarl.preflight.libraries.number_formats.installed_gpus", lambda: (Gpu("NVIDIA A10", (8, 6)),) * 2
    )
    given = {"cluster": {"launcher": launcher}, "rollout": {"quantization": "fp8"}}
    found = [*format_faults(recipe(**given), is_start=True)]
    assert len(found) == is_told
    # Nothing is started, or no trainer: then it is not these GPUs, or not this field, that counts.
    named = recipe(cluster={"launcher": launcher, "gpu_memory_gib": "h100"}, rollout={"quantization": "fp8"})
    assert [*format_faults(named, is_start=False)] == []
    assert [*format_faults(recipe(**MXFP8), is_start=True, is_trained=False)] == []
    # The engines' nodes are of their own kind.
    kinds = {"launcher": launcher, "groups": {"engines": {"gpu_memory_gib": "h100"}}}
    named = recipe(cluster=kinds, rollout={"quantization": "fp8", "placement": "separate"})
    assert [*format_faults(named, is_start=True)] == []
    assert not is_told or found[0].startswith("rollout.quantization = fp8: NVIDIA A10 has compute capability 8.6 (Amp")
