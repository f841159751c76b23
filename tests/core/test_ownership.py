"""The record of an owner in a lock file, which may be damaged."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from fsdp_tune.core.ownership import parse_owner, this_owner


def test_record_of_an_owner_reads_back() -> None:
    owner = this_owner()
    assert parse_owner(json.dumps(asdict(owner)).encode()) == owner


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pid", "1e999"),
        ("pid", '"x"'),
        ("pid", "null"),
        ("since", "NaN"),
        ("since", "1e300"),
        ("since", "-1"),
        ("since", "[]"),
    ],
)
def test_damaged_field_is_no_owner(field: str, value: str) -> None:
    """A time that no clock has would otherwise fail when the owner is named in a message."""
    fields = {name: json.dumps(each) for name, each in asdict(this_owner()).items()} | {field: value}
    raw = "{" + ", ".join(f'"{name}": {each}' for name, each in fields.items()) + "}"
    assert parse_owner(raw.encode()) is None


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"7", b"{}", b"\xff", b"[" * 100_000], ids=lambda raw: str(raw[:9])
)
def test_damaged_record_is_no_owner(raw: bytes) -> None:
    assert parse_owner(raw) is None
