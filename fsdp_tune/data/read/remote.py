"""Read files at URLs in blocks. Blocks are larger the longer a file is read in sequence; a request that fails is repeated after a wait.

HTTP uses `urllib`. Other protocols are file systems of `fsspec`, most of which need a package, such as s3fs for s3.
"""

from __future__ import annotations

import io
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import PurePosixPath
from typing import Any, TypeVar

from fsdp_tune.core.errors import FsdpTuneError, Where, usage_error
from fsdp_tune.core.hub import first_line

PROTOCOLS = ("http", "https", "s3", "gs", "gcs", "az", "abfs", "abfss", "hf")
"""Others are refused: chains such as `filecache::` or `zip://` write to this disk or open further files."""
PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "abfss": "adlfs"}
STAMP_KEYS = ("ETag", "etag", "blob_id", "md5Hash", "content_md5", "generation", "LastModified", "last_modified", "mtime", "created")
"""Keys of `fsspec`'s `info` that change when a file is written; each file system has one of them."""
FIRST_BLOCK, LARGEST_BLOCK = 256 << 10, 8 << 20
WAITS = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds before a request is repeated."""
TIMEOUT_SECONDS = 60.0

T = TypeVar("T")

_URL = re.compile(r"(?P<protocol>[a-z][a-z0-9+.-]*)(://|::)", re.IGNORECASE)
_PINNED = re.compile(r"hf://[^@]+@[0-9a-f]{40}/")


class UrlError(OSError):
    """A file at a URL cannot be read; the message is the reason."""


@dataclass(frozen=True, slots=True)
class RemoteInfo:
    size: int
    stamp: str
    """Changes when the file is written; empty if the server returns nothing that does."""


def is_url(path: str) -> bool:
    return _URL.match(path) is not None


def url_path(url: str) -> PurePosixPath:
    """Return the path of a URL without query."""
    return PurePosixPath(urllib.parse.urlsplit(url).path)


def check_protocol(url: str, where: Where) -> None:
    """Raises: usage error (exit 2) if rows are not read by the protocol of `url`, or if it needs a package."""
    match = _URL.match(url)
    protocol = match["protocol"].lower() if match else ""
    if protocol not in PROTOCOLS or "::" in url:
        name = f"{protocol}::" if match and match[2] == "::" else f"{protocol}://"
        hint = f"protocols are: {', '.join(PROTOCOLS)}; a local file is given by its path"
        raise usage_error("data-unreadable", f"`{url}`: files are not read by `{name}` or by chained protocols", where=where, hint=hint)
    try:
        _file_system(url)
    except ImportError as error:
        package = PACKAGES.get(protocol, "fsspec")
        raise usage_error("data-unreadable", f"`{url}`: {first_line(error)}", where=where, hint=f"`pip install {package}`") from error


def find_urls(pattern: str) -> list[str]:
    """Return the files at a URL, which may be a glob or a directory unless it is http. Raises: UrlError."""
    if pattern.startswith(("http://", "https://")):
        return [pattern]
    files, path = _file_system(pattern)

    def find() -> list[str]:
        found = files.glob(path) if any(character in path for character in "*?[") else files.find(path)
        return sorted(str(files.unstrip_protocol(name)) for name in found)

    return _retried(find)


def remote_info(url: str, *, fresh: bool = False) -> RemoteInfo:
    """Return size and stamp of a file; `fresh` ignores cached listings. Raises: UrlError."""
    if url.startswith(("http://", "https://")):
        return _retried(lambda: _http_range(url, 0, 1)[1])
    files, path = _file_system(url)
    if fresh and not _PINNED.match(url):
        files.invalidate_cache()
    info = _retried(lambda: files.info(path))
    return RemoteInfo(int(info["size"]), next((str(info[key]) for key in STAMP_KEYS if info.get(key)), ""))


class RemoteFile(io.RawIOBase):
    """A file at a URL, opened for reading."""

    def __init__(self, url: str) -> None:
        self._url, self._size = url, remote_info(url).size
        self._at, self._start = 0, 0
        self._block: bytes = b""
        self._length = FIRST_BLOCK

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        end = self._start + len(self._block)
        if not self._start <= self._at < end:
            if self._at >= self._size:
                return 0
            self._length = min(2 * self._length, LARGEST_BLOCK) if self._at == end else FIRST_BLOCK
            self._start, self._block = self._at, self._fetch(self._at, min(self._at + max(self._length, len(buffer)), self._size))
        part = self._block[self._at - self._start :][: len(buffer)]
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)

    def _fetch(self, start: int, end: int) -> bytes:
        def fetch() -> bytes:
            if self._url.startswith(("http://", "https://")):
                data: bytes = _http_range(self._url, start, end)[0]
            else:
                files, path = _file_system(self._url)
                options = {"cache_type": "none"} if self._url.startswith("hf://") else {}
                data = files.cat_file(path, start=start, end=end, **options)
            if len(data) != end - start:
                raise UrlError(f"{len(data)} of {end - start} bytes from byte {start} were received")
            return data

        return _retried(fetch)


def _file_system(url: str) -> tuple[Any, str]:
    if url.startswith(("http://", "https://")):
        return None, url
    return import_module("fsspec.core").url_to_fs(url)


def _http_range(url: str, start: int, end: int) -> tuple[bytes, RemoteInfo]:
    """Return the bytes from `start` to `end`, with size and stamp of the file."""
    request = urllib.request.Request(url, headers={"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
            status, headers = response.status, response.headers
            data = response.read() if status == 206 else b""
    except urllib.error.HTTPError as error:
        error.close()
        if error.code != 416 or not (error.headers.get("Content-Range") or "").endswith("/0"):
            raise
        return b"", RemoteInfo(0, _http_stamp(error.headers))  # a file without bytes has no range
    total = (headers.get("Content-Range") or "").rpartition("/")[2]
    if status != 206 or not total.isdigit():
        raise PermissionError("the server does not return ranges of bytes; download the file")
    return data, RemoteInfo(int(total), _http_stamp(headers))


def _http_stamp(headers: Any) -> str:
    return str(headers.get("ETag") or headers.get("Last-Modified") or "")


def _retried(request: Callable[[], T]) -> T:
    """Return the result of `request`, repeated after transient errors. Raises: UrlError."""
    for wait in (*WAITS, None):
        try:
            return request()
        except FsdpTuneError:  # a signal that ends the command may arrive here
            raise
        except Exception as error:
            if not _is_transient(error):
                raise UrlError(_reason(error)) from error
            if wait is None:
                raise UrlError(f"{_reason(error)} ({len(WAITS) + 1} attempts)") from error
            time.sleep(wait)
    raise AssertionError("the last attempt returns or raises")


def _is_transient(error: Exception) -> bool:
    status = getattr(error, "code", None) or getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(status, int):
        return status in (408, 429) or status >= 500
    return not isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError | ImportError | TypeError | ValueError)


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "it does not exist"
    if isinstance(error, urllib.error.HTTPError):
        return f"the server responds with {error.code} {error.reason}"
    return str(error.reason) if isinstance(error, urllib.error.URLError) else first_line(error)
