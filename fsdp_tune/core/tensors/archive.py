"""Read archives of `torch.save` and pickles of checkpoints without running anything that they name.

An archive is a zip file with uncompressed members, whose ranges can be copied. The layout is that of torch's
`PyTorchStreamWriter`: `data.pkl` describes the tensors, `data/<key>` are their storages, aligned, each with
the CRC-32 of its bytes (zero in all members when `set_crc32_options(False)` was used).

`load` is Python's own interpreter of pickles with a closed list of opcodes and of names. Nothing is imported,
and the opcodes that could allocate more than the file holds, change a class, or overflow the C stack (by
hashing nested tuples) are left out or replaced. The interpreter in C is not used, because its opcodes cannot
be restricted.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import IO, TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, cast

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.core.tensors.dtypes import DTYPES, OF_STORAGE, DType, Extent, Shape

if TYPE_CHECKING:

    class _PythonUnpickler:
        """The members of `pickle._Unpickler` that are used here; typeshed does not have them all."""

        dispatch: ClassVar[dict[int, Callable[[Any], None]]]
        stack: list[Any]
        memo: object
        append: Callable[[object], None]

        def __init__(self, file: IO[bytes]) -> None: ...
        def pop_mark(self) -> list[object]: ...
        def load(self) -> Any: ...
else:
    from pickle import _Unpickler as _PythonUnpickler  # the interpreter in Python

# What torch and `pickle.dump` write for plain data, in protocols 2 to 5.
_OPCODES = [
    "PROTO",
    "FRAME",
    "MARK",
    "POP",
    "STOP",
    "NONE",
    "NEWTRUE",
    "NEWFALSE",
    "BININT",
    "BININT1",
    "BININT2",
    "LONG1",
    "BINFLOAT",
    "SHORT_BINUNICODE",
    "BINUNICODE",
    "SHORT_BINBYTES",
    "BINBYTES",
    "EMPTY_TUPLE",
    "TUPLE",
    "TUPLE1",
    "TUPLE2",
    "TUPLE3",
    "EMPTY_LIST",
    "APPEND",
    "APPENDS",
    "EMPTY_DICT",
    "SETITEM",
    "SETITEMS",
    "GLOBAL",
    "STACK_GLOBAL",
    "REDUCE",
    "NEWOBJ",
    "BUILD",
    "MEMOIZE",
    "BINPUT",
    "LONG_BINPUT",
    "BINGET",
    "LONG_BINGET",
    "BINPERSID",
]


class Refused(ValueError):
    """The pickle is damaged, or contains what plain data never needs. The message names it."""


@dataclass(frozen=True, slots=True)
class AllowedGlobal:
    """The replacement of a global name: a `value`, a function called with data (`call`), or a class of
    `Record`s with `fields`."""

    name: str
    value: Any = None
    call: Callable[[tuple[object, ...]], object] | None = None
    fields: tuple[str, ...] | None = None

    def __call__(self, *arguments: object) -> object:
        if self.call is None:
            raise Refused(f"it calls `{self.name}`")
        return self.call(arguments)


class Record:
    """Stands in for an object of an allowed class: the fields in use, and nothing else.

    `state` is a tuple in the order of the class's fields, since a checkpoint of many ranks has hundreds of
    thousands of records.
    """

    __slots__ = ("kind", "state")

    def __init__(self, kind: AllowedGlobal) -> None:
        self.kind = kind
        self.state: tuple[Any, ...] | None = None

    def set_state(self, state: object) -> None:
        """Take the fields from a dataclass's dictionary, or from the tuple that
        `TensorProperties.__getstate__` returns."""
        fields, found = self.kind.fields or (), type(state).__name__
        if isinstance(state, dict):
            by_name = cast("dict[object, object]", state)
            self.state = tuple(by_name.get(name) for name in fields)
            # the memo keeps it alive to the end, and nothing that torch writes refers to it again
            by_name.clear()
            return
        values = cast("tuple[object, ...] | None", state if isinstance(state, tuple) else None)
        if values is None or len(values) < len(fields):
            raise Refused(f"the state of a `{self.kind.name}` is a {found}")
        self.state = values[: len(fields)]

    def get(self, name: str) -> object:
        fields = self.kind.fields or ()
        return self.state[fields.index(name)] if self.state is not None else None


Names = Mapping[tuple[str, str], AllowedGlobal]
_HASHABLE = (str, int, Record, type(None))


class _Memo(list[object]):
    """The values that a pickle refers back to. A dictionary would double the memory for the metadata of many
    ranks."""

    def __setitem__(self, index: Any, value: Any) -> None:
        if index == len(self):
            self.append(value)
        elif index < len(self):
            super().__setitem__(index, value)
        # Indices count up in what torch writes. A value at any other index is not stored, and cannot be
        # recalled.


class _Unpickler(_PythonUnpickler):
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        code: _PythonUnpickler.dispatch[code] for name in _OPCODES for code in getattr(pickle, name)
    }

    def __init__(self, data: bytes, names: Names, persistent: Callable[[object], object] | None) -> None:
        super().__init__(io.BytesIO(data))
        self._names, self._persistent, self.memo = names, persistent, _Memo()

    def find_class(self, module: str, name: str) -> AllowedGlobal:
        allowed = self._names.get((module, name))
        if allowed is None:
            raise Refused(
                f"it names `{module}.{name}`, which a checkpoint of tensors does not need; nothing was run"
            )
        return allowed

    def persistent_load(self, pid: object) -> object:
        if self._persistent is None:
            raise Refused("it refers to a storage outside itself")
        return self._persistent(pid)

    def load_newobj(self) -> None:
        arguments, kind = self.stack.pop(), self.stack.pop()
        if not isinstance(kind, AllowedGlobal) or kind.fields is None or arguments != ():
            raise Refused(f"it creates an object of {_describe(kind)}")
        self.append(Record(kind))

    def load_build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, Record) and target.state is None:
            target.set_state(state)
        elif not isinstance(
            target, dict
        ):  # attributes of an OrderedDict, such as the `_metadata` of a state dict, are not used
            raise Refused(f"it sets the state of {_describe(target)}")

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items([key, value])

    def load_setitems(self) -> None:
        self._set_items(self.pop_mark())

    def _set_items(self, values: list[object]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict):
            raise Refused(f"it sets items of {_describe(target)}")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if not isinstance(key, _HASHABLE):
                raise Refused(f"it uses {_describe(key)} as a key")
            target[key] = value

    dispatch |= {
        pickle.NEWOBJ[0]: load_newobj,
        pickle.BUILD[0]: load_build,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
    }


def _describe(value: object) -> str:
    return f"`{value.name}`" if isinstance(value, AllowedGlobal) else f"a {type(value).__name__}"


def load(data: bytes, names: Names, *, persistent: Callable[[object], object] | None = None) -> Any:
    """Return the value in `data`. Raises: Refused for anything but plain data and the names in `names`."""
    try:
        return _Unpickler(data, names, persistent).load()
    except (Refused, FsdpTuneError):  # a signal that ends the command may arrive here
        raise
    except KeyError as error:
        raise Refused(f"it contains the instruction {error}, which plain data does not need") from error
    except Exception as error:
        raise Refused(f"it is damaged ({error})") from error


MAX_PICKLE_BYTES = 64 << 20
MAX_DIRECTORY_BYTES = 256 << 20
_SMALL_PICKLE_BYTES = 512
_END_PIECE_BYTES = 1024
_LOCAL_HEADER = struct.Struct("<4s22xHH")


class ReadableFiles(Protocol):
    """Files by name, read at any position."""

    def read(self, name: str, offset: int, count: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as pickled: its storage, and offset and strides in it (in elements)."""

    dtype: DType
    storage_key: str
    storage_offset: int
    sizes: Shape
    strides: Shape


class Ends:
    """An archive's bytes. Its first and last kilobyte are read at once: they hold all that describes one
    tensor."""

    def __init__(self, files: ReadableFiles, file: str, start: int, length_bytes: int) -> None:
        self.files, self.file, self.start, self.length_bytes = files, file, start, length_bytes
        self.head = files.read(file, start, min(length_bytes, _END_PIECE_BYTES))
        self.tail = files.read(file, start + length_bytes - len(self.head), len(self.head))

    def read(self, at: int, count: int) -> bytes:
        """`count` bytes at `at`, counted from the start of the archive."""
        if at < 0 or count < 0 or at + count > self.length_bytes:
            raise Refused("a part of it reaches beyond its end")
        if at + count <= len(self.head):
            return self.head[at : at + count]
        in_tail = at - (self.length_bytes - len(self.tail))
        if in_tail >= 0:
            return self.tail[in_tail : in_tail + count]
        return self.files.read(self.file, self.start + at, count)


class _Slice:
    """One archive inside a file, as `zipfile` reads it."""

    def __init__(self, ends: Ends) -> None:
        self._ends, self._at = ends, 0

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        at = offset + (0, self._at, self._ends.length_bytes)[whence]
        if at < 0:
            raise OSError("a position before the start")
        self._at = at
        return at

    def read(self, size: int = -1) -> bytes:
        rest = max(0, self._ends.length_bytes - self._at)
        taken = rest if size < 0 else min(size, rest)
        if taken > MAX_DIRECTORY_BYTES:
            raise Refused("its zip directory is damaged")
        data = self._ends.read(self._at, taken)
        self._at += taken
        return data


