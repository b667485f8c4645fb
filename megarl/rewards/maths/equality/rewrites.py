"""Equivalent forms of an answer: without meaningless names and signs, with the gold answer's variables."""

from __future__ import annotations

from megarl.rewards.maths.equality.exact import exact
from megarl.rewards.maths.equality.kinds import is_capital_letter, is_equation
from megarl.rewards.maths.equality.labels import is_label
from megarl.rewards.maths.equality.values import NAMES_OF_WHOLE_NUMBERS, is_rounded
from megarl.rewards.maths.formulas.nodes import (
    BLANK,
    DEGREE,
    INFINITY,
    Node,
    join_operands,
    negative,
    number,
    replace_node,
    symbol,
)

_CONSTANTS_OF_INTEGRATION = ("C", "c", "K", "k")
_NUMBERED_CONSTANT = Node("index", (number(1),), "C")


def drop_point_name(node: Node) -> Node:
    """Return the coordinates of a named point (`A(3,4)`). Other formulas are unchanged."""
    is_point = node.kind == "product" and len(node.parts) == 2 and node.parts[1].kind == "tuple"
    return node.parts[1] if is_point and is_capital_letter(node.parts[0]) else node


def multiply_by_arguments(prediction: Node, gold: Node) -> Node:
    """Return the prediction with P(2) as 2P, if P is a letter of the gold answer, but not its function."""
    nodes = list(gold.walk())
    functions = {node.value for node in nodes if node.kind == "apply"}
    return _calls_to_products(prediction, {node.value for node in nodes if node.kind == "symbol"} - functions)


def _calls_to_products(node: Node, letters: set[str], *, is_side: bool = False) -> Node:
    """Return a formula with P(x) read as P * x, if P and the symbols of x are in `letters`.

    `is_side`: the formula is one side of an equation. A side like P(2) stays a value of the function P.
    """
    is_relation = node.kind == "relation"
    parts = tuple(_calls_to_products(part, letters, is_side=is_relation) for part in node.parts)
    if node.kind == "apply" and len(parts) == 1 and node.value in letters:
        names = parts[0].symbols()
        if names <= letters and (names or not is_side):
            return join_operands("product", [symbol(node.value), parts[0]])
    return Node(node.kind, parts, node.value) if parts else node


def drop_sign_of_approximation(node: Node) -> Node:
    r"""Return `\approx 5` as 5 and `x \approx 5` as x = 5. The value must still agree exactly."""
    if node.kind != "relation" or node.value != ("approx",):
        return node
    name, value = node.parts
    if name == BLANK:
        return value
    return Node("relation", node.parts, ("=",)) if is_label(name) else node


def drop_rounding(node: Node) -> Node:
    r"""Return the formula without a decimal approximation: `\frac16 \approx 0.1667` is `\frac16`."""
    if node.kind != "relation" or node.value[-1] != "approx" or not set(node.value[:-1]) <= {"="}:
        return node
    exact_part, rounding = node.parts[-2:]
    if BLANK in node.parts or is_label(exact_part) or not is_rounded(exact_part, rounding):
        return node
    return Node("relation", node.parts[:-1], node.value[:-1]) if len(node.parts) > 2 else exact_part


def as_equation(node: Node) -> Node:
    r"""Return `x \in \{4\}` as `x = 4`."""
    is_member = node.kind == "relation" and node.value == ("in",) and node.parts[1].kind == "set"
    if not is_member or len(node.parts[1].parts) != 1:
        return node
    return Node("relation", (node.parts[0], node.parts[1].parts[0]), ("=",))


def join_intervals(node: Node) -> Node:
    """Return intervals or sets joined by `or` as their union."""
    if node.kind != "list" or node.value != "or" or not all(part.kind in ("tuple", "set") for part in node.parts):
        return node
    union, *others = node.parts
    for part in others:
        union = Node("setop", (union, part), "cup")
    return union


def rows_as_matrix(node: Node) -> Node:
    """Return a list of lists in square brackets, `[[1,2],[3,4]]`, as a matrix."""
    is_nested = node.value == "[]" and all(part.kind == "tuple" and part.value == "[]" for part in node.parts)
    return Node("matrix", tuple(Node("row", row.parts) for row in node.parts), "matrix") if is_nested else node


def rename_variable(node: Node, old: Node, new: Node) -> Node:
    """Return the formula with a variable renamed, unless the new name has another meaning in it."""
    return node if new.value in node.symbols() else replace_node(node, old, new)


def adopt_argument(function: Node, prediction: Node, value: Node) -> tuple[Node, Node]:
    """Rename a predicted function's argument to the gold answer's: f(t) = t^2 becomes f(x) = x^2.

    `value` is the predicted right side. Returns both sides.
    """
    is_definition = function.kind == prediction.kind == "apply" and len(function.parts) == len(prediction.parts) == 1
    if not is_definition or {part.kind for part in (*function.parts, *prediction.parts)} != {"symbol"}:
        return prediction, value
    old, new = prediction.parts[0], function.parts[0]
    if old != new and new.value in value.symbols():
        return prediction, value
    return rename_variable(prediction, old, new), rename_variable(value, old, new)


