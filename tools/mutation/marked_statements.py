"""Modules that note which of their statements run, to choose the tests for a mutant (`tools/checks/mutations.py`).

In a copy of the repository each statement of a function gets one before it that sets a byte of a mapped file. All
processes that import the copy map the same file. coverage.py would lose what killed processes and those that end with
`os._exit` have seen, and ranks end in these ways.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

MAP_MODULE = "megarl/statement_map.py"
_MAP_TEXT = '''"""The mapped file with one byte for each marked statement."""

import mmap

try:
    with open({file!r}, "r+b") as _file:
        REACHED = mmap.mmap(_file.fileno(), {size})
# Isolated programs may not open the file.
except OSError:
    REACHED = bytearray({size})
'''
_IMPORT = """
try:
    from megarl.statement_map import REACHED as _reached
# A sandbox runs the source of some modules without the package.
except ImportError:
    _reached = bytearray(1 << 20)
"""
_COMPILED = ("jit", "script", "compile")
"""Decorators, by a part of their names, whose compilers read the source. Their functions are not marked."""


def statement_name(path: str, scopes: Sequence[str], statement: ast.stmt) -> str:
    """Return a name that stays when lines move. Equal statements of a function share it."""
    return f"{path} {'.'.join(scopes)}: {ast.unparse(statement).partition(chr(10))[0]}"


def statements_of(tree: ast.Module, path: str) -> Iterator[tuple[str, ast.stmt]]:
    """Yield the statements inside functions with their names, outer ones first."""
    for scopes, _, statement in _bodies(tree, (), in_function=False):
        yield statement_name(path, scopes, statement), statement


def name_at(source: str, path: str, line: int) -> str:
    """Return the name of the innermost statement of a function at a line."""
    names = [name for name, node in statements_of(ast.parse(source), path) if node.lineno <= line <= _end(node)]
    return names[-1]


def mark_statements(root: Path, paths: Sequence[str]) -> list[str]:
    """Mark all functions of these files below the copy `root`. Return the statements' names by their bytes."""
    names: list[str] = []
    for path in paths:
        file = root / path
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for scopes, body, statement in list(_bodies(tree, (), in_function=False)):
            mark = ast.parse(f"_reached[{len(names)}] = 1").body[0]
            names.append(statement_name(path, scopes, statement))
            body.insert(next(index for index, node in enumerate(body) if node is statement), mark)
        # After the docstring and `from __future__`, which must come first.
        first = next((index for index, node in enumerate(tree.body) if not _comes_first(node)), len(tree.body))
        tree.body[first:first] = ast.parse(_IMPORT).body
        file.write_text(ast.unparse(ast.fix_missing_locations(tree)), encoding="utf-8")
    bytes_file = root / "reached"
    bytes_file.write_bytes(bytes(len(names)))
    text = _MAP_TEXT.format(file=str(bytes_file), size=len(names))
    (root / MAP_MODULE).write_text(text, encoding="utf-8")
    return names


def _bodies(
    node: ast.AST, scopes: tuple[str, ...], *, in_function: bool
) -> Iterator[tuple[tuple[str, ...], list[ast.stmt], ast.stmt]]:
    """Yield each statement inside functions below a node: names around it, the list with it, and itself."""
    for field in ("body", "handlers", "orelse", "finalbody", "cases"):
        body = getattr(node, field, [])
        # The body of a lambda or of a conditional expression is no list.
        for child in body if isinstance(body, list) else []:
            is_text = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            if in_function and isinstance(child, ast.stmt) and not is_text:
                yield scopes, body, child
            if isinstance(child, ast.ClassDef):
                yield from _bodies(child, (*scopes, child.name), in_function=False)
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                if not any(part in ast.unparse(mark) for mark in child.decorator_list for part in _COMPILED):
                    yield from _bodies(child, (*scopes, child.name), in_function=True)
            else:
                yield from _bodies(child, scopes, in_function=in_function)


def _comes_first(node: ast.stmt) -> bool:
    is_future = isinstance(node, ast.ImportFrom) and node.module == "__future__"
    return is_future or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


def _end(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno
