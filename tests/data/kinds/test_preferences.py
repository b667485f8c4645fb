import json
from typing import Any

import pytest

from megarl.data.chat import load_tokenizer
from megarl.data.kinds.conversations import Conversations
from megarl.data.kinds.preferences import Judged, Pairs
from megarl.data.reader import read_examples
from megarl.types import DataError

USER = {"role": "user", "content": "2 + 3?"}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.fixture
def tokenizer(tiny_model):
    return load_tokenizer(tiny_model())


def read(tmp_path, tokenizer, record: dict[str, Any], max_tokens: int = 200, **settings: Any):
    (tmp_path / "pairs.jsonl").write_text(json.dumps(record))
    settings = {"tokenizer": tokenizer, "system_prompt": None, "max_tokens": max_tokens} | settings
    [pair] = read_examples(tmp_path / "pairs.jsonl", Pairs(**settings))
    return [(tokenizer.decode(s.token_ids[~s.loss_mask]), tokenizer.decode(s.token_ids[s.loss_mask])) for s in pair]


PROMPT = "<|im_start|>user\n2 + 3?<|im_end|>\n<|im_start|>assistant\n"
FIVE_AND_SIX = [(PROMPT, "5<|im_end|>"), (PROMPT, "6<|im_end|>")]


@pytest.mark.parametrize(
    "record",
    [
        pytest.param({"messages": USER, "chosen": "5", "rejected": "6"}, id="texts"),
        pytest.param({"prompt": "2 + 3?", "chosen": "5", "rejected": "6"}, id="prompt as text"),
        pytest.param({"context": [USER], "chosen": [said("5")], "rejected": said("6")}, id="messages"),
        pytest.param({"chosen": [USER, said("5")], "rejected": [USER, said("6")]}, id="whole conversations"),
        pytest.param({"prompt": [USER], "chosen": [USER, said("5")], "rejected": "6"}, id="one repeats the prompt"),
    ],
)
def test_forms_of_a_pair(tmp_path, tokenizer, record):
    assert read(tmp_path, tokenizer, record) == FIVE_AND_SIX


def test_what_both_say_is_not_trained_and_a_system_prompt_goes_first(tmp_path, tokenizer):
    before = [USER, said("5"), {"role": "user", "content": "twice?"}]
    for record in (
        {"messages": before, "chosen": "10", "rejected": "11"},
        {"chosen": [*before, said("10")], "rejected": [*before, said("11")]},
    ):
        chosen, rejected = read(tmp_path, tokenizer, record, system_prompt="Be brief.")
        assert (chosen[1], rejected[1]) == ("10<|im_end|>", "11<|im_end|>")
        assert chosen[0] == rejected[0] and chosen[0].startswith("<|im_start|>system\nBe brief.")
        assert chosen[0].count("Be brief.") == 1 and "5<|im_end|>" in chosen[0]


@pytest.mark.parametrize(
    ("record", "told"),
    [
        pytest.param({"messages": USER, "chosen": "5"}, "no field for rejected; the record", id="missing"),
        pytest.param({"messages": USER, "chosen": "5", "rejected": ""}, "'rejected' is \"\"", id="empty"),
        pytest.param({"messages": USER, "chosen": "5", "rejected": "5"}, "are the same; remove the line", id="same"),
        pytest.param({"messages": USER, "chosen": "5", "rejected": {"role": "bot"}}, "rejected[0] has role", id="role"),
        pytest.param(
            {"messages": USER, "chosen": [{"role": "user", "content": "4 + 1?"}, said("5")], "rejected": "6"},
            "'chosen' neither continues 'messages' nor begins with it", id="another prompt",
        ),
        pytest.param({"chosen": [USER], "rejected": "6"}, "no field for prompt; the record has", id="no prompt"),
        pytest.param({"question": "2 + 3?", "chosen": "5", "rejected": "6"}, "{prompt: question}'", id="other field"),
        pytest.param({"messages": USER, "chosen": "5" * 200, "rejected": "6"}, "the pair has", id="long"),
    ],
)  # fmt: skip
def test_faults_are_named(tmp_path, tokenizer, record, told):
    with pytest.raises(DataError) as caught:
        read(tmp_path, tokenizer, record)
    assert "pairs.jsonl, line 1: " in str(caught.value) and told in str(caught.value)


def test_a_pair_may_take_the_whole_microbatch(tmp_path, tokenizer):
    record = {"messages": USER, "chosen": "5", "rejected": "6"}
    size = sum(len(tokenizer.encode(prompt + answer)) for prompt, answer in FIVE_AND_SIX)
    assert read(tmp_path, tokenizer, record, max_tokens=size) == FIVE_AND_SIX
    with pytest.raises(DataError, match=f"the pair has {size} tokens"):
        read(tmp_path, tokenizer, record, max_tokens=size - 1)


