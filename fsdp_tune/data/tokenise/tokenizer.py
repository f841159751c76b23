"""Load the recipe's tokenizer with its special tokens and chat template, and wrap it as the encoder of
`data/`.

`builtin:NAME` needs no torch (from transformers 5.23 on). Any other tokenizer goes through AutoTokenizer,
which imports torch in transformers 5 (its configuration module does), about two seconds once.
"""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from fsdp_tune.core.errors import FsdpTuneError, Notice, Where, usage_error
from fsdp_tune.core.files import expanded
from fsdp_tune.core.hub import HubResource, cached_model_file, hub_is_reachable
from fsdp_tune.core.library_errors import as_os_error, first_line
from fsdp_tune.data.format.templates import BUNDLED, fitting_templates, missing_tokens, resolve_template
from fsdp_tune.data.format.templates import KEY as KEY_OF_TEMPLATE
from fsdp_tune.data.read.file_access import (
    CHAT_TEMPLATE,
    EOS,
    MODEL_MAX_LENGTH,
    PAD,
    builtin_tokenizer,
    is_builtin,
)
from fsdp_tune.data.tokenise.encoder_protocol import SpecialToken
from fsdp_tune.data.tokenise.exported_tokenizer import TokenizerOrigin, describe_origin
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.manifest import digest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


PAD_NAMES = (
    "<pad>",
    "<|pad|>",
    "[PAD]",
    "<PAD>",
    "<|PAD|>",
    "<|padding|>",
    "<|finetune_right_pad_id|>",
    "<|fim_pad|>",
)


SPARE_TOKEN = re.compile(r"reserved|unused|<extra_id_|<dummy|\[control_", re.IGNORECASE)


TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


KEY = "model.tokenizer"


STAND_IN = "builtin:arithmetic"


@dataclass(frozen=True, slots=True)
class LoadedTokenizer:
    tokenizer: PreTrainedTokenizerBase
    notices: tuple[Notice, ...]
    """Choices made for the user (a padding token)."""
    origin: TokenizerOrigin
    """The tokenizer before the recipe changed it."""


def open_tokenizer(recipe: Recipe) -> LoadedTokenizer:
    """Load the tokenizer, with EOS, padding and added tokens and chat template as in the recipe.

    Raises: usage error (exit 2) if it is not found, the hub is unreachable, or it has no end-of-sequence
    token.
    """
    name = recipe.model.tokenizer or recipe.model.name_or_path
    if name is None:
        raise usage_error(
            "no-tokenizer",
            "the recipe names no tokenizer",
            hint=f"set `{KEY}`: a hub id, a directory or `builtin:arithmetic`",
        )
    tokenizer = _builtin(name) if is_builtin(name) else _from_pretrained(name, recipe)
    origin = describe_origin(tokenizer, None if is_builtin(name) else _folder_of(name, recipe))
    notices = _set_special_tokens(tokenizer, recipe, name)
    if recipe.data.chat_template is not None:
        # saved with the model, so that inference uses the template of the training
        tokenizer.chat_template = resolve_template(recipe.data.chat_template)
    elif isinstance(tokenizer.chat_template, dict):
        tokenizer.chat_template = _one_template(tokenizer.chat_template, name)
    return LoadedTokenizer(tokenizer, tuple(notices), origin)


def load_encoder(recipe: Recipe) -> TokenizerEncoder:
    loaded = open_tokenizer(recipe)
    encoder = TokenizerEncoder(
        loaded.tokenizer, loaded.notices, added=recipe.model.tokens.add, origin=loaded.origin
    )
    encoder.notices += tuple(_missing_template_tokens(recipe, encoder))
    return encoder


def stand_in_encoder() -> TokenizerEncoder:
    """Return an encoder for reading rows without their tokenizer: it has a chat template, and every id is in
    its vocabulary."""
    encoder = TokenizerEncoder(_builtin(STAND_IN))
    encoder.vocabulary_size = sys.maxsize
    return encoder


