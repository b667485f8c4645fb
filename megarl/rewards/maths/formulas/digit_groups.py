r"""Numbers whose signs are not arithmetic: clock times (`3:00`), dates (`3/14/2015`), ranges and codes (`10-12`)."""

from __future__ import annotations

import re
from fractions import Fraction

from megarl.rewards.maths.formulas.atoms import Atoms
from megarl.rewards.maths.formulas.nodes import Node, number
from megarl.rewards.maths.formulas.tokens import Token

_HOUR = re.compile(r"(?:[01]?\d|2[0-4])", re.ASCII)
_SIXTIETH = re.compile(r"[0-5]\d", re.ASCII)
_GROUP = re.compile(r"\d+(?:\.\d+)?", re.ASCII)
_DATE_PARTS = 3
_MERIDIEMS = ("AM", "PM")


class DigitGroups(Atoms):
    """Part of the formula parser: a whole item that is a clock time, a date, a range or a code."""

    def digit_groups(self) -> Node | None:
        """Parse an item of digit groups. None: the item is a formula, and nothing was parsed."""
        next_token = self.following()
        is_candidate = next_token.text in (":", "-", "/") or (
            next_token.kind == "text" and next_token.text in _MERIDIEMS
        )
        if self.token.kind != "number" or not is_candidate:
            return None
        start = self._place
        groups, sign = self._read_groups()
        meridiem = self._read_meridiem()
        node = None
        if _is_clock(groups, sign, meridiem):
            node = Node("clock", tuple(number(int(group)) for group in groups), meridiem)
        # Within brackets and equations these signs are arithmetic.
        elif _is_code(groups, sign) and not meridiem and not self.brackets and self._ends_item():
            node = Node("groups", tuple(number(Fraction(group)) for group in groups), (sign, *groups))
        if node is None:
            self._place = start
        return node

    def _read_groups(self) -> tuple[list[str], str]:
        """Skip numbers joined by one sign. Returns the numbers as written, and the sign."""
        groups = [self.token.text]
        self.advance()
        sign = self.token.text if self.token.text in (":", "-", "/") else ""
        while sign and self.token.text == sign and self.following().kind == "number":
            self.advance()
            groups.append(self.token.text)
            self.advance()
        return groups, sign

    def _read_meridiem(self) -> str:
        if self.token.kind != "text" or self.token.text not in _MERIDIEMS:
            return ""
        meridiem = self.token.text
        self.advance()
        return meridiem

    def _ends_item(self) -> bool:
        token: Token = self.token
        return token.kind in ("end", "text", "word") or token.text in (",", ";", "%", "\\%")


def _is_clock(groups: list[str], sign: str, meridiem: str) -> bool:
    if len(groups) == 1:
        return bool(meridiem) and _HOUR.fullmatch(groups[0]) is not None
    is_sixtieths = all(_SIXTIETH.fullmatch(group) for group in groups[1:])
    return sign == ":" and len(groups) <= _DATE_PARTS and is_sixtieths and _HOUR.fullmatch(groups[0]) is not None


def _is_code(groups: list[str], sign: str) -> bool:
    # 3/4 is a fraction, but 3/4/2015 hardly ever is.
    min_groups = {"-": 2, "/": _DATE_PARTS}.get(sign)
    return min_groups is not None and len(groups) >= min_groups and all(_GROUP.fullmatch(group) for group in groups)
