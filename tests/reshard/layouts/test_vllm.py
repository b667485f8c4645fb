"""Recorded layouts: their pieces, written from full tensors, equal what vLLM's own loader writes, bit for bit."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megarl.reshard.boxes import Box, Layout, Piece, dense_piece
from megarl.reshard.layouts.vllm import DirectWriteError, check_direct_write, record_layout
from megarl.types import MegarlError
from tests.rank_pool import RankPool


def write_both_ways(model_path: str, tp: int) -> dict[str, Any]:
    """One rank: record the layout, write its pieces, then let vLLM load the same tensors; what differs."""
    from safetensors.torch import load_file

    from megarl.config import RolloutConfig
    from megarl.engine.engine import RolloutEngine
    from megarl.reshard.layouts.vllm import zero_padding

    config = RolloutConfig(tp=tp, kv_cache_gib=0.01, max_concurrent_requests=4)
    engine = RolloutEngine(model_path, config, max_model_len=64, dtype="float32", seed=0)
    tensors = load_file(f"{model_path}/model.safetensors")
    live = {name: parameter.data for name, parameter in engine.model.named_parameters()}

    for parameter in live.values():
        parameter.normal_()
    dummy = {name: parameter.clone() for name, parameter in live.items()}
    layout = record_layout(engine.model, {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()})
    touched = [name for name, parameter in live.items() if not torch.equal(parameter, dummy[name])]

    for piece in layout:
        source = tensors[piece.box.name][tuple(map(slice, piece.box.start, piece.box.stop))]
        live[piece.storage].view(-1).as_strided(piece.box.shape, piece.strides, piece.offset).copy_(source)
    zero_padding(engine.model)
    written = {name: parameter.clone() for name, parameter in live.items()}
    for parameter in live.values():
        parameter.normal_()
    engine.model.load_weights(tensors.items())
    different = [name for name, parameter in live.items() if not torch.equal(parameter, written[name])]
    checks = checks_of_layouts(engine.model, layout, tensors)
    engine.close()
    return {
        "checks": checks,
        "touched_while_recording": touched,
        "different": different,
        "pieces": layout,
        "numel": {name: parameter.numel() for name, parameter in live.items()},
        "tensors": {name: tuple(tensor.shape) for name, tensor in tensors.items()},
    }


def checks_of_layouts(model: nn.Module, layout: Layout, tensors: dict[str, torch.Tensor]) -> list[list[str]]:
    """Reshard by this layout, and by one that is a row off on rank 0; the checks that each fails.

    The first rank has the whole tensors.
    """
    import torch.distributed as dist

    from megarl.reshard.checks.file_rows import check_rows, sample_names
    from megarl.reshard.live import DirectReshard

    rank, size = dist.get_rank(), dist.get_world_size()
    whole = tuple(dense_piece(name, tuple(tensor.shape), name, 0) for name, tensor in tensors.items())
    failed: list[list[str]] = []
    # On one rank no row follows the last.
    for is_off in (False, True)[:size]:
        moved = tuple(row_later(piece) if is_off and rank == 0 else piece for piece in layout)
        reshard = DirectReshard(
            [whole] + [()] * (size - 1), None, moved, tensors if rank == 0 else {}, model,
            dtype=torch.float32, bucket_bytes=1 << 20, topology=[("here",)] * size,
        )  # fmt: skip
        failed.append([])
        try:
            reshard.self_test()
        except MegarlError:
            failed[-1].append("verify")
        names = sample_names({piece.box.name for piece in layout}, seed=0)
        try:
            check_rows(model, names, tensors.__getitem__, dtype=torch.float32, seed=0)
        except MegarlError as error:
            failed[-1].append(str(error))
    return failed


def row_later(piece: Piece) -> Piece:
    """Return a piece of the query projection with the next row of the tensor in each row's place."""
    box = piece.box
    if "q_proj.weight" not in box.name:
        return piece
    later = Box(box.name, (box.start[0] + 1, *box.start[1:]), (box.stop[0] + 1, *box.stop[1:]))
    return replace(piece, box=later)


