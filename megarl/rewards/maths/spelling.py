"""Normalisation of LaTeX and Unicode, with many spellings of the same thing, and comparison of answers as text."""

# ruff: noqa: RUF001

from __future__ import annotations

import re

from megarl.rewards.maths.arrays import rewrite_arrays
from megarl.rewards.maths.notation import TEXT_COMMANDS, rewrite_notation

# Limits of answers evaluated as formulas, so that a comparison takes milliseconds.
MAX_ANSWER_CHARACTERS = 1000
MAX_NESTING = 10
MAX_EXPONENT = 10_000
MAX_FACTORIAL = 10_000

_ASCII_SIGNS = (
    {0xFF01 + place: 0x21 + place for place in range(94)}
    | {0x1D7CE + place: 0x30 + place % 10 for place in range(50)}
    | dict.fromkeys((0x2010, 0x2011, 0x2012, 0x2013, 0x2212, 0xFE63), "-")
)
"""Full-width signs, digits of mathematical fonts and minus signs, each with its ASCII sign."""
_WRITTEN_OTHERWISE = {
    "\u00d7": r"\times ", "\u2022": r"\cdot ", "\u22c5": r"\cdot ", "…": r"\ldots ",
    "÷": "/", "·": r"\cdot ", "π": r"\pi ", "∞": r"\infty ", "°": r"^\circ ", "′": "'", "″": "''",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "\u222a": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ",
    "≈": r"\approx ", "±": r"\pm ", "∓": r"\mp ", "→": r"\to ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ",
    "λ": r"\lambda ", "μ": r"\mu ", "σ": r"\sigma ", "φ": r"\phi ", "ω": r"\omega ", "Δ": r"\Delta ",
    "∠": r"\angle ", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℚ": r"\mathbb{Q}", "ℕ": r"\mathbb{N}",
    "ℂ": r"\mathbb{C}", "∖": r"\setminus ", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
    "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "⅕": r"\frac{1}{5}", "⅛": r"\frac{1}{8}",
    "\u2018": "'", "\u2019": "'", "⁄": "/", "∕": "/", "∶": ":", "º": r"^\circ ", "∣": "|", "∗": "*",
    "⋯": r"\ldots ", "⟨": r"\langle ", "⟩": r"\rangle ", r"\ast": "*", r"\bullet": r"\cdot ", r"\surd": r"\sqrt ",
    r"\nicefrac": r"\frac", r"\sfrac": r"\frac", r"\bigcup": r"\cup ", r"\bigcap": r"\cap ", r"\Bbb": r"\mathbb",
    ":=": "=", "+/-": r"\pm ", r"\biggl": "", r"\biggr": "", r"\Biggl": "", r"\Biggr": "",
    "\u201c": '"', "\u201d": '"', "\u00a0": " ", "\u202f": " ", "\u2009": " ", r"\dfrac": r"\frac",
    r"\tfrac": r"\frac", r"\cfrac": r"\frac", r"\dbinom": r"\binom", r"\tbinom": r"\binom",
    r"\varnothing": r"\emptyset", r"\leqslant": r"\le ", r"\geqslant": r"\ge ", r"\leq": r"\le ", r"\geq": r"\ge ",
    r"\lt": "<", r"\gt": ">", r"\neq": r"\ne ", r"\not=": r"\ne ", r"\not =": r"\ne ", r"\dots": r"\ldots ",
    r"\cdots": r"\ldots ", r"\dotsc": r"\ldots ", r"\dotsb": r"\ldots ", r"\dotso": r"\ldots ", r"\colon": ":",
    r"\left": "", r"\right": "", r"\bigl": "", r"\bigr": "", r"\Bigl": "", r"\Bigr": "", r"\big": "", r"\Big": "",
    r"\bigg": "", r"\Bigg": "", r"\middle": "", r"\displaystyle": "", r"\textstyle": "", r"\limits": "",
    r"\tiny": "", r"\;": " ", r"\:": " ", r"\>": " ", r"\quad": " ", r"\qquad": " ", r"\enspace": " ",
    r"\pounds": "£", r"\euro": "€", r"\yen": "¥",
    r"\thinspace": " ", r"\lvert": "|", r"\rvert": "|", r"\vert": "|", r"\lbrace": r"\{", r"\rbrace": r"\}",
    r"\lbrack": "[", r"\rbrack": "]", r"\prime": "'", r"\varepsilon": r"\epsilon ", r"\varphi": r"\phi ",
    r"\vartheta": r"\theta ", r"\div": "/", r"\degree": r"^\circ ", r"\degrees": r"^\circ ",
    r"\land": r"\text{ and }", r"\lor": r"\text{ or }", r"\wedge": r"\text{ and }", r"\vee": r"\text{ or }",
    "∧": r"\text{ and }", "∨": r"\text{ or }", "¬": r"\neg ", r"\lnot": r"\neg ", "≡": r"\equiv ", "⇒": r"\Rightarrow ",
    "∉": r"\notin ", "⊂": r"\subset ", "⊆": r"\subseteq ", "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ",
    "⌉": r"\rceil ", "∑": r"\sum ", "∏": r"\prod ", r"\lVert": "|", r"\rVert": "|", r"\|": "|",
    r"\begin{bmatrix}": r"\begin{pmatrix}",
    r"\end{bmatrix}": r"\end{pmatrix}", r"\begin{smallmatrix}": r"\begin{matrix}",
    r"\end{smallmatrix}": r"\end{matrix}", r"\therefore": "", r"\implies": r"\Rightarrow ", r"\rightarrow": r"\to ",
    r"\longrightarrow": r"\to ", "<=": r"\le ", ">=": r"\ge ",
}  # fmt: skip
"""Unicode characters and LaTeX commands with their normalised spelling."""
_SPELLING = re.compile(
    r"\\not ?=|\\(?:begin|end)\{(?:bmatrix|smallmatrix)\}"
    r"|\\[A-Za-z]+|\\[^A-Za-z]|[<>:]=|\+/-|[^\x00-\x7f]"
)
"""Matches anything with a normalised spelling: a whole command, or a sign outside ASCII."""
_TEXT = re.compile(rf"\\(?:{TEXT_COMMANDS})\s*\{{([^{{}}]*)\}}")
_WHOLE_TEXT = re.compile(rf"\\(?P<font>{TEXT_COMMANDS})\s*\{{(?P<contents>(?:[^{{}}]|\{{[^{{}}]*\}})*)\}}")
_BOLD = ("mathbf", "boldsymbol", "bm", "mathit")
_NAME = re.compile(r"\s*\\?[A-Za-z]+\s*")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BARE_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*(?=[^\s{])")
_PAIRS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("`", "`"), ('"', '"'), ("“", "”"))
_SPACE = re.compile(r"\\[,! ]|~|\s+")
_POWER_TOWER = re.compile(r"(?:\^|\*\*)[\s{(+-]*(\d+)\s*(?:\^|\*\*)[\s{(+-]*(\d+)")
_EXPONENT = re.compile(r"(?:\^|\*\*)[\s{(+-]*(\d+)")
_FACTORIAL = re.compile(r"(\d+)[\s})]*!|\\[dt]?binom\s*\{?\s*(\d+)")
_NESTED_FACTORIAL = re.compile(r"!\s*(?:\\right)?[\s})\]]+!|!!\s*!")
_SINGLE = r"(?:\\[A-Za-z]+(?![A-Za-z{])|[^\s\\{}])"
_BRACED_SINGLE = re.compile(rf"(\\[A-Za-z]+)?(?<!\\)\{{\s*({_SINGLE})\s*\}}")
_STYLE = re.compile(
    r"\\(?:(?:color|textcolor|colorbox|hspace|vspace|phantom|hphantom|vphantom|tag|label)\*?"
    r"\s*(?:\[[^\]]*\]\s*)?\{[^{}]*\}"
    r"|(?:underline|uline|ensuremath|bf|it|sf|tt|scriptsize|footnotesize|small|normalsize|large|Large|LARGE|huge|Huge"
    r"|nonumber|noindent|strut|hfill)(?![A-Za-z])"
    r"|(?P<text>emph|textnormal|textup|textsc|textmd)(?=\s*\{)"
    r"|(?P<bold>mathbf|boldsymbol|bm)\s+(?P<letter>[A-Za-z])(?![A-Za-z]))"
)
r"""Matches commands for the look of a formula: colours, sizes, fonts, underlines, blanks.

They have no meaning, with two exceptions: `emph` contains words, and a bold letter, as in \mathbf u, is a vector.
"""
_ANNOUNCEMENT = re.compile(
    r"(\\(?:text|textbf|mathrm|mbox)\s*\{\s*)?(?:(?:so|thus|hence|therefore|finally)\b,?\s+)*(?:(?:the|my|our)\s+)?"
    r"(?:(?:final|correct|right)\s+)?(?:answer|result|solution|value(?:\s+of\b[^=<>]{1,40}?)?)"
    r"(?:\s+(?:is|equals)\b\s*:?|\s*:)\s*(\})?\s*",
    re.IGNORECASE,
)
"""Matches words announcing an answer: `The answer is`, `Final answer:`."""
_NAMED_VALUE = re.compile(
    r"^(?:\\text\s*\{\s*)?the\s+([A-Za-z][A-Za-z ]{2,60}?)\s+is(?:\s*\}\s*|\s+(?=[^{}]*$))(?=[-+.(\[\\$\d])",
    re.IGNORECASE,
)
"""Matches words naming an answer: `The area is`."""
_MEANINGFUL = re.compile(r"[_^]\s*\{|\\[A-Za-z]+\s*(?:\[[^\]]*\]\s*)?\{|\}\s*\{")
"""Matches a brace with a meaning: around an index, an exponent, or a command's argument."""

