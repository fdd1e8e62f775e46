"""Chat formats of well-known model families, each with a toy tokenizer that has the family's control tokens. The
templates are written anew, in the manner of the originals: what they trim, search, check and put together."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import tokenizers
from toy_tokenizers import TRAINING_TEXT

from crucible.tokenizer import Tokenizer


@dataclass(frozen=True, eq=False)
class Family:
    """`trims`: contents lose the white space around them. `opens_turns`: a conversation that ends with a user's
    message is followed by the beginning of an assistant's turn."""

    source: str
    control: Sequence[str]
    special: Mapping[str, str] = field(default_factory=dict)
    takes_system: bool = True
    opens_turns: bool = True
    is_text_only: bool = False

    @functools.cached_property
    def json_bytes(self) -> bytes:
        library = tokenizers.Tokenizer.from_str(Tokenizer.train([TRAINING_TEXT], 300).to_json().decode())
        library.add_special_tokens(list(self.control))
        return library.to_str().encode()

    def library(self) -> tokenizers.Tokenizer:
        return tokenizers.Tokenizer.from_str(self.json_bytes.decode())

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_bytes(self.json_bytes)

    def accepted(self, messages: Sequence[Mapping[str, str]]) -> list[Mapping[str, str]]:
        """The messages that this family's template does not refuse."""
        return [message for message in messages if self.takes_system or message["role"] != "system"]


FAMILIES = {
    # SmolLM2, with the system message that it puts where none is given.
    "chatml": Family(
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\nYou are a helpful assistant<|im_end|>\n' }}{% endif %}"
        "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        ["<|im_start|>", "<|im_end|>", "<think>", "</think>"],
    ),
    # Qwen 3: namespaces, reversed messages, reasoning taken out of what was said before.
    "qwen": Family(
        """\
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if message.role == 'user' and not message.content.startswith('<tool_response>') and ns.last > index %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\\n' + content }}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
""",
        ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_response>", "</tool_response>"],
    ),
    # Llama 3: contents trimmed, roles within control tokens' company, and always a turn opened.
    "llama3": Family(
        "{% set loop_messages = messages %}{% for message in loop_messages %}"
        "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
        "+ message['content'] | trim + '<|eot_id|>' %}"
        "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}",
        ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        {"bos_token": "<|begin_of_text|>"},
    ),
    # Mistral: markers that are text, with the system message inside the first user's, and roles that must alternate.
    "mistral": Family(
        """\
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('After the optional system message, roles must alternate user/assistant') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {%- if loop.first and system_message is defined %}
            {{- ' [INST] ' + system_message + '\\n\\n' + message['content'] + ' [/INST]' }}
        {%- else %}
            {{- ' [INST] ' + message['content'] + ' [/INST]' }}
        {%- endif %}
    {%- else %}
        {{- ' ' + message['content'] + eos_token }}
    {%- endif %}
{%- endfor %}
""",
        ["<s>", "</s>"],
        {"bos_token": "<s>", "eos_token": "</s>"},
        opens_turns=False,
    ),
    # Zephyr: markers that are text, only the end of a turn is a control token; blocks that strip lines.
    "zephyr": Family(
        """\
{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}
""",
        ["<s>", "</s>"],
        {"bos_token": "<s>", "eos_token": "</s>"},
        opens_turns=False,
    ),
    # Gemma: no system messages, an assistant by another name, macros.
    "gemma": Family(
        """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- macro turn(role, text) -%}
    {{ '<start_of_turn>' ~ role ~ '\\n' ~ text | trim ~ '<end_of_turn>\\n' }}
{%- endmacro -%}
{%- for message in messages -%}
    {{ turn('model' if message['role'] == 'assistant' else message['role'], message['content']) }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
""",
        ["<bos>", "<start_of_turn>", "<end_of_turn>"],
        {"bos_token": "<bos>"},
        takes_system=False,
    ),
}
"""By name."""

_LONG = "def f(x):\n    return x ** 2\n\n\tnaïve 你好 👩‍👩‍👧 1234567, it's 3 < 4 > 2 | <b>|im_end\u00a0"

SHAPES: dict[str, list[dict[str, str]]] = {
    "one": [{"role": "user", "content": "Where is Paris?"}],
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the cat sat"}],
    "turns": [
        {"role": "user", "content": "the cat"},
        {"role": "assistant", "content": "sat on the mat."},
        {"role": "user", "content": " and the dog\n"},
    ],
    "spaces": [{"role": "system", "content": "  \n"}, {"role": "user", "content": "\n\n  the  \t\n"}],
    "empty": [{"role": "user", "content": ""}],
    "long": [{"role": "system", "content": _LONG}, {"role": "user", "content": _LONG * 3}],
    "letters": [
        {"role": "user", "content": "s"},
        {"role": "assistant", "content": "'s"},
        {"role": "user", "content": "1"},
    ],
    "open": [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat on"}],
    "open_space": [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat on the "}],
    "open_lines": [{"role": "user", "content": "go"}, {"role": "assistant", "content": "\n\na\n"}],
}
"""Conversations without a control token in them, by what is special about them."""
