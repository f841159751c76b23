"""Find the source of an entry of `data.train` or `data.eval`: local files, a saved `datasets` directory, a
hub or a built-in data set."""

from __future__ import annotations

import difflib
import glob
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePath
from typing import Any, NoReturn, cast

from fsdp_tune.core.errors import FsdpTuneError, Where, usage_error
from fsdp_tune.core.files import expanded, pattern_below
from fsdp_tune.core.hub import hub_is_reachable
from fsdp_tune.core.values import as_items
from fsdp_tune.data.read.file_access import (
    Stamp,
    builtin_rows,
    check_protocol,
    find_urls,
    is_builtin,
    is_url,
    stamp,
    url_path,
)
from fsdp_tune.data.read.hub_sets import list_hub_files, load_from_hub, load_saved
from fsdp_tune.data.read.readers import read_rows
from fsdp_tune.data.read.row_files import BadRow, NumberedRow, dataset_rows
from fsdp_tune.recipe.extensions import find_extension
from fsdp_tune.recipe.references import can_only_be_a_path, exists
from fsdp_tune.recipe.schema.data_section import BUILDERS, DataSource
from fsdp_tune.run.manifest import Digester
from fsdp_tune.run.remote_requests import UrlError

KIND_OF_SUFFIX = {
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".txt": "text",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".tar": "tar",
}


COMPRESSED = {".bz2": "bunzip2", ".xz": "unxz", ".zip": "unzip", ".7z": "7z x"}


OF_ROWS = "rows"
"""Begins a digest that is of rows, and not of a file."""


SPLIT_WORDS = {
    "train": ("train", "training"),
    "test": ("test", "testing", "eval", "evaluation"),
    "validation": ("validation", "valid", "val", "dev"),
}
"""The words in file names by which `datasets` assigns the files of a directory to splits."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    path: Path | str
    """A str is a URL."""
    kind: str


@dataclass(frozen=True, slots=True)
class RowSource:
    """The source of one entry. Rows are numbered within each of `names`, which are file names if the source
    is files."""

    entry: DataSource
    key: str
    names: tuple[str, ...]
    files: tuple[SourceFile, ...] = ()
    dataset: Any = None
    """A `datasets.Dataset`."""
    stored_in: tuple[Path, ...] = ()
    """The local files that contain the rows; empty if there are none."""
    load: Callable[..., Iterable[Any]] | None = None
    """A user's loader, called with the path and the options each time the rows are read."""
    head: int | None = None
    """Rows that `read` yields of a source that is streamed; its files are known by their stamps and not
    hashed. None = all."""

    def read(self) -> Iterator[tuple[int, NumberedRow | BadRow]]:
        """Yield rows, each with the index of its file in `names`."""
        return islice(self._read(), self.head)

    def _read(self) -> Iterator[tuple[int, NumberedRow | BadRow]]:
        if self.files:
            for number, file in enumerate(self.files):
                for row in read_rows(file.path, file.kind):
                    yield number, row
        elif self.dataset is not None:
            for row in dataset_rows(self.dataset):
                yield 0, row
        elif self.load is not None:
            for row in _loaded_rows(self.load, self.entry, self.key):
                yield 0, row
        else:
            for row in enumerate(builtin_rows(self.entry.path, self.entry.split), 1):
                yield 0, row

    def content(self, digests: Callable[[Sequence[Path]], list[str]]) -> list[str]:
        """Return digests of the files with their kind, or else of the rows themselves. Never empty.

        The kind is included because the same bytes give other rows in a .txt than in a .jsonl file.
        """
        if self.head is not None:
            return ["stream"]
        if not self.stored_in:
            return [self.rows_digest()[0]]
        kinds = [file.kind for file in self.files] or ["dataset"] * len(self.stored_in)
        return [f"{kind}:{digest}" for kind, digest in zip(kinds, digests(self.stored_in), strict=True)]

    def rows_digest(self) -> tuple[str, int]:
        """Return a digest of the rows, for a source without files, and their number. Reads all of them."""
        digester, rows = Digester(), 0
        for _, row in self.read():
            digester.update((json.dumps(row, default=repr) + "\n").encode())
            rows += 1
        return f"{OF_ROWS}:{digester.entry().digest}", rows

    def stamps(self) -> list[Stamp]:
        """Return the stamps of the files, which change when a file is written to, to detect a change while
        rows are read."""
        return [stamp(path) for path in self.stored_in]


