"""RUN/model: what a merged model needs besides its weights, written before step 1, so that a merge needs no network."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from fsdp_tune.atomic import write_json
from fsdp_tune.errors import usage_error
from fsdp_tune.recipe.schema_data import Model


class Tokenizer(Protocol):
    """What is used of a transformers tokenizer."""

    @property
    def eos_token_id(self) -> int | None: ...
    @property
    def bos_token_id(self) -> int | None: ...
    @property
    def pad_token_id(self) -> int | None: ...
    def __len__(self) -> int: ...
    def save_pretrained(self, directory: str) -> Any: ...


SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def save_model_files(directory: Path, facts: dict[str, Any], tokenizer: Tokenizer) -> None:
    """Writes config.json, generation_config.json and the tokenizer. `facts` is the document of `model.inspect`."""
    tokenizer.save_pretrained(str(directory))
    config = with_special_tokens(facts["config"], tokenizer)
    generation = with_special_tokens(facts["generation_config"], tokenizer)
    # `resize_embeddings` grows the embedding to the tokenizer; without it a larger tokenizer was refused before.
    vocabulary = {"vocab_size": len(tokenizer)} if len(tokenizer) > facts["embedding_rows"] else {}
    write_json(directory / "config.json", config | vocabulary | {"architectures": [facts["architecture"]], "use_cache": True})
    write_json(directory / "generation_config.json", generation)


def with_special_tokens(config: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """The tokenizer's special tokens where the config has others: a model that is trained on one EOS must stop at that one.

    A list of several EOS tokens that holds the tokenizer's (Llama 3) stays. An id that the tokenizer does not name stays
    too, unless it lies beyond the vocabulary, as GPT-2's default 50256 does in a small model.
    """
    changed = dict(config)
    for name in SPECIAL:
        wanted: int | None = getattr(tokenizer, name)
        present = config.get(name)
        if wanted is None:
            if isinstance(present, int) and present >= len(tokenizer):
                changed[name] = None
        elif present != wanted and not (isinstance(present, list) and wanted in present):
            changed[name] = wanted
    return changed


def check_vocabulary(facts: dict[str, Any], model: Model, vocabulary_size: int) -> None:
    """A token id beyond the embedding would be an index error on a GPU, deep inside a kernel."""
    rows = int(facts["embedding_rows"])
    if vocabulary_size > rows and not model.grows_embedding:
        raise usage_error(
            "vocabulary-larger-than-embedding",
            f"the tokenizer {model.tokenizer} has {vocabulary_size:,} tokens, and the model's embedding has {rows:,} rows",
            ways_out=("--set model.resize_embeddings=true grows the embedding", "model.tokenizer: the one the model was made with"),
        )
