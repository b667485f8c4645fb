"""Drafters that an engine cannot have are refused: they fail in the ranks, or draft at random."""

from __future__ import annotations

import ast
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import pytest

from megarl.config import Recipe
from megarl.families.eagle3 import WITHOUT_EAGLE3, read_drafter_shape, read_stored_bytes
from megarl.families.registry import FAMILIES
from megarl.families.shape import read_model_shape
from megarl.preflight import check
from megarl.preflight.libraries.vllm_limits import HOST_DRAFTERS, _find_drafter_faults
from megarl.preflight.model.trained_drafter import check_trained_drafter
from megarl.types import ConfigError
from tests.models.drafts.eagle3 import make_eagle3
from tests.shapes import small_shape


@pytest.fixture
def faults(recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """The faults of a recipe with a drafter, on GPUs unless said otherwise."""

    def found(
        config: dict[str, Any], *, is_cpu: bool = False, evaluation: Any = None, trainer: Any = None, **rollout: Any
    ) -> list[str]:
        monkeypatch.setattr("megarl.preflight.libraries.vllm_limits.runs_on_cpu", lambda: is_cpu)
        monkeypatch.setattr("megarl.preflight.libraries.vllm_limits.supported_head_sizes", lambda: [])
        try:
            vllm = {"speculative_config": config}
            sections = {"evaluation": evaluation or {}, "trainer": trainer or {}}
            check(recipe(rollout={**rollout, "vllm": vllm}, **sections), is_start=False)
        except ConfigError as error:
            return [line.strip() for line in str(error).split("\n")[1:]]
        return []

    return found


NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    "config",
    [
        {"model": "/models/drafter", "num_speculative_tokens": 3},
        {"method": "eagle", "model": "/models/eagle", "num_speculative_tokens": 3},
        {"model": "Drafter", "num_speculative_tokens": 3},
        {"model": "Qwen/Qwen3-0.6B", "num_speculative_tokens": 3},
    ],
)
def test_weights_that_nobody_writes_are_refused(faults: Callable[..., list[str]], config: dict[str, Any]) -> None:
    (text,) = faults(config)
    assert text.startswith("rollout.vllm.speculative_config = ") and "own weights would stay random" in text
    assert "set the method to ngram, suffix, custom_class or ngram_gpu, or leave it out" in text
    assert ("an eagle drafter's own weights" in text) == (config.get("method") == "eagle")


@pytest.mark.parametrize(
    "config",
    [
        NGRAM,
        {"model": "[ngram]"},
        NGRAM | {"method": "ngram_gpu"},
        {"model": "my_drafters.Own", "num_speculative_tokens": 3},
    ],
)
def test_drafters_without_weights_are_allowed(faults: Callable[..., list[str]], config: dict[str, Any]) -> None:
    assert faults(config) == []


def test_a_drafter_on_the_gpu_is_refused_without_one(faults: Callable[..., list[str]]) -> None:
    (text,) = faults(NGRAM | {"method": "ngram_gpu"}, is_cpu=True)
    assert text.startswith("rollout.vllm.speculative_config = ") and "take ngram" in text
    assert faults(NGRAM, is_cpu=True) == []


def test_drafts_are_refused_with_recorded_experts(faults: Callable[..., list[str]]) -> None:
    texts = faults(NGRAM, trainer={"router_replay": True})
    assert any("with trainer.router_replay the engine records" in text for text in texts)


def test_models_with_states_may_draft(recipe: Callable[..., Recipe]) -> None:
    made = recipe(rollout={"vllm": {"speculative_config": NGRAM}})
    for family in ("qwen3", "qwen3_next", "qwen3_5_text"):
        assert list(_find_drafter_faults(made, small_shape(family))) == []


@pytest.mark.parametrize(
    ("method", "is_told"), [("ngram", True), ("suffix", True), ("custom_class", True), ("ngram_gpu", False)]
)
def test_no_step_is_begun_ahead_of_a_drafter_on_the_host(
    faults: Callable[..., list[str]], method: str, is_told: bool
) -> None:
    told = [text for text in faults(NGRAM | {"method": method}, async_scheduling=True) if "arctic" not in text]
    assert len(told) == is_told
    assert not is_told or told[0].startswith(
        f"rollout.async_scheduling = True: the draft method {method} runs on the host"
    )
    assert [text for text in faults(NGRAM | {"method": method}) if "async" in text] == []


def test_an_own_drafter_is_known_by_its_import_path_as_vllm_knows_it(faults: Callable[..., list[str]]) -> None:
    (text,) = faults({"model": "my_drafters.Own", "num_speculative_tokens": 3}, async_scheduling=True)
    assert text.startswith("rollout.async_scheduling = True") and "custom_class" in text


