import json

import numpy as np
import pytest

from megarl.data.chat import encode_rendered, load_tokenizer, render
from megarl.data.kinds.conversations import Conversations, encode_with_assistant_mask
from megarl.data.kinds.problems import Problems
from megarl.data.reader import read_examples
from megarl.data.token_batch import TokenBatch
from megarl.types import DataError, Problem, Trajectory
from tests.data import templates


def said(role, content):
    return {"role": role, "content": content}


DIALOGUE = [
    said("system", "Be brief."),
    said("user", "12 + 3?"),
    said("assistant", "15"),
    said("tool", "ok"),
    said("user", "twice?"),
    said("assistant", "\n\n30 "),
    said("user", "unanswered"),
]

# Drops what an earlier assistant turn thought, as reasoning models' templates do.
FORGETFUL = (
    "{% for m in messages %}[{{ m.role }}]"
    "{{ m.content if loop.last or m.role != 'assistant' else m.content.split('|')[-1] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def tokenizer(tiny_model):
    return load_tokenizer(tiny_model())


def test_only_what_the_assistant_says_is_trained(tokenizer):
    (sequence,) = encode_with_assistant_mask(tokenizer, DIALOGUE)
    pieces, start = [], 0
    for end in [*(np.flatnonzero(np.diff(sequence.loss_mask)) + 1), len(sequence)]:
        pieces.append((bool(sequence.loss_mask[start]), tokenizer.decode(sequence.token_ids[start:end])))
        start = end
    system = "<|im_start|>system\nBe brief.<|im_end|>\n"
    assert pieces == [
        (False, system + "<|im_start|>user\n12 + 3?<|im_end|>\n<|im_start|>assistant\n"),
        (True, "15<|im_end|>"),
        (False, "\n<|im_start|>tool\nok<|im_end|>\n<|im_start|>user\ntwice?<|im_end|>\n<|im_start|>assistant\n"),
        (True, "\n\n30 <|im_end|>"),
    ]


def test_each_turn_follows_the_prompt_that_sampling_shows(tokenizer):
    (sequence,) = encode_with_assistant_mask(tokenizer, DIALOGUE)
    starts = np.flatnonzero(np.diff(sequence.loss_mask.astype(int)) == 1) + 1
    for place, start in zip([2, 5], starts, strict=True):
        prompt = tokenizer.apply_chat_template(DIALOGUE[:place], add_generation_prompt=True, return_dict=True)
        assert sequence.token_ids[:start].tolist() == prompt["input_ids"]


def pieces_of(tokenizer, sequence):
    """The text of a sequence, and the part of it that is trained."""
    trained = sequence.token_ids[sequence.loss_mask]
    return tokenizer.decode(sequence.token_ids), tokenizer.decode(trained)


def test_a_template_that_rewrites_history_splits_a_conversation_only_where_it_does(tokenizer):
    tokenizer.chat_template = FORGETFUL
    plain = [said("user", "a"), said("assistant", "b"), said("user", "c"), said("assistant", "think|d")]
    (sequence,) = encode_with_assistant_mask(tokenizer, plain)
    assert tokenizer.decode(sequence.token_ids[sequence.loss_mask]) == "b<|im_end|>think|d<|im_end|>"
    end = "<|im_end|>"
    thoughtful = [said("user", "a"), said("assistant", "hm|b"), *plain[2:], said("user", "e"), said("assistant", "f")]
    assert [pieces_of(tokenizer, sequence) for sequence in encode_with_assistant_mask(tokenizer, thoughtful)] == [
        (f"[user]a{end}[assistant]hm|b{end}", f"hm|b{end}"),
        (f"[user]a{end}[assistant]b{end}[user]c{end}[assistant]think|d{end}", f"think|d{end}"),
        (f"[user]a{end}[assistant]b{end}[user]c{end}[assistant]d{end}[user]e{end}[assistant]f{end}", f"f{end}"),
    ]


def test_each_turn_of_a_reasoning_model_follows_the_prompt_that_sampling_shows():
    tokenizer = templates.tokenizer_of("forgetful")
    turns = [said("user", "a"), said("assistant", "b"), said("user", "c"), said("assistant", "d")]
    turns[1]["reasoning_content"], turns[3]["reasoning_content"] = "first thought", "second thought"
    sequences = encode_with_assistant_mask(tokenizer, turns)
    for place, sequence in zip((1, 3), sequences, strict=True):
        prompt = encode_rendered(tokenizer, render(tokenizer, turns[:place], generation_prompt=True))
        assert sequence.token_ids[: len(prompt)].tolist() == prompt and not sequence.loss_mask[: len(prompt)].any()
        assert sequence.loss_mask[len(prompt) :].all()
    # A turn that is not trained needs no sequence.
    assert len(encode_with_assistant_mask(tokenizer, [turns[0], turns[1] | {"weight": 0}, *turns[2:]])) == 1
    assert len(encode_with_assistant_mask(tokenizer, turns, first_trained=3)) == 1


def test_a_template_that_begins_a_turn_otherwise_than_in_sampling_is_refused(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]<think>{% endif %}"
    )
    with pytest.raises(ValueError, match=r"writes messages\[1\] without the prompt"):
        encode_with_assistant_mask(tokenizer, [said("user", "a"), said("assistant", "b")])


