"""The facts of a recipe's model, which a child process with torch finds on the meta device, and RUN/model,
which is written from them.

RUN/model has the files that a merged model needs besides its weights. It is written before step 1, so that a
merge needs no network.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from pydantic import Field

from fsdp_tune.core.atomic import write_file, write_json
from fsdp_tune.core.config_changes import changed_fields, vocabulary_changes, with_changes
from fsdp_tune.core.errors import FsdpTuneError, Notice, Problem, Where, usage_error
from fsdp_tune.core.hub import resolves_inside
from fsdp_tune.core.tensors.peft_config import CONFIG_FILE
from fsdp_tune.data.tokenise.exported_tokenizer import SavedTokenizer, TokenizerOrigin, save_tokenizer
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.base_model import (
    LAYOUT_FILE,
    TENSORS_FILE,
    BaseLayout,
    BaseModel,
    BaseRecord,
    describe_base,
)
from fsdp_tune.run.records import PartialFacts

WRITTEN = "set in the recipe"


INSTALLED = "installed"
"""The choice of an optional package whose kernels run."""


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """A value of a recipe key, and why it was chosen."""

    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    modules: dict[str, int]
    """Adapted modules by the last part of their names."""
    trained_parameters: int
    share: float
    """Of the trained parameters in those of the base."""
    trained_bytes: int


class ModelFacts(PartialFacts):
    """What can be known of a recipe's model without its weights.

    `as_dict` has only the fields that were set: those of an adapter for `lora:`, and kernels unless a problem
    was found before them.
    """

    packaged: bool
    """Whether the configuration is that in this package, since the hub cannot be reached."""
    model_type: str
    architecture: str
    config: dict[str, Any]
    base_folder: str | None
    config_changes: dict[str, object]
    """Fields of the base's config.json that the run changes."""
    exported_config: dict[str, object]
    generation_config: dict[str, object]
    base_layout: BaseLayout
    tensors: BaseRecord = BaseRecord()
    """What becomes of the tensors of the base's files; empty if these are not on this machine."""
    has_unread_tensors: bool = False
    """Whether the base is on the hub and `tensors` is empty for want of its files: pickled ones have no
    headers to read remotely."""
    keeps_architectures: bool = False
    """Whether a merged model is one of the base's `architectures`, of which the trained class is a part."""
    parameters: int
    trained_parameters: int
    embedding_rows: int
    tied_embeddings: bool
    is_embedding_trained: bool
    trains_new_tokens: bool
    max_positions: int | None
    attention: str
    adapter: AdapterFacts | None = None
    adapter_config: dict[str, object] | None = None
    adapter_tensors: dict[str, tuple[int, ...]] = Field(default_factory=dict[str, tuple[int, ...]])
    """Shapes of the tensors in the trained adapter's file."""
    nf4_weights: tuple[str, ...] = ()
    quantization: str | None = None
    layer_classes: tuple[str, ...] = ()
    layers: int = 0
    layer_parameters: int = 0
    units: tuple[tuple[str, ...], ...] = ()
    kernels: dict[str, KernelChoice] = Field(default_factory=dict[str, KernelChoice])


@dataclass(frozen=True, slots=True)
class ModelInspection:
    """What `model.loading.inspect` found, and the document that it prints."""

    facts: ModelFacts | None
    """None if the model could not be built."""
    problems: tuple[Problem, ...] = ()
    notices: tuple[Notice, ...] = ()

    def to_json(self) -> str:
        facts = self.facts.as_dict() if self.facts is not None else {}
        problems, notices = ([each.as_dict() for each in group] for group in (self.problems, self.notices))
        return json.dumps({**facts, "problems": problems, "notices": notices})

    @classmethod
    def from_json(cls, text: str | bytes) -> ModelInspection:
        """Parse a document. Raises: ValueError if it is damaged."""
        try:
            raw: dict[str, Any] = json.loads(text)
            problems, notices = (
                tuple(map(Problem.from_dict, raw.pop(name))) for name in ("problems", "notices")
            )
            facts = ModelFacts.model_validate(raw) if raw else None
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"not an inspection: {error!r}") from error
        return cls(
            facts, problems, tuple(Notice(each.code, each.message, each.where, each.hint) for each in notices)
        )


class Tokenizer(SavedTokenizer, Protocol):
    """The part of a transformers tokenizer that is used here."""

    @property
    def eos_token_id(self) -> int | None: ...
    @property
    def bos_token_id(self) -> int | None: ...
    @property
    def pad_token_id(self) -> int | None: ...


