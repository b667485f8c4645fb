"""Published EAGLE-3 drafters (arXiv 2503.01840): one layer drafts tokens from the hidden states of three policy layers.

vLLM 0.30 reads a drafter from a separate folder. A drafter is frozen, or trained with the policy (`DrafterShape`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from megarl.families.config_json.rotary import Rotary, read_rotary
from megarl.families.parts import Latent
from megarl.families.shape import ModelShape
from megarl.files.model_folder import read_object, read_safetensors_header, stored_names, weight_files
from megarl.types import DataError

PARAMETERS = "drafter."
"""Prefix of a trained drafter's parameters, in Megatron and in checkpoints. The published name follows it."""
METHOD = "eagle3"
"""vLLM's name of the speculative method."""
ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
"""Class names of drafters in config.json, for policies of any family."""
WITHOUT_EAGLE3 = ("glm4_moe", "glm4_moe_lite", "qwen2_moe", "seed_oss")
"""Families whose vLLM 0.30 models pass no hidden states to a drafter."""
_NUM_STATES = 3
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_MIDDLE = "midlayer.", "layers.0."
"""Names of the drafter's layer in published files."""
_LAYER = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "hidden_norm", "input_layernorm",
    "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip
"""Modules with a weight in the drafter's layer."""
OFFSETS, IS_DRAFTED = "d2t", "t2d"
"""Maps of a draft vocabulary smaller than the policy's. Training does not change them.

d2t, int64 [drafted tokens]: the policy's id of a drafted token, minus the drafted token's number. t2d, bool
[vocabulary]: whether a token of the policy is drafted.
"""
_OTHER_FORMS = {
    "attention_bias": False, "mlp_bias": False, "norm_output": False, "fc_norm": False, "norm_before_fc": False,
    "logit_scale": 1.0, "hidden_act": "silu", "bias": False, "qkv_bias": False, "is_causal": True,
}  # fmt: skip
"""Fields of config.json that change vLLM 0.30's computation, with the only value supported by the trainer."""


@dataclass(frozen=True, slots=True)
class DrafterShape:
    """Sizes and options of a trained EAGLE-3 drafter. Its embedding is the policy's."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    """Size of the drafter's vocabulary. It is part of the policy's vocabulary, or all of it."""
    norm_epsilon: float
    rotary: Rotary
    aux_layers: tuple[int, ...]
    """Numbers, from 0, of the policy's layers whose inputs the drafter reads."""
    adds_normed_state: bool = False
    """Whether the layer's residual is the state after `hidden_norm`. False: the state before it."""

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the trained tensors, by their names in published files."""
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes = (
            (queries, 2 * hidden), (keys, 2 * hidden), (keys, 2 * hidden), (hidden, queries), (hidden,), (hidden,),
            (hidden,), (inner, hidden), (inner, hidden), (hidden, inner),
        )  # fmt: skip
        layer_shapes = {f"{_MIDDLE[0]}{name}.weight": shape for name, shape in zip(_LAYER, shapes, strict=True)}
        return {
            "fc.weight": (hidden, _NUM_STATES * hidden),
            **layer_shapes,
            "norm.weight": (hidden,),
            "lm_head.weight": (self.vocab_size, hidden),
        }


def read_drafter_shape(folder: str, policy: ModelShape) -> DrafterShape:
    """Return the shape of a drafter that passed `drafter_faults`. Raises DataError if it cannot be trained."""
    config = read_object(Path(folder) / "config.json")
    eagle_config = config.get("eagle_config") or {}
    _refuse_other_forms(folder, config, {**config, **eagle_config})
    rotary = read_rotary(config)
    if rotary.fraction != 1:
        raise DataError(f"it rotates {rotary.fraction} of a head's channels; only all of them are trained")
    # vLLM concatenates the states by increasing layer, whatever the order in config.json.
    aux_layers = tuple(sorted(_read_layer_ids(config, policy)))
    if max(aux_layers) >= policy.num_layers:
        raise DataError(
            f"it reads the hidden states after the policy's last layer (layer id {max(aux_layers)}); "
            "only hidden states before a layer can be used for training"
        )
    hidden_size, num_heads = config["hidden_size"], config["num_attention_heads"]
    return DrafterShape(
        hidden_size=hidden_size,
        intermediate_size=config["intermediate_size"],
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=config.get("head_dim") or hidden_size // num_heads,
        vocab_size=config.get("draft_vocab_size") or policy.vocab_size,
        norm_epsilon=config.get("rms_norm_eps", 1e-6),
        rotary=rotary,
        aux_layers=aux_layers,
        adds_normed_state=bool(config.get("norm_before_residual")),
    )


def _refuse_other_forms(folder: str, config: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Raise DataError for forms of drafters that vLLM supports and the trainer does not.

    `options`: the fields of config.json, with those of its `eagle_config`.
    """
    for name, value in _OTHER_FORMS.items():
        if options.get(name) not in (None, value):
            raise DataError(f"{name} in its config.json is {options[name]}; only {value} can be trained")
    if options.get("use_aux_hidden_state") is False:
        raise DataError("use_aux_hidden_state in its config.json is false; only states of three layers are trained")
    if "sliding_attention" in (config.get("layer_types") or ())[:1]:
        raise DataError("its layer has a sliding window (layer_types); only attention to all tokens can be trained")
    tensor_names = {published_name(name) for name in stored_names(folder)}
    if "embed_tokens.weight" in tensor_names:
        raise DataError("it has an embedding of its own, embed_tokens.weight; it must have none to be trained")
    if "lm_head.weight" not in tensor_names:
        raise DataError("it has no head of its own, lm_head.weight; it must have one to be trained")