_UNIT_VECTOR = r"[ijk]|\\[ij]math(?![A-Za-z])"
_VECTOR = re.compile(
    rf"\\(?:vec|overrightarrow|mathbf|boldsymbol|bm)(?:\s*\{{\s*(?P<braced>{_UNIT_VECTOR}|[A-Za-z]|[A-Z]{{2}})\s*\}}"
    r"|\s+(?P<bare>[A-Za-z])(?![A-Za-z]))"
    rf"|\\hat(?:\s*\{{\s*(?P<hat>{_UNIT_VECTOR})\s*\}}|\s+(?P<bare_hat>[ijk])(?![A-Za-z]))"
)
r"""Matches a vector in any notation: \vec{v}, \mathbf{v}, and the unit vectors \hat{i}, \hat{\jmath}."""
_BOLD_VECTOR = re.compile(r"\\(?:mathbf|boldsymbol|bm)\s*\{\s*(\\(?:hat|vec)\s*\{[^{}]*\})\s*\}")


def has_vectors(text: str) -> bool:
    return _VECTOR.search(text) is not None


def with_plain_vectors(text: str) -> str:
    r"""Return the text with each vector in one notation: \mathbf{i} for unit vectors, \vec{v} for others."""
    return _VECTOR.sub(_normalize_vector, _BOLD_VECTOR.sub(r"\1", text))


