"""Detects secrets in a recipe, by a field's name or a text's form. megarl never writes secrets to files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

Place = tuple[str | int, ...]
"""Keys and list indices that lead to a value of a recipe."""

REMEDY = "refer to it by the name of an environment variable: ${oc.env:NAME}"
HIDDEN = "<hidden>"
"""Text shown instead of a secret."""

_SECRET_NAME = re.compile(
    r"(^|_)("
    r"[a-z]*passwords?|[a-z]*secrets?|passwd|pwd|passphrases?|passcodes?|credentials?|auth|authorization|bearer|"
    r"tokens?|(access|auth|bearer|refresh|session|api|bot)tokens?|cookies?|webhooks?(_urls?)?|apikeys?|"
    r"(api|access|private|secret|signing|encryption|account|storage|session|ssh|service|license|master|shared|deploy|"
    r"subscription|wandb|openai|anthropic|hf|huggingface|aws|azure|gcp|google|github|gitlab|slack)_keys?"
    r")$"
    # Excludes passes over something: num_pass, forward_pass.
    r"|(?<!num)(?<!one)(?<!two)(?<!first)(?<!second)(?<!forward)(?<!backward)(?<!multi)(?<!single)(^|_)pass$"
)
_TOKENIZER_NAME = re.compile(
    r"(^|_)(bos|eos|pad|unk|sep|cls|mask|image|audio|video|stop|special|start|end)_tokens?$"
    # Numbers and positions of tokens: max_new_token. But first_access_token is a secret.
    r"|(^|_)(max|min|num|context|first)(_(?!access_|auth_|bearer_|refresh_|session_|api_|bot_|hf_)[a-z0-9]+)*_tokens?$"
)
"""Names that end like a secret's name, but mean tokens of a vocabulary."""
_PLACEHOLDER = re.compile(r"((bearer|basic|token)\s+)?(empty|none|dummy)", re.IGNORECASE)
"""Values for servers that require a key but do not check it."""
_PASS_COUNT = re.compile(r"all|any|both|each|every|first|second|last|one|two|\d", re.IGNORECASE)
"""Values of a field `pass` that count or name passes over something."""
_NUMERIC_NAME = re.compile(r"(passwords?|passwd|pwd|passphrases?|passcodes?|_keys?|apikeys?)$")
"""Names of fields that are secret even with a number as value. `max_tokens: 64` is not a secret."""
_URL_PARAMETER = re.compile(r"[?&;#](key|sig|signature|code)=[^\s&]", re.IGNORECASE)

_EDGE = r"(?<![A-Za-z0-9_/.-])"
_END = r"(?![A-Za-z0-9_/-]|\.[A-Za-z0-9])"
# Random part of a key. Unlike words and names, it has several digits or capital letters.
_RANDOM_WORD = r"(?=(?:[a-z]{0,80}[A-Z0-9]){3})[A-Za-z0-9]{16}"
_SHORT_HEX = r"(?=[0-9]{0,11}[a-f])(?=[a-f]{0,11}[0-9])[0-9a-f]{12}"
# Repetitions are bounded where a search could begin many times within one long word: it would be quadratic.
_FORMS = re.compile(
    # https://user:password@host, and https://token@host.
    # A scheme must begin a word: otherwise searches of long words would be quadratic.
    r"(?<![A-Za-z0-9+.-])[A-Za-z][A-Za-z0-9+.-]*://[^/\s:@]*:[^/\s@]+@|https?://[^/\s:@]+@"
    # Keys of OpenAI, Anthropic and others, perhaps with a prefix such as proj-. sk-qwen3-8b-grpo is not a key.
    rf"|{_EDGE}sk-(?:[A-Za-z0-9]*[_-]){{0,20}}(?:{_SHORT_HEX}|{_RANDOM_WORD})[\w-]*{_END}"
    rf"|{_EDGE}hf_{_RANDOM_WORD}[A-Za-z0-9]*{_END}"
    rf"|{_EDGE}(?:gh[opusr]_|gsk_|npm_|nvapi-|glpat-|xai-|r8_)[A-Za-z0-9-]{{16,}}{_END}"
    rf"|{_EDGE}(?:github_pat_|dckr_pat_|[rs]k_(?:live|test)_)\w{{16,}}{_END}"
    rf"|{_EDGE}xox[abeoprs]-[A-Za-z0-9-]{{10,}}|{_EDGE}(?:AIza|ya29\.)[\w-]{{20,}}|{_EDGE}SG\.[\w-]{{16,}}\.[\w-]{{16,}}"
    rf"|{_EDGE}(?:AKIA|ASIA)[A-Z0-9]{{8,}}{_END}"
    r"|-----BEGIN [A-Z0-9 ]*PRIVATE KEY"
    # JWT: JSON in base64, content, signature.
    rf"|{_EDGE}eyJ[\w-]{{5,}}\.[\w-]{{5,}}\.[\w-]*"
    r"|^(?i:bearer|basic)\s+[A-Za-z0-9._~+/=-]{6,}$"
    r"|(?i:AccountKey|SharedAccessKey|SharedAccessSignature)=[^\s;]+"
    # Whoever knows the address of a webhook may post to it.
    r"|https?://(?:hooks\.slack\.com/(?:services|workflows|triggers)|(?:\w+\.)?discord(?:app)?\.com/api/webhooks"
    r"|[\w.-]{0,80}webhook\.office\.com|outlook\.office\.com/webhook|hooks\.zapier\.com/hooks"
    r"|maker\.ifttt\.com/\S{0,80}key"
    r"|api\.telegram\.org/bot[^/\s]{1,80})/?\S"
    r"|https?://[^\s?#]{1,80}/(?:webhooks?|hooks)\w{0,8}/[^\s?#]{0,80}(?=\w{0,80}\d)\w{8}"
)
"""Texts that are, or contain, a secret, whatever the field is called."""