def published_name(name: str) -> str:
    """Return the usual name of a drafter's tensor. Published files differ in their names."""
    name = name.removeprefix("model.")
    return name.replace(_MIDDLE[1], _MIDDLE[0], 1) if name.startswith(_MIDDLE[1]) else name


def _read_layer_ids(config: Mapping[str, Any], policy: ModelShape) -> Sequence[int]:
    """Return the policy's layer numbers in config.json, in the field that vLLM 0.30 prefers."""
    return config.get(_LAYER_IDS) or (config.get("eagle_config") or {}).get(_LAYER_IDS) or default_layers(policy)


def default_layers(policy: ModelShape) -> tuple[int, int, int]:
    """Return the layers chosen by vLLM 0.30 if config.json names none. The drafter reads the inputs of these layers."""
    return 2, policy.num_layers // 2, policy.num_layers - 3


def drafter_folder(speculative_config: object) -> str | None:
    """Return the folder or Hub name of the EAGLE-3 drafter in vLLM's `speculative_config`; None: it has none."""
    if not isinstance(speculative_config, Mapping) or speculative_config.get("method") != METHOD:
        return None
    model = speculative_config.get("model")
    return model if isinstance(model, str) and model else None


def stored_bytes(folder: str) -> int:
    """Return the bytes of a drafter's weight files. Raises DataError for broken files."""
    return sum((Path(folder) / name).stat().st_size for name in weight_files(folder))


def drafter_faults(folder: str, policy: ModelShape) -> Iterator[str]:
    """Yield the reasons why a drafter does not fit a policy. Raises DataError for broken files."""
    config = read_object(Path(folder) / "config.json")
    architectures = config.get("architectures")
    if not isinstance(architectures, Sequence) or not set(architectures) & set(ARCHITECTURES):
        yield f"architectures in its config.json is {architectures}, not {' or '.join(ARCHITECTURES)}"
        return
    if policy.family in WITHOUT_EAGLE3:
        yield f"vLLM's models of the family {policy.family} return no hidden states to a drafter"
    if policy.linear_attention is not None or isinstance(policy.attention, Latent):
        yield "it is not proved with linear or latent attention of the policy"
        return
    yield from _find_size_faults(config, policy)
    # The drafter must read three different layers of the policy, and have the tensors for them.
    layers = _read_layer_ids(config, policy)
    if len(set(layers)) != _NUM_STATES or not 0 <= min(layers) <= max(layers) <= policy.num_layers:
        yield f"it reads the hidden states at the layers {list(layers)} of a policy of {policy.num_layers} layers"
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensors in weight_files(folder).items():
        header = read_safetensors_header(Path(folder) / name, tensors)
        shapes |= {tensor: shape for tensor, (_, shape) in header.items()}
    yield from _find_tensor_faults(folder, config, shapes, policy)