def _normalize_vector(match: re.Match[str]) -> str:
    letter = next(group for group in match.groups() if group is not None).removeprefix("\\").removesuffix("math")
    return rf"\mathbf{{{letter}}}" if letter in ("i", "j", "k") else rf"\vec{{{letter}}}"


def normalize(text: str) -> str:
    r"""Return the text in normalised spelling, without a \boxed{} around it, dollar signs or a final full stop."""
    text = with_ascii_signs(text).strip()
    text = _STYLE.sub(_normalize_style, text).strip() or text
    text = rewrite_arrays(text) if r"\begin" in text else text
    for _ in range(3):  # A box in dollars in a box is the deepest nesting seen in answers.
        text = _remove_wrapping(text)
    text = _SPELLING.sub(lambda sign: _WRITTEN_OTHERWISE.get(sign[0], sign[0]), text).strip()
    text = rewrite_notation(_remove_announcement(text))
    without_stop = re.sub(r"(?:[.,;\s\\]|\\!)+$", "", text)
    # Three final dots are a sequence's continuation, not a full stop.
    return text.strip() if text.rstrip().endswith(("...", r"\ldots")) or not without_stop else without_stop


def with_ascii_signs(text: str) -> str:
    """Replace full-width and typographic digits, letters and minus signs by ASCII. The text keeps its length."""
    return text if text.isascii() else text.translate(_ASCII_SIGNS)


def _normalize_style(style: re.Match[str]) -> str:
    if style["text"]:
        return r"\text"
    return rf"\{style['bold']}{{{style['letter']}}}" if style["bold"] else ""


def _remove_announcement(text: str) -> str:
    """Return the answer without words like `The answer is`. `The area is 5` becomes an equation."""
    announcement = _ANNOUNCEMENT.match(text)
    if announcement is None:
        return _NAMED_VALUE.sub(r"\\text{\1}=", text, count=1) if text[:1] in ("\\", "T", "t") else text
    command, brace = announcement.groups()
    answer = text[announcement.end() :]
    # The announcement has a \text{} of its own, or the answer must be in the same \text{}.
    if (brace is not None) != (command is not None):
        answer = f"{command}{answer}" if command is not None else text
    return _remove_wrapping(answer) or text


def _remove_wrapping(text: str) -> str:
    r"""Return what one wrapping holds: `\boxed{x}`, `\text{3}`, `\mathbf{x+1}`, `$x$`. `\text{yes}` stays."""
    box = _BOX.match(text)
    if box and text.endswith("}") and _closing_brace(text, box.end()) == len(text) - 1:
        return text[box.end() : -1].strip()
    if bare := _BARE_BOX.match(text):
        return text[bare.end() :].strip()
    if whole_text := _WHOLE_TEXT.fullmatch(text):
        contents = whole_text["contents"]
        is_formula = whole_text["font"] in _BOLD and not _NAME.fullmatch(contents)
        return contents if is_formula or any(map(str.isdigit, contents)) else text
    for opening, closing in _PAIRS:
        if len(text) > len(opening + closing) and text.startswith(opening) and text.endswith(closing):
            inner = text[len(opening) : -len(closing)]
            if opening not in inner and closing not in inner:
                return inner.strip()
    return text