@pytest.mark.skipif(find_spec("arctic_inference") is not None, reason="its library is installed")
def test_a_drafter_whose_library_is_missing_is_named(faults: Callable[..., list[str]]) -> None:
    (text,) = faults(NGRAM | {"method": "suffix"})
    assert "vLLM's method suffix needs the package arctic-inference, which is not installed; use ngram" in text


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"sampling": {"max_new_tokens": 24, "top_p": 0.7}}, "rollout.sampling.top_p, top_k or min_p kept"),
        ({"sampling": {"max_new_tokens": 24, "min_p": 0.1}}, "rollout.sampling.top_p, top_k or min_p kept"),
        ({"evaluation": {"sampling": {"min_p": 0.1}}}, "leave out this field or evaluation.sampling.min_p"),
    ],
)
def test_what_is_not_known_of_drafts_is_not_sampled_with_them(
    faults: Callable[..., list[str]], changed: dict[str, Any], told: str
) -> None:
    (text,) = faults(NGRAM, **changed)
    assert text.startswith("rollout.vllm.speculative_config = {'method': 'ngram'") and told in text


def test_the_drafters_on_the_host_are_vllms() -> None:
    """They are the drafters that vLLM's check of async scheduling leaves out, without two that have weights."""
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None
    source = ast.parse((Path(spec.origin).parent / "config/speculative.py").read_text(encoding="utf-8"))
    literals = [n for n in source.body if isinstance(n, ast.Assign) and ast.unparse(n.value).startswith("Literal[")]
    types: dict[str, Any] = {"Literal": Literal}
    for node in literals:
        types[ast.unparse(node.targets[0])] = eval(ast.unparse(node.value), types)
    ahead = {*get_args(types["EagleModelTypes"]), *get_args(types["NgramGPUTypes"]), "draft_model", "dspark"}
    assert set(get_args(types["SpeculativeMethod"])) - ahead == {*HOST_DRAFTERS, "medusa", "mlp_speculator"}


EAGLE3 = {"method": "eagle3", "num_speculative_tokens": 3}


