"""Tests that need a GPU: its kernels, its streams, its memory, and the colocated loop on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("cp", [1, 2])
def test_varlen_attention_is_attention(cp: int) -> None:
    """Each context rank's queries against plain softmax attention in float32."""
    from megarl.models.attention import PackedAttention, PackedRow

    lengths, heads, groups, width = [64, 4, 128, 32], 8, 2, 64
    config: Any = SimpleNamespace(
        kv_channels=width, window_size=None, window_attn_skip_freq=None, softmax_type="vanilla"
    )
    attention = PackedAttention(config=config)
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(sum(lengths), n, width, device="cuda", dtype=torch.bfloat16) for n in (heads, groups, groups)
    )
    expected = torch.cat(
        [
            torch.nn.functional.scaled_dot_product_attention(
                *(x.transpose(0, 1).float() for x in parts), is_causal=True, enable_gqa=True
            ).transpose(0, 1)
            for parts in zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
        ]
    )
    rows = [PackedRow.from_lengths(lengths, torch.device("cuda"), "packed", cp=cp, cp_rank=rank) for rank in range(cp)]
    local_tokens = [row.local for row in rows if row.local is not None]
    all_tokens = torch.cat(local_tokens)

    def select(x: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
        return x if index is None else x[index]

    for row, tokens in zip(rows, local_tokens, strict=True):
        parts = [
            attention._attend_varlen(
                select(q[tokens], part.queries),
                select(k[all_tokens], part.keys),
                select(v[all_tokens], part.keys),
                part,
            )
            for part in row.parts
        ]
        out = parts[0] if row.output_order is None else torch.cat(parts)[row.output_order]
        torch.testing.assert_close(out.float(), expected[tokens], rtol=0, atol=2e-2)


@pytest.mark.parametrize("window", [0, 70])
def test_attention_of_a_tree_is_that_of_its_paths(window: int) -> None:
    """FlexAttention's kernels, compiled, against the CPU's in float64: outputs and gradients, with sinks."""
    import numpy as np

    from megarl.data.token_batch import TokenBatch
    from megarl.models.trees.attention import attend
    from megarl.models.trees.row import TreeRow
    from megarl.training.rows.choice import make_microbatch
    from megarl.types import TrainingSequence

    random = np.random.default_rng(0)
    for prompt_tokens in (300, 513):
        prompt = random.integers(1, 99, prompt_tokens)
        ids = [np.concatenate([prompt, random.integers(1, 99, length)]) for length in (90, 7, 260, 128)]
        batch = TokenBatch.from_sequences([TrainingSequence(one, np.ones(len(one), bool)) for one in ids])
        batch.shares_prefixes = True
        trees = {}
        for name in ("cpu", "cuda"):
            row = make_microbatch(batch, multiple=2, qkv_format="packed", device=torch.device(name)).row
            assert isinstance(row, TreeRow)
            trees[name] = row.tree
        torch.manual_seed(0)
        shapes = (8, 64), (2, 64), (2, 64)
        size = len(trees["cpu"].positions)
        given = [torch.randn(size, *shape, dtype=torch.float64) for shape in shapes]
        given += [torch.randn(8, dtype=torch.float64), torch.randn(size, 8, 64, dtype=torch.float64)]
        found = {}
        for name, dtype in (("cpu", torch.float64), ("cuda", torch.bfloat16)):
            *leaves, grad = (x.to(name, dtype) for x in given)
            leaves = [x.requires_grad_() for x in leaves]
            q, k, v, sinks = leaves
            out = attend(q, k, v, trees[name], scale=0.125, window=window, sinks=sinks)
            found[name] = [out, *torch.autograd.grad(out, leaves, grad)]
        for got, expected in zip(found["cuda"], found["cpu"], strict=True):
            apart = (got.double().cpu() - expected).norm() / expected.norm()
            assert apart < 2e-2


@pytest.mark.parametrize(
    ("dtype", "value_limit", "gradient_limit"), [("float32", 1e-4, 1e-3), ("bfloat16", 2e-2, 2e-2)]
)
@pytest.mark.parametrize("has_entropy", [False, True])
def test_logprobs_are_those_of_float64(
    dtype: str, value_limit: float, gradient_limit: float, has_entropy: bool
) -> None:
    """Values and gradients of the Triton kernels; 5,003 tokens are no multiple of their 4,096 columns."""
    from megarl.models.logprobs import vocab_parallel_logprobs

    torch.manual_seed(0)
    hidden = torch.randn(300, 256, device="cuda").to(getattr(torch, dtype)).requires_grad_()
    weight = (torch.randn(5003, 256, device="cuda") * 0.1).to(hidden.dtype).requires_grad_()
    targets = torch.randint(5003, (300,), device="cuda")
    got, entropies = vocab_parallel_logprobs(
        hidden, weight, targets, first_token_id=0, group=None, temperature=0.7, chunk_tokens=256
    )
    wide_hidden, wide_weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    logprobs = (wide_hidden @ wide_weight.T / 0.7).log_softmax(-1)
    expected = logprobs.gather(1, targets[:, None]).squeeze(1)
    surprise = -(logprobs.exp() * logprobs).sum(-1)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=value_limit)
    torch.testing.assert_close(entropies.double(), surprise, rtol=0, atol=value_limit)
    ((got * 1.5).sum() + has_entropy * entropies.sum()).backward()
    ((expected * 1.5).sum() + has_entropy * surprise.sum()).backward()
    for own, wide in ((hidden, wide_hidden), (weight, wide_weight)):
        assert own.grad is not None and wide.grad is not None
        assert (own.grad - wide.grad).norm() <= gradient_limit * wide.grad.norm()


