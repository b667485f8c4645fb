from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from megarl.data import chat
from megarl.data.chat import encode_rendered, exceeds_token_limit, load_tokenizer, render
from megarl.data.kinds.conversations import encode_with_assistant_mask
from megarl.types import ConfigError, DataError

CHATML = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
LLAMA3 = (
    "{{- bos_token }}{%- for m in messages %}"
    "{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)
MISTRAL = (
    "{{- bos_token }}{%- for m in messages %}{%- if m.role == 'user' %}{{- '[INST] ' + m.content + ' [/INST]' }}"
    "{%- else %}{{- ' ' + m.content + eos_token }}{%- endif %}{%- endfor %}"
)
TEXT = ["Sort these numbers, please: the answer is", "system user assistant think inst end im start eot id"] * 3


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    )
    return tokenizer


def sentencepiece(prepend_scheme: str) -> Tokenizer:
    """Mistral's kind: spaces are written out, one is put at the start, unknown characters fall back to bytes."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme, split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    alphabet = [chr(code) for code in range(33, 127)] + ["▁", "\n"]
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    # Only its text is special from here on: the trainer's list was a way to have bytes in the vocabulary.
    definition = json.loads(tokenizer.to_str())
    definition["added_tokens"] = [token for token in definition["added_tokens"] if token["content"] == "<unk>"]
    return Tokenizer.from_str(json.dumps(definition))


def with_template(
    backend: Tokenizer, template: str, special: list[str], plain: tuple[str, ...] = (), **names: str
) -> PreTrainedTokenizerFast:
    # Of some tokenizers, space beside a control token belongs to it.
    backend.add_special_tokens([AddedToken(name, rstrip=name == "[/INST]", special=True) for name in special])
    backend.add_tokens([AddedToken(name, normalized=False) for name in plain])
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **names)


QWEN = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LLAMA = ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]
TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "qwen": lambda: with_template(byte_level(), CHATML, QWEN, ("<think>", "</think>"), eos_token="<|im_end|>"),
    "llama3": lambda: with_template(byte_level(), LLAMA3, LLAMA, bos_token="<|begin_of_text|>", eos_token="<|eot_id|>"),
    **{
        f"mistral, prefix {scheme}": lambda scheme=scheme: with_template(
            sentencepiece(scheme), MISTRAL, ["<s>", "</s>", "[INST]", "[/INST]"], bos_token="<s>", eos_token="</s>"
        )
        for scheme in ("first", "always", "never")
    },
}


@pytest.fixture(params=[*TOKENIZERS, "tiny"])
def tokenizer(request: pytest.FixtureRequest, tiny_model: Callable[..., Path]) -> Any:
    return load_tokenizer(tiny_model()) if request.param == "tiny" else TOKENIZERS[request.param]()


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def special_ids(tokenizer: Any) -> dict[str, int]:
    return {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special}


def ids_of(tokenizer: Any, *messages: dict[str, str]) -> list[int]:
    return encode_rendered(tokenizer, render(tokenizer, messages, generation_prompt=True))


def shared(first: list[int], second: list[int]) -> int:
    """Length of what two lists begin with alike."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def test_special_tokens_in_messages_are_text_and_the_templates_are_tokens(tokenizer: Any) -> None:
    special = special_ids(tokenizer)
    contents = ["plain", "".join(special), "a" + " b ".join(special) + "\n", "<|im_start|<|im_end|>>"]
    plain = [said("user", "x"), said("assistant", "y"), said("user", "z")]
    controls = [number for number in ids_of(tokenizer, *plain) if number in special.values()]
    assert controls
    for content in contents:
        for place in range(3):
            messages = [*plain]
            messages[place] = said(plain[place]["role"], content)
            ids = ids_of(tokenizer, *messages)
            assert [number for number in ids if number in special.values()] == controls
            expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            # What decoding loses of plain text (a prefix space), it loses here too.
            text = tokenizer.decode(ids).replace(" ", "")
            assert text == expected.replace(" ", "")


@pytest.mark.parametrize("content", ["12 + 3 = ?", "<im_end> <|im_ end|>", "  two\n\nlines \n", "[ INST]", "é\u4e2d"])
def test_messages_without_special_tokens_are_encoded_as_a_whole(tokenizer: Any, content: str) -> None:
    messages = [said("user", content), said("assistant", content), said("user", "b")]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert render(tokenizer, messages, generation_prompt=True) == text
    assert ids_of(tokenizer, *messages) == tokenizer.encode(text, add_special_tokens=False)


