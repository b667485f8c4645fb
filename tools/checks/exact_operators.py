"""The first operator in which trainer and engine differ, on the same tokens: none with trainer.exact.

A trainer and an engine with the same weights run one sequence on a CPU rank in bfloat16. Outputs of their operators are
compared layer by layer, in the order of the forward pass. A row per operator of the model; with `--usual` trainer.exact
is off, and the first row with differences names the operator to look at.

With `--run`, `--step` and `--sample` the sequence is a recorded sample, as named by `megarl replay --bisect`. To
compare two installations, make the table in both: the first row with another checksum names the operator that differs.
"""

from __future__ import annotations

import argparse
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megarl.config.recipe import load
from megarl.reshard.checks.fingerprint import MASK
from megarl.rollout.step.step_record import ARRAYS, RECIPE, record_folder
from megarl.tracking.run_folder import RECORDS
from tests.rank_pool import RankPool
from tools.family_models import ONE_RANK, model_shard, tensors_in
from tools.make_tiny_model import make_tiny_model

DURATION = {"small": "20 s (2 layers, 40 tokens)", "full": "60 s (4 layers of width 1024, 300 tokens)"}
SMALL = {"hidden_size": 128, "num_layers": 2, "tokens": 40}
HEAD = 32
"""Channels of an attention head."""
OPERATORS = (
    ("norm", "input_layernorm", "input_layernorm"),
    ("query, key, value", "self_attention.linear_qkv", "self_attn.qkv_proj"),
    ("query norm", "self_attention.q_layernorm", "self_attn.q_norm"),
    ("key norm", "self_attention.k_layernorm", "self_attn.k_norm"),
    ("attention", "self_attention.core_attention", "self_attn.attn"),
    ("attention output", "self_attention.linear_proj", "self_attn.o_proj"),
    ("second norm", "pre_mlp_layernorm", "post_attention_layernorm"),
    ("gate and up", "mlp.linear_fc1", "mlp.gate_up_proj"),
    ("down", "mlp.linear_fc2", "mlp.down_proj"),
)
"""Name, trainer's module and engine's module of each operator of a layer, in the order of the forward pass."""
ROUTER = ("router", "mlp.router", "mlp.gate")
EXPERTS = ("experts", "mlp", "mlp.experts")
"""Further operators of a mixture of experts. Dense layers of Megatron have a module `mlp` too."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, help="folder of a model; default: a random one")
    parser.add_argument(
        "--family", choices=("qwen3", "llama", "qwen3_moe"), default="qwen3", help="family of the random model"
    )
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=300, help="length of the sequence")
    parser.add_argument("--run", type=Path, help="folder of a run with train.record: its model and tokens are used")
    parser.add_argument("--step", type=int, default=1, help="recorded step of --run")
    parser.add_argument("--sample", type=int, default=0, help="sample of the step")
    parser.add_argument("--usual", action="store_true", help="compare without trainer.exact; no row fails then")


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    import numpy as np

    tokens, recorded = np.random.default_rng(0).integers(3, 400, options.tokens), None
    if options.run is not None:
        tokens = recorded_tokens(options.run, options.step, options.sample)
        recorded = load(record_folder(options.run / RECORDS, options.step) / RECIPE, is_of_run=True).model.folder
    with tempfile.TemporaryDirectory() as temporary, RankPool(1) as pool:
        folder = options.model or recorded or make_tiny_model(
            Path(temporary) / "model", family=options.family, hidden_size=options.hidden_size,
            num_layers=options.num_layers, num_heads=8, num_kv_heads=4, head_dim=HEAD, initializer_range=0.05,
            intermediate_size=3 * options.hidden_size,
        )  # fmt: skip
        [rows] = pool.run(compare_operators, str(folder), tokens, not options.usual)
    for row in rows:
        yield row if options.usual else {**row, "met": row["differing"] == 0}


def recorded_tokens(run: Path, step: int, sample: int) -> Any:
    """Return the tokens of a recorded sample: int64 [tokens]."""
    import numpy as np
    from safetensors.numpy import load_file

    arrays = load_file(record_folder(run / RECORDS, step) / ARRAYS)
    digest = int(arrays["digest.token_ids"][sample])
    for name, array in arrays.items():
        if name.startswith("sampled.") and name.endswith("token_ids"):
            tokens = array.astype(np.int64)
            if zlib.crc32(tokens.tobytes()) == digest:
                return tokens
    raise SystemExit(f"{run}: step {step} has no tokens of sample {sample}")


def compare_operators(folder: str, tokens: Any, is_exact: bool) -> list[dict[str, Any]]:
    """Return a row per operator: how many of its output's elements differ, and the largest difference.

    `tokens` int64 [tokens] is the sequence. `checksum` is that of the trainer's output.
    """
    from megarl.reshard.checks.fingerprint import checksum

    engine = of_engine(folder, tokens, is_exact)
    trainer = of_trainer(folder, tokens, is_exact)
    rows = []
    for name, ours in trainer.items():
        theirs = engine[name].flatten()
        ours = ours.flatten()
        assert ours.shape == theirs.shape, f"{name}: trainer {tuple(ours.shape)}, engine {tuple(theirs.shape)}"
        distance = (ours.float() - theirs.float()).abs()
        rows.append(
            {
                "operator": name,
                "elements": len(ours),
                "differing": int((distance > 0).sum()),
                "largest": float(distance.max()),
                "checksum": f"{int(checksum(ours).item()) & MASK:016x}",
            }
        )
    return rows


def of_trainer(folder: str, tokens: Any, is_exact: bool) -> dict[str, Any]:
    """Return the output [tokens, ...] of each operator of a trainer, and its log-probs, by name."""
    import numpy as np
    import torch

    from megarl.data.token_batch import TokenBatch
    from megarl.training.model_parts import ModelParts
    from megarl.types import TrainingSequence

    model = model_shard(
        folder, ONE_RANK, "bfloat16", trainer={"exact": is_exact}, parts=ModelParts(exact_blocks=int(is_exact))
    )
    [chunk] = model.chunks
    outputs_by_name: dict[str, Any] = {}
    for name, module in _modules(chunk, "decoder.layers", "embedding", "decoder.final_layernorm", 1).items():
        keep = _keep(outputs_by_name, name, len(tokens))
        if name.endswith("router"):
            _call_with_output(module, "gating", keep)
        else:
            module.register_forward_hook(keep)
    batch = TokenBatch.from_sequences([TrainingSequence(tokens, np.arange(len(tokens)) > 0)])
    outputs = model.forward([batch])
    assert outputs is not None
    shape = model.shape
    per_group = shape.num_heads // shape.num_kv_heads
    for name in [name for name in outputs_by_name if name.endswith("query, key, value")]:
        # Megatron keeps the heads of a group together; vLLM has all queries first, then keys, then values.
        groups = outputs_by_name[name].view(len(tokens), shape.num_kv_heads, per_group + 2, shape.head_dim)
        parts = groups[:, :, :per_group], groups[:, :, per_group], groups[:, :, per_group + 1]
        outputs_by_name[name] = torch.cat([part.flatten(1) for part in parts], dim=1)
    return outputs_by_name | {"log-probs": torch.from_numpy(outputs[0][1:])}


def of_engine(folder: str, tokens: Any, is_exact: bool) -> dict[str, Any]:
    """Return the output [tokens, ...] of each operator of an engine, and its log-probs, by name."""
    import torch

    from megarl.config import RolloutConfig
    from megarl.engine.engine import RolloutEngine
    from megarl.engine.parts.choice import EngineFeatures

    config = RolloutConfig(kv_cache_gib=0.1, max_concurrent_requests=4)
    engine = RolloutEngine(
        folder,
        config,
        max_model_len=len(tokens) + 8,
        dtype="bfloat16",
        seed=0,
        features=EngineFeatures(exact_blocks=int(is_exact)),
    )
    engine.load_tensors(tensors_in(folder).items())
    outputs_by_name: dict[str, Any] = {}
    for name, module in _modules(engine.model, "model.layers", "model.embed_tokens", "model.norm", 2).items():
        module.register_forward_hook(_keep(outputs_by_name, name, len(tokens)))
    logprobs = engine.prompt_logprobs(tokens)
    assert logprobs is not None
    engine.close()
    return outputs_by_name | {"log-probs": torch.from_numpy(logprobs[1:])}


def _modules(model: Any, layers: str, embedding: str, norm: str, column: int) -> dict[str, Any]:
    """Return the modules of a model by the operators' names, in the order of the forward pass.

    `column` is the place of this side's module names in `OPERATORS`.
    """
    modules = dict(model.named_modules())
    modules_by_operator = {"embedding": modules[embedding]}
    for number in range(len(modules[layers])):
        is_mixture = f"{layers}.{number}.{ROUTER[column]}" in modules
        for operator in (*OPERATORS, *([ROUTER, EXPERTS] if is_mixture else [])):
            module = modules.get(f"{layers}.{number}.{operator[column]}")
            # Llama has no norms of queries and keys; Megatron has modules without effect in their place.
            if module is not None and type(module).__name__ != "IdentityOp":
                modules_by_operator[f"layer {number} {operator[0]}"] = module
    return modules_by_operator | {"last norm": modules[norm]}


def _call_with_output(module: Any, method: str, hook: Any) -> None:
    """Call the forward hook with the output of a module's method. Megatron's router has no module for its logits."""
    original = getattr(module, method)

    def call_with_hook(*inputs: Any) -> Any:
        output = original(*inputs)
        hook(module, inputs, output)
        return output

    setattr(module, method, call_with_hook)


def _keep(outputs_by_name: dict[str, Any], name: str, num_tokens: int) -> Any:
    """Return a forward hook that stores the first output [tokens, ...] of an operator, without padding."""

    def hook(module: Any, inputs: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        outputs_by_name.setdefault(name, first[:num_tokens].detach().clone())

    return hook