def _missing_template_tokens(recipe: Recipe, encoder: TokenizerEncoder) -> Iterator[Notice]:
    """Report tokens of a bundled template that the vocabulary lacks: they would be encoded as text, a letter
    or a syllable at a time."""
    keys = {KEY_OF_TEMPLATE: recipe.data.chat_template} | {
        f"{key}.chat_template": entry.chat_template for key, entry in recipe.data.sources
    }
    for key, name in keys.items():
        missing = missing_tokens(name, encoder.encode) if name is not None and name in BUNDLED else []
        if name is not None and missing:
            fitting = fitting_templates(encoder.encode, BUNDLED[name].parts) or fitting_templates(
                encoder.encode
            )
            names = ", ".join(f"`{each}`" for each in fitting)
            yield Notice(
                "template-tokens-missing",
                f"the chat template `{name}` writes {', '.join(f'`{token}`' for token in missing)}, which "
                "the vocabulary does not have: they are encoded as text",
                where=Where(key=key),
                hint=f"add them (`model.tokens.add`), or use a template that fits the vocabulary: {names}",
            )


class TokenizerEncoder:
    """Implementation of `data.tokenise.encoder_protocol.Encoder`. Picklable, so that other processes can
    encode too."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        notices: tuple[Notice, ...] = (),
        added: Sequence[str] = (),
        origin: TokenizerOrigin | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.origin = origin or TokenizerOrigin()
        self.notices = notices
        self.vocabulary_size = len(tokenizer)
        self.eos_token = str(tokenizer.eos_token)
        self.eos_id: int = _id(tokenizer, self.eos_token)
        self.pad_id: int = _id(tokenizer, str(tokenizer.pad_token))
        self.bos_id: int | None = (
            None if tokenizer.bos_token is None else _id(tokenizer, str(tokenizer.bos_token))
        )
        # a single template: `open_tokenizer` has selected it
        self.chat_template: str | None = cast("str | None", tokenizer.chat_template)
        self.prefix_ids = _prefix_ids(tokenizer)
        self.special_tokens = _special_tokens(tokenizer, added)
        self._backend = _plain_backend(tokenizer)
        self.digest = self._digest()

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text, without special tokens that the text does not contain."""
        if self._backend is not None:
            return [
                encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)
            ]
        return _encode(self.tokenizer, texts) if texts else []

    def encode_as_text(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text, with special tokens in it encoded as ordinary text."""
        if self._backend is None:
            return _encode(self.tokenizer, texts, split_special_tokens=True) if texts else []
        self._backend.encode_special_tokens = True
        try:
            return self.encode(texts)
        finally:
            self._backend.encode_special_tokens = False

    def decode(self, ids: Sequence[int]) -> str:
        text = self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def render(
        self,
        messages: list[dict[str, Any]],
        template: str,
        *,
        tools: list[Any] | None,
        generation_prompt: bool,
        **variables: Any,
    ) -> str:
        """Render a conversation as text in transformers' sandbox. Exceptions of the template are not
        caught."""
        rendered = self.tokenizer.apply_chat_template(
            messages,
            tools=tools,
            chat_template=template,
            add_generation_prompt=generation_prompt,
            tokenize=False,
            **variables,
        )
        assert isinstance(rendered, str)
        return rendered

    def render_marked(
        self, messages: list[dict[str, Any]], template: str, *, tools: list[Any] | None, **variables: Any
    ) -> tuple[str, list[tuple[int, int]]]:
        """Render a conversation as text, with begin and end of each text inside generation markers."""
        from transformers.utils.chat_template_utils import render_jinja_template

        render: Any = render_jinja_template  # annotated as returning a str
        given = {**self.tokenizer.special_tokens_map, **variables}
        texts, marked = render(
            [messages], tools=tools, chat_template=template, return_assistant_tokens_mask=True, **given
        )
        return texts[0], marked[0]

    def _digest(self) -> str:
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        contents = (
            backend.to_str()
            if backend is not None
            else json.dumps(sorted(self.tokenizer.get_vocab().items()))
        )
        parts = [
            type(self.tokenizer).__name__,
            contents,
            json.dumps(self.tokenizer.special_tokens_map, sort_keys=True, default=str),
            json.dumps(
                [
                    self.prefix_ids,
                    self.eos_id,
                    self.bos_id,
                    [token.text for token in self.special_tokens if token.is_added],
                ]
            ),
            self.chat_template or "",
        ]
        return digest(*parts, size=16)


def _builtin(name: str) -> PreTrainedTokenizerBase:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=builtin_tokenizer(name),
        eos_token=EOS,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        model_max_length=MODEL_MAX_LENGTH,
    )


def _from_pretrained(name: str, recipe: Recipe) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    model = recipe.model
    directory, revision = _directory(name), _revision(recipe)
    source = str(directory) if directory else name
    try:
        return AutoTokenizer.from_pretrained(
            source,
            revision=revision,
            trust_remote_code=model.trust_remote_code,
            local_files_only=directory is not None or not hub_is_reachable(),
        )
    except Exception as error:  # tokenizers raises plain Exceptions for damaged files
        if (found := as_os_error(error)) is not error:
            raise found from error
        raise _load_problem(error, name, directory) from error


def _revision(recipe: Recipe) -> str:
    model = recipe.model
    return model.tokenizer_revision or (
        model.revision if model.tokenizer in (None, model.name_or_path) else "main"
    )


def _folder_of(name: str, recipe: Recipe) -> Path | None:
    """Return the directory of the files that were loaded; of a hub repository its snapshot in the cache."""
    if (directory := _directory(name)) is not None:
        return directory
    found = (cached_model_file(name, _revision(recipe), file) for file in TOKENIZER_FILES)
    return next((path.parent for path in found if path is not None), None)


def _directory(name: str) -> Path | None:
    """Return the directory with the tokenizer's files: a model, or the `model/` of a run or checkpoint; None
    for a hub id."""
    path = expanded(name)
    if not path.is_dir():
        if path.is_absolute() or name.startswith(("./", "../", "~")):
            raise usage_error(
                "tokenizer-not-found",
                f"there is no tokenizer directory `{name}`",
                hint=f"set `{KEY}` to one that exists",
            )
        return None
    for candidate in (path, path / "model", path.parent / "model"):
        if any((candidate / file).is_file() for file in TOKENIZER_FILES):
            return candidate
    raise usage_error(
        "tokenizer-not-found",
        f"`{name}` holds no tokenizer: none of {', '.join(TOKENIZER_FILES)} is there",
        hint=f"set `{KEY}` to the hub id or directory that the model's tokenizer comes from",
    )


def _load_problem(error: Exception, name: str, directory: Path | None) -> FsdpTuneError:
    hub_problem = (
        None
        if directory is not None
        else HubResource("tokenizer", name, KEY, "tokenizer-not-found").problem(error)
    )
    return hub_problem or usage_error(
        "tokenizer-unreadable", f"the tokenizer of `{name}` cannot be loaded: {first_line(error)}"
    )


def _set_special_tokens(tokenizer: PreTrainedTokenizerBase, recipe: Recipe, name: str) -> list[Notice]:
    wanted = recipe.model.tokens
    if wanted.add:
        tokenizer.add_tokens(list(wanted.add), special_tokens=True)
    if wanted.eos is not None:
        tokenizer.eos_token = _known(tokenizer, wanted.eos, "eos")
    if wanted.pad is not None:
        tokenizer.pad_token = _known(tokenizer, wanted.pad, "pad")
    if tokenizer.eos_token_id is None:
        raise usage_error(
            "no-eos",
            f"the tokenizer of `{name}` has no end-of-sequence token: a model trained with it would "
            "never stop",
            hint="name one: `model.tokens.eos`, an entry of the vocabulary or one of `model.tokens.add`",
        )
    if tokenizer.pad_token_id is not None:
        return []
    tokenizer.pad_token = _spare_token(tokenizer) or tokenizer.eos_token
    what = (
        "its end-of-sequence token"
        if tokenizer.pad_token == tokenizer.eos_token
        else "an unused token of its vocabulary"
    )
    return [
        Notice(
            "pad-chosen",
            f"the tokenizer of `{name}` has no padding token: `{tokenizer.pad_token}` is used, "
            f"{what}; padding is never trained",
            hint="set another with `model.tokens.pad`",
        )
    ]


def _known(tokenizer: PreTrainedTokenizerBase, token: str, key: str) -> str:
    vocabulary = tokenizer.get_vocab()
    if token in vocabulary:
        return token
    special = [str(added) for added in tokenizer.added_tokens_decoder.values()]
    close = difflib.get_close_matches(token, special, n=3, cutoff=0.5)
    hint = (
        f"did you mean {' or '.join(f'`{match}`' for match in close)}?"
        if close
        else "`model.tokens.add` adds new ones"
    )
    raise usage_error(
        "unknown-token",
        f"`{token}` is not in the tokenizer's vocabulary",
        hint=hint + f" (key `model.tokens.{key}`)",
    )


def _spare_token(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return a special token that training does not use, for padding; None if there is none."""
    special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    for candidate in (*PAD_NAMES, *(token for token in special if SPARE_TOKEN.search(token))):
        if candidate in special and candidate not in (
            tokenizer.eos_token,
            tokenizer.bos_token,
            tokenizer.unk_token,
        ):
            return candidate
    return None


def _one_template(templates: dict[str, str], name: str) -> str:
    if "default" not in templates:
        raise usage_error(
            "several-chat-templates",
            f"the tokenizer of `{name}` has chat templates {', '.join(f'`{key}`' for key in templates)}, "
            "and none is the default",
            hint="choose one by `data.chat_template: file.jinja`",
        )
    return templates["default"]


def _encode(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], *, split_special_tokens: bool = False
) -> list[list[int]]:
    return tokenizer(
        texts,
        add_special_tokens=False,
        return_attention_mask=False,
        verbose=False,
        split_special_tokens=split_special_tokens,
    )["input_ids"]


