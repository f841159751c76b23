"""The metadata of a model card by which the hub files a model: its base and how it derives from it, its data
sets, and their languages.

The fields are those of huggingface_hub's `ModelCardData`. Nothing is queried: names are those of the resolved
recipe, and cards of data sets are read from the local cache.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import yaml

from fsdp_tune.recipe.references import can_only_be_a_path, exists
from fsdp_tune.recipe.schema.data_section import DataSource

_FILES_OF_A_SET = re.compile(r"(?:hf://|https://huggingface\.co/)datasets/([\w.-]+/[\w.-]+?)(?:@[^/]+)?/.+")


def hub_id(name: str) -> str | None:
    """Return the repository of the hub that a name means (`OWNER/NAME`, `NAME`, or the URL of files of a data
    set); None for any other."""
    if found := _FILES_OF_A_SET.fullmatch(name):
        return found[1]
    is_other = name.startswith("builtin:") or "://" in name or can_only_be_a_path(name) or exists(Path(name))
    return None if is_other else name


def base_metadata(base: str | None, *, is_adapter: bool, is_resolved: bool) -> dict[str, object]:
    """Return `base_model` and `base_model_relation` of a model that was trained from `base`; nothing for a
    base that is not on the hub.

    A resolved recipe has absolute paths of local models, so that a name without one is that of a repository.
    What another tool has written into an adapter may be a directory of its machine: only OWNER/NAME is taken.
    """
    found = hub_id(base) if base is not None and (is_resolved or base.count("/") == 1) else None
    return (
        {}
        if found is None
        else {"base_model": found, "base_model_relation": "adapter" if is_adapter else "finetune"}
    )


def data_metadata(sources: Sequence[DataSource]) -> dict[str, object]:
    """Return `datasets`, the ids of the sources that are on the hub, and `language`, if all of them are and
    their cached cards name one."""
    ids = [_of_hub(source) for source in sources]
    on_hub = list(dict.fromkeys(each for each in ids if each is not None))
    languages = [
        _languages(each, source.revision) if each is not None else []
        for each, source in zip(ids, sources, strict=True)
    ]
    named = list(dict.fromkeys(language for some in languages for language in some)) if all(languages) else []
    return {**({"language": named} if named else {}), **({"datasets": on_hub} if on_hub else {})}


_BUILDERS = frozenset({"json", "csv", "text", "parquet", "arrow"})


def _of_hub(source: DataSource) -> str | None:
    is_builder = source.data_files is not None and source.path in _BUILDERS
    return None if source.loader is not None or is_builder else hub_id(source.path)


def _languages(data_set: str, revision: str | None) -> list[str]:
    """Return the languages in the card of a data set of the hub, which loading it has put into the cache; []
    if it is not there."""
    from huggingface_hub import metadata_load, try_to_load_from_cache

    try:
        card = try_to_load_from_cache(data_set, "README.md", repo_type="dataset", revision=revision)
        metadata = metadata_load(card) if isinstance(card, str) else None
    except (OSError, ValueError, yaml.YAMLError):
        return []
    found = (metadata or {}).get("language")
    values = cast(list[object], found) if isinstance(found, list) else [found]
    return [each for each in values if isinstance(each, str)]
