"""Pickles from checkpoints are read as data: nothing that they name is run, and none can exhaust memory or
crash the process."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import resource
import signal
import struct
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_tune.core.signals import StoppedBySignal
from fsdp_tune.core.tensors.archive import NAMES as TENSOR_NAMES
from fsdp_tune.core.tensors.dcp_metadata import NAMES as METADATA_NAMES
from fsdp_tune.core.tensors.plain_pickle import AllowedGlobal, Record, Refused, load

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**200), 2**200)
    | st.floats(allow_nan=False)
    | st.text(max_size=300),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=5)
    ),
    max_leaves=15,
)


@settings(max_examples=50, deadline=None)
@given(PLAIN, st.sampled_from([2, 3, 4, 5]))
def test_plain_data_equal_pickle(value, protocol):
    assert load(pickle.dumps(value, protocol), {}) == value


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused_or_plain_data(noise):
    with contextlib.suppress(Refused):
        load(b"\x80\x04" + noise, METADATA_NAMES)


class Calls:
    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


def opcode(*parts: bytes) -> bytes:
    return b"\x80\x04" + b"".join(parts) + b"."


def name(module: str, attribute: str) -> bytes:
    return f"c{module}\n{attribute}\n".encode()


HOSTILE = {
    "os.system": pickle.dumps(Calls(os.system, "touch /tmp/sentinel")),
    "eval": pickle.dumps(Calls(eval, "1+1")),
    "exec": opcode(name("builtins", "exec"), b"X\x01\0\0\x001\x85R"),
    "getattr chain": opcode(name("builtins", "getattr"), name("os", "system"), b"\x85R"),
    "attribute of a function": opcode(
        name("builtins", "getattr"), name("torch", "Size"), b"X\x01\0\0\0a\x86R"
    ),
    "attribute of text": opcode(name("builtins", "getattr"), b"X\x01\0\0\0aX\x01\0\0\0b\x86R"),
    "attribute without a name": opcode(
        name("builtins", "getattr"),
        name("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
        b"\x85R",
    ),
    "load from bytes": opcode(name("torch.storage", "_load_from_bytes"), b"C\x01a\x85R"),
    "import": opcode(name("builtins", "__import__"), b"X\x02\0\0\0os\x85R"),
    "dotted name": opcode(b"\x8c\x05torch\x8c\x12serialization.load\x93)R"),
    "torch.load": opcode(name("torch", "load"), b")R"),
    "numpy scalar": opcode(name("numpy.core.multiarray", "_reconstruct"), b")R"),
    "subprocess": opcode(name("subprocess", "Popen"), b")R"),
    "call of a record class": opcode(name("torch.distributed.checkpoint.metadata", "Metadata"), b")R"),
    "object of a function": opcode(name("torch", "Size"), b")\x81"),
    "object with arguments": opcode(
        name("torch.distributed.checkpoint.metadata", "Metadata"), b"K\x01\x85\x81"
    ),
    "state of a class": opcode(name("torch.distributed.checkpoint.metadata", "Metadata"), b"}b"),
    "state twice": opcode(name("torch.distributed.checkpoint.metadata", "Metadata"), b")\x81}b}b"),
    "state of a list": opcode(b"]}b"),
    "items of a class": opcode(name("torch.distributed.checkpoint.metadata", "Metadata"), b"K\x01K\x02s"),
    "appending to a tuple": opcode(b")K\x01a"),
    "call of a string": opcode(b"X\x01\0\0\0a)R"),
    "extension registry": opcode(b"\x82\x01"),
    "old-style instance": opcode(b"(ios\nsystem\n"),
    "old-style object": opcode(b"(", name("os", "system"), b"o"),
    "new with keywords": opcode(name("torch", "Size"), b")}\x92"),
    "persistent id in text": opcode(b"Pabc\n"),
    "persistent id": opcode(b"K\x01Q"),
    "recall of nothing": opcode(b"h\x07"),
    "tuple as a key": opcode(b"})K\x01s"),
    "list as a key": opcode(b"}]K\x01s"),
    "odd number of items": opcode(b"}(K\x01u"),
    "no mark": opcode(b"t"),
    "mark as a value": opcode(b"(\x85"),
    "empty stack": opcode(b""),
    "out-of-band buffer": opcode(b"\x97"),
    "Size of text": opcode(name("torch", "Size"), b"X\x01\0\0\0a\x85\x85R"),
    "negative Size": opcode(name("torch", "Size"), b"J\xff\xff\xff\xff\x85\x85R"),
    "no end": b"\x80\x04K\x01",
    "bad utf-8": opcode(b"\x8c\x01\xff"),
}


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("names", [METADATA_NAMES, TENSOR_NAMES], ids=["metadata", "tensors"])
def test_hostile_pickles_are_refused(kind, names):
    with pytest.raises(Refused):
        load(HOSTILE[kind], names)


def test_refused_values_are_named():
    with pytest.raises(Refused, match=r"posix\.system.*nothing was run"):
        load(HOSTILE["os.system"], METADATA_NAMES)


@pytest.mark.parametrize(
    "bomb",
    [
        b"X" + struct.pack("<I", 2**32 - 1) + b"short",
        b"\x8d" + struct.pack("<Q", 2**40),
        b"\x8e" + struct.pack("<Q", 2**40),
        b"\x96" + struct.pack("<Q", 2**33),
        b"B" + struct.pack("<I", 2**31),
        b"\x8b" + struct.pack("<i", 2**31 - 1),
        b"T" + struct.pack("<i", 2**31 - 1),
    ],
    ids=["BINUNICODE", "BINUNICODE8", "BINBYTES8", "BYTEARRAY8", "BINBYTES", "LONG4", "BINSTRING"],
)
def test_single_opcode_cannot_exhaust_memory(bomb):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(Refused):
        load(opcode(bomb), METADATA_NAMES)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 << 10


def test_member_of_an_enum_is_read_as_every_python_writes_it():
    """Python 3.11.2, of Debian 12, writes `getattr(Enum, "NAME")`, and later ones `Enum(value)`."""
    kind = name("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING")
    assert load(opcode(kind, b"K\x00\x85R"), METADATA_NAMES) is None
    assert load(opcode(name("builtins", "getattr"), kind, b"X\x05\0\0\0TORCH\x86R"), METADATA_NAMES) is None


def test_huge_memo_index_allocates_nothing():
    assert load(opcode(b"K\x07r" + struct.pack("<I", 2**32 - 1)), {}) == 7


def test_deep_nesting_does_not_overflow_the_stack():
    value = load(opcode(b"]" * 1, b"\x85" * 200_000), {})
    depth = 0
    while value:
        value, depth = value[0], depth + 1
    assert depth == 200_000


def test_every_record_keeps_the_fields_that_torch_wrote(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": {"w": torch.ones(2, 3)}, "n": 1}, storage_writer=dcp.FileSystemWriter(tmp_path))
    raw = (tmp_path / ".metadata").read_bytes()
    ours, theirs = load(raw, METADATA_NAMES), pickle.loads(raw)

    def same(one, other):
        if isinstance(one, Record):
            assert one.kind.name == type(other).__name__
            for field in one.kind.fields:
                same(one.get(field), getattr(other, field, None))
        elif isinstance(one, AllowedGlobal):
            assert one.value.name == str(other).removeprefix("torch.")
        elif isinstance(one, dict):
            for (key, value), (their_key, their_value) in zip(one.items(), other.items(), strict=True):
                same(key, their_key)
                same(value, their_value)
        elif isinstance(one, (list, tuple)):
            assert len(one) == len(other)
            for pair in zip(one, other, strict=True):
                same(*pair)
        else:
            assert one == other

    same(ours, theirs)


def test_truncated_pickle_is_refused_at_every_length():
    stream = io.BytesIO()
    pickle.dump({"a": [1, 2.5, ("x", None)], "b": {"c": 2**70}}, stream)
    raw = stream.getvalue()
    for length in range(len(raw)):
        with pytest.raises(Refused):
            load(raw[:length], {})


def test_stop_signal_while_a_pickle_is_read_is_not_damage() -> None:
    class Persistent(pickle.Pickler):
        def persistent_id(self, value: object) -> str | None:
            return "id" if value == "tensor" else None

    def stopped(_: object) -> object:
        raise StoppedBySignal(signal.SIGTERM)

    Persistent(file := io.BytesIO()).dump(["tensor"])
    with pytest.raises(StoppedBySignal):
        load(file.getvalue(), TENSOR_NAMES, persistent=stopped)
