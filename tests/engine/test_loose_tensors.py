"""No family's model has a tensor that is neither parameter nor buffer: a sleeping engine would lose it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megarl.config import RolloutConfig
from megarl.platform import compile_cache, device
from tests.rank_pool import RankPool
from tools.make_tiny_model import FAMILIES, WITH_DELTA_NETS


def built_on_meta(folders: dict[str, str]) -> dict[str, tuple[list[str], list[str], str]]:
    """Loose tensors of each model as vLLM builds it and once it is loaded, and the notice about the first.

    The device is `meta`, as CUDA is on a GPU: what a constructor makes without naming a device is there.
    """
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers import rotary_embedding
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading

    from megarl.engine.sleep import sleep_copies_notice, unrestored_tensors
    from megarl.engine.vllm_arguments import engine_arguments, engine_config

    found = {}
    config = RolloutConfig(kv_cache_gib=0.01)
    for family, folder in folders.items():
        arguments = engine_arguments(folder, config, max_model_len=64, dtype="bfloat16", seed=0)
        vllm_config = engine_config(arguments, config)
        with set_current_vllm_config(vllm_config):
            parallel_state.init_distributed_environment(1, 0, "env://", 0, "gloo")
            parallel_state.ensure_model_parallel_initialized(1, 1)
            with pytest.MonkeyPatch.context() as patch, torch.device("meta"):
                # vLLM keeps these for the engines that the process builds later.
                patch.setattr(rotary_embedding, "_ROPE_DICT", {})
                model = initialize_model(vllm_config)
            parallel_state.destroy_model_parallel()
        built = unrestored_tensors(model)
        notice = sleep_copies_notice(model, built)
        process_weights_after_loading(model, vllm_config.model_config, torch.device("meta"))
        found[family] = built, unrestored_tensors(model), notice
    return found


def test_no_family_has_loose_tensors(ranks: RankPool, tiny_model: Callable[..., Path]) -> None:
    """Attention makes scales where the model is built; once it is loaded they are on the host."""
    folders = {
        family: str(tiny_model(num_layers=4 if family in WITH_DELTA_NETS else 2, family=family)) for family in FAMILIES
    }
    [found] = ranks.run(built_on_meta, folders, world_size=1)
    assert found.keys() == FAMILIES.keys()
    for built, loaded, notice in found.values():
        # Latent attention has one more module around it.
        names = {name.replace("mla_attn.mla_attn", "attn") for name in built}
        assert any(name.endswith(".attn._k_scale_cpu") for name in names) and loaded == []
        assert built[0] in notice and "GiB a rank" in notice


def first_error_without_a_folder() -> str:
    """Why an engine cannot be built on a GPU of a node whose disk is missing; before it looks for its model."""
    from megarl.engine.engine import RolloutEngine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "current", lambda: torch.device("cuda", 4))
        patch.setattr(compile_cache, "_NODE_LOCAL", Path("/proc/nowhere"))
        patch.delenv("VLLM_CACHE_ROOT", raising=False)
        try:
            RolloutEngine("", RolloutConfig(), max_model_len=1, dtype="float32", seed=0)
        except FileNotFoundError as error:
            return str(error)
    return ""


def test_an_engine_sets_the_folder_of_its_device_first(ranks: RankPool) -> None:
    [error] = ranks.run(first_error_without_a_folder, world_size=1)
    assert "/proc/nowhere" in error
