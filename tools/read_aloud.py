"""Print random docstrings, field descriptions and messages for a reader, or the numbers of the package's language.

    python tools/read_aloud.py [--count 20] [--seed 1] [--kind docstring|field|message] [--bare]
    python tools/read_aloud.py --numbers [--package NAME]

Give what it prints to somebody who does not know the code: each text must be understood at the first reading.
"""

from __future__ import annotations

import argparse
import ast
import io
import random
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "megarl"

RELATIVE = ("that", "which", "who", "whose", "what", "those", "such")
"""Words that begin clauses within clauses; many of them make a text hard to read."""

UNCLEAR = r"\b(told|tells?|telling|hears?|heard)\b"
"""Words for what should be called report, message, log or notify."""

VAGUE = frozenset(
    [
        "another",
        "any",
        "at",
        "chosen",
        "each",
        "either",
        "every",
        "found",
        "given",
        "gone",
        "had",
        "heard",
        "held",
        "here",
        "kept",
        "known",
        "left",
        "made",
        "met",
        "most",
        "neither",
        "none",
        "one",
        "other",
        "others",
        "own",
        "said",
        "same",
        "seen",
        "settled",
        "shown",
        "some",
        "such",
        "taken",
        "there",
        "these",
        "this",
        "those",
        "told",
        "wanted",
        "what",
        "who",
        "whole",
    ]
)
"""Words that leave open what a variable named by them holds. Participles with a noun understood, such as the `hidden`
states or `padded` rows, are none of them."""

PARTICIPLES = frozenset(
    [
        "begun",
        "bound",
        "bought",
        "broken",
        "brought",
        "built",
        "chosen",
        "done",
        "drawn",
        "driven",
        "fallen",
        "forgotten",
        "found",
        "given",
        "gone",
        "grown",
        "held",
        "hidden",
        "kept",
        "known",
        "laid",
        "learnt",
        "left",
        "lent",
        "lost",
        "made",
        "meant",
        "met",
        "paid",
        "risen",
        "said",
        "seen",
        "sent",
        "shown",
        "sought",
        "spent",
        "stolen",
        "struck",
        "sunk",
        "swept",
        "taken",
        "taught",
        "thrown",
        "told",
        "torn",
        "understood",
        "won",
        "written",
    ]
)
"""Participles that neither end in -ed nor are their verb's imperative too, as `read` is."""

_ENDS_IN_ED = frozenset(
    ["bed", "bleed", "embed", "exceed", "feed", "need", "proceed", "red", "seed", "shed", "speed", "succeed"]
)
"""Words that end in -ed and are no participles."""

KINDS = ("docstring", "field", "message")

_SHAPE = re.compile(r"\[[a-z_0-9 +*,./'-]+\]")
_CALLS = ("Error", "warn", "warning", "notice", "print", "fault", "refuse")
"""Ends of the names of calls whose first text is read by a user."""


@dataclass(frozen=True, slots=True)
class Text:
    """A docstring, a field's description or a message, on one line, with its place."""

    kind: str
    place: str
    words: str


def files(package: str = "") -> list[Path]:
    """Return the package's source files, or those of one package, sorted."""
    return sorted((PACKAGE / package).rglob("*.py"))


