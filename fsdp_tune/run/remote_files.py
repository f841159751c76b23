"""Files below a URL: listed, read, written and removed, with transient errors repeated after a wait.

URLs are those of `fsspec`. An object store has no rename and shows a file only when it is complete; a local
directory (`file://`) gets the same from a rename.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Literal
from urllib.parse import urlsplit

from fsdp_tune.core.atomic import DISK, stage_path, write_file
from fsdp_tune.core.files import is_inside
from fsdp_tune.core.library_errors import first_line
from fsdp_tune.run.manifest import DIGEST_CHUNK_BYTES, Digester, FileEntry
from fsdp_tune.run.remote_requests import (
    ContentError,
    NoConditionalWritesError,
    UrlError,
    has_no_conditions,
    is_already_there,
    is_beyond_the_end,
    retried,
)
from fsdp_tune.run.store_checksums import PART_BYTES, Checksums

PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "abfss": "adlfs"}
"""Packages that `fsspec` needs for a protocol."""
STAMP_KEYS = (
    "ETag",
    "etag",
    "blob_id",
    "md5Hash",
    "content_md5",
    "generation",
    "LastModified",
    "last_modified",
    "mtime",
    "created",
)
"""Keys of `fsspec`'s `info` that change when a file is written; each file system has one of them."""

Verified = Literal["the store's checksum", "reading back"]
"""How the bytes in a store were compared with those that were sent: by the checksum that the store computed,
or by reading them once."""


@dataclass(frozen=True, slots=True)
class RemoteEntry:
    """A file as a listing describes it."""

    size_bytes: int
    stamp: str
    """Changes when the file is written; empty if the listing has nothing that does."""


