"""Digests of texts and of bytes in memory. `run.manifest` has those of files, which are made at memory speed."""

from __future__ import annotations

import hashlib


def digest(*parts: str | bytes, size: int = 8) -> str:
    """Return `2 * size` hexadecimal digits that identify `parts`, in any process and version: names of caches contain them."""
    content = b"\0".join(part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part for part in parts)
    return hashlib.blake2b(content, digest_size=size).hexdigest()


def digest_number(*parts: str | bytes, size: int = 8) -> int:
    """Return the digest as an integer below 256 ** `size`."""
    return int(digest(*parts, size=size), 16)
