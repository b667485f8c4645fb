"""Which kernels of vLLM's and Megatron-Core's batch-invariant modes have the same arithmetic, from their sources."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from megarl.preflight.model.exactness_on_gpus import BLOCK, UNEQUAL_PRODUCTS
from tests.guards.test_facts import node_of, source_of

VLLM = "model_executor/determinism/batch_invariant.py"
TABLE = "model_executor/determinism/batch_invariant_configs.py"
MEGATRON = "core/transformer/custom_layers/batch_invariant_kernels.py"


class WithoutAddresses(ast.NodeTransformer):
    """Removes from a kernel whatever changes no arithmetic: pointers of loads, and branches for LOG=False."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if ast.unparse(node.func) == "tl.load":
            node.args = []
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        return self.visit(node.body) if ast.unparse(node.test) == "LOG" else self.generic_visit(node)

    def visit_If(self, node: ast.If) -> Any:
        self.generic_visit(node)
        return node.body if ast.unparse(node.test) == "LOG" else node


def kernel(library: str, file: str, *names: str) -> str:
    """Return the statements of the first kernel that exists, without its docstring and addresses."""
    source = source_of(library, file)
    [name, *_] = [name for name in names if f"def {name}(" in source] or [names[0]]
    function = node_of(source, name)
    assert isinstance(function, ast.FunctionDef)
    statements = [line for line in function.body if not isinstance(line, ast.Expr | ast.Return)]
    return "\n".join(ast.unparse(ast.fix_missing_locations(WithoutAddresses().visit(line))) for line in statements)


def loop_over_k(text: str) -> str:
    """Return the lines of a product that start the accumulator, add to it, and round it."""
    lines = [line.strip() for line in text.splitlines()]
    return "\n".join(
        line for line in lines if line.startswith(("accumulator", "for ki", "a = ", "b = ", "bias = ", "c ="))
    )


def tiles(library: str, file: str, dtype: str) -> dict[str, Any]:
    """Return the tile sizes of `matmul_persistent` for a dtype of torch."""
    function = node_of(source_of(library, file), "matmul_persistent")
    [table] = [
        line.value for line in ast.walk(function)
        if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "configs"
    ]  # fmt: skip
    assert isinstance(table, ast.Dict)
    found = {ast.unparse(key): value for key, value in zip(table.keys, table.values, strict=True) if key}
    return ast.literal_eval(found[f"torch.{dtype}"])


def blocks_of_k() -> dict[str, dict[tuple[int, int], int]]:
    """Return vLLM's tuned blocks of K by architecture and shape (outputs, inputs)."""
    [table] = [
        line.value for line in ast.parse(source_of("vllm", TABLE)).body
        if isinstance(line, ast.AnnAssign) and ast.unparse(line.target) == "_BATCH_INVARIANT_MATMUL_TUNED_CONFIGS"
    ]  # fmt: skip
    assert isinstance(table, ast.Dict)
    found = {}
    for kind, shapes in zip(table.keys, table.values, strict=True):
        assert isinstance(kind, ast.Constant) and isinstance(shapes, ast.Dict)
        found[kind.value] = {
            ast.literal_eval(shape): next(ast.literal_eval(k.value) for k in call.keywords if k.arg == "block_k")
            for shape, call in zip(shapes.keys, shapes.values, strict=True)
            if shape and isinstance(call, ast.Call)
        }
    return found


def test_both_matrix_products_have_one_arithmetic() -> None:
    ours, theirs = (
        loop_over_k(kernel(library, file, "matmul_kernel_persistent"))
        for library, file in (("vllm", VLLM), ("megatron", MEGATRON))
    )
    assert "accumulator = tl.dot(a, b, accumulator)" in ours and "dtype=tl.float32" in ours
    assert ours == theirs, "the loops over K of vLLM's and Megatron's products differ: refuse linear layers"


def test_both_matrix_products_have_one_tile_size_in_bfloat16() -> None:
    expected = {"BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": BLOCK}
    expected |= {"GROUP_SIZE_M": 8, "num_stages": 3, "num_warps": 8}
    for library, file in (("vllm", VLLM), ("megatron", MEGATRON)):
        assert tiles(library, file, "bfloat16") == expected, f"{library} has other tiles: correct BLOCK"


def test_shapes_with_other_blocks_are_refused() -> None:
    found = blocks_of_k()
    assert {"ada", "hopper", "blackwell"} <= found.keys()
    for kind, shapes in found.items():
        unequal = {shape for shape, block in shapes.items() if block != BLOCK}
        assert unequal == UNEQUAL_PRODUCTS.get(kind), f"vLLM's tuned table for {kind} changed: correct UNEQUAL_PRODUCTS"


@pytest.mark.parametrize(
    ("names", "operator"),
    [(("_log_softmax_kernel", "_softmax_kernel"), "log_softmax"), (("mean_kernel",), "mean")],
)
def test_both_reductions_have_one_arithmetic(names: tuple[str, ...], operator: str) -> None:
    ours, theirs = (kernel(library, file, *names) for library, file in (("vllm", VLLM), ("megatron", MEGATRON)))
    assert "tl.sum(" in ours
    assert ours == theirs, f"vLLM's and Megatron's {operator} differ: refuse it"
    for library, file in (("vllm", VLLM), ("megatron", MEGATRON)):
        function = source_of(library, file).partition(f"def {operator}{'_dim' * (operator == 'mean')}(")[2]
        assert "BLOCK_SIZE = 1024" in function.partition("\ndef ")[0]


def test_the_sampler_adds_in_the_order_of_log_softmax() -> None:
    sampler = kernel("vllm", "v1/worker/gpu/sample/logprob.py", "_topk_log_softmax_kernel")
    for line in ("max_val = tl.max(tl.maximum(logits, max_val))", "e = tl.exp(logits - max_val)", "se += tl.sum(e)",
                 "lse = tl.log(se)", "o = logits - max_val - lse"):  # fmt: skip
        assert line in sampler, f"vLLM's sampler has no `{line}` any more: refuse log_softmax"
    call = node_of(source_of("vllm", "v1/worker/gpu/sample/logprob.py"), "compute_token_logprobs")
    assert "BLOCK_SIZE=1024" in ast.unparse(call)


def test_the_norms_differ_in_their_root() -> None:
    ours = kernel("vllm", VLLM, "_rms_norm_kernel")
    theirs = ast.unparse(node_of(source_of("megatron", MEGATRON), "BatchInvariantRMSNormFn.forward"))
    assert "tl.sqrt(" in ours and "rsqrt" not in ours and "torch.rsqrt(" in theirs
