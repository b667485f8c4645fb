"""Small changes of Python code, each of which tests should notice: the mutants of `tools/check.py mutations`.

A mutant changes one place of a function: an operator of a comparison or a calculation, a constant, a condition, the
order of two arguments, or it leaves out a statement. Messages, docstrings, annotations and tables of metrics stay.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in",
    ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip
"""The operator that replaces one of a comparison."""
CALCULATIONS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "*"}
"""The operator that replaces one of a calculation."""
UNTRAINED_CALLS = ("print", "warn", "notify", "debug", "info", "warning", "append_note", "add_note")
"""Calls that only write texts. Leaving them out changes no result."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of a file: the characters from `start` to `end` are replaced by `new`."""

    path: str
    """File, relative to the repository."""
    function: str
    """Names of the classes and functions around the place, joined by dots."""
    line: int
    kind: str
    start: int
    end: int
    old: str
    new: str
    old_lines: str
    """The lines with the place."""
    new_lines: str
    """The same lines with the change."""
    repetition: int = 1
    """Number of this change among equal changes of equal lines in a function, from 1."""

    @property
    def key(self) -> str:
        """Name of the mutant that does not change when lines move."""
        number = f" ({self.repetition})" if self.repetition > 1 else ""
        return f"{self.path} {self.function}: {self.kind}: {self.old_lines} -> {self.new_lines}{number}"

    def apply(self, source: str) -> str:
        """Return the file's text with this change."""
        assert source[self.start : self.end] == self.old
        return source[: self.start] + self.new + source[self.end :]


def find_mutants(root: Path, path: Path) -> list[Mutant]:
    """Return all mutants of a file below the repository `root`, in the order of their places."""
    source = path.read_text(encoding="utf-8")
    finder = _Finder(source, str(path.relative_to(root)))
    finder.visit(ast.parse(source))
    mutants = sorted(finder.mutants, key=lambda mutant: (mutant.start, mutant.kind))
    repetitions = Counter[str]()
    for index, mutant in enumerate(mutants):
        repetitions[mutant.key] += 1
        mutants[index] = replace(mutant, repetition=repetitions[mutant.key])
    return mutants


class _Finder(ast.NodeVisitor):
    """Collects the mutants of one file."""

    def __init__(self, source: str, path: str) -> None:
        self.mutants: list[Mutant] = []
        self._source, self._path = source, path
        self._scopes: list[str] = []
        self._num_functions = 0
        """Number of functions around the present node. Mutants are made inside functions only."""
        line_bytes = [0]
        for line in source.encode().splitlines(keepends=True):
            line_bytes.append(line_bytes[-1] + len(line))
        self._line_bytes = line_bytes

    def _offset(self, line: int, column: int) -> int:
        """Return the index of a character. `line` counts from 1 and `column` counts UTF-8 bytes, as in `ast`."""
        return len(self._source.encode()[: self._line_bytes[line - 1] + column].decode())

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._offset(node.lineno, node.col_offset), self._offset(node.end_lineno, node.end_col_offset)

    def _add(self, node: ast.expr | ast.stmt, kind: str, start: int, end: int, new: str) -> None:
        if self._num_functions:
            function = ".".join(self._scopes)
            first = self._source.rfind("\n", 0, start) + 1
            last = self._source.find("\n", end)
            old, before, after = self._source[start:end], self._source[first:start], self._source[end:last]
            lines = (before + old + after).strip(), (before + new + after).strip()
            self.mutants.append(Mutant(self._path, function, node.lineno, kind, start, end, old, new, *lines))

    def _replace_operator(self, kind: str, node: ast.expr, left: ast.expr, right: ast.expr, new: str) -> None:
        """Add a mutant that replaces the operator between two operands, which may stand in brackets."""
        start, end = self._span(left)[1], self._span(right)[0]
        between = self._source[start:end]
        operator = between.strip(" ()\n\\")
        if not operator or "#" in between:
            return
        begin = start + between.index(operator)
        self._add(node, kind, begin, begin + len(operator), new)

    def _visit_scope(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        is_function = not isinstance(node, ast.ClassDef)
        self._scopes.append(node.name)
        self._num_functions += is_function
        # Not the decorators, annotations and defaults of the head.
        for statement in node.body:
            self.visit(statement)
        self._num_functions -= is_function
        self._scopes.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name != "__repr__":
            self._visit_scope(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._visit_scope(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._visit_scope(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Leave out errors: their texts are no subject of tests."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """Leave out assertions: they never fail."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Leave out texts."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return
        call = node.value.value if isinstance(node.value, ast.Await) else node.value
        if isinstance(call, ast.Call):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            if name.strip("_") in UNTRAINED_CALLS:
                return
            kind = "removed wait" if "wait" in name or "synchronize" in name else "dropped line"
            self._add(node, kind, *self._span(node), "pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._add(node, "dropped line", *self._span(node), "pass")
        self.visit(node.value)

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for operator, left, right in zip(node.ops, operands, operands[1:], strict=False):
            self._replace_operator("comparison", node, left, right, COMPARISONS[type(operator)])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        new = CALCULATIONS.get(type(node.op))
        has_text = any(
            isinstance(side, ast.JoinedStr) or (isinstance(side, ast.Constant) and isinstance(side.value, str))
            for side in (node.left, node.right)
        )
        if new is not None and not has_text:
            self._replace_operator("calculation", node, node.left, node.right, new)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        new = "or" if isinstance(node.op, ast.And) else "and"
        self._replace_operator("condition", node, node.values[0], node.values[1], new)
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        start, end = self._span(node.test)
        if not isinstance(node.test, ast.Compare | ast.BoolOp):
            self._add(node, "condition", start, end, f"not ({self._source[start:end]})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add(node, "constant", *self._span(node), str(not node.value))
        elif isinstance(node.value, int):
            self._add(node, "off by one", *self._span(node), str(node.value + 1))
        elif isinstance(node.value, float):
            self._add(node, "constant", *self._span(node), repr(2 * node.value or 1.0))

    def visit_Call(self, node: ast.Call) -> None:
        # Without effect: these two have no order of arguments.
        is_symmetric = isinstance(node.func, ast.Name) and node.func.id in ("min", "max")
        if (
            len(node.args) >= 2
            and not is_symmetric
            and not any(isinstance(argument, ast.Starred) for argument in node.args[:2])
        ):
            (start, first_end), (second_start, end) = self._span(node.args[0]), self._span(node.args[1])
            first, between = self._source[start:first_end], self._source[first_end:second_start]
            second = self._source[second_start:end]
            if first != second:
                self._add(node, "swapped arguments", start, end, second + between + first)
        if isinstance(node.func, ast.Name) and node.func.id == "zip":
            # Its only keyword, `strict`, asserts equal lengths, and assertions never fail.
            for argument in node.args:
                self.visit(argument)
        else:
            self.generic_visit(node)


def python_files(folder: Path) -> Iterator[Path]:
    """Yield the modules of a package, sorted."""
    yield from sorted(path for path in folder.rglob("*.py") if path.name != "__init__.py")
