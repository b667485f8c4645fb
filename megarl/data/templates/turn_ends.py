"""Tokens that end the assistant's turns in a chat template, and tokens at which an engine stops.

They may differ: a base model of Qwen2.5 stops at `<|endoftext|>`, and its template ends turns with `<|im_end|>`. An
engine that does not know the template's tokens samples up to the length limit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.data.chat import MARKS, QUESTION, render, special_token_pattern, tokenizer_of
from megarl.files.model_folder import read_object
from megarl.thoughts import ALL_MARKS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

    from megarl.config import ModelConfig

_GENERATION_CONFIG = "generation_config.json"
_TURN = "\ufdd2"
"""Placeholder for the text of a turn, or for the last argument of its last call. No valid text has this
noncharacter."""


def _call_message(*arguments: str, **other_keys: Any) -> Mapping[str, Any]:
    calls = [
        # Nine letters and digits: Mistral's chat templates refuse any other id.
        {"id": f"call{call_index:05}", "type": "function", "function": {"name": "f", "arguments": {"x": argument}}}
        for call_index, argument in enumerate(arguments)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls, **other_keys}


_ANSWERING = {"role": "assistant", "content": _TURN}
_REPLY = {"role": "tool", "content": ".", "tool_call_id": "call00000", "name": "f"}
_TURNS: Sequence[Mapping[str, Any]] = (
    _ANSWERING,
    {**_ANSWERING, "reasoning_content": "hm"},
    _call_message(_TURN, reasoning_content="hm"),
    _call_message(".", _TURN),
)
"""Sample turns. A special token inside a sample turn does not end it."""


def check_opens_turns(tokenizer: Tokenizer) -> None:
    """Raise ValueError if the chat template ignores `add_generation_prompt`, and begins answers with a header.

    The policy would have to write this header itself. Templates without headers need no generation prompt.
    """
    if header := _find_unopened_header(tokenizer, str(tokenizer.chat_template)):
        raise ValueError(
            f"the chat template begins an answer with {header!r:.60}, and ignores add_generation_prompt, so the policy "
            "would have to write this itself; set model.chat_template to a template that ends prompts with it"
        )


@lru_cache(maxsize=8)
def _find_unopened_header(tokenizer: Tokenizer, template: str) -> str:
    """Return the text between a prompt and its answer if the template has no generation prompt. Empty: none.

    The opening of thoughts is not a header. `template` is the tokenizer's: it is part of the cache's key.
    """
    try:
        prompt = render(tokenizer, (QUESTION,), generation_prompt=True)
        if prompt != render(tokenizer, (QUESTION,), generation_prompt=False):
            return ""
        answer = render(tokenizer, (QUESTION, _ANSWERING), generation_prompt=False)
    except ValueError:  # The caller's messages get the template's error.
        return ""
    text_before_answer, is_written, _ = answer.partition(_TURN)
    if not is_written or not text_before_answer.startswith(prompt):
        return ""
    header = text_before_answer.removeprefix(prompt)
    for mark in ALL_MARKS:
        header = header.replace(mark, "")
    return header.strip()


def cut_after_turn(
    tokenizer: Tokenizer,
    text: str,
    messages: Sequence[Mapping[str, Any]],
    answer_start: int,
    next_message: Mapping[str, Any] | None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Return `text` up to the end of its last turn, an answer of the assistant, as sampling ends it.

    `text` are the rendered `messages`. The last one is the answer, and begins at character `answer_start`.
    `next_message` is the conversation's message after it, if any.
    White space, an end of the text, and the next turn's opening are cut off. If only the next message ends the turn, as
    in GLM's templates, its first token is added.

    Raises ValueError if the template ends no turn with a special token.
    """
    end_pattern = _turn_end_pattern(tokenizer, str(tokenizer.chat_template))
    # First choice: the template's own end of turns, wherever it stands in the answer.
    if end_pattern is not None and (end_match := end_pattern.search(text, answer_start)):
        return text[: end_match.end()]
    # Second choice: any special token of the answer at the end of the text.
    special_pattern = special_token_pattern(tokenizer)
    stripped_text = text.rstrip()
    if special_pattern is not None and any(
        match.end() == len(stripped_text) for match in special_pattern.finditer(stripped_text, answer_start)
    ):
        return stripped_text
    # Third choice: the first special token of the next message. Without a next message, a sample message shows it.
    if next_message is None or next_message["role"] == "assistant":
        call_ids = [call.get("id", "") for call in messages[-1].get("tool_calls", ())]
        next_message = {**_REPLY, "tool_call_id": call_ids[0]} if call_ids else QUESTION
    longer_text = render(tokenizer, (*messages, next_message), generation_prompt=True, tools=tools)
    if special_pattern is not None and longer_text.startswith(stripped_text):
        next_special = special_pattern.search(longer_text, len(stripped_text))
        if next_special and end_pattern is not None and end_pattern.fullmatch(next_special.group()):
            return longer_text[: next_special.end()]
    raise ValueError(
        "the chat template writes no special token at the end of an answer, so the policy would not learn to end its "
        "turn; set model.chat_template to a template that writes {{ eos_token }} there"
    )


