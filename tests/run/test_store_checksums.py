"""Checksums of bytes that are sent are those that stores compute."""

from __future__ import annotations

import hashlib

import pytest

from fsdp_tune.run import store_checksums
from fsdp_tune.run.store_checksums import Checksums


@pytest.mark.parametrize(
    ("info", "is_known"),
    [
        ({"ETag": '"5d41402abc4b2a76b9719d911017c592"'}, True),
        ({"md5Hash": "XUFAKrxLKna5cZ2REBfFkg=="}, True),
        ({"ETag": '"0d0b5a1ff8b3a3bcd7dcc12f0e7d9d9b"'}, False),
        ({"content_md5": "XUFAKrxLKna5cZ2REBfFkg=="}, False),  # as the client sent it
        ({}, False),
    ],
)
def test_checksum_of_a_store_is_compared_with_the_bytes_sent(info: dict[str, str], *, is_known: bool) -> None:
    sent = Checksums()
    sent.update(b"hel")
    sent.update(b"lo")
    assert sent.are_those_of(info) is is_known


def test_checksum_of_a_file_in_parts_is_that_of_s3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_checksums, "PART_BYTES", 4)
    sent = Checksums()
    for piece in (b"abc", b"defgh", b"ij"):
        sent.update(piece)
    parts = b"".join(hashlib.md5(part, usedforsecurity=False).digest() for part in (b"abcd", b"efgh", b"ij"))
    assert sent.are_those_of({"ETag": f'"{hashlib.md5(parts, usedforsecurity=False).hexdigest()}-3"'})
