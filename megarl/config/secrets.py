"""Detection of secrets in a recipe, by a field's name or a text's form. megarl never writes secrets to files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

Place = tuple[str | int, ...]
"""Place of a value in a recipe: its keys and list indices from the top."""

REMEDY = "refer to it by the name of an environment variable: ${oc.env:NAME}"

_SECRET_NAME = re.compile(
    r"(^|_)("
    r"tokens?|secrets?|passwords?|passwd|passphrases?|credentials?|auth|authorization|bearer|apikeys?|"
    r"(api|access|private|secret)_keys?"
    r")$"
)
_TOKENIZER_NAME = re.compile(r"(^|_)(bos|eos|pad|unk|sep|cls|mask|image|audio|video|stop|special|start|end)_tokens?$")
"""Field names that end like a secret's name but mean tokens of a vocabulary."""
# Both forms occur: scheme://user:password@host, and https://token@host.
_URL_WITH_PASSWORD = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/\s:@]*:[^/\s@]+@|https?://[^/\s:@]+@")
_ASSIGNMENT = re.compile(r"([A-Za-z][A-Za-z0-9_-]*)=([^\s,&]+)")
_REFERENCE = re.compile(r"\$\{[^{}]*\}")


def is_secret_name(name: str) -> bool:
    """Return whether a field name denotes a secret, like `hf_token`, `apiKeys` or `auth`."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").lower()
    return bool(_SECRET_NAME.search(words)) and not _TOKENIZER_NAME.search(words)


def is_secret_place(place: Place) -> bool:
    """Return whether a field, or a section around it, has the name of a secret.

    Names of data sets are the user's choice, so the section `data` is exempt.
    """
    return place[:1] != ("data",) and any(isinstance(part, str) and is_secret_name(part) for part in place)


def holds_secret(place: Place, value: Any) -> bool:
    """Return whether a value is a secret in clear text: its field is named like one, or it contains a password or
    token."""
    if not isinstance(value, str) or not value:
        return False
    if is_secret_place(place) or _URL_WITH_PASSWORD.search(value):
        return True
    is_url = "://" in value
    # srun's options may set variables of the job (--export=HF_TOKEN=...), and a URL may have a token as parameter.
    if not is_url and place[:2] != ("cluster", "srun_options"):
        return False
    return any(is_secret_name(name) for name, _ in _ASSIGNMENT.findall(value))


def literal_secrets(values: Any, references: Mapping[Place, str], place: Place = ()) -> Iterator[str]:
    """Yield one error line per secret in clear text. In a text with `${...}` references only the rest is examined."""
    if place in references:
        literal = references[place]
        while (shorter := _REFERENCE.sub("", literal)) != literal:
            literal = shorter
        if not is_secret_place(place) and holds_secret(place, literal):
            yield f"{dotted(place)} = <hidden>: a secret must not stand in a recipe; {REMEDY}"
    elif isinstance(values, Mapping):
        for name, value in values.items():
            yield from literal_secrets(value, references, (*place, str(name)))
    elif isinstance(values, list | tuple):
        for index, value in enumerate(values):
            yield from literal_secrets(value, references, (*place, index))
    elif holds_secret(place, values):
        yield f"{dotted(place)} = <hidden>: a secret must not stand in a recipe; {REMEDY}"


def dotted(place: Place) -> str:
    """Return a place (keys and list indices) as a dotted name."""
    return ".".join(str(part) for part in place)