@lru_cache(maxsize=8)
def _turn_end_pattern(tokenizer: Tokenizer, template: str) -> re.Pattern[str] | None:
    """Return a pattern for the tokens of `turn_ends` written by the template itself. None: there are none.

    `template` is the tokenizer's: it is part of the cache's key.
    """
    names = map(str, tokenizer.convert_ids_to_tokens([*turn_ends(tokenizer)]))
    pattern = "|".join(map(re.escape, names))
    # Special tokens of messages are between marks.
    return re.compile(f"(?<!{MARKS[0]})(?:{pattern})") if pattern else None


def turn_ends(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the special tokens with which the chat template ends an answer, and a turn with tool calls.

    If the template writes none after the turn, the next message's first special token counts: in GLM's templates the
    next role ends a turn. Tokens that the template also writes inside a turn do not count.
    """
    names = _find_end_of_answer(tokenizer), _find_end_of_calls(tokenizer)
    ends = dict.fromkeys(name for name in names if name and not _is_inside_turns(tokenizer, name))
    # Special tokens have one id each.
    return tuple(int(tokenizer.encode(name, add_special_tokens=False)[0]) for name in ends)


def added_turn_ends(folder: str | Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the `turn_ends` at which an engine with this model folder does not stop by itself."""
    engine_ends = _read_engine_end_tokens(Path(folder), tokenizer)
    return tuple(token for token in turn_ends(tokenizer) if token not in engine_ends)


def turn_ends_notice(added_tokens: Sequence[int], folder: str | Path, tokenizer: Tokenizer) -> str:
    """Return the notice at a run's start about `added_turn_ends`: these tokens also end completions."""
    names = _token_names(_read_engine_end_tokens(Path(folder), tokenizer), tokenizer)
    return (
        f"the chat template ends turns with {_token_names(added_tokens, tokenizer)}, the model with "
        f"{names or 'no token'}: completions end at both, and {_GENERATION_CONFIG} of exports lists both"
    )


def export_files(model: ModelConfig) -> dict[str, str]:
    """Return the files of an export that replace the model folder's files, as text by file name.

    They are the recipe's chat template, and the generation config with the template's ends of turns.
    """
    tokenizer = tokenizer_of(model)
    files: dict[str, str] = {}
    if model.chat_template is not None or model.chat_template_kwargs:
        files["chat_template.jinja"] = str(tokenizer.chat_template)
    if added_tokens := added_turn_ends(model.folder, tokenizer):
        path = Path(model.folder) / _GENERATION_CONFIG
        config = read_object(path) if path.is_file() else {}
        config["eos_token_id"] = [*_read_engine_end_tokens(Path(model.folder), tokenizer), *added_tokens]
        files[_GENERATION_CONFIG] = json.dumps(config, indent=2) + "\n"
    return files


def _read_engine_end_tokens(folder: Path, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens at which vLLM stops by itself: the end tokens of the generation config and of the tokenizer.

    Without generation_config.json, config.json has the end tokens.
    """
    path = next((folder / name for name in (_GENERATION_CONFIG, "config.json") if (folder / name).is_file()), None)
    config_value = read_object(path).get("eos_token_id") if path is not None else None
    tokens = [*(config_value if isinstance(config_value, list) else [config_value]), tokenizer.eos_token_id]
    return [*dict.fromkeys(token for token in tokens if isinstance(token, int))]


def _token_names(tokens: Sequence[int], tokenizer: Tokenizer) -> str:
    return " and ".join(str(tokenizer.convert_ids_to_tokens(token)) for token in tokens)


def _find_end_of_answer(tokenizer: Tokenizer) -> str | None:
    """Return the special token that the template writes after an answer, or None.

    The answer is first tried as the last turn, then before another question.
    """
    for next_messages in ((), (QUESTION,)):
        if names := _find_special_after_turn(tokenizer, (QUESTION, _ANSWERING, *next_messages)):
            return names[0]
    return None


def _find_end_of_calls(tokenizer: Tokenizer) -> str | None:
    messages = (QUESTION, _call_message(_TURN))
    # Calls have closing tokens of their own before the end of the turn.
    if names := _find_special_after_turn(tokenizer, messages):
        return names[-1]
    # Some templates end the turn only before the tool's reply.
    names = _find_special_after_turn(tokenizer, (*messages, _REPLY))
    return names[0] if names else None


def _find_special_after_turn(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the special tokens that the template writes after the placeholder. Empty: it refuses the messages."""
    special_pattern = special_token_pattern(tokenizer)
    if special_pattern is None:
        return []
    try:
        text = render(tokenizer, messages, generation_prompt=messages[-1]["role"] != "assistant")
    except ValueError:
        return []
    _, is_written, text_after_turn = text.rpartition(_TURN)
    return special_pattern.findall(text_after_turn) if is_written else []


def _is_inside_turns(tokenizer: Tokenizer, name: str) -> bool:
    """Return whether the template writes a special token inside a sample turn, before its end."""
    prompt = render(tokenizer, (QUESTION,), generation_prompt=True)
    for turn in _TURNS:
        try:
            text = render(tokenizer, (QUESTION, turn), generation_prompt=False)
        except ValueError:
            continue
        if text.rpartition(_TURN)[0].count(name) > prompt.count(name):
            return True
    return False