class MemberRange(NamedTuple):
    """The bytes of one member, from the start of the archive."""

    start: int
    size_bytes: int
    crc: int | None
    """CRC-32; None in an archive without checksums."""


@dataclass(frozen=True, slots=True)
class Archive:
    """The members of one archive; their places count from its start."""

    ends: Ends
    members: dict[str, zipfile.ZipInfo]
    has_checksums: bool

    def data_range(self, name: str) -> MemberRange:
        """Return the bytes of one member. Raises: Refused if it is missing or damaged."""
        member = self.members.get(name)
        if member is None:
            raise Refused(f"it has no member `{name}`")
        local = self.ends.read(member.header_offset, _LOCAL_HEADER.size)
        signature, name_length, extra_length = _LOCAL_HEADER.unpack(local)
        if signature != b"PK\x03\x04":
            raise Refused(f"the header of `{name}` is damaged")
        at = member.header_offset + _LOCAL_HEADER.size + name_length + extra_length
        if at + member.file_size > self.ends.length_bytes:
            raise Refused(f"`{name}` reaches beyond the archive")
        return MemberRange(at, member.file_size, member.CRC if self.has_checksums else None)


def open_archive(files: ReadableFiles, file: str, start: int, length_bytes: int) -> Archive:
    """Read the directory of one archive. Raises: Refused for anything that torch does not write."""
    ends = Ends(files, file, start, length_bytes)
    try:
        with zipfile.ZipFile(cast(IO[bytes], _Slice(ends))) as opened:
            infos, directory_at = opened.infolist(), opened.start_dir
    except (zipfile.BadZipFile, RuntimeError, OSError, ValueError, struct.error) as error:
        raise Refused("it is not a torch.save archive (no intact zip directory at its end)") from error
    members: dict[str, zipfile.ZipInfo] = {}
    for info in infos:
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            raise Refused(f"`{info.filename}` is compressed")
        _, slash, inner = info.filename.partition("/")  # all members are in one folder, named after the file
        if not slash or inner in members or not 0 <= info.header_offset < directory_at:
            raise Refused(f"the member `{info.filename}` is not one that torch writes")
        members[inner] = info
    # Without checksums torch writes zero for all; one zero alone is a checksum like any other.
    return Archive(ends, members, has_checksums=any(member.CRC for member in members.values()))


# ---- data.pkl


def _storage(identifier: object) -> tuple[DType | None, str]:
    """`("storage", class, key, device, elements)` → (dtype, None for untyped; key)."""
    parts = _tuple(identifier)
    if len(parts) != 5 or parts[0] != "storage" or not isinstance(parts[2], str):
        raise Refused("it refers to something that is not a storage")
    kind = parts[1]
    if not isinstance(kind, AllowedGlobal) or not (kind.value is None or isinstance(kind.value, DType)):
        raise Refused("it refers to a storage of an unknown type")
    return kind.value, parts[2]


def _tuple(value: object) -> tuple[Any, ...]:
    """Return a tuple unchanged, and for anything else one that no check accepts."""
    return cast("tuple[object, ...]", value) if isinstance(value, tuple) else (None,)


