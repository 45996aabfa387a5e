"""A tokenizer of one token a character with the markers of the Qwen family, and its chat template as Qwen3 has it."""

from __future__ import annotations

import json
import string
from pathlib import Path

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
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {token: i for i, token in enumerate((*MARKERS, *ALPHABET))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in MARKERS[:4]])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKERS[4:]])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
        "unk_token": "<unk>", "clean_up_tokenization_spaces": False, "chat_template": template,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def chat_tokenizer(folder: Path, template: str = TEMPLATE) -> Tokenizer:
    return load_tokenizer(save_chat_tokenizer(folder, template))