def save_model_files(
    directory: Path, facts: ModelFacts, tokenizer: Tokenizer, origin: TokenizerOrigin
) -> None:
    """Write config.json, generation_config.json, the tokenizer, base_layout.json, tensors.json, and of an
    adapter its adapter_config.json.

    `origin` is the tokenizer before the recipe changed it.
    """
    save_tokenizer(directory, tokenizer, origin)
    config = facts.exported_config
    # Not as strict JSON: transformers 4 writes and reads a bare `Infinity`, as in the configurations of Mamba
    # 2.
    changed = with_changes(config, _changes_of_run(facts, tokenizer))
    write_file(directory / "config.json", json.dumps(changed, indent=2, ensure_ascii=False) + "\n")
    generation = with_special_tokens(
        facts.generation_config, tokenizer, ("bos_token_id", "eos_token_id", "pad_token_id")
    )
    write_json(directory / "generation_config.json", generation)
    wanted = ["*.py"] * ("auto_map" in config) + ["*processor_config.json"] * bool(facts.tensors.carried)
    for path in sorted(
        each
        for pattern in wanted
        if facts.base_folder is not None
        for each in Path(facts.base_folder).glob(pattern)
    ):
        if resolves_inside(path, path.parent):
            write_file(directory / path.name, path.read_bytes())
    facts.base_layout.write(directory / LAYOUT_FILE)
    facts.tensors.write(directory / TENSORS_FILE)
    if facts.adapter_config is not None:
        write_json(directory / CONFIG_FILE, facts.adapter_config)


def _changes_of_run(facts: ModelFacts, tokenizer: Tokenizer) -> dict[str, object]:
    """Return the fields of config.json that tokenizer and model of the run set, without those that have this
    value already."""
    before = facts.config
    config = with_special_tokens(before, tokenizer, ("bos_token_id", "eos_token_id"))
    # Some models use the padding id of their config: Youtu zeroes that row of the embedding on each load,
    # XGLM that position. So config.json keeps the id of the training; `generate` pads with the id of the
    # generation config.
    padding = config.get("pad_token_id")
    if isinstance(padding, int) and padding >= max(facts.embedding_rows, len(tokenizer)):
        config["pad_token_id"] = None
    # `resize_embeddings` grows the embedding to the tokenizer; without it, a larger tokenizer was refused
    # earlier.
    if len(tokenizer) > facts.embedding_rows:
        config = with_changes(config, vocabulary_changes(config, len(tokenizer)))
    changed = changed_fields(before, config)
    return changed if facts.keeps_architectures else changed | {"architectures": [facts.architecture]}


def with_special_tokens(
    config: dict[str, object], tokenizer: Tokenizer, names: Sequence[str]
) -> dict[str, object]:
    """Return the config with the tokenizer's special tokens: a model must stop at the EOS that it was trained
    with.

    A list of several EOS tokens that includes the tokenizer's (Llama 3) stays. An id for which the tokenizer
    has no token stays too, unless it is outside of the vocabulary, as GPT-2's default 50256 is in a small
    model.
    """
    changed = dict(config)
    for name in names:
        wanted: int | None = getattr(tokenizer, name)
        present = config.get(name)
        if wanted is None:
            if isinstance(present, int) and present >= len(tokenizer):
                changed[name] = None
        elif present != wanted and not (isinstance(present, list) and wanted in present):
            changed[name] = wanted
    return changed


def check_vocabulary(facts: ModelFacts, recipe: Recipe, vocabulary_size: int) -> list[Notice]:
    """Refuse a tokenizer with more tokens than embedding rows, which would be an index error inside a GPU
    kernel, and new rows that `lora:` would freeze. Raises: usage error."""
    rows, model = facts.embedding_rows, recipe.model
    has_grown = vocabulary_size > rows
    if has_grown and not model.grows_embedding:
        raise usage_error(
            "vocabulary-larger-than-embedding",
            f"the tokenizer {model.tokenizer} has {vocabulary_size:,} tokens, and the model's "
            f"embedding has {rows:,} rows",
            ways_out=(
                "--set model.resize_embeddings=true grows the embedding",
                "set model.tokenizer to the tokenizer of the model",
            ),
        )
    if recipe.lora is None:
        return []
    if has_grown and not facts.trains_new_tokens:
        raise untrained_tokens(recipe, is_tied=facts.tied_embeddings)
    if facts.is_embedding_trained or not model.tokens.add:
        return []
    message = (
        "`lora:` freezes the embedding: tokens of `model.tokens.add` that the base was not trained with "
        "keep its values"
    )
    return [
        Notice(
            "lora-new-tokens",
            message,
            where=Where(key="model.tokens.add"),
            hint=_trained_in_full(is_tied=facts.tied_embeddings),
        )
    ]


def untrained_tokens(recipe: Recipe, *, is_tied: bool) -> FsdpTuneError:
    """Return the error about an embedding or a head that grows and is frozen: the new rows would keep values
    that no file holds."""
    return usage_error(
        "lora-new-tokens",
        "embedding and head grow for new tokens, and `lora:` freezes one of them: its new rows would "
        "keep random values",
        where=Where(key="model.tokens.add" if recipe.model.tokens.add else "model.resize_embeddings"),
        hint=_trained_in_full(is_tied=is_tied),
    )


def _trained_in_full(*, is_tied: bool) -> str:
    untied = " and untie them by `model: {config_overrides: {tie_word_embeddings: false}}`" if is_tied else ""
    return f"train embedding and head in full by `lora: {{modules_to_save: [embed_tokens, lm_head]}}`{untied}"


def base_of(recipe: Recipe, facts: ModelFacts) -> BaseModel:
    """Return the identity of the base of an adapter for base.json."""
    base = describe_base(str(recipe.model.name_or_path), recipe.model.revision)
    base = replace(base, config_changes=facts.config_changes)
    if recipe.nf4 is None:
        return base
    return replace(base, nf4_weights=facts.nf4_weights, nf4_scales=recipe.nf4.scales)