def find_source(entry: DataSource, key: str, *, streaming: bool = False) -> RowSource:
    """Find the source of an entry; `key` is its recipe key. Raises: usage error (exit 2) if there is none, or
    if it is ambiguous.

    With `streaming`, the files may be at URLs, and those of a hub data set are not downloaded.
    """
    where = Where(key=key)
    if entry.loader is not None:
        return _loader_source(entry, key, entry.loader)
    if entry.loader_options:
        raise usage_error("contradiction", "`loader_options` has no meaning without `loader`", where=where)
    if is_builtin(entry.path):
        builtin_rows(entry.path, entry.split)
        return RowSource(entry, key, (entry.path,))
    if entry.path in BUILDERS and (entry.data_files or not Path(entry.path).exists()):
        return _builder_source(entry, key, streaming=streaming)
    if is_url(entry.path):
        return _url_source(entry, key, [entry.path], None, streaming=streaming)
    path = expanded(entry.path)
    try:
        is_directory, is_there = path.is_dir(), path.exists()
    except OSError as error:  # in a directory that may not be entered
        raise usage_error(
            "data-unreadable", f"`{path}` cannot be read: {error.strerror}", where=where
        ) from error
    if is_directory:
        return _directory_source(entry, key, path)
    if is_there or glob.has_magic(entry.path):
        _refuse(entry, where, "split", given=entry.split != "train")
        return _file_source(entry, key, _expand([str(path)], where), None)
    if can_only_be_a_path(entry.path):
        raise _not_found(str(path), where)
    if streaming and hub_is_reachable():
        return _source_of_files(entry, key, list_hub_files(entry, where), None)
    return _dataset_source(entry, key, load_from_hub(entry, where))


def is_local(entry: DataSource) -> bool:
    """Return whether `find_source` reads files of this machine alone, and runs no loader of the user."""
    if entry.loader is not None or is_builtin(entry.path):
        return False
    is_there = exists(expanded(entry.path))
    if entry.path in BUILDERS and not is_there:
        return not any("://" in str(name) for name in as_items(entry.data_files or []))
    return not is_url(entry.path) and (is_there or glob.has_magic(entry.path))


def _loader_source(entry: DataSource, key: str, loader: str) -> RowSource:
    where = Where(key=key)
    given = [
        name for name in ("name", "data_dir", "data_files", "revision") if getattr(entry, name) is not None
    ]
    given += ["split"] if entry.split != "train" else []
    if given:
        message = f"`{given[0]}` has no meaning for rows from a `loader`"
        raise usage_error("contradiction", message, where=where, hint="pass it in `loader_options`")
    return RowSource(
        entry, key, (f"{entry.path} ({loader})",), load=find_extension("loaders", loader, where).load(where)
    )


def _loaded_rows(
    load: Callable[..., Iterable[object]], entry: DataSource, key: str
) -> Iterator[NumberedRow | BadRow]:
    """Yield the rows of a user's loader, numbered from 1. Raises: usage error if the loader fails."""
    try:
        for number, row in enumerate(load(entry.path, dict(entry.loader_options)), 1):
            if isinstance(row, Mapping):
                yield number, dict(cast("Mapping[str, object]", row))
            else:
                yield BadRow(number, f"the loader returned {type(row).__name__} instead of a mapping")
    except FsdpTuneError:  # a stop signal
        raise
    except Exception as error:
        message = f"the loader `{entry.loader}` failed for `{entry.path}`: {type(error).__name__}: {error}"
        raise usage_error("extension-failed", message, where=Where(key=key)) from error


def _builder_source(entry: DataSource, key: str, *, streaming: bool) -> RowSource:
    where = Where(key=key)
    patterns = [entry.data_files] if isinstance(entry.data_files, str) else entry.data_files
    if not patterns:
        raise usage_error(
            "data-not-found",
            f"`path: {entry.path}` reads the files in `data_files`, which is unset",
            where=where,
        )
    if streaming and any(is_url(pattern) for pattern in patterns):
        return _url_source(entry, key, patterns, entry.path, streaming=streaming)
    if any("://" in pattern for pattern in patterns):
        return _dataset_source(entry, key, load_from_hub(entry, where))
    _refuse(entry, where, "split", given=entry.split != "train")
    base = expanded(entry.data_dir or "")
    return _file_source(
        entry, key, _expand([pattern_below(base, pattern) for pattern in patterns], where), entry.path
    )


