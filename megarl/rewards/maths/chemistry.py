r"""Chemical formulas: `H_2SO_4`, `\mathrm{H_2SO_4}`, `\ce{H2SO4}` and `H2SO4` are one."""

from __future__ import annotations

import re
from functools import lru_cache

_MARK = r"(?:\\(?:text|textrm|mathrm|mathbf|mbox|ce|operatorname)\s*(?=\{)|\\[,;! ]|[{}$\s])"
_MARKS = re.compile(_MARK)
# A digit after a subscript would become part of it: P_1 2 is not P_{12}.
_SUBSCRIPT = re.compile(rf"_\s*(?:\{{\s*([0-9]+)\s*\}}|([0-9]))(?!{_MARK}*+[0-9])")
_ARROW = re.compile(r"\\(?:to|rightarrow|longrightarrow)(?![A-Za-z])|->|=")
_ELEMENT = (
    "(?:A[cglrstu]|B[aehikr]?|C[adelorsu]?|D[by]|E[rsu]|F[er]?|G[ade]|H[efgo]?|I[nr]?|Kr?|L[aiuv]|M[gno]|N[abdeip]?"
    "|Os?|P[abdotu]?|R[abehnu]|S[bceimnr]?|T[abcehilm]|U|V|W|Xe|Yb?|Z[nr])"
)
_GROUP = rf"(?:{_ELEMENT}[0-9]*|\((?:{_ELEMENT}[0-9]*)+\)[0-9]*)"
_SPECIES = rf"[0-9]*{_GROUP}+(?:\^?[0-9]*[+-](?![0-9A-Z]))?"
_FORMULA = re.compile(rf"{_SPECIES}(?:\+{_SPECIES})*(?:>{_SPECIES}(?:\+{_SPECIES})*)?")


def is_same_chemical(prediction: str, answer: str) -> bool:
    """Return whether two texts are the same chemical formula or reaction, with its terms in the same order."""
    gold = _read_formula(answer)
    return gold is not None and gold == _read_formula(prediction)


@lru_cache(maxsize=256)
def _read_formula(text: str) -> str | None:
    """Return a formula without marks, fonts and subscripts, or None. A single element without a number is none."""
    if len(text) > 200 or not any(character.isupper() for character in text):
        return None
    text = _SUBSCRIPT.sub(lambda subscript: subscript[1] or subscript[2], _ARROW.sub(">", text))
    plain = _MARKS.sub("", text)
    return plain if _FORMULA.fullmatch(plain) and (any(map(str.isdigit, plain)) or len(plain) > 2) else None