def test_transformer_engine_accumulates_gradients_in_place() -> None:
    """Two passes over one layer: the float32 sum that it keeps itself against the sum of gradients that it returns."""
    te = pytest.importorskip("transformer_engine.pytorch")
    from megarl.models.policy import accumulate_in_main_gradients

    torch.manual_seed(0)
    layers = [te.Linear(256, 128, bias=False, params_dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    layers[1].weight.data.copy_(layers[0].weight.data)
    accumulate_in_main_gradients(layers[1])
    layers[1].weight.main_grad = torch.zeros(128, 256, device="cuda")
    rows = [torch.randn(64, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    expected = torch.zeros(128, 256, device="cuda")
    for row in rows:
        layers[0].zero_grad()
        for layer in layers:
            layer(row).float().square().sum().backward()
        expected += layers[0].weight.grad.float()
    assert (layers[1].weight.main_grad - expected).norm() <= 1e-2 * expected.norm()


def lend_memory() -> tuple[int, int, int, bool]:
    from megarl.training.host.offload import Offloadable

    torch.cuda.set_device(0)
    whole = torch.arange(1 << 26, device="cuda", dtype=torch.float32)
    view = whole[17:33]
    before = torch.cuda.memory_allocated()
    lent = Offloadable(lambda: [whole, view])
    lent.offload()
    away = torch.cuda.memory_allocated()
    lent.onload()
    return before, away, torch.cuda.memory_allocated(), view.tolist() == list(range(17, 33))


def test_lent_memory_is_freed_and_comes_back() -> None:
    before, away, after, equal = lend_memory()
    assert before - away >= 4 << 26 and after == before and equal


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_colocated_loop_learns_its_own_weights(dtype: str, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """A short run through the command line: sleep and wake, reshard with verification, memory lent, export."""
    model = tiny_model(num_layers=2, num_heads=4, head_dim=64)
    sums = [
        {"messages": [{"role": "user", "content": f"{n} + {n + 7} ="}], "gt_answer": str(2 * n + 7)} for n in range(64)
    ]
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in sums))
    run = subprocess.run(
        [
            sys.executable, "-m", "megarl", "train", str(ROOT / "launch/recipes/quickstart.yaml"),
            f"model.path={model}", f"model.dtype={dtype}", f"runs_folder={tmp_path / 'runs'}", "name=gpu",
            f"data.train={data}", f"data.validation.heldout={data}",
            "cluster.ranks_per_node=1", "trainer.tp=1", "rollout.tp=1", "train.steps=3", "train.prompts_per_step=4",
            "train.samples_per_prompt=4", "weights.verify_every=1",
            "trainer.offload=[optimizer,gradients,parameters]", "rollout.vllm.enforce_eager=true",
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr + run.stdout
    lines = [json.loads(line) for line in (tmp_path / "runs/gpu/metrics.jsonl").read_text().splitlines()]
    gaps = [line["logprob_gap/mean"] for line in lines if "logprob_gap/mean" in line]
    assert len(gaps) == 3 and max(gaps) < (1e-3 if dtype == "float32" else 5e-2)
    assert all(line["perf/steps_ahead"] > 0 for line in lines if "logprob_gap/mean" in line)
    assert (tmp_path / "runs/gpu/hf/model.safetensors").exists()


def fp8_against_the_loader(folder: str, quantization: str, vllm: dict[str, Any]) -> list[str]:
    """Live parameters that a reshard makes in another way than vLLM's loader; the kernels' layouts included."""
    from megarl.config import RolloutConfig
    from megarl.engine.engine import RolloutEngine
    from megarl.groups import world
    from tests.reshard.layouts.test_vllm_quantised import copies, resharding, weights_of

    world.initialize(600.0)
    settings: dict[str, Any] = {
        "kv_cache_gib": 1.0,
        "quantization": quantization,
        "vllm": {"enforce_eager": True, **vllm},
    }
    config = RolloutConfig.model_validate(settings)
    engine = RolloutEngine(folder, config, max_model_len=256, dtype="bfloat16", seed=0)
    tensors = {name: tensor.cuda() for name, tensor in weights_of(folder).items()}
    addresses = {name: p.data_ptr() for name, p in engine.model.named_parameters()}
    moving = resharding(engine, folder, tensors)
    moving.self_test()
    written = copies(engine)
    assert addresses == {name: p.data_ptr() for name, p in engine.model.named_parameters()}
    engine.sleep()
    engine.wake(["weights"])
    moving.run()
    moving.verify()
    engine.wake(["kv_cache"])
    again = copies(engine)
    engine.load_tensors(iter(tensors.items()))
    loaded = copies(engine)
    engine.close()
    return [n for n in written if not (torch.equal(written[n], loaded[n]) and torch.equal(again[n], loaded[n]))]


@pytest.mark.parametrize(
    ("family", "quantization", "vllm"),
    [
        pytest.param("qwen3", "fp8", {"linear_backend": "triton"}, id="blocks, triton"),
        pytest.param("qwen3", "fp8", {"linear_backend": "cutlass"}, id="blocks, cutlass"),
        pytest.param("qwen3", "fp8", {"linear_backend": "deep_gemm"}, id="blocks, deep_gemm"),
        pytest.param("qwen3", "fp8", {}, id="blocks, vLLM's choice"),
        pytest.param("qwen3", "fp8_per_channel", {}, id="channels"),
        pytest.param("qwen3_moe", "fp8", {}, id="experts in blocks, triton"),
        pytest.param("qwen3_moe", "fp8", {"moe_backend": "deep_gemm"}, id="experts in blocks, deep_gemm"),
        pytest.param("qwen3_moe", "fp8_per_channel", {}, id="experts by channel"),
    ],
)
@pytest.mark.distributed
def test_fp8_weights_are_what_vllms_loader_makes(
    family: str, quantization: str, vllm: dict[str, Any], tiny_model: Callable[..., Path]
) -> None:
    """On this GPU's kernels, whatever they lay out besides; and once more after a deep sleep."""
    from tests.rank_pool import RankPool

    sizes = {
        "hidden_size": 256,
        "num_heads": 4,
        "head_dim": 64,
        "intermediate_size": 640,
        "expert_intermediate_size": 384,
    }
    folder = tiny_model(family=family, num_layers=2, **sizes)
    with RankPool(1) as pool:
        assert pool.run(fp8_against_the_loader, str(folder), quantization, vllm) == [[]]


def learnt_in_fp8(model: Path, folder: Path) -> dict[str, Any]:
    """One rank: log-probs and gradient norms of a model with and without FP8, and a checkpoint that goes on."""
    from megarl.config import Recipe
    from megarl.config.parallel import ParallelConfig
    from megarl.models.layer_caches import drop_weight_copies
    from megarl.training.state import checkpoint
    from tests.training.state.test_checkpoint import build, update

    parallel, found = ParallelConfig(1, 1, 1, 1), {}
    for fp8 in ("none", "blockwise"):
        recipe = Recipe.model_validate(
            {
                "name": "fp8", "loop": "sft", "model": {"path": str(model)}, "data": {"train": "unused"},
                "trainer": {"max_tokens_per_microbatch": 256, "fp8": fp8}, "optimizer": {"learning_rate": 1e-3},
            }
        )  # fmt: skip
        engine = build(recipe, parallel)
        norms = [update(engine, parallel, step)["train/grad_norm"].number for step in range(3)]
        found[fp8] = {"norms": norms}
        if fp8 == "blockwise":
            save = checkpoint.plan_save(folder, {"": engine}, "one")
            save.write(asynchronous=False)
            save.finish()
            found[fp8]["next"] = update(engine, parallel, 3)["train/grad_norm"].number
            other = build(recipe, parallel)
            checkpoint.restore_models(folder, {"": other}, "one")
            found[fp8]["resumed"] = update(other, parallel, 3)["train/grad_norm"].number
            copies = [getattr(m, "_fp8_workspaces", {}) for chunk in other.chunks for m in chunk.modules()]
            before = sum(map(len, copies))
            drop_weight_copies(other.chunks)
            found[fp8]["copies"] = before, sum(map(len, copies))
    return found


@pytest.mark.distributed
def test_training_in_fp8_is_training(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """Gradients are those of bfloat16 up to FP8's rounding; a checkpoint has no pickle that would be loaded."""
    pytest.importorskip("transformer_engine.pytorch")
    from megarl.checkpoint.torch_dist_reader import check_harmless
    from tests.rank_pool import RankPool

    model = tiny_model(num_layers=2, hidden_size=256, intermediate_size=512, num_heads=4, head_dim=64)
    with RankPool(1) as ranks:
        [found] = ranks.run(learnt_in_fp8, model, tmp_path)
    check_harmless(tmp_path)
    plain, fp8 = found["none"], found["blockwise"]
    assert fp8["norms"] != plain["norms"], "nothing was in FP8"
    assert fp8["norms"] == pytest.approx(plain["norms"], rel=0.1)
    assert fp8["resumed"] == pytest.approx(fp8["next"], rel=1e-3) and fp8["copies"][0] > 0 == fp8["copies"][1]


def test_segments_grow_once_they_are_set_to() -> None:
    """In a process of its own, because the setting holds for the whole process."""
    program = (
        "import torch; from megarl.platform.memory.allocator import use_expandable_segments; "
        "before = torch.ones(64 << 20, dtype=torch.uint8, device='cuda'); print(use_expandable_segments()); "
        "after = torch.ones(64 << 20, dtype=torch.uint8, device='cuda'); "
        "print(sorted(s['is_expandable'] for s in torch.cuda.memory_snapshot() if s['segment_type'] == 'large'))"
    )
    environment = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["True", "[False, True]"]
