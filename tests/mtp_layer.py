"""GLM-4.5's layer for multi-token prediction, made of transformers' modules, as an oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn


class MtpOracle(nn.Module):
    """The model of a folder with its MTP layer. `predicted(tokens)` are the layer's logits [tokens, vocabulary]."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer, Glm4MoeRMSNorm

        super().__init__()
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, experts_implementation="eager"
        ).eval()
        config = self.model.config
        self.prefix, hidden = f"model.layers.{config.num_hidden_layers}.", config.hidden_size
        norms = ("enorm", "hnorm", "shared_head.norm")
        self.around: dict[str, Any] = {name: Glm4MoeRMSNorm(hidden, config.rms_norm_eps).to(dtype) for name in norms}
        self.around["eh_proj"] = nn.Linear(2 * hidden, hidden, bias=False, dtype=dtype)
        stored = load_file(folder / "model.safetensors")
        state = {n.removeprefix(self.prefix): v.to(dtype) for n, v in stored.items() if n.startswith(self.prefix)}
        for name, module in self.around.items():
            module.load_state_dict({"weight": state[f"{name}.weight"]})
        for kind, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            experts = range(config.n_routed_experts)
            state[f"mlp.experts.{kind}"] = torch.stack(
                [torch.cat([state[f"mlp.experts.{number}.{part}.weight"] for part in parts]) for number in experts]
            )
        # Its number only decides that it has experts.
        self.layer: Any = Glm4MoeDecoderLayer(config, config.num_hidden_layers - 1).to(dtype).eval()
        self.layer.load_state_dict({name: state[name] for name in self.layer.state_dict()})

    def predicted(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the layer's logits [tokens, vocabulary] of a sequence [tokens]: those at t are of token t + 2.

        Only the layer has a gradient. Like in vLLM, it sees no embedding at position 0.
        """
        length, base = len(tokens), self.model.model
        with torch.no_grad():
            hidden = base(tokens[None]).last_hidden_state
            embedded = nn.functional.pad(base.embed_tokens(tokens[None, 1:]), (0, 0, 0, 1))
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
        found = {f"{self.prefix}{name}.weight": module.weight.grad for name, module in self.around.items()}
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