def _special_tokens(tokenizer: PreTrainedTokenizerBase, added: Sequence[str]) -> tuple[SpecialToken, ...]:
    for_rows = set(added) - {
        str(token)
        for token in (tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token, tokenizer.unk_token)
    }
    return tuple(
        SpecialToken(
            str(token),
            number,
            str(token) == str(tokenizer.unk_token),
            token.lstrip,
            token.rstrip,
            str(token) in for_rows,
        )
        for number, token in tokenizer.added_tokens_decoder.items()
        if token.special
    )


def _id(tokenizer: PreTrainedTokenizerBase, token: str) -> int:
    number = tokenizer.convert_tokens_to_ids(token)
    assert isinstance(number, int)
    return number


def _prefix_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids that the tokenizer adds before a text: BOS for Llama, none for GPT-2 (although it has a
    BOS)."""
    bare, whole = (
        _encode(tokenizer, ["a"])[0],
        tokenizer(["a"], return_attention_mask=False, verbose=False)["input_ids"][0],
    )
    for length in range(len(whole) - len(bare) + 1):
        if whole[length : length + len(bare)] == bare:
            return tuple(whole[:length])
    raise usage_error(
        "tokenizer-changes-text",
        "the tokenizer changes a text when it adds its special tokens, so their position cannot be "
        "determined",
    )


def _plain_backend(tokenizer: PreTrainedTokenizerBase) -> Any:
    """Return the Rust tokenizer, which takes half the time of transformers' wrapper; None if the wrapper
    gives other ids."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    backend.no_truncation()
    backend.no_padding()
    probe = f"It's  3.14 é你 {tokenizer.eos_token}\n x"
    same = (
        backend.encode_batch_fast([probe], add_special_tokens=False)[0].ids == _encode(tokenizer, [probe])[0]
    )
    return backend if same else None
