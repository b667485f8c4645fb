import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tools.make_tiny_model import make_tiny_model

FAMILIES = ["qwen3", "qwen2", "llama"]


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_the_folder(tiny_model, family):
    folder = tiny_model(family=family, vocab_size=509, num_kv_heads=1, tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], model.dtype) == (family, torch.float32)
    assert model.get_input_embeddings().weight.shape == (509, 128)
    assert model.get_output_embeddings().weight is not model.get_input_embeddings().weight
    assert model.model.layers[3].self_attn.k_proj.weight.shape == (32, 128)
    assert (model.model.layers[0].self_attn.q_proj.bias is not None) == (family == "qwen2")


@pytest.mark.parametrize("family", FAMILIES)
def test_no_vector_is_constant(tiny_model, family):
    model = AutoModelForCausalLM.from_pretrained(tiny_model(family=family))
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    assert vectors and all(vector.std() > 0.01 for vector in vectors)


def test_equal_arguments_give_equal_files_and_seeds_differ(tmp_path):
    first, again, other = (make_tiny_model(tmp_path / name, seed=seed) for name, seed in [("a", 3), ("b", 3), ("c", 4)])
    for file in sorted(first.iterdir()):
        assert file.read_bytes() == (again / file.name).read_bytes(), file.name
    assert (first / "tokenizer.json").read_bytes() == (other / "tokenizer.json").read_bytes()
    assert (first / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()


def test_generation_ends_at_the_end_of_turn(tiny_model):
    generation = GenerationConfig.from_pretrained(tiny_model())
    tokenizer = AutoTokenizer.from_pretrained(tiny_model())
    assert tokenizer.convert_ids_to_tokens(generation.eos_token_id) == ["<|im_end|>", "<|endoftext|>"]


@pytest.mark.parametrize("text", ["State 12 + 345 = \\boxed{-357}", "naïve ✓ 漢字\n\n  \t'quoted'", "<|im_end|>x"])
def test_any_text_round_trips(tiny_model, text):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_each_digit_is_a_token_and_chat_is_chatml(tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model())
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "345 + 1"}], add_generation_prompt=True)[
        "input_ids"
    ]
    assert [tokenizer.decode([token]) for token in ids] == [
        *("<|im_start|>", "user", "\n", "3", "4", "5", " +", " ", "1", "<|im_end|>", "\n"),
        *("<|im_start|>", "assistant", "\n"),
    ]


def test_a_vocabulary_below_the_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match="vocab_size 300"):
        make_tiny_model(tmp_path, vocab_size=300)
