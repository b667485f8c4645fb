"""Numbers of costs, bytes and seconds are passed by name: two of one type in the wrong order would change nothing else.

Classes and functions of the packages that predict may take at most one number of a type by its position.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PREDICTING = (
    *(path for path in (ROOT / "megarl/planner").rglob("*.py")),
    ROOT / "megarl/families/logprob_chunks.py",
    ROOT / "megarl/reshard/forecast/cost_model.py",
)
NUMBERS = {"int", "float", "bool", "Any", "Numbers", "_Bytes", "NDArray[np.float64]", "NDArray[np.int64]"}


def _type_of(annotation: ast.expr | None) -> str:
    text = "" if annotation is None else ast.unparse(annotation)
    return text.removesuffix(" | None")


def _repeated(annotations: list[ast.expr | None]) -> list[str]:
    counts = Counter(_type_of(annotation) for annotation in annotations)
    return sorted(name for name, count in counts.items() if name in NUMBERS and count > 1)


def _positional_fields(node: ast.ClassDef) -> list[ast.expr | None]:
    """Return the annotations of the fields that a class takes by position."""
    is_tuple = any(ast.unparse(base) == "NamedTuple" for base in node.bases)
    dataclasses = [text for text in map(ast.unparse, node.decorator_list) if text.startswith("dataclass")]
    if not is_tuple and (not dataclasses or "kw_only=True" in dataclasses[0]):
        return []
    fields: list[ast.expr | None] = []
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign):
            if _type_of(statement.annotation) == "KW_ONLY":
                break
            fields.append(statement.annotation)
    return fields


def positional_numbers(source: str) -> Iterator[str]:
    """Yield each class and function that takes several numbers of one type by position."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            annotations = _positional_fields(node)
        elif isinstance(node, ast.FunctionDef):
            annotations = [argument.annotation for argument in (*node.args.posonlyargs, *node.args.args)]
        else:
            continue
        if repeated := _repeated(annotations):
            yield f"{node.lineno}: {node.name} takes several {', '.join(repeated)} by position"


def test_numbers_that_predict_are_passed_by_name() -> None:
    lines = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in PREDICTING
        for line in positional_numbers(path.read_text(encoding="utf-8"))
    ]
    assert lines == []


@pytest.mark.parametrize(
    ("source", "is_refused"),
    [
        ("@dataclass\nclass A:\n    one: float\n    two: float = 0.0", True),
        ("@dataclass(kw_only=True)\nclass A:\n    one: float\n    two: float", False),
        ("@dataclass\nclass A:\n    one: float\n    _: KW_ONLY\n    two: float", False),
        ("class A(NamedTuple):\n    one: int\n    two: int", True),
        ("def a(one: int, two: int | None = None): ...", True),
        ("def a(one: int, *, two: int): ...", False),
        ("def a(one: int, two: float): ...", False),
    ],
)
def test_the_rule_finds_numbers_by_position(source: str, is_refused: bool) -> None:
    assert bool([*positional_numbers(source)]) == is_refused
