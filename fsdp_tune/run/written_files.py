"""Files of a run that later commands compute with: digests are recorded where they are written, and compared
before they are used.

RUN/model has a manifest of its own. A merged model or an exported adapter has merge.json, with a digest of
every tensor, of the header of every file of weights, of every small file except the model card, which users
and `evaluate` change, and of itself. Directories that earlier versions or other tools wrote have no such
record and are used as they are.
"""

from __future__ import annotations

import functools
import json
import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import xxhash

from fsdp_tune.core.atomic import write_file
from fsdp_tune.core.errors import FailedError, Problem, Where
from fsdp_tune.core.files import read_regular
from fsdp_tune.core.values import as_mapping
from fsdp_tune.run.directory import MERGE_RECORD, RunDir
from fsdp_tune.run.manifest import (
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    damage,
    digest_data,
    digest_file,
    digest_of_values,
    list_files,
    read_manifest,
)

MODEL_FILES_KIND = "fsdp-tune model files"
RECORD_DIGEST = "record_digest"
_THREADS = 4
_READ_BYTES = 4 << 20


def record_model_files(folder: Path) -> None:
    """Write the manifest of the files of RUN/model, as its last file."""
    files = {name: digest_file(folder / name) for name in list_files(folder)}
    write_file(folder / MANIFEST_NAME, Manifest(MODEL_FILES_KIND, files).to_json())


def model_files(run: RunDir) -> Path:
    """Return RUN/model after its files have been compared with what was written. Raises: FailedError that
    names each that differs."""
    folder = run.model
    try:
        manifest = read_manifest(folder)
    except ValueError as error:
        raise _changed(folder, {MANIFEST_NAME: str(error)}, folder / MANIFEST_NAME) from error
    if manifest is not None and (found := damage(folder, manifest, digests=True)):
        raise _changed(folder, {each.name: each.what for each in found}, folder / MANIFEST_NAME)
    return folder


def merge_record(folder: Path) -> dict[str, Any]:
    """Return the merge.json of a directory, whose values are not verified; empty if it has none that can be
    read."""
    try:
        return as_mapping(json.loads(read_regular(folder / MERGE_RECORD)))
    except (OSError, ValueError, RecursionError):
        return {}


def seal_record(record: Mapping[str, object]) -> dict[str, object]:
    """Return merge.json with a digest of its own values."""
    return {**record, RECORD_DIGEST: digest_of_values(record)}


def unsealed(record: dict[str, object]) -> dict[str, object]:
    """Return merge.json without the digest of its values, for a copy in which some of them are others."""
    return {key: value for key, value in record.items() if key != RECORD_DIGEST}


def require_unchanged_output(folder: Path) -> None:
    """Compare the files of a merged model or an exported adapter with its merge.json. Every byte of the
    weights is read, in a few threads.

    Raises: FailedError that names each file that differs.
    """
    # else any directory, such as `/`, would be searched in full
    if not os.path.lexists(folder / MERGE_RECORD):
        return
    files = [path for path in folder.rglob("*") if path.is_file()]
    _compare_output(folder, tuple(sorted((str(path), *_identity(path)) for path in files)))


def _identity(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


@functools.lru_cache(maxsize=16)
def _compare_output(folder: Path, _state: tuple[object, ...]) -> None:
    """Compare once in a process as long as the files stay as they are."""
    path = folder / MERGE_RECORD
    try:
        read: object = json.loads(read_regular(path))
    except FileNotFoundError:
        return
    except (OSError, ValueError, RecursionError) as error:
        raise _changed(folder, {MERGE_RECORD: f"it cannot be read as JSON ({error})"}, path) from error
    record = cast(dict[str, object], read) if isinstance(read, dict) else {}
    if RECORD_DIGEST not in record:
        return  # of an earlier version, or downloaded from the hub
    if digest_of_values(unsealed(record)) != record[RECORD_DIGEST]:
        raise _changed(
            folder, {MERGE_RECORD: "its values are not those that were written (digest differs)"}, path
        )
    found = {name: what for name, what in _differing_files(folder, record) if what is not None}
    if found:
        raise _changed(folder, found, path)


def _differing_files(folder: Path, record: dict[str, Any]) -> Iterator[tuple[str, str | None]]:
    for name, raw in record["contents"].items():
        entry = FileEntry(int(raw["size_bytes"]), str(raw["digest"]))
        yield name, _difference(lambda path, entry=entry: _small_differs(path, entry), folder / name)
    tensors: dict[str, dict[str, str]] = {}
    for name, raw in record["tensors"].items():
        tensors.setdefault(raw["file"], {})[name] = raw["digest"]
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="digest") as pool:
        for name, header in record["headers"].items():
            entry = FileEntry(int(header["size_bytes"]), str(header["digest"]))
            own = tensors.get(name, {})
            yield (
                name,
                _difference(
                    lambda path, entry=entry, own=own: _weights_differ(path, entry, own, pool), folder / name
                ),
            )


def _difference(compare: Callable[[Path], str | None], path: Path) -> str | None:
    try:
        return compare(path)
    except FileNotFoundError:
        return "missing"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"cannot be read ({error})"


def _small_differs(path: Path, entry: FileEntry) -> str | None:
    if (what := _sizes_differ(path, entry)) is not None:
        return what
    return (
        None
        if digest_file(path) == entry
        else "its contents are not those that were written (digest differs)"
    )


def _sizes_differ(path: Path, entry: FileEntry) -> str | None:
    size_bytes = path.stat().st_size
    return None if size_bytes == entry.size_bytes else f"{size_bytes} bytes instead of {entry.size_bytes}"


def _weights_differ(
    path: Path, entry: FileEntry, digests: Mapping[str, str], pool: ThreadPoolExecutor
) -> str | None:
    """`entry`: the size of the file and the digest of its header."""
    if (what := _sizes_differ(path, entry)) is not None:
        return what
    with open(path, "rb") as file:
        first = file.read(8)
        length = int.from_bytes(first, "little")
        if length > entry.size_bytes:
            return "its header is not what was written (its length differs)"
        header = first + file.read(length)
    if digest_data(header).digest != entry.digest:
        return "its header is not what was written (digest differs)"
    places = {
        name: value["data_offsets"] for name, value in json.loads(header[8:]).items() if name in digests
    }
    jobs = {
        name: pool.submit(_digest_of_part, path, len(header) + start, end - start)
        for name, (start, end) in places.items()
    }
    wrong = [name for name, job in jobs.items() if job.result() != digests[name]]
    return (
        f"`{wrong[0]}` is not what was written (the digests of {len(wrong)} tensors differ)"
        if wrong
        else None
    )


def _digest_of_part(path: Path, start: int, size_bytes: int) -> str:
    found, buffer = xxhash.xxh3_128(), memoryview(bytearray(min(_READ_BYTES, size_bytes)))
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while size_bytes and (count := os.readv(file.fileno(), [buffer[: min(len(buffer), size_bytes)]])):
            found.update(buffer[:count])
            size_bytes -= count
    return found.hexdigest()


def _changed(folder: Path, found: Mapping[str, str], record: Path) -> FailedError:
    again = f"`fsdp-tune merge-checkpoint {shlex.quote(str(folder.parent))} --overwrite`"
    restore = "restore the file from a copy of the run" if folder.name == "model" else f"merge again: {again}"
    accept = (
        f"`rm {shlex.quote(str(record))}`, if you changed it on purpose: the files are then used as they are"
    )
    problems = [
        Problem("file-changed", what, Where(str(folder / name)), ways_out=(restore, accept))
        for name, what in found.items()
    ]
    return FailedError(*problems)
