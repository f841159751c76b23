"""Files next to the weights of a model, by name: its tokenizer, its chat template, and its code."""

from __future__ import annotations

import re

COMPANION = re.compile(
    r"generation_config\.json|tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|merges\.txt"
    r"|[\w.-]+\.(model|tiktoken)|chat_template\.(jinja|json)|additional_chat_templates/[\w.-]+\.jinja|(video_)?(pre)?processor_config\.json"
)
CODE = re.compile(r"[\w-]+\.py")


def is_of_tokenizer(name: str) -> bool:
    """Return whether a file is the vocabulary or the configuration of a tokenizer."""
    return name.startswith("tokenizer") or name.endswith((".model", ".tiktoken"))