def adopt_constant(gold: Node, prediction: Node) -> Node:
    """Return the prediction with the gold answer's constant of integration: `x^2+c` becomes `x^2+C`."""
    if gold.kind != "sum" or prediction.kind != "sum":
        return prediction
    constant = next((symbol(name) for name in ("C", "c") if symbol(name) in gold.parts), None)
    if constant is None or constant in prediction.parts:
        return prediction
    if _NUMBERED_CONSTANT in prediction.parts:
        return replace_node(prediction, _NUMBERED_CONSTANT, constant)
    # C in the gold answer may have any usual name. c may be called C, but in ax^2 + bx + c it is a coefficient.
    if constant == symbol("C"):
        names = _CONSTANTS_OF_INTEGRATION
    else:
        is_coefficient = bool(gold.symbols() & {"a", "b"})
        names = () if is_coefficient else ("C",)
    for name in names:
        if symbol(name) in prediction.parts and name not in gold.symbols():
            return replace_node(prediction, symbol(name), constant)
    return prediction


def as_congruence(node: Node, domain: Node | None) -> Node:
    """Return the values `x = 7k + 3` of all whole numbers k as `x \\equiv 3 (mod 7)`; other formulas unchanged."""
    is_value = is_equation(node) and len(node.parts) == 2 and is_label(node.parts[0])
    name, formula = node.parts if is_value else (BLANK, node)
    parameters = formula.symbols()
    if formula.kind != "sum" or len(parameters) != 1 or not parameters <= NAMES_OF_WHOLE_NUMBERS:
        return node
    parameter = symbol(*parameters)
    if domain is not None and domain.parts != (parameter, symbol("mathbbZ")):
        return node
    if not _is_linear(formula, parameter):
        return node
    residue, next_value = (
        exact(replace_node(formula, parameter, number(parameter_value))) for parameter_value in range(2)
    )
    if residue is None or next_value is None or residue == next_value:
        return node
    return Node("congruence", (name, number(residue), number(abs(next_value - residue))))


def _is_linear(formula: Node, parameter: Node) -> bool:
    """Return whether a formula is written as a linear one: the parameter is multiplied by numbers only."""
    if formula == parameter or parameter.value not in formula.symbols():
        return True
    if formula.kind in ("sum", "negative"):
        return all(_is_linear(part, parameter) for part in formula.parts)
    if formula.kind not in ("product", "quotient"):
        return False
    factors = [part for part in formula.parts if parameter.value in part.symbols()]
    # A quotient's parameter stands above the line.
    is_above = formula.kind == "product" or factors[0] is formula.parts[0]
    return len(factors) == 1 and is_above and _is_linear(factors[0], parameter)


def as_quotient(node: Node) -> Node | None:
    if node.kind != "ratio":
        return node
    return Node("quotient", node.parts) if len(node.parts) == 2 else None


def multiply_into_matrix(node: Node) -> Node:
    if node.kind == "negative" and node.parts[0].kind == "matrix":
        return _multiply_cells(node.parts[0], [number(-1)])
    if node.kind != "product":
        return node
    matrices = [part for part in node.parts if part.kind == "matrix"]
    return (
        _multiply_cells(matrices[0], [part for part in node.parts if part.kind != "matrix"])
        if len(matrices) == 1
        else node
    )


def column_as_point(node: Node, other: Node) -> Node:
    """Return a matrix of one column as a tuple, if `other` is a tuple in round brackets without infinity."""
    if other.kind != "tuple" or other.value != "()" or any(map(_is_infinite, other.parts)):
        return node
    matrix = multiply_into_matrix(node)
    if matrix.kind != "matrix" or matrix.value != "matrix" or len(matrix.parts) < 2:
        return node
    cells = [row.parts if row.kind == "row" else (row,) for row in matrix.parts]
    return Node("tuple", tuple(row[0] for row in cells), "()") if all(len(row) == 1 for row in cells) else node


def _is_infinite(node: Node) -> bool:
    return node == INFINITY or any(map(_is_infinite, node.parts))


def _multiply_cells(matrix: Node, factors: list[Node]) -> Node:
    if matrix.value != "matrix":
        return join_operands("product", [*factors, matrix])
    rows = [
        Node("row", tuple(join_operands("product", [*factors, cell]) for cell in row.parts), row.value)
        for row in matrix.parts
    ]
    return Node("matrix", tuple(rows), matrix.value)


def count_degrees(node: Node) -> Node | None:
    r"""Return the number of degrees in a formula like `90^\circ`. None: it is not in degrees."""
    if node.kind == "negative":
        inner = count_degrees(node.parts[0])
        return inner and negative(inner)
    if node.kind != "product" or DEGREE not in node.parts:
        return None
    # The degree sign alone is one degree.
    return join_operands("product", [part for part in node.parts if part != DEGREE] or [number(1)])
