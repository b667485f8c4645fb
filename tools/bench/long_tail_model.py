"""Make a tiny model whose answers have a long tail: lengths close to a geometric distribution.

    python tools/bench/long_tail_model.py --out MODEL --data train.jsonl --mean-tokens 40

An untrained model samples almost uniformly, so the chance of the end token is almost the same after every token. Its
output row is set for a chance of 1 / mean-tokens. For grpo_vs_trl.py: a batch waits for its longest answer.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

_CONSTANT = 0.2
"""First component of every embedding: ten times a random one, so that the end token's logit varies little."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="JSONL of problems, whose prompts are tried")
    parser.add_argument("--mean-tokens", type=int, default=40, help="mean tokens of an answer, about")
    options = parser.parse_args()
    maker = Path(__file__).resolve().parents[1] / "make_tiny_model.py"
    shape = ["--num-layers", "2", "--hidden-size", "128", "--no-tie-word-embeddings"]
    subprocess.run([sys.executable, maker, "--out", options.out, *shape], check=True)

    model = AutoModelForCausalLM.from_pretrained(options.out, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(options.out, padding_side="left")
    messages = [json.loads(line)["messages"] for line in options.data.read_text().splitlines()[:256]]
    prompts = tokenizer.apply_chat_template(
        [[message] for message in messages],
        add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True,
    )  # fmt: skip
    end = model.config.eos_token_id
    embeddings: torch.Tensor = model.get_input_embeddings().weight  # pyright: ignore[reportAssignmentType]
    output: torch.Tensor = model.lm_head.weight
    chance = torch.tensor(0.0)
    with torch.no_grad():
        embeddings[:, 0] = _CONSTANT
        output[:, 0] = 0
        output[end] = 0
        # Halve the range of the end token's logit until it ends answers at the mean length.
        low, high = 0.0, 8.0
        for _ in range(20):
            output[end, 0] = (low + high) / 2
            chance = model(**prompts).logits[:, -1].softmax(-1)[:, end].mean()
            low, high = (
                (low, output[end, 0].item()) if chance > 1 / options.mean_tokens else (output[end, 0].item(), high)
            )
    model.save_pretrained(options.out)
    print(f"{options.out}: the end token has a chance of {chance:.4f} after each token")


if __name__ == "__main__":
    main()