def judged(tmp_path, tokenizer, *records: dict[str, Any], max_tokens: int = 200):
    (tmp_path / "judged.jsonl").write_text("\n".join(map(json.dumps, records)))
    return read_examples(
        tmp_path / "judged.jsonl", Judged(tokenizer=tokenizer, system_prompt=None, max_tokens=max_tokens)
    )


GOOD, BAD = {"prompt": "2 + 3?", "response": "5", "label": True}, {"messages": USER, "completion": "6", "label": False}


def test_judged_answers(tmp_path, tokenizer):
    (good,), (bad,) = judged(tmp_path, tokenizer, GOOD, BAD)
    for sequence, said, is_good in ((good, "5<|im_end|>", True), (bad, "6<|im_end|>", False)):
        assert tokenizer.decode(sequence.token_ids[~sequence.loss_mask]) == PROMPT
        assert tokenizer.decode(sequence.token_ids[sequence.loss_mask]) == said
        assert sequence.desirable.tolist() == [float(is_good and trained) for trained in sequence.loss_mask]
        assert sequence.advantages is None


def test_a_prompt_that_ends_with_the_answer_is_the_whole_conversation(tmp_path, tokenizer):
    def record(answer: str) -> dict[str, Any]:
        return GOOD | {"messages": [USER, {"role": "assistant", "content": answer}]}

    (good,), _ = judged(tmp_path, tokenizer, record("5"), BAD)
    assert tokenizer.decode(good.token_ids) == PROMPT + "5<|im_end|>"
    with pytest.raises(DataError, match="'messages' ends with an answer, and 'response' has another one"):
        judged(tmp_path, tokenizer, record("7"), BAD)


def test_the_prompt_of_a_pair_may_not_end_with_one_of_its_answers(tmp_path, tokenizer):
    answered = [USER, {"role": "assistant", "content": "5"}]
    with pytest.raises(DataError, match="'messages' ends with an answer, and 'rejected' has another one"):
        read(tmp_path, tokenizer, {"messages": answered, "chosen": "5", "rejected": "6"})


def test_a_second_prompt_of_a_judged_answer_may_not_hold_another_answer(tmp_path, tokenizer):
    prompt = [USER, {"role": "assistant", "content": "7"}, {"role": "user", "content": "2 + 3?"}]
    record = {"messages": [USER], "prompt": prompt, "response": "5", "label": True}
    with pytest.raises(DataError, match=r"'prompt' is .*, but the prompt is read from 'messages'"):
        judged(tmp_path, tokenizer, record, BAD)


@pytest.mark.parametrize(
    ("records", "told"),
    [
        pytest.param([GOOD, BAD | {"label": "no"}], "line 2: 'label' is 'no'; give true", id="label"),
        pytest.param([GOOD, GOOD], "judged.jsonl: all labels are the same", id="one kind"),
        pytest.param([GOOD, BAD | {"completion": "6" * 200}], "line 2: the conversation has", id="long"),
    ],
)
def test_faults_of_judged_answers_are_named(tmp_path, tokenizer, records, told):
    with pytest.raises(DataError) as caught:
        judged(tmp_path, tokenizer, *records)
    assert told in str(caught.value)


def test_a_prompt_may_equal_an_answer(tmp_path, tokenizer):
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"prompt": "1", "chosen": "1", "rejected": "2"}) + "\n")
    [(chosen, _)] = read_examples(path, Pairs(tokenizer=tokenizer, system_prompt=None, max_tokens=200))
    assert tokenizer.decode(chosen.token_ids).count("1") == 2


def test_the_columns_of_ultrafeedback_binarized(tmp_path, tiny_model):
    tokenizer = load_tokenizer(tiny_model())
    asked = {"content": "2 + 2?", "role": "user"}
    chosen, rejected = ([asked, {"content": text, "role": "assistant"}] for text in ("4", "5"))
    columns = {"prompt": "2 + 2?", "prompt_id": "c3", "score_chosen": 8.0, "score_rejected": 6.5}
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({**columns, "chosen": chosen, "rejected": rejected, "messages": chosen}) + "\n")
    [pair] = read_examples(path, Pairs(tokenizer=tokenizer, system_prompt="Add.", max_tokens=200))
    path.write_text(json.dumps({"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}) + "\n")
    [expected] = read_examples(path, Pairs(tokenizer=tokenizer, system_prompt="Add.", max_tokens=200))
    assert [sequence.token_ids.tolist() for sequence in pair] == [sequence.token_ids.tolist() for sequence in expected]
    # The same rows are conversations for fine-tuning.
    path.write_text(json.dumps({**columns, "chosen": chosen, "rejected": rejected, "messages": chosen}) + "\n")
    ((sequence,),) = read_examples(path, Conversations(tokenizer=tokenizer, system_prompt="Add.", max_tokens=200))
    assert sequence.token_ids.tolist() == expected[0].token_ids.tolist()
