"""`cache list|clean`: list the cache of prepared data, and remove entries that no run uses."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fsdp_tune.cli.output import Screen
from fsdp_tune.cli.verbs import verb
from fsdp_tune.core.command import Option
from fsdp_tune.core.errors import usage_error
from fsdp_tune.core.units import format_age, format_bytes, parse_seconds

if TYPE_CHECKING:
    from fsdp_tune.data.cache import CacheEntry

CacheDir = Annotated[Path | None, Option("`data.cache_dir` of the recipes [default: $XDG_CACHE_HOME/fsdp-tune].", metavar="DIR")]

cache = typer.Typer(name="cache", help="List and clean the cache of prepared data.", no_args_is_help=True)


@cache.command("list")
@verb
def list_cache(screen: Screen, cache_dir: CacheDir = None) -> None:
    """List the entries of the cache with size, content and last use.

    \b
    Example:
        fsdp-tune cache list
    """
    from fsdp_tune.data.cache import list_entries
    from fsdp_tune.jobs.answers import CacheEntryAnswer, CacheListAnswer

    folder = _folder(cache_dir)
    entries = list_entries(folder)
    screen.document(CacheListAnswer(str(folder), [CacheEntryAnswer(**_facts(entry)) for entry in entries]))
    screen.table(f"{folder}: {format_bytes(sum(entry.size_bytes for entry in entries))}", COLUMNS, [_row(entry) for entry in entries])


@cache.command("clean")
@verb
def clean_cache(
    screen: Screen,
    older_than: Annotated[str | None, Option("Keep entries used within this time: 30d, 12h.", metavar="TIME")] = None,
    dry_run: Annotated[bool, Option("Show what would be removed, without removing it.")] = False,
    cache_dir: CacheDir = None,
) -> None:
    """Remove the entries that no live run uses. They are built again when a recipe needs them.

    \b
    Examples:
        fsdp-tune cache clean --dry-run
        fsdp-tune cache clean --older-than 30d
    """
    from fsdp_tune.data.cache import clean
    from fsdp_tune.jobs.answers import CacheCleanAnswer, CacheEntryAnswer, KeptEntryAnswer

    folder = _folder(cache_dir)
    removed, kept = clean(folder, unused_seconds=_seconds(older_than), dry_run=dry_run)
    screen.document(
        CacheCleanAnswer(
            cache_dir=str(folder),
            removed=[CacheEntryAnswer(**_facts(entry)) for entry in removed],
            kept=[KeptEntryAnswer(**_facts(entry), reason=reason) for entry, reason in kept],
            dry_run=dry_run,
        )
    )
    freed = format_bytes(sum(entry.size_bytes for entry in removed))
    screen.table(f"{'would remove' if dry_run else 'removed'}: {freed}", COLUMNS, [_row(entry) for entry in removed])
    for entry, reason in kept:
        screen.message(f"kept {entry.path}: {reason}")


COLUMNS = ["entry", "size", "holds", "last used", "by"]


def _row(entry: CacheEntry) -> list[str]:
    by = str(entry.uses[0]) if entry.uses else ""
    live = " (live)" if entry.live and entry.uses else ""
    return [entry.path.name, format_bytes(entry.size_bytes), entry.what, f"{format_age(time.time() - entry.last_used)} ago", by + live]


def _facts(entry: CacheEntry) -> dict[str, Any]:
    from fsdp_tune.jobs.answers import CacheUseAnswer

    return {
        "path": str(entry.path),
        "holds": entry.what,
        "size_bytes": entry.size_bytes,
        "last_used": entry.last_used,
        "uses": [CacheUseAnswer(use.time, use.recipe, use.run, live=use in entry.live) for use in entry.uses],
    }


def _folder(cache_dir: Path | None) -> Path:
    from fsdp_tune.core.processes import default_cache_directory

    if cache_dir is not None and not cache_dir.is_dir():
        raise usage_error("no-cache", f"the directory `{cache_dir}` does not exist", hint="`data.cache_dir` of the recipe names it")
    return (cache_dir or default_cache_directory()).absolute()


def _seconds(older_than: str | None) -> float:
    try:
        return parse_seconds(older_than) if older_than is not None else 0.0
    except ValueError as error:
        raise usage_error("usage", f"`--older-than`: {error}", hint="for example `--older-than 30d`") from error