_PROSE = re.compile(r"(prompt|system|stop|template|pattern|instruction|message)s?$")
"""Fields with text for a model or a search, in which `password=` is only a word."""
_COMMAND = re.compile(r"(command|cmd|arg|argument|argv|option|flag|environment|env|export|script|entrypoint|header)s?$")
"""Fields whose text may have program options, variables or HTTP headers."""
# Matches may overlap: --export=HF_TOKEN=VALUE has two.
# A name must begin at its first character: otherwise a long word of many dashes would be read from each dash.
_ASSIGNMENT = re.compile(r"(?<![A-Za-z0-9_-])[0-9_-]*([A-Za-z][A-Za-z0-9_-]*)=(?=[\"']?([^\s,&;\"']+))")
_OPTION = re.compile(r"(?<!\S)--?([A-Za-z][A-Za-z0-9_-]*)\s+[\"']?([^\s\"'-][^\s\"']*)")
# Without a space, token:small is a tag.
_HEADER = re.compile(
    r"(?<![A-Za-z0-9_-])[0-9_-]*(?!(?i:tokens?|pass):\S)([A-Za-z][A-Za-z0-9_-]*):\s*(?:(?i:bearer|basic|token)\s+)?([^\s\"']+)"
)
_JSON_VALUE = re.compile(r"[\"']([A-Za-z][A-Za-z0-9_-]*)[\"']\s*:\s*[\"']([^\"']+)[\"']")
_USER_OPTION = re.compile(r"(?<!\S)(?:-u|--user|--proxy-user)[\s=]+[\"']?[^\s:/\"'$]+:(?!\d+(?:\s|$))[^\s\"'$]+")
"""User and password as an option of curl. Two numbers are the ids of a user and a group."""
_REFERENCE = re.compile(r"\$\{[^{}]*\}")


def is_secret_name(name: str) -> bool:
    """Return whether a field name means a secret: `hf_token`, `apiKeys`, `auth`."""
    snake_name = _to_snake_case(name)
    return bool(_SECRET_NAME.search(snake_name)) and not _TOKENIZER_NAME.search(snake_name)


def is_secret_place(place: Place) -> bool:
    """Return whether a field or a section around it is named like a secret. Names below `data` are the user's."""
    return place[:1] != ("data",) and any(isinstance(part, str) and is_secret_name(part) for part in place)


