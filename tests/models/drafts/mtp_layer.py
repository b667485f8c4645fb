"""A model's layer for multi-token prediction, made of transformers' modules, as an oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

NUMBERED = {
    "enorm": "enorm", "hnorm": "hnorm", "shared_head.norm": "shared_head.norm", "eh_proj": "eh_proj",
}  # fmt: skip
OWN = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "shared_head.norm": "norm", "eh_proj": "fc"}
"""Names of the tensors around the transformer layer, by those of DeepSeek-V3 and GLM-4.5, in files of Qwen."""


class MtpOracle(nn.Module):
    """The model of a folder with its MTP layer. `predicted(tokens)` are the layer's logits [tokens, vocabulary]."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM

        super().__init__()
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, experts_implementation="eager"
        ).eval()
        config, base = self.model.config, self.model.model
        stored = load_file(folder / "model.safetensors")
        self.has_own_names = "mtp.fc.weight" in stored
        numbered = f"model.layers.{config.num_hidden_layers}."
        self.prefix = "mtp.layers.0." if self.has_own_names else numbered
        self.outside = "mtp." if self.has_own_names else numbered
        self.names = OWN if self.has_own_names else NUMBERED
        hidden = config.hidden_size
        norm = type(base.norm)
        self.around: dict[str, Any] = {
            kind: nn.Linear(2 * hidden, hidden, bias=False, dtype=dtype)
            if kind == "eh_proj"
            else norm(hidden, config.rms_norm_eps).to(dtype)
            for kind in self.names
        }
        for kind, module in self.around.items():
            module.load_state_dict({"weight": stored[f"{self.outside}{self.names[kind]}.weight"].to(dtype)})
        state = {n.removeprefix(self.prefix): v.to(dtype) for n, v in stored.items() if n.startswith(self.prefix)}
        # The last layer's number decides that it has experts, and that it has attention.
        number = config.num_hidden_layers - 1
        self.layer: Any = type(base.layers[number])(config, number).to(dtype).eval()
        for kind, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            # Files may have packed experts, as transformers has them.
            if f"mlp.experts.{kind}" in self.layer.state_dict().keys() - state.keys():
                experts = range(len(self.layer.mlp.experts.gate_up_proj))
                state[f"mlp.experts.{kind}"] = torch.stack(
                    [torch.cat([state[f"mlp.experts.{number}.{part}.weight"] for part in parts]) for number in experts]
                )
        self.layer.load_state_dict({name: state[name] for name in self.layer.state_dict()})

    def predicted(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the layer's logits [tokens, vocabulary] of a sequence [tokens]: those at t are of token t + 2.

        Only the layer has a gradient. Like in vLLM, layers of the numbered form see no embedding at position 0.
        """
        length, base = len(tokens), self.model.model
        with torch.no_grad():
            hidden = base(tokens[None]).last_hidden_state
            embedded = nn.functional.pad(base.embed_tokens(tokens[None, 1:]), (0, 0, 0, 1))
            if not self.has_own_names:
                embedded[:, 0] = 0
        joined = torch.cat([self.around["enorm"](embedded), self.around["hnorm"](hidden)], -1)
        positions = torch.arange(length)[None]
        mask = torch.full((length, length), -torch.inf, dtype=joined.dtype).triu(1)[None, None]
        found = self.layer(
            self.around["eh_proj"](joined),
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=base.rotary_emb(hidden, positions),
        )
        found = found[0] if isinstance(found, tuple) else found
        return nn.functional.linear(self.around["shared_head.norm"](found), self.model.lm_head.weight.detach())[0]

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradients of the layer's tensors [*shape], by their names in the folder."""
        found = {f"{self.outside}{self.names[kind]}.weight": module.weight.grad for kind, module in self.around.items()}
        for name, parameter in self.layer.named_parameters():
            assert parameter.grad is not None
            inside, _, kind = name.partition(".experts.")
            if not kind:
                found[self.prefix + name] = parameter.grad
                continue
            parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
            for number, expert in enumerate(parameter.grad):
                for part, value in zip(parts, expert.chunk(len(parts)), strict=True):
                    found[f"{self.prefix}{inside}.experts.{number}.{part}.weight"] = value
        return found