def _directory_source(entry: DataSource, key: str, path: Path) -> RowSource:
    where = Where(key=key)
    root = path / entry.data_dir if entry.data_dir else path
    if (root / "state.json").is_file() or (root / "dataset_dict.json").is_file():
        return _dataset_source(entry, key, load_saved(root, entry.split, where))
    if entry.data_files:
        _refuse(entry, where, "split", given=entry.split != "train")
        patterns = [entry.data_files] if isinstance(entry.data_files, str) else entry.data_files
        return _file_source(
            entry, key, _expand([pattern_below(root, pattern) for pattern in patterns], where), None
        )
    files = sorted(_files_below(root, where))
    found = [file for file in files if _kind(file) and (file.is_file() or _leads_nowhere(file))]
    for file in files:
        if file.suffix in COMPRESSED and _kind(file.with_suffix("")) and file.with_suffix("") not in found:
            _known_kind(file, where)  # refuses it: its rows would be missing
    if not found:
        raise usage_error(
            "data-not-found",
            f"`{root}` holds no data files",
            hint=f"known endings: {' '.join(KIND_OF_SUFFIX)}",
            where=where,
        )
    return _file_source(entry, key, _readable(_of_split(found, root, entry.split, where), where), None)


def _url_source(
    entry: DataSource, key: str, patterns: Sequence[str], kind: str | None, *, streaming: bool
) -> RowSource:
    where = Where(key=key)
    if not streaming:
        hint = "set `data.streaming: true`, or download the file and give its path"
        raise usage_error(
            "data-not-found", f"`{patterns[0]}` is a URL, which only a stream reads", where=where, hint=hint
        )
    _refuse(entry, where, "split", given=entry.split != "train")
    found: list[str] = []
    for pattern in patterns:
        check_protocol(pattern, where)
        try:
            urls = find_urls(pattern)
        except UrlError as error:
            raise usage_error(
                "data-unreadable", f"`{pattern}` cannot be read: {error}", where=where
            ) from error
        is_directory = urls != [pattern] and not glob.has_magic(pattern)
        urls = [url for url in urls if _kind(url_path(url)) is not None] if is_directory else urls
        if not urls:
            raise usage_error("data-not-found", f"no file matches `{pattern}`", where=where)
        found += [url for url in urls if url not in found]
    return _file_source(entry, key, found, kind)


def _file_source(entry: DataSource, key: str, paths: Sequence[Path | str], kind: str | None) -> RowSource:
    where = Where(key=key)
    _refuse(entry, where, "name", given=entry.name is not None)
    _refuse(entry, where, "revision", given=entry.revision is not None)
    return _source_of_files(entry, key, paths, kind)


def _source_of_files(entry: DataSource, key: str, paths: Sequence[Path | str], kind: str | None) -> RowSource:
    where = Where(key=key)
    files = [SourceFile(path, kind or _known_kind(path, where)) for path in paths]
    kinds = {"lines" if file.kind == "json" else file.kind: Path(file.path).name for file in files}
    if len(kinds) > 1:
        first, second = sorted(kinds.values())[:2]
        raise usage_error(
            "mixed-files",
            f"`{entry.path}` holds files of different kinds: {first}, {second}",
            where=where,
            hint="select files by a glob, such as `data/*.jsonl`, or use a separate entry for each kind",
        )
    return RowSource(
        entry,
        key,
        tuple(str(path) for path in paths),
        tuple(files),
        stored_in=tuple(path for path in paths if isinstance(path, Path)),
    )


def _dataset_source(entry: DataSource, key: str, dataset: Any) -> RowSource:
    files = tuple(Path(file["filename"]) for file in dataset.cache_files)
    return RowSource(entry, key, (f"{entry.path} ({entry.split})",), dataset=dataset, stored_in=files)


def _expand(patterns: list[str], where: Where) -> list[Path]:
    found: list[Path] = []
    for pattern in patterns:
        names = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207  absolute patterns
        files = _readable([Path(name) for name in names], where)
        if not files and Path(pattern).is_dir():
            raise usage_error(
                "data-not-found",
                f"`{pattern}` is a directory, and `data_files` takes files",
                where=where,
                hint=f"write a glob, such as `{pattern}/*.jsonl`, or give the directory as `path`",
            )
        if not files:
            raise _not_found(pattern, where)
        found.extend(file for file in files if file not in found)
    return found