def holds_secret(place: Place, value: Any) -> bool:
    """Return whether a value is a secret in clear text: by the field's name, or because it contains a password or
    token.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return is_secret_place(place[-1:]) and bool(_NUMERIC_NAME.search(_to_snake_case(str(place[-1]))))
    # Users choose the run's name, and paths and logs contain it anyway.
    if not isinstance(value, str) or not value or place == ("name",):
        return False
    if is_secret_place(place) and not _is_placeholder_or_count(_name_at(place), value):
        return True
    if _FORMS.search(value) or _URL_PARAMETER.search(value if "://" in value else ""):
        return True
    # A URL may have a token as parameter.
    return bool("://" in value and _has_assigned_secret(value, _ASSIGNMENT)) or _has_secret_argument(place, value)


def secret_items(place: Place, items: Sequence[Any]) -> set[int]:
    """Return the indices of list items that follow an option named like a secret: `--token`, VALUE."""
    if place[:1] == ("data",):
        return set()
    return {
        index
        for index, (option, value) in enumerate(pairwise(items), start=1)
        if isinstance(option, str) and isinstance(value, str) and _is_secret_option(option, value)
    }


def literal_secrets(values: Any, references: Mapping[Place, str], place: Place = ()) -> Iterator[str]:
    """Yield one error line per secret in clear text. In a text with `${...}` references, only the other parts are
    examined.
    """
    # A text with references: examine what is left without them.
    if place in references:
        literal = references[place]
        while (shorter_literal := _REFERENCE.sub("", literal)) != literal:
            literal = shorter_literal
        if not is_secret_place(place) and holds_secret(place, literal):
            yield _secret_error(place)
    elif isinstance(values, Mapping):
        for name, value in values.items():
            if _FORMS.search(str(name)):
                yield _secret_error((*place, HIDDEN))
            yield from literal_secrets(value, references, (*place, str(name)))
    elif isinstance(values, list | tuple):
        secrets = secret_items(place, values)
        for index, value in enumerate(values):
            if index in secrets and (*place, index) not in references:
                yield _secret_error((*place, index))
            else:
                yield from literal_secrets(value, references, (*place, index))
    elif holds_secret(place, values):
        yield _secret_error(place)


def dotted_name(place: Place) -> str:
    return ".".join(str(part) for part in place)


def shown_key(name: str) -> str:
    """Return a mapping's key for printing: it may be a secret itself."""
    return HIDDEN if _FORMS.search(name) else name


def _secret_error(place: Place) -> str:
    return f"{dotted_name(place)} = {HIDDEN}: a secret must not stand in a recipe; {REMEDY}"


def _to_snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").lower()


def _name_at(place: Place) -> str:
    return next((part for part in reversed(place) if isinstance(part, str)), "")


def _is_placeholder_or_count(name: str, value: str) -> bool:
    """Return whether a value under a secret's name is a placeholder or a count: `pass: "first"`, `tokens: "64"`."""
    snake_name = _to_snake_case(name)
    is_pass_count = snake_name == "pass" and bool(_PASS_COUNT.fullmatch(value))
    is_token_count = snake_name.endswith("tokens") and value.isdecimal()
    return is_pass_count or is_token_count or bool(_PLACEHOLDER.fullmatch(value))


def _is_clear_secret(name: str, value: str) -> bool:
    # A variable of the shell is no secret.
    return is_secret_name(name) and not value.startswith("$") and not _is_placeholder_or_count(name, value)


def _is_secret_option(option: str, value: str) -> bool:
    """Return whether a command's item is an option for a secret, with its value in clear text."""
    if _USER_OPTION.fullmatch(f"{option} {value}"):
        return True
    name = option.lstrip("-")
    return option.startswith("-") and not value.startswith("-") and _is_clear_secret(name, value)


def _has_secret_argument(place: Place, text: str) -> bool:
    """Return whether a text of a command, a variable or a header has a secret: `--token X`, `TOKEN=X`, JSON."""
    name = _to_snake_case(_name_at(place))
    if _PROSE.search(name) or place[:1] == ("data",):
        return False
    if _has_assigned_secret(text, _JSON_VALUE):
        return True
    if not (isinstance(place[-1], int) or _COMMAND.search(name)):
        return False
    forms = (_ASSIGNMENT, _OPTION, _HEADER)
    return bool(_USER_OPTION.search(text)) or any(_has_assigned_secret(text, form) for form in forms)


def _has_assigned_secret(text: str, form: re.Pattern[str]) -> bool:
    return any(_is_clear_secret(name, value) for name, value in form.findall(text))
