"""The chat template that clients get who render prompts themselves."""

import json
from pathlib import Path

from kimi_jax.text_files import read_text

TEXT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}<|im_assistant|>"
    "{%- elif message['role'] == 'user' -%}<|im_user|>{%- else -%}<|im_system|>{%- endif -%}"
    "{{ message.get('name') or message['role'] }}<|im_middle|>"
    "{%- if message['role'] == 'assistant' -%}<think></think>{%- endif -%}"
    "{{ message['content'] }}<|im_end|>"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|><think>"
    "{%- if thinking is defined and not thinking -%}</think>{%- endif -%}{%- endif -%}"
)
"""K2.6's format for messages of text, for checkpoints without a template of their own."""

INSTANT = "{%- if thinking is not defined -%}{%- set thinking = false -%}{%- endif -%}"


def template_of(folder: Path | None, thinking: bool) -> str:
    """A checkpoint's own template, or one for messages of text.

    Args:
      folder: of the checkpoint.
      thinking: whether answers begin with thinking where nothing is said.
    """
    found = TEXT_TEMPLATE
    if folder is not None:
        if (folder / "chat_template.jinja").is_file():
            found = read_text(folder / "chat_template.jinja")
        elif (folder / "tokenizer_config.json").is_file():
            found = json.loads(read_text(folder / "tokenizer_config.json")).get("chat_template") or found
    return found if thinking else INSTANT + found