def _find_size_faults(config: Mapping[str, Any], policy: ModelShape) -> Iterator[str]:
    expected_values = {
        "vocab_size": policy.vocab_size,
        "num_hidden_layers": 1,
        "target_hidden_size": policy.hidden_size,
        # The drafter's layer shares the pages of the policy's KV cache.
        "num_key_value_heads": policy.num_kv_heads,
    }
    values = {"target_hidden_size": config.get("hidden_size")} | dict(config)
    for name, value in expected_values.items():
        if values.get(name) != value:
            yield f"{name} in its config.json is {values.get(name)}, this policy needs {value}"
    head_dim = config.get("head_dim") or (config.get("hidden_size") or 0) // (config.get("num_attention_heads") or 1)
    if head_dim != policy.head_dim:
        yield f"its attention heads have {head_dim} channels, those of the policy {policy.head_dim}"


def _find_tensor_faults(
    folder: str, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], policy: ModelShape
) -> Iterator[str]:
    """Yield missing tensors and wrong shapes. vLLM leaves the parameters of missing tensors random or zero, without an
    error.
    """
    hidden_size, num_drafted_tokens = config.get("hidden_size"), config.get("draft_vocab_size") or policy.vocab_size
    expected_shapes = {"fc.weight": (hidden_size, _NUM_STATES * policy.hidden_size), "norm.weight": (hidden_size,)}
    if num_drafted_tokens != policy.vocab_size:
        expected_shapes |= {"d2t": (num_drafted_tokens,), "lm_head.weight": (num_drafted_tokens, hidden_size)}
    # A drafter without an embedding uses the policy's.
    if hidden_size != policy.hidden_size:
        expected_shapes["embed_tokens.weight"] = (policy.vocab_size, hidden_size)
    shapes_by_name = {name.removeprefix("model."): shape for name, shape in shapes.items()}
    for name, shape in expected_shapes.items():
        if shapes_by_name.get(name) != shape:
            fault = f"has the shape {shapes_by_name[name]}" if name in shapes_by_name else "is missing"
            yield f"its tensor {name} {fault}, expected is {shape}"
    for layer_tensor in _LAYER:
        if not any(f"{layer}{layer_tensor}.weight" in shapes_by_name for layer in _MIDDLE):
            yield f"its tensor {_MIDDLE[0]}{layer_tensor}.weight is missing"
    if shapes_by_name.get("d2t") == (num_drafted_tokens,):
        yield from _find_mapping_faults(folder, policy)


def _find_mapping_faults(folder: str, policy: ModelShape) -> Iterator[str]:
    offsets = np.asarray(read_vocabulary_maps(folder)[OFFSETS], np.int64)
    tokens = offsets + np.arange(len(offsets))
    if len(np.unique(tokens)) < len(tokens) or tokens.min() < 0 or tokens.max() >= policy.vocab_size:
        yield f"its tensor d2t does not name {len(tokens)} different tokens of the policy's {policy.vocab_size}"


def read_vocabulary_maps(folder: str) -> dict[str, np.ndarray]:
    """Return a drafter's maps `OFFSETS` and `IS_DRAFTED` by published name. Empty: it drafts the whole vocabulary.

    Raises DataError for broken files.
    """
    maps: dict[str, np.ndarray] = {}
    for name, tensors in weight_files(folder).items():
        names_in_file = {
            published_name(tensor): tensor for tensor in read_safetensors_header(Path(folder) / name, tensors)
        }
        with safe_open(Path(folder) / name, "np") as file:
            maps |= {key: file.get_tensor(names_in_file[key]) for key in (OFFSETS, IS_DRAFTED) if key in names_in_file}
    return maps


def read_stored_bytes(folder: str) -> int:
    """Return `stored_bytes`; 0 for broken files. Checks before the start report broken files."""
    try:
        return stored_bytes(folder)
    except (DataError, OSError):
        return 0
