"""Adjacent letters: a product of variables (`xy`) or a word."""

from __future__ import annotations

from megarl.rewards.maths.formulas.tokens import Token

# Two-letter words to be read as text; any other two letters are a product of variables.
_TWO_LETTER_WORDS = frozenset(
    "am an as at be do go ha he hi if in is it me my no of oh on or ox so to up us we id no".split()  # noqa: SIM905
)
_PRODUCT_LETTERS = frozenset("abcxyz")


def is_product(word: str) -> bool:
    """Return whether adjacent letters are a product of variables (`xy`), not a word, a unit or points (`AB`)."""
    if word.isupper() or len(word) > 4:
        return False
    if not word.islower():
        return len(word) == 2 and word[0].islower()
    if len(word) == 2:
        return word not in _TWO_LETTER_WORDS
    # Letters without a vowel are hardly a word. abc and xyz are variables even with one.
    return not set(word) & set("aeiou") or set(word) <= _PRODUCT_LETTERS


def split_products(tokens: list[Token]) -> list[Token]:
    """Split products of variables like `xy` into single letters."""
    split_tokens: list[Token] = []
    for token, next_token in zip(tokens, [*tokens[1:], tokens[-1]], strict=True):
        # In ax + by the letters are variables, but in "m by n" they are a word.
        is_word = token.text in ("ax", "by") and next_token.kind in ("letter", "word", "number")
        if token.kind == "word" and not is_word and is_product(token.text):
            for letter_index, letter in enumerate(token.text):
                # Store the word in its first letter: it may turn out to be a unit.
                origin = "" if letter_index else token.text
                split_tokens.append(
                    Token(
                        "letter",
                        letter,
                        token.start + letter_index,
                        token.has_space and not letter_index,
                        origin=origin,
                    )
                )
        else:
            split_tokens.append(token)
    return split_tokens