def _files_below(root: Path, where: Where) -> Iterator[Path]:
    """Yield the files of a directory and of those below it, also behind links, without hidden names; each
    directory once. Raises: usage error for one that cannot be listed."""

    def refuse(error: OSError) -> NoReturn:
        message = f"`{error.filename}` cannot be listed: {error.strerror}"
        raise usage_error("data-unreadable", message, where=where) from error

    seen = set[tuple[int, int]]()
    tops = [root]  # directories before links, so that a file has its own path
    while tops:
        for folder, folders, names in os.walk(tops.pop(0), onerror=refuse):
            status = Path(folder).stat()
            if (status.st_dev, status.st_ino) in seen:
                folders.clear()
                continue
            seen.add((status.st_dev, status.st_ino))
            folders[:] = sorted(name for name in folders if not _is_hidden(name))
            tops += [path for name in folders if (path := Path(folder, name)).is_symlink()]
            yield from (Path(folder, name) for name in names if not _is_hidden(name))


def _readable(paths: Sequence[Path], where: Where) -> list[Path]:
    """Return those that are files. Raises: usage error for a link that leads nowhere: its rows would be
    missing."""
    for path in filter(_leads_nowhere, paths):
        message = f"`{path}` is a link to `{path.readlink()}`, which does not exist"
        hint = "bring the file back, or remove the link"
        raise usage_error("data-unreadable", message, where=where, hint=hint)
    return [path for path in paths if path.is_file()]


def _leads_nowhere(path: Path) -> bool:
    return path.is_symlink() and not path.exists()


def _kind(path: PurePath) -> str | None:
    ending = path.suffix.lower()
    return KIND_OF_SUFFIX.get(path.with_suffix("").suffix.lower() if ending in (".gz", ".zst") else ending)


def _known_kind(name: Path | str, where: Where) -> str:
    path = url_path(name) if isinstance(name, str) else name
    kind = _kind(path)
    if kind is None and path.suffix in COMPRESSED:
        raise usage_error(
            "data-unreadable",
            f"`{name}`: the supported compressions are gzip and zstd",
            where=where,
            hint=f"`{COMPRESSED[path.suffix]} {path.name}`",
        )
    if kind is None:
        raise usage_error(
            "data-unreadable",
            f"`{name}`: the format cannot be derived from the ending",
            where=where,
            hint=f"rename it to one of {' '.join(KIND_OF_SUFFIX)}, or name the kind: `{{path: json, "
            f"data_files: {path.name}}}`",
        )
    return kind


def _of_split(files: list[Path], root: Path, split: str, where: Where) -> list[Path]:
    """Return the files of one split if their names contain words of splits, as in `datasets`; otherwise all
    files are `train`."""
    by_split = {
        name: [file for file in files if _names_split(file.relative_to(root), words)]
        for name, words in SPLIT_WORDS.items()
    }
    present = {name: found for name, found in by_split.items() if found} or {"train": files}
    if split not in present:
        raise usage_error(
            "no-such-split",
            f"`{root}` has no split `{split}`",
            where=where,
            hint=f"its splits are: {', '.join(present)}",
        )
    return present[split]


def _names_split(path: Path, words: tuple[str, ...]) -> bool:
    return any(re.search(rf"(?<![a-z0-9]){word}(?![a-z0-9])", str(path).lower()) for word in words)


def _is_hidden(name: str) -> bool:
    return name.startswith((".", "_"))


def _not_found(pattern: str, where: Where) -> FsdpTuneError:
    if glob.has_magic(pattern):
        return usage_error("data-not-found", f"no file matches `{pattern}`", where=where)
    path, siblings = Path(pattern).absolute(), list[str]()
    with suppress(OSError):  # no such directory, or one that may not be listed
        siblings = [sibling.name for sibling in path.parent.iterdir()]
    if close := difflib.get_close_matches(path.name, siblings, n=1):
        hint = f"did you mean `{close[0]}`?"
    elif not path.parent.is_dir():
        hint = f"there is no directory `{path.parent}`"
    else:
        hint = "`path` takes a file, a directory, a glob, or the id of a data set on the Hugging Face hub"
    return usage_error("data-not-found", f"`{path}` does not exist", where=where, hint=hint)


def _refuse(entry: DataSource, where: Where, option: str, *, given: bool) -> None:
    """Refuse a key of hub data sets that has no meaning for plain files. Raises: usage error."""
    if given:
        hint = "choose the files by `path` or `data_files`" if option == "split" else f"leave `{option}` out"
        raise usage_error(
            "no-such-split",
            f"`{entry.path}` is files: `{option}` has no meaning for them",
            where=where,
            hint=hint,
        )
