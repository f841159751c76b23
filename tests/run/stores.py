"""An object store in a dictionary, in place of the one that `fsspec` opens at a URL."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from fsspec.spec import AbstractBufferedFile, AbstractFileSystem


class Store(AbstractFileSystem):
    """As S3: an object appears when its upload is complete, has no rename, and its ETag is the MD5 of its
    bytes."""

    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.objects: dict[str, bytes] = {}
        self.failures: dict[str, list[Exception]] = {}
        """By operation, what its next calls raise."""
        self.options: dict[str, Any] = {}
        """With which the store was opened."""
        self.has_checksums = True
        self.receive: Callable[[bytes], bytes] = lambda data: data
        """What the store keeps of an upload."""

    def open_url(self, url: str, **options: Any) -> tuple[Store, str]:
        """In place of `fsspec.core.url_to_fs`."""
        self.options = options
        return self, url.partition("://")[2]

    def fail(self, operation: str, *errors: Exception) -> None:
        self.failures[operation] = list(errors)

    def _called(self, operation: str) -> None:
        if left := self.failures.get(operation):
            raise left.pop(0)

    def find(self, path: str, **_: Any) -> dict[str, dict[str, Any]]:
        self._called("find")
        found = {name: self.info(name) for name in self.objects if name.startswith(f"{path}/")}
        if not found:
            raise FileNotFoundError(path)
        return found

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        self._called("info")
        data = self._object(path)
        etag = hashlib.md5(data, usedforsecurity=False).hexdigest() if self.has_checksums else "encrypted"
        return {"name": path, "size": len(data), "type": "file", "ETag": f'"{etag}"'}

    def modified(self, path: str) -> datetime:
        self._object(path)
        return datetime.fromtimestamp(1e9, UTC)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        self._called("cat_file")
        return self._object(path)[start:end]

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        self._called("pipe_file")
        if mode == "create" and path in self.objects:
            raise FileExistsError(path)
        self.objects[path] = self.receive(value)

    def rm_file(self, path: str) -> None:
        self._object(path)
        del self.objects[path]

    def _object(self, path: str) -> bytes:
        if path not in self.objects:
            raise FileNotFoundError(path)
        return self.objects[path]

    def _open(self, path: str, mode: str = "rb", **options: Any) -> _StoreFile:
        return _StoreFile(self, path, mode, **options)


class _StoreFile(AbstractBufferedFile):
    def _initiate_upload(self) -> None:
        self.parts: list[bytes] = []

    def _upload_chunk(self, final: bool = False) -> bool:
        self.parts.append(self.buffer.getvalue())
        if final:
            self.fs.objects[self.path] = self.fs.receive(b"".join(self.parts))
        return True
