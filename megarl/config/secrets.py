"""Secrets in a recipe, known by the name of a field or by the shape of a text. Secrets are never written."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

Place = tuple[str | int, ...]
"""Where a value stands in a recipe: keys and list indices from the top."""

REMEDY = "refer to it by the name of an environment variable: ${oc.env:NAME}"

_SECRET_NAME = re.compile(
    r"(^|_)("
    r"tokens?|secrets?|passwords?|passwd|passphrases?|credentials?|auth|authorization|bearer|apikeys?|"
    r"(api|access|private|secret)_keys?"
    r")$"
)
_TOKENIZER_NAME = re.compile(r"(^|_)(bos|eos|pad|unk|sep|cls|mask|image|audio|video|stop|special|start|end)_tokens?$")
"""Names that end like a secret's and are a vocabulary's."""
_URL_WITH_PASSWORD = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/\s:@]*:[^/\s@]+@|https?://[^/\s:@]+@")
_ASSIGNMENT = re.compile(r"([A-Za-z][A-Za-z0-9_-]*)=([^\s,&]+)")
_REFERENCE = re.compile(r"\$\{[^{}]*\}")


def is_secret_name(name: str) -> bool:
    """Whether a field of this name holds a secret, as `hf_token`, `apiKeys` or `auth` do."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").lower()
    return bool(_SECRET_NAME.search(words)) and not _TOKENIZER_NAME.search(words)


def is_secret_place(place: Place) -> bool:
    """Whether a field, or a section around it, has a secret's name. Names of data sets are the user's own."""
    return place[:1] != ("data",) and any(isinstance(part, str) and is_secret_name(part) for part in place)


def holds_secret(place: Place, value: Any) -> bool:
    """Whether a value is a secret in clear: a text in a secret's place, or one that carries a password or token."""
    if not isinstance(value, str) or not value:
        return False
    if is_secret_place(place) or _URL_WITH_PASSWORD.search(value):
        return True
    is_url = "://" in value
    if not is_url and place[:2] != ("cluster", "srun_options"):
        return False
    return any(is_secret_name(name) for name, _ in _ASSIGNMENT.findall(value))


def literal_secrets(values: Any, references: Mapping[Place, str], place: Place = ()) -> Iterator[str]:
    """A line for each secret in clear. Of a value that is read from the environment, its own text counts."""
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
    """A place as an override names it."""
    return ".".join(str(part) for part in place)