@pytest.mark.parametrize(
    ("tp", "model"),
    [
        pytest.param(1, {"family": "qwen3", "head_dim": 24}, id="qwen3_tp1_tied"),
        pytest.param(2, {"family": "llama", "num_kv_heads": 4, "tie_word_embeddings": False}, id="llama_kv_above_tp"),
        pytest.param(2, {"family": "qwen2", "num_kv_heads": 1, "vocab_size": 1031}, id="qwen2_kv_below_tp_odd_vocab"),
        pytest.param(
            4,
            {"family": "qwen3", "num_kv_heads": 2, "vocab_size": 1031, "tie_word_embeddings": False},
            id="qwen3_kv_below_tp4_untied_odd_vocab",
        ),
    ],
)
def test_pieces_equal_vllms_loader(
    tp: int, model: dict[str, Any], tiny_model: Callable[..., Path], ranks: RankPool
) -> None:
    path = str(tiny_model(num_layers=2, num_heads=4, **model))
    results = ranks.run(write_both_ways, path, tp, world_size=tp)
    for result in results:
        assert result["touched_while_recording"] == [] and result["different"] == []
        assert ("lm_head.weight" in result["numel"]) == (not model.get("tie_word_embeddings", True))
        right, *row_off = result["checks"]
        assert right == []
        if tp > 1:
            # Checksums of both ends agree: a reshard's verification cannot see its layout.
            [[fault]] = row_off
            assert fault.startswith("rank 0: ") and "qkv_proj.weight" in fault and "q_proj.weight" in fault
    tensors = results[0]["tensors"]
    # All ranks together hold each tensor once; replicated ones (norms, shared KV heads) once per holder.
    held = dict.fromkeys(tensors, 0)
    for piece in (piece for result in results for piece in result["pieces"]):
        held[piece.box.name] += piece.box.numel
    for name, shape in tensors.items():
        replicas = tp if len(shape) == 1 and "bias" not in name else 1
        if re.search("[kv]_proj", name):
            replicas = max(1, tp // model.get("num_kv_heads", 2))
        assert held[name] == replicas * torch.Size(shape).numel(), name


class Loader(nn.Module):
    """A live model of one 4 x 6 parameter whose loader is the test's."""

    def __init__(self, load: Callable[[nn.Parameter, torch.Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(24.0).view(4, 6), requires_grad=False)
        self.load = load

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            self.load(self.weight, tensor)


@pytest.mark.parametrize(
    ("shape", "load", "piece"),
    [
        pytest.param(
            (4, 6), lambda p, t: p.data.copy_(t), Piece(Box("t", (0, 0), (4, 6)), "weight", 0, (6, 1)), id="whole"
        ),
        pytest.param(
            (6, 4),
            lambda p, t: p.data.copy_(t.t()),
            Piece(Box("t", (0, 0), (6, 4)), "weight", 0, (1, 6)),
            id="transposed",
        ),
        pytest.param(
            (3, 8, 6),
            lambda p, t: p.data.copy_(t[2].narrow(0, 4, 4)),
            Piece(Box("t", (2, 4, 0), (3, 8, 6)), "weight", 0, (24, 6, 1)),
            id="selected_and_narrowed",
        ),
        pytest.param(
            (4, 2),
            lambda p, t: (p.data[:, 4:].copy_(t), p.data[:, :4].fill_(0)),
            Piece(Box("t", (0, 0), (4, 2)), "weight", 4, (6, 1)),
            id="beside_padding",
        ),
        pytest.param(
            (8, 4),
            lambda p, t: p.data.copy_(t[1:7].permute(1, 0).contiguous()),
            Piece(Box("t", (1, 0), (7, 4)), "weight", 0, (1, 6)),
            id="copied_after_transposing",
        ),
    ],
)
def test_a_copy_becomes_a_piece(shape, load, piece) -> None:
    model = Loader(load)
    assert record_layout(model, {"t": (shape, torch.float32)}) == (piece,)
    assert torch.equal(model.weight, torch.arange(24.0).view(4, 6))


@pytest.mark.parametrize(
    ("shape", "load", "reason"),
    [
        pytest.param((4, 6), lambda p, t: p.data.copy_(t * 2), "computed values", id="computed"),
        pytest.param((2, 12), lambda p, t: p.data.copy_(t.view(4, 6)), "plain slice of t", id="reshaped"),
        pytest.param((1, 6), lambda p, t: p.data.copy_(t), "plain slice of t", id="broadcast"),
        pytest.param((8, 6), lambda p, t: p.data.copy_(t[::2]), "plain slice of t", id="stepped"),
        pytest.param((3, 6), lambda p, t: p.data[:3].copy_(t), "18 of 24 elements", id="rows_left_out"),
        pytest.param((4, 6), lambda p, t: (p.data.copy_(t), p.data.copy_(t)), "48 of 24 elements", id="twice"),
        pytest.param((4, 6), lambda p, t: p.data.add_(1), "applies add_", id="other_operation"),
        pytest.param((5, 6), lambda p, t: p.data.copy_(t.clone()[1:]), "computed values", id="part_of_a_copied_tensor"),
    ],
)
def test_what_is_no_copy_of_a_slice_is_refused_by_name(shape, load, reason) -> None:
    model = Loader(load)
    with pytest.raises(DirectWriteError, match=rf"^weight: .*({reason})"):
        record_layout(model, {"t": (shape, torch.float32)})
    assert torch.equal(model.weight, torch.arange(24.0).view(4, 6))


def test_a_zeroed_tensor_is_padding() -> None:
    model = Loader(lambda p, t: (t.zero_(), p.data.copy_(t)))
    assert record_layout(model, {"t": ((4, 6), torch.float32)}) == ()


def test_a_changed_tensor_is_refused_by_name() -> None:
    model = Loader(lambda p, t: (t.add_(1), p.data.copy_(t)))
    with pytest.raises(DirectWriteError, match=r"^t: vLLM's loader modifies this checkpoint tensor"):
        record_layout(model, {"t": ((4, 6), torch.float32)})


def test_layers_with_converted_weights_are_refused() -> None:
    class Fp8LinearMethod:
        pass

    model = nn.Sequential(nn.Linear(2, 2))
    check_direct_write(model)
    model[0].quant_method = Fp8LinearMethod()  # pyright: ignore[reportArgumentType]
    with pytest.raises(DirectWriteError, match=r"^0: Fp8LinearMethod stores converted weights"):
        check_direct_write(model)
