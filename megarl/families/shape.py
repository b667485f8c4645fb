"""A model's sizes, read from a Hugging Face config.json. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import lcm
from pathlib import Path
from typing import Any, NamedTuple

from megarl.config.override import overridden
from megarl.families import FAMILIES
from megarl.families.published import PUBLISHED, published_name
from megarl.files.model_folder import missing_folder, read_object
from megarl.files.strict_json import shortened
from megarl.types import DataError

DTYPES = ("float32", "bfloat16", "float16", "float64")

VALUE_HEAD = "ForSequenceClassification"

_LARGEST_SIZE = 1 << 24
"""Upper bound of all sizes: 16 Mi, 64 times the largest vocabularies."""

LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Parameters of llama3 RoPE scaling that are constants in Megatron-Core 0.16.1."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model's sizes and architectural options."""

    family: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    norm_epsilon: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    """`rope_type` and its parameters. None: rotary embeddings without scaling."""
    max_position_embeddings: int
    initializer_range: float
    num_experts: int = 0
    """Number of routed experts per layer. 0: a dense model."""
    top_k: int = 0
    """Number of routed experts chosen for each token. 0: a dense model."""
    norm_topk_prob: bool = False
    """Whether the routing weights of a token's experts are normalised to sum to one."""
    moe_intermediate_size: int = 0
    """Intermediate size of a routed expert."""
    shared_intermediate_size: int = 0
    """Intermediate size of the shared expert. 0: no shared expert."""
    has_value_head: bool = False
    """Whether a value head (critic, reward model) replaces the output layer."""

    def with_value_head(self) -> ModelShape:
        """Return the same backbone with a value head."""
        # A value head has no vocabulary, so it cannot be tied to the embedding.
        return replace(self, has_value_head=True, tie_word_embeddings=False)


def read_model_shape(model_folder: str | Path, override: Mapping[str, Any] | None = None) -> ModelShape:
    """Return the shape of the model in a folder. `override` changes fields of config.json (`config.override`).

    Raises DataError for a missing, broken or unsupported config.json.
    """
    path = Path(model_folder) / "config.json"
    if not path.parent.is_dir():
        raise DataError(missing_folder(path.parent))
    return _named_shape(read_object(path), path, override)


def planned_shape(model_folder: str | Path, override: Mapping[str, Any] | None = None) -> ModelShape:
    """Return a model's shape for a plan. Without a folder, use the published models of `PUBLISHED`.

    Raises DataError like `read_model_shape`. For a missing folder, the error has the command that downloads config.json
    alone.
    """
    if Path(model_folder).is_dir():
        return read_model_shape(model_folder, override)
    if (name := published_name(model_folder)) is None:
        raise DataError(missing_folder(Path(model_folder), "config.json"))
    return _named_shape(dict(PUBLISHED[name]), Path(name) / "config.json", override)


def _named_shape(config: dict[str, Any], path: Path, override: Mapping[str, Any] | None) -> ModelShape:
    """Return the shape in a config.json with changed fields. Errors name its path."""
    named = path if not override else f"{path} with model.override_config = {override!r:.80}"
    try:
        shape = shape_from_config(overridden(config, override or {}))
        _check_override(override or {}, shape)
    except KeyError as error:
        raise DataError(f"{path}: field {error} is missing. {_COPY_AGAIN}") from None
    except DataError as error:
        raise DataError(f"{named}: {error}") from None
    # transformers and vLLM choose their classes by model_type, megarl by the architecture: they must agree.
    if (model_type := config.get("model_type", shape.family)) != shape.family:
        raise DataError(f'{path}: model_type is {_shown(model_type)}; its architecture has "{shape.family}".')
    return shape


