"""A model's sizes, read from a Hugging Face config.json. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import lcm
from pathlib import Path
from typing import Any

from megarl.config.formulas import either
from megarl.config.override import apply_override
from megarl.families.config_json.config_values import COPY_AGAIN, flag, mapping, positive, quote, size
from megarl.families.config_json.rotary import Rotary
from megarl.families.linear_attention import LinearAttention
from megarl.families.model_tensors import list_aliases
from megarl.families.parts import GroupedQuery, Latent, LayerKind, Parts, Router
from megarl.families.published import PUBLISHED, published_name
from megarl.families.registry import FAMILIES
from megarl.families.tensors.names import parse_name
from megarl.files.model_folder import missing_folder_message, read_object, stored_names
from megarl.rounding import round_up
from megarl.types import DataError

DTYPES = ("float32", "bfloat16", "float16", "float64")

VALUE_HEAD = "ForSequenceClassification"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model's sizes and architectural options. Parts that a family lacks are None."""

    family: str
    hidden_size: int
    intermediate_size: int
    """Intermediate size of the dense feed-forward layers."""
    num_layers: int
    vocab_size: int
    tie_word_embeddings: bool
    norm_epsilon: float
    max_position_embeddings: int
    initializer_range: float
    attention: GroupedQuery | Latent
    rotary: Rotary
    router: Router | None = None
    kinds: tuple[LayerKind, ...] = ()
    """Kind of each layer. Empty: no layer has a window, and all have experts if the model has a router."""
    num_kept_layers: int = 0
    """Number of draft layers (`families.draft_layers`) copied unchanged."""
    num_draft_layers: int = 0
    """Number of trained draft layers: 0 or 1."""
    linear_attention: LinearAttention | None = None
    """Sizes of the linear attention. None: no layer has linear attention."""
    has_zero_centered_norms: bool = False
    """Whether norms multiply by 1 + weight."""
    packs_experts: bool = False
    """Whether files have one tensor for all experts of a layer. Some families allow both forms."""
    packs_draft_experts: bool = False
    """Like `packs_experts`, for the draft layers."""
    has_value_head: bool = False
    """Whether a value head (critic, reward model) replaces the output layer."""

    @property
    def layers(self) -> tuple[LayerKind, ...]:
        return self.kinds or (LayerKind(has_experts=self.router is not None),) * self.num_layers

    @property
    def draft_layers_problem(self) -> str | None:
        """Reason why the draft layers cannot be trained, or None."""
        draft_layers = FAMILIES[self.family].draft_layers
        if draft_layers is None:
            families = either([name for name, family in FAMILIES.items() if family.draft_layers])
            return f"trained draft layers are supported for {families} only, not for {self.family}"
        if self.num_kept_layers != 1:
            return f"{draft_layers.num_layers_field} in config.json is {self.num_kept_layers}; only 1 can be trained"
        return None

    @property
    def draft_layer_kind(self) -> LayerKind:
        """Kind of decoder layer inside each draft layer."""
        draft_layers = FAMILIES[self.family].draft_layers
        assert draft_layers is not None
        return draft_layers.layer_kind(self)

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Numbers, from 0, of the layers with experts."""
        return tuple(number for number, kind in enumerate(self.layers) if kind.has_experts)

    @property
    def has_dense_layers(self) -> bool:
        return len(self.expert_layers) < self.num_layers

    def layers_where(self, is_wanted: Callable[[LayerKind], bool]) -> frozenset[int] | None:
        """Return the numbers, from 0, of the layers for which `is_wanted` is true. None: all layers."""
        numbers = frozenset(number for number, kind in enumerate(self.layers) if is_wanted(kind))
        return None if len(numbers) == self.num_layers else numbers

    @property
    def windows(self) -> tuple[int, ...]:
        """Attention window of each layer in tokens, 0 for none. Empty: no layer has a window."""
        windows = tuple(kind.window for kind in self.kinds)
        return windows if any(windows) else ()

    @property
    def num_heads(self) -> int:
        return self.attention.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.attention.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.attention.head_dim

    @property
    def rotary_channels(self) -> int:
        return int(self.attention.rotary_channels * self.rotary.fraction)

    @property
    def num_experts(self) -> int:
        """Number of routed experts in a layer with experts; 0 for a dense model."""
        return self.router.num_experts if self.router else 0

    @property
    def top_k(self) -> int:
        """Number of routed experts per token; 0 for a dense model."""
        return self.router.top_k if self.router else 0

    @property
    def moe_intermediate_size(self) -> int:
        """Intermediate size of a routed expert; 0 for a dense model."""
        return self.router.moe_intermediate_size if self.router else 0

    @property
    def shared_intermediate_size(self) -> int:
        """Intermediate size of the shared expert; 0: there is none."""
        return self.router.shared_intermediate_size if self.router else 0

    def with_draft_layers(self, is_trained: bool) -> ModelShape:
        """Return the same model with its draft layers trained, or only copied."""
        num_layers = self.num_draft_layers + self.num_kept_layers
        return replace(
            self, num_draft_layers=num_layers if is_trained else 0, num_kept_layers=0 if is_trained else num_layers
        )

    def with_value_head(self) -> ModelShape:
        """Return the same backbone with a value head. Raises DataError unless the checkpoint is a pure text model."""
        family = FAMILIES[self.family]
        if family.section:
            # `value_head_fields` supports text models only: the export would have a language model's architecture.
            raise DataError(
                f"{family.architecture} with a value head (critic, reward model) is not supported; use a text model, "
                f"{family.engine_architecture}."
            )
        # A value head has no vocabulary, so it cannot be tied to the embedding.
        return replace(self, has_value_head=True, tie_word_embeddings=False)


def read_model_shape(model_folder: str | Path, override: Mapping[str, Any] | None = None) -> ModelShape:
    """Return the shape of the model in a folder. `override` changes fields of config.json (`config.override`).

    Raises DataError for a missing, broken or unsupported config.json.
    """
    path = Path(model_folder) / "config.json"
    if not path.parent.is_dir():
        raise DataError(missing_folder_message(path.parent))
    shape = _read_shape(read_object(path), path, override)
    return replace(shape, **_read_packed_fields(path.parent, shape.with_draft_layers(True)))


def _read_packed_fields(folder: Path, model: ModelShape) -> dict[str, bool]:
    """Return `packs_experts` and `packs_draft_experts` as the folder's files have them.

    Empty, without reading files, for families with only one form.
    """
    alias_forms = (
        list_aliases(replace(model, packs_experts=packs, packs_draft_experts=packs)) for packs in (True, False)
    )
    packed_names_if_packed, packed_names_always = ({alias.packed for alias in aliases} for aliases in alias_forms)
    if packed_names_if_packed == packed_names_always:
        return {}
    stored_templates = {parse_name(name).template for name in stored_names(folder)}
    fields = {}
    for field in ("packs_experts", "packs_draft_experts"):
        packed_names = {alias.packed for alias in list_aliases(replace(model, **{field: True}))}
        fields[field] = not stored_templates.isdisjoint(packed_names - packed_names_always)
    return fields


def planned_shape(model_folder: str | Path, override: Mapping[str, Any] | None = None) -> ModelShape:
    """Return a model's shape for a prediction.

    For a missing folder, `PUBLISHED` gives the shape. Raises DataError like `read_model_shape`, with the command that
    downloads config.json.
    """
    if Path(model_folder).is_dir():
        return read_model_shape(model_folder, override)
    if (name := published_name(model_folder)) is None:
        raise DataError(missing_folder_message(Path(model_folder), "config.json"))
    return _read_shape(dict(PUBLISHED[name]), Path(name) / "config.json", override)


def _read_shape(config: dict[str, Any], path: Path, override: Mapping[str, Any] | None) -> ModelShape:
    """Return the shape in a config.json, with fields changed by `override`. Errors name the file `path`."""
    path_text = path if not override else f"{path} with model.override_config = {override!r:.80}"
    try:
        shape = shape_from_config(apply_override(completed_config(config, path.parent), override or {}))
        _check_override(override or {}, shape)
    except KeyError as error:
        raise DataError(f"{path}: field {error} is missing. {COPY_AGAIN}") from None
    except DataError as error:
        raise DataError(f"{path_text}: {error}") from None
    # transformers and vLLM choose their classes by model_type, megarl by the architecture: they must agree.
    model_type = config.get("model_type", shape.family)
    if model_type not in (shape.family, *FAMILIES[shape.family].other_model_types):
        raise DataError(
            f'{path}: model_type is {quote(model_type)}, but the architecture of the model needs "{shape.family}".'
        )
    return shape


def completed_config(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return a folder's config.json with the fields that vLLM needs and transformers 5 does not write.

    Raises DataError for an unsupported architecture.
    """
    family = FAMILIES[_find_family_name(_architecture(config), config.get("model_type"))]
    return {**config, **family.added_fields(config, lambda: stored_names(folder))}