def test_a_conversation_in_parts_is_one_sample_of_a_batch(tokenizer):
    tokenizer.chat_template = FORGETFUL
    thoughtful = [said("user", "a"), said("assistant", "hm|b"), said("user", "c"), said("assistant", "d")]
    short = [said("user", "a"), said("assistant", "b")]
    batch = TokenBatch.from_samples([encode_with_assistant_mask(tokenizer, turns) for turns in (thoughtful, short)])
    assert batch.samples.tolist() == [0, 0, 1] and batch.num_segments.tolist() == [2, 1]


ROLES = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
OPENED = "{{ '<|im_start|>assistant\n' }}"
ASKED = "{% if add_generation_prompt %}" + OPENED + "{% endif %}"


@pytest.mark.parametrize(
    "template",
    [
        pytest.param(ROLES + "<|im_end|>\n{% endfor %}" + OPENED, id="always opens the next turn"),
        pytest.param(
            ROLES + "<|im_end|>\n{% endfor %}" + ASKED + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}",
            id="ends the text with a token of its own",
        ),
        pytest.param(
            ROLES + "{% if not loop.last or add_generation_prompt %}<|im_end|>\n{% endif %}{% endfor %}" + ASKED,
            id="ends a turn only before the next",
        ),
    ],
)
def test_a_turn_is_trained_to_its_end_token_and_no_further(tokenizer, template):
    tokenizer.chat_template = template
    chat = [said("user", "a"), said("assistant", "b"), said("user", "c"), said("assistant", "<|im_end|> d ")]
    (sequence,) = encode_with_assistant_mask(tokenizer, chat)
    assert tokenizer.decode(sequence.token_ids[sequence.loss_mask]) == "b<|im_end|><|im_end|> d <|im_end|>"


def test_white_space_after_an_end_token_not_named_by_the_tokenizer_is_not_trained(tokenizer):
    """Gemma's turns end with <end_of_turn>, its texts with <eos>."""
    tokenizer.eos_token = "<|endoftext|>"
    (sequence,) = encode_with_assistant_mask(tokenizer, DIALOGUE)
    assert tokenizer.decode(sequence.token_ids[sequence.loss_mask]) == "15<|im_end|>\n\n30 <|im_end|>"


def test_the_next_role_that_ends_a_turn_is_trained():
    """GLM's turns end where another role begins: a policy that never learnt it would never end."""
    tokenizer = templates.tokenizer_of("glm")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": "1"}}}
    chat = [
        said("user", "a"),
        {**said("assistant", ""), "tool_calls": [call]},
        said("tool", "b"),
        said("assistant", "c"),
        said("user", "d"),
        said("assistant", "e"),
    ]
    (sequence,) = encode_with_assistant_mask(tokenizer, chat)
    trained = tokenizer.decode(sequence.token_ids[sequence.loss_mask])
    assert trained == "\n<tool_call>f\n<arg>x=1</arg>\n</tool_call><|observation|>c<|user|>e<|user|>"


def test_a_template_without_an_end_token_is_refused(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    with pytest.raises(ValueError, match="no special token at the end of an answer"):
        encode_with_assistant_mask(tokenizer, [said("user", "a"), said("assistant", "b")])


def test_a_template_that_leaves_the_header_of_its_turn_to_the_policy_is_refused(tokenizer, tmp_path):
    tokenizer.chat_template = ROLES + "<|im_end|>\n{% endfor %}"
    with pytest.raises(ValueError, match=r"begins an answer with '<\|im_start\|>assistant'"):
        encode_with_assistant_mask(tokenizer, [said("user", "a"), said("assistant", "b")])
    problem = tmp_path / "rl.jsonl"
    problem.write_text('{"prompt": "a", "answer": "b"}\n')
    with pytest.raises(DataError, match="ignores add_generation_prompt"):
        read_examples(problem, Problems(tokenizer=tokenizer, system_prompt=None, max_tokens=100))


def read(tmp_path, tokenizer, *conversations, max_tokens=100):
    path = tmp_path / "sft.jsonl"
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in conversations))
    return read_examples(path, Conversations(tokenizer=tokenizer, system_prompt="Hi.", max_tokens=max_tokens))