def _closing_brace(text: str, position: int) -> int:
    """Return the index of the brace that closes the group around `position`; -1: the group is not closed."""
    depth = 1
    while position < len(text):
        if text[position] == "\\":
            position += 2
            continue
        depth += (text[position] == "{") - (text[position] == "}")
        if depth == 0:
            return position
        position += 1
    return -1


def canonical(text: str) -> str:
    """Return the text without meaningless spaces, and without braces around single tokens."""
    text = _SPACE.sub(" ", text).strip()
    # \0 marks a space with a meaning, such as the one in "1, 234", while others are removed.
    text = re.sub(r"(?<=\d),\s+(?=\d{3}(?!\d))", ",\0", text)
    text = re.sub(r"(?<=[\w}])\s+(?=[\w{])|(?<=\d[eE])\s+", "\0", text)
    text = re.sub(r"\s+", "", text)
    for _ in range(MAX_NESTING):
        shorter = _BRACED_SINGLE.sub(_without_braces_of_single, text)
        if shorter == text:
            break
        text = shorter
    text = re.sub(r"(\\[A-Za-z]+)(?=\d)", "\\1\0", text)
    return re.sub(r"\0(?![A-Za-z0-9+-])|(?<![A-Za-z0-9,])\0", "", text).strip("\0")


def _without_braces_of_single(match: re.Match[str]) -> str:
    before, content = match[1] or "", match[2]
    return before + ("\0" if before and content[0].isalnum() else "") + content + ("\0" if content[0] == "\\" else "")


def is_same_text(first: str, second: str) -> bool:
    """Return whether two normalised answers that are not mathematics are the same text.

    Words are compared without case, single letters with case. Braces are ignored, except around an index, an
    exponent or a command's argument.
    """
    return _simplify_words(first) == _simplify_words(second)


def is_same_without_stray_braces(first: str, second: str) -> bool:
    """Return whether two texts differ only in spaces and meaningless braces.

    Only braces around an index, an exponent or a command's argument have a meaning.
    """
    if _MEANINGFUL.search(first) or _MEANINGFUL.search(second):
        return False
    return _without_braces(canonical(first)) == _without_braces(canonical(second))


_ARTICLE = re.compile(r"^(?:an?|the)\s+(?=[a-z]{3})", re.IGNORECASE)
_QUOTED = re.compile(r"^[\"'`]+(.+?)[\"'`]+$")
_EXCLAMATION = re.compile(r"(?<=[A-Za-z]{2})!+$")


def _simplify_words(text: str) -> str:
    words = _QUOTED.sub(r"\1", plain_text(text)).rstrip(".,; ")
    text = canonical(_lower_words(_ARTICLE.sub("", _EXCLAMATION.sub("", words))))
    return text if _MEANINGFUL.search(text) else _without_braces(text)


def _without_braces(text: str) -> str:
    return re.sub(r"(?<!\\)[{}]", "", text)


def _lower_words(text: str) -> str:
    return re.sub(r"(?<!\\)\b[A-Za-z]{2,}", lambda word: word[0].lower(), text)


def plain_text(text: str) -> str:
    r"""Return the text with each \text{...} replaced by its contents."""
    return " ".join(_TEXT.sub(r" \1 ", text).split())


def is_within_caps(text: str) -> bool:
    """Return whether a text is small enough to evaluate: length, nesting, powers, factorials and binomials."""
    if len(text) > MAX_ANSWER_CHARACTERS or _NESTED_FACTORIAL.search(text):
        return False
    towers = _POWER_TOWER.findall(text)
    if any(
        len(base) > 4 or len(tower_exponent) > 2 or int(base) ** int(tower_exponent) > MAX_EXPONENT
        for base, tower_exponent in towers
    ):
        return False
    depth = max_depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        max_depth = max(max_depth, depth)
    factorials = (first or second for first, second in _FACTORIAL.findall(text))
    return (
        max_depth <= MAX_NESTING
        and all(len(exponent) < 9 and int(exponent) <= MAX_EXPONENT for exponent in _EXPONENT.findall(text))
        and all(len(operand) < 9 and int(operand) <= MAX_FACTORIAL for operand in factorials)
    )