def shape_from_config(config: dict[str, Any]) -> ModelShape:
    """Return the shape in a config.json of transformers 4 or 5.

    Raises DataError for invalid or unsupported values, KeyError for a missing field.
    """
    architecture = _architecture(config)
    has_value_head = architecture.endswith(VALUE_HEAD)
    name = _find_family_name(architecture, config.get("model_type"))
    family = FAMILIES[name]
    # Releases with a section for the sizes have dtype and quantization_config outside of it.
    _check_number_formats(config, family.reads_mxfp4)
    if family.section:
        _check_ties(config, family.section)
        config = {**mapping(config, family.section), "architectures": [architecture]}
        _check_number_formats(config, family.reads_mxfp4)
    config = {**family.defaults, **config}
    _check_supported(config, architecture)
    parts = family.read(config)
    shape = ModelShape(
        family=name,
        hidden_size=size(config, "hidden_size"),
        intermediate_size=_dense_intermediate_size(config, parts),
        num_layers=size(config, "num_hidden_layers"),
        vocab_size=size(config, "vocab_size"),
        tie_word_embeddings=flag(config, "tie_word_embeddings"),
        norm_epsilon=positive(config, "rms_norm_eps"),
        max_position_embeddings=size(config, "max_position_embeddings"),
        initializer_range=positive(config, "initializer_range"),
        **parts._asdict(),
    )
    _check_rotated_channels(shape)
    return shape.with_value_head() if has_value_head else shape