def _tensor(arguments: tuple[Any, ...], dtype_at: int | None) -> StoredTensor:
    try:
        (dtype, key), offset, *shape = arguments[:4]
        sizes, strides = map(_tuple, shape)
    except (TypeError, ValueError) as error:
        raise Refused("it describes a tensor in an unknown way") from error
    if dtype_at is not None:
        wanted = arguments[dtype_at] if len(arguments) > dtype_at else None
        dtype = wanted.value if isinstance(wanted, AllowedGlobal) else None
    numbers = (offset, *sizes, *strides)
    if (
        not isinstance(dtype, DType)
        or any(type(number) is not int or number < 0 for number in numbers)
        or len(sizes) != len(strides)
    ):
        raise Refused("it describes a tensor in an unknown way")
    return StoredTensor(dtype, key, offset, sizes, strides)


def _parameter(arguments: tuple[object, ...]) -> StoredTensor:
    if not arguments or not isinstance(arguments[0], StoredTensor):
        raise Refused("it describes a parameter in an unknown way")
    return arguments[0]


def _empty_mapping(arguments: tuple[object, ...]) -> dict[object, object]:
    if arguments:
        raise Refused("it fills an OrderedDict in a way that torch does not")
    return {}


def _call(
    module: str, name: str, function: Callable[[tuple[object, ...]], object]
) -> tuple[tuple[str, str], AllowedGlobal]:
    return (module, name), AllowedGlobal(f"{module}.{name}", call=function)


NAMES: dict[tuple[str, str], AllowedGlobal] = {
    **dict(
        [
            _call("torch._utils", "_rebuild_tensor_v2", lambda arguments: _tensor(arguments, None)),
            _call("torch._utils", "_rebuild_tensor_v3", lambda arguments: _tensor(arguments, 6)),
            _call("torch._utils", "_rebuild_parameter", _parameter),
            _call("collections", "OrderedDict", _empty_mapping),
        ]
    ),
    **{
        ("torch", name): AllowedGlobal(f"torch.{name}", value=dtype)
        for name, dtype in (OF_STORAGE | DTYPES).items()
    },
    ("torch.storage", "UntypedStorage"): AllowedGlobal("torch.storage.UntypedStorage"),
}


def read_pickle(archive: Archive) -> object:
    """Return the value in `data.pkl`, with a `StoredTensor` for each tensor."""
    at, size, crc = archive.data_range("data.pkl")
    if size > MAX_PICKLE_BYTES:
        raise Refused(f"its description is {size:,} bytes long")
    data = archive.ends.read(at, size)
    if crc is not None and zlib.crc32(data) != crc:
        raise Refused("the checksum of its description differs: bits have flipped")
    if "byteorder" in archive.members:
        order_at, order_bytes, _ = archive.data_range("byteorder")
        if order_bytes > 8 or archive.ends.read(order_at, order_bytes) != sys.byteorder.encode():
            raise Refused("it was written on a machine of the other byte order")
    return _one_tensor(data) if size < _SMALL_PICKLE_BYTES else load(data, NAMES, persistent=_storage)


@lru_cache(maxsize=1024)
def _one_tensor(data: bytes) -> object:
    """Parse the pickle of one tensor. Cached, since slices of one shape have the same bytes on every rank: do
    not modify the result."""
    return load(data, NAMES, persistent=_storage)


def extent(archive: Archive, tensor: StoredTensor) -> Extent:
    """Return the location of a tensor's elements in the file, checked to be inside their storage."""
    at, size, crc = archive.data_range(f"data/{tensor.storage_key}")
    last = sum((count - 1) * stride for count, stride in zip(tensor.sizes, tensor.strides, strict=True))
    is_empty = 0 in tensor.sizes
    if not is_empty and (tensor.storage_offset + last + 1) * tensor.dtype.item_bytes > size:
        raise Refused(f"a tensor of shape {list(tensor.sizes)} reaches beyond its storage of {size:,} bytes")
    storage_start = archive.ends.start + at
    first_byte = storage_start + tensor.storage_offset * tensor.dtype.item_bytes
    return Extent(archive.ends.file, first_byte, tensor.strides, storage_start, size, crc)
