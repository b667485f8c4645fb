"""Make a tiny language model folder with random weights: config, safetensors, tokenizer, chat template.

    megarl make model --out runs/tiny_model --hidden-size 128 --num-layers 4

The architecture is a real one (Qwen, Llama, Mistral, GLM, gpt-oss), so Megatron-Core, vLLM and transformers treat the
folder as they treat a large checkpoint. The tokenizer is a byte-level BPE trained on a few lines of text below:
decoding restores any text exactly, each digit is its own token, and the words of the quickstart's prompts are single
tokens.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GenerationConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
)
from transformers.utils import logging

FAMILIES = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2_moe": (Qwen2MoeConfig, Qwen2MoeForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "glm4_moe": (Glm4MoeConfig, Glm4MoeForCausalLM),
    "qwen3_next": (Qwen3NextConfig, Qwen3NextForCausalLM),
    "qwen3_5_text": (Qwen3_5TextConfig, Qwen3_5ForCausalLM),
    "qwen3_5_moe_text": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM),
    "qwen3_5": (Qwen3_5Config, Qwen3_5ForConditionalGeneration),
    "qwen3_5_moe": (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
    "glm4_moe_lite": (Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM),
    "gpt_oss": (GptOssConfig, GptOssForCausalLM),
    "seed_oss": (SeedOssConfig, SeedOssForCausalLM),
}

LATENT = ("deepseek_v3", "glm4_moe_lite")
"""Names in `FAMILIES` of models with latent attention, a sigmoid router and a dense first layer."""
WITH_VISION = ("qwen3_5", "qwen3_5_moe")
"""Names in `FAMILIES` of models with a vision tower, and with layers for multi-token prediction."""
WITH_DELTA_NETS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", *WITH_VISION)
"""Names in `FAMILIES` of models with three gated delta-net layers before each attention layer. They need at least four
layers, to have both kinds."""
WITH_EXPERTS = ("qwen2_moe", "qwen3_moe", "glm4_moe", "qwen3_next", "qwen3_5_moe_text", "qwen3_5_moe")
PACKED = ("qwen3_5_moe",)
"""Names in `FAMILIES` of models written with one tensor for all experts of a layer. transformers packs experts in
memory, not in files."""
WITH_MTP = {
    **dict.fromkeys(("glm4_moe", *LATENT), "num_nextn_predict_layers"),
    "qwen3_next": "num_nextn_predict_layers",
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", *WITH_VISION), "mtp_num_hidden_layers"),
}
"""Names in `FAMILIES` of models with layers for multi-token prediction (MTP), and their field in config.json with the
number of these layers."""
UNTIED = ("glm4_moe", "gpt_oss", "qwen3_next", "qwen3_5_moe_text", "qwen3_5_moe", *LATENT)
"""Names in `FAMILIES` of models that never share weights between input embeddings and output head. Dense Qwen3.5 has
both forms, by size."""

SMALLEST_TOWER = {
    "depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "patch_size": 2, "num_position_embeddings": 4,
}  # fmt: skip
"""Sizes of a vision tower. The tower is never run."""

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

CHAT_TEMPLATE = (
    "{%- if tools %}{{- '<|im_start|>system\\nTools:' }}"
    "{%- for tool in tools %}{{- ' ' + tool.function.name }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.content %}{{- message.content }}{%- endif %}"
    "{%- for call in message.tool_calls or [] %}"
    '{{- \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}"
    "{%- endfor %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

# Qwen's rule: words keep their leading space, each digit stands alone.
PRE_TOKENS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

TRAINING_TEXT = [
    "system\nuser\nassistant\ntool\n",
    "\\boxed{ } {- <think>\n</think>\n<answer> </answer>",
    "You are a helpful assistant. Please reason step by step, and put your final answer within \\boxed{}.",
    "State the final answer to the following arithmetic problem: + - * / = ( ) .",
    "Calculate. What is the sum, the product, the difference, the number, the word? Sort these numbers.",
    "The answer is",
]

TOOL_TEXT = [
    '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1 * 2"}}\n</tool_call>',
    "Tools: calculator. The product is",
]
"""Further training text of the tokenizer, for models that learn to call tools. The words of a tool call become single
tokens."""


def make_tokenizer(*, tool_words: bool = False) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with a ChatML template. Equal arguments give equal tokenizers. `tool_words`
    adds `TOOL_TEXT` to its training text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKENS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*TRAINING_TEXT, *(TOOL_TEXT if tool_words else [])], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def expert_fields(family: str, num_experts: int, experts_per_token: int, intermediate_size: int) -> dict[str, object]:
    """Return the fields of config.json about experts, for a family of `WITH_EXPERTS`."""
    if family == "glm4_moe":
        return {
            "n_routed_experts": num_experts,
            "num_experts_per_tok": experts_per_token,
            "moe_intermediate_size": intermediate_size,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "use_qk_norm": True,
            "attention_bias": True,
        }
    fields: dict[str, object] = {
        "num_experts": num_experts,
        "num_experts_per_tok": experts_per_token,
        "moe_intermediate_size": intermediate_size,
        "norm_topk_prob": family != "qwen2_moe",
    }
    if family != "qwen3_moe":
        fields["shared_expert_intermediate_size"] = 2 * intermediate_size
    return fields


def latent_fields(
    family: str, head_dim: int, query_rank: int | None, num_experts: int, experts_per_token: int, expert_size: int
) -> dict[str, object]:
    """Return the fields of config.json about attention and experts, for a family of `LATENT`. `kv_lora_rank` and the
    rotary channels have the values of the released models, because vLLM's CPU kernel supports no others.
    """
    return {
        "q_lora_rank": query_rank,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": head_dim,
        "v_head_dim": head_dim,
        "n_routed_experts": num_experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": experts_per_token,
        "moe_intermediate_size": expert_size,
        "routed_scaling_factor": 2.5,
        # GLM-4.7-Flash has no groups. Where there are some, two experts are chosen of each.
        "n_group": 1 if family == "glm4_moe_lite" else 4,
        "topk_group": 1 if family == "glm4_moe_lite" else experts_per_token // 2,
        "rms_norm_eps": 1e-6,
        "num_nextn_predict_layers": 0,
        # vLLM reads these fields; transformers 5 does not write them by itself.
        "first_k_dense_replace": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    }


def draw_weights(model_class: type[PreTrainedModel], config: PretrainedConfig, seed: int) -> PreTrainedModel:
    """Return a model with random weights. Norms and biases get random deviations from 1 and 0, so that a test notices
    if their elements are permuted.

    Buffers saved in the checkpoint, such as the biases of routers, are treated in the same way.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config)
        with torch.no_grad():
            saved = model.state_dict(keep_vars=True)
            buffers = [buffer for name, buffer in model.named_buffers() if name in saved]
            for tensor in (*model.parameters(), *buffers):
                if tensor.dim() == 1:
                    tensor.add_(torch.randn_like(tensor), alpha=0.05)
    return model