class RemoteDirectory:
    """The files below a URL, by their POSIX paths relative to it. Every method raises `UrlError` if the store
    refuses or fails."""

    def __init__(self, url: str) -> None:
        """Connects to nothing. Raises: UrlError if a package is missing."""
        self.url = url.rstrip("/")
        self.protocol = urlsplit(url).scheme
        self._is_local = self.protocol == "file"
        # Each request of botocore is repeated by s3fs and by `retried`; a third layer would make an outage
        # last a quarter of an hour.
        options: dict[str, object] = (
            {"config_kwargs": {"retries": {"max_attempts": 1}}} if self.protocol == "s3" else {}
        )
        try:
            self._files, self._root = import_module("fsspec.core").url_to_fs(self.url, **options)
        except ImportError as error:
            raise UrlError(first_line(error), "package") from error
        except ValueError as error:
            raise UrlError(first_line(error), "other") from error

    def _path(self, name: str) -> str:
        if not is_inside(name):
            raise UrlError(f"`{name}` leads out of the directory", "other")
        return f"{self._root}/{name}"

    def list(self, folder: str = "") -> dict[str, RemoteEntry]:
        """Return the files below `folder`, or all of them; {} if there are none. Names that `is_inside`
        refuses are left out."""
        top = self._path(folder) if folder else self._root

        def find() -> dict[str, RemoteEntry]:
            self._files.invalidate_cache()
            try:
                found: dict[str, dict[str, object]] = self._files.find(top, detail=True)
            except FileNotFoundError:
                return {}
            prefix = f"{self._root}/".lstrip("/")
            names = {path.lstrip("/").removeprefix(prefix): info for path, info in found.items()}
            return {name: _entry(info) for name, info in names.items() if is_inside(name)}

        return retried(find)

    def entry(self, name: str) -> RemoteEntry | None:
        """Return one file as a listing would, or None."""
        path = self._path(name)

        def find() -> RemoteEntry:
            self._files.invalidate_cache()
            return _entry(self._files.info(path))

        try:
            return retried(find)
        except UrlError as error:
            if error.refusal == "absent":
                return None
            raise

    def read(self, name: str) -> bytes | None:
        """Return the contents of a small file, or None if there is none."""
        path = self._path(name)
        try:
            return retried(lambda: bytes(self._files.cat_file(path)))
        except UrlError as error:
            if error.refusal == "absent":
                return None
            raise

    def write_verified(self, name: str, data: bytes, *, private: bool = False) -> None:
        """Replace a small file and read it back. Raises: UrlError also if the store has other bytes."""
        self.write(name, data, private=private)
        if self.read(name) != data:
            self.remove(name)
            raise UrlError(
                f"{name} was sent and reads back otherwise: the store or the way to it changes bytes"
            )

    def write(
        self, name: str, data: bytes, waits: Sequence[float] | None = None, *, private: bool = False
    ) -> None:
        """Replace a small file. `waits`: those of `retried`. `private`: on a disk, only its owner may read
        it."""
        path = self._path(name)

        def put() -> None:
            if self._is_local:
                DISK.mkdir(Path(path).parent)
                write_file(Path(path), data, private=private)
            else:
                self._files.pipe_file(path, data)

        retried(put, waits)

    def create(self, name: str, data: bytes) -> bool:
        """Write a small file unless there is one, which the store decides. Returns whether it was written;
        False also after a lost answer.

        Raises: NoConditionalWritesError, UrlError.
        """
        path = self._path(name)

        def put() -> bool | None:
            try:
                if self._is_local:
                    _create(Path(path), data)
                else:
                    self._files.pipe_file(path, data, mode="create")
            except Exception as error:
                if is_already_there(error):
                    return False
                if has_no_conditions(error):
                    return None
                raise
            return True

        if (is_written := retried(put)) is None:
            raise NoConditionalWritesError(f"{self.url} has no conditional writes")
        return is_written

    def modified(self, name: str) -> float | None:
        """Return when a file was written, in seconds by the clock of the store, or None if there is none."""
        path = self._path(name)

        def find() -> float:
            self._files.invalidate_cache()
            return float(self._files.modified(path).timestamp())

        try:
            return retried(find)
        except UrlError as error:
            if error.refusal == "absent":
                return None
            raise

    def has_place(self) -> bool:
        """Return whether the directory above this one is there, which on a disk may be one that is not
        mounted."""
        return not self._is_local or Path(self._root).parent.is_dir()

    def remove(self, name: str) -> None:
        """Remove a file; nothing happens if there is none."""
        path = self._path(name)

        def remove() -> None:
            with suppress(FileNotFoundError):
                self._files.rm_file(path)

        retried(remove)

    def remove_empty_folders(self, folder: str) -> None:
        """Remove `folder` with its folders if no file is left in them, which only a file system shows."""
        if self._is_local:
            top = Path(self._path(folder))
            folders = (
                sorted((path for path in top.rglob("*") if path.is_dir()), reverse=True)
                if top.is_dir()
                else []
            )
            for path in (*folders, top):
                with suppress(OSError):
                    path.rmdir()

    def send(
        self,
        source: Path,
        name: str,
        entry: FileEntry,
        advance: Callable[[int], object],
        check: Callable[[], object] = lambda: None,
    ) -> Verified:
        """Write a file from a local one, hashed as it is sent, and compare what is there. A file of other
        contents is not written.

        `advance` gets the bytes sent, negative for those of an attempt that failed. `check` is called before
        the file appears, and may raise UrlError. On a disk, what only its owner may read stays so. Raises:
        ContentError if the local file differs from `entry`, OSError if it cannot be read.
        """
        path = self._path(name)
        with open(source, "rb") as file:
            is_private = not os.fstat(file.fileno()).st_mode & 0o077

            def attempt() -> Verified:
                digester, checksums = Digester(), Checksums()
                file.seek(0)
                with _one_attempt(advance) as count:
                    with self._target(path, is_private=is_private) as write:
                        while chunk := file.read(DIGEST_CHUNK_BYTES):
                            digester.update(chunk)
                            if not self._is_local:
                                checksums.update(chunk)
                            write(chunk)
                            count(len(chunk))
                        if digester.entry() != entry:
                            raise ContentError(
                                f"{source} is not what the manifest lists (its digest or size differs)"
                            )
                        check()
                    return self._verify(name, entry, checksums)

            return retried(attempt)

    def _verify(self, name: str, entry: FileEntry, sent: Checksums) -> Verified:
        """Compare a file that was just sent, and remove it if it is another one. Raises: UrlError."""
        path = self._path(name)
        self._files.invalidate_cache()
        if not self._is_local and sent.are_those_of(self._files.info(path)):
            return "the store's checksum"
        found = Digester()
        with self._files.open(path, "rb", cache_type="none", block_size=DIGEST_CHUNK_BYTES) as file:
            while chunk := file.read(DIGEST_CHUNK_BYTES):
                found.update(chunk)
        if found.entry() != entry:
            self._files.rm_file(path)
            raise UrlError(
                f"{name} was sent and reads back otherwise: the store or the way to it changes bytes"
            )
        return "reading back"

    @contextmanager
    def _target(self, path: str, *, is_private: bool) -> Iterator[Callable[[bytes], object]]:
        """Yield a function that writes to a new file, which exists when the block has succeeded."""
        if self._is_local:
            stage = stage_path(Path(path))
            DISK.mkdir(stage.parent)
            try:
                with DISK.open_private(stage) if is_private else DISK.open(stage) as file:
                    yield _flushed(file)
                    DISK.fsync(file)
                DISK.replace(stage, Path(path))
            except BaseException:
                stage.unlink(missing_ok=True)
                raise
            return
        target: Any = self._files.open(path, "wb", block_size=PART_BYTES)
        try:
            yield target.write
            target.close()
        except BaseException:
            target.closed = True  # else its finaliser completes the upload
            with suppress(Exception):
                target.discard()
            raise

    def fetch(self, name: str, target: Path, entry: FileEntry, advance: Callable[[int], object]) -> None:
        """Write a local file from the remote one, hashed as it arrives. `advance` as in `send`.

        Raises: ContentError if the remote file is missing or differs from `entry`; OSError.
        """
        digester = Digester()
        with _one_attempt(advance) as count:
            with DISK.open(target) as file:
                for start in range(0, entry.size_bytes, DIGEST_CHUNK_BYTES * 4):
                    end = min(start + DIGEST_CHUNK_BYTES * 4, entry.size_bytes)
                    data = self._read_range(name, start, end)
                    digester.update(data)
                    DISK.write(file, data)
                    count(len(data))
                DISK.fsync(file)
            if digester.entry() != entry:
                raise ContentError(
                    f"{self.url}/{name} is not what its manifest lists (its digest or size differs)"
                )

    def _read_range(self, name: str, start: int, end: int) -> bytes:
        """Return bytes `start` to `end` of a file. Raises: ContentError if the file is missing or shorter;
        UrlError."""
        path = self._path(name)

        def read() -> bytes:
            try:
                data = bytes(self._files.cat_file(path, start=start, end=end))
            except Exception as error:
                if is_beyond_the_end(error):
                    raise ContentError(f"{self.url}/{name} is shorter than its manifest lists") from error
                raise
            if len(data) != end - start:
                raise ContentError(f"{self.url}/{name} is shorter than its manifest lists")
            return data

        try:
            return retried(read)
        except UrlError as error:
            if error.refusal == "absent":
                raise ContentError(f"{self.url}/{name} is missing") from error
            raise


