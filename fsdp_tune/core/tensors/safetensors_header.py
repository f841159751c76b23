"""The header of a safetensors file: read and validated, and written, for ranks and for merges.

The format is https://github.com/huggingface/safetensors: eight bytes of length, a JSON object, and the
tensors' bytes without a hole. The caller maps element types to those of torch or numpy.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation
_LENGTH_BYTES = 8


class DamagedHeader(ValueError):
    """The header is invalid; the message is the reason, and the caller adds the file."""


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """One tensor of a file; `dtype` is safetensors' name, `first_byte` counts from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    first_byte: int
    size_bytes: int


def read_header(
    read: Callable[[int, int], bytes], size_bytes: int, item_bytes: Mapping[str, int]
) -> list[HeaderEntry]:
    """Return the tensors of a file of `size_bytes`, in the order of their bytes. `read(offset, count)`
    returns bytes of the file.

    `item_bytes` is the size of an element by the name of its type; sizes of other types are not checked.
    Raises: DamagedHeader for holes, overlaps, duplicates and wrong sizes.
    """
    header, base = _header(read, size_bytes)
    entries = [
        _entry(name, value, base, item_bytes) for name, value in header.items() if name != "__metadata__"
    ]
    entries.sort(key=lambda entry: (entry.first_byte, entry.size_bytes))
    at = base
    for entry in entries:
        if entry.first_byte != at:
            raise DamagedHeader(
                f"`{entry.name}` begins at byte {entry.first_byte:,} where byte {at:,} is due (a "
                "hole or an overlap)"
            )
        at += entry.size_bytes
    if at != size_bytes:
        raise DamagedHeader(f"it is {size_bytes:,} bytes long where its header describes {at:,}")
    return entries


def header_bytes(
    tensors: Iterable[tuple[str, str, Sequence[int], int]],
    metadata: Mapping[str, str],
    *,
    alignment_bytes: int = 8,
) -> bytes:
    """Return the start of a file up to the first tensor, which begins at a multiple of `alignment_bytes`.

    `tensors` are (name, safetensors' name of the type, shape, bytes), in the order in which their bytes
    follow.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    for name, dtype, shape, size_bytes in tensors:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size_bytes]}
        at += size_bytes
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-(_LENGTH_BYTES + len(raw)) % alignment_bytes)
    return struct.pack("<Q", len(raw)) + raw


def read_user_metadata(read: Callable[[int, int], bytes], size_bytes: int) -> dict[str, Any]:
    """Return `__metadata__` of a file, empty if it has none. Raises: DamagedHeader."""
    found = _header(read, size_bytes)[0].get("__metadata__")
    return cast("dict[str, object]", found) if isinstance(found, dict) else {}


def _header(read: Callable[[int, int], bytes], size_bytes: int) -> tuple[dict[str, object], int]:
    """Return the header and the byte after it."""
    if size_bytes < _LENGTH_BYTES:
        raise DamagedHeader("it is too short")
    (length,) = struct.unpack("<Q", read(0, _LENGTH_BYTES))
    if length > min(MAX_HEADER_BYTES, size_bytes - _LENGTH_BYTES):
        raise DamagedHeader(f"its header claims {length:,} bytes")
    return _object(read(_LENGTH_BYTES, length)), _LENGTH_BYTES + length


def _object(raw: bytes) -> dict[str, object]:
    try:
        header: object = json.loads(raw, object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError) as error:
        raise DamagedHeader(f"its header is not a JSON object ({error})") from error
    if not isinstance(header, dict):
        raise DamagedHeader("its header is not a JSON object")
    return cast("dict[str, object]", header)


def without_duplicates(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a name occurs twice")
    return value


def _entry(name: str, value: Any, base: int, item_bytes: Mapping[str, int]) -> HeaderEntry:
    if not name.isprintable():
        raise DamagedHeader(f"a tensor has no name that can be printed: {name!r}")
    try:
        dtype, shape, (start, end) = str(value["dtype"]), tuple(value["shape"]), value["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedHeader(f"the header of `{name}` is not understood") from error
    if any(type(number) is not int or number < 0 for number in (*shape, start, end)) or end < start:
        raise DamagedHeader(f"the header of `{name}` is not understood")
    # Python's integers do not overflow
    if dtype in item_bytes and end - start != math.prod(shape) * item_bytes[dtype]:
        raise DamagedHeader(f"`{name}` of shape {list(shape)} cannot be {end - start:,} bytes long")
    return HeaderEntry(name, dtype, shape, base + start, end - start)