def add_prediction_layers(file: Path, hidden_size: int) -> None:
    """Add tensors for multi-token prediction to a safetensors file, under the names of released checkpoints.

    transformers has no such layers for Qwen3.5. A whole layer has more tensors than these.
    """
    generator = torch.Generator().manual_seed(0)
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    sizes = {"fc": (hidden_size, 2 * hidden_size), **dict.fromkeys(norms, (hidden_size,))}
    added = {f"mtp.{name}.weight": torch.randn(size, generator=generator) for name, size in sizes.items()}
    # transformers refuses a file without this field.
    save_file(load_file(file) | added, file, {"format": "pt"})


def add_mtp_layers(file: Path, num_layers: int, num_mtp_layers: int, seed: int) -> None:
    """Add layers for multi-token prediction to a file: the released models have them, transformers does not.

    Each has the tensors of the last layer, two norms, a projection, and a norm before the head. Models with delta-nets
    have one under names of their own. In others the layers are numbered after the last one, with copies of embedding
    and head.
    """
    tensors = load_file(file)
    generator = torch.Generator().manual_seed(seed + 1)

    def draw_like(like: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(like.shape, generator=generator)
        # Norms and biases spread around their mean, as in `draw_weights`.
        return like.mean() + 0.05 * noise if like.dim() == 1 else like.std() * noise

    text = "model.language_model." if "model.language_model.norm.weight" in tensors else "model."
    last, norm, embedding = (
        f"{text}layers.{num_layers - 1}.",
        tensors[f"{text}norm.weight"],
        tensors[f"{text}embed_tokens.weight"],
    )
    layer = {name.removeprefix(last): tensor for name, tensor in tensors.items() if name.startswith(last)}
    has_own_names = any(".linear_attn." in name for name in tensors)
    names = MTP_NAMES[has_own_names]
    for number in range(num_mtp_layers):
        first = f"mtp.layers.{number}." if has_own_names else f"{text}layers.{num_layers + number}."
        around = "mtp." if has_own_names else first
        tensors |= {first + name: draw_like(tensor) for name, tensor in layer.items()}
        tensors |= {f"{around}{name}.weight": draw_like(norm) for name in names[:3]}
        projection = embedding.std() * torch.randn(len(norm), 2 * len(norm), generator=generator)
        tensors[f"{around}{names[3]}.weight"] = projection
        if not has_own_names:
            tensors[f"{first}embed_tokens.weight"] = embedding.clone()
            tensors[f"{first}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})


MTP_NAMES = {
    False: ("enorm", "hnorm", "shared_head.norm", "eh_proj"),
    True: ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "fc"),
}
"""Names of an MTP layer's tensors around its transformer layer: three norms, a projection. True: with own names."""


def make_tiny_model(
    out: str | Path,
    *,
    family: str = "qwen3",
    hidden_size: int = 128,
    num_layers: int = 4,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int | None = None,
    intermediate_size: int = 256,
    num_mtp_layers: int = 0,
    tie_word_embeddings: bool | None = None,
    vocab_size: int | None = None,
    max_position_embeddings: int = 2048,
    initializer_range: float = 0.02,
    num_experts: int = 8,
    experts_per_token: int = 2,
    expert_intermediate_size: int = 64,
    query_rank: int | None = 48,
    tool_words: bool = False,
    seed: int = 0,
) -> Path:
    """Write a float32 model into the folder `out`, and return the folder. Equal arguments give equal bytes.

    `num_experts`, `experts_per_token` and `expert_intermediate_size` apply only to families with experts. `query_rank`
    applies only to `LATENT` families: the size of the queries' latent vector. With None, queries are projected from the
    hidden states directly. `LATENT` families ignore `num_kv_heads`. Default `head_dim`: hidden_size / num_heads.
    `vocab_size` is at least the tokenizer's size, the default. Default `tie_word_embeddings`: true, except in families
    of `UNTIED`. `num_mtp_layers` layers for multi-token prediction follow the last layer, in families of `WITH_MTP`.
    Raises ValueError if sizes do not fit each other.
    """
    tokenizer = make_tokenizer(tool_words=tool_words)
    vocab_size = vocab_size or len(tokenizer)
    if tie_word_embeddings is None:
        tie_word_embeddings = family not in UNTIED
    head_dim = head_dim or hidden_size // num_heads
    if vocab_size < len(tokenizer):
        raise ValueError(f"vocab_size {vocab_size} is smaller than the tokenizer's {len(tokenizer)}")
    has_head_dim = family not in ("qwen2", "qwen2_moe")
    if not has_head_dim and head_dim * num_heads != hidden_size:
        raise ValueError(f"{family} has head_dim = hidden_size / num_heads, not {head_dim}")
    own_fields: dict[str, object] = {"head_dim": head_dim} if has_head_dim else {}
    if num_mtp_layers and family not in WITH_MTP:
        raise ValueError(f"{family} has no layers for multi-token prediction here; {', '.join(WITH_MTP)} have")
    if family == "mistral":
        own_fields["sliding_window"] = None
    if family == "gpt_oss":
        rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "truncate": False, "beta_fast": 32.0,
                "beta_slow": 1.0, "original_max_position_embeddings": max_position_embeddings // 4}  # fmt: skip
        own_fields |= {"rope_parameters": rope, "sliding_window": 16, "num_local_experts": num_experts}
        own_fields |= {"num_experts_per_tok": experts_per_token}
    if family in WITH_DELTA_NETS:
        # One value head's size differs from a key head's, and two value heads share a key head: an exchange shows.
        own_fields |= {
            "linear_num_key_heads": num_heads,
            "linear_num_value_heads": 2 * num_heads,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 24,
        }
    if family in WITH_EXPERTS:
        own_fields |= expert_fields(family, num_experts, experts_per_token, expert_intermediate_size)
    if family in LATENT:
        num_kv_heads = num_heads
        own_fields = latent_fields(
            family, head_dim, query_rank, num_experts, experts_per_token, expert_intermediate_size
        )
    if family in WITH_MTP:
        own_fields[WITH_MTP[family]] = num_mtp_layers
    config_class, model_class = FAMILIES[family]
    fields: dict[str, Any] = dict(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        tie_word_embeddings=tie_word_embeddings,
        max_position_embeddings=max_position_embeddings,
        initializer_range=initializer_range,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
        **own_fields,
    )
    if family in WITH_VISION:
        tower = SMALLEST_TOWER | {"out_hidden_size": hidden_size}
        shared = {name: fields[name] for name in ("tie_word_embeddings", "dtype")}
        fields = {"text_config": fields, "vision_config": tower, **shared}
    config = config_class(**fields)
    model = draw_weights(model_class, config, seed)
    ends = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=tokenizer.pad_token_id)
    logging.disable_progress_bar()
    model.save_pretrained(out, save_original_format=family not in PACKED)
    if family in WITH_VISION and not num_mtp_layers:
        add_prediction_layers(Path(out) / "model.safetensors", hidden_size)
    if num_mtp_layers:
        add_mtp_layers(Path(out) / "model.safetensors", num_layers, num_mtp_layers, seed)
    tokenizer.save_pretrained(out)
    return Path(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--family", choices=FAMILIES, default="qwen3")
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--num-heads", type=int, default=4)
    parser.add_argument("--num-kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, help="left out: hidden size / heads")
    parser.add_argument("--intermediate-size", type=int, default=256)
    parser.add_argument(
        "--tie-word-embeddings", action=argparse.BooleanOptionalAction, help="left out: if the family does"
    )
    parser.add_argument("--vocab-size", type=int, help="left out: the tokenizer's")
    parser.add_argument("--max-position-embeddings", type=int, default=2048)
    parser.add_argument("--num-experts", type=int, default=8, help="of a family with experts")
    parser.add_argument("--experts-per-token", type=int, default=2)
    parser.add_argument("--expert-intermediate-size", type=int, default=64)
    parser.add_argument("--query-rank", type=int, default=48, help="of a family with latent attention")
    parser.add_argument("--num-mtp-layers", type=int, default=0, help="layers for multi-token prediction")
    parser.add_argument("--initializer-range", type=float, default=0.02, help="spread of the random weights")
    parser.add_argument("--tool-words", action="store_true", help="the tokenizer knows the words of tool calls")
    parser.add_argument("--seed", type=int, default=0)
    logging.disable_progress_bar()
    out = make_tiny_model(**vars(parser.parse_args()))
    print(f"wrote {out}: {sum(file.stat().st_size for file in out.iterdir()):,} bytes")


if __name__ == "__main__":
    main()