@contextmanager
def _one_attempt(advance: Callable[[int], object]) -> Iterator[Callable[[int], None]]:
    """Yield a function that calls `advance` with a number of bytes. If the block fails, what was counted is
    taken back."""
    counted = 0

    def count(size_bytes: int) -> None:
        nonlocal counted
        advance(size_bytes)
        counted += size_bytes

    try:
        yield count
    except BaseException:
        advance(-counted)
        raise


def _flushed(file: IO[bytes]) -> Callable[[bytes], object]:
    """Return a function that writes to a file and waits for the disk every `PART_BYTES`, so that bytes count
    as sent when they are."""
    waiting = 0

    def write(data: bytes) -> None:
        nonlocal waiting
        DISK.write(file, data)
        waiting += len(data)
        if waiting >= PART_BYTES:
            DISK.fsync(file)
            waiting = 0

    return write


def _create(path: Path, data: bytes) -> None:
    """Write a file. Raises: FileExistsError if there is one."""
    DISK.mkdir(path.parent)
    with DISK.open(path, "xb") as file:
        try:
            DISK.write(file, data)
            DISK.fsync(file)
        except BaseException:  # else it counts as another command's
            path.unlink(missing_ok=True)
            raise


def _entry(info: dict[str, Any]) -> RemoteEntry:
    return RemoteEntry(
        int(info["size"] or 0), next((str(info[key]) for key in STAMP_KEYS if info.get(key)), "")
    )
