"""Chat templates in the manners of model families: how they write tools, calls, their results and earlier reasoning."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from transformers import PreTrainedTokenizerFast

from tests.data.test_chat import CHATML, byte_level, with_template

_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
_CALL = (
    "{{ '<tool_call>\n' + {'name': c.function.name, 'arguments': c.function.arguments} | tojson + '\n</tool_call>' }}"
)

_TOOLS = "{% if tools %}{{ tools | tojson + '\n' }}{% endif %}"

QWEN = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson + '\n' }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content }}{% for c in m.tool_calls %}"
    "{% if m.content or not loop.first %}{{ '\n' }}{% endif %}" + _CALL + "{% endfor %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}" + _PROMPT
)
"""Results side by side are one turn."""
FORGETFUL = (
    "{% set last = namespace(user=0) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.reasoning_content and loop.index0 > last.user %}{{ '<think>' + m.reasoning_content + '</think>\n' }}"
    "{% endif %}{{ m.content }}{% for c in m.tool_calls %}" + _CALL + "{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endfor %}" + _PROMPT
)
"""Drops what was thought before the last user's turn."""
LLAMA = (
    "{{ bos_token }}{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('one call a turn') }}{% endif %}{% set c = m.tool_calls[0].function %}"
    '{{ \'<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "\' + c.name + \'", "parameters": \' '
    "+ c.arguments | tojson + '}<|eot_id|>' }}{% elif m.role == 'tool' %}"
    "{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' + m.content + '<|eot_id|>' }}{% else %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
"""Refuses a turn of several calls."""
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}"
    "{% elif m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}{% if c.id | length != 9 %}"
    "{{ raise_exception('ids have 9 characters') }}{% endif %}"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments, 'id': c.id} | tojson }}"
    "{% if not loop.last %}, {% endif %}{% endfor %}]{{ eos_token }}{% elif m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role == 'user' %}{{ raise_exception('a result of no call') }}{% endif %}"
    "{{ '[TOOL_RESULTS]' + {'content': m.content, 'call_id': m.tool_call_id} | tojson + '[/TOOL_RESULTS]' }}"
    "{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
)
"""Writes the calls' ids, results without a call are refused; no generation prompt."""
GLM = (
    "{% for m in messages %}{% if m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}<|observation|>"
    "{% endif %}{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}{% else %}"
    "{{ '<|' + m.role + '|>\n' + m.content }}{% for c in m.tool_calls %}{{ '\n<tool_call>' + c.function.name }}"
    "{% for k, v in c.function.arguments.items() %}{{ '\n<arg>' + k + '=' + v + '</arg>' }}{% endfor %}"
    "{{ '\n</tool_call>' }}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
"""The role of the next message ends a turn."""
DEEPSEEK = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<user>' + m.content }}{% elif m.role == 'tool' %}"
    "{{ '<output>' + m.content + '<output_end>' }}{% else %}{{ '<assistant>' + m.content }}{% for c in m.tool_calls %}"
    "{{ '<call>' + c.function.name + '\n' + c.function.arguments + '<call_end>' }}{% endfor %}<eos>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Takes arguments as text only, and ends a call with a special token."""

_CHATML_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_PLAIN = ("<tool_call>", "</tool_call>", "<think>", "</think>")
_LLAMA_TOKENS = ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]
_MISTRAL_TOKENS = ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]
_DEEPSEEK_TOKENS = ["<eos>", "<user>", "<assistant>", "<call>", "<call_end>", "<output>", "<output_end>"]

_FAMILIES: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "chatml": lambda: with_template(byte_level(), _TOOLS + CHATML, _CHATML_TOKENS, _PLAIN, eos_token="<|im_end|>"),
    "qwen": lambda: with_template(byte_level(), QWEN, _CHATML_TOKENS, _PLAIN, eos_token="<|im_end|>"),
    "forgetful": lambda: with_template(
        byte_level(), _TOOLS + FORGETFUL, _CHATML_TOKENS, _PLAIN, eos_token="<|im_end|>"
    ),
    "llama": lambda: with_template(
        byte_level(), _TOOLS + LLAMA, _LLAMA_TOKENS, bos_token="<|begin_of_text|>", eos_token="<|eot_id|>"
    ),
    "mistral": lambda: with_template(
        byte_level(), _TOOLS + MISTRAL, _MISTRAL_TOKENS, bos_token="<s>", eos_token="</s>"
    ),
    "glm": lambda: with_template(
        byte_level(), _TOOLS + GLM, ["<|user|>", "<|assistant|>", "<|observation|>"], _PLAIN, eos_token="<|user|>"
    ),
    "deepseek": lambda: with_template(byte_level(), _TOOLS + DEEPSEEK, _DEEPSEEK_TOKENS, eos_token="<eos>"),
}
FAMILIES = tuple(_FAMILIES)


@cache
def tokenizer_of(family: str) -> PreTrainedTokenizerFast:
    """A tokenizer with the template of a family."""
    return _FAMILIES[family]()