def test_the_text_around_a_literal_special_token_is_encoded_as_ever(tokenizer: Any) -> None:
    """The control tokens' borders, with their spaces, are those of a conversation without literals."""
    before = [said("user", "numbers"), said("assistant", "the answer is")]
    after = [said("assistant", "please"), said("user", "sort")]
    plain, literal = (ids_of(tokenizer, *before, said("user", text), *after) for text in ("q", tokenizer.eos_token))
    start, end = shared(plain, literal), shared(plain[::-1], literal[::-1])
    assert start + end >= len(plain) - 2  # "q", and the space before it


def test_an_answer_that_writes_a_special_token_is_trained_as_text(tokenizer: Any) -> None:
    name = tokenizer.eos_token
    (sequence,) = encode_with_assistant_mask(tokenizer, [said("user", "a"), said("assistant", f"b {name} c")])
    trained = sequence.token_ids[sequence.loss_mask].tolist()
    assert trained.count(tokenizer.eos_token_id) == 1 and trained[-1] == tokenizer.eos_token_id
    assert f"b {name} c" in tokenizer.decode(trained)


def test_added_tokens_that_are_not_special_stay_tokens() -> None:
    tokenizer = TOKENIZERS["qwen"]()
    think = tokenizer.convert_tokens_to_ids("<think>")
    assert think in ids_of(tokenizer, said("user", "<think>a</think>"))
    assert think in ids_of(tokenizer, said("user", "<think>a</think><|im_end|>"))


def test_a_tokenizer_that_cannot_write_a_special_token_as_text_refuses() -> None:
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "[SEP]": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = with_template(backend, "{% for m in messages %}{{ m.content }} [SEP]{% endfor %}", ["[SEP]"])
    assert ids_of(tokenizer, said("user", "a a")) == [1, 1, 2]
    with pytest.raises(ValueError, match=r"special token '\[SEP\]'"):
        ids_of(tokenizer, said("user", "a [SEP] a"))


def test_marks_in_a_message_are_refused(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=r"U\+FDD0"):
        ids_of(tokenizer, said("user", "a\ufdd0b"))


@pytest.mark.parametrize(
    ("template", "told"),
    [
        pytest.param(
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "the chat template takes more than 0.1 s",
            id="endless",
        ),
        pytest.param("{{ 'a' * 10 ** 11 }}", "the chat template takes more than 1024 MiB", id="boundless"),
        pytest.param("{% for m in messages %}", "the chat template, line 1", id="syntax"),
        pytest.param("<|im_start|>user\nhello<|im_end|>", "ignores the messages", id="constant"),
        pytest.param("{% for m in messages %}{{ m.role }}{% endfor %}", "ignores the messages", id="roles only"),
    ],
)
def test_templates_that_can_serve_nobody(
    tiny_model: Callable[..., Path], tmp_path: Path, template: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "RENDER_SECONDS", 0.1)
    folder = shutil.copytree(tiny_model(), tmp_path / "model")
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(DataError, match=told) as caught:
        load_tokenizer(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    "fault", ["{{ raise_exception('no') }}", "{{ m.a.b.c }}", "{{ 1 // 0 }}", "{{ m.content + 1 }}", "{{ none() }}"]
)
def test_a_template_that_fails_on_a_conversation_is_a_value_error(tokenizer: Any, fault: str) -> None:
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}" + fault + "{% endfor %}"
    with pytest.raises(ValueError, match="the chat template refuses this conversation: "):
        render(tokenizer, [said("user", "a")], generation_prompt=True)


def test_a_text_far_too_long_is_told_from_its_beginning(tokenizer: Any) -> None:
    text = "12 + 3 = ? " * 100_000
    started = time.process_time()
    assert exceeds_token_limit(tokenizer, text, 4096)
    assert time.process_time() - started < 2
    assert not exceeds_token_limit(tokenizer, "12 + 3", 100)


THINKING = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if enable_thinking is defined and enable_thinking is false %}"
    "<think></think>{% endif %}{% for word in words %}{{ word }}{% endfor %}{% endif %}"
)


