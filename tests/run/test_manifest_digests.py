from __future__ import annotations

import hashlib

from fsdp_tune.run.manifest import digest, digest_number


def test_digest_is_of_all_parts_and_stays_between_versions() -> None:
    assert digest("a", b"b") == hashlib.blake2b(b"a\0b", digest_size=8).hexdigest()
    assert digest("a", "b") != digest("ab")
    assert digest("\udcff") != digest("?"), "names of files that are not UTF-8"


def test_number_is_the_digest() -> None:
    assert (
        digest_number("row", size=7)
        == int.from_bytes(hashlib.blake2b(b"row", digest_size=7).digest(), "big")
        < 256**7
    )
