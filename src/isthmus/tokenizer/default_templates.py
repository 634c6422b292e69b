"""Chat templates for files that carry none, found by a control token that only one family has.

They state each family's published prompt format for system, user and assistant messages; no tools.
"""

from __future__ import annotations

from collections.abc import Collection

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

LLAMA3 = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}"
    "{{ message.content | trim + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)

DEEPSEEK = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message.role == 'user' %}{{ '<\uff5cUser\uff5c>' + message.content }}"
    "{% elif message.role == 'assistant' %}"
    "{{ '<\uff5cAssistant\uff5c>' + message.content + '<\uff5cend\u2581of\u2581sentence\uff5c>' }}"
    "{% else %}{{ message.content }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<\uff5cAssistant\uff5c>' }}{% endif %}"
)

MISTRAL = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}{{ ' ' + message.content | trim + eos_token }}"
    "{% else %}{{ '[INST] ' + message.content + '[/INST]' }}{% endif %}"
    "{% endfor %}"
)

# The first marker that the vocabulary has decides.
FAMILIES: dict[str, tuple[str, str]] = {
    "<|im_start|>": ("ChatML", CHATML),
    "<|start_header_id|>": ("Llama 3", LLAMA3),
    "<\uff5cUser\uff5c>": ("DeepSeek", DEEPSEEK),
    "[INST]": ("Mistral", MISTRAL),
}


def default_template(special_literals: Collection[str]) -> tuple[str, str]:
    """(name, source). A vocabulary with none of the markers gets ChatML, its markers then plain text."""
    for marker, family in FAMILIES.items():
        if marker in special_literals:
            return family
    return "ChatML", CHATML
