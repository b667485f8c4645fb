"""A model folder whose policy calls a tool now and then, without any training."""

from __future__ import annotations

import shutil
from pathlib import Path

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "add", "arguments": {"a": 2, \n</tool_call>'
WORDS = ("The", " number", " is", " sum")
LOOP = " and"
_STRENGTH = 20.0

TEMPLATE = (
    "{%- if tools %}{{- '<|im_start|>system\\n' }}{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content }}"
    "{%- for call in message.tool_calls %}{{- '<tool_call>\\n' + {'name': call.function.name, 'arguments': "
    "call.function.arguments} | tojson + '\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def make_tool_model(source: Path, out: Path, calls: tuple[str, str] = (CALL, BROKEN)) -> Path:
    """A copy of a model folder in which a token's successors depend on it alone.

    A turn begins with the first of `calls` (three of eight), the second (one of eight), or one of four words, which go
    on at random; `LOOP` repeats itself without end.
    """
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoTokenizer

    shutil.copytree(source, out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    weights = load_file(out / "model.safetensors")
    free = [token for text in calls for token in [len(tokenizer)] if tokenizer.add_tokens([text])]
    assert len(free) == 2 and len(tokenizer) <= len(weights["lm_head.weight"])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(out)

    def token(text: str) -> int:
        [found] = tokenizer.encode(text, add_special_tokens=False)
        return found

    end, words = token("<|im_end|>"), [token(word) for word in WORDS]
    successors = {token("\n"): [*free, *words], **{word: [*words, end] for word in words}}
    successors |= {free[0]: [end], free[1]: [end], token(LOOP): [token(LOOP)]}
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    weights["model.norm.weight"].fill_(1.0)
    embedding, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    generator = torch.Generator().manual_seed(5)
    directions = torch.linalg.qr(torch.randn(embedding.shape[1], embedding.shape[1], generator=generator))[0]
    embedding.normal_(generator=generator)
    head.zero_()
    for direction, (before, after) in zip(directions, successors.items(), strict=False):
        embedding[before] = direction
        for one in after:
            extra = torch.tensor(3.0).log() if one == free[0] and len(after) > 1 else 0.0
            head[one] += (_STRENGTH + extra) * direction / embedding.shape[1] ** 0.5
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out