def shape_from_config(config: dict[str, Any]) -> ModelShape:
    """Return the shape in a config.json of transformers 4 or 5.

    Raises DataError for invalid or unsupported values, KeyError for a missing field.
    """
    architecture = _architecture(config)
    has_value_head = architecture.endswith(VALUE_HEAD)
    name = _family_name(architecture)
    family = FAMILIES[name]
    _check_supported(config, name, architecture)
    rope_theta, rope_scaling = _rope(config)
    num_heads = _size(config, "num_attention_heads")
    num_kv_heads = _size(config, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise DataError(
            f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}. {_COPY_AGAIN}"
        )
    experts = _expert_sizes(config) if family.has_experts else _ExpertSizes()
    shape = ModelShape(
        family=name,
        hidden_size=_size(config, "hidden_size"),
        # Missing fields below have the defaults of transformers' configuration classes.
        intermediate_size=_size(config, "intermediate_size"),
        num_layers=_size(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        # Older config.json files have no head_dim.
        head_dim=_size(config, "head_dim", _size(config, "hidden_size") // num_heads),
        vocab_size=_size(config, "vocab_size"),
        tie_word_embeddings=_flag(config, "tie_word_embeddings"),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        norm_epsilon=_positive(config, "rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        max_position_embeddings=_size(config, "max_position_embeddings", 2048),
        initializer_range=_positive(config, "initializer_range", 0.02),
        num_experts=experts.num_experts,
        top_k=experts.top_k,
        norm_topk_prob=experts.norm_topk_prob,
        moe_intermediate_size=experts.moe_intermediate_size,
        shared_intermediate_size=experts.shared_intermediate_size,
    )
    return shape.with_value_head() if has_value_head else shape


def _check_override(override: Mapping[str, Any], shape: ModelShape) -> None:
    """Raise DataError for a changed field not read by this model."""
    idle = [name for name in ("num_experts_per_tok", "norm_topk_prob") if name in override]
    if idle and not shape.num_experts:
        raise DataError(f"{idle[0]} does nothing in a dense model; leave it out.")


def sizes_of(model: ModelShape, tensor: str) -> str:
    """Return the config.json fields and values that set a Hugging Face tensor's shape, for messages: `intermediate_size
    17408`.
    """
    names = {
        "self_attn": {"num_attention_heads": model.num_heads, "num_key_value_heads": model.num_kv_heads},
        "shared_expert": {"shared_expert_intermediate_size": model.shared_intermediate_size},
        "experts": {"moe_intermediate_size": model.moe_intermediate_size},
        "mlp": {"intermediate_size": model.intermediate_size},
    }
    sizes = next((sizes for part, sizes in names.items() if part in tensor), {"vocab_size": model.vocab_size})
    return ", ".join(f"{name} {size}" for name, size in sizes.items())


def value_head_fields(folder: str | Path, model: ModelShape) -> dict[str, Any]:
    """Return the fields of a reward model's config.json that differ from its backbone's: architecture, one label,
    padding token.

    transformers scores the last token before the padding. `folder` has the tokenizer.
    """
    padding = read_object(Path(folder) / "tokenizer_config.json").get("pad_token")
    text = padding.get("content") if isinstance(padding, dict) else padding
    added = read_object(Path(folder) / "tokenizer.json").get("added_tokens") or ()
    language_model = FAMILIES[model.family].architecture
    ids = [("pad_token_id", token["id"]) for token in added if token["content"] == text]
    fields = {
        "architectures": [language_model.replace("ForCausalLM", VALUE_HEAD)],
        # One label makes transformers build a head with one output.
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
    }
    return fields | dict(ids[:1])


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """Return the padded vocabulary size: rows of Megatron's embedding over all tensor-parallel ranks.

    vLLM 0.30 pads to a multiple of 64 too. So at equal tp both split the vocabulary alike, and a reshard need not send
    it between ranks.
    """
    multiple = lcm(64, tp)
    return -(-vocab_size // multiple) * multiple


def _architecture(config: Mapping[str, Any]) -> str:
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise DataError(f'architectures is {_shown(architectures)}; give a list with one name, ["Qwen3ForCausalLM"].')
    if config.get("quantization_config") is not None:
        raise DataError(
            "quantization_config: quantised weights cannot be trained; use the model's bfloat16 weights, or dequantise "
            "them and remove the field."
        )
    return architectures[0]


def _family_name(architecture: str) -> str:
    """Return the model family (such as Qwen3) of a language model's or a reward model's architecture."""
    names = {family.architecture: name for name, family in FAMILIES.items()}
    name = names.get(architecture.replace(VALUE_HEAD, "ForCausalLM"))
    if name is None:
        raise DataError(f"architecture {architecture} is not supported; supported are {', '.join(names)}.")
    return name


def _check_supported(config: Mapping[str, Any], family_name: str, architecture: str) -> None:
    """Raise DataError for a config whose model would be computed differently here."""
    family = FAMILIES[family_name]
    # transformers defaults to two labels.
    labels = len(_mapping(config, "id2label")) or 2
    if architecture.endswith(VALUE_HEAD) and labels != 1:
        raise DataError(f"{architecture} with {labels} labels is not supported; a reward model has one.")
    if config.get("hidden_act", "silu") != "silu":
        raise DataError(f"hidden_act {config['hidden_act']} is not supported; only silu is.")
    for field in ("dtype", "torch_dtype"):
        if config.get(field) not in (None, *DTYPES):
            raise DataError(f"{field} is {_shown(config[field])}; it must be one of {', '.join(DTYPES)}.")
    layer_types = config.get("layer_types") or []
    if not isinstance(layer_types, list):
        raise DataError(f"layer_types is {_shown(layer_types)}; it must be a list. {_COPY_AGAIN}")
    if family.has_windows(config) or "sliding_attention" in layer_types:
        raise DataError(
            "sliding-window attention is not supported; set use_sliding_window to false (Mistral: sliding_window null)."
        )
    for bias in ("attention_bias", "mlp_bias"):
        if config.get(bias) and bias not in family.ignored_fields:
            raise DataError(f"{bias} is not supported for {architecture}.")


def _rope(config: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Return the base of the rotary embeddings (RoPE), and their llama3 scaling if any. Raises DataError."""
    # transformers 5 keeps the rotary settings in rope_parameters, transformers 4 in two fields.
    rope = dict(_mapping(config, "rope_parameters") or _mapping(config, "rope_scaling"))
    theta = _positive({"rope_theta": rope.pop("rope_theta", None) or config.get("rope_theta")}, "rope_theta", 10000.0)
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ("default", "llama3"):
        raise DataError(f"rope_type {rope_type} is not supported; supported are default and llama3.")
    if rope_type == "default":
        return theta, None
    for parameter, expected in LLAMA3_ROPE.items():
        if rope.get(parameter, expected) != expected:
            raise DataError(f"rope parameter {parameter} {rope[parameter]} is not supported; only {expected} is.")
    return theta, rope


class _ExpertSizes(NamedTuple):
    """Numbers and sizes of a model's experts, as in `ModelShape`. The defaults describe a dense model without
    experts."""

    num_experts: int = 0
    top_k: int = 0
    norm_topk_prob: bool = False
    moe_intermediate_size: int = 0
    shared_intermediate_size: int = 0


def _expert_sizes(config: Mapping[str, Any]) -> _ExpertSizes:
    # A family's rules place the same kind of feed-forward layer in every layer.
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise DataError("mlp_only_layers and decoder_sparse_step are not supported; every layer must have experts.")
    # Qwen2-MoE's rules always have QKV biases; transformers makes them optional by this field.
    if config.get("qkv_bias") is False:
        raise DataError("qkv_bias false is not supported.")
    # transformers 5 writes num_local_experts for num_experts.
    sizes = _ExpertSizes(
        num_experts=_size(config, "num_experts" if "num_experts" in config else "num_local_experts"),
        top_k=_size(config, "num_experts_per_tok"),
        norm_topk_prob=_flag(config, "norm_topk_prob"),
        moe_intermediate_size=_size(config, "moe_intermediate_size"),
        shared_intermediate_size=_size(config, "shared_expert_intermediate_size", 0),
    )
    if sizes.top_k > sizes.num_experts:
        raise DataError(f"num_experts_per_tok {sizes.top_k} is more than the {sizes.num_experts} experts.")
    return sizes


_COPY_AGAIN = "Copy the model folder again."


def _size(config: Mapping[str, Any], field: str, default: int | None = None) -> int:
    """Return a positive integer field. With `default` it may be missing, null, or 0 if the default is 0."""
    value = config[field] if default is None else config.get(field)
    if value is None and default is not None:
        return default
    if default == 0 and value == 0:
        return 0
    # Not isinstance: True is an instance of int.
    if type(value) is not int or not 0 < value <= _LARGEST_SIZE:
        raise DataError(
            f"{field} is {_shown(value)}; it must be a whole number from 1 to {_LARGEST_SIZE}. {_COPY_AGAIN}"
        )
    return value


def _positive(config: Mapping[str, Any], field: str, default: float) -> float:
    value = default if config.get(field) is None else config[field]
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise DataError(f"{field} is {_shown(value)}; it must be a positive number. {_COPY_AGAIN}")
    return float(value)


def _flag(config: Mapping[str, Any], field: str) -> bool:
    value = config.get(field)
    if value not in (None, False, True):
        raise DataError(f"{field} is {_shown(value)}; it must be true or false. {_COPY_AGAIN}")
    return bool(value)


def _mapping(config: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    value = config.get(field) or {}
    if not isinstance(value, Mapping):
        raise DataError(f"{field} is {_shown(value)}; it must be an object. {_COPY_AGAIN}")
    return value


def _shown(value: Any) -> str:
    return "missing" if value is None else shortened(repr(value))