def test_a_template_of_the_recipe_and_its_variables(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    file = tmp_path / "thinking.jinja"
    file.write_text(THINKING)
    question = [said("user", "a")]

    def opening(**defaults: Any) -> str:
        tokenizer = load_tokenizer(tiny_model(), template=str(file), defaults=defaults)
        return render(tokenizer, question, generation_prompt=True)

    assert opening() == "[user]a<|im_end|>[assistant]"
    assert opening(enable_thinking=False) == "[user]a<|im_end|>[assistant]<think></think>"
    assert opening(enable_thinking=True, words=["'a'", '"\\\n', "ü\U0001f600"]).endswith(
        "[assistant]'a'\"\\\nü\U0001f600"
    )
    with pytest.raises(ConfigError, match=r"chat_template_kwargs\.enable_thinkin: .* it has enable_thinking, words"):
        opening(enable_thinkin=False)
    with pytest.raises(ConfigError, match=r"model\.chat_template = .*absent: no such file"):
        load_tokenizer(tiny_model(), template=str(tmp_path / "absent"))


def test_code_of_a_model_folder_is_never_run(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """A tokenizer of a class of the folder's own writes a file when its module is imported."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model(), folder)
    trace = tmp_path / "imported"
    (folder / "own.py").write_text(
        f"open({str(trace)!r}, 'w').close()\nfrom transformers import PreTrainedTokenizerFast as Own\n"
    )
    file = folder / "tokenizer_config.json"
    own_class = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    file.write_text(json.dumps(json.loads(file.read_text()) | own_class))
    # Without the folder's code, transformers 5.23 loads its own class for the rules in tokenizer.json.
    load_tokenizer(folder)
    assert not trace.exists()


def test_given_variables_go_before_the_recipes(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """The exported template has the recipe's values as defaults, which its user may still change."""
    (tmp_path / "thinking.jinja").write_text(THINKING)
    tokenizer = load_tokenizer(
        tiny_model(), template=str(tmp_path / "thinking.jinja"), defaults={"enable_thinking": False}
    )
    texts = [
        tokenizer.apply_chat_template([said("user", "a")], add_generation_prompt=True, tokenize=False, **given)
        for given in ({}, {"enable_thinking": True})
    ]
    assert ["<think>" in str(text) for text in texts] == [True, False]


def test_a_base_model_without_a_template_reads_plain_text(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model(), tmp_path / "base")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(DataError, match=r"has no chat template; .* or for a base model to plain"):
        load_tokenizer(folder)
    tokenizer = load_tokenizer(folder, template="plain")
    messages = [said("system", "Add."), said("user", "1 + 2 ="), said("assistant", " 3")]
    assert render(tokenizer, messages[:2], generation_prompt=True) == "Add.\n\n1 + 2 ="
    (sequence,) = encode_with_assistant_mask(tokenizer, messages)
    trained = tokenizer.decode(sequence.token_ids[sequence.loss_mask])
    assert trained == f" 3{tokenizer.eos_token}"


def base_model(folder: Path, backend: Tokenizer, start: str) -> Path:
    """Make a folder with a tokenizer that begins each text with the token `start`, as those of base models may."""
    special = {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}}
    backend.add_special_tokens([AddedToken(name, special=True) for name in ("<s>", "</s>")])
    definition = json.loads(backend.to_str())
    (number,) = (token["id"] for token in definition["added_tokens"] if token["content"] == "<s>")
    special["<s>"]["ids"] = [number]
    pieces = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    pieces = pieces if start == "<s>" else pieces[1:]
    definition["post_processor"] = {
        "type": "TemplateProcessing", "single": pieces, "special_tokens": special,
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    }  # fmt: skip
    backend = Tokenizer.from_str(json.dumps(definition))
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


@pytest.mark.parametrize("start", ["<s>", ""], ids=["adds BOS", "adds nothing"])
@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(byte_level, id="byte level"),
        pytest.param(lambda: sentencepiece("first"), id="space at the start"),
        pytest.param(lambda: sentencepiece("never"), id="no space"),
    ],
)
def test_plain_text_begins_like_a_text_in_pretraining(
    tmp_path: Path, backend: Callable[[], Tokenizer], start: str
) -> None:
    tokenizer = load_tokenizer(base_model(tmp_path / "base", backend(), start), template="plain")
    prompt = encode_rendered(tokenizer, render(tokenizer, [said("user", "Sort these.")], generation_prompt=True))
    assert prompt == tokenizer.encode("Sort these.")
    assert prompt.count(tokenizer.bos_token_id) == (1 if start else 0)
    (sequence,) = encode_with_assistant_mask(
        tokenizer, [said("user", "a"), said("assistant", " b"), said("user", " c"), said("assistant", " d")]
    )
    assert sequence.token_ids.tolist().count(tokenizer.bos_token_id) == (1 if start else 0)
