from __future__ import annotations

import pytest
from safetensors import safe_open

from fsdp_tune.core.tensors.safetensors_header import (
    HeaderEntry,
    header_bytes,
    read_header,
    read_user_metadata,
)

TENSORS = (("a", "F32", (2, 3), 24), ("ü", "BF16", (0, 4), 0), ("b", "I64", (), 8))


@pytest.mark.parametrize("alignment_bytes", [8, 4096])
def test_written_header_is_read_by_us_and_by_the_library(alignment_bytes: int, tmp_path) -> None:
    start = header_bytes(TENSORS, {"format": "pt"}, alignment_bytes=alignment_bytes)
    assert len(start) % alignment_bytes == 0
    data = start + bytes(32)
    read = lambda at, count: data[at : at + count]  # noqa: E731
    offsets = (0, 24, 24)
    expected = [
        HeaderEntry(name, dtype, shape, len(start) + at, size)
        for (name, dtype, shape, size), at in zip(TENSORS, offsets, strict=True)
    ]
    assert sorted(
        read_header(read, len(data), {"F32": 4, "BF16": 2, "I64": 8}), key=lambda entry: entry.name
    ) == sorted(expected, key=lambda entry: entry.name)
    assert read_user_metadata(read, len(data)) == {"format": "pt"}
    (tmp_path / "file.safetensors").write_bytes(data)
    with safe_open(tmp_path / "file.safetensors", framework="numpy") as file:
        assert {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()} == {  # noqa: SIM118
            name: shape for name, _, shape, _ in TENSORS
        }
