import json

import pytest

from megarl.data.chat import load_tokenizer
from megarl.data.kinds.problems import Problems, make_placeholder_problems, num_made
from megarl.data.reader import read_examples
from megarl.types import ConfigError, DataError

USER = {"role": "user", "content": "12 + 3?"}


@pytest.fixture
def tokenizer(tiny_model):
    return load_tokenizer(tiny_model())


def read(tmp_path, tokenizer, *records, **options):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    on_long = options.pop("on_long", None)
    settings = {"system_prompt": None, "max_tokens": 100} | options
    return read_examples(path, Problems(tokenizer=tokenizer, **settings), on_long=on_long)


def test_prompts_open_the_assistants_turn(tmp_path, tokenizer):
    records = [{"messages": USER, "gt_answer": "15"}, {"messages": [USER], "gt_answer": 15, "source": "me"}]
    first, second = read(tmp_path, tokenizer, *records, system_prompt="Be brief.")
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n12 + 3?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(first.prompt_token_ids) == text
    assert first.prompt_token_ids == second.prompt_token_ids
    assert (first.index, second.index, first.answer, second.answer) == (0, 1, "15", "15")
    assert second.record == records[1]


def test_tokens_are_those_of_transformers(tmp_path, tokenizer):
    dialogue = [USER, {"role": "assistant", "content": "15"}, {"role": "user", "content": "\n\nSure? "}]
    (problem,) = read(tmp_path, tokenizer, {"messages": dialogue, "gt_answer": "15"})
    expected = tokenizer.apply_chat_template(dialogue, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert list(problem.prompt_token_ids) == expected


def test_a_prompt_at_the_limit_passes_and_one_above_is_refused(tmp_path, tokenizer):
    record = {"messages": USER, "gt_answer": "15"}
    num_tokens = len(read(tmp_path, tokenizer, record)[0].prompt_token_ids)
    assert read(tmp_path, tokenizer, record, max_tokens=num_tokens)
    with pytest.raises(DataError, match=rf"line 1: .* {num_tokens} tokens.*max_prompt_tokens allows {num_tokens - 1}"):
        read(tmp_path, tokenizer, record, max_tokens=num_tokens - 1)


def test_a_prompt_that_is_answered_already(tmp_path, tokenizer):
    record = {"messages": [USER, {"role": "assistant", "content": "15"}], "gt_answer": "15"}
    with pytest.raises(DataError, match="line 2: the last message has role 'assistant'"):
        read(tmp_path, tokenizer, {"messages": USER, "gt_answer": "15"}, record)


def test_a_template_that_refuses_names_the_line(tmp_path, tokenizer):
    tokenizer.chat_template = "{{ raise_exception('no tools here') }}"
    with pytest.raises(DataError, match="line 1: the chat template refuses this conversation: no tools here"):
        read(tmp_path, tokenizer, {"messages": USER, "gt_answer": "15"})


def test_folders_without_a_usable_tokenizer(tmp_path, tiny_model):
    with pytest.raises(DataError, match="the tokenizer does not load"):
        load_tokenizer(tmp_path / "none")
    with pytest.raises(DataError, match="does not load"):
        load_tokenizer(tmp_path)
    for file in tiny_model().iterdir():
        if file.name != "chat_template.jinja":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(DataError, match="no chat template"):
        load_tokenizer(tmp_path)


def test_problems_that_an_environment_makes(tokenizer):
    assert num_made("environment:12") == 12
    assert num_made("data/environment.jsonl") is num_made("environment") is None
    for wrong in ("environment:", "environment:0", "environment:-3", "environment:1e3", "environment:1000001"):
        with pytest.raises(ValueError, match="from 1 to 1000000"):
            num_made(wrong)
    train, validation = (
        make_placeholder_problems(3, tokenizer, system_prompt="Be brief.", is_heldout=h) for h in (False, True)
    )
    assert [problem.index for problem in train] == [0, 1, 2]
    assert not {problem.index for problem in train} & {problem.index for problem in validation}
    assert (train[0].record, validation[0].record) == ({"split": "train"}, {"split": "validation"})
    assert [message["role"] for message in train[0].messages] == ["system", "user"]
    assert tokenizer.decode(train[0].prompt_token_ids).startswith("<|im_start|>system\nBe brief.<|im_end|>")
    tokenizer.chat_template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|im_end|>{% endfor %}"
    with pytest.raises(ConfigError, match=r"^model\.chat_template: .* ignores add_generation_prompt"):
        make_placeholder_problems(3, tokenizer, system_prompt=None, is_heldout=False)
