"""Conversations, rendered by the tokenizer's chat template and encoded as tokens.

A special token inside a message (`<|im_end|>` in a user's text) is plain text: only the template's special tokens
control the model. `render` puts marks around special tokens of messages. `encode_rendered` encodes marked tokens as
text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.data.call_arguments import fit_call_arguments
from megarl.data.reasoning_key import with_reasoning_key
from megarl.data.tokenizers.growth import refuse_growth
from megarl.data.tokenizers.probes import is_panic, refuse_endless_encoding, refuse_endless_rules
from megarl.data.tokenizers.trials import digest_of_folder, find_trial_fault
from megarl.files.model_folder import TOKENIZER, max_values_of, read_object
from megarl.files.regular import check_folder_of_files, check_regular
from megarl.files.strict_json import refuse_many_values
from megarl.types import ConfigError, DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerBase as Tokenizer

    from megarl.config import ModelConfig

MARKS = "\ufdd0", "\ufdd1"
"""Marks around a special token in a message. They are Unicode noncharacters, so no valid text contains them."""

QUESTION: Mapping[str, Any] = {"role": "user", "content": "."}
"""A short message, to try what a chat template writes. Some refuse a conversation that begins with the assistant."""

PREFIX_CHARACTERS = 4
"""Characters per allowed token that `exceeds_token_limit` encodes first. Most texts have fewer per token."""
BORDER_TOKENS = 16
"""If a text is cut in two, the two parts together have at most this number of tokens more or fewer than the text."""

RENDER_SECONDS = 5.0
"""CPU seconds allowed to a chat template for one short message."""
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json",
)  # fmt: skip
"""JSON files that transformers reads to load a tokenizer."""
# 1 GiB: one short message needs far less, and a runaway template is stopped before it fills the machine.
_RENDER_BYTES = 1 << 30


PLAIN = "plain"
_PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'system' %}{{ '\\n\\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


def tokenizer_of(model: ModelConfig) -> Tokenizer:
    return load_tokenizer(model.folder, template=model.chat_template, defaults=model.chat_template_kwargs)


def load_tokenizer(
    folder: str | Path, *, template: str | None = None, defaults: Mapping[str, Any] | None = None
) -> Tokenizer:
    """Return the tokenizer of a Hugging Face model folder.

    `template` is a Jinja file or PLAIN, and replaces the tokenizer's chat template. `defaults` are values of the
    template's variables. Raises DataError if the tokenizer is missing or broken, or has no chat template that renders
    messages. Raises ConfigError for a missing template file, and for variables unknown to the template.
    """
    from transformers import AutoTokenizer

    # Check first: transformers would wait forever for the writer of a named pipe.
    check_folder_of_files(Path(folder))
    _refuse_many_values(Path(folder))
    digest = digest_of_folder(Path(folder))
    tokenizer_file = Path(folder) / TOKENIZER[0]
    definition = read_object(tokenizer_file) if tokenizer_file.is_file() else {}
    refuse_growth(definition, tokenizer_file)
    refuse_endless_rules(definition, tokenizer_file)
    config_file = Path(folder) / "config.json"
    # transformers and vLLM 0.30 choose their classes by model_type.
    if config_file.is_file() and not isinstance(read_object(config_file).get("model_type"), str):
        raise DataError(f"{config_file}: model_type is missing; copy the model folder again")
    try:
        # Must be explicit: without it, transformers 5.23 asks on a terminal whether to run the folder's code.
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except BaseException as error:
        # A panic of the tokenizers library, for example in a regular expression, is not an Exception.
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        _check_config(folder)
        raise DataError(
            f"{folder}: the tokenizer does not load ({error}); copy the tokenizer's files into this folder again"
        ) from error
    refuse_endless_encoding(tokenizer, definition, tokenizer_file if definition else Path(folder), digest=digest)
    if template is not None:
        start_tokens = _make_start_tokens_template(tokenizer) if template == PLAIN else ""
        tokenizer.chat_template = start_tokens + _read_template(template)
    if not tokenizer.chat_template:
        raise DataError(
            f"{folder}: the tokenizer has no chat template; add a chat_template.jinja to the folder, or set "
            "model.chat_template: to a Jinja file, or for a base model to plain (only the messages' texts)"
        )
    if defaults:
        tokenizer.chat_template = _add_default_values(tokenizer.chat_template, defaults)
    _check_template(folder, tokenizer, digest)
    return tokenizer


def template_text(model: ModelConfig) -> str | None:
    """Return the text of a recipe's chat template, without loading the tokenizer. None: the model has no template.

    Several templates are returned together as JSON. Raises ConfigError for a missing template file, DataError for a
    broken tokenizer_config.json.
    """
    if model.chat_template is not None:
        return _read_template(model.chat_template)
    folder = Path(model.folder)
    if (file := folder / "chat_template.jinja").is_file():
        return _read_template(str(file))
    settings = read_object(config) if (config := folder / "tokenizer_config.json").is_file() else {}
    template = settings.get("chat_template")
    return template if isinstance(template, str | None) else json.dumps(template, sort_keys=True)


def _read_template(path_or_plain: str) -> str:
    if path_or_plain == PLAIN:
        return _PLAIN_TEMPLATE
    try:
        return check_regular(Path(path_or_plain)).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"model.chat_template = {path_or_plain}: no such file; give the path of a Jinja file, or plain"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"model.chat_template = {path_or_plain}: cannot be read ({error})") from None


def _make_start_tokens_template(tokenizer: Tokenizer) -> str:
    """Return a Jinja expression for the tokens, such as BOS, that the tokenizer puts before each text. Empty: none.

    The chat template PLAIN begins with them, so that prompts begin as texts did in pretraining.
    """
    text = "a"
    tokens = tokenizer.encode(text)
    text_tokens = tokenizer.encode(text, add_special_tokens=False)
    num_start_tokens = next(
        (count for count in range(1, len(tokens)) if tokens[count : count + len(text_tokens)] == text_tokens), 0
    )
    if not num_start_tokens:
        return ""
    start_text = "".join(map(str, tokenizer.convert_ids_to_tokens(tokens[:num_start_tokens])))
    expected_tokens = tokens[: num_start_tokens + len(text_tokens)]
    # Some tokenizers begin a text with a space, but not after a special token.
    first_space = "" if tokenizer.encode(start_text + text, add_special_tokens=False) == expected_tokens else " "
    return f"{{{{ {_to_jinja_literal(start_text + first_space)} }}}}"


def _add_default_values(template: Any, defaults: Mapping[str, Any]) -> str:
    """Return the chat template with default values for variables that its caller does not set."""
    from jinja2 import Environment, TemplateSyntaxError, meta

    if not isinstance(template, str):
        raise ConfigError(
            "model.chat_template_kwargs: the tokenizer has several chat templates; give one as model.chat_template"
        )
    try:
        # Remove `generation` blocks, an extension of transformers: plain Jinja cannot parse them.
        variables = meta.find_undeclared_variables(Environment().parse(_GENERATION.sub("", template)))
    except TemplateSyntaxError:
        variables = None  # `_check_template` reports the template's syntax error
    for name in defaults:
        if not name.isidentifier() or (variables is not None and name not in variables):
            variable_names = ", ".join(sorted((variables or set()) - _RESERVED_VARIABLES)) or "none of its own"
            raise ConfigError(
                f"model.chat_template_kwargs.{name}: the chat template has no such variable; it has "
                f"{variable_names}. Use one of these, or remove the field"
            )
    settings = "".join(
        f"{{%- if {name} is not defined %}}{{%- set {name} = {_to_jinja_literal(value)} %}}{{%- endif %}}"
        for name, value in defaults.items()
    )
    # The last tag ends without a dash, so that white space at the template's beginning stays.
    return f"{settings}{template}"


_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
_RESERVED_VARIABLES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now", "bos_token",
     "eos_token", "pad_token", "unk_token", "namespace"}
)  # fmt: skip
"""Template variables set by megarl or transformers, not by users."""


def _to_jinja_literal(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{', '.join(map(_to_jinja_literal, value))}]"
    if isinstance(value, Mapping):
        fields = (f"{_to_jinja_literal(name)}: {_to_jinja_literal(item)}" for name, item in value.items())
        return f"{{{', '.join(fields)}}}"
    return json.dumps(value, ensure_ascii=False)


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Return the text of a conversation. `generation_prompt` opens the assistant's next turn.

    `tools` are the JSON schemas of the tools that the assistant may call. The arguments of tool calls are objects.
    Special tokens inside messages or schemas are enclosed in `MARKS`. Raises ValueError if the template fails on the
    conversation, for example on the order of its roles.
    """
    special_pattern = special_token_pattern(tokenizer)
    fitted_messages = fit_call_arguments(tokenizer, messages)
    try:
        text = tokenizer.apply_chat_template(
            [_add_marks(message, special_pattern) for message in with_reasoning_key(tokenizer, fitted_messages)],
            tools=[_add_marks(tool, special_pattern) for tool in tools] or None,
            add_generation_prompt=generation_prompt,
            # Return text, not ids: `encode_rendered` must see the marks before any special token is recognised.
            tokenize=False,
        )
    except Exception as error:  # a template is a program written by the model's author: it may raise anything
        raise ValueError(f"the chat template refuses this conversation: {_describe_template_error(error)}") from error
    assert isinstance(text, str)
    return text