def _check_rotated_channels(shape: ModelShape) -> None:
    if shape.rotary.fraction < 1 and (shape.rotary_channels % 2 or not shape.rotary_channels):
        raise DataError(
            f"partial_rotary_factor {shape.rotary.fraction:g} rotates {shape.rotary_channels} of the "
            f"{shape.attention.rotary_channels} channels of a head; it must be an even number of at least 2."
        )


def _check_ties(config: Mapping[str, Any], section: str) -> None:
    name = "tie_word_embeddings"
    model_flag, text_flag = flag({name: False, **config}, name), flag({name: False, **mapping(config, section)}, name)
    if model_flag != text_flag:
        raise DataError(
            f"{name} is {quote(config.get(name))}, but {section}.{name} is "
            f"{quote(mapping(config, section).get(name))}: transformers reads the first and vLLM the second, missing "
            "is false; set both to what the folder's weights are."
        )


def _dense_intermediate_size(config: Mapping[str, Any], parts: Parts) -> int:
    """Return the size of dense feed-forward layers; 0 if it is missing and all layers have experts."""
    if parts.router is not None and all(kind.has_experts for kind in parts.kinds):
        return size({"intermediate_size": 0, **config}, "intermediate_size", null=0)
    return size(config, "intermediate_size")


def _check_override(override: Mapping[str, Any], shape: ModelShape) -> None:
    if override and (section := FAMILIES[shape.family].section):
        raise DataError(
            f"{next(iter(override))} is a field of {section} in this model's config.json and cannot be overridden; "
            "edit config.json instead."
        )
    fields_without_effect = [name for name in ("num_experts_per_tok", "norm_topk_prob") if name in override]
    if fields_without_effect and not shape.num_experts:
        raise DataError(f"{fields_without_effect[0]} has no effect, because the model has no experts; remove it.")


def sizes_of(model: ModelShape, tensor: str) -> str:
    """Return the config.json fields that set a tensor's shape, for messages: `intermediate_size 17408`."""
    linear = model.linear_attention
    sizes_by_part = {
        **({linear.tensor_part: linear.config_sizes} if linear else {}),
        "self_attn": {"num_attention_heads": model.num_heads, "num_key_value_heads": model.num_kv_heads},
        "shared_expert": {"the shared expert's intermediate size": model.shared_intermediate_size},
        "experts": {"moe_intermediate_size": model.moe_intermediate_size},
        "mlp": {"intermediate_size": model.intermediate_size},
    }
    sizes = next((sizes for part, sizes in sizes_by_part.items() if part in tensor), {"vocab_size": model.vocab_size})
    return ", ".join(f"{name} {size}" for name, size in sizes.items())


