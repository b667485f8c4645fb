"""LoRA adapters next to a served model: log-probs of each, the choice by a request's `model`, and unfit folders."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from openai import AsyncOpenAI, NotFoundError
from safetensors.torch import save_file

from megarl.cluster.local import LocalGroup
from megarl.config import RolloutConfig
from megarl.config.rollout import EndpointConfig
from megarl.data.chat import load_tokenizer
from megarl.families.shape import read_model_shape
from megarl.rollout.pool import EnginePool
from megarl.serving import local_model
from megarl.serving.codec import Codec
from megarl.serving.endpoint import Endpoint
from megarl.serving.served_adapters import served_adapter
from megarl.serving.sessions import Limits, Sessions
from megarl.types import ConfigError, DataError, Request, SamplingSettings
from tests.serving.served import ONE

RANKS = {"one": 4, "two": 8}
MODULES = {"one": ["self_attn.q_proj", "self_attn.v_proj"], "two": ["mlp.gate_proj", "mlp.down_proj"]}
PROMPT = np.arange(5, 21, dtype=np.int32)


def make_adapter(folder: Path, model: Path, name: str) -> dict[str, torch.Tensor]:
    """Write a PEFT folder with random matrices. Returns what it adds to each weight: alpha / rank * B A."""
    from transformers import AutoModelForCausalLM

    rank, added, tensors = RANKS[name], {}, {}
    generator = torch.Generator().manual_seed(rank)
    for key, weight in AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict().items():
        if not key.endswith(tuple(f"{module}.weight" for module in MODULES[name])):
            continue
        a, b = (torch.randn(size, generator=generator) * 0.1 for size in ((rank, weight.shape[1]), (len(weight), rank)))
        stem = "base_model.model." + key.removesuffix("weight")
        tensors |= {f"{stem}lora_A.weight": a, f"{stem}lora_B.weight": b}
        added[key] = 12 / rank * b @ a
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    modules = [module.rpartition(".")[2] for module in MODULES[name]]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 12, "target_modules": modules, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return added


def expected_logprobs(model: Path, added: Mapping[str, torch.Tensor], token_ids: np.ndarray) -> np.ndarray:
    """transformers' log-probs of each token but the first, with merged weights."""
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            parameter += added.get(name, 0.0)
        ids = torch.from_numpy(token_ids.astype(np.int64))
        logprobs = whole(ids[None]).logits[0].log_softmax(-1)
    return logprobs[:-1].gather(1, ids[1:, None])[:, 0].numpy()


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.anyio
async def test_each_request_is_answered_by_the_adapter_that_it_names(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = tiny_model(num_layers=2, num_kv_heads=2)
    added = {name: make_adapter(tmp_path / name, model, name) for name in RANKS}
    shape = read_model_shape(model)
    served = dict(served_adapter(f"{name}={tmp_path / name}", shape) for name in RANKS)
    config = RolloutConfig(kv_cache_gib=0.05, max_concurrent_requests=8)
    arguments = {"folder": str(model), "config": config, "context_tokens": 64, "dtype": "float32", "adapters": served}
    group = await LocalGroup(1).start("megarl.serving.local_model:EngineRank", arguments, log_folder=tmp_path)
    pool = EnginePool(group, ONE, max_running=8)
    pool.resume()

    async def sampled(name: str) -> np.ndarray:
        request = Request(f"r{name}", PROMPT, SamplingSettings(16, adapter=name), seed=3)
        done = await pool.generate(request, affinity=name)
        token_ids = np.concatenate([PROMPT, done.token_ids])
        expected = expected_logprobs(model, added.get(name, {}), token_ids)[len(PROMPT) - 1 :]
        assert np.abs(done.rollout_logprobs - expected).max() < 1e-5, name
        return done.rollout_logprobs

    try:
        # All three in the same steps of the engine.
        found = await asyncio.gather(*(sampled(name) for name in ("", *RANKS)))
        assert len({logprobs[0].item() for logprobs in found}) == 3
        codec = Codec(load_tokenizer(model), 64)
        limits = Limits(64, 100, 60.0)
        endpoint = Endpoint(
            Sessions(pool, codec), EndpointConfig(), model="base", sampling=SamplingSettings(64), guests=limits,
            adapters=tuple(served),
        )  # fmt: skip
        await endpoint.start()
        async with AsyncOpenAI(base_url=f"{endpoint.base_url}/v1", api_key="any", max_retries=0) as client:
            assert [one.id for one in (await client.models.list()).data] == ["base", "one", "two"]
            texts = {}
            for name in ("base", "one", "two"):
                asked: Any = dict(prompt=PROMPT.tolist(), max_tokens=16, temperature=0.0)
                answer = await client.completions.create(model=name, **asked)
                assert answer.model == name
                texts[name] = answer.choices[0].text
            assert len(set(texts.values())) == 3
            with pytest.raises(
                NotFoundError, match=r"no model 'ones' is served here; the only model is base, with the"
            ):
                await client.completions.create(model="ones", prompt="1")
        await endpoint.close()
        codec.close()
    finally:
        await pool.wait_until_drained()
        await group.close()


def test_unfit_adapters_are_refused_by_name(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny_model(num_layers=2, num_kv_heads=2)
    shape = read_model_shape(model)
    make_adapter(tmp_path / "one", model, "one")
    with pytest.raises(ConfigError, match=r"--adapter one: write NAME=FOLDER"):
        served_adapter("one", shape)
    with pytest.raises(DataError, match=r"adapter_config.json does not exist; give a PEFT folder"):
        served_adapter(f"one={tmp_path / 'none'}", shape)
    wider = read_model_shape(tiny_model(num_layers=2, num_kv_heads=2, hidden_size=96))
    with pytest.raises(DataError, match=r"q_proj.lora_A.weight is \(4, 128\), but the model takes \(4, 96\); give"):
        served_adapter(f"one={tmp_path / 'one'}", wider)
    config = tmp_path / "one/adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"r": 1000}))
    with pytest.raises(DataError, match=r"r = 1000; vLLM takes LoRA ranks from 1 to 512"):
        served_adapter(f"one={tmp_path / 'one'}", shape)


def change_config(**fields: Any) -> Callable[[Path], None]:
    """Return a function setting these fields in a folder's adapter_config.json."""

    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def write_tensors(*names: str) -> Callable[[Path], None]:
    """Return a function replacing a folder's tensors by matrices of these names."""
    return lambda folder: save_file(
        {f"base_model.model.{name}.weight": torch.zeros(4, 128) for name in names},
        folder / "adapter_model.safetensors",
    )


ONLY_A = "model.layers.0.self_attn.q_proj.lora_A"


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        pytest.param(
            lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"garbage"),
            "adapter_model.safetensors: cut short or not a safetensors file",
            id="garbage",
        ),
        pytest.param(write_tensors(), "has no tensors", id="no tensors"),
        pytest.param(write_tensors(ONLY_A), f"{ONLY_A}.weight has no pair", id="only A"),
        pytest.param(
            write_tensors("model.embed_tokens.lora_A"), "embed_tokens.lora_A.weight is not matrix A or B",
            id="embeddings",
        ),
        pytest.param(write_tensors("model.norm"), "model.norm.weight is not matrix A or B", id="norm"),
        pytest.param(change_config(lora_alpha="16"), "lora_alpha = '16'; it must be a number", id="text alpha"),
        pytest.param(change_config(bias="all"), "bias = 'all'; vLLM supports only 'none'", id="bias"),
        pytest.param(change_config(alpha_pattern={"q_proj": 8}), "alpha_pattern = {'q_proj': 8}", id="alpha pattern"),
        pytest.param(change_config(rank_pattern={"q_proj": 8}), "rank_pattern = {'q_proj': 8}", id="rank pattern"),
        pytest.param(change_config(use_dora=True), "use_dora = True", id="dora"),
        pytest.param(change_config(fan_in_fan_out=True), "fan_in_fan_out = True", id="transposed"),
        pytest.param(change_config(modules_to_save=["lm_head"]), "modules_to_save = ['lm_head']", id="saved modules"),
    ],
)  # fmt: skip
def test_a_folder_that_vllm_would_not_compute_as_written_is_refused(
    spoil: Callable[[Path], object], text: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = tiny_model(num_layers=2, num_kv_heads=2)
    make_adapter(tmp_path / "one", model, "one")
    # Defaults written by PEFT, and rank-stabilised scaling, pass.
    change_config(alpha_pattern={}, rank_pattern={}, modules_to_save=None, use_rslora=True)(tmp_path / "one")
    option, shape = f"one={tmp_path / 'one'}", read_model_shape(model)
    assert served_adapter(option, shape)[1].modules == ("q_proj", "v_proj")
    spoil(tmp_path / "one")
    with pytest.raises(DataError, match=re.escape(text)) as caught:
        served_adapter(option, shape)
    assert "\n" not in str(caught.value)


def test_adapters_of_experts_and_of_families_without_slots_are_refused(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = tiny_model(family="qwen3_moe")
    make_adapter(tmp_path / "one", model, "one")
    option, experts = f"one={tmp_path / 'one'}", "model.layers.0.mlp.experts.0.down_proj"
    assert served_adapter(option, read_model_shape(model))[1].modules == ("q_proj", "v_proj")
    write_tensors(f"{experts}.lora_A", f"{experts}.lora_B")(tmp_path / "one")
    with pytest.raises(DataError, match=rf"{experts}\.lora_A\.weight belongs to experts"):
        served_adapter(option, read_model_shape(model))
    latent = read_model_shape(tiny_model(family="deepseek_v3"))
    with pytest.raises(ConfigError, match=r"serves adapters of llama, .* models, not of deepseek_v3"):
        served_adapter(option, latent)


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.anyio
async def test_a_layer_without_slots_is_named(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny_model(num_layers=2, num_kv_heads=2)
    make_adapter(tmp_path / "two", model, "two")
    _, adapter = served_adapter(f"two={tmp_path / 'two'}", read_model_shape(model))
    served = {"two": adapter._replace(modules=("gate_proj",))}
    config = RolloutConfig(kv_cache_gib=0.05, max_concurrent_requests=8)
    arguments = {"folder": str(model), "config": config, "context_tokens": 64, "dtype": "float32", "adapters": served}
    with pytest.raises(ConfigError, match=r"vLLM has no slots for model\.layers\.0\.mlp\.down_proj and 1 other layers"):
        await LocalGroup(1).start("megarl.serving.local_model:EngineRank", arguments, log_folder=tmp_path)


@pytest.mark.anyio
async def test_adapters_of_a_float32_model_are_refused_on_gpus(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Path(shutil.copytree(tiny_model(num_layers=2, num_kv_heads=2), tmp_path / "model"))
    make_adapter(tmp_path / "one", model, "one")
    config = model / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": "float32"}))
    monkeypatch.setattr(local_model, "runs_on_cpu", lambda: False)
    with pytest.raises(ConfigError, match=r"--adapter one=.*need 16-bit weights, but .* has dtype float32; convert"):
        await local_model.serve(model, EndpointConfig(), RolloutConfig(), print, [f"one={tmp_path / 'one'}"])