def encode_rendered(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of rendered text. No special tokens are added: the template has written them.

    Raises ValueError if a message contains a special token that the tokenizer cannot encode as text. Raises DataError
    if the tokenizer's rules fail on the text.
    """
    with _raise_panics_as_data_errors(tokenizer):
        # No message contains a special token, so the tokenizer's own encoding is right.
        if not any(mark in text for mark in MARKS):
            return tokenizer.encode(text, add_special_tokens=False)
        return _make_literal_encoder(tokenizer).encode(text)


@contextmanager
def _raise_panics_as_data_errors(tokenizer: Tokenizer) -> Iterator[None]:
    """Raise DataError for a panic of the tokenizers library. A panic is not an Exception.

    An example is a regular expression that backtracks too long.
    """
    try:
        yield
    except BaseException as error:
        if not is_panic(error):
            raise
        raise DataError(
            f"{Path(tokenizer.name_or_path) / 'tokenizer.json'}: the tokenizer fails on a text ({error}); copy the "
            "tokenizer again from its source, or do not use it"
        ) from error


def num_tokens(tokenizer: Tokenizer, text: str) -> int:
    """Return the number of tokens of a text inside a message. Raises ValueError like `render` and `encode_rendered`."""
    return len(encode_rendered(tokenizer, _add_marks(text, special_token_pattern(tokenizer))))


def exceeds_token_limit(tokenizer: Tokenizer, text: str, max_tokens: int) -> bool:
    """Return True if rendered text certainly has more than `max_tokens` tokens, False if uncertain.

    Encodes prefixes of growing length, because encoding megabytes takes minutes.
    """
    num_characters = PREFIX_CHARACTERS * max_tokens
    while num_characters < len(text):
        with _raise_panics_as_data_errors(tokenizer):
            token_count = len(tokenizer.encode(text[:num_characters], add_special_tokens=False))
        if token_count > max_tokens + BORDER_TOKENS:
            return True
        # Doubling bounds the total work to twice that of one pass over the text.
        num_characters *= 2
    return False


@dataclass(frozen=True, slots=True)
class _LiteralEncoder:
    """Tokenizer that recognises special tokens only between marks (`MARKS`).

    All other rules are the original tokenizer's: normalizer, pre-tokenizer, merges, added tokens that are not special.
    So the text around a special token is encoded as before.
    """

    backend: Backend
    special: re.Pattern[str]
    original_ids: Mapping[int, int]
    """Ids of the original tokenizer's added tokens, by this tokenizer's ids."""
    special_ids: frozenset[int]

    def encode(self, text: str) -> list[int]:
        # Only the template's special tokens have keys in `original_ids`. Other special ids come from a message.
        tokens = self.backend.encode(self._mark_template_tokens(text), add_special_tokens=False).ids
        # Some tokenizers have a special token's name in their ordinary vocabulary too. Then a message's text would
        # become a control token.
        if message_special_ids := self.special_ids.intersection(tokens) - self.original_ids.keys():
            raise ValueError(
                f"a message contains the special token {self.backend.id_to_token(min(message_special_ids))!r}, which "
                "this tokenizer cannot write as text; remove it from the message"
            )
        return [self.original_ids.get(token, token) for token in tokens]

    def _mark_template_tokens(self, text: str) -> str:
        """Remove the marks around special tokens of messages. Put marks around those that the template has written."""
        opening, closing = MARKS
        pieces, piece_start = [], 0
        for match in re.finditer(f"{opening}(?:{self.special.pattern}){closing}|{self.special.pattern}", text):
            is_of_message = match.group().startswith(opening)
            pieces.append(remove_marks(text[piece_start : match.start()]))
            pieces.append(remove_marks(match.group()) if is_of_message else opening + match.group() + closing)
            piece_start = match.end()
        return "".join([*pieces, remove_marks(text[piece_start:])])


def remove_marks(text: str) -> str:
    """Return the text without marks. A template that cuts a message may leave a single mark."""
    return text.replace(MARKS[0], "").replace(MARKS[1], "")


def _add_marks(value: Any, special_pattern: re.Pattern[str] | None) -> Any:
    """Put marks around the special tokens in a message. Raises ValueError if the message has marks already."""
    if isinstance(value, Mapping):
        return {_add_marks(name, special_pattern): _add_marks(item, special_pattern) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_add_marks(item, special_pattern) for item in value]
    if not isinstance(value, str):
        return value
    if any(mark in value for mark in MARKS):
        raise ValueError("a message contains U+FDD0 or U+FDD1, which are not Unicode characters; remove them")
    return (
        value
        if special_pattern is None
        else special_pattern.sub(lambda match: MARKS[0] + match.group() + MARKS[1], value)
    )


@lru_cache(maxsize=8)
def special_token_pattern(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Return a regular expression for the special tokens, longer ones first. None: there are none."""
    names = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special and token.content}
    # A pattern takes its first alternative: a token that begins another must come after it.
    longest_first = sorted(names, key=lambda name: (-len(name), name))
    return re.compile("|".join(map(re.escape, longest_first))) if names else None