def test_a_file_of_conversations(tmp_path, tokenizer):
    pair = [said("user", "a"), said("assistant", "b")]
    (first,), (second,) = read(tmp_path, tokenizer, DIALOGUE, pair)
    assert tokenizer.decode(first.token_ids).startswith("<|im_start|>system\nBe brief.<|im_end|>")
    assert tokenizer.decode(second.token_ids).startswith("<|im_start|>system\nHi.<|im_end|>")
    assert second.token_ids.dtype == np.int64 and second.loss_mask.dtype == np.bool_
    with pytest.raises(DataError, match=rf"line 1: the conversation has {len(first)} tokens"):
        read(tmp_path, tokenizer, DIALOGUE, max_tokens=len(first) - 1)
    assert read(tmp_path, tokenizer, DIALOGUE, max_tokens=len(first))


def test_a_record_without_an_answer(tmp_path, tokenizer):
    with pytest.raises(DataError, match="line 2: no message has the role assistant"):
        read(tmp_path, tokenizer, DIALOGUE, [said("user", "a")])


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 12, "b": 3}}}
CALLING = [
    said("user", "12 + 3?"),
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    said("tool", "15"),
    said("assistant", "It is 15."),
]


def test_calls_are_trained_and_what_tools_reply_is_not(tokenizer, tmp_path):
    path = tmp_path / "calls.jsonl"
    path.write_text(json.dumps({"messages": CALLING, "tools": [TOOL]}))
    ((sequence,),) = read_examples(path, Conversations(tokenizer=tokenizer, system_prompt=None, max_tokens=200))
    sampled = tokenizer.decode(sequence.token_ids[sequence.loss_mask])
    written = '<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": 3}}\n</tool_call>'
    assert sampled == f"{written}<|im_end|>It is 15.<|im_end|>"
    whole = tokenizer.decode(sequence.token_ids)
    assert whole.startswith("<|im_start|>system\nTools: add<|im_end|>\n<|im_start|>user\n12 + 3?<|im_end|>\n")
    assert "<|im_start|>tool\n15<|im_end|>\n<|im_start|>assistant\nIt" in whole


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"tools": "add"}, "'tools' is \"add\""),
        ({"tools": [{"title": "add"}]}, "a tool is"),
        ({"messages": [said("user", "?"), {"role": "assistant", "tool_calls": []}]}, r"messages\[1\] has content null"),
        ({"messages": [said("user", "?"), {"role": "assistant", "tool_calls": [1]}]}, r"messages\[1\] has tool_calls"),
        ({"messages": [said("user", "?"), {"role": "assistant", "tool_calls": [{"name": "f"}]}]}, "give a list of"),
        ({"messages": [said("user", "?"), {"role": "assistant", "content": 1, "tool_calls": [CALL]}]}, "has content 1"),
    ],
)
def test_faulty_calls_and_tools_are_named_with_their_line(tokenizer, tmp_path, changed, words):
    path = tmp_path / "calls.jsonl"
    path.write_text(json.dumps({"messages": CALLING, "tools": [TOOL]} | changed))
    with pytest.raises(DataError, match=f"line 1: .*{words}"):
        read_examples(path, Conversations(tokenizer=tokenizer, system_prompt=None, max_tokens=200))


def test_samples_of_a_run_are_conversations_to_learn(tokenizer, tmp_path):
    problem = Problem(0, (said("system", "Be brief."), said("user", "12 + 3?")), (1, 2), "15")
    sampled = Trajectory("single_turn", problem, 0, 0, (), None, texts=("15",), messages=(problem.messages,))
    (tmp_path / "step_000000.jsonl").write_text(json.dumps({"set": "train"} | sampled.record()) + "\n")
    [[found]] = read_examples(
        str(tmp_path / "step_000000.jsonl"), Conversations(tokenizer=tokenizer, system_prompt=None, max_tokens=64)
    )
    (expected,) = encode_with_assistant_mask(tokenizer, [*problem.messages, said("assistant", "15")])
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert found.loss_mask.tolist() == expected.loss_mask.tolist()
