"""Load data sets with the `datasets` library: from the hub, or a directory written by `save_to_disk`.

They are never held in memory, regardless of HF_DATASETS_IN_MEMORY_MAX_SIZE: each row is read once, and the
files identify the data.
"""

from __future__ import annotations

from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

from fsdp_tune.core.errors import FsdpTuneError, Where, usage_error
from fsdp_tune.core.hub import cache_only, causes_of, hub_is_reachable, unreachable
from fsdp_tune.core.library_errors import first_line
from fsdp_tune.recipe.schema.data_section import DataSource


def load_saved(path: Path, split: str, where: Where) -> Any:
    """Return the `datasets.Dataset`, or one split, of a directory written by `save_to_disk`. Raises: usage
    error."""
    datasets: Any = import_module("datasets")
    try:
        saved = datasets.load_from_disk(str(path), keep_in_memory=False)
    except Exception as error:
        raise usage_error(
            "data-unreadable",
            f"`{path}` cannot be read as a saved data set: {first_line(error)}",
            where=where,
        ) from error
    if not isinstance(saved, datasets.DatasetDict):
        if split != "train":
            raise usage_error(
                "no-such-split",
                f"`{path}` is a data set without splits",
                where=where,
                hint=f"leave `split: {split}` out",
            )
        return saved
    if split not in saved:
        raise usage_error(
            "no-such-split",
            f"`{path}` has no split `{split}`",
            where=where,
            hint=f"its splits are: {', '.join(saved)}",
        )
    return saved[split]


def load_from_hub(entry: DataSource, where: Where) -> Any:
    """Return the `datasets.Dataset` of a hub id. Raises: usage error if it is unreachable, missing or gated,
    or has no such split."""
    return _query_hub("load_dataset", entry, where, split=entry.split, keep_in_memory=False)


def list_hub_files(entry: DataSource, where: Where) -> list[str]:
    """Return the files of a split as `hf://` URLs that name a commit, as `datasets` resolves them; nothing is
    downloaded.

    Raises: usage error, as `load_from_hub`.
    """
    splits: dict[str, list[str]] | None = _query_hub("load_dataset_builder", entry, where).config.data_files
    if not splits:
        raise usage_error(
            "data-unreadable", f"the data set `{entry.path}` is not stored in data files", where=where
        )
    if entry.split not in splits:
        hint = f"its splits are: {', '.join(splits)}"
        raise usage_error(
            "no-such-split", f"`{entry.path}` has no split `{entry.split}`", where=where, hint=hint
        )
    return [str(url) for url in splits[entry.split]]


def _query_hub(function: str, entry: DataSource, where: Where, **options: Any) -> Any:
    datasets: Any = import_module("datasets")
    reachable = hub_is_reachable()
    try:
        with nullcontext() if reachable else cache_only():
            return getattr(datasets, function)(
                entry.path,
                name=entry.name,
                data_dir=entry.data_dir,
                data_files=entry.data_files,
                revision=entry.revision,
                **options,
            )
    except Exception as error:
        raise _problem(error, entry, where, reachable=reachable) from error


def _problem(error: Exception, entry: DataSource, where: Where, *, reachable: bool) -> FsdpTuneError:
    kinds = {kind.__name__ for kind in type(error).__mro__}
    # a configuration or split that the cached copy does not have
    if not reachable and isinstance(error, ValueError):
        lines = "; ".join(str(error).strip().splitlines()[:2])
        return usage_error(
            "data-unreadable",
            f"the cached copy of the data set `{entry.path}` cannot be loaded: {lines}",
            where=where,
            hint=f"the hub cannot be reached: correct `{where.key}.name` or `.split`, or download it on a "
            "machine with network access",
        )
    if not reachable or "ConnectionError" in kinds:
        problem = unreachable("the data set", entry.path, f"{where.key}.path", is_data_set=True).problems[0]
        return FsdpTuneError(problem.at(where))
    if "GatedRepoError" in {type(cause).__name__ for cause in causes_of(error)}:
        return usage_error(
            "gated",
            f"the data set `{entry.path}` is gated: your account has no access",
            where=where,
            hint="request access on its page, then `hf auth login`",
        )
    if "DatasetNotFoundError" in kinds:
        return usage_error(
            "data-not-found",
            f"`{entry.path}` is neither on this disk nor accessible to your account on the hub",
            where=where,
            hint="correct the path, or log in with `hf auth login` if the data set is private",
        )
    return usage_error(
        "data-unreadable", f"the data set `{entry.path}` cannot be loaded: {first_line(error)}", where=where
    )