@lru_cache(maxsize=8)
def _make_literal_encoder(tokenizer: Tokenizer) -> _LiteralEncoder:
    """Rebuild the tokenizer, so that it recognises special tokens only between `MARKS`."""
    from tokenizers import Tokenizer as Backend

    special_pattern = special_token_pattern(tokenizer)
    original_backend = getattr(tokenizer, "backend_tokenizer", None)
    # Tokenizers written in Python have no backend to rebuild.
    if special_pattern is None or original_backend is None:
        raise ValueError("a message contains a special token, which this tokenizer cannot write as text; remove it")
    definition = json.loads(original_backend.to_str())
    ids_by_content: dict[str, int] = {}
    for token in definition["added_tokens"]:
        if token["special"]:
            # The rebuilt tokenizer recognises a special token only between marks.
            token["content"] = MARKS[0] + token["content"] + MARKS[1]
        ids_by_content[token["content"]] = token["id"]
    # The template has written special tokens already, and lengths are checked elsewhere: nothing may add or cut tokens.
    definition |= {"post_processor": None, "truncation": None, "padding": None}
    backend = Backend.from_str(json.dumps(definition))
    new_ids = {content: backend.token_to_id(content) for content in ids_by_content}
    original_ids = {new_id: ids_by_content[content] for content, new_id in new_ids.items() if new_id is not None}
    special_ids = frozenset(token["id"] for token in definition["added_tokens"] if token["special"])
    return _LiteralEncoder(backend, special_pattern, original_ids, special_ids)


