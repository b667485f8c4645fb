"""Random EAGLE-3 drafters in the form of published files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def make_eagle3(
    folder: Path,
    policy: Path,
    *,
    draft_vocab_size: int | None = 100,
    own_embedding: bool = False,
    config: Mapping[str, Any] | None = None,
    change: Callable[[dict[str, torch.Tensor]], object] = lambda tensors: None,
) -> Path:
    """Write a drafter for the policy in a folder. `change` edits its tensors, `config` its config.json."""
    target = json.loads((policy / "config.json").read_text())
    random = torch.Generator().manual_seed(3)
    hidden, vocabulary, inner = target["hidden_size"], target["vocab_size"], 2 * target["hidden_size"]
    drafted = draft_vocab_size or vocabulary
    heads, kv_heads, head_dim = target["num_attention_heads"], target["num_key_value_heads"], target["head_dim"]
    queries, keys = heads * head_dim, kv_heads * head_dim
    sizes = {
        "fc": (hidden, 3 * hidden),
        "lm_head": (drafted, hidden),
        "midlayer.self_attn.q_proj": (queries, 2 * hidden),
        "midlayer.self_attn.k_proj": (keys, 2 * hidden),
        "midlayer.self_attn.v_proj": (keys, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, queries),
        "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
    } | ({"embed_tokens": (vocabulary, hidden)} if own_embedding else {})
    tensors = {f"{name}.weight": 0.1 * torch.randn(size, generator=random) for name, size in sizes.items()}
    norms = ("norm", *(f"midlayer.{name}" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")))
    tensors |= {f"{name}.weight": torch.ones(hidden) for name in norms}
    if drafted != vocabulary:
        tokens = torch.randperm(vocabulary, generator=random)[:drafted].sort().values
        tensors["d2t"] = tokens - torch.arange(drafted)
        tensors["t2d"] = torch.isin(torch.arange(vocabulary), tokens)
    change(tensors)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    fields = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "num_hidden_layers": 1,
        "vocab_size": vocabulary,
        "draft_vocab_size": drafted,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "max_position_embeddings": target["max_position_embeddings"],
        "rope_theta": 10000.0,
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
    } | dict(config or {})
    (folder / "config.json").write_text(json.dumps(fields))
    return folder
