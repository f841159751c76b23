"""Whether two names are the same bytes: files of rows at another path, copies of a model's directory."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from fsdp_tune.comparison.causes import value_at
from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.data.read.file_access import FileDigests
from fsdp_tune.data.read.sources import find_source, is_local
from fsdp_tune.recipe.key_paths import KeyPath
from fsdp_tune.recipe.schema.data_section import DataSource
from fsdp_tune.run.base_model import identify_weights

OF_FILES = ("path", "data_dir", "data_files")
"""Keys of a source that name its files."""
SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.py")
"""Files of a model's directory next to its weights: configurations, tokenizer, code."""


def are_same_files(
    path: KeyPath, a: Mapping[str, object], b: Mapping[str, object], digests: FileDigests
) -> bool:
    """Return whether a key of two recipes names the same bytes in both, as far as that can be read here."""
    if path[0] == "data" and path[-1] in OF_FILES:
        return _same([_digest_of_source(value_at(each, path[:-1]), digests) for each in (a, b)])
    if path in (("model", "name_or_path"), ("model", "tokenizer")):
        # Without `tokenizer` it is that of the model.
        names = [value_at(each, path) or value_at(each, ("model", "name_or_path")) for each in (a, b)]
        return _same([digest_of_model(name) for name in names])
    return False


def digest_of_model(name: object) -> str | None:
    """Return a digest of a local directory's weights, configuration and tokenizer; None for what is not
    one."""
    if not isinstance(name, str) or not Path(name).is_dir():
        return None
    weights = identify_weights(name, None)
    if weights is None:
        return None
    found = hashlib.blake2b(weights.encode(), digest_size=32)
    try:
        for file in sorted({file for pattern in SMALL_FILES for file in Path(name).glob(pattern)}):
            content = file.read_bytes()
            found.update(f"{file.name} {len(content)}\n".encode() + content)
    except OSError:
        return None
    return found.hexdigest()


def _digest_of_source(source: object, digests: FileDigests) -> list[str] | None:
    """Return digests of the files of a source, those of a directory in their order; None if it has none on
    this machine, or if they cannot be read. Downloads nothing, and calls no loader of the user."""
    try:
        entry = DataSource.model_validate(source)
        return find_source(entry, "data.train[0]").content(digests) if is_local(entry) else None
    except (FsdpTuneError, OSError, ValueError):
        return None


def _same(found: list[object]) -> bool:
    return found[0] is not None and found[0] == found[1]