@pytest.fixture
def policy(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model(num_heads=4, num_kv_heads=2, hidden_size=64, head_dim=32, intermediate_size=96, num_layers=8)


@pytest.fixture
def eagle_faults(policy: Path, recipe: Callable[..., Recipe]) -> Callable[..., list[str]]:
    """The faults of a recipe for that policy with an EAGLE-3 drafter in a folder."""

    def found(folder: Path, **settings: Any) -> list[str]:
        drafter = EAGLE3 | {"model": str(folder)} | settings
        changed = recipe(model={"path": str(policy)}, rollout={"vllm": {"speculative_config": drafter}})
        return list(_find_drafter_faults(changed, read_model_shape(policy)))

    return found


def test_a_published_drafter_of_the_policy_is_allowed(
    eagle_faults: Callable[..., list[str]], policy: Path, tmp_path: Path
) -> None:
    for name, drafted, own_embedding in (("small", 100, False), ("whole", None, True)):
        folder = make_eagle3(tmp_path / name, policy, draft_vocab_size=drafted, own_embedding=own_embedding)
        assert eagle_faults(folder) == []
        assert read_stored_bytes(str(folder)) == (folder / "model.safetensors").stat().st_size


def test_a_drafter_that_would_draft_at_random_is_refused(
    eagle_faults: Callable[..., list[str]], policy: Path, tmp_path: Path
) -> None:
    """Tensors without a file stay random or zero in vLLM, without an error."""

    def drop(name: str) -> Callable[[dict[str, Any]], object]:
        return lambda tensors: tensors.pop(name)

    def repeat(tensors: dict[str, Any]) -> None:
        tensors["d2t"][1] = tensors["d2t"][0] - 1

    for number, (change, fact) in enumerate(
        (
            (drop("d2t"), "d2t is missing"),
            (drop("lm_head.weight"), "lm_head.weight is missing"),
            (drop("fc.weight"), "fc.weight is missing"),
            (drop("midlayer.hidden_norm.weight"), "midlayer.hidden_norm.weight is missing"),
            (repeat, "d2t does not name 100 different tokens"),
        )
    ):
        folder = make_eagle3(tmp_path / f"{number}", policy, change=change)
        (text,) = eagle_faults(folder)
        assert text.startswith("rollout.vllm.speculative_config = ") and fact in text, text
    for field, value in {"vocab_size": 99, "num_hidden_layers": 2, "num_key_value_heads": 4, "head_dim": 16}.items():
        folder = make_eagle3(tmp_path / field, policy, config={field: value})
        assert any(str(value) in text for text in eagle_faults(folder)), field
    other = make_eagle3(tmp_path / "other", policy, config={"architectures": ["LlamaForCausalLM"]})
    (text,) = eagle_faults(other)
    assert "LlamaForCausalLMEagle3" in text
    (text,) = eagle_faults(tmp_path / "absent")
    assert str(tmp_path / "absent") in text
    sound = make_eagle3(tmp_path / "sound", policy)
    assert len(eagle_faults(sound, draft_load_config={"load_format": "dummy"})) == 1
    early = make_eagle3(
        tmp_path / "early", policy, config={"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 2, 3]}}
    )
    (text,) = eagle_faults(early)
    assert "[2, 2, 3] of a policy of 8 layers" in text


@pytest.fixture
def training_faults(policy: Path, recipe: Callable[..., Recipe]) -> Callable[..., list[str]]:
    """The faults of a recipe for that policy that trains an EAGLE-3 drafter in a folder."""

    def found(folder: Path | None, trainer: Any = None, **sections: Any) -> list[str]:
        drafter = {} if folder is None else {"speculative_config": EAGLE3 | {"model": str(folder)}}
        changed = recipe(
            model={"path": str(policy)},
            rollout={"vllm": drafter},
            trainer={"drafter_learning_rate": 1e-4} | (trainer or {}),
            **sections,
        )
        return list(check_trained_drafter(changed, read_model_shape(policy)))

    return found


def test_a_drafter_can_be_trained_as_published(
    training_faults: Callable[..., list[str]], policy: Path, tmp_path: Path
) -> None:
    drafter = make_eagle3(tmp_path / "drafter", policy)
    assert training_faults(drafter) == training_faults(drafter, {"pp": 2, "vpp": 2}) == []


@pytest.mark.parametrize(
    ("sections", "fact"),
    [
        ({"lora": {"rank": 4}}, "with lora.rank = 4 only adapters are trained"),
        ({"optimizer": {"name": "muon"}}, "set optimizer.name=adam"),
        ({"trainer": {"optimizer_offload_fraction": 0.5}}, "trainer.optimizer_offload_fraction = 0.5"),
        ({"trainer": {"fp8": "blockwise"}}, "set trainer.fp8=none"),
    ],
)
def test_what_a_trained_drafter_does_not_fit_is_one_error(
    training_faults: Callable[..., list[str]], policy: Path, tmp_path: Path, sections: dict[str, Any], fact: str
) -> None:
    (text,) = training_faults(make_eagle3(tmp_path / "drafter", policy), **sections)
    assert text.startswith("trainer.drafter_learning_rate = 0.0001: ") and fact in text


def test_forms_of_a_drafter_that_the_trainer_does_not_compute_are_refused(
    training_faults: Callable[..., list[str]], policy: Path, tmp_path: Path
) -> None:
    """vLLM computes them, so such a drafter may be frozen."""
    (text,) = training_faults(None)
    assert "set rollout.vllm.speculative_config with method eagle3" in text
    values = {
        "attention_bias": True, "norm_output": True, "fc_norm": True, "norm_before_fc": True, "logit_scale": 2.0,
        "layer_types": ["sliding_attention"],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 8]},
    }  # fmt: skip
    for name, value in values.items():
        (text,) = training_faults(make_eagle3(tmp_path / name, policy, config={name: value}))
        assert (
            "layer id 8" if name == "eagle_config" else name
        ) in text and "leave it out, so that it is frozen" in text
    (text,) = training_faults(make_eagle3(tmp_path / "own", policy, own_embedding=True))
    assert "embed_tokens.weight" in text


def test_layers_are_those_that_vllm_reads_in_its_order(policy: Path, tmp_path: Path) -> None:
    """vLLM sorts them, and prefers the field outside of eagle_config."""
    shape = read_model_shape(policy)
    numbers = "eagle_aux_hidden_state_layer_ids"
    configs: dict[str, dict[str, Any]] = {
        "sorted": {"eagle_config": {numbers: [6, 1, 4]}},
        "outside": {numbers: [4, 6, 1], "eagle_config": {numbers: [0, 2, 3]}},
    }
    for name, config in configs.items():
        folder = make_eagle3(tmp_path / name, policy, config=config)
        assert read_drafter_shape(str(folder), shape).aux_layers == (1, 4, 6)
    assert read_drafter_shape(str(make_eagle3(tmp_path / "default", policy)), shape).aux_layers == (2, 4, 5)


def test_families_without_hidden_states_are_those_of_vllm() -> None:
    """A model takes a drafter of hidden states if its class in vLLM is of the interface."""
    import vllm.model_executor.models as models

    folder = Path(str(models.__file__)).parent
    known = {
        node.name: {ast.unparse(base) for base in node.bases}
        for file in folder.glob("*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef)
    }

    def has(name: str) -> bool:
        bases = known.get(name, set())
        return bool(bases & {"SupportsEagle3", "EagleModelMixin"}) or any(has(base) for base in bases if base != name)

    for name, family in FAMILIES.items():
        architecture = family.engine_architecture or family.architecture
        assert has(architecture) == (name not in WITHOUT_EAGLE3), name
