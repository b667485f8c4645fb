"""Parameters that are matrices between hidden states. Optimizers like Muon update each matrix as a whole."""

from __future__ import annotations

from collections.abc import Iterable

from megarl.families.tensors.rules import Rule

_ROUTER = ".mlp.router.weight"


def has_matrices(rule: Rule) -> bool:
    """Return whether a parameter consists of matrices between hidden states: tensors with two axes and several rows.

    Embedding and output head are excluded: a row belongs to a token, and few tokens occur in a batch. Routers are
    excluded too: an update of equal size in all directions would send many tokens to other experts.
    """
    is_fixed = rule.is_buffer or rule.padded or rule.parameter.endswith(_ROUTER)
    return not is_fixed and all(len(shape) == 2 and min(shape) > 1 for _, shape in rule.tensors)


def matrix_templates(rules: Iterable[Rule]) -> dict[str, tuple[int, int]]:
    """Return the shape of each matrix by its template. A fused parameter has several matrices."""
    return {template: (shape[0], shape[1]) for rule in rules if has_matrices(rule) for template, shape in rule.tensors}
