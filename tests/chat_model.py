"""A tokenizer of one token a character with the markers of the Qwen family, and its chat template as Qwen3 has it."""

from __future__ import annotations

import string
from pathlib import Path

from char_tokenizer import save_tokenizer
from penstock.rollout.tokenizer import Tokenizer, load_tokenizer

MARKERS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>", "<think>", "</think>", "<tool_call>", "</tool_call>",
    "<tool_response>", "</tool_response>",
)  # fmt: skip
"""`<|im_end|>` has id 2, which ends a text of the nano models; their vocabulary is larger than this one of 98."""
ALPHABET = "\n " + string.digits + string.ascii_letters + "\"'{}[]():,._-+*/<>=?!#|\\"

TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% elif m.role == 'assistant' %}<|im_start|>assistant
{% if loop.index0 > ns.last and (loop.last or m.reasoning_content) %}<think>
{{ (m.reasoning_content or '').strip('\\n') }}
</think>

{% endif %}{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}
{%- if (loop.first and m.content) or not loop.first %}{{ '\\n' }}{% endif %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments if call.function.arguments is string \
else call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ m.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def save_chat_tokenizer(folder: Path, template: str = TEMPLATE) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokens = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": "<unk>"}
    save_tokenizer(folder, MARKERS[:4], MARKERS[4:], ALPHABET, {**tokens, "chat_template": template})
    return folder


def chat_tokenizer(folder: Path, template: str = TEMPLATE) -> Tokenizer:
    return load_tokenizer(save_chat_tokenizer(folder, template))