# Each file is walked three times, one after another.
@lru_cache(maxsize=1)
def _nodes(path: Path) -> list[ast.AST]:
    """Return the nodes of a file's syntax tree."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def texts(path: Path) -> Iterator[Text]:
    """Yield all texts of a file that people read."""
    name = path.relative_to(PACKAGE.parent)
    for node in _nodes(path):
        for before, statement in _pairs(getattr(node, "body", ())):
            words = _literal(getattr(statement, "value", None)) if isinstance(statement, ast.Expr) else None
            if words is not None:
                is_field = isinstance(before, ast.AnnAssign) and "config" in name.parts
                yield Text("field" if is_field else "docstring", f"{name}:{statement.lineno}", words)
        if isinstance(node, ast.Call) and node.args and _callee_name(node.func).endswith(_CALLS):
            words = _literal(node.args[0])
            if words is not None and " " in words:
                yield Text("message", f"{name}:{node.lineno}", words)
        if isinstance(node, ast.keyword) and node.arg == "help" and (words := _literal(node.value)):
            yield Text("message", f"{name}:{node.value.lineno}", words)


@dataclass(frozen=True, slots=True)
class Numbers:
    """What is counted of the language of a part of the package."""

    relative_per_100_words: float
    comments_per_100_code_lines: float
    code_lines: int
    unclear: tuple[str, ...]
    """Places of docstrings, comments and messages with a word of `UNCLEAR`."""
    as_of: tuple[str, ...]
    """Places of docstrings of the form "As of X."."""
    without_shapes: tuple[str, ...]
    """Public functions with tensors whose docstring gives no shape in brackets."""
    docstring_words_per_100_code_lines: float
    vague_names_per_1000_code_lines: float
    """Variables, parameters and attributes named by one word of `VAGUE`, for each place that binds one."""
    participle_function_percentage: float
    vague_names: tuple[str, ...]
    participle_functions: tuple[str, ...]


def numbers(paths: list[Path]) -> Numbers:
    """Return the numbers of these files together."""
    num_words = num_docstring_words = num_relative = num_comments = num_code = num_functions = 0
    vague_names: list[str] = []
    participle_functions: list[str] = []
    unclear: list[str] = []
    as_of: list[str] = []
    without_shapes: list[str] = []
    for path in paths:
        for text in texts(path):
            words = re.findall(r"[A-Za-z']+", text.words)
            num_docstring_words += len(words) if text.kind == "docstring" else 0
            if text.kind != "message":
                num_words += len(words)
                num_relative += sum(word.lower() in RELATIVE for word in words)
                as_of += [text.place] if text.words.startswith("As of") else []
            # Identifiers, in backticks, are no words of the text.
            prose = re.sub(r"`[^`]*`", "", text.words)
            unclear += [text.place] if re.search(UNCLEAR, prose, re.IGNORECASE) else []
        comments, code = _lines(path)
        num_comments += len(comments)
        num_code += code
        name = path.relative_to(PACKAGE.parent)
        unclear += [f"{name}:{line}" for line, words in comments if re.search(UNCLEAR, words, re.IGNORECASE)]
        without_shapes += _without_shapes(path)
        vague_names += [
            f"{name}:{line} {variable}" for line, variable in _variables(path) if variable.strip("_") in VAGUE
        ]
        functions = [node for node in _nodes(path) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        num_functions += len(functions)
        participle_functions += [
            f"{name}:{node.lineno} {node.name}" for node in functions if is_participle(node.name.strip("_"))
        ]
    return Numbers(
        100 * num_relative / max(num_words, 1),
        100 * num_comments / max(num_code, 1),
        num_code,
        tuple(unclear),
        tuple(as_of),
        tuple(without_shapes),
        100 * num_docstring_words / max(num_code, 1),
        1000 * len(vague_names) / max(num_code, 1),
        100 * len(participle_functions) / max(num_functions, 1),
        tuple(vague_names),
        tuple(participle_functions),
    )


def is_participle(word: str) -> bool:
    """Return whether a word, the whole of a name, is a past participle."""
    return word in PARTICIPLES or (re.fullmatch(r"[a-z]{2,}ed", word) is not None and word not in _ENDS_IN_ED)


def _variables(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each variable that is bound, each parameter, and each attribute of `self`."""
    for node in _nodes(path):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def _lines(path: Path) -> tuple[list[tuple[int, str]], int]:
    """Return the comments of a file, and the number of its lines of code without docstrings, comments and blanks."""
    source = path.read_text(encoding="utf-8")
    docstrings: set[int] = set()
    for node in _nodes(path):
        for _, statement in _pairs(getattr(node, "body", ())):
            if isinstance(statement, ast.Expr) and _literal(statement.value) is not None:
                docstrings.update(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
    comments: list[tuple[int, str]] = []
    code: set[int] = set()
    layout = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if not re.match(r"#\s*(noqa|pyright:|type:|fmt:)", token.string):
                comments.append((token.start[0], token.string))
        elif token.type not in layout:
            code.update(range(token.start[0], token.end[0] + 1))
    return comments, len(code - docstrings)


def _without_shapes(path: Path) -> Iterator[str]:
    for node in _nodes(path):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
            continue
        annotations = [argument.annotation for argument in (*node.args.args, *node.args.kwonlyargs)]
        written = " ".join(
            ast.unparse(annotation) for annotation in (*annotations, node.returns) if annotation is not None
        )
        docstring = ast.get_docstring(node) or ""
        # An override says only how it differs; a method without a docstring is one.
        if re.search(r"\bTensor\b", written) and docstring and not _SHAPE.search(docstring):
            yield f"{path.relative_to(PACKAGE.parent)}:{node.lineno} {node.name}"


def _pairs(body: object) -> Iterator[tuple[ast.stmt | None, ast.stmt]]:
    statements = body if isinstance(body, list) else []
    yield from zip([None, *statements], statements, strict=False)


def _literal(node: ast.AST | None) -> str | None:
    """Return a text literal on one line, {...} for its values; None for any other node."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return " ".join(node.value.split())
    if isinstance(node, ast.JoinedStr):
        parts = [str(part.value) if isinstance(part, ast.Constant) else "{...}" for part in node.values]
        return " ".join("".join(parts).split())
    return None


def _callee_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20, help="texts of each kind")
    parser.add_argument("--seed", type=int, default=1, help="seed of the draw")
    parser.add_argument("--kind", choices=KINDS, help="texts of this kind only")
    parser.add_argument("--package", default="", help="texts of this package of megarl only")
    parser.add_argument("--bare", action="store_true", help="print no places, as for a reader without the code")
    parser.add_argument("--numbers", action="store_true", help="print the numbers of the language instead")
    parser.add_argument("--places", action="store_true", help="with --numbers: print the places too")
    options = parser.parse_args()
    paths = files(options.package)
    if not paths:
        sys.exit(f"--package {options.package}: megarl has no such package")
    if options.numbers:
        language = numbers(paths)
        print(f"relative words per 100 words of docstrings  {language.relative_per_100_words:.2f}")
        print(f"comment lines per 100 code lines            {language.comments_per_100_code_lines:.2f}")
        print(f"code lines                                  {language.code_lines}")
        print(f"docstring words per 100 code lines          {language.docstring_words_per_100_code_lines:.0f}")
        print(f"vague variable names per 1,000 code lines   {language.vague_names_per_1000_code_lines:.1f}")
        print(f"functions named by a participle             {language.participle_function_percentage:.1f} %")
        for name in ("unclear", "as_of", "without_shapes", "vague_names", "participle_functions"):
            places = getattr(language, name)
            print(f"{name:<43} {len(places)}")
            print("".join(f"    {place}\n" for place in places) if options.places else "", end="")
        return
    draw = random.Random(options.seed)
    found_texts = [text for path in paths for text in texts(path)]
    for kind in [options.kind] if options.kind else KINDS:
        of_kind = [text for text in found_texts if text.kind == kind]
        for text in draw.sample(of_kind, min(options.count, len(of_kind))):
            print(f"[{text.kind}]{'' if options.bare else f' {text.place}'}\n    {text.words}\n")


if __name__ == "__main__":
    main()
