"""Write the tokenizer of a trained model: files that the recipe does not change stay as the base wrote them.

 transformers 5 saves any tokenizer with names that transformers 4 does not know (`TokenizersBackend`, a
list in `extra_special_tokens`), and loads the older ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fsdp_tune.core.atomic import write_file, write_json
from fsdp_tune.core.companion_files import CODE, COMPANION
from fsdp_tune.core.hub import resolves_inside

CONFIG, MAP, TEMPLATE = "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"


VOCABULARY, ADDED = "tokenizer.json", "added_tokens.json"


_OF_ONE_MACHINE = ("is_local", "local_files_only", "backend", "name_or_path")


class SavedTokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    @property
    def special_tokens_map(self) -> dict[str, Any]: ...
    @property
    def chat_template(self) -> Any: ...
    def __len__(self) -> int: ...
    def save_pretrained(self, save_directory: str, /) -> object: ...


@dataclass(frozen=True, slots=True)
class TokenizerOrigin:
    """A tokenizer as it was loaded: what a recipe may change, and its files (None if it has none, as a
    bundled one)."""

    folder: Path | None = None
    special_tokens: dict[str, str] = field(default_factory=dict[str, str])
    chat_template: str | None = None
    size: int = 0


def describe_origin(tokenizer: SavedTokenizer, folder: Path | None) -> TokenizerOrigin:
    templates = tokenizer.chat_template
    return TokenizerOrigin(
        folder,
        _named_special_tokens(tokenizer),
        templates.get("default") if isinstance(templates, dict) else templates,
        len(tokenizer),
    )


def _named_special_tokens(tokenizer: SavedTokenizer) -> dict[str, str]:
    return {
        name: str(token)
        for name, token in tokenizer.special_tokens_map.items()
        if not isinstance(token, list)
    }


def save_tokenizer(directory: Path, tokenizer: SavedTokenizer, origin: TokenizerOrigin) -> None:
    """Write the tokenizer's files into an empty directory."""
    files = dict(_files(origin.folder)) if origin.folder is not None else {}
    has_grown = len(tokenizer) != origin.size
    if has_grown or not files:
        tokenizer.save_pretrained(str(directory))
    if not files or (has_grown and not (directory / VOCABULARY).is_file()):
        if (directory / CONFIG).is_file():
            write_json(directory / CONFIG, _old_spelling(_read_object(directory / CONFIG)))
        return
    contents = {
        name: path.read_bytes()
        for name, path in files.items()
        if not (has_grown and name in (VOCABULARY, ADDED))
    }
    special = {
        name: token
        for name, token in _named_special_tokens(tokenizer).items()
        if origin.special_tokens.get(name) != token
    }
    changes: dict[str, object] = dict(special)
    config = _read_object(files[CONFIG]) if CONFIG in files else {}
    if has_grown and "added_tokens_decoder" in config:
        changes["added_tokens_decoder"] = config["added_tokens_decoder"] | _added_tokens(
            directory / VOCABULARY
        )
    template = tokenizer.chat_template
    if template != origin.chat_template:
        contents = {
            name: text
            for name, text in contents.items()
            if not name.startswith(("chat_template.", "additional_chat_templates/"))
        }
        contents[TEMPLATE] = str(template).encode()
        changes |= {"chat_template": template} if "chat_template" in config else {}
    if (exported := _old_spelling(config | changes)) != config:
        contents[CONFIG] = _json(exported)
    if special and MAP in files:
        contents[MAP] = _json(_read_object(files[MAP]) | special)
    for name, text in contents.items():
        (directory / name).parent.mkdir(exist_ok=True)
        write_file(directory / name, text)


def _json(value: Mapping[str, object]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _added_tokens(vocabulary: Path) -> dict[str, dict[str, Any]]:
    """Return the added tokens of a tokenizer.json as `added_tokens_decoder` of tokenizer_config.json."""
    return {
        str(token["id"]): {name: value for name, value in token.items() if name != "id"}
        for token in _read_object(vocabulary)["added_tokens"]
    }


def _old_spelling(config: dict[str, object]) -> dict[str, Any]:
    """Return a tokenizer_config.json of transformers 5 with the names of transformers 4."""
    old = dict(config)
    if old.get("tokenizer_class") == "TokenizersBackend":
        old = {name: value for name, value in old.items() if name not in _OF_ONE_MACHINE} | {
            "tokenizer_class": "PreTrainedTokenizerFast"
        }
    if isinstance(old.get("extra_special_tokens"), list):
        old["additional_special_tokens"] = old.pop("extra_special_tokens")
    return old


def _read_object(path: Path) -> dict[str, Any]:
    try:
        found: object = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the tokenizer's files, and the code that its configuration names."""
    has_code = "auto_map" in _read_object(folder / CONFIG)
    for path in sorted([*folder.glob("*"), *folder.glob("additional_chat_templates/*")]):
        name = path.relative_to(folder).as_posix()
        is_wanted = COMPANION.fullmatch(name) or (has_code and CODE.fullmatch(name))
        if (
            is_wanted
            and name != "generation_config.json"
            and path.is_file()
            and resolves_inside(path, folder)
        ):
            yield name, path