def value_head_fields(folder: str | Path, model: ModelShape) -> dict[str, Any]:
    """Return the fields of config.json in which a reward model differs from its backbone.

    They include the padding token of the tokenizer in `folder`: transformers scores the last token before the padding.
    """
    padding_token = read_object(Path(folder) / "tokenizer_config.json").get("pad_token")
    padding_text = padding_token.get("content") if isinstance(padding_token, dict) else padding_token
    added_tokens = read_object(Path(folder) / "tokenizer.json").get("added_tokens") or ()
    family = FAMILIES[model.family]
    derived_architecture = family.architecture.replace("ForCausalLM", VALUE_HEAD)
    padding_ids = [("pad_token_id", token["id"]) for token in added_tokens if token["content"] == padding_text]
    fields = {
        # Programs that build a class by name use the first architecture. vLLM 0.30 uses the first that it knows, and
        # knows only the derived one.
        "architectures": [family.classifier, derived_architecture] if family.classifier else [derived_architecture],
        # One label makes transformers build a head with one output.
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
    }
    return fields | dict(padding_ids[:1])


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """Return the padded vocabulary size: rows of Megatron's embedding over all tensor-parallel ranks.

    vLLM 0.30 pads to a multiple of 64 too. At equal tp both split the vocabulary alike, and a reshard sends none of its
    rows between ranks.
    """
    multiple = lcm(64, tp)
    return round_up(vocab_size, multiple=multiple)


def _architecture(config: Mapping[str, Any]) -> str:
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise DataError(f'architectures is {quote(architectures)}; give a list with one name, ["Qwen3ForCausalLM"].')
    return architectures[0]


def _find_family_name(architecture: str, model_type: object) -> str:
    """Return the model family of a language model's or reward model's architecture.

    `model_type` comes from config.json. Raises DataError for an unsupported architecture.
    """
    names = {family.architecture: name for name, family in FAMILIES.items()}
    classifiers = {family.classifier: name for name, family in FAMILIES.items() if family.classifier}
    name = classifiers.get(architecture) or names.get(architecture.replace(VALUE_HEAD, "ForCausalLM"))
    if name is None:
        page_name = model_type if isinstance(model_type, str) and model_type.isidentifier() else "NAME"
        raise DataError(
            f"architecture {architecture} is not supported; supported are {', '.join(names)}. To add a family, write "
            f"its module, megarl/families/pages/{page_name}.py (.github/CONTRIBUTING.md)."
        )
    return name


def _check_number_formats(config: Mapping[str, Any], reads_mxfp4: bool) -> None:
    for field in ("dtype", "torch_dtype"):
        if config.get(field) not in (None, *DTYPES):
            raise DataError(f"{field} is {quote(config[field])}; it must be one of {', '.join(DTYPES)}.")
    method = mapping(config, "quantization_config").get("quant_method", "unknown")
    if config.get("quantization_config") is not None and not (reads_mxfp4 and method == "mxfp4"):
        raise DataError(
            f"quantization_config: weights of quant_method {quote(method)} cannot be trained; use the model's bfloat16 "
            "weights, or dequantise them and remove the field."
        )


_ONLY_VALUES = {"is_causal": True, "logit_scale": 1.0, "qk_norm": False, "dual_chunk_attention_config": None}
"""Fields that change the computation of vLLM 0.30 (is_causal: of transformers too), with the supported value."""


def _check_supported(config: Mapping[str, Any], architecture: str) -> None:
    """Raise DataError for unsupported values of config.json: number of labels, activation, fields of other models."""
    # transformers defaults to two labels.
    num_labels = len(mapping(config, "id2label")) or 2
    if architecture.endswith(VALUE_HEAD) and num_labels != 1:
        raise DataError(f"{architecture} with {num_labels} labels is not supported; a reward model has one label.")
    if config.get("hidden_act", "silu") != "silu":
        raise DataError(f"hidden_act {config['hidden_act']} is not supported; only silu is.")
    for name, value in _ONLY_VALUES.items():
        if config.get(name) not in (None, value):
            raise DataError(
                f"{name} is {quote(config[name])}: vLLM 0.30 would compute another model than the trainer; use a model "
                "without it, or remove it."
            )
