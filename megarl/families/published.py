"""Fields of config.json of published models, so that a plan for them needs no download.

These are the models named by recipes in `launch/recipes/`, and the large models of families without a recipe. All other
models are read from their folders.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

# Copied from the config.json files on the Hub: the fields read by `shape_from_config`.
_QWEN3 = {
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "initializer_range": 0.02,
}
_DENSE = _QWEN3 | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 5120,
    "num_key_value_heads": 8,
}
_SMALL = _DENSE | {"tie_word_embeddings": True, "num_hidden_layers": 28}
_EXPERTS = _QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
_GLM = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "attention_bias": True,
    "head_dim": 128,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rope_theta": 1000000,
    "rms_norm_eps": 1e-5,
    "vocab_size": 151552,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "max_position_embeddings": 131072,
}
_GLM_355B = _GLM | {
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 92,
    "n_routed_experts": 160,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "use_qk_norm": True,
}
_LATENT = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "norm_topk_prob": True,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "moe_layer_freq": 1,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
}
_LATENT_LARGE = _LATENT | {
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "q_lora_rank": 1536,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "rms_norm_eps": 1e-6,
}
_YARN = {"type": "yarn", "original_max_position_embeddings": 4096, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
_DEEPSEEK_V3 = _LATENT_LARGE | {
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": _YARN | {"factor": 40, "beta_fast": 32},
}

_GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "quantization_config": {"quant_method": "mxfp4"},
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "rms_norm_eps": 1e-5,
    "vocab_size": 201088,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "max_position_embeddings": 131072,
}
_DELTA_NETS = {
    "hidden_size": 2048,
    "head_dim": 256,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000000,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
}
_QWEN3_5 = {
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "full_attention_interval": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
    "rms_norm_eps": 1e-6,
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
    "initializer_range": 0.02,
}
_QWEN3_5_27B = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "tie_word_embeddings": False,
    "text_config": _QWEN3_5
    | {
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 48,
    },
}
_QWEN3_5_EXPERTS = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "tie_word_embeddings": False,
}
_QWEN3_5_35B = _QWEN3_5_EXPERTS | {
    "text_config": _QWEN3_5
    | {
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 32,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
}

PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-0.6B": _SMALL | {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16},
    "Qwen/Qwen3-1.7B": _SMALL | {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16},
    "Qwen/Qwen3-4B": _SMALL
    | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "Qwen/Qwen3-8B": _DENSE
    | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
    "Qwen/Qwen3-14B": _DENSE | {"intermediate_size": 17408, "num_hidden_layers": 40, "num_attention_heads": 40},
    "Qwen/Qwen3-32B": _DENSE | {"intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64},
    "Qwen/Qwen3-30B-A3B": _EXPERTS
    | {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
    },
    "Qwen/Qwen3-235B-A22B": _EXPERTS
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
    },
    "ByteDance-Seed/Seed-OSS-36B-Instruct": {
        "architectures": ["SeedOssForCausalLM"],
        "model_type": "seed_oss",
        "attention_bias": True,
        "attention_out_bias": False,
        "head_dim": 128,
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_attention_heads": 80,
        "num_hidden_layers": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000000.0,
        "vocab_size": 155136,
        "tie_word_embeddings": False,
        "max_position_embeddings": 524288,
    },
    "openai/gpt-oss-20b": _GPT_OSS | {"num_hidden_layers": 24, "num_local_experts": 32},
    "openai/gpt-oss-120b": _GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128},
    "Qwen/Qwen3-Next-80B-A3B-Instruct": _DELTA_NETS
    | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "intermediate_size": 5120,
        "num_hidden_layers": 48,
        "vocab_size": 151936,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
    },
    "Qwen/Qwen3.5-27B": _QWEN3_5_27B,
    "Qwen/Qwen3.6-27B": _QWEN3_5_27B,
    "Qwen/Qwen3.5-35B-A3B": _QWEN3_5_35B,
    "Qwen/Qwen3.6-35B-A3B": _QWEN3_5_35B,
    "Qwen/Qwen3.5-122B-A10B": _QWEN3_5_EXPERTS
    | {
        "text_config": _QWEN3_5
        | {
            "hidden_size": 3072,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "linear_num_value_heads": 64,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1024,
            "shared_expert_intermediate_size": 1024,
        },
    },
    "Qwen/Qwen3.5-397B-A17B": _QWEN3_5_EXPERTS
    | {
        "text_config": _QWEN3_5
        | {
            "hidden_size": 4096,
            "num_hidden_layers": 60,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "linear_num_value_heads": 64,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 1024,
            "shared_expert_intermediate_size": 1024,
        },
    },
    "zai-org/GLM-4.5": _GLM_355B,
    "zai-org/GLM-4.6": _GLM_355B | {"max_position_embeddings": 202752},
    "zai-org/GLM-4.7": _GLM_355B | {"max_position_embeddings": 202752},
    "zai-org/GLM-4.5-Air": _GLM
    | {
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 46,
        "n_routed_experts": 128,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "use_qk_norm": False,
    },
    "deepseek-ai/DeepSeek-V3": _DEEPSEEK_V3,
    "deepseek-ai/DeepSeek-V3.1": _DEEPSEEK_V3,
    "moonshotai/Moonlight-16B-A3B": _LATENT
    | {
        "hidden_size": 2048,
        "intermediate_size": 11264,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.446,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "vocab_size": 163840,
        "max_position_embeddings": 8192,
    },
    "moonshotai/Kimi-K2-Instruct": _LATENT_LARGE
    | {
        "model_type": "kimi_k2",
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "n_routed_experts": 384,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.827,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
        "vocab_size": 163840,
        "max_position_embeddings": 131072,
        "rope_theta": 50000.0,
        "rope_scaling": _YARN | {"factor": 32.0, "beta_fast": 1.0},
    },
    "zai-org/GLM-4.7-Flash": _LATENT
    | {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "model_type": "glm4_moe_lite",
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.8,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000,
        "vocab_size": 154880,
        "max_position_embeddings": 202752,
    },
}
"""Fields of config.json, by the name on the Hugging Face Hub."""


def published_name(folder: str | Path) -> str | None:
    """Return the Hub's name of a published model with the folder's last name (`models/Qwen3-14B`), or None."""
    return next((name for name in PUBLISHED if name.partition("/")[2] == Path(folder).name), None)