def _refuse_many_values(folder: Path) -> None:
    """Raise DataError if a tokenizer's JSON file has more values than any real tokenizer.

    Loading takes transformers up to 140 times the file's size in memory.
    """
    for file in (folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()):
        try:
            refuse_many_values(file.read_bytes(), max_values_of(file.name))
        except (OSError, ValueError) as error:
            raise DataError(f"{file}: cannot be read ({error}); copy the model folder again") from None


def _check_config(folder: str | Path) -> None:
    """Raise DataError if transformers rejects config.json. It reads this file before it loads a tokenizer."""
    from transformers import AutoConfig

    path = Path(folder) / "config.json"
    if not path.is_file():
        return
    try:
        AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise DataError(
            f"{path}: transformers rejects this file ({' '.join(str(error).split())}); correct the field, or copy the "
            "model folder again"
        ) from error


def _check_template(folder: str | Path, tokenizer: Tokenizer, digest: str) -> None:
    """Raise DataError for a chat template that is not valid Jinja, does not end, or ignores the messages.

    `digest` identifies the folder's content.
    """
    from jinja2 import TemplateSyntaxError

    greeting = [{"role": "user", "content": "first"}]
    # A template is a program: a few nested loops could run for years. So the first rendering has a time limit.
    if fault := find_trial_fault(
        ("template", digest, json.dumps(tokenizer.chat_template)),
        lambda: render(tokenizer, greeting, generation_prompt=True),
        seconds=RENDER_SECONDS,
        memory_bytes=_RENDER_BYTES,
    ):
        raise DataError(
            f"{folder}: the chat template {fault} for one message; correct it in chat_template.jinja or "
            "tokenizer_config.json"
        )
    texts = []
    for content in ("first", "second"):
        try:
            texts.append(render(tokenizer, [{"role": "user", "content": content}], generation_prompt=True))
        except ValueError as error:
            if isinstance(error.__cause__, TemplateSyntaxError):
                cause = error.__cause__
                raise DataError(
                    f"{folder}: the chat template, line {cause.lineno}: {cause.message}; correct chat_template in "
                    "chat_template.jinja or tokenizer_config.json"
                ) from error
            return  # The template may need another kind of conversation. If not, a record's error names its line.
    if texts[0] == texts[1]:
        raise DataError(
            f"{folder}: the chat template ignores the messages: it renders the same text for different ones; correct "
            "it in chat_template.jinja or tokenizer_config.json"
        )


def _describe_template_error(error: Exception) -> str:
    from jinja2 import TemplateError

    text = " ".join(str(error).split())
    return text if isinstance(error, TemplateError | ValueError) and text else f"{type(error).__name__}: {text}"
