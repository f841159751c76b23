"""Checksums that object stores compute of what they have received, computed here of what is sent."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping

PART_BYTES = 64 << 20
"""Size of the parts of a large file, which are sent one after another. S3 allows 10,000 of them."""


class Checksums:
    """The checksums of bytes that stores compute too: MD5 (S3 as ETag, Google in base64), and S3's of a file
    in parts.

    A store without one of them is read back: encrypted with a key of one's own, its ETag is not of the bytes,
    and Azure's `content_md5` is what the client sent.
    """

    def __init__(self) -> None:
        self._whole, self._part = (hashlib.md5(usedforsecurity=False) for _ in range(2))
        self._part_bytes = 0
        self._parts: list[bytes] = []

    def update(self, data: bytes) -> None:
        self._whole.update(data)
        while data:
            taken = data[: PART_BYTES - self._part_bytes]
            self._part.update(taken)
            self._part_bytes += len(taken)
            data = data[len(taken) :]
            if self._part_bytes == PART_BYTES:
                self._end_part()

    def _end_part(self) -> None:
        self._parts.append(self._part.digest())
        self._part, self._part_bytes = hashlib.md5(usedforsecurity=False), 0

    def are_those_of(self, info: Mapping[str, object]) -> bool:
        """Return whether `fsspec`'s description of the file has one of these checksums."""
        if self._part_bytes:
            self._end_part()
        md5 = self._whole
        of_parts = (
            f"{hashlib.md5(b''.join(self._parts), usedforsecurity=False).hexdigest()}-{len(self._parts)}"
        )
        known = {md5.hexdigest(), base64.b64encode(md5.digest()).decode(), of_parts}
        return any(str(info.get(key)).strip('"') in known for key in _CHECKSUM_KEYS)


_CHECKSUM_KEYS = ("ETag", "etag", "md5Hash")
